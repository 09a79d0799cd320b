"""Programs that are put together: three kinds of blocks and four habits of a loop. Each kind meets each habit, and
each habit each other one. What each of them does alone, other families have."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import random
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.joints import batch, program
from misuses.kinds_of_blocks import KINDS, NOT_SAVED
from misuses.place import gradients
from misuses.strangers import WIDTH, Block

family = Family("composed")

JOINTS = (
    "plain",
    "recomputed",
    "over the tiers",
    "mixed",
    "together",
    "together, over the tiers",
    "resumed, recomputed",
)


class Net(nn.Module):
    """Two blocks of each given kind, so that they are units, between plain ones."""

    def __init__(self, kinds):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        a, b, c = (KINDS.get(kind, Block) for kind in kinds)
        self.blocks = nn.ModuleList(make() for make in (a, Block, b, c, Block, a, b, c))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Habit:
    """What a loop does beside forward, backward and step. Most habits do one of these."""

    model: nn.Module
    forward_is_its_own = False
    """None: it is not, and may not be another's."""
    micro_batches = 2

    def build(self, model):
        """Before the engine is made."""

    def attach(self, engine):
        """To a model that has just been built."""
        self.engine, self.model = engine, engine.module

    def begin(self):
        """Once, after that."""

    def around_forward(self):
        return contextlib.nullcontext()

    def around_backward(self):
        return contextlib.nullcontext()

    def batch(self, x):
        return x

    def forward(self, x):
        raise NotImplementedError

    def loss(self, loss, x, y):
        return loss

    def backward(self, loss, next):
        next(loss)

    def between(self, step):
        """After the last backward, before the step."""

    def after(self, step):
        """After the step. What it gives is compared."""


HABITS: dict[str, type[Habit]] = {}


def habit(told):
    def add(made):
        HABITS[told] = made
        return made

    return add


def learnt(model):
    """All but frozen weights, which a class may keep in another form."""
    weights = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: value.detach().clone() for name, value in [*weights, *model.named_buffers()]}


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


# Gradients.


@habit("clipping by value")
class ByValue(Habit):
    def between(self, step):
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)


@habit("clipping by the largest")
class ByLargest(Habit):
    def between(self, step):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01, norm_type=float("inf"))


@habit("gradients get noise")
class Noise(Habit):
    def between(self, step):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p), alpha=1e-3)


@habit("a gradient is dropped, another one assigned")
class Assigned(Habit):
    def between(self, step):
        weights = trained(self.model)
        weights[step % len(weights)].grad = None
        other = weights[-1 - step % len(weights)]
        other.grad = torch.sign(other.detach()) * 1e-2


@habit("`zero_grad` leaves zeros")
class Zeros(Habit):
    def after(self, step):
        self.engine.optimizer.zero_grad(set_to_none=False)


@habit("hooks on weights scale their gradients")
class Scaled(Habit):
    def attach(self, engine):
        super().attach(engine)
        for p in trained(self.model)[::3]:
            p.register_hook(lambda gradient: gradient * 0.5)


@habit("post-accumulate hooks round to bf16")
class Rounded(Habit):
    def attach(self, engine):
        super().attach(engine)
        for p in trained(self.model)[::2]:
            p.register_post_accumulate_grad_hook(self.round)

    @staticmethod
    def round(p):
        p.grad.copy_(p.grad.bfloat16())


@habit("a graph goes backward twice")
class Twice(Habit):
    def backward(self, loss, next):
        (loss * 0.5).backward(retain_graph=True)
        next(loss)


@habit("the input's gradient is asked for first")
class Saliency(Habit):
    def batch(self, x):
        return x.clone().requires_grad_()

    def loss(self, loss, x, y):
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss * (1 + slope.abs().sum())


@habit("gradients of some weights are asked for first")
class Asked(Habit):
    def loss(self, loss, x, y):
        found = torch.autograd.grad(loss, trained(self.model)[1::4], retain_graph=True, allow_unused=True)
        return loss / (1 + sum(g.abs().max() for g in found if g is not None))


@habit("two tasks, their gradients projected and assigned (PCGrad)")
class Projected(Habit):
    def backward(self, loss, next):
        weights = trained(self.model)
        one = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        other = torch.autograd.grad(loss.square() + loss.sin(), weights, allow_unused=True)
        for p, a, b in zip(weights, one, other, strict=True):
            if a is None:
                continue
            dot = (a * b).sum()
            a = a - torch.clamp(dot, max=0) / (b * b).sum().clamp(min=1e-12) * b
            p.grad = a + b if p.grad is None else p.grad + a + b


@habit("`backward(inputs=...)` of every other weight")
class Inputs(Habit):
    def backward(self, loss, next):
        loss.backward(inputs=trained(self.model)[::2])


# Weights.


@habit("weights are moved through `.data`")
class Moved(Habit):
    def after(self, step):
        for p in trained(self.model)[::2]:
            p.data.mul_(0.99)
        self.model.blocks[1].up.weight.data[step] = 0.01


@habit("a block is averaged with another")
class Merged(Habit):
    def after(self, step):
        with torch.no_grad():
            for p, q in zip(trained(self.model.blocks[1]), trained(self.model.blocks[4]), strict=False):
                p.lerp_(q, 0.25)


@habit("an average of weights is swapped in for an evaluation")
class Averaged(Habit):
    def begin(self):
        self.shadow = [p.detach().clone() for p in trained(self.model)]

    def after(self, step):
        weights = trained(self.model)
        if len(weights) != len(self.shadow):  # some are frozen in this step
            return None
        for p, average in zip(weights, self.shadow, strict=True):
            average.lerp_(p.detach(), 0.3)
        kept = [p.detach().clone() for p in weights]
        with torch.no_grad():
            for p, average in zip(weights, self.shadow, strict=True):
                p.copy_(average)
            self.model.eval()
            found = self.model(batch(99)).sum()
            self.model.train()
            for p, value in zip(weights, kept, strict=True):
                p.copy_(value)
        return found


@habit("a deep copy is trained for a step")
class Copied(Habit):
    def after(self, step):
        twin = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.01)
        twin(batch(50 + step)).square().mean().backward()
        optimizer.step()
        return learnt(twin)


@habit("Lookahead")
class Slow(Habit):
    def begin(self):
        self.slow = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def after(self, step):
        weights = dict(self.model.named_parameters())
        for name, slow in self.slow.items() if step % 2 else ():
            slow.add_(weights[name].data - slow, alpha=0.5)
            weights[name].data.copy_(slow)


@habit("sharpness-aware: up the gradient, again, and down")
class Sharp(Habit):
    def between(self, step):
        moves = [(p, 0.01 * p.grad.sign()) for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, move in moves:
                p.add_(move)
        self.engine.optimizer.zero_grad()
        self.model(batch(70 + step)).square().mean().backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)


@habit("a block is frozen, another in each step")
class Frozen(Habit):
    step = 0

    def attach(self, engine):
        super().attach(engine)
        self.freeze()

    def after(self, step):
        self.step = step + 1
        self.freeze()

    def freeze(self):
        for index, block in enumerate((self.model.blocks[1], self.model.blocks[4])):
            block.requires_grad_(self.step % 2 != index)


@habit("state dicts go back after a bad step")
class Rolled(Habit):
    def after(self, step):
        if step == 0:
            self.kept = copy.deepcopy((self.model.state_dict(), self.engine.optimizer.state_dict()))
        if step == 2:
            self.model.load_state_dict(self.kept[0])
            self.engine.optimizer.load_state_dict(self.kept[1])


@habit("momentum is read and scaled")
class Momentum(Habit):
    def after(self, step):
        found = []
        for p in trained(self.model)[::5]:
            state = self.engine.optimizer.state[p]
            if state.get("momentum_buffer") is not None:
                found.append(state["momentum_buffer"].abs().sum().item())
                state["momentum_buffer"].mul_(0.5)
        return found


@habit("everything is saved to bytes and read back")
class Saved(Habit):
    def after(self, step):
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.engine.optimizer.state_dict()), file)
        file.seek(0)
        weights, states = torch.load(file)
        self.model.load_state_dict(weights)
        self.engine.optimizer.load_state_dict(states)


@habit("rates change with momentum")
class Rates(Habit):
    def after(self, step):
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 0.7
            group["momentum"] = 0.5 + 0.1 * step


# Ties.


@habit("weights of blocks are tied")
class Tied(Habit):
    def build(self, model):
        model.blocks[4].down.weight = model.blocks[1].down.weight
        model.blocks[4].up.bias = model.last.bias


@habit("a block is used twice")
class Shared(Habit):
    def build(self, model):
        model.blocks.append(model.blocks[2])


@habit("the head is the first layer")
class Head(Habit):
    def build(self, model):
        model.last.weight = model.first.weight


# Losses.


@habit("a penalty of weights")
class Decays(Habit):
    micro_batches = 1  # a weight that is used outside of its module, too, has a gradient of two sums
    forward_is_its_own = None

    def loss(self, loss, x, y):
        return loss + 1e-3 * sum(self.model.blocks[index].up.weight.square().sum() for index in (1, 4))


@habit("a penalty of products of weights")
class Orthogonal(Habit):
    micro_batches = 1
    forward_is_its_own = None

    def loss(self, loss, x, y):
        weight = self.model.blocks[1].up.weight.clone()
        return loss + 1e-3 * (torch.matmul(weight, weight.t()) - torch.eye(WIDTH)).square().sum()


@habit("features by forward hooks are in the loss")
class Features(Habit):
    def attach(self, engine):
        super().attach(engine)
        self.seen = threading.local()
        for block in self.model.blocks[:3]:
            block.register_forward_hook(self.keep)

    def keep(self, block, inputs, output):
        self.seen.list = [*getattr(self.seen, "list", []), output]

    def loss(self, loss, x, y):
        loss = loss + sum(0.1 * each.abs().mean() for each in self.seen.list)
        self.seen.list = []
        return loss

    def after(self, step):
        self.seen.list = []


@habit("a teacher that is a deep copy of the beginning")
class Teacher(Habit):
    def begin(self):
        self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)

    def loss(self, loss, x, y):
        with torch.no_grad():
            target = self.teacher(x.detach())
        return loss + F.mse_loss(y, target * 0.5)


@habit("a scaled loss and `GradScaler`")
class Scaler(Habit):
    def loss(self, loss, x, y):
        return loss * 1024.0

    def between(self, step):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.div_(1024.0)


# Forwards.


@habit("two passes in one loss")
class Passes(Habit):
    forward_is_its_own = True

    def forward(self, x):
        return self.engine(x) + self.engine(x * 0.5)


@habit("each block is checkpointed by the loop")
class Around(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.model.last(x)


@habit("pairs of blocks are checkpointed with reentrance")
class Pairs(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        for index in range(0, len(self.model.blocks), 2):
            x = checkpoint(self.pair, index, x, use_reentrant=True)
        return self.model.last(x)

    def pair(self, index, x):
        for block in self.model.blocks[index : index + 2]:
            x = block(x)
        return x


@habit("layers are dropped by a draw")
class Layers(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        for block in self.model.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return self.model.last(x)


@habit("the upper half goes backward first, by hand")
class Halves(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        for block in self.model.blocks[:2]:
            x = block(x)
        cut = x.detach().requires_grad_()
        y = cut
        for block in self.model.blocks[2:]:
            y = block(y)
        y = self.model.last(y)
        y.square().mean().backward()
        return x + (cut.grad - x).detach() + 0 * (x * cut.grad).sum()


@habit("`functional_call` with moved weights")
class Functional(Habit):
    forward_is_its_own = True

    def forward(self, x):
        moved = {name: p * 1.01 for name, p in self.model.named_parameters() if "blocks.1" in name or "last" in name}
        return torch.func.functional_call(self.model, moved, (x,))


@habit("autocast around the forward")
class Cast(Habit):
    def around_forward(self):
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@habit("an evaluation between forward and backward")
class Evaluated(Habit):
    def loss(self, loss, x, y):
        with torch.no_grad():
            return loss * (1 + self.engine(x.detach()[:8]).mean().abs())


@habit("an evaluation in `inference_mode` after the step")
class Inferred(Habit):
    def after(self, step):
        self.model.eval()
        with torch.inference_mode():
            found = self.engine(batch(40))
        self.model.train()
        return found.clone()


@habit("`save_on_cpu` around the forward")
class Kept(Habit):
    def around_forward(self):
        return torch.autograd.graph.save_on_cpu()


@habit("hooks of saved tensors around the forward that copy")
class Clones(Habit):
    def around_forward(self):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


@habit("anomaly detection")
class Anomaly(Habit):
    def around_forward(self):
        return torch.autograd.detect_anomaly(check_nan=True)

    def around_backward(self):
        return torch.autograd.detect_anomaly(check_nan=True)


@habit("a pre-hook that changes the input, a hook that changes the output")
class Changes(Habit):
    def attach(self, engine):
        super().attach(engine)
        self.model.blocks[1].register_forward_pre_hook(lambda block, inputs: (inputs[0] * 0.9,))
        self.model.blocks[3].register_forward_hook(lambda block, inputs, output: output + 0.1 * inputs[0])


@habit("a full backward hook that scales")
class BackwardHook(Habit):
    def attach(self, engine):
        super().attach(engine)
        for block in (self.model.blocks[2], self.model.blocks[3]):
            block.register_full_backward_hook(lambda block, inputs, outputs: (inputs[0] * 0.8,))


# What goes wrong.


class Stop(Exception):
    pass


@habit("a backward is broken off, and tried again")
class Broken(Habit):
    def after(self, step):
        def stop(gradient):
            raise Stop

        y = self.model.first(batch(60 + step))
        for index, block in enumerate(self.model.blocks):
            y = block(y)
            if index == 2:
                y.register_hook(stop)
        with contextlib.suppress(Stop):
            y.square().mean().backward()
        self.engine.optimizer.zero_grad()


@habit("a forward is broken off, and training goes on")
class Fails(Habit):
    def after(self, step):
        def stop(block, inputs):
            raise Stop

        handle = self.model.blocks[3].register_forward_pre_hook(stop)
        with contextlib.suppress(Stop):
            self.engine(batch(60 + step))
        handle.remove()


@habit("a graph is thrown away without a backward")
class Thrown(Habit):
    def after(self, step):
        return self.engine(batch(30)).square().mean().item()


@habit("a graph of the last step is held")
class Held(Habit):
    def loss(self, loss, x, y):
        self.held = loss
        return loss


@habit("weights and gradients are read by a thread")
class Reader(Habit):
    def between(self, step):
        self.read()

    def after(self, step):
        return self.read()

    def read(self):
        found = []
        thread = threading.Thread(
            target=lambda: found.extend(p.detach().abs().max().item() for p in self.model.parameters())
        )
        thread.start()
        thread.join()
        return found


@habit("unwrapped and wrapped again in the middle")
class Again(Habit):
    pass


def play(run, kinds, habits):
    """Three steps of a loop with these habits, over two micro-batches each."""
    again = any(isinstance(each, Again) for each in habits)

    def build():
        model = Net(kinds)
        for each in habits:
            each.build(model)
        return model

    engine = run.engine(build())
    for each in habits:
        each.attach(engine)
    for each in habits:
        each.begin()
    count = min(each.micro_batches for each in habits)
    owner = next((each for each in habits if each.forward_is_its_own), None)
    found = []
    for step in range(3):

        def body(index, engine=engine):
            x = batch(index)
            for each in habits:
                x = each.batch(x)
            with contextlib.ExitStack() as stack:
                for each in habits:
                    stack.enter_context(each.around_forward())
                y = engine(x) if owner is None else owner.forward(x)
            loss = y.float().square().mean()
            for each in habits:
                loss = each.loss(loss, x, y)
            backward = torch.Tensor.backward
            for each in habits:
                backward = lambda loss, each=each, inner=backward: each.backward(loss, inner)  # noqa: E731
            with contextlib.ExitStack() as stack:
                for each in habits:
                    stack.enter_context(each.around_backward())
                backward(loss)
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1][:count], body)
        for each in habits:
            each.between(step)
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        found += [each.after(step) for each in habits]
        if step == 1 and "resumed" in run.joint:
            before = engine
            engine = run.resume(before, build)
            for each in habits if engine is not before else ():
                each.attach(engine)
        if step == 1 and again and run.place.has_engine:
            states = engine.optimizer.state_dict()
            model = engine.unwrap()
            engine.close()
            run.place.left.remove(engine)
            engine = run.engine(model)
            engine.optimizer.load_state_dict(states)
            for each in habits:
                each.engine, each.model = engine, engine.module
    return found, learnt(engine.module)


def meetings():
    """Programs of three kinds and four habits: each pair of habits, and of a habit and a kind, is in one."""
    draw = random.Random(1)
    names = [*KINDS, *HABITS]
    pairs = [pair for pair in itertools.combinations(names, 2) if pair[1] in HABITS and fits(*pair)]
    left = dict.fromkeys(map(frozenset, pairs))
    while left:
        both = sorted(next(iter(left)), key=names.index)
        while len(both) < 7:
            of = KINDS if len(KINDS.keys() & both) < 3 else HABITS
            more = [
                name for name in draw.sample([*of], 12) if name not in both and all(fits(name, one) for one in both)
            ]
            both.append(max(more, key=lambda name: sum(frozenset((name, one)) in left for one in both)))
        yield [name for name in both if name in KINDS], [name for name in both if name in HABITS]
        for pair in itertools.combinations(both, 2):
            left.pop(frozenset(pair), None)


def fits(one, other):
    """Not two forwards in one loop."""
    own = [HABITS[name].forward_is_its_own for name in (one, other) if name in HABITS]
    return not (len(own) == 2 and any(own) and False not in own)


TWO_SUMS = {"a graph goes backward twice"}, {"a penalty of weights", "a penalty of products of weights"}
"""A weight that is used outside of its module as well, and has its gradient in several parts."""
NOT_FINITE, COPIES_THE_ENGINE, REFUSED = 101, 114, {203: "has hooks and is frozen.*freeze it then"}
"""Programs whose gradients are NaN in PyTorch as well; whose hooks know the engine, and are copied with the model; and
that the engine refuses."""

for number, (kinds, habits) in enumerate(itertools.islice(meetings(), 253)):
    if all(some & set(habits) for some in TWO_SUMS) or number in (NOT_FINITE, COPIES_THE_ENGINE):
        continue
    joint = JOINTS[number % len(JOINTS)]
    if NOT_SAVED & set(kinds):
        joint = joint.replace("resumed, ", "")

    def body(run, kinds=kinds, habits=habits):
        return play(run, kinds, [HABITS[name]() for name in habits])

    body.__name__ = f"composed_{number}"
    told = f"blocks: {', '.join(kinds)}; the loop: {', '.join(habits)}"
    program(family, told, (joint,), {joint: REFUSED[number]} if number in REFUSED else None)(body)
