"""Steps on hosts with many cores and a GPU, all of the model in RAM, played with the plan that the engine makes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from offload.play.schedule import Places, Steps, UnitWork, bound_seconds, step_seconds
from offload.predict.machine import Machine, described
from offload.predict.model import Model, from_count
from offload.predict.prediction import Prediction, predict
from offload.predict.workload import Workload

GIB = 1 << 30


@cache
def model_of(billions: int) -> Model:
    return from_count(billions * 10**9)


def host(cores: int, memory_bandwidth: float, gpu: str = "h100", host_bytes: int = 1024 * GIB) -> Machine:
    return described(gpu, host_bytes=host_bytes, cores=cores, memory_bandwidth=memory_bandwidth)


def played(machine: Machine, batch: int, *, clipped: bool = False) -> Prediction:
    return predict(model_of(7), machine, Workload(batch=batch, clipped=clipped, activations="recompute"))


def reached(prediction: Prediction) -> float:
    """Share of the step that its largest resource is busy, or that its order takes at least."""
    return max(prediction.bound_seconds, prediction.schedule_seconds) / prediction.seconds


SLOW, FAST = ("4090", 16, 80e9), ("h100", 64, 300e9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("billions", "of_host", "batch"), [
    (7, SLOW, 1), (7, SLOW, 4), (7, FAST, 4), (7, FAST, 16), (70, SLOW, 1), (70, FAST, 1), (70, FAST, 4),
])  # fmt: skip
def test_a_step_in_ram_takes_little_more_than_what_limits_it(
    billions: int, of_host: tuple[str, int, float], batch: int, clipped: bool
):
    gpu, cores, memory_bandwidth = of_host
    machine = host(cores, memory_bandwidth, gpu, 2048 * GIB)
    workload = Workload(batch=batch, clipped=clipped, activations="recompute")
    assert reached(predict(model_of(billions), machine, workload)) >= 0.9


def test_the_units_that_forward_begins_with_hide_the_first_updates_and_copies():
    """A layer is computed in 2 ms here, is copied in 8 and updated in 18."""
    assert reached(played(host(64, 300e9), 1)) >= 0.89


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


def test_an_update_beside_costs_what_it_takes_longer_and_that_only_before_the_verdict():
    works = [UnitWork(forward=1.0, backward=2.0, sweep=2.0, eligible=True) for _ in range(6)]
    places, early, late = Places(6, 6), Steps(frozenset(range(6))), Steps()
    assert step_seconds(works, places, early) == 6 * 3 + 2 < step_seconds(works, places, late)
    costly = [replace(work, beside=0.5) for work in works]
    assert step_seconds(works, places, early) < step_seconds(costly, places, early) < step_seconds(works, places, late)
    assert step_seconds(costly, places, late) == step_seconds(works, places, late)


def test_the_unit_that_forward_needs_first_is_updated_first():
    """In the order in which gradients come the first unit would be the last one."""
    works = [UnitWork(forward=1.0, backward=1.0, sweep=1.5, eligible=True) for _ in range(8)]
    assert step_seconds(works, Places(8, 8), Steps(frozenset(range(8)))) <= 8 * 2 + 2 * 1.5


def test_the_order_of_a_step_bounds_it_where_updates_or_copies_must_come_under_forward():
    places = Places(8, 2)
    works = [UnitWork(forward=1.0, backward=2.0, sweep=1.5, to_device=0.5) for _ in range(8)]
    assert bound_seconds(works, places, 1, clipped=False) == 8 * 3
    assert bound_seconds(works, places, 1, clipped=True) == 8 * 1.5 + 8 * 2
    slow = [replace(work, to_device=1.5) for work in works]
    assert bound_seconds(slow, places, 1, clipped=False) == 6 * 1.5 + 8 * 2
    assert bound_seconds(slow, places, 3, clipped=False) == 6 * 1.5 + 8 * 2 + 2 * 8 * 3
    for clipped, early in ((False, frozenset(range(8))), (True, frozenset())):
        for each in (works, slow):
            steps = Steps(early)
            assert step_seconds(each, places, steps) >= bound_seconds(each, places, 1, clipped=clipped)
