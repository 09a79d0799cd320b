"""Optimizer states, options and gradients that a program takes apart: states that change places, entries of the user's
beside them, steps of each parameter, numbers that a gradient is multiplied by, averages and two-step loops."""

from __future__ import annotations

import collections
import copy
import io
import types

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from misuses.case import Family
from misuses.groups_and_rates import ADAM, ExactAdam, rates
from misuses.place import gradients, values
from misuses.strangers import Net, batch

family = Family("states by hand")


def both_kinds(title, *, norms=False, **options):
    """A case by the kernel, to rounding, and one by torch's own arithmetic, to the bit, if it looks at no ``norms``."""

    def add(body):
        for kind, name in ((torch.optim.AdamW, "kernel"), (ExactAdam, "torch")):

            def case(place, kind=kind):
                net = Net()
                return body(place.wrap(net, optimizer=kind(net.parameters(), **ADAM)), net)

            case.__name__ = f"{body.__name__}_{name}"
            words = f"{title} ({'with' if name == 'kernel' else 'without'} a kernel)"
            (family.works if name == "kernel" or norms else family.same_bits)(words, **options)(case)
        return body

    return add


def steps(engine, count=3, first=0, after=None, before=None):
    """Some steps by PyTorch's loop; the losses."""
    found = []
    for step in range(first, first + count):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        if before is not None:
            found.append(before(step))
        engine.optimizer.step()
        if after is not None:
            found.append(after(step))
        found.append(loss.item())
    return found


def told(state):
    """A parameter's states, as values."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


# States.


@both_kinds("states of two parameters change places: `state[a], state[b] = state[b], state[a]`")
def states_exchanged(engine, net):
    state = engine.optimizer.state

    def after(step):
        if step == 1:
            a, b = net.blocks[0].up.weight, net.blocks[4].down.weight
            state[a], state[b] = state[b], state[a]

    return steps(engine, 4, after=after), told(state[net.blocks[0].up.weight]), values(net)


@both_kinds("a parameter takes over a deep copy of another one's states, with another step")
def states_transplanted(engine, net):
    state = engine.optimizer.state

    def after(step):
        if step == 1:
            taken = copy.deepcopy(state[net.first.weight])
            taken["step"] = torch.tensor(11.0)
            state[net.last.weight] = taken

    return steps(engine, 4, after=after), told(state[net.last.weight]), told(state[net.first.weight]), values(net)


@both_kinds("a moment is assigned: transposed, in float64, and as a view of a larger tensor")
def moments_assigned(engine, net):
    state = engine.optimizer.state

    def after(step):
        of = state[net.blocks[1].up.weight]
        if step == 0:
            of["exp_avg"] = of["exp_avg"].t().contiguous().t() * 0.5
        if step == 1:
            of["exp_avg_sq"] = torch.full((32, 64), 1e-6)[:, ::2]
        return told(of)

    return steps(engine, 4, after=after), values(net)


@both_kinds("entries of the user's beside the moments: a tensor, a number and a list, saved, loaded and counted up")
def entries_beside(engine, net):
    def after(step):
        for p in net.parameters():
            of = engine.optimizer.state[p]
            of["seen"] = of.get("seen", 0) + 1
            of["start"] = of.get("start", torch.zeros(3)) + 1
            of["notes"] = [step, "x"]

    found = [steps(engine, 2, after=after)]
    file = io.BytesIO()
    torch.save(engine.optimizer.state_dict(), file)
    found.append(steps(engine, 1, 2, after=after))
    file.seek(0)
    engine.optimizer.load_state_dict(torch.load(file, weights_only=False))
    found.append(steps(engine, 1, 3, after=after))
    return found, [told(engine.optimizer.state[p]) for p in net.parameters()], values(net)


@both_kinds("all tensors of all states: `for s in state.values(): for v in s.values(): v.mul_(0.9)`")
def all_states_scaled(engine, net):
    def after(step):
        with torch.no_grad():
            for of in engine.optimizer.state.values():
                for key, value in of.items():
                    if key != "step":
                        value.mul_(0.9)

    return steps(engine, 4, after=after), values(net)


@both_kinds("moments are kept outside, as tensors, and looked at after each later step")
def moments_kept(engine, net):
    kept = []

    def after(step):
        if step == 0:
            kept.append(engine.optimizer.state[net.first.weight]["exp_avg"])
            kept.append(engine.optimizer.state[net.blocks[3].up.bias]["exp_avg_sq"])
        return [value.clone() for value in kept]

    return steps(engine, 4, after=after), values(net)


@both_kinds("the states of one parameter are begun anew by `state[p].clear()` and by `state[p] = {}`")
def states_cleared(engine, net):
    def after(step):
        if step == 1:
            engine.optimizer.state[net.blocks[2].up.weight].clear()
            engine.optimizer.state[net.blocks[2].down.weight] = {}

    return steps(engine, 4, after=after), values(net)


@both_kinds("`step` of one parameter is a Python number, of another one it is moved back")
def steps_of_each(engine, net):
    state = engine.optimizer.state

    def after(step):
        if step == 1:
            state[net.first.weight]["step"] = torch.tensor(1.0)
            state[net.blocks[1].up.weight]["step"] -= 1
            state[net.blocks[1].down.weight]["step"].add_(5)

    return steps(engine, 4, after=after), [float(state[p]["step"]) for p in net.parameters()], values(net)


@both_kinds("`optimizer.state` is a plain `defaultdict` with deep copies of half of the states")
def state_replaced_by_half(engine, net):
    def after(step):
        if step == 1:
            new = collections.defaultdict(dict)
            for index, (p, of) in enumerate(list(engine.optimizer.state.items())):
                if index % 2:
                    new[p] = copy.deepcopy(dict(of))
            engine.optimizer.state = new

    return steps(engine, 4, after=after), values(net)


@both_kinds("one parameter's states are popped, and given back two steps later")
def states_given_back(engine, net):
    kept = []

    def after(step):
        p = net.blocks[0].up.weight
        if step == 0:
            kept.append({key: value.clone() for key, value in engine.optimizer.state.pop(p).items()})
        if step == 2:
            engine.optimizer.state[p] = kept[0]

    return steps(engine, 4, after=after), told(engine.optimizer.state[net.blocks[0].up.weight]), values(net)


@both_kinds("states are asked for before the first step: `p in state`, `len`, `state.get(p)`, `state[p]`")
def states_before_first_step(engine, net):
    state = engine.optimizer.state
    found = [net.first.weight in state, len(state), state.get(net.first.weight), len(state[net.first.weight])]
    return found, steps(engine, 2), len(state), values(net)


@both_kinds("moments are given before the first step: `state[p] = {'step': ..., 'exp_avg': ..., 'exp_avg_sq': ...}`")
def states_given_before(engine, net):
    for p in list(net.parameters())[::3]:
        engine.optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(p, 1e-3),
            "exp_avg_sq": torch.full_like(p, 1e-5),
        }
    return steps(engine, 3), [float(engine.optimizer.state[p]["step"]) for p in net.parameters()], values(net)


@both_kinds("the optimizer's state dict is taken apart: moments of one block times 0.1, steps halved, loaded again")
def state_dict_taken_apart(engine, net):
    found = [steps(engine, 2)]
    state = engine.optimizer.state_dict()
    for index in list(state["state"])[4:8]:
        of = state["state"][index]
        of["exp_avg"] = of["exp_avg"] * 0.1
        of["step"] = of["step"] // 2
    del state["state"][1]
    state["param_groups"][0]["lr"] = 3e-3
    engine.optimizer.load_state_dict(state)
    return found, steps(engine, 2, 2), values(net)


@both_kinds("hooks of the optimizer's state dicts: pre and post hooks of saving and of loading change entries")
def state_dict_hooks(engine, net):
    optimizer, found = engine.optimizer, []

    def saved(optimizer, state):
        state["epoch"] = 7

    def loading(optimizer, state):
        state = copy.deepcopy(state)
        found.append(state.pop("epoch", None))
        for of in state["state"].values():
            of["exp_avg"].mul_(0.5)
        return state

    optimizer.register_state_dict_pre_hook(lambda optimizer: found.append("saving"))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: found.append("loaded"))
    found.append(steps(engine, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    return found, steps(engine, 2, 2), values(net)


# Options.


@both_kinds("betas change to a list, to tensors' numbers and to zero; eps to a tiny one, decay to a negative one")
def options_of_each_step(engine, net):
    group = engine.optimizer.param_groups[0]
    settings = [
        {"betas": [0.8, 0.9]},
        {"betas": (0.0, 0.99), "weight_decay": -0.1},
        {"betas": (float(torch.tensor(0.7)), 0.5), "eps": 1e-3},
        {"weight_decay": 0.5, "lr": 1e-3},
    ]

    def before(step):
        group.update(settings[step])

    return steps(engine, 4, before=before), rates(engine.optimizer), values(net)


@both_kinds("`amsgrad` and `maximize` are turned on between steps")
def flags_turned_on(engine, net):
    group = engine.optimizer.param_groups[0]

    def before(step):
        group["maximize"] = step == 1

    return steps(engine, 3, before=before), values(net)


@both_kinds("`eps=0` with gradients that are zero: NaN in PyTorch", seconds=60.0)
def eps_of_zero(engine, net):
    engine.optimizer.param_groups[0]["eps"] = 0.0

    def before(step):
        net.blocks[1].up.weight.grad[0] = 0

    return steps(engine, 1, before=before), values(net)


@both_kinds("`param_groups` gets a deep copy of itself with the same parameters")
def groups_replaced(engine, net):
    def after(step):
        if step == 0:
            group = engine.optimizer.param_groups[0]
            new = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            engine.optimizer.param_groups[0] = {**new, "params": group["params"], "lr": 1e-3}
        if step == 1:
            engine.optimizer.param_groups = [dict(group, lr=2e-3) for group in engine.optimizer.param_groups]

    return steps(engine, 4, after=after), rates(engine.optimizer), values(net)


@both_kinds("`optimizer.step` is replaced by a method that counts and scales the rate, as libraries patch it")
def step_patched(engine, net):
    found = []
    original = engine.optimizer.step

    def step(self, closure=None):
        found.append(self.param_groups[0]["lr"])
        self.param_groups[0]["lr"] *= 0.5
        return original(closure)

    engine.optimizer.step = types.MethodType(step, engine.optimizer)
    schedule = lr_scheduler.StepLR(engine.optimizer, 2, 3.0)
    return found, steps(engine, 4, after=lambda step: schedule.step()), values(net)


@both_kinds("`optimizer.zero_grad` is replaced by one that halves gradients")
def zero_grad_patched(engine, net):
    def zero_grad(self, set_to_none=True):
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    found = []
    engine.optimizer.zero_grad = types.MethodType(zero_grad, engine.optimizer)
    for index in range(3):
        engine(batch(index)).square().mean().backward()
        engine.optimizer.zero_grad()
    found.append(gradients(net))
    engine.optimizer.step()
    return found, values(net)


# Gradients that are multiplied, clipped and measured.


@both_kinds(
    "each gradient is clipped by its own norm, then all by value, then all by their norm",
    norms=True,
)
def clipped_three_times(engine, net):
    def before(step):
        for p in net.parameters():
            nn.utils.clip_grad_norm_(p, 0.02)
        first = [p.grad.norm().item() for p in net.parameters()]
        nn.utils.clip_grad_value_(net.parameters(), 1e-3)
        second = [p.grad.norm().item() for p in net.parameters()]
        return first, second, nn.utils.clip_grad_norm_(net.parameters(), 0.01).item(), gradients(net)

    return steps(engine, 3, before=before), values(net)


@both_kinds(
    "norms of all orders and dtypes, by rows, in float64, `linalg.norm`, `get_total_norm`",
    norms=True,
)
def norms_of_all_kinds(engine, net):
    def before(step):
        g = net.blocks[1].up.weight.grad
        total = [
            nn.utils.get_total_norm([p.grad for p in net.parameters()], norm_type=kind)
            for kind in (0.0, 1.0, 2.0, 3.0, float("inf"))
        ]
        one = [g.norm(kind) for kind in (0, 1, 3, float("inf"), float("-inf"))]
        more = [
            g.norm(dim=1),
            g.norm(2, dim=0, keepdim=True),
            g.norm(dtype=torch.float64).float(),
            torch.linalg.norm(g),
            torch.linalg.matrix_norm(g, 2),
            torch.linalg.vector_norm(g, 2, keepdim=True),
            torch.linalg.vector_norm(g, dim=(0, 1)),
        ]
        return total, one, more

    return steps(engine, 2, before=before), values(net)


@both_kinds("gradients are multiplied by several numbers and tensors, divided by 3, norms read between", norms=True)
def multiplied_many_times(engine, net):
    def before(step):
        found = []
        for factor in (0.3, -0.5, 2, torch.tensor(0.7), torch.tensor([[1.5]])[0]):
            for p in net.parameters():
                p.grad.mul_(factor)
            found.append(net.first.weight.grad.norm().item())
        for p in net.parameters():
            p.grad.div_(3)
        found.append(gradients(net))
        return found

    return steps(engine, 2, before=before), values(net)


@both_kinds("gradients are multiplied by 2 ** -140 and by 2 ** 140: what is lost in between is lost")
def multiplied_through_nothing(engine, net):
    def before(step):
        for p in net.parameters():
            p.grad.mul_(2.0**-140).mul_(2.0**100).mul_(2.0**40)
        return gradients(net)

    return steps(engine, 2, before=before), values(net)


@both_kinds("gradients are multiplied by zero, and then by an infinity of a scaler gone wrong: NaN")
def multiplied_by_zero(engine, net):
    def before(step):
        p, q = net.blocks[0].up.weight, net.blocks[3].down.weight
        p.grad.mul_(0)
        q.grad.mul_(1e-30).mul_(1e-30)
        return p.grad.norm().item(), q.grad.norm().item(), gradients(net)

    return steps(engine, 2, before=before), values(net)


@both_kinds("the sign of zeros: `p.grad.mul_(-1)` of zeros, then `1 / p.grad`")
def sign_of_zeros(engine, net):
    def before(step):
        net.last.bias.grad.zero_()
        net.last.bias.grad.mul_(-1)
        found = 1 / net.last.bias.grad
        net.last.bias.grad.mul_(-1).abs_()
        return found

    return steps(engine, 2, before=before), values(net)


@both_kinds("gradients of micro-batches are halved, clipped and added to in turn, norms read in each", norms=True)
def accumulated_and_scaled(engine, net):
    found = []
    for step in range(3):
        for index in range(3):
            engine(batch(3 * step + index)).square().mean().backward()
            if index == 0:
                for p in net.parameters():
                    p.grad.mul_(0.3)
            if index == 1:
                found.append(nn.utils.clip_grad_norm_(net.parameters(), 0.01).item())
            found.append([p.grad.norm().item() for p in net.parameters()])
        found.append(gradients(net))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(net)


@both_kinds("gradients are scaled by an average of norms that lives in `optimizer.state` (AdaGC)", norms=True)
def clipped_by_average_of_norms(engine, net):
    state = engine.optimizer.state

    def before(step):
        for p in net.parameters():
            norm = p.grad.norm()
            if step:
                average = state[p]["norm"]
                p.grad.mul_(torch.clamp(average / (norm + 1e-6), max=1.0))
                state[p]["norm"] = 0.9 * average + 0.1 * norm

    def after(step):
        if not step:
            for p in net.parameters():
                state[p]["norm"] = torch.tensor(0.05)

    return steps(engine, 4, before=before, after=after), [state[p]["norm"] for p in net.parameters()], values(net)


# Weights between steps.


@both_kinds("rows are pruned in place between steps, with their moments: weight, `exp_avg` and `exp_avg_sq`")
def rows_pruned(engine, net):
    def after(step):
        with torch.no_grad():
            for block in net.blocks:
                weak = block.up.weight.abs().sum(1).argsort()[: 4 + step]
                block.up.weight[weak] = 0
                for key in ("exp_avg", "exp_avg_sq"):
                    engine.optimizer.state[block.up.weight][key].index_fill_(0, weak, 0)

    return steps(engine, 4, after=after), values(net)


@both_kinds("weights are rounded to bf16 after each step, what is lost is kept and added before the next one (Kahan)")
def rounded_with_compensation(engine, net):
    lost = {}

    def before(step):
        with torch.no_grad():
            for p in net.parameters():
                if p in lost:
                    p.add_(lost[p])

    def after(step):
        with torch.no_grad():
            for p in net.parameters():
                low = p.bfloat16().float()
                lost[p] = p - low
                p.copy_(low)

    return steps(engine, 4, before=before, after=after), values(net)


@both_kinds("`AveragedModel` over the model with a decay of its own, then its weights and the optimizer start anew")
def averaged_and_restarted(engine, net):
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))
    found = [steps(engine, 3, after=lambda step: average.update_parameters(net))]
    net.load_state_dict(average.module.state_dict())
    engine.optimizer.state.clear()
    found.append(steps(engine, 2, 3, after=lambda step: average.update_parameters(net)))
    return found, average.state_dict(), values(net)


@both_kinds("slow weights in `optimizer.state` (Lookahead): a step post-hook pulls back every second step")
def slow_weights_in_state(engine, net):
    count = [0]

    def hook(optimizer, args, kwargs):
        count[0] += 1
        for p in net.parameters():
            of = optimizer.state[p]
            if "slow" not in of:
                of["slow"] = p.detach().clone()
            if count[0] % 2 == 0:
                of["slow"].add_(p.detach() - of["slow"], alpha=0.5)
                p.data.copy_(of["slow"])

    engine.optimizer.register_step_post_hook(hook)
    found = [steps(engine, 3)]
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    return found, steps(engine, 3, 3), values(net)


@both_kinds(
    "SAM from the second step on, with its `old_p` in `optimizer.state`, and a rho that changes",
    norms=True,
)
def sam_in_states(engine, net):
    found, optimizer = [steps(engine, 1)], engine.optimizer
    optimizer.zero_grad()
    for index in range(1, 4):
        x = batch(index)
        net(x).square().mean().backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
            for p in net.parameters():
                optimizer.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (0.05 / (index + 1)) / (norm + 1e-12))
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.data = optimizer.state[p]["old_p"]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, values(net)


@both_kinds("a step is taken by a second optimizer over clones, and their difference is given as the gradient")
def steps_of_clones(engine, net):
    found = []
    for index in range(3):
        clones = [p.detach().clone().requires_grad_() for p in net.parameters()]
        inner = torch.optim.SGD(clones, 0.1, 0.9)
        names = [name for name, _ in net.named_parameters()]
        for turn in range(2):
            inner.zero_grad()
            out = torch.func.functional_call(net, dict(zip(names, clones, strict=True)), batch(10 * index + turn))
            out.square().mean().backward()
            inner.step()
        for p, clone in zip(net.parameters(), clones, strict=True):
            p.grad = (p.detach() - clone.detach()).mul_(3.0)
        found.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(net)


# Schedulers that go on elsewhere.

_SCHEDULES = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=10, cycle_momentum=True, three_phase=True),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0, threshold=0.5, min_lr=1e-4),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ConstantLR(o, 0.1, 2),
            lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
            lr_scheduler.PolynomialLR(o, 4),
        ],
        [2, 4],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.2, total_iters=3), lr_scheduler.MultiplicativeLR(o, lambda step: 0.9)]
    ),
    "cyclic_momentum": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, mode="exp_range", gamma=0.9),
    "swalr": lambda o: swa_utils.SWALR(o, 1e-3, 3, "linear"),
    "lambda_of_groups": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step)] * len(o.param_groups)),
}


def _gone_on(name, make):
    def body(engine, net):
        schedule = make(engine.optimizer)

        def moved(step):
            schedule.step(*([1.0 / (1 + step % 2)] if name == "plateau" else []))
            group = engine.optimizer.param_groups[0]
            return group["lr"], list(group["betas"])

        found = [steps(engine, 3, after=moved)]
        file = io.BytesIO()
        torch.save([net.state_dict(), engine.optimizer.state_dict(), schedule.state_dict()], file)
        found.append(steps(engine, 2, 3, after=moved))
        file.seek(0)
        states = torch.load(file, weights_only=False)
        schedule = make(engine.optimizer)
        for each, state in zip((net, engine.optimizer, schedule), states, strict=True):
            each.load_state_dict(state)
        found.append(steps(engine, 4, 3, after=moved))
        return found, rates(engine.optimizer), values(net)

    body.__name__ = f"schedule_goes_on_{name}"
    words = name.replace("_", " ")
    both_kinds(f"a schedule ({words}), optimizer and model are saved after three steps, and go on in a new schedule")(
        body
    )


for _name, _make in _SCHEDULES.items():
    _gone_on(_name, _make)


def _twice(engine):
    for index in range(2):
        engine.backward(engine(batch(index)).square().mean())
        engine.step()
    return values(engine.module)


@both_kinds("`load_state_dict(state_dict())` in inference mode")
def carried_over_in_inference_mode(engine, net):
    _twice(engine)
    with torch.inference_mode():
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    return _twice(engine)


@both_kinds("`state_dict()` in inference mode is loaded after it")
def saved_in_inference_mode(engine, net):
    _twice(engine)
    with torch.inference_mode():
        saved = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(saved)
    return _twice(engine)


@both_kinds("momentum is halved in inference mode")
def halved_in_inference_mode(engine, net):
    _twice(engine)
    with torch.inference_mode():
        for parameter in engine.module.parameters():
            engine.optimizer.state[parameter]["exp_avg"].mul_(0.5)
    return _twice(engine)
