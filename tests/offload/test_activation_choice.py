"""What becomes of activations with "auto": chosen by the bytes and times of the first step, with the bits of "keep"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import batches, loss_of, train

from offload import OffloadEngine
from offload.model.activation_choice import MeasuredActivations
from offload.plan.activations import Choice, UnitActivations, choose
from offload.testing.simulated import SimulatedDevice


def unit(forward_seconds: float = 1.0, nvme_seconds: float = 1.0, inputs: int = 10, saved: int = 100) -> Any:
    return UnitActivations(inputs, saved, forward_seconds, nvme_seconds)


def test_while_compute_is_slowest_units_that_save_most_seconds_for_their_bytes_are_not_run_again():
    units = [unit(1.0), unit(3.0), unit(2.0)]
    assert choose(units, "nvme", 250, 100.0, 3.0) == Choice(["nvme", "keep", "keep"], 200)
    assert choose(units, "nvme", 1000, 100.0, 3.0) == Choice(["keep"] * 3, 300)
    assert choose(units, "nvme", 99, 100.0, 3.0) == Choice(["nvme"] * 3, 0)


def test_while_nvme_is_slowest_inputs_stay_in_memory_as_far_as_it_has_room():
    units = [unit() for _ in range(3)]
    assert choose(units, "nvme", 25, 5.0, 100.0) == Choice(["recompute", "recompute", "nvme"], 20)
    assert choose(units, "nvme", 1000, 5.0, 100.0) == Choice(["recompute"] * 3, 30)  # and what else there is helps not


def test_it_stops_when_the_slowest_part_is_one_that_memory_does_not_help():
    """Compute is slowest until one unit is not run again; then NVMe is, until its inputs stay."""
    units = [unit(4.0, 1.0), unit(2.0, 1.0)]
    assert choose(units, "nvme", 1000, 10.0, 9.0) == Choice(["keep", "recompute"], 110)


def test_where_inputs_are_in_memory_anyway_keeping_takes_the_rest_alone():
    assert choose([unit(), unit()], "recompute", 90, 5.0, 0.0) == Choice(["keep", "recompute"], 90)


def test_a_unit_whose_inputs_came_back_for_nvme_may_still_be_kept():
    units = [unit(4.0, 4.0)]
    assert choose(units, "nvme", 100, 5.0, 6.0) == Choice(["keep"], 100)


def chosen(engine: OffloadEngine) -> MeasuredActivations:
    found = engine._session.parts.activations.chosen
    assert isinstance(found, MeasuredActivations)
    return found


def test_auto_over_nvme_has_the_bits_of_keep(make_model: Any, tmp_path: Path):
    options: dict[str, Any] = {"lr": 1e-2, "nvme_path": tmp_path, "host_memory": "8MiB", "tile_bytes": 65536}
    with OffloadEngine(make_model(), **options) as engine:
        expected = train(engine, 3)
    with OffloadEngine(make_model(), **options, activations="auto", activation_memory="64KiB") as engine:
        assert same(train(engine, 3), expected)
        assert chosen(engine).is_over


def same(left: Any, right: Any) -> bool:
    return left[0] == right[0] and all(torch.equal(left[1][name], right[1][name]) for name in left[1])


def test_auto_has_the_bits_of_keep_and_keeps_all_where_compute_is_slowest_and_memory_has_room(make_model: Any):
    with OffloadEngine(make_model(), lr=1e-2) as engine:
        expected = train(engine, 3)
    with OffloadEngine(make_model(), lr=1e-2, activations="auto") as engine:
        assert engine.plan.activation_bytes == 0
        assert same(train(engine, 3), expected)
        assert [forward.is_on for forward in chosen(engine).forwards] == [False] * 4
        assert chosen(engine).kept_bytes == sum(each.saved_bytes - each.input_bytes for each in chosen(engine).costs)


@pytest.mark.parametrize(("free_bytes", "num_recomputed"), [(0, 4), (400_000, 3), (1 << 40, 0)])
def test_auto_takes_no_more_than_the_first_step_has_left_free(
    free_bytes: int, num_recomputed: int, make_model: Any, monkeypatch: pytest.MonkeyPatch
):
    with OffloadEngine(make_model(), lr=1e-2) as engine:
        expected = train(engine, 3)
    with OffloadEngine(make_model(), lr=1e-2, activations="auto") as engine:  # without NVMe compute is the slowest
        with monkeypatch.context() as patch:
            patch.setattr("offload.device.host.Cpu.free_bytes", lambda self: free_bytes)
            assert same(train(engine, 3), expected)
        assert chosen(engine).kept_bytes <= 0.75 * free_bytes
        assert [forward.is_on for forward in chosen(engine).forwards].count(True) == num_recomputed


def test_what_is_alive_of_several_micro_batches_together_is_counted(make_model: Any):
    with OffloadEngine(make_model(), lr=1e-2, activations="auto", gradient_accumulation_steps=3) as engine:

        def run(micro_batch: Any) -> None:
            engine.backward(loss_of(engine(micro_batch[0]), micro_batch[1]))

        engine.together(batches(3), run)
        assert [each.most_alive for each in chosen(engine).costs] == [3] * 4
        assert [each.num_alive for each in chosen(engine).costs] == [0] * 4
        engine.step()


def test_on_a_device_memory_that_is_promised_to_activations_goes_to_no_unit(make_model: Any, tmp_path: Path):
    resident = []
    for promised in (0, 1 << 40):
        device = SimulatedDevice(memory_bytes=64 << 20, unsupported_reason="planted")
        with OffloadEngine(
            make_model(), nvme_path=tmp_path, device=device, device_memory="auto", activations="auto", lr=1e-2
        ) as engine:
            chosen(engine).kept_bytes = promised
            chosen(engine).is_over = True
            train(engine, 2)
            resident.append(engine.plan.device.total_bytes)
    assert resident[0] > resident[1]
