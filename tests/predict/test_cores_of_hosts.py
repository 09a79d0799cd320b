"""Steps on hosts with many cores and a GPU, all of the model in RAM, played with the plan that the engine makes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest

from offload.plan.plan import Tier
from offload.play.schedule import NOTHING_SHARED, Order, Places, Steps, UnitWork, bound_seconds, step_seconds
from offload.predict.machine import Machine, described, parse_drive
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
    assert reached(played(host(64, 300e9), 1)) >= 0.9


def test_tiles_are_large_where_a_device_computes_and_nothing_goes_to_nvme():
    """Each takes some Python, in which many cores sweep through 8 MiB."""

    def tile_mib(machine: Machine) -> float:
        plan = played(machine, 1).plan
        assert plan is not None
        tiles = [tile for item in plan.units if item.weights is not Tier.DEVICE for tile, _ in item.tiles]
        return max(tile.nbytes / tile.count for tile in tiles) / (1 << 20)

    assert tile_mib(host(64, 300e9)) == pytest.approx(64, rel=0.2)
    stored = described("h100", host_bytes=24 * GIB, drives=[parse_drive("7GB/s,5GB/s,4TB")])
    assert tile_mib(stored) == pytest.approx(8, rel=0.2)


def test_few_cores_take_longer_than_the_memory_allows():
    few, many = played(host(3, 300e9), 4), played(host(64, 300e9), 4)
    assert 4 < few.links["CPU updates"] / many.links["CPU updates"] < 5  # 60 GB/s against 300, shared with the link
    assert few.seconds > many.seconds


def test_updates_share_the_memory_with_what_crosses_the_link():
    """Many cores take all of it: an update then waits for the bytes of the link. A few leave it enough."""
    for cores, is_shared in ((64, True), (3, False)):
        machine = host(cores, 300e9)
        alone, shared = (played(one, 4) for one in (replace(machine, memory=math.inf), machine))
        crossing = sum(alone.links[f"link to the {end}"] for end in ("device", "host")) * machine.device.link
        longer = shared.links["CPU updates"] - alone.links["CPU updates"]
        assert longer == pytest.approx(crossing / 300e9 if is_shared else 0.0, rel=0.1, abs=1e-9)


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
    works = [UnitWork(forward=1.0, backward=2.0, sweep=1.5, to_device=0.5, eligible=True) for _ in range(8)]
    assert bound_seconds(works, places, 1, clipped=False) == 8 * 3
    assert bound_seconds(works, places, 1, clipped=True) == 8 * 1.5 + 0.5 + 1 + 8 * 2
    slow = [replace(work, to_device=1.5) for work in works]
    assert bound_seconds(slow, places, 1, clipped=False) == 6 * 1.5 + 8 * 2
    assert bound_seconds(slow, places, 3, clipped=False) == 6 * 1.5 + 8 * 2 + 2 * 8 * 3
    stored = [replace(work, update=3.0, late=0.25, streamed=True) for work in works]
    assert bound_seconds(stored, places, 1, clipped=True) == 8 * 3.25 + 8 * 2
    for each in (works, slow, stored):
        for clipped, early in ((False, frozenset(range(8))), (True, frozenset())):
            steps = Steps(early)
            assert step_seconds(each, places, steps) >= bound_seconds(each, places, 1, clipped=clipped)


def test_updates_pause_while_the_last_updated_unit_is_used():
    """Whatever comes first, its weights are needed in forward before its next gradients are there."""
    long = UnitWork(forward=1.0, backward=2.0, sweep=8.0, to_device=0.5, to_host=0.25, eligible=True)
    works, places = [*[long] * 5, replace(long, sweep=0.0, to_device=0.0, to_host=0.0, eligible=False)], Places(6, 6)
    pause = 0.5 + 2 * (1 + 2) + 0.25
    assert bound_seconds(works, places, 1, clipped=False) == 5 * 8 + pause
    assert 5 * 8 + pause <= step_seconds(works, places, Steps(frozenset(range(5)))) <= 5 * 8 + pause + 1
    assert bound_seconds(works, places, 1, clipped=True) == 5 * 8 + 0.5 + 2 * 1 + 6 * 2
    assert step_seconds(works, places, Steps()) >= bound_seconds(works, places, 1, clipped=True)
    tied = [replace(long, calls=2), *works[1:]]  # at work at both ends of the model
    assert bound_seconds(tied, places, 1, clipped=False) == 5 * 8 + pause + 1 + 2
    assert step_seconds(tied, places, Steps(frozenset(range(5)))) >= bound_seconds(tied, places, 1, clipped=False)


def test_copies_that_stay_are_not_brought_again_by_later_micro_batches():
    works = [UnitWork(forward=0.1, backward=0.2, to_device=1.0, to_device_again=0.25) for _ in range(8)]
    one, three = (step_seconds(works, Places(8, 8), Steps(micro_batches=count)) for count in (1, 3))
    assert one == pytest.approx(8 * 1.25, rel=0.1) and three - one == pytest.approx(2 * 8 * 0.5, rel=0.1)


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_micro_batches_keep_more_copies_on_the_device(micro_batches: int):
    """With units at home in all the room a step takes longer."""
    machine = host(64, 300e9)
    workload = Workload(micro_batches=micro_batches, activations="recompute")
    found = predict(model_of(13), machine, workload)
    assert found.plan is not None and found.plan.device.num_ahead == 2 * micro_batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.planning.NUM_AHEAD", 0)
        before = predict(from_count(13 * 10**9), machine, workload)  # no plan of this model is kept
    assert found.seconds < 0.95 * before.seconds


@pytest.mark.parametrize("seed", range(30))
def test_no_order_is_faster_than_its_bound(seed: int):
    draw = random.Random(seed)
    clipped, micro_batches, windows = draw.random() < 0.5, draw.choice([1, 1, 3]), draw.randint(2, 8)
    link, updated, stored = draw.choice([0.0, 0.5, 2.0]), draw.choice([0.0, 1.0, 6.0]), draw.choice([0.0, 0.0, 4.0])
    works = [
        UnitWork(
            forward=draw.random(), backward=2 * draw.random(), to_device=(here := link * draw.random()),
            to_device_again=here * draw.random(), to_host=here, sweep=updated * draw.random(),
            update=(on_drive := stored * draw.random()), late=on_drive / 8, streamed=on_drive > 0,
            eligible=draw.random() < 0.7, calls=2 if index == 0 and draw.random() < 0.3 else 1,
        )
        for index in range(8)
    ]  # fmt: skip
    order = Order(works, Places(4, windows), NOTHING_SHARED, micro_batches, 0.0, clipped)
    assert order.seconds(0.0) >= bound_seconds(works, order.places, micro_batches, clipped=clipped) - 1e-9
