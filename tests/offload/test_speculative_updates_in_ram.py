"""Speculative updates of units that rest in host memory, where a device computes: they are written to spare places
there, and the bits are those of the CPU with everything in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from speculative_updates import (
    ALWAYS,
    NEVER,
    OPTIONS,
    built,
    drain,
    let_gradients_come_first,
    norms_of,
    trained,
    trained_in_memory,
    with_engine_step,
    with_least,
    with_own_clipping,
    with_scaler,
)
from tiny import batches, loss_of, train

from offload import OffloadEngine
from offload.plan.plan import Tier
from offload.report.meter import Meter
from offload.testing.simulated import SimulatedDevice
from offload.tiers.home import SpareHostHome, UnitHomes
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.shadow import SpareWeights
from offload.units import Tile, UnitSpec
from offload.waiting import Failure
from swapper import Lease


@pytest.fixture(autouse=True)
def _nothing_depends_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    let_gradients_come_first(monkeypatch)


def in_ram(**options: Any) -> dict[str, Any]:
    """Options for a device with the least memory, and host memory for all of it and its spare places."""
    given: dict[str, Any] = {"device": SimulatedDevice(seed=3), "host_memory": 1 << 30}
    with_least(given, "device_memory", **options)
    return given


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


# Parts.


def words(address: int) -> list[int]:
    return list((ctypes.c_uint8 * 4).from_address(address))


@pytest.fixture
def memory() -> Iterator[tuple[int, int]]:
    buffer = (ctypes.c_uint8 * 8)(1, 2, 3, 4, 9, 9, 9, 9)
    yield ctypes.addressof(buffer), ctypes.addressof(buffer) + 4
    assert buffer


def with_weights(first: int, second: int) -> tuple[UnitSpec, UnitHomes, HostLevel, SpareWeights]:
    unit = UnitSpec(0, "u", (), (), 4, 4, 0)
    homes = UnitHomes(SpareHostHome(Lease(first, 4), Lease(second, 4)), None, [])
    host = HostLevel([unit], [homes], [], 0, Failure(), Meter(), prefetch=False)
    return unit, homes, host, SpareWeights(host.cache, [homes], ctypes.memmove)


def test_weights_in_ram_are_written_beside_and_are_the_unit_s_when_they_are_flipped(memory: tuple[int, int]):
    first, second = memory
    unit, homes, host, spare = with_weights(first, second)
    assert homes.have_spares and spare.hold(unit) and not spare.waits
    place = spare.lend(unit, [Tile(0, 1, 8), Tile(2, 3, 8)], lambda: True)
    assert place is not None and (place.address, place.before) == (second, first)
    assert words(second) == [9, 2, 9, 4], "what is not written is there"
    ctypes.memset(second, 7, 1)
    ctypes.memset(second + 2, 7, 1)
    spare.give_back(unit, place)
    assert host.pin(unit).place.address == first and words(first) == [1, 2, 3, 4]
    host.begin_updates([unit])
    spare.flip(unit)
    assert not host.fence.is_pending(unit), "whoever waits for the unit's update goes on"
    assert host.pin(unit).place.address == second and words(second) == [7, 2, 7, 4]
    assert host.begin_update(unit) == second, "the next step's update finds it there"
    again = spare.lend(unit, [], lambda: True)
    assert again is not None and (again.address, again.before) == (first, second) and words(first) == [7, 2, 7, 4]


def test_weights_that_nobody_wants_any_more_are_not_copied(memory: tuple[int, int]):
    first, second = memory
    unit, _, host, spare = with_weights(first, second)
    assert spare.lend(unit, [], lambda: False) is None and words(second) == [9, 9, 9, 9]
    spare.forget(unit)
    assert host.pin(unit).place.address == first


# In an engine.


def test_spare_places_are_counted_in_the_budget_and_evenly_spread(tmp_path: Path):
    given = in_ram()
    with OffloadEngine(built(), **OPTIONS, **given) as engine:
        plan = engine.plan
        assert all(item.has_spares for item in plan.units if item.weights is Tier.HOST)
        needed = sum(plan.resident_bytes.values()) + plan.compute_bytes + plan.staging.nbytes
        each = max(item.spare_bytes(plan.formats) for item in plan.units)
        assert plan.host_bytes == needed + plan.memory["spare copies"]["host"]
        assert engine._session.parts.tiers.arena.nbytes >= plan.arena_bytes
    with OffloadEngine(built(), **OPTIONS, **{**given, "host_memory": needed + 4 * each}) as engine:
        spared = [item.unit.index for item in engine.plan.units if item.has_spares]
        assert 4 <= len(spared) < len(engine.plan.units) and engine.plan.host_bytes <= needed + 4 * each
        assert max(spared) - min(spared) > len(engine.plan.units) // 2
        train(engine)
    assert given["device"].violations == [] and given["device"].allocated_bytes == 0


def test_a_unit_with_frozen_weights_has_no_spare_place():
    model = built()
    model.blocks[3].down.weight.requires_grad_(False)
    with OffloadEngine(model, **OPTIONS, **in_ram()) as engine:
        assert [item.unit.name for item in engine.plan.units if not item.has_spares] == ["blocks.3"]


def test_the_cpu_s_compute_leaves_no_cores_for_updates_in_backward(tmp_path: Path):
    with OffloadEngine(built(), **OPTIONS, host_memory=1 << 30) as engine:
        assert not engine.plan.updates_early and engine.plan.memory["spare copies"]["host"] == 0


LOOPS = {
    "never": [with_engine_step, with_scaler],
    "always": [with_own_clipping],
    "sometimes": [with_engine_step],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("clipped", "loop"), [(clipped, loop) for clipped in LOOPS for loop in LOOPS[clipped]])
def test_units_in_ram_are_updated_in_backward_with_the_bits_of_the_step(clipped: str, loop: Any):
    bound = {"never": NEVER, "always": ALWAYS, "sometimes": sorted(norms_of(loop))[3]}[clipped]
    expected_losses, expected, *_ = trained_in_memory(loop, bound)
    given = in_ram(**loop(bound)[0])
    losses, weights, num_begun, left, _ = trained(loop, bound, **given)
    assert losses == expected_losses and equal(weights, expected) and given["device"].violations == []
    learnt = 3 if loop is with_scaler else 1
    if clipped == "never":
        assert (
            all(num_begun[learnt:]) and sorted(left[learnt:])[len(left[learnt:]) // 2] < 7
        )  # of 15; others may have the cores
    elif clipped == "always":
        assert not any(num_begun[learnt:])
    else:
        assert any(num_begun) and max(left) == 15 > min(left)


def test_what_is_updated_is_what_a_state_dict_a_weight_and_a_commit_show(tmp_path: Path):
    options = {"precision": "bf16", "gradient_accumulation_steps": 2}

    def outcome(**given: Any) -> tuple[list[Any], int]:
        seen: list[Any] = []
        with OffloadEngine(built(), **{**OPTIONS, **options}, **given) as engine:
            updates = engine._session.parts.trained.updates
            for number, (tokens, targets) in enumerate(batches(4)):
                for _ in range(engine.config.gradient_accumulation_steps):
                    engine.backward(loss_of(engine(tokens), targets))
                drain(updates.updater._worker)
                if number == 1:  # looks change nothing, and see what the last step has made
                    seen.append(engine.module.blocks[5].norm.weight.sum().item())
                if number == 2:  # an update that has run is void
                    with torch.no_grad():
                        engine.module.blocks[5].norm.weight.mul_(1.5)
                engine.step()
                if number == 2:
                    engine.save_checkpoint(tmp_path / f"{len(given)}", tag="two")
            states = engine.optimizer.state_dict()["state"]
            seen += [states[index]["exp_avg"].sum().item() for index in sorted(states)]
            weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        with OffloadEngine(built(), **{**OPTIONS, **options}) as engine:
            engine.load_checkpoint(tmp_path / f"{len(given)}", tag="two")
            seen += [p.sum().item() for p in engine.module.parameters()]
        return [*seen, *(value.sum().item() for value in weights.values())], len(updates.speculative.units)

    given = in_ram(**options)
    assert outcome(**given) == outcome()
    assert given["device"].violations == [] and given["device"].allocated_bytes == 0


def test_a_gradient_that_is_not_finite_leaves_what_was_there():
    given = in_ram()
    with OffloadEngine(built(), **OPTIONS, **given) as engine:
        (tokens, targets), *_ = batches(1)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        begun = engine._session.parts.trained.updates.speculative.of_unit
        engine.module.blocks[0].norm.weight.register_hook(lambda gradient: gradient * torch.inf)
        engine.backward(loss_of(engine(tokens), targets))
        drain(engine._session.parts.trained.updates.updater._worker)
        assert len(begun) > 6
        with pytest.raises(Exception, match="finite"):
            engine.step()
        assert equal({name: p.detach().clone() for name, p in engine.module.named_parameters()}, before)
