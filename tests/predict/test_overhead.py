"""What the engine itself takes of the cores, as it is tried and as it is charged."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Tiny

from offload.predict import prediction, probe
from offload.predict.machine import Cores, Machine
from offload.predict.model import Model
from offload.predict.overhead import record_seconds, unit_seconds
from offload.predict.prediction import least_host_bytes, predict
from offload.predict.workload import Workload
from offload.report.report import Bandwidths


def _machine() -> Machine:
    """One with no host memory yet."""
    return Machine(
        host_bytes=0, nvme_bytes=1 << 40, nvme=Bandwidths(2e9, 4e9, 1.0), cores=Cores(5e10, 5e10), update=4e10,
        checksum=2e10, unit_seconds=0.0, record_seconds=0.0,
    )  # fmt: skip


def _model() -> Model:
    with torch.device("meta"):
        return Model("tiny", Tiny(), 4, 128, 0, 256)


def test_a_unit_and_a_record_on_nvme_take_a_part_of_a_core(tmp_path: Path):
    assert 0 < unit_seconds() < 0.1
    assert 0 < record_seconds(tmp_path) < 0.1
    assert not list(tmp_path.iterdir())


def test_each_record_that_passes_nvme_is_charged_to_the_cores():
    machine, model = _machine(), _model()
    workload = Workload(batch=4, sequence=16, precision="fp32")
    machine = replace(machine, host_bytes=least_host_bytes(model, machine, workload))
    free = predict(model, machine, workload)
    charged = predict(model, replace(machine, record_seconds=1e-3), workload)
    assert free.plan is not None
    records = sum(len(item.tiles) + 2 for item in free.plan.units)  # states, weights and gradients: all on NVMe
    assert charged.links["compute"] - free.links["compute"] == pytest.approx(records * 1e-3, rel=0.02)
    resident = replace(machine, host_bytes=1 << 30)
    assert (
        predict(model, replace(resident, record_seconds=1.0), workload).seconds
        == predict(model, resident, workload).seconds
    )


def test_placements_of_one_batch_are_kept_for_another_and_are_the_same_as_new_ones():
    machine, model = _machine(), _model()
    small, large = (Workload(batch=batch, sequence=16, precision="fp32") for batch in (4, 8))
    machine = replace(machine, host_bytes=least_host_bytes(model, machine, small))
    assert predict(model, machine, small).fits
    made = prediction._placements.cache_info().misses
    kept = predict(model, machine, large).plan
    assert prediction._placements.cache_info().misses == made
    prediction._placements.cache_clear()
    for cache in (prediction.predict, prediction._placed):
        cache.cache_clear()
    assert predict(model, machine, large).plan == kept


def test_gradients_are_put_away_at_the_rate_that_a_backward_has_shown():
    with torch.device("meta"):
        model = Model("tiny", Tiny(), 4, 128, 0, 256)
    workload = Workload(batch=4, sequence=16, precision="fp32")
    cores = probe.core_rates(probe.Trial.of(model, workload), 1.0, lambda: None, lambda: time.sleep(0.001))
    assert 0 < cores.gradients < math.inf
    machine = Machine(
        host_bytes=1 << 30, nvme_bytes=0, nvme=None, cores=replace(cores, gradients=math.inf), update=4e10,
        checksum=2e10, unit_seconds=0.0, record_seconds=0.0,
    )  # fmt: skip
    free = predict(model, machine, workload)
    charged = predict(model, replace(machine, cores=replace(cores, gradients=1e6)), workload)
    traffic = 8 * sum(unit.trainable_numel for unit in model.units(workload.dtype))  # read and written, in fp32
    assert charged.links["compute"] - free.links["compute"] == pytest.approx(traffic / 1e6, rel=0.02)


def test_what_compute_and_sweeps_reach_together_says_how_much_of_the_cores_they_lose():
    """Both take four times as long as alone: half of the cores' work is lost."""

    def sweep() -> None:
        time.sleep(0.02 if threading.current_thread() is threading.main_thread() else 0.08)

    lost = probe._lost(lambda: time.sleep(0.08), 0.02, 1.0, sweep, lambda: None)
    assert lost == pytest.approx(0.5, abs=0.2)
    assert probe._lost(lambda: time.sleep(0.04), 0.02, 1.0, lambda: time.sleep(0.02), lambda: None) == 0.0


def test_a_slow_core_is_tried_on_fewer_tokens(monkeypatch: pytest.MonkeyPatch):
    trial, now = probe.Trial(1024, 2, 4, 512, 1024, torch.float32, ()), 0.0
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now)

    def size_at(tokens_per_second: float) -> tuple[int, int]:
        def work(batch: int, sequence: int) -> Callable[[], object]:
            def round_() -> None:
                nonlocal now
                now += batch * sequence / tokens_per_second

            return round_

        return probe._size_of_round(work, trial)

    assert size_at(1e6) == (2, 512)  # all that may be tried
    assert size_at(1000) == (1, 128)  # 64 tokens are over too soon to be twice as long as is waited for
    assert size_at(1) == (1, 16)
