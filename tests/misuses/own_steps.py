"""Optimizers, schedules and loops of the program's own that are objects of an odd kind: steps with arguments, closures
that are called often, parameters that are stacked, groups that change hands, loops that are generators, and models that
grow, shrink and change their optimizer in the middle."""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

from misuses.case import Family
from misuses.exact import SGD
from misuses.joints import batch, program, stepped
from misuses.loops_of_today import loop, mean
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net

family = Family("steps of one's own")
RESUMED = ("plain", "resumed")
ALL = ("plain", "mixed", "together", "resumed")


def own(title, joints=("plain",), **options):
    return program(family, title, joints, **options)


class Own(torch.optim.Optimizer):
    """A base of the program's own: each class gives ``one`` for a parameter."""

    def __init__(self, params, lr=0.05, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, self.state[p], group)


def with_own(run, kind, build=Net, body=mean, after=None, steps=3, **options):
    return loop(run, build, body=body, after=after, steps=steps, optimizer=kind, optimizer_options=options)


def newton_schulz(m):
    m = m / (m.norm() + 1e-7)
    for _ in range(3):
        m = 1.5 * m - 0.5 * m @ m.mT @ m
    return m


class MuonAndAdam(Own):
    """One object for both: matrices by Muon, the rest by Adam, as a flag of the group says."""

    def one(self, p, state, group):
        if p.dim() == 2:
            m = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - group["momentum"])
            p.sub_(newton_schulz(p.grad.lerp(m, group["momentum"])), alpha=group["lr"])
        else:
            step = state["step"] = state.get("step", 0) + 1
            m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            v = state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
            p.sub_((m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8), alpha=group["lr"] * 0.1)


@own("Muon for matrices and Adam for the rest in one class, the momentum is warmed up in the group (speedrun)", ALL)
def muon_and_adam(run):
    def after(engine, step):
        for group in engine.optimizer.param_groups:
            group["momentum"] = min(0.95, 0.85 + 0.05 * step)

    return with_own(run, MuonAndAdam, after=after, momentum=0.85)


@own("`torch.optim.Muon` over matrices alone, biases are frozen")
def muon_of_torch(run):
    def build():
        net = Net()
        for parameter in net.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return net

    return with_own(run, torch.optim.Muon, build, momentum=0.9)


class Stacking(torch.optim.Optimizer):
    """It stacks all matrices of one shape, and orthogonalises them at once (batched Muon)."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for same in by_shape.values():
                stacked = torch.stack([p.grad for p in same])
                moved = stacked / (stacked.square().mean(0, keepdim=True).sqrt() + 1e-6)
                for p, m in zip(same, moved, strict=True):
                    p.sub_(m, alpha=group["lr"])


@own(
    "matrices of one shape are stacked in the step, their mean square is a norm for all",
    refused={"plain": "one parameter at a time"},
)
def stacked_steps(run):
    return with_own(run, Stacking)


class WithScale(Own):
    """A step that takes an argument beside the closure."""

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)


@own(
    "`optimizer.step(scale=0.5)`: a step with an argument of its own",
    refused={"plain": "takes a closure alone, not scale"},
)
def step_with_argument(run):
    torch.manual_seed(5)
    engine = run.engine(Net(), optimizer=WithScale, optimizer_options={})
    found = []
    for index in range(3):
        mean(engine, index).backward()
        found.append(gradients(engine.module))
        engine.optimizer.step(scale=0.5)
        engine.optimizer.zero_grad()
    return found, values(engine.module)


class Counting(Own):
    """It counts its steps in an attribute, which decides."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        super().step(closure)

    def one(self, p, state, group):
        p.sub_(p.grad, alpha=group["lr"] / self.steps)


@own("the step counts in an attribute of the optimizer, and divides the rate by it", ("plain", "mixed", "together"))
def counts_in_attribute(run):
    return with_own(run, Counting)


class Rotating(Own):
    """Another part of the parameters in each step, by their place in the group (BAdam within the optimizer)."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.turn = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.turn += 1
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None and index % 3 == self.turn % 3:
                    p.sub_(p.grad, alpha=group["lr"])


@own("every third parameter of the group is stepped, in turn", refused={"plain": "one parameter at a time"})
def rotating(run):
    return with_own(run, Rotating)


class Noisy(Own):
    """It has a generator of its own for its noise."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.generator = torch.Generator().manual_seed(1)

    def one(self, p, state, group):
        p.sub_(p.grad + 0.01 * torch.randn(p.shape, generator=self.generator), alpha=group["lr"])


@own("a step draws noise from a generator that the optimizer has", refused={"plain": "one parameter at a time"})
def noisy_steps(run):
    return with_own(run, Noisy)


class Histories(Own):
    """States of an odd kind: a deque of tensors, a list, a nested dict, a tuple."""

    def one(self, p, state, group):
        past = state.setdefault("past", deque(maxlen=2))
        past.append(p.grad.clone())
        nested = state.setdefault("nested", {"sum": torch.zeros_like(p), "count": [0]})
        nested["sum"].add_(p.grad)
        nested["count"][0] += 1
        p.sub_(sum(past) / len(past) + 0.1 * nested["sum"] / nested["count"][0], alpha=group["lr"])


@own("states are a deque of tensors, and a dict of a tensor and a list", ("plain", "mixed", "together"))
def odd_states(run):
    return with_own(run, Histories)


class Factored(Own):
    """States of other shapes and dtypes, which are made anew every second step."""

    def one(self, p, state, group):
        step = state["step"] = state.get("step", 0) + 1
        if p.dim() < 2:
            p.sub_(p.grad, alpha=group["lr"])
            return
        if step % 2:
            state["basis"] = torch.linalg.qr(p.grad.double() @ torch.ones(p.shape[1], 4, dtype=torch.float64).tril())[0]
        low = state["basis"].t().float() @ p.grad
        m = state.setdefault("low", torch.zeros_like(low)).lerp_(low, 0.5)
        p.sub_(state["basis"].float() @ m, alpha=group["lr"])


@own("a basis in float64 is made anew every second step, the moment is of its rank (GaLore's kind)", ALL)
def factored(run):
    return with_own(run, Factored)


class Triggered(Own):
    """The norm of a parameter decides whether it is projected."""

    def one(self, p, state, group):
        p.sub_(p.grad, alpha=group["lr"])
        norm = p.norm()
        if norm > 2:
            p.mul_(2 / norm)


@own("a step projects each weight to a ball (a proximal step)", ALL)
def proximal(run):
    return with_own(run, Triggered)


class SoftThreshold(Own):
    def one(self, p, state, group):
        z = p - group["lr"] * p.grad
        p.copy_(z.sign() * (z.abs() - group["lr"] * group["l1"]).clamp(min=0))


@own("proximal L1: a soft threshold after each step; zeros are counted; the strength is raised in the group", ALL)
def soft_threshold(run):
    def after(engine, step):
        engine.optimizer.param_groups[0]["l1"] *= 2
        return sum(int((p == 0).sum()) for p in engine.module.parameters())

    return with_own(run, SoftThreshold, after=after, l1=0.05)


class Mirror(Own):
    def one(self, p, state, group):
        dual = state.setdefault("dual", p.sinh())
        dual.sub_(p.grad, alpha=group["lr"])
        p.copy_(dual.asinh())


@own("mirror descent: the weight is a function of a dual that lives in the state", ALL)
def mirror(run):
    return with_own(run, Mirror)


class Averaging(Own):
    """Weights and their average change places by methods of the optimizer."""

    def one(self, p, state, group):
        p.sub_(p.grad, alpha=group["lr"])
        state.setdefault("average", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def swap(self):
        for group in self.param_groups:
            for p in group["params"]:
                kept = p.clone()
                p.copy_(self.state[p]["average"])
                self.state[p]["average"].copy_(kept)


@own("weights and averages in the states change places around an evaluation, by a method of the optimizer", RESUMED)
def averages_of_states_swapped(run):
    def after(engine, step):
        engine.optimizer.swap()
        with torch.no_grad():
            found = mean(engine, 90).item()
        engine.optimizer.swap()
        return found

    return with_own(run, Averaging, after=after)


@own(
    "a closure is called three times by a step of the program's own (a line search)",
    refused={"plain": "one parameter at a time|closure"},
)
def closure_often(run):
    class Searching(Own):
        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                first = closure()
            kept = [p.clone() for g in self.param_groups for p in g["params"]]
            for scale in (1.0, 0.5):
                for p, k in zip((p for g in self.param_groups for p in g["params"]), kept, strict=True):
                    p.copy_(k - scale * 0.05 * p.grad)
                with torch.enable_grad():
                    if closure() < first:
                        break
            return first

    torch.manual_seed(5)
    engine = run.engine(Net(), optimizer=Searching, optimizer_options={})

    def closure():
        engine.optimizer.zero_grad()
        loss = mean(engine, 0)
        loss.backward()
        return loss

    return [engine.optimizer.step(closure).item() for _ in range(2)], values(engine.module)


# Groups and schedules.


@own("two groups exchange a parameter before each step: `a['params'][0], b['params'][0] = ...`")
def groups_exchange(run):
    torch.manual_seed(5)
    net = Net()
    engine = run.place.wrap(
        net,
        optimizer=Exact(
            [
                {"params": list(net.blocks.parameters()), "lr": 0.05},
                {"params": [*net.first.parameters(), *net.last.parameters()], "lr": 0.01},
            ],
            momentum=0.9,
        ),
    )
    found = []
    for index in range(3):
        mean(engine, index).backward()
        one, two = engine.optimizer.param_groups
        one["params"][0], two["params"][0] = two["params"][0], one["params"][0]
        found.append(stepped(engine))
    return found, values(net)


@own("a schedule that is a generator: `for lr in schedule: ...`, with `send` of the loss (a plateau by hand)", ALL)
def schedule_by_generator(run):
    def plateau():
        rate, best = 0.05, math.inf
        while True:
            loss = yield rate
            rate, best = (rate, loss) if loss < best else (rate * 0.5, best)

    rates = plateau()
    next(rates)
    return loop(run, body=mean, after=lambda e, s: e.optimizer.param_groups[0].update(lr=rates.send(1.0 / (1 + s % 2))))


@own("a rate that is an object with `__float__` and arithmetic, changed by the program outside", ("plain",))
def rate_object(run):
    class Rate(float):
        def __mul__(self, other):
            return float(self) * other

        __rmul__ = __mul__

    def after(engine, step):
        engine.optimizer.param_groups[0]["lr"] = Rate(0.05 / (step + 1))

    return loop(run, body=mean, after=after)


@own(
    "`param_groups` is iterated while `LambdaLR`, `SequentialLR` and a subclass of `float` meet; state dicts in between"
)
def schedules_of_schedules(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    optimizer, found = engine.optimizer, []
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
    rest = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [2])
    for index in range(5):
        mean(engine, index).backward()
        found.append(stepped(engine))
        both.step()
        state = copy.deepcopy(both.state_dict())
        both.load_state_dict(state)
        found.append(optimizer.param_groups[0]["lr"])
    return found, values(engine.module)


# Loops of a kind.


@own(
    "the loop is a generator: the program sends it batches and gets losses, two of them share one engine in turn",
    ("plain", "mixed"),
)
def loops_by_generators(run):
    torch.manual_seed(5)
    engine = run.engine(Net())

    def trainer(shift):
        index = yield
        while True:
            loss = mean(engine, index + shift)
            loss.backward()
            index = yield loss.item()

    one, two = trainer(0), trainer(20)
    next(one), next(two)
    found = []
    for index in range(3):
        found += [one.send(index), two.send(index), stepped(engine)]
    return found, values(engine.module)


@own(
    "losses are lazy, from a generator behind `itertools.tee`; a step at every second",
    ("plain", "mixed"),
)
def lazy_losses(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    losses, copies = itertools.tee(mean(engine, i) for i in range(6))
    found = []
    for number, (loss, same) in enumerate(zip(losses, copies, strict=True)):
        assert loss is same
        loss.backward()
        found.append(loss.item())
        if number % 2:
            found.append(stepped(engine))
    return found, values(engine.module)


@own("`functools.reduce` over blocks, and over micro-batches: one loss of all, one backward", ("plain", "mixed"))
def reduced(run):
    import functools

    def body(engine, index):
        model = engine.module
        outs = (
            functools.reduce(lambda x, block: block(x), [model.first, *model.blocks, model.last], batch(index + k))
            for k in range(3)
        )
        return functools.reduce(lambda a, b: a + b, (out.square().mean() for out in outs))

    return loop(run, body=body, each=1)


@own("a recursive loop: each call trains a batch and calls itself with the next; gradients are stepped on the way back")
def recursive_loop(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []

    def go(index):
        if index == 4:
            return
        loss = mean(engine, index)
        go(index + 1)
        loss.backward()
        found.append(loss.item())

    go(0)
    found.append(stepped(engine))
    return found, values(engine.module)


@own("the loss of the last step is added to this one's as a number, an exponential average scales it", ALL)
def scaled_by_history(run):
    history = []

    def body(engine, index):
        loss = mean(engine, index)
        scale = 1 / (0.1 + sum(history[-2:], 0.0)) if history else 1.0
        return loss * scale

    def after(engine, step):
        history.append(0.5 + 0.1 * step)

    return loop(run, body=body, after=after)


@own(
    "a context manager of the loop's freezes all but one block, drawn by a generator (LISA as a context)",
    ("plain", "mixed"),
)
def frozen_in_context(run):
    import contextlib
    import random

    chooser = random.Random(7)

    @contextlib.contextmanager
    def alone(model):
        chosen = chooser.randrange(5)
        for number, block in enumerate(model.blocks):
            block.requires_grad_(number == chosen)
        try:
            yield
        finally:
            model.blocks.requires_grad_(True)

    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(4):
        with alone(engine.module):
            mean(engine, index).backward()
            found.append(stepped(engine))
    return found, values(engine.module)


@own("speculative steps: a step is taken on a deep copy in plain torch first, and in the engine if the copy got better")
def tried_on_a_copy(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(4):
        trial = copy.deepcopy(engine.module)
        optimizer = Exact(trial.parameters(), lr=0.05)
        before = trial(batch(index)).square().mean()
        before.backward()
        optimizer.step()
        with torch.no_grad():
            better = trial(batch(50)).square().mean() < engine(batch(50)).square().mean()
        mean(engine, index).backward()
        if better:
            found.append(stepped(engine))
        else:
            engine.optimizer.zero_grad()
        found.append(bool(better))
    return found, values(engine.module)


@own("branches: three state dicts grow from one, each takes two steps, the best is loaded and goes on (tree search)")
def tree_of_states(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for level in range(2):
        root = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
        leaves = []
        for branch in range(3):
            engine.module.load_state_dict(root[0])
            engine.optimizer.load_state_dict(copy.deepcopy(root[1]))
            for step in range(2):
                mean(engine, 10 * level + 3 * branch + step).backward()
                stepped(engine)
            with torch.no_grad():
                leaves.append(
                    (
                        mean(engine, 99).item(),
                        branch,
                        copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict())),
                    )
                )
        best = min(leaves, key=lambda leaf: leaf[:2])
        engine.module.load_state_dict(best[2][0])
        engine.optimizer.load_state_dict(copy.deepcopy(best[2][1]))
        found.append([leaf[0] for leaf in leaves])
    return found, values(engine.module)


@own(
    "an optimizer's state dict is loaded, and loaded again after a step: its moments have moved in PyTorch",
    differs={"plain": "what `load_state_dict` was given stays as it was"},
)
def loaded_states_move(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    mean(engine, 0).backward()
    stepped(engine)
    kept, found = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict())), []
    for _ in range(3):
        engine.module.load_state_dict(kept[0])
        engine.optimizer.load_state_dict(kept[1])
        mean(engine, 1).backward()
        stepped(engine)
        with torch.no_grad():
            found.append(mean(engine, 99).item())
    return found


# Models that change.


@own("a vocabulary grows: unwrapped, rows are added to the embedding and the head, momentum is padded, wrapped again")
def vocabulary_grows(run):
    class Words(nn.Module):
        def __init__(self, size):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.blocks = nn.Embedding(size, WIDTH), nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, size)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def trained(engine, steps, size):
        found = []
        for step in range(steps):
            tokens = torch.randint(size, (16,), generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(engine(tokens), tokens.roll(1))
            loss.backward()
            found.append((loss.item(), stepped(engine)))
        return found

    engine = run.engine(Words(20))
    found = trained(engine, 2, 20)
    state = engine.optimizer.state_dict()["state"]
    old = {n: state[i]["momentum_buffer"].clone() for i, (n, _) in enumerate(engine.module.named_parameters())}
    model = engine.unwrap()
    if run.place.has_engine:
        run.place.left.remove(engine)
    grown = Words(28)
    with torch.no_grad():
        for new, old_value in zip(grown.parameters(), model.parameters(), strict=True):
            new[: len(old_value)] = old_value
    engine = run.engine(grown)
    for name, parameter in engine.module.named_parameters():
        buffer = torch.zeros(parameter.shape)
        buffer[: len(old[name])] = old[name]
        engine.optimizer.state[parameter] = {"momentum_buffer": buffer}
    return found, trained(engine, 2, 28), values(engine.module)


@own("layers are merged: two blocks are averaged into one after two steps, the model is unwrapped and wrapped again")
def layers_merged(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(2):
        mean(engine, index).backward()
        found.append(stepped(engine))
    model = engine.unwrap()
    if run.place.has_engine:
        run.place.left.remove(engine)
    with torch.no_grad():
        for one, two in zip(model.blocks[1].parameters(), model.blocks[2].parameters(), strict=True):
            one.add_(two).mul_(0.5)
    del model.blocks[2]
    engine = run.engine(model)
    for index in range(2):
        mean(engine, index).backward()
        found.append(stepped(engine))
    return found, values(engine.module)


@own("rows die and grow (RigL): the mask is a buffer, gradients of dead rows are kept for growth, momentum is cut", ALL)
def rows_die_and_grow(run):
    class Masked(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", (torch.arange(WIDTH) % 4 > 0).float())

        def forward(self, x):
            return x + self.down(torch.tanh(F.linear(x, self.up.weight * self.mask[:, None], self.up.bias)))

    def after(engine, step):
        with torch.no_grad():
            for block in engine.module.blocks:
                alive = block.up.weight.abs().sum(1)
                dead = (block.mask == 0).nonzero()[:2, 0]
                least = torch.where(block.mask > 0, alive, math.inf).topk(len(dead), largest=False).indices
                block.mask[least] = 0
                block.mask[dead] = 1
                block.up.weight[dead] = 0.01

    return loop(run, lambda: Net(Masked), body=mean, after=after)


@own(
    "the optimizer is exchanged for another class in the middle: closed, the same weights in a new engine",
    ("plain", "mixed"),
)
def optimizer_exchanged(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(2):
        mean(engine, index).backward()
        found.append(stepped(engine))
    state = copy.deepcopy(engine.module.state_dict())
    engine.close()
    if run.place.has_engine:
        run.place.left.remove(engine)
    net = Net()
    net.load_state_dict(state)
    engine = run.engine(net, optimizer=SoftThreshold, optimizer_options={"l1": 0.01})
    for index in range(2):
        mean(engine, index).backward()
        found.append(stepped(engine))
    return found, values(engine.module)


@own(
    "an EMA that is a second engine without an optimizer, moved by `lerp_` over both `named_parameters`",
    ("plain", "mixed"),
)
def average_in_an_engine(run):
    torch.manual_seed(5)
    slow = run.place.wrap(Net(), **{**SGD, "lr": 0.0})

    def after(engine, step):
        with torch.no_grad():
            for (_, s), (_, f) in zip(slow.module.named_parameters(), engine.module.named_parameters(), strict=True):
                s.lerp_(f, 0.3)
            return slow(batch(70)).sum().item()

    found = loop(run, body=mean, after=after)
    return found, values(slow.module)


@own("weights are snapped to a grid after each step, what is lost goes into the next gradient (error feedback)", ALL)
def snapped(run):
    lost = {}

    def before(engine, step):
        for name, parameter in engine.module.named_parameters():
            if name in lost:
                parameter.grad.add_(lost[name], alpha=-0.1)

    def after(engine, step):
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                snap = (parameter * 64).round() / 64
                lost[name] = parameter - snap
                parameter.copy_(snap)

    return loop(run, body=mean, before=before, after=after)


@own("gradients are sorted, cut to the top tenth, and the rest is a residual (deep gradient compression)", ALL)
def compressed(run):
    residual = {}

    def before(engine, step):
        for name, parameter in engine.module.named_parameters():
            whole = parameter.grad + residual.get(name, 0)
            flat = whole.flatten()
            kept = torch.zeros_like(flat)
            top = flat.abs().topk(max(1, flat.numel() // 10)).indices
            kept[top] = flat[top]
            residual[name] = (flat - kept).view_as(whole)
            parameter.grad.copy_(kept.view_as(whole))

    return loop(run, body=mean, before=before)


@own(
    "a learning rate finder within a `fork_rng`, everything restored; then half of the best rate trains",
    ("plain", "mixed"),
)
def finder_in_a_fork(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    kept = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
    found = []
    with torch.random.fork_rng():
        for step in range(4):
            engine.optimizer.param_groups[0]["lr"] = 0.01 * 3**step
            loss = mean(engine, int(torch.randint(9, ())))
            loss.backward()
            found.append((loss.item(), stepped(engine)))
    engine.module.load_state_dict(kept[0])
    engine.optimizer.load_state_dict(kept[1])
    for index in range(2):
        mean(engine, index).backward()
        found.append(stepped(engine))
    return found, values(engine.module), torch.rand(1)


@own(
    "a batch that is too large is halved by a retry that catches its own `MemoryError` in a forward hook",
    ("plain", "mixed"),
)
def halved_by_recursion(run):
    net = Net()

    def limit(module, args):
        if len(args[0]) > 80:
            raise MemoryError("simulated")

    net.blocks[3].register_forward_pre_hook(limit)

    def train(engine, x, share):
        try:
            (engine(x).square().mean() * share).backward()
        except MemoryError:
            train(engine, x[: len(x) // 2], share / 2)
            train(engine, x[len(x) // 2 :], share / 2)

    torch.manual_seed(5)
    engine = run.engine(net)
    found = []
    for index in range(3):
        train(engine, batch(index), 1.0)
        found.append(stepped(engine))
    return found, values(net)
