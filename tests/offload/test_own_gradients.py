"""Gradients that are tensors of the user's, and gradients that somebody holds when they go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload import OffloadEngine
from offload.tiers.gradients import own
from offload.tiers.gradients.own import OwnGradients
from offload.units.find import find_units
from swapper import OffloadError


class _Sink:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.settled = 0

    def take(self, unit, spec, gradient, scale=1.0) -> None:
        self.taken.append(gradient.sum().item() * scale)

    def settle(self, at=None) -> None:
        self.settled += 1

    def forget(self, unit) -> None:
        pass


@pytest.fixture
def chain():
    unit = find_units(nn.Linear(2, 2))[0]
    sink, written = _Sink(), []
    gradients = OwnGradients(sink)
    gradients.write = lambda unit, spec, value: written.append((spec.name, value.tolist()))
    return unit, sink, gradients, written


def test_a_backward_adds_to_the_users_tensor_which_is_written_before_a_step(chain):
    unit, sink, gradients, written = chain
    weight, bias = unit.parameters
    bucket = torch.zeros(6)
    gradients.adopt(unit, bias, bucket[4:])
    gradients.take(unit, bias, torch.ones(2), 0.5)
    gradients.take(unit, weight, torch.ones(2, 2))
    bucket.mul_(4)
    gradients.settle("step 1")
    assert sink.taken == [4.0]
    assert bucket.tolist() == [0, 0, 0, 0, 2, 2]
    assert written == [("bias", [2.0, 2.0])]
    gradients.forget(unit)
    gradients.settle()
    assert len(written) == 1
    assert gradients.of(bias) is None


def test_beyond_a_bound_the_oldest_are_held_by_the_user_alone(chain, monkeypatch):
    unit, sink, gradients, written = chain
    weight, bias = unit.parameters
    monkeypatch.setattr(own, "HELD_BYTES_MAX", 16)
    first = torch.ones(2, 2)
    gradients.adopt(unit, weight, first)
    gradients.adopt(unit, bias, torch.ones(2))
    assert written == [("weight", [[1.0, 1.0], [1.0, 1.0]])]
    assert gradients.of(weight) is first
    gradients.take(unit, weight, torch.ones(2, 2))
    assert first.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert sink.taken == [4.0], "a backward is lost with the tensor"
    del first
    assert gradients.of(weight) is None
    assert gradients.of(bias) is not None
    gradients.take(unit, weight, torch.ones(2, 2))
    assert sink.taken == [4.0, 4.0]


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with OffloadEngine(model, optimizer="sgd", lr=1.0, precision="fp32") as engine:
        yield engine


def _backward(engine: OffloadEngine, factor: float = 1.0) -> tuple[nn.Parameter, nn.Parameter]:
    (factor * engine(torch.ones(2, 4))).sum().backward()
    return engine.module[0].weight, engine.module[1].weight


def test_gradients_are_swapped(engine: OffloadEngine):
    p, q = _backward(engine)
    of_p, of_q = p.grad.clone(), q.grad.clone()
    p.grad, q.grad = q.grad, p.grad
    assert torch.equal(p.grad, of_q)
    assert torch.equal(q.grad, of_p)


def test_two_weights_share_a_gradient_that_one_was_given_from_the_other(engine: OffloadEngine):
    p, q = _backward(engine)
    of_p, kept = p.detach().clone(), q.grad
    value = kept.clone()
    p.grad = q.grad
    assert p.grad is q.grad
    q.grad.mul_(2)
    assert torch.equal(kept, 2 * value)
    engine.optimizer.step()
    assert torch.equal(p, of_p - 2 * value)


@pytest.mark.parametrize("drop", [lambda e: e.optimizer.zero_grad(), lambda e: e.module.zero_grad()])
def test_who_holds_a_gradient_keeps_it_when_it_is_dropped(engine: OffloadEngine, drop):
    p, _ = _backward(engine)
    kept, value = p.grad, p.grad.clone()
    drop(engine)
    assert p.grad is None
    _backward(engine, 4.0)
    assert torch.equal(kept, value)
    assert kept.norm() == pytest.approx(value.norm())
    assert torch.equal(p.grad, 4 * value)
    kept.mul_(2).add_(1)
    assert torch.equal(kept, 2 * value + 1)


def test_a_gradient_that_a_step_has_used_is_read_until_another_one_comes(engine: OffloadEngine):
    p, _ = _backward(engine)
    value = p.grad.clone()
    engine.optimizer.step()
    used = p.grad
    assert torch.equal(used, value)
    engine.optimizer.zero_grad()
    assert p.grad is None
    del used
    _backward(engine)
    engine.optimizer.step()
    used = p.grad
    _backward(engine)
    with pytest.raises(OffloadError, match="is gone: a step has used it"):
        used.clone()


def test_gradients_that_are_made_zeros_are_zeros_and_the_next_ones_are_added(engine: OffloadEngine):
    p, q = _backward(engine)
    value = p.grad.clone()
    engine.module.zero_grad(set_to_none=False)
    torch._foreach_zero_([p.grad, q.grad])
    assert not p.grad.any()
    _backward(engine)
    assert torch.equal(p.grad, value)
    engine.module.zero_grad(set_to_none=False)
    before = p.detach().clone()
    engine.optimizer.step()
    assert torch.equal(p, before)
    assert not p.grad.any()


def test_a_gradient_that_is_assigned_stays_the_users_tensor(engine: OffloadEngine):
    p, _ = _backward(engine)
    value, before = p.grad.clone(), p.detach().clone()
    p.grad = given = torch.ones(4, 4)
    _backward(engine)
    assert p.grad is given
    assert torch.equal(given, 1 + value)
    given.data.mul_(2)
    engine.optimizer.step()
    assert torch.equal(p, before - 2 * (1 + value))
    assert p.grad is given
    p.grad = None
    assert p.grad is None


def test_zero_grad_of_an_optimizer_over_a_part_of_the_model_leaves_the_rest():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    with OffloadEngine(model, optimizer=optimizer, precision="fp32") as engine:
        p, q = _backward(engine)
        value = p.grad.clone()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert q.grad is None
        assert torch.equal(p.grad, value)
        _backward(engine)
        assert p.grad.norm() > value.norm()


def test_a_factor_is_read_each_time(engine: OffloadEngine):
    p, q = _backward(engine)
    of_p, of_q = p.grad.clone(), q.grad.clone()
    factor = torch.ones(())
    for parameter in (p, q):
        factor.data.add_(1)
        parameter.grad.mul_(factor)
    assert torch.equal(p.grad, 2 * of_p)
    assert torch.equal(q.grad, 3 * of_q)


class _LooksAtGradient(nn.Linear):
    seen: list[float | None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(None if self.weight.grad is None else self.weight.grad.sum().item())
        return super().forward(x)


def test_a_forward_sees_gradients_of_its_weights():
    model = nn.Sequential(nn.Linear(4, 4), _LooksAtGradient(4, 4, bias=False))
    model[1].seen = []
    with OffloadEngine(model, optimizer="sgd", lr=1.0, precision="fp32") as engine:
        _backward(engine)
        value = model[1].weight.grad.sum().item()
        _backward(engine)
        engine.optimizer.zero_grad()
        _backward(engine)
        model[1].weight.grad = torch.ones(4, 4)
        engine(torch.ones(1, 4))
    assert model[1].seen == [None, pytest.approx(value), None, 16.0]


class _GoesBackward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x.detach()).sum().backward()
        return super().forward(x)


@pytest.mark.parametrize("assigned", [False, True])
def test_a_backward_within_a_forward_adds_to_the_gradient_that_the_forward_sees(assigned: bool):
    model = nn.Sequential(nn.Linear(4, 4), _GoesBackward(4, 4, bias=False))
    with OffloadEngine(model, optimizer="sgd", lr=1.0, precision="fp32") as engine, torch.no_grad():
        weight, expected = model[1].weight, torch.zeros(4, 4)
        if assigned:
            weight.grad = torch.zeros(4, 4)
        for _ in range(2):
            with torch.enable_grad():
                _backward(engine)
            expected += 2 * model[0](torch.ones(2, 4)).sum(0).expand(4, 4)
        torch.testing.assert_close(weight.grad.clone(), expected)


def test_a_backward_within_a_forward_adds_nothing_to_a_gradient_that_a_step_has_used():
    model = nn.Sequential(nn.Linear(4, 4), _GoesBackward(4, 4, bias=False))
    with OffloadEngine(model, optimizer="sgd", lr=0.0, precision="fp32") as engine, pytest.warns(match="zero_grad"):
        _backward(engine)
        value = model[1].weight.grad.clone()
        engine.optimizer.step()
        _backward(engine)
        assert torch.equal(model[1].weight.grad, value)
        engine.optimizer.step()


def test_the_engines_clipping_reaches_gradients_that_were_assigned(engine: OffloadEngine):
    p, _ = _backward(engine)
    p.grad = given = 2 * p.grad
    norm = engine.clip_grad_norm_(0.5)
    total = sum(x.grad.norm() ** 2 for x in engine.module.parameters()) ** 0.5
    assert norm > 0.5
    assert total.item() == pytest.approx(0.5, rel=1e-4)
    assert p.grad is given


def test_a_compiled_block_is_compiled_anew_while_its_parameters_have_gradients():
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)))
        if compiled:
            for block in model:
                block.compile(backend="aot_eager")
        with OffloadEngine(model, precision="fp32"):
            losses = [model(torch.ones(4, 8)).square().mean()]
            losses[0].backward()
            model(torch.ones(6, 8)).square().mean().backward()  # another shape
            with torch.no_grad():
                losses.append(model(torch.ones(2, 8)).sum())
            found.append([*losses, *(parameter.grad.detach().clone() for parameter in model.parameters())])
    assert all(map(torch.equal, *found))
