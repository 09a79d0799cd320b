"""Saving, loading and copying at odd moments: in the middle of accumulation, between forward and backward, under other
budgets and modes. The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import collections
import copy
import enum
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net, batch

family = Family("odd moments")

SGD: dict[str, Any] = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **{"seconds": 90.0, **options})


def wrapped(place, model=None, **options):
    return place.wrap(Net() if model is None else model, **{**SGD, **options})


def backward(engine, step):
    loss = engine(batch(step)).square().mean()
    loss.backward()
    return loss.item()


def steps(engine, first, count):
    found = []
    for step in range(first, first + count):
        engine.optimizer.zero_grad()
        found.append(backward(engine, step))
        engine.optimizer.step()
    engine.optimizer.zero_grad()
    return found


def through_a_file(item):
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@same_bits("the state dict is saved between two micro-batches, and loaded before the last one")
def saved_between_micro_batches(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 2), backward(engine, 5)]
    kept = through_a_file(engine.module.state_dict())
    found.append(backward(engine, 6))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    found.append(backward(engine, 7))
    engine.module.load_state_dict(kept)
    found += [backward(engine, 8), gradients(engine.module)]
    engine.optimizer.step()
    return found, kept, values(engine.module)


@same_bits("the optimizer's state dict is loaded between backward and step")
def optimizer_loaded_before_step(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 2)]
    kept = copy.deepcopy(engine.optimizer.state_dict())
    found += [steps(engine, 2, 2), backward(engine, 5)]
    engine.optimizer.load_state_dict(kept)
    engine.optimizer.step()
    return found, values(engine.module)


@same_bits("model and optimizer are loaded in the middle of accumulation, gradients stay")
def both_loaded_in_accumulation(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 2)]
    kept = through_a_file([engine.module.state_dict(), engine.optimizer.state_dict()])
    found += [steps(engine, 2, 1)]
    engine.optimizer.zero_grad()
    found.append(backward(engine, 5))
    engine.module.load_state_dict(kept[0])
    engine.optimizer.load_state_dict(kept[1])
    found += [backward(engine, 6), gradients(engine.module)]
    engine.optimizer.step()
    return found, values(engine.module)


@same_bits("gradients are saved, dropped, and loaded into the next accumulation")
def gradients_saved(place):
    engine = wrapped(place)
    found = [backward(engine, 0)]
    kept = through_a_file(gradients(engine.module))
    engine.optimizer.zero_grad()
    found.append(steps(engine, 1, 1))
    engine.optimizer.zero_grad()
    for name, parameter in engine.module.named_parameters():
        parameter.grad = kept[name].clone()
    found.append(backward(engine, 2))
    engine.optimizer.step()
    return found, values(engine.module)


@same_bits("the state dict is taken between forward and backward, and changed afterwards")
def saved_between_forward_and_backward(place):
    engine = wrapped(place)
    found = []
    for step in range(2):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        for value in state.values():
            value.zero_()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


def _resumed(name, title, **options):
    def case(place):
        engine = wrapped(place)
        found = [steps(engine, 0, 3)]
        kept = through_a_file([engine.module.state_dict(), engine.optimizer.state_dict()])
        if place.has_engine:
            engine.close()
            place.left.remove(engine)
        model = Net()
        model.load_state_dict(kept[0])
        engine = wrapped(place, model, **(options if place.has_engine else {}))
        engine.optimizer.load_state_dict(kept[1])
        return found, steps(engine, 3, 3), values(engine.module)

    case.__name__ = f"resumed_{name}"
    same_bits(title)(case)


_resumed("recomputing", "a run goes on in an engine that recomputes", activations="recompute")
_resumed(
    "offloading",
    "a run goes on in an engine whose activations go to host memory",
    activations="host",
    activation_memory="4MiB",
)


@same_bits("`save_checkpoint` of the engine after three steps, loaded into another one, which goes on")
def checkpoint_of_engine(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 3)]
    if not place.has_engine:
        return found, steps(engine, 3, 3), values(engine.module)
    engine.save_checkpoint(place.folder / "saved")
    engine.close()
    place.left.remove(engine)
    torch.manual_seed(77)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    engine = wrapped(place, model)
    engine.load_checkpoint(place.folder / "saved")
    return found, steps(engine, 3, 3), values(engine.module)


@same_bits("`load_checkpoint` in the middle of accumulation, after three more steps: back to the first three")
def checkpoint_in_accumulation(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 3)]
    kept = copy.deepcopy([engine.module.state_dict(), engine.optimizer.state_dict()])
    if place.has_engine:
        engine.save_checkpoint(place.folder / "saved")
    found += [steps(engine, 3, 3), backward(engine, 9)]
    engine.optimizer.zero_grad()
    if place.has_engine:
        engine.load_checkpoint(place.folder / "saved")
    else:
        engine.module.load_state_dict(kept[0])
        engine.optimizer.load_state_dict(kept[1])
    return found, steps(engine, 3, 3), values(engine.module)


@same_bits(
    "safetensors: `save_model` of a tied model between steps, `load_model` into it again", needs=("safetensors",)
)
def safetensors_between_steps(place):
    from safetensors.torch import load_model, save_model

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.block = nn.Embedding(40, WIDTH), Block()
            self.head = nn.Linear(WIDTH, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.block(self.embed(ids)))

    engine = wrapped(place, Tied())

    def train(first, count):
        found = []
        for step in range(first, first + count):
            ids = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(step))
            engine.optimizer.zero_grad()
            loss = F.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            engine.optimizer.step()
            found.append(loss.item())
        return found

    found = [train(0, 2)]
    save_model(engine.module, str(place.folder / "model.safetensors"))
    found.append(train(2, 2))
    load_model(engine.module, str(place.folder / "model.safetensors"))
    return found, train(4, 2), values(engine.module)


@same_bits("a deep copy in the middle of accumulation has the gradients, and a torch optimizer steps on it")
def copied_in_accumulation(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    engine.optimizer.zero_grad()
    found.append(backward(engine, 4))
    other = copy.deepcopy(engine.module)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    found.append(backward(engine, 5))
    engine.optimizer.step()
    return found, values(other), values(engine.module)


@same_bits("a deep copy is made in a forward hook of the last layer, and in a tensor hook in backward")
def copied_in_hooks(place):
    engine = wrapped(place)
    copies = []

    def in_forward(module, args, out):
        copies.append(values(copy.deepcopy(engine.module.blocks[0])))
        if out.requires_grad:
            out.register_hook(lambda g: copies.append(values(copy.deepcopy(engine.module.blocks[3]))))

    engine.module.last.register_forward_hook(in_forward)
    return steps(engine, 0, 2), copies, values(engine.module)


@same_bits("`state_dict()` of the model and optimizer in a step post-hook, in each step, the best is loaded in the end")
def saved_in_post_hook(place):
    engine = wrapped(place)
    kept = []
    engine.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: kept.append(copy.deepcopy([engine.module.state_dict(), optimizer.state_dict()]))
    )
    found = [steps(engine, 0, 4)]
    engine.module.load_state_dict(kept[1][0])
    engine.optimizer.load_state_dict(kept[1][1])
    return found, [each[0] for each in kept], steps(engine, 2, 2), values(engine.module)


@same_bits("the scheduler, the optimizer and the model are pickled as state dicts in one object, twice in a run")
def pickled_together(place):
    engine = wrapped(place)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 0.1, total_steps=20)
    found = []
    kept = None
    for step in range(6):
        found.append(steps(engine, step, 1))
        scheduler.step()
        if step == 2:
            parts = (engine.module, engine.optimizer, scheduler)
            kept = pickle.dumps([each.state_dict() for each in parts])
    for each, state in zip((engine.module, engine.optimizer, scheduler), pickle.loads(kept), strict=True):
        each.load_state_dict(state)
    for step in range(3, 6):
        found.append(steps(engine, step, 1))
        scheduler.step()
    return found, scheduler.get_last_lr(), values(engine.module)


@same_bits("weights of one block are loaded in a forward pre-hook of the model, in each step")
def loaded_in_hook(place):
    engine = wrapped(place)
    first = {name: value.clone() for name, value in engine.module.blocks[1].state_dict().items()}

    def load(module, args):
        module.blocks[1].load_state_dict(first)

    engine.module.register_forward_pre_hook(load)
    return steps(engine, 0, 3), values(engine.module)


@same_bits("weights are swapped between two blocks by their state dicts, between backward and step")
def blocks_swapped_before_step(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    engine.optimizer.zero_grad()
    found.append(backward(engine, 3))
    one, two = engine.module.blocks[0], engine.module.blocks[4]
    states = copy.deepcopy((one.state_dict(), two.state_dict()))
    one.load_state_dict(states[1])
    two.load_state_dict(states[0])
    engine.optimizer.step()
    return found, steps(engine, 4, 1), values(engine.module)


@same_bits("`load_state_dict` that raises in its middle (a shape): what was loaded before stays loaded")
def loading_fails_in_the_middle(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    state = {name: value + 1 for name, value in engine.module.state_dict().items()}
    state["blocks.3.up.weight"] = torch.zeros(3, 3)
    found.append(place.attempt(lambda: engine.module.load_state_dict(state)))
    found.append(values(engine.module))
    return found, steps(engine, 1, 2), values(engine.module)


@same_bits("state dicts in float64 and in float16 are loaded, one after the other")
def loaded_in_other_dtypes(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    engine.module.load_state_dict({name: v.double() * 0.5 for name, v in engine.module.state_dict().items()})
    found.append(steps(engine, 1, 1))
    engine.module.load_state_dict({name: v.half() for name, v in engine.module.state_dict().items()})
    return found, steps(engine, 2, 1), values(engine.module)


@same_bits("a state dict is loaded while another thread reads norms of all weights")
def loaded_beside_a_reader(place):
    import threading

    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    state = {name: value * 0.5 for name, value in engine.module.state_dict().items()}
    reader = threading.Thread(target=lambda: [p.norm().item() for _ in range(3) for p in engine.module.parameters()])
    reader.start()
    engine.module.load_state_dict(state)
    reader.join()
    return found, steps(engine, 1, 2), values(engine.module)


@same_bits("moments are taken from one run and given to another one: `state_dict` of the optimizer alone")
def moments_moved(place):
    one, two = wrapped(place), wrapped(place)
    found = [steps(one, 0, 3), steps(two, 3, 1)]
    two.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    return found, steps(two, 4, 2), values(two.module)


@same_bits("the model is unwrapped in the middle of accumulation, and its gradients are there")
def unwrapped_in_accumulation(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    engine.optimizer.zero_grad()
    found += [backward(engine, 4), gradients(engine.module)]
    model = engine.unwrap()
    if place.has_engine:
        place.left.remove(engine)
    return found, values(model)


@family.works_or_refused(
    "the model is pickled by a pickler of the user's with a persistent id for tensors", "engine|state_dict"
)
def pickled_by_persistent_id(place):
    engine = wrapped(place)
    found = [steps(engine, 0, 1)]
    kept = []

    class Own(pickle.Pickler):
        def persistent_id(self, item):
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                kept.append(item.detach().clone())
                return len(kept) - 1
            return None

    Own(io.BytesIO()).dump(engine.module.state_dict())
    return found, kept


@same_bits("EMA of the state dict with buffers, on the fly, by `torch._foreach_lerp_`, and its swap at the end")
def averaged_state_dicts(place):
    engine = wrapped(place)
    average = {name: value.clone() for name, value in engine.module.state_dict().items()}
    found = []
    for step in range(4):
        found.append(steps(engine, step, 1))
        torch._foreach_lerp_(list(average.values()), list(engine.module.state_dict().values()), 0.2)
    engine.module.load_state_dict(average)
    return found, steps(engine, 5, 1), values(engine.module)


# A durable run that ends, by a call that comes before its next forward with gradients.


def ended_behind(place, follow, first=None):
    """Three steps, ``first``, what ``follow`` does; then the run of an engine is ended and gone on from."""
    durable = {"durable": 1, "nvme_path": place.folder} if place.has_engine else {}

    def begun():
        engine = wrapped(place, **durable)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        if place.has_engine:
            engine.register_for_checkpointing(plateau)
        return engine, plateau

    engine, plateau = begun()
    found = steps(engine, 0, 3)
    if first is not None and place.has_engine:
        first(engine)
    with torch.no_grad():
        found.append(engine(batch(9)).sum().item())
    follow(engine, plateau)
    if place.has_engine:
        engine.close()
        place.left.remove(engine)
        engine, plateau = begun()
        engine.load_checkpoint()
    found += steps(engine, 3, 3)
    return found, values(engine.module), plateau.state_dict()


def plateau_falls(engine, plateau):
    for loss in (1.0, 2.0, 3.0):
        plateau.step(loss)


def weights_are_cut(engine, plateau):
    with torch.no_grad():
        engine.module.blocks[1].up.weight.mul_(0.5)


def momentum_is_dropped(engine, plateau):
    for state in engine.optimizer.state.values():
        state["momentum_buffer"].zero_()


@same_bits("a durable run is evaluated, a plateau gets the loss, the run ends and goes on")
def durable_plateau_behind_evaluation(place):
    return ended_behind(place, plateau_falls)


@same_bits("a durable run is saved and evaluated, a plateau gets the loss, the run ends and goes on")
def durable_plateau_behind_save(place):
    return ended_behind(place, plateau_falls, lambda engine: engine.save_checkpoint(place.folder / "saved"))


@same_bits("a durable run is evaluated, a weight is cut, the run ends and goes on")
def durable_cut_behind_evaluation(place):
    return ended_behind(place, weights_are_cut)


@same_bits("a durable run is evaluated, momentum is dropped, the run ends and goes on")
def durable_momentum_behind_evaluation(place):
    return ended_behind(place, momentum_is_dropped)


# The classes of what a user saves along.


def given_back(place, value):
    """The class of what comes back of ``value``, and what it is."""
    engine = wrapped(place)
    found = steps(engine, 0, 1)
    if place.has_engine:
        engine.save_checkpoint(place.folder / "saved", client_state={"it": value})
        value = engine.load_checkpoint(place.folder / "saved")["it"]
    return found, type(value).__name__, repr(value)


class Phase(enum.IntEnum):
    WARM = 1


Point = collections.namedtuple("Point", "x y")


@same_bits("a Counter of words seen is saved along, and counts on")
def counter_in_client_state(place):
    return given_back(place, collections.Counter("abba"))


@same_bits("an OrderedDict whose order is of use is saved along")
def ordered_in_client_state(place):
    return given_back(place, collections.OrderedDict([("b", 1), (2, torch.ones(2))]))


@same_bits("a defaultdict of lists and a bytearray are saved along")
def defaultdict_in_client_state(place):
    return given_back(place, [collections.defaultdict(list, {3: [1]}), bytearray(b"seen"), torch.Size([2])])


@family.said("a named tuple is saved along, and comes back as a tuple", "Point.*the engine's.*a plain tuple")
def namedtuple_in_client_state(place):
    return given_back(place, Point(1, 2))


@family.said("a member of an IntEnum is saved along, and comes back as a number", "Phase.*the engine's.*a plain int")
def enumeration_in_client_state(place):
    return given_back(place, [Phase.WARM])


@family.said("a defaultdict of a function is saved along, and comes back as a dict", "defaultdict.*a plain dict")
def lambda_defaultdict_in_client_state(place):
    return given_back(place, collections.defaultdict(lambda: 5, a=1))


@family.said("a sparse tensor is saved along, and comes back dense", "torch.sparse_coo.*the engine")
def sparse_in_client_state(place):
    return given_back(place, torch.eye(2).to_sparse())


# Saved behind a backward that adds to what PyTorch has still of the last step.


def saved_between(place, behind_backward):
    engine = wrapped(place)
    for step in range(2):
        backward(engine, step)
        if step == behind_backward and place.has_engine:
            engine.save_checkpoint(place.folder / "saved")
            engine.close()
            place.left.remove(engine)
            engine = wrapped(place)
            engine.load_checkpoint(place.folder / "saved")
        engine.optimizer.step()
        if behind_backward == 0:
            engine.optimizer.zero_grad()
    return values(engine.module)


@family.said(
    "no `zero_grad()`, a backward, saved and gone on from, a step", r"save_checkpoint\(\): there was no zero_grad"
)
def saved_without_zero_grad(place):
    return saved_between(place, 1)


@same_bits("a backward, saved and gone on from, a step, `zero_grad()`")
def saved_before_the_first_step(place):
    return saved_between(place, 0)
