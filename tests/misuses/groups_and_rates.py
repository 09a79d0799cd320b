"""Parameter groups, schedules and state dicts: rates of each layer, groups that come later, schedulers in chains, and
states that go from torch's optimizer to the engine's and back."""

from __future__ import annotations

import copy
import io
import math

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from misuses.case import Family
from misuses.place import values
from misuses.strangers import Block, Net, batch

family = Family("groups and rates")

ADAM = {"lr": 1e-2, "eps": 1e-4}


class ExactAdam(torch.optim.AdamW):
    """It has no kernel: a step is the operations of torch."""


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


def steps(engine, count=3, first=0, call=None):
    """Some steps by PyTorch's loop; the losses."""
    found = []
    for step in range(first, first + count):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        engine.optimizer.step()
        if call is not None:
            call(step)
        found.append(loss.item())
    return found


def rates(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def by_layer(net, decay=0.7):
    layers = [net.first, *net.blocks, net.last]
    return [
        {"params": list(layer.parameters()), "lr": 0.05 * decay ** (len(layers) - index), "name": f"layer{index}"}
        for index, layer in enumerate(layers)
    ]


def both_kinds(title, body, refused=""):
    """A case by the kernel, to rounding, and one by torch's own arithmetic, to the bit, or ``refused``."""

    def with_kind(kind):
        def case(place):
            return body(place, kind)

        return case

    for kind, name in ((torch.optim.AdamW, "kernel"), (ExactAdam, "torch")):
        case = with_kind(kind)
        case.__name__ = f"{body.__name__}_{name}"
        words = f"{title} ({'with' if name == 'kernel' else 'without'} a kernel)"
        if name == "torch" and refused:
            family.refused(words, refused)(case)
        else:
            (family.works(words) if name == "kernel" else same_bits(words))(case)


def cases(title, **options):
    return lambda body: both_kinds(title, body, **options)


# Groups.


@cases("a rate for each layer, which falls from the top; a schedule of one function a group")
def rate_of_each_layer(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(by_layer(net), eps=1e-4))
    functions = [lambda step, index=index: 1 / (1 + index * step) for index in range(7)]
    schedule = lr_scheduler.LambdaLR(engine.optimizer, functions)
    found = steps(engine, call=lambda step: schedule.step())
    return found, rates(engine.optimizer), values(net)


@cases("no decay for biases and norms, by dimensions, and `foreach` set in a group")
def groups_without_decay(place, kind):
    net = Net()
    net.norm = nn.LayerNorm(32)
    net.blocks[2].register_forward_hook(lambda block, inputs, output: net.norm(output))
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0, "foreach": False},
    ]
    engine = place.wrap(net, optimizer=kind(groups, **ADAM))
    return steps(engine), values(net)


@cases(
    "`add_param_group` after two steps, with another rate and decay, and a scheduler that is made anew",
    refused="Give it all",
)
def group_added_in_the_middle(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.blocks.parameters(), **ADAM))
    steps(engine, 2)
    engine.optimizer.zero_grad()
    engine.optimizer.add_param_group({"params": [*net.first.parameters(), *net.last.parameters()], "lr": 3e-2})
    schedule = lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    found = steps(engine, 3, call=lambda step: schedule.step())
    return found, rates(engine.optimizer), len(engine.optimizer.state), values(net)


@cases("groups are split in two by hand: one list of parameters becomes two groups", refused="Give it all")
def group_split_by_hand(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))
    steps(engine, 2)
    group = engine.optimizer.param_groups[0]
    of_blocks = set(net.blocks.parameters())
    rest = [p for p in group["params"] if p not in of_blocks]
    group["params"] = [p for p in group["params"] if p in of_blocks]
    engine.optimizer.param_groups.append({**group, "params": rest, "lr": 1e-3})
    return steps(engine, 2), len(engine.optimizer.state), values(net)


@cases("betas, `eps`, decay and `amsgrad`-like flags of a group change with the step")
def options_that_change(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))

    def change(step):
        group = engine.optimizer.param_groups[0]
        group["betas"] = (0.9 - 0.1 * step, 0.99)
        group["eps"] = 1e-4 * (step + 1)
        group["weight_decay"] = 0.1 * step
        group["maximize"] = step == 1

    return steps(engine, 4, call=change), values(net)


@cases("a frozen group in the optimizer from the start, thawed by its rate, frozen again by `requires_grad_`")
def group_thawed_by_rate(place, kind):
    net = Net()
    groups = [{"params": net.blocks.parameters(), "lr": 0.0}, {"params": [*net.first.parameters()]}]
    engine = place.wrap(net, optimizer=kind(groups, **ADAM))

    def change(step):
        engine.optimizer.param_groups[0]["lr"] = 1e-2 if step == 0 else 1e-3
        net.first.requires_grad_(step != 1)

    return steps(engine, 4, call=change), values(net)


@cases("an optimizer over `named_parameters()`: names are in the groups and in the state dict")
def named_groups(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.named_parameters(), **ADAM))
    found = steps(engine)
    state = engine.optimizer.state_dict()
    return found, state["param_groups"][0]["param_names"], sorted(state["state"]), values(net)


@cases("groups with entries of the user's, which its schedule reads (`lr_scale`, `name`, a list, None)")
def own_entries_of_groups(place, kind):
    net = Net()
    groups = [
        {**group, "lr_scale": 0.5**index, "tags": [index], "note": None} for index, group in enumerate(by_layer(net))
    ]
    engine = place.wrap(net, optimizer=kind(groups, eps=1e-4))

    def schedule(step):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.03 * group["lr_scale"] / (step + 1)
            group["tags"].append(step)

    found = steps(engine, call=schedule)
    return found, rates(engine.optimizer), values(net)


@cases("groups are given in another order than the model's, parameters in them are shuffled")
def shuffled_groups(place, kind):
    net = Net()
    parameters = list(net.parameters())
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(3)).tolist()
    groups = [{"params": [parameters[i] for i in order[start::3]], "lr": 1e-2 * (start + 1)} for start in range(3)]
    engine = place.wrap(net, optimizer=kind(groups, eps=1e-4))
    found = steps(engine)
    state = engine.optimizer.state_dict()
    return found, {key: entry["exp_avg"] for key, entry in state["state"].items()}, values(net)


# Schedules.

_CHAINS = {
    "warm_up_then_cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "three_in_sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ConstantLR(o, 0.1, 1),
            lr_scheduler.PolynomialLR(o, 2, 2.0),
            lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        ],
        [1, 3],
    ),
    "chained_three": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5), lr_scheduler.StepLR(o, 2, 0.3), lr_scheduler.MultiplicativeLR(o, lambda s: 0.9)]
    ),
    "one_cycle_of_momentum": lambda o: lr_scheduler.OneCycleLR(
        o, [3e-2, 1e-2], total_steps=6, base_momentum=0.7, max_momentum=0.95, three_phase=True
    ),
    "cyclic_momentum": lambda o: lr_scheduler.CyclicLR(
        o, [1e-3, 2e-3], [1e-2, 3e-2], step_size_up=2, mode="exp_range", gamma=0.9, cycle_momentum=True
    ),
    "cyclic_scale_fn": lambda o: lr_scheduler.CyclicLR(
        o, 1e-3, 1e-2, step_size_up=1, scale_fn=lambda x: 0.5**x, scale_mode="cycle", cycle_momentum=False
    ),
    "swalr": lambda o: swa_utils.SWALR(o, [1e-3, 2e-3], anneal_epochs=3, anneal_strategy="linear"),
}


def _with_chain(make, kind):
    def case(place):
        net = Net()
        groups = [{"params": net.blocks.parameters(), "lr": 1e-2}, {"params": net.last.parameters(), "lr": 3e-2}]
        engine = place.wrap(net, optimizer=kind(groups, eps=1e-4))
        schedule, seen = make(engine.optimizer), []

        def after(step):
            schedule.step()
            seen.append([(group["lr"], group["betas"]) for group in engine.optimizer.param_groups])

        return steps(engine, 5, call=after), seen, schedule.get_last_lr(), values(net)

    return case


for _name, _make in _CHAINS.items():
    for _kind, _words in ((torch.optim.AdamW, "kernel"), (ExactAdam, "torch")):
        _case = _with_chain(_make, _kind)
        _case.__name__ = f"chain_{_name}_{_words}"
        _title = f"schedule of two groups: {_name.replace('_', ' ')} ({_words})"
        (family.works(_title) if _words == "kernel" else same_bits(_title))(_case)


@cases("`ReduceLROnPlateau` with a list of least rates, cooldown and a threshold, after each evaluation")
def plateau_of_groups(place, kind):
    net = Net()
    groups = [{"params": net.blocks.parameters(), "lr": 1e-2}, {"params": net.last.parameters(), "lr": 3e-2}]
    engine = place.wrap(net, optimizer=kind(groups, eps=1e-4))
    schedule = lr_scheduler.ReduceLROnPlateau(
        engine.optimizer, "max", 0.3, 0, cooldown=1, min_lr=[2e-3, 1e-3], threshold=0.5
    )

    def after(step):
        with torch.no_grad():
            schedule.step(net(batch(99)).square().mean())

    return steps(engine, 6, call=after), rates(engine.optimizer), values(net)


@cases("a scheduler of the user's: a subclass of `LRScheduler`, closed form, which also sets the decay")
def own_scheduler(place, kind):
    class Own(lr_scheduler.LRScheduler):
        def get_lr(self):
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.01 * self.last_epoch
            return [base / math.sqrt(self.last_epoch + 1) for base in self.base_lrs]

    net = Net()
    engine = place.wrap(net, optimizer=kind(by_layer(net), eps=1e-4))
    schedule = Own(engine.optimizer)
    return steps(engine, 4, call=lambda step: schedule.step()), schedule.state_dict()["last_epoch"], values(net)


@cases("a scheduler goes on from `last_epoch`, with `initial_lr` in the groups")
def scheduler_goes_on(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))
    for group in engine.optimizer.param_groups:
        group["initial_lr"] = 2e-2
    schedule = lr_scheduler.CosineAnnealingLR(engine.optimizer, 8, last_epoch=3)
    return steps(engine, 3, call=lambda step: schedule.step()), rates(engine.optimizer), values(net)


@cases("the rate is a tensor, which a scheduler fills, in groups of an optimizer built before")
def rates_that_are_tensors(place, kind):
    net = Net()
    groups = [
        {"params": net.blocks.parameters(), "lr": torch.tensor(1e-2)},
        {"params": net.last.parameters(), "lr": torch.tensor(3e-2)},
    ]
    engine = place.wrap(net, optimizer=kind(groups, lr=torch.tensor(1e-2), eps=1e-4))
    schedule = lr_scheduler.CosineAnnealingLR(engine.optimizer, 4)
    found = steps(engine, 3, call=lambda step: schedule.step())
    return found, [float(group["lr"]) for group in engine.optimizer.param_groups], values(net)


@cases("the rate is warmed up by a step pre-hook, and clipped gradients are counted by a post-hook")
def rates_by_hooks(place, kind):
    net, seen = Net(), []
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))

    def before(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (len(seen) + 1)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    engine.optimizer.register_step_pre_hook(before)
    engine.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(optimizer.param_groups[0]["lr"])
    )
    return [round(loss, 3) for loss in steps(engine, 4)], seen


# State dicts.


def _on_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@cases("three steps under torch, then the engine takes model, optimizer and scheduler from a file")
def from_torch_to_engine(place, kind):
    net = Net()
    optimizer = kind(by_layer(net), eps=1e-4)
    schedule = lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=8)
    for step in range(3):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
        schedule.step()
    saved = _on_file({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    net = Net()
    engine = place.wrap(net, optimizer=kind(by_layer(net), eps=1e-4))
    schedule = lr_scheduler.OneCycleLR(engine.optimizer, 2e-2, total_steps=8)
    net.load_state_dict(saved["net"])
    engine.optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    found = steps(engine, 3, 3, call=lambda step: schedule.step())
    return found, rates(engine.optimizer), values(net)


@cases("three steps in the engine, then torch takes model, optimizer and scheduler from a file")
def from_engine_to_torch(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(by_layer(net), eps=1e-4))
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(engine.optimizer, 2, T_mult=2)
    steps(engine, 3, call=lambda step: schedule.step())
    saved = _on_file(
        {"net": net.state_dict(), "optimizer": engine.optimizer.state_dict(), "schedule": schedule.state_dict()}
    )
    net = Net()
    optimizer = kind(by_layer(net), eps=1e-4)
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, T_mult=2)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    for step in range(3, 6):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return rates(optimizer), sorted(map(str, saved["optimizer"]["state"])), values(net)


@cases("an optimizer that has trained under torch is given to an engine, and trained by both in turns of one run")
def handed_over_and_back(place, kind):
    net = Net()
    optimizer = kind(net.parameters(), **ADAM)
    for step in range(2):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    engine = place.wrap(net, optimizer=optimizer)
    steps(engine, 2, 2)
    states = copy.deepcopy(engine.optimizer.state_dict())
    net = engine.unwrap()
    optimizer = kind(net.parameters(), **ADAM)
    optimizer.load_state_dict(states)
    for step in range(4, 6):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return values(net)


@cases("a state dict of the optimizer in which not all parameters have states (some were frozen so far)")
def state_dict_of_a_part(place, kind):
    net = Net()
    optimizer = kind(net.parameters(), **ADAM)
    net.first.requires_grad_(False)
    optimizer.zero_grad()
    net(batch(0)).square().mean().backward()
    optimizer.step()
    net.first.requires_grad_(True)
    states = copy.deepcopy(optimizer.state_dict())
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))
    engine.optimizer.load_state_dict(states)
    found = steps(engine, 3)
    again = engine.optimizer.state_dict()["state"]
    return found, {key: int(entry["step"]) for key, entry in again.items()}, values(net)


@cases("a loaded state dict has other rates and groups' options: they come with it")
def options_come_with_the_states(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(by_layer(net), eps=1e-4))
    steps(engine, 2)
    state = copy.deepcopy(engine.optimizer.state_dict())
    for index, group in enumerate(state["param_groups"]):
        group["lr"], group["betas"], group["weight_decay"] = 1e-3 * index, (0.8, 0.9), 0.2
        group["new"] = index
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 2
        entry["step"] = entry["step"] + 5
    engine.optimizer.load_state_dict(state)
    return rates(engine.optimizer), steps(engine, 2), values(net)


@cases("rollback after a bad epoch: model, optimizer, scheduler and random state go back, the rate is halved")
def rollback(place, kind):
    torch.manual_seed(5)
    net = nn.Sequential(Block(), nn.Dropout(0.2), Block(), nn.Dropout(0.2), Block())
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))
    schedule, found = lr_scheduler.StepLR(engine.optimizer, 2, 0.5), []
    for epoch in range(4):
        kept = copy.deepcopy((net.state_dict(), engine.optimizer.state_dict(), schedule.state_dict()))
        draws = torch.get_rng_state()
        found += steps(engine, 2, 2 * epoch, call=lambda step: schedule.step())
        if epoch % 2:
            net.load_state_dict(kept[0])
            engine.optimizer.load_state_dict(kept[1])
            schedule.load_state_dict(kept[2])
            torch.set_rng_state(draws)
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5
    return found, rates(engine.optimizer), values(net)


@cases("moments are read, scaled and reset for rows, and `step` is set, through `optimizer.state`")
def states_written_by_hand(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))

    def after(step):
        with torch.no_grad():
            for block in net.blocks:
                state = engine.optimizer.state[block.up.weight]
                state["exp_avg"][3:5] = 0
                state["exp_avg_sq"].mul_(1.5)
                state["exp_avg"].lerp_(torch.ones_like(state["exp_avg"]), 1e-3)
                if step == 1:
                    state["step"].fill_(7.0)

    found = steps(engine, 4, call=after)
    return found, [float(s["step"]) for s in engine.optimizer.state.values()], values(net)


@cases("states of one parameter are deleted: `del optimizer.state[p]`, and `pop`")
def states_deleted(place, kind):
    net = Net()
    engine = place.wrap(net, optimizer=kind(net.parameters(), **ADAM))

    def after(step):
        if step == 1:
            del engine.optimizer.state[net.first.weight]
            engine.optimizer.state.pop(net.last.bias)

    found = steps(engine, 4, call=after)
    return found, [float(engine.optimizer.state[p]["step"]) for p in net.parameters()], values(net)


_OTHERS = {
    "sgd_of_nesterov": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True),
    "sgd_with_dampening": lambda p: torch.optim.SGD(p, 0.05, 0.9, dampening=0.3, maximize=False),
    "rmsprop_centred": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True, eps=1e-3),
    "adagrad_with_decay": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5, eps=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2, eps=1e-3),
    "nadam_decoupled": lambda p: torch.optim.NAdam(p, 1e-2, eps=1e-3, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, eps=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, lambd=1e-2, t0=2),
    "adam_of_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, amsgrad=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def _resumed(make):
    def case(place):
        net = Net()
        engine = place.wrap(net, optimizer=make(net.parameters()))
        schedule = lr_scheduler.CosineAnnealingLR(engine.optimizer, 6)
        found = steps(engine, 3, call=lambda step: schedule.step())
        saved = _on_file([net.state_dict(), engine.optimizer.state_dict(), schedule.state_dict()])
        net = Net()
        engine = place.wrap(net, optimizer=make(net.parameters()))
        schedule = lr_scheduler.CosineAnnealingLR(engine.optimizer, 6)
        for each, state in zip((net, engine.optimizer, schedule), saved, strict=True):
            each.load_state_dict(state)
        found += steps(engine, 3, 3, call=lambda step: schedule.step())
        state = engine.optimizer.state_dict()["state"]
        return found, {key: sorted(entry.keys() - {"step"}) for key, entry in state.items()}, values(net)

    return case


for _name, _make in _OTHERS.items():
    _case = _resumed(_make)
    _case.__name__ = f"resumed_{_name}"
    family.works(f"a run of {_name.replace('_', ' ')} is saved and goes on in a new engine", rtol=1e-4, atol=1e-5)(
        _case
    )
