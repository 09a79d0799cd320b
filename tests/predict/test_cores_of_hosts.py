"""Steps on hosts with many cores and a GPU, all of the model in RAM, played with the plan that the engine makes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from offload.predict.machine import Machine, described
from offload.predict.model import Model, from_count
from offload.predict.prediction import Prediction, predict
from offload.predict.schedule import Places, Steps, UnitWork, step_seconds
from offload.predict.workload import Workload

GIB = 1 << 30


@cache
def seven_billion() -> Model:
    return from_count(7 * 10**9)


def host(cores: int, memory_bandwidth: float, gpu: str = "h100", host_bytes: int = 1024 * GIB) -> Machine:
    return described(gpu, host_bytes=host_bytes, cores=cores, memory_bandwidth=memory_bandwidth)


def played(machine: Machine, batch: int, *, clipped: bool = False) -> Prediction:
    return predict(seven_billion(), machine, Workload(batch=batch, clipped=clipped, activations="recompute"))


def reached(prediction: Prediction) -> float:
    """Share of the step that its largest resource is busy."""
    return max(prediction.links.values()) / prediction.seconds


@pytest.mark.parametrize("clipped", [False, True])
def test_64_cores_and_300_gb_a_second_keep_a_gpu_busy(clipped: bool):
    assert reached(played(host(64, 300e9), 4, clipped=clipped)) >= 0.9


def test_few_cores_take_longer_than_the_memory_allows():
    few, many = played(host(3, 300e9), 4), played(host(64, 300e9), 4)
    assert few.links["CPU updates"] == pytest.approx(5 * many.links["CPU updates"])
    assert few.seconds > many.seconds


def test_updates_in_backward_shorten_a_step_where_memory_is_slow():
    slow = host(16, 80e9, "4090", 256 * GIB)
    unclipped, clipped = played(slow, 4), played(slow, 4, clipped=True)
    assert unclipped.plan is not None and any(item.has_spares for item in unclipped.plan.units)
    assert unclipped.seconds < 0.85 * clipped.seconds
    assert reached(unclipped) > 0.85


def test_an_update_beside_holds_no_slot_and_costs_the_copy():
    works = [UnitWork(forward=1.0, backward=2.0, sweep=2.0, beside=0.5, eligible=True) for _ in range(6)]
    places, early = Places(6, 6), Steps(frozenset({3, 4, 5}))
    free = [replace(work, beside=0.0) for work in works]
    assert step_seconds(free, places, early) < step_seconds(free, places, Steps())
    costly = [replace(work, beside=9.0) for work in works]
    assert step_seconds(free, places, early) <= step_seconds(works, places, early) < step_seconds(costly, places, early)
