"""Updates that begin during backward: the same bits as those that begin after it, whatever happens in between."""

from functools import cache
from pathlib import Path

import pytest
import torch
from speculative_updates import (
    ALWAYS,
    LOOPS,
    NEVER,
    OPTIONS,
    built,
    drain,
    norms_of,
    trained,
    trained_in_memory,
    with_engine_step,
    with_fp16,
    with_micro_batches,
    with_own_clipping,
    with_scaler,
)
from tiny import batches, least_budget, loss_of

from offload import BudgetError, NonFiniteGradient, OffloadEngine
from offload.plan.plan import Tier
from offload.tiers.home import StoredHome
from offload.update.state_prefetch import StatePrefetch


def nothing(engine: OffloadEngine) -> None:
    pass


def change_lr(engine: OffloadEngine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 3e-3


def clip(engine: OffloadEngine) -> None:
    engine.clip_grad_norm_(0.01)


def change_a_gradient(engine: OffloadEngine) -> None:
    engine.module.blocks[7].up.weight.grad.clamp_(-1e-3, 1e-3)


def drop_a_gradient(engine: OffloadEngine) -> None:
    engine.module.blocks[7].up.weight.grad = None


def write_a_weight(engine: OffloadEngine) -> None:
    with torch.no_grad():
        engine.module.blocks[7].down.bias.fill_(0.5)


def evaluate(engine: OffloadEngine) -> None:
    with torch.no_grad():
        engine(batches(1)[0][0])


def load_states(engine: OffloadEngine) -> None:
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


def names_begun(engine: OffloadEngine) -> list[str]:
    """The names of the units whose speculative updates the engine begins from now on."""
    begun: list[str] = []
    speculative = engine._session.parts.trained.updates.speculative
    begin = speculative.begin

    def count(unit, update):
        if update is not None:
            begun.append(unit.name)
        return begin(unit, update)

    speculative.begin = count
    return begun


def run(between, **options) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights, and how many speculative updates were begun in four steps with ``between`` before every second
    one."""
    model = built()
    with OffloadEngine(model, **OPTIONS, **options) as engine:
        begun = names_begun(engine)
        losses = []
        for index, (tokens, targets) in enumerate(batches(4)):
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            if index % 2:
                between(engine)
            engine.step()
            losses.append(loss.item())
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, len(begun)


@cache
def run_in_memory(between, **options) -> tuple[list[float], dict[str, torch.Tensor], int]:
    return run(between, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("share", [1, 1.5], ids=["gradients spilled", "gradients in RAM"])
@pytest.mark.parametrize(
    "between",
    [nothing, change_lr, clip, change_a_gradient, drop_a_gradient, write_a_weight, evaluate, load_states],
)
def test_nothing_between_backward_and_step_is_lost(between, share: float, tmp_path: Path):
    budget = int(share * least_budget(built(), tmp_path, **OPTIONS))
    expected_losses, expected, none = run_in_memory(between)
    losses, weights, begun = run(between, nvme_path=tmp_path, host_memory=budget)
    assert none == 0 and begun > 6
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_spilled_gradients_are_updated_from_their_buffers(tmp_path: Path, monkeypatch):
    read = []
    original = StoredHome.read
    monkeypatch.setattr(
        StoredHome, "read", lambda home, *args, **more: read.append(home) or original(home, *args, **more)
    )
    with OffloadEngine(
        built(), nvme_path=tmp_path, host_memory=least_budget(built(), tmp_path, **OPTIONS), **OPTIONS
    ) as engine:
        worker = engine._session.parts.trained.updates.updater._worker
        engine._session.parts.trained.updates.speculative.balance = lambda forward, backward: None  # all units
        for tokens, targets in batches(3):
            loss = loss_of(engine(tokens), targets)
            drain(worker)  # while updates of the last step run, compute does not wait for early ones
            engine.backward(loss)
            drain(worker)  # a speculative update that has not begun before the step never does
            engine.step()
        engine.synchronize()
        stored = [tile.grads for unit in engine._session.parts.tiers.homes for tile in unit.tiles]
        assert all(stored) and engine.plan.nvme_bytes["grads"] > 0
        assert len(read) > len(stored) and not set(read) & set(stored)
        plan = engine.plan
        streamed = [item.unit.numel for item in plan.units if item.weights is Tier.NVME]
        weights = 2 * sum(streamed) - sum(streamed[-plan.staging.num_slots :])  # these lie in the slots still
        assert plan.step_read_bytes == plan.formats.weights * weights + plan.nvme_bytes["states"]


def test_a_gradient_that_is_not_finite_takes_back_what_has_begun(tmp_path: Path):
    model = built()
    budget = int(1.5 * least_budget(built(), tmp_path, **OPTIONS))
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=budget, **OPTIONS) as engine:
        (tokens, targets), (more, more_targets), *_ = batches(3)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        states = engine.optimizer.state_dict()["state"]
        begun = names_begun(engine)
        poisoned = model.blocks[0].register_full_backward_hook(lambda m, i, o: (torch.full_like(i[0], float("nan")),))
        engine.backward(loss_of(engine(more), more_targets))
        poisoned.remove()
        assert begun
        with pytest.raises(NonFiniteGradient, match=r"embed\.weight"):
            engine.step()
        for name, value in weights.items():
            assert torch.equal(model.get_parameter(name).detach().clone(), value), name
        for index, values in engine.optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, states[index][name]) for name, value in values.items())
        engine.backward(loss_of(engine(more), more_targets))
        engine.step()
        assert engine.global_step == 2


def test_small_disks_leave_it_out(tmp_path: Path):
    budget = int(1.5 * least_budget(built(), tmp_path, **OPTIONS))
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, **OPTIONS) as engine:
        assert (
            engine.plan.speculative and engine.plan.memory["spare copies"]["nvme"] == engine.plan.spare_copy_bytes > 0
        )
    with pytest.raises(BudgetError) as error:
        OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, nvme_capacity=1, **OPTIONS)
    needed = error.value.needed_bytes
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, nvme_capacity=needed, **OPTIONS) as engine:
        assert not engine.plan.speculative


# With a factor between backward and step.


CLIPPED = {
    "never": LOOPS,
    "always": [with_engine_step, with_micro_batches, with_scaler],
    "after a while": [with_engine_step, with_fp16, with_own_clipping],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("clipped", "loop"), [(clipped, loop) for clipped in CLIPPED for loop in CLIPPED[clipped]])
def test_steps_that_are_not_clipped_are_updated_early_and_those_that_are_do_not_try(clipped: str, loop, tmp_path: Path):
    ahead = {"never": NEVER, "always": ALWAYS, "after a while": 1.001 * max(norms_of(loop)[:3])}[clipped]
    expected_losses, expected, none, _ = trained_in_memory(loop, ahead)
    budget = int(1.2 * least_budget(built(), tmp_path, **{**OPTIONS, **loop(ahead)[0]}))  # most gradients spill
    losses, weights, begun, left, _ = trained(loop, ahead, nvme_path=tmp_path, host_memory=budget)
    assert not any(none)
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    if clipped == "never":
        learnt = 3 if loop is with_scaler else 1  # how many backwards a step has, and what the scale is
        assert all(begun[learnt:]) and max(left[learnt:]) < 10  # of 14 units
    if clipped == "always":  # the bound is known, or was seen
        assert not any(begun[2 if loop is with_scaler else 1 :])


@pytest.mark.parametrize(
    "between", [nothing, change_lr, change_a_gradient, drop_a_gradient, write_a_weight, load_states]
)
def test_what_is_read_before_the_verdict_of_a_clipped_step_is_what_the_update_needs(
    between, tmp_path: Path, monkeypatch
):
    budget = least_budget(built(), tmp_path, **OPTIONS)
    expected_losses, expected, _ = run(between, gradient_clipping=1e-2)
    took = []
    take = StatePrefetch.take
    monkeypatch.setattr(StatePrefetch, "take", lambda ahead, home: took.append(take(ahead, home)) or took[-1])
    losses, weights, begun = run(between, gradient_clipping=1e-2, nvme_path=tmp_path, host_memory=budget)
    assert begun == 0 and sum(each is not None for each in took) >= 6  # a step's at least
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_gradients_that_still_lie_in_buffers_are_not_read_back_by_a_clipped_step(tmp_path: Path, monkeypatch):
    budget = least_budget(built(), tmp_path, **OPTIONS)
    read = set()
    original = StoredHome.read
    monkeypatch.setattr(
        StoredHome, "read", lambda home, *args, **more: read.add(home.name) or original(home, *args, **more)
    )
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, gradient_clipping=1e-2, **OPTIONS) as engine:
        for tokens, targets in batches(3):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.synchronize()
        assert engine.plan.staging.num_grad_buffers == 2
    back = {name for name in read if name.startswith("gradients of ")}
    assert back == {f"gradients of {name}" for name in [*(f"blocks.{index}" for index in range(1, 12)), "norm", "head"]}
