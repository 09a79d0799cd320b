"""Speculative updates where a device computes: gradients are looked at when they have come to the host, and the bits
are those of the CPU with everything in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import device_schedules
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
    with_fp16,
    with_least,
    with_own_clipping,
    with_scaler,
)
from tiny import Tiny, batches, loss_of, train

from offload import OffloadEngine
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedEvent
from offload.units import UnitSpec
from offload.update.speculative import SpeculativeUpdate, SpeculativeUpdates, Stage
from swapper import DurableStore, Extent


@pytest.fixture(autouse=True)
def _nothing_depends_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    let_gradients_come_first(monkeypatch)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units whose speculative updates were begun, in order."""
    names: list[str] = []
    begin = SpeculativeUpdates.begin

    def tell(speculative: SpeculativeUpdates, unit: UnitSpec, update: Any) -> bool:
        if update is not None:
            names.append(unit.name)
        return begin(speculative, unit, update)

    monkeypatch.setattr(SpeculativeUpdates, "begin", tell)
    return names


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """What speculative updates have become, in order."""
    seen: list[Stage] = []
    become = SpeculativeUpdate.become
    monkeypatch.setattr(
        SpeculativeUpdate, "become", lambda speculative, stage: seen.append(stage) or become(speculative, stage)
    )
    return seen


def streaming(path: Path, make_model: Callable[[], Tiny] = built, share: float = 1, **options: Any) -> dict[str, Any]:
    """Options for a device with the least memory, and ``share`` of the least host memory."""
    given: dict[str, Any] = {"nvme_path": path, "device": SimulatedDevice(seed=3)}
    with_least(given, "device_memory", "host_memory", make_model=make_model, **options)
    given["host_memory"] = int(share * given["host_memory"])
    return given


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


LOOPS = {
    "never": [with_engine_step, with_fp16, with_scaler],
    "always": [with_own_clipping],
    "sometimes": [with_engine_step],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("clipped", "loop"), [(clipped, loop) for clipped in LOOPS for loop in LOOPS[clipped]])
def test_steps_that_are_not_clipped_are_updated_early_and_those_that_are_do_not_try(
    clipped: str, loop: Any, tmp_path: Path
) -> None:
    bound = {"never": NEVER, "always": ALWAYS, "sometimes": sorted(norms_of(loop))[3]}[clipped]
    expected_losses, expected, *_ = trained_in_memory(loop, bound)
    given = streaming(tmp_path, share=1.2, **loop(bound)[0])
    losses, weights, num_begun, left, _ = trained(loop, bound, **given)
    assert losses == expected_losses and equal(weights, expected) and given["device"].violations == []
    learnt = 3 if loop is with_scaler else 1  # how many backwards a step has, and what the scale is
    if clipped == "never":
        assert all(num_begun[learnt:]) and max(left[learnt:]) < 7  # of 15 units
    elif clipped == "always":
        assert not any(num_begun[learnt:])
    else:
        assert any(num_begun) and max(left) == 15 > min(left)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"precision": "bf16"}, 1),
        ({"gradient_accumulation_steps": 3}, 1.1),
        ({"precision": "bf16", "durable": 2}, 1),
    ],
    ids=["all stored", "some in RAM, micro-batches", "durable"],
)
def test_what_is_stored_is_updated_before_the_step_and_the_next_forward_reads_no_more_of_it(
    options: dict[str, Any], share: float, begun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, **options}
    read: list[Extent] = []
    original = DurableStore.read

    def tell(store: DurableStore, extent: Extent, *args: Any, **more: Any) -> Any:
        read.append(extent)
        return original(store, extent, *args, **more)

    monkeypatch.setattr(DurableStore, "read", tell)

    def outcome(engine: OffloadEngine) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = []
        session = engine._session
        session.parts.trained.updates.speculative.balance = lambda forward, backward: (
            None
        )  # it follows the disk, which has its own mind
        streamed = [item.unit for item in engine.plan.units if item.streamed]
        stored = [tile.states.stored for unit in streamed for tile in session.parts.tiers.homes[unit.index].tiles]
        states = {extent for home in stored if home is not None for extent in home.extents}
        for tokens, targets in batches(3):
            for _ in range(engine.config.gradient_accumulation_steps):
                loss = loss_of(engine(tokens), targets)
                losses.append(loss.item())
                drain(session.parts.trained.updates.updater._worker)
                begun.clear()
                engine.backward(loss)
            drain(session.parts.trained.updates.updater._worker)
            assert sorted(begun) == sorted(unit.name for unit in streamed)
            read.clear()
            engine.step()
            engine(tokens)
            engine.synchronize()
            assert not states & set(read)
        return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    with OffloadEngine(built(), **{name: options[name] for name in options if name != "durable"}) as engine:
        expected = outcome(engine)
    given = streaming(tmp_path, share=share, **options)
    with OffloadEngine(built(), **options, **given) as engine:
        assert sum(item.streamed for item in engine.plan.units) >= 14  # of 15
        losses, weights = outcome(engine)
    assert losses == expected[0] and equal(weights, expected[1])
    assert given["device"].violations == [] and given["device"].allocated_bytes == 0


def test_without_room_for_second_places_all_states_are_read_in_the_next_forward(
    begun: list[str], tmp_path: Path
) -> None:
    given = streaming(tmp_path)
    with OffloadEngine(built(), **OPTIONS, **given) as engine:
        needed = sum(engine.plan.nvme_bytes.values())
    with OffloadEngine(built(), nvme_capacity=needed, **OPTIONS, **given) as engine:
        assert not engine.plan.speculative
        train(engine)
    assert begun == []


def tied_and_frozen() -> Tiny:
    model = built()
    model.head.weight = model.embed.weight
    model.blocks[3].requires_grad_(False)
    return model


def test_a_tied_weight_and_a_frozen_block_change_no_bits(begun: list[str], tmp_path: Path) -> None:
    with OffloadEngine(tied_and_frozen(), **OPTIONS) as engine:
        expected = train(engine)
    given = streaming(tmp_path, tied_and_frozen)
    with OffloadEngine(tied_and_frozen(), **OPTIONS, **given) as engine:
        losses, weights = train(engine)
    assert losses == expected[0] and equal(weights, expected[1])
    assert len(begun) > 6 and "blocks.3" not in begun
    assert given["device"].violations == []


def test_a_gradient_that_comes_after_all_makes_an_speculative_update_void(
    begun: list[str], stages: list[Stage], tmp_path: Path
) -> None:
    def outcome(**given: Any) -> dict[str, torch.Tensor]:
        with OffloadEngine(built(), **OPTIONS, **given) as engine:
            for num_backwards, (tokens, targets) in zip((1, 2, 2), batches(3), strict=True):
                begun.clear()
                stages.clear()
                for _ in range(num_backwards):
                    loss_of(engine(tokens), targets).backward()
                assert not given or begun
                if given and stages.count(Stage.OVER) + stages.count(Stage.VOID) > 0:
                    void.append(num_backwards)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    void: list[int] = []
    expected = outcome()
    assert equal(outcome(**streaming(tmp_path, share=1.2)), expected)
    assert void == [2]  # in the second step; the third one is expected to have two backwards


def test_gradients_that_are_dropped_leave_nothing_of_the_updates_they_began(begun: list[str], tmp_path: Path) -> None:
    def outcome(**given: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        with OffloadEngine(built(), **OPTIONS, **given) as engine:
            (tokens, targets), *_ = batches(1)
            engine.backward(loss_of(engine(tokens), targets))
            engine.optimizer.zero_grad()
            return train(engine)

    expected = outcome()
    losses, weights = outcome(**streaming(tmp_path))
    assert begun and losses == expected[0] and equal(weights, expected[1])


def test_a_step_that_never_comes_keeps_no_one_from_closing(begun: list[str], tmp_path: Path) -> None:
    given = streaming(tmp_path)
    with OffloadEngine(built(), **OPTIONS, **given) as engine:
        (tokens, targets), *_ = batches(1)
        engine.backward(loss_of(engine(tokens), targets))
        assert begun
    assert given["device"].allocated_bytes == 0 and not given["device"].pinned
    assert given["device"].violations == []


def test_an_error_of_a_copy_to_the_host_is_raised_and_ends_the_updates_under_way(
    begun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = streaming(tmp_path)
    wait = SimulatedEvent.wait

    def fail(event: SimulatedEvent) -> None:
        wait(event)
        if event.stream.name == "to_host" and len(begun) == 5:
            raise RuntimeError("the link is down")

    engine = OffloadEngine(built(), **OPTIONS, **given)
    (tokens, targets), *_ = batches(1)
    monkeypatch.setattr(SimulatedEvent, "wait", fail)
    with pytest.raises(RuntimeError, match="the link is down"):
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    monkeypatch.undo()
    engine.close()
    assert len(begun) == 5 and given["device"].allocated_bytes == 0


def test_the_gradients_of_a_unit_are_complete_when_all_that_were_taken_have_come(tmp_path: Path) -> None:
    with OffloadEngine(built(), **OPTIONS, **streaming(tmp_path, share=1.2)) as engine:
        tiers = engine._session.parts.tiers
        transport, unit = tiers.computing.moving[0].transport, engine.plan.units[1].unit
        first, *_ = unit.trainable

        def take() -> None:
            transport.take(unit, first, torch.ones(first.shape))

        take()
        transport.close(unit)
        assert list(transport.complete()) == [unit] and list(transport.complete()) == []
        assert tiers.gradients.of(unit)[first].sum_squares == first.numel
        transport.close(unit)
        take()
        assert list(transport.complete()) == []  # more is coming
        transport.close(unit)
        assert list(transport.complete()) == [unit]
        transport.close(unit)
        transport.settle()
        transport.forget(unit)
        assert list(transport.complete()) == []


def test_a_random_program_updates_early_and_gives_the_bits_of_the_cpu(tmp_path: Path) -> None:
    speculative: Counter[str] = Counter()
    assert device_schedules.check(57, tmp_path, speculative) == []
    assert speculative["begun"] >= speculative["flipped"] > 0


@pytest.mark.parametrize(("flipped", "status"), [(0, 1), (1, 0)])
def test_programs_that_update_nothing_early_prove_nothing(
    flipped: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(seed: int, folder: Path, speculative: Counter[str]) -> list[str]:
        speculative["flipped"] += flipped
        return []

    monkeypatch.setattr(device_schedules, "check", check)
    monkeypatch.setattr("sys.argv", ["device_schedules.py", "--programs", str(device_schedules.NUM_SPECULATIVE)])
    assert device_schedules.main() == status
    assert "30 programs from seed 0: 0 went wrong" in capsys.readouterr().out
