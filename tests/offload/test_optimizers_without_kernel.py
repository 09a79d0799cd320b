"""Optimizers of users, put together from pieces, which the engine runs one parameter at a time: as in torch, or refused
with the reason."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optimizer_pieces import (
    ALONE,
    TOGETHER,
    FromPieces,
    attribute_counter,
    decayed_sum,
    entry_of_no_parameter,
    every_second_time,
    group_counter,
    late_state,
    momentum,
    noise,
    own_norm,
)
from tiny import batches, loss_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload import ConfigError, OffloadEngine
from offload.optim.shared_state import SharedState
from offload.optim.trial import try_alone
from offload.optim.twin import Kind, Twin

SHAPES = [(3, 4), (5,), (2, 2), (7, 3)]


def optimizer_of(pieces: Sequence[Callable]) -> FromPieces:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    return FromPieces([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}], pieces)


def tried(optimizer: torch.optim.Optimizer) -> None:
    groups = [
        [Kind(p.shape, {}, optimizer.state.get(p, {}), index) for index, p in enumerate(group["params"])]
        for group in optimizer.param_groups
    ]
    of_model = [p for g in optimizer.param_groups for p in g["params"]]
    try_alone(Twin(optimizer), SharedState.of(optimizer), groups, of_model)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_of_pieces_that_look_at_one_parameter_can_run_alone(seed):
    chance = random.Random(seed)
    optimizer = optimizer_of(chance.sample(ALONE, chance.randint(1, 5)))
    tried(optimizer)
    assert optimizer.count == 0 and "k" not in optimizer.param_groups[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("piece", TOGETHER, ids=lambda piece: piece.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_a_piece_that_needs_several_parameters_is_refused_with_the_reason_among_any_others(piece, seed):
    chance = random.Random(seed)
    others = chance.sample([own_norm, attribute_counter, momentum, decayed_sum], chance.randint(0, 3))
    with pytest.raises(ConfigError, match=TOGETHER[piece]):
        tried(optimizer_of([*others, piece]))


def test_a_trial_leaves_random_generators_as_they_were():
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        tried(optimizer_of([noise]))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_around_another_one_is_refused():
    optimizer = optimizer_of([])
    optimizer.inner = optimizer_of([])
    with pytest.raises(ConfigError, match="another optimizer, a FromPieces, in its attribute 'inner'"):
        tried(optimizer)


def test_what_cannot_be_copied_for_a_trial_is_named():
    optimizer = optimizer_of([])
    optimizer.lines = (line for line in "ab")
    with pytest.raises(ConfigError, match="attribute 'lines' cannot be copied"):
        tried(optimizer)


# Engines.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4)
        self.down.weight.lr_scale = 0.25

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu())


def grouped(model: nn.Module, pieces, **options) -> FromPieces:
    first, *rest = model.parameters()
    return FromPieces([{"params": rest}, {"params": [first], "lr": 0.03}], pieces, **options)


def train(model: nn.Module, optimizer, steps=4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6, generator=generator)).square().mean()
        if step == 2:
            optimizer.param_groups[0]["lr"] *= 0.5
            loss = model.down.bias.square().sum()  # the others get no gradient
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


class Masked(torch.optim.SGD):
    """Momentum for parameters that ask for it by an attribute, which may be a tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                step = parameter.grad * parameter.mask
                if parameter.mask.numel() > 1:
                    step = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter)).mul_(0.5).add_(step)
                parameter.sub_(step, alpha=group["lr"])


def test_parameters_of_one_shape_have_the_states_that_their_attributes_ask_for():
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[0].weight.mask, model[1].weight.mask = torch.ones(()), torch.full((3, 3), 0.5)
        return model, Masked(model.parameters(), lr=0.1)

    def run(call, optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            call(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    plain, theirs = make()
    run(plain, theirs)
    model, own = make()
    with OffloadEngine(model, optimizer=own, precision="fp32") as engine:
        run(engine, engine.optimizer)
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.detach(), expected.detach())
        assert sorted(len(states) for states in engine.optimizer.state_dict()["state"].values()) == [0, 1]


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_trains_with_pieces_to_the_bits_of_torch(seed):
    chance = random.Random(seed)
    pieces = chance.sample(ALONE, 4)
    plain = net()
    theirs = grouped(plain, pieces)
    expected = train(plain, theirs)
    model = net()
    optimizer = grouped(model, pieces)
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"):
        assert all(map(torch.equal, train(model, optimizer), expected))
        assert optimizer.count == theirs.count and optimizer.history == theirs.history
        for own, other in zip(optimizer.param_groups, theirs.param_groups, strict=True):
            assert own.keys() == other.keys()
            assert all(own[name] == other[name] for name in own if name != "params")


def test_steps_go_on_to_the_same_bits_from_a_checkpoint(tmp_path):
    pieces = [group_counter, attribute_counter, momentum, entry_of_no_parameter, late_state, every_second_time]
    plain = net()
    expected = train(plain, grouped(plain, pieces), 4)
    for first, second in ((True, False), (False, True)):
        model = net()
        with OffloadEngine(model, optimizer=grouped(model, pieces), precision="fp32") as engine:
            if first:
                train(model, engine.optimizer, 3)
                engine.save_checkpoint(tmp_path)
                continue
            assert second
            engine.load_checkpoint(tmp_path)
            generator = torch.Generator().manual_seed(2)
            inputs = [torch.randn(5, 6, generator=generator) for _ in range(4)]
            engine.optimizer.zero_grad()
            model(inputs[3]).square().mean().backward()
            engine.optimizer.step()
            assert all(map(torch.equal, [p.detach() for p in model.parameters()], expected))


def test_an_optimizer_that_was_built_is_the_engines_with_class_name_attributes_and_hooks():
    model, calls = net(), []
    optimizer = grouped(model, [group_counter])
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    with OffloadEngine(model, optimizer=optimizer, precision="fp32") as engine:
        assert engine.optimizer is optimizer and isinstance(optimizer, FromPieces)
        assert type(optimizer).__name__ == "FromPieces"
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(model, engine.optimizer, 3)
    assert calls == ["before", "after"] * 3


def test_a_step_that_raises_in_the_users_own_code_changes_nothing():
    def stop(optimizer, group, params, factors):
        if optimizer.scale < 1:
            raise RuntimeError("not in this mode")

    model = net()
    optimizer = grouped(model, [group_counter, stop])
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.scale = torch.zeros(1)
        with pytest.raises(RuntimeError, match="not in this mode"):
            train(model, optimizer, 1)
        assert all(map(torch.equal, [p.detach() for p in model.parameters()], before))
        assert "k" not in optimizer.param_groups[0]


def test_an_option_that_comes_out_otherwise_later_on_is_one_error():
    def turns(optimizer, group, params, factors):
        group["k"] = group.get("k", 0) + 1
        if group["k"] > 5:
            group["seen"] = sum(p.numel() for p in params)

    model = net()
    optimizer = grouped(model, [turns])
    with (
        OffloadEngine(model, optimizer=optimizer, precision="fp32") as engine,
        pytest.raises(Exception, match="'seen'"),
    ):
        train(model, optimizer, 8)
        engine.synchronize()


# What is on around a step.

FACTOR: ContextVar[float] = ContextVar("FACTOR", default=1.0)


class Projected(torch.optim.Optimizer):
    """A step with products of matrices, which asks for a context variable."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                grad = p.grad.view(len(p), -1)
                p.sub_((grad @ grad.t() @ grad).view(p.shape).to(p.dtype), alpha=0.1 * FACTOR.get())


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.sub_.Tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def factor_of_two():
    token = FACTOR.set(2.0)
    try:
        yield
    finally:
        FACTOR.reset(token)


@contextmanager
def flushing():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("around", [partial(torch.autocast, "cpu", torch.bfloat16), factor_of_two, flushing])
def test_a_step_is_computed_with_what_is_on_around_it(around):
    found = []
    for trains in (False, True):
        model = net()
        optimizer = Projected(model.parameters())
        with OffloadEngine(model, optimizer=optimizer, precision="fp32") if trains else nullcontext():
            for size, on in ((1.0, nullcontext), (1.0, around), (1e-13, around)):
                for p in model.parameters():
                    p.data.mul_(size > 1e-3)  # what a tiny step leaves of zero can be seen
                    p.grad = torch.full_like(p, size)
                with on():
                    optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_mode_has_seen_a_step_when_the_call_returns():
    model = net()
    optimizer = Projected(model.parameters())
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with Counts() as counts:
            optimizer.step()
        assert counts.count >= len(list(model.parameters()))


class ByMask(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad * self.state[p].get("mask", getattr(p, "mask", 1.0)))


@pytest.mark.parametrize("of_state", [False, True])
def test_what_a_step_reads_may_change_as_soon_as_it_has_returned(of_state):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30)))
    optimizer = ByMask(model.parameters())
    masks = [torch.ones(p.shape) for p in model.parameters()]
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"):
        for p, mask in zip(model.parameters(), masks, strict=True) if not of_state else ():
            p.mask = mask
        for step in range(2):
            before = [p.detach().clone() for p in model.parameters()]
            for p, mask in zip(model.parameters(), masks, strict=True):
                p.grad = mask.fill_(1.0).clone()
            optimizer.step()
            for mask in masks:
                mask.fill_(100.0)
            assert all((p - one + 1).abs().max() < 1e-5 for p, one in zip(model.parameters(), before, strict=True))
            for p, mask in zip(model.parameters(), masks, strict=True) if of_state and step == 0 else ():
                optimizer.state[p]["mask"] = mask


def test_a_group_of_before_a_load_is_no_longer_the_optimizers():
    with (found := one_step()).engine:
        before = found.optimizer.param_groups[0]
        found.optimizer.load_state_dict(found.optimizer.state_dict())
        before["lr"] = 7.0
        assert found.optimizer.param_groups[0]["lr"] == 0.1


# What users do to the object.


def one_step(**options):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = OffloadEngine(model, optimizer=optimizer, precision="fp32", **options)
    train(model, optimizer, 1)
    return SimpleNamespace(engine=engine, model=model, optimizer=optimizer, p=model.down.weight)


def test_states_are_written_by_update_and_by_the_or_operator():
    with (found := one_step()).engine:
        state = found.optimizer.state[found.p]
        state.update(exp_avg=torch.full_like(found.p, 2.0))
        state |= {"exp_avg_sq": torch.full((4, 9), 3.0)}
        read = found.optimizer.state[found.p]
        assert float(read["exp_avg"].max()) == 2 and float(read["exp_avg_sq"].min()) == 3
        found.optimizer.state |= {found.p: {**read, "exp_avg": torch.zeros(4, 9)}}
        assert not found.optimizer.state[found.p]["exp_avg"].any()


def test_states_that_were_saved_and_loaded_in_inference_mode_take_further_steps():
    with OffloadEngine(model := net(), optimizer=torch.optim.NAdam, precision="fp32") as engine:
        train(model, engine.optimizer, 1)
        with torch.inference_mode():
            saved = engine.optimizer.state_dict()
            engine.optimizer.load_state_dict(copy.deepcopy(saved))  # of inference tensors
        train(model, engine.optimizer, 1)
        assert int(engine.optimizer.state[model.down.weight]["step"]) == 2
        assert not any(v.is_inference() for of in saved["state"].values() for v in of.values())


@pytest.mark.parametrize(
    "forget", [lambda o, p: o.state[p].clear(), lambda o, p: o.state.pop(p), lambda o, p: o.state.__delitem__(p)]
)
def test_states_of_a_parameter_that_are_cleared_begin_anew(forget):
    with (found := one_step()).engine:
        forget(found.optimizer, found.p)
        assert found.p not in found.optimizer.state and len(found.optimizer.state) == 5
        assert found.optimizer.state[found.p] == {}
        train(found.model, found.optimizer, 1)
        assert int(found.optimizer.state[found.p]["step"]) == 1


def test_a_new_mapping_in_the_place_of_all_states_is_taken_over():
    with (found := one_step()).engine:
        found.optimizer.state = defaultdict(dict)
        assert len(found.optimizer.state) == 0
        train(found.model, found.optimizer, 1)
        assert int(found.optimizer.state[found.p]["step"]) == 1


def test_an_entry_of_the_users_own_stays_beside_the_states():
    with (found := one_step()).engine:
        found.optimizer.state[found.p]["slow"] = torch.ones(4, 9)
        train(found.model, found.optimizer, 1)
        found.optimizer.state[found.p]["slow"].mul_(3)
        assert found.optimizer.state_dict()["state"][4]["slow"].eq(3).all()
        assert found.optimizer.state[found.p].pop("slow").eq(3).all()
        assert "slow" not in found.optimizer.state[found.p]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, type("OwnAdamW", (torch.optim.AdamW,), {})])
def test_parameters_exchange_their_states_and_one_that_was_taken_out_comes_back(kind):
    model = net()
    model.up = nn.Linear(9, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    one, other = model.down.weight, model.up.weight
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"):
        for number, parameter in enumerate((one, other), 1):
            optimizer.state[parameter] = {
                "step": torch.tensor(float(number)),
                "exp_avg": torch.full((4, 9), float(number)),
                "exp_avg_sq": torch.full((4, 9), 10.0 * number),
            }
        state, seen = optimizer.state, optimizer.state[one]["exp_avg"][1:3]
        state[one], state[other] = state[other], state[one]
        assert [(float(state[p]["step"]), float(state[p]["exp_avg"].mean())) for p in (one, other)] == [(2, 2), (1, 1)]
        assert seen.eq(1).all()
        ours, theirs = state[one], state[other]
        ours["exp_avg"], theirs["exp_avg"] = theirs["exp_avg"], ours["exp_avg"]
        assert [float(state[p]["exp_avg"].mean()) for p in (one, other)] == [1, 2]
        taken = state.pop(one)
        assert one not in state and taken["exp_avg"].eq(1).all() and state.get(one) is None
        state[one] = taken
        assert float(state[one]["exp_avg_sq"].mean()) == 20 and float(state[one]["step"]) == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda states: pickle.loads(pickle.dumps(states))])
def test_what_is_put_into_a_copy_of_states_does_not_reach_the_engine(copied):
    with (found := one_step()).engine:
        for states in (copied(found.optimizer.state[found.p]), copied(found.optimizer.state)):
            next(iter(states.values()))  # it can be read
            states["step"] = torch.tensor(7.0)
        assert int(found.optimizer.state[found.p]["step"]) == 1 and "step" not in found.optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.AdamW, type("OwnAdamW", (torch.optim.AdamW,), {})])
def test_an_entry_of_the_users_own_is_the_tensor_that_was_put_there(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"):
        train(model, optimizer, 1)
        states = optimizer.state[model.down.weight]
        slow = states["slow"] = torch.zeros(4, 9)
        notes = states["notes"] = []
        states["other"] = 1
        slow.add_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # it is no state of the optimizer's
            train(model, optimizer, 1)
            assert optimizer.state[model.down.weight]["slow"].eq(1).all()
        optimizer.state[model.down.weight]["slow"].mul_(3)
        optimizer.state[model.down.weight]["notes"].append("x")
        assert slow.eq(3).all() and notes == ["x"]
        loaded = optimizer.state_dict()
        optimizer.load_state_dict(loaded)
        optimizer.state[model.down.weight]["slow"].mul_(2)
        assert slow.eq(3).all() and loaded["state"][4]["slow"].eq(3).all()


def test_a_state_that_the_optimizer_needs_cannot_be_taken_out_alone():
    with (found := one_step()).engine, pytest.raises(ConfigError, match=r"exp_avg of down\.weight cannot be taken out"):
        del found.optimizer.state[found.p]["exp_avg"]


def test_an_entry_beside_states_that_are_not_there_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with OffloadEngine(model, optimizer=optimizer, precision="fp32"), pytest.raises(ConfigError, match="no step"):
        optimizer.state[model.down.weight]["slow"] = torch.ones(1)


def test_hooks_of_load_state_dict_are_called():
    calls = []
    with (found := one_step()).engine:
        found.optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("before"))
        found.optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after"))
        found.optimizer.load_state_dict(found.optimizer.state_dict())
    assert calls == ["before", "after"]


def test_a_new_list_of_groups_is_what_the_next_step_takes():
    with (found := one_step()).engine:
        before = [p.detach().clone() for p in found.model.parameters()]
        found.optimizer.param_groups = [{**found.optimizer.param_groups[0], "params": [found.p]}]
        train(found.model, found.optimizer, 1)
        moved = [not torch.equal(p.detach(), b) for p, b in zip(found.model.parameters(), before, strict=True)]
    assert moved == [False] * 4 + [True, False]


def test_a_step_that_was_replaced_on_the_object_is_refused_before_the_engine_and_kept_after_it():
    model, calls = net(), []

    def counted(optimizer):
        step = optimizer.step
        optimizer.step = lambda *args: (calls.append("step"), step(*args))[1]

    optimizer = torch.optim.AdamW(model.parameters())
    counted(optimizer)
    with pytest.raises(ConfigError, match="step was replaced on the object"):
        OffloadEngine(model, optimizer=optimizer, precision="fp32")
    with (found := one_step()).engine:
        counted(found.optimizer)
        train(found.model, found.optimizer, 2)
        assert calls == ["step"] * 2 and int(found.optimizer.state[found.p]["step"]) == 3


def test_the_step_of_before_the_engine_is_refused_when_it_is_called():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = optimizer.step
    with (
        OffloadEngine(model, optimizer=optimizer, precision="fp32"),
        pytest.raises(ConfigError, match="before the engine"),
    ):
        step()


def test_a_parameter_may_get_an_attribute_during_training():
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = grouped(model, [momentum])
        with OffloadEngine(model, optimizer=optimizer) if wrapped else nullcontext():
            for _ in range(3):
                model(torch.ones(2, 6)).sum().backward()
                for parameter in model.parameters():
                    parameter.main_grad = parameter.grad.detach() * 0.5
                    parameter.grad = parameter.main_grad
                optimizer.step()
                optimizer.zero_grad()
            found.append([optimizer.state[parameter]["buffer"].clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


# What a step does beside its parameters.


class Stepwise(torch.optim.SGD):
    """SGD by hand, with what a subclass does before it."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.before(parameters)
        for p in parameters:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return getattr(self, "result", None)

    def before(self, parameters):
        pass


class NormOfAllLater(Stepwise):
    def before(self, parameters):
        if self.count > 5:
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.grad.div_(norm)


def test_a_quantity_of_all_gradients_that_comes_later_is_one_error_at_that_step():
    model = net()
    with OffloadEngine(model, optimizer=NormOfAllLater(model.parameters(), lr=0.1), precision="fp32") as engine:
        train(model, engine.optimizer, 5)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ConfigError, match="depended on the others"):
            train(model, engine.optimizer, 1)
        assert all(map(torch.equal, before, model.parameters()))


def test_a_step_that_looks_at_the_model_is_refused_before_it_changes_anything():
    model = net()

    class Clamped(Stepwise):
        def before(self, parameters):
            model.norm.weight.clamp_(2.0, 3.0)

    with pytest.raises(ConfigError, match="looks at a parameter of the model"):
        OffloadEngine(model, optimizer=Clamped(model.parameters(), lr=0.1))
    assert model.norm.weight.eq(1).all()


def test_a_step_that_looks_at_the_model_later_is_one_error_and_no_deadlock():
    model = net()

    class Later(Stepwise):
        def before(self, parameters):
            if self.count > 3:
                parameters[0].grad.mul_(model.norm.weight.mean())

    engine = OffloadEngine(model, optimizer=Later(model.parameters(), lr=0.1), precision="fp32")
    with pytest.raises(ConfigError, match="looks at a parameter of the"):
        train(model, engine.optimizer, 5)
    engine.close()


def test_a_state_that_is_the_parameter_itself_is_refused():
    class Pulled(Stepwise):
        def before(self, parameters):
            for p in parameters:
                p.lerp_(self.state[p].setdefault("start", p.data), 0.1)

    model = net()
    with pytest.raises(ConfigError, match="state 'start' is the parameter itself"):
        OffloadEngine(model, optimizer=Pulled(model.parameters(), lr=0.1))


def test_a_step_that_changes_parameters_without_a_gradient_is_refused_for_that_reason():
    class Pulling(Stepwise):
        def before(self, parameters):
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    model = net()
    with pytest.raises(ConfigError, match=r"changes parameters.*that have no gradient"):
        OffloadEngine(model, optimizer=Pulling(model.parameters(), lr=0.1))


class Delayed(torch.optim.SGD):
    """It steps by the gradient of two steps before, which waits in a queue."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    queue = self.state[p].setdefault("queue", deque(maxlen=3))
                    queue.append(p.grad.clone())
                    p.data.add_(queue[0], alpha=-group["lr"])


class ByObject(torch.optim.SGD):
    """Its momentum is in an object of its own, as Shampoo's preconditioners are."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", SimpleNamespace(sum=torch.zeros_like(p)))
                    momentum.sum.mul_(0.9).add_(p.grad)
                    p.data.add_(momentum.sum, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [Delayed, ByObject], ids=["a queue", "an object"])
def test_tensors_within_something_else_are_a_state(kind):
    plain, own = net(), net()
    with OffloadEngine(own, optimizer=kind(own.parameters(), lr=0.1), precision="fp32") as engine:
        train(plain, kind(plain.parameters(), lr=0.1), 8)
        train(own, engine.optimizer, 8)
        assert all(map(torch.equal, plain.parameters(), own.parameters()))


def test_a_result_of_the_step_that_nobody_gets_is_warned_of():
    model = net()
    optimizer = Stepwise(model.parameters(), lr=0.1)
    optimizer.result = {"norm": 1.0}
    with pytest.warns(UserWarning, match="the step of Stepwise returns dict"):
        OffloadEngine(model, optimizer=optimizer).close()


def test_a_zero_grad_of_the_users_own_is_called():
    class Halving(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

    def run(call, model, optimizer):
        for x in (torch.ones(2, 6), torch.full((2, 6), 0.5)):
            call(model(x).sum())
            optimizer.zero_grad()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = net()
    expected = run(torch.Tensor.backward, plain, Halving(plain.parameters(), lr=0.1))
    model = net()
    with OffloadEngine(model, optimizer=Halving(model.parameters(), lr=0.1), precision="fp32") as engine:
        assert all(map(torch.equal, run(torch.Tensor.backward, model, engine.optimizer), expected))


def test_arguments_that_a_step_would_not_see_are_refused():
    model = net()
    engine = OffloadEngine(model, optimizer=Stepwise(model.parameters(), lr=0.1))
    with engine, pytest.raises(ConfigError, match="a closure alone, not scale"):
        engine.optimizer.step(scale=0.5)


def test_options_that_came_after_a_state_dict_are_gone_once_it_is_loaded():
    model = net()
    with OffloadEngine(model, optimizer=grouped(model, [group_counter]), precision="fp32") as engine:
        first = engine.optimizer.state_dict()
        train(model, engine.optimizer, 2)
        assert engine.optimizer.param_groups[0]["k"] == 2
        engine.optimizer.load_state_dict(first)
        assert "k" not in engine.optimizer.param_groups[0]


class _Waits(torch.optim.RMSprop):
    """Its step waits in any thread but the program's."""

    under_way: Event
    go_on: Event
    program: int

    def step(self, closure: Any = None) -> Any:
        if get_ident() != _Waits.program:
            _Waits.under_way.set()
            assert _Waits.go_on.wait(60)
        return super().step(closure)


def test_settings_that_a_program_changes_while_a_step_is_carried_out_stay_changed(make_model):
    _Waits.under_way, _Waits.go_on, _Waits.program = Event(), Event(), get_ident()
    before, model = torch.backends.mha.get_fastpath_enabled(), make_model()
    try:
        with OffloadEngine(model, optimizer=_Waits(model.parameters(), lr=1e-3)) as engine:
            tokens, targets = batches(1)[0]
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
            assert _Waits.under_way.wait(60)
            torch.backends.mha.set_fastpath_enabled(not before)
            _Waits.go_on.set()
            engine.synchronize()
            assert torch.backends.mha.get_fastpath_enabled() is not before
    finally:
        _Waits.go_on.set()
        torch.backends.mha.set_fastpath_enabled(before)


class _Beside:
    """Rates of single parameters, beside an optimizer: by id(), by place, and by a module and a name."""

    def __init__(self) -> None:
        self.by_id, self.by_place, self.of_modules = {}, {}, []


class RatesBeside(torch.optim.SGD):
    def __init__(self, params, beside, **options):
        super().__init__(params, **options)
        self.beside, self.begun = beside, False

    @torch.no_grad()
    def step(self, closure=None):
        for module, name, rate in self.beside.of_modules if not self.begun else ():
            self.beside.by_id[id(getattr(module, name))] = rate
        self.begun = True
        for number, group in enumerate(self.param_groups):
            for index, p in enumerate(group["params"]):
                rate = self.beside.by_place.get((number, index), group["lr"])
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.beside.by_id.get(id(p), rate))


def beside_by_id(beside, model):
    beside.by_id[id(model.down.bias)] = 0.3


def beside_by_place(beside, model):
    beside.by_place |= {(0, 2): 0.3, (1, 1): 0.2}


def beside_by_module(beside, model):
    beside.of_modules += [(model.norm, "bias", 0.2), (model.up, "weight", 0.3), (nn.Linear(2, 2), "bias", 9.0)]


@pytest.mark.parametrize("tell", [beside_by_id, beside_by_place, beside_by_module])
@pytest.mark.parametrize("when", ["before", "later"])
def test_rates_that_are_kept_beside_an_optimizer_are_those_of_the_parameters(tell, when):
    found = []
    for in_engine in (False, True):
        torch.manual_seed(0)
        model, beside = Net(), _Beside()
        frozen, *rest = model.parameters()
        frozen.requires_grad_(False)
        if when == "before":
            tell(beside, model)
        optimizer = RatesBeside([{"params": [frozen, *rest[:2]]}, {"params": rest[2:], "lr": 0.02}], beside, lr=0.01)
        with OffloadEngine(model, optimizer=optimizer) if in_engine else nullcontext():
            weights = train(model, optimizer)
            tell(beside, model)
            weights = [value.clone() for value in (*weights, *train(model, optimizer))]
        assert optimizer.beside is beside
        names = {id(p): name for name, p in model.named_parameters()}
        found.append((weights, {names.get(key): rate for key, rate in beside.by_id.items()}))
    assert all(map(torch.equal, found[0][0], found[1][0])) and found[0][1] == found[1][1]
    assert len(found[0][1]) == {beside_by_id: 1, beside_by_place: 0, beside_by_module: 3 * (when == "before")}[tell]


def test_rates_beside_an_optimizer_are_the_programs_to_tell_again_with_a_checkpoint(tmp_path):
    found = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model, beside = Net(), _Beside()
        beside_by_module(beside, model)
        with OffloadEngine(model, optimizer=RatesBeside(model.parameters(), beside, lr=0.01)) as engine:
            if resumes:
                engine.load_checkpoint(tmp_path)
            else:
                train(model, engine.optimizer, 2)
                engine.save_checkpoint(tmp_path)
            found.append([value.clone() for value in train(model, engine.optimizer, 2)])
    assert all(map(torch.equal, *found))


class DrawsForLargeOnes(torch.optim.SGD):
    """It shuffles the rows of matrices that are larger than those of a trial."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2 and len(parameter) > 16:
                    parameter.grad = parameter.grad[torch.randperm(len(parameter))]
        return super().step(closure)


def test_an_optimizer_that_draws_for_large_parameters_alone_is_refused_and_draws_nothing():
    layer = nn.Linear(8, 32)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"DrawsForLargeOnes cannot run .*: its step draws random numbers"):
        OffloadEngine(layer, optimizer=DrawsForLargeOnes, lr=0.1)
    assert torch.equal(torch.get_rng_state(), before)


class MaskedAsBuilt(torch.optim.SGD):
    """Its masks are made as it is built, and a parameter without one is not stepped."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mask"] = torch.ones_like(parameter)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and "mask" in self.state[parameter]:
                parameter.data.add_(parameter.grad * self.state[parameter]["mask"], alpha=-0.1)


def test_an_optimizer_that_makes_states_as_it_is_built_is_asked_for_built_and_has_them_then():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.ones(1, 8)
    with pytest.raises(ConfigError, match=r"as it is built \(mask\).*optimizer=MaskedAsBuilt\(model\.parameters"):
        OffloadEngine(model, optimizer=MaskedAsBuilt, lr=0.1)
    before = model.weight.detach().clone()
    with OffloadEngine(model, optimizer=MaskedAsBuilt(model.parameters(), lr=0.1)) as engine:
        engine.backward(engine(x).sum())
        engine.step()
        assert torch.equal(model.weight.detach(), before.add(torch.ones(4, 8), alpha=-0.1))
