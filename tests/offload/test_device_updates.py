"""Updates of what rests on the host, on a simulated device: the same bits whichever side makes them, bytes, order."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from campaign import forget_in
from device_schedules import watched
from tiny import Tiny, batches, loss_of, train

from offload import BudgetError, NonFiniteGradient, OffloadEngine, StorageCorrupt
from offload.optim.formats import Formats
from offload.optim.rule import TileBytes
from offload.plan.buffers import tile_parts
from offload.plan.moved import UnitBytes
from offload.plan.plan import Tier
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedEvent, SimulatedStream
from offload.units import Tile
from offload.update.device_side import DeviceSide, Trip, tile_buffers
from offload.update.host_side import HostSide
from offload.update.step import UnitUpdate

TILE_BYTES = 64 * 1024

CPU, DEVICE = 1.0, 1e15
"""Bytes per second of a link over which the device gets no tiles, or all but the first one of each step."""


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many tiles each side has updated. The CPU is said to take a second for each."""
    counts: Counter[str] = Counter()
    give, begin, took = HostSide.begin, DeviceSide.begin, DeviceSide.cpu_took

    def count_cpu(side: HostSide, *args: Any) -> Any:
        counts["cpu"] += 1
        return give(side, *args)

    def count_device(side: DeviceSide, *args: Any) -> Any:
        counts["device"] += 1
        return begin(side, *args)

    def take_a_second(side: DeviceSide, tile: Tile, seconds: float) -> None:
        took(side, tile, 1.0)

    monkeypatch.setattr(HostSide, "begin", count_cpu)
    monkeypatch.setattr(DeviceSide, "begin", count_device)
    monkeypatch.setattr(DeviceSide, "cpu_took", take_a_second)
    return counts


def least(make: Callable[..., OffloadEngine], budget: str) -> int:
    with pytest.raises(BudgetError) as caught:
        make(**{budget: 1})
    return caught.value.needed_bytes


@pytest.fixture
def make(make_model: Callable[..., Tiny], tmp_path: Path) -> Callable[..., OffloadEngine]:
    """An engine whose units have several tiles; there is room for updates on the device, and for a home or two."""

    def make(device: Any, *, on_nvme: bool = False, **options: Any) -> OffloadEngine:
        def build(**budgets: int) -> OffloadEngine:
            model = make_model(width=64, num_blocks=3)
            settings = {
                "precision": "bf16",
                "nvme_path": tmp_path,
                "tile_bytes": TILE_BYTES,
                "lr": 1e-2,
                **options,
                **budgets,
            }
            return OffloadEngine(model, device=device, **settings)

        budgets = {}
        if device != "cpu":
            budgets["device_memory"] = least(build, "device_memory") * 7 // 2
        if on_nvme:
            budgets["host_memory"] = least(partial(build, **budgets), "host_memory")
        return build(**budgets)

    return make


def outcome(engine: OffloadEngine, steps: int = 3) -> Any:
    """Losses, weights and states of a few steps."""
    with engine:
        return *train(engine, steps), engine.optimizer.state_dict()["state"]


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


OPTIONS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16", "gradient_clipping": 0.5},
    {"precision": "fp32", "gradient_accumulation_steps": 2},
    {"precision": "bf16", "gradient_accumulation_steps": 3, "moments_dtype": "bf16"},
    {"precision": "bf16", "moments_dtype": "bf16", "master_dtype": "bf16"},
    {"precision": "fp32", "optimizer": "adam", "optimizer_options": {"amsgrad": True}},
    {"precision": "bf16", "optimizer": "lion"},
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("on_nvme", [False, True], ids=["in RAM", "on NVMe"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_the_bits_are_the_same_whichever_side_updates(
    make: Callable[..., OffloadEngine], sides: Counter[str], options: dict[str, Any], on_nvme: bool
) -> None:
    expected = outcome(make("cpu", **options))
    for seed, speed in enumerate((CPU, DEVICE)):
        device = SimulatedDevice(seed, link_speed=speed)
        engine = make(device, on_nvme=on_nvme, **options)
        assert (engine.plan.nvme_bytes["states"] > 0) == on_nvme
        sides.clear()
        assert equal(outcome(engine), expected)
        assert device.violations == [] and device.allocated_bytes == 0
        if speed == CPU:
            assert sides["device"] == 0 < sides["cpu"]
        else:
            assert sides["device"] > 0
            assert 0 <= sides["cpu"] - engine.global_step <= 1  # each step's first tile, and the first early one


def test_what_crosses_the_link_for_updates_is_in_the_report_and_in_the_timeline(
    make: Callable[..., OffloadEngine], sides: Counter[str], tmp_path: Path
) -> None:
    reports, tracks = [], []
    with make(SimulatedDevice(link_speed=CPU)) as engine:
        host_memory = engine.plan.host_bytes - engine.plan.spare_host_bytes  # none begins in backward
    for speed in (CPU, DEVICE):
        with make(SimulatedDevice(link_speed=speed), host_memory=host_memory) as engine:
            train(engine, 3)
            reports.append(engine.report())
            engine.timeline(tmp_path / "trace.json")
            events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
            tracks.append(Counter(event["cat"] for event in events if event["ph"] == "X"))
    without, found = reports
    sent = [tile for item in engine.plan.units if item.weights is not Tier.DEVICE for tile, _ in item.tiles][1:]
    numel, states = sum(tile.numel for tile in sent), sum(tile.nbytes for tile in sent)
    assert found.to_device_bytes - without.to_device_bytes == states + 4 * numel
    assert found.to_host_bytes - without.to_host_bytes == states + 2 * numel
    assert tracks[0]["update on the device"] == 0 and tracks[1]["update on the device"] == len(sent)
    assert tracks[0]["update"] == len(sent) + 1 and tracks[1]["update"] == 1


def test_memory_for_updates_is_counted_to_the_byte_and_never_raises_the_least_budget(
    make_model: Callable[..., Tiny],
) -> None:
    device = SimulatedDevice()

    def make(**budget: int) -> OffloadEngine:
        return OffloadEngine(make_model(num_blocks=6), device=device, tile_bytes=TILE_BYTES, **budget, precision="bf16")

    needed = least(make, "device_memory")
    taken = []
    for factor in (2, 4, 5, 6, 8, 10, 100):
        device.most_allocated_bytes = 0
        with make(device_memory=needed * factor // 2) as engine:
            plan = engine.plan.device
            assert device.allocated_bytes == plan.updates_bytes + plan.squares_bytes + sum(plan.resident_bytes.values())
            tiles = [tile for item in engine.plan.units if item.weights is not Tier.DEVICE for tile, _ in item.tiles]
            if plan.updates_bytes:
                assert plan.updates_bytes == 2 * max(sum(tile_parts(tile, engine.plan.formats)) for tile in tiles)
                assert f"{plan.updates_bytes / (1 << 20):,.1f} MiB for updates of the other units" in str(plan)
            train(engine, 1)
            assert device.most_allocated_bytes <= plan.total_bytes - plan.gradients_bytes
            assert plan.total_bytes <= needed * factor // 2
            taken.append(plan.updates_bytes)
    assert taken[0] == 0 < taken[3] == taken[4] and taken[-1] == 0  # nothing is left that passes through


def test_auto_takes_memory_for_updates_where_there_is_plenty(make_model: Callable[..., Tiny]) -> None:
    def updates_bytes(memory_bytes: int) -> int:
        device = SimulatedDevice(memory_bytes=memory_bytes)
        with OffloadEngine(make_model(num_blocks=6), device=device, tile_bytes=TILE_BYTES, precision="bf16") as engine:
            assert not engine.plan.device.resident
            return engine.plan.device.updates_bytes

    assert updates_bytes(2 << 20) == 0 < updates_bytes(8 << 20)


@pytest.mark.parametrize(
    "options", [{"moments_dtype": "int8"}, {"optimizer": torch.optim.NAdam}, {"optimizer": "sgd", "precision": "fp32"}]
)
def test_the_cpu_updates_alone_without_a_kernel_or_states_to_send(
    make: Callable[..., OffloadEngine], sides: Counter[str], options: dict[str, Any]
) -> None:
    expected = outcome(make("cpu", **options))
    with make(SimulatedDevice(link_speed=DEVICE), **options) as engine:
        assert engine.plan.device.updates_bytes == 0 < engine.plan.device.squares_bytes
        assert equal(outcome(engine), expected) and sides["device"] == 0


@pytest.mark.parametrize("speed", [CPU, DEVICE])
def test_the_bound_of_host_memory_counts_updates_on_the_cpu_and_what_crosses_the_link(
    make: Callable[..., OffloadEngine], speed: float
) -> None:
    with make(SimulatedDevice(link_speed=speed)) as engine:
        moving = engine._session.parts.tiers.computing.moving[0]
        host_side = engine._session.parts.trained.updates.host_side
        for tokens, targets in batches(2):
            before = host_side.moved_bytes
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
            engine.synchronize()
        updated = sum(UnitBytes.of(item, engine.plan).in_memory for item in engine.plan.units)
        moved = host_side.moved_bytes - before
        assert moved == updated if speed == CPU else 0 < moved < updated  # the device moves the others over the link
        report = engine.report()
        crossed = report.to_device_bytes + report.to_host_bytes
        assert 0 < moving.host_memory.shared < float("inf") and crossed
        assert report.memory_seconds >= crossed / moving.host_memory.shared


TILE, FORMATS = Tile(0, 1000, 10_000), Formats(weights=2, master=2, grads=2)  # 14 kB there, 12 kB back


def updates(device: SimulatedDevice, nbytes: int = 2 * sum(tile_parts(TILE, FORMATS))) -> DeviceSide:
    return DeviceSide(None, FORMATS, Meter(), LinkRates(14e3, 12e3), tile_buffers(device, nbytes))


def send(updates: DeviceSide, memory: torch.Tensor) -> Trip:
    """Send the tile away and leave it as it is."""
    at = memory.data_ptr()
    return updates.begin(
        UnitUpdate(SimpleNamespace(name="unit"), ()), TILE, TileBytes.in_place(at, at + 10_000, at + 12_000)
    )


def test_the_side_is_that_which_will_be_done_first() -> None:
    device, memory = SimulatedDevice(), torch.zeros(14_000, dtype=torch.uint8)
    side = updates(device)
    assert not list(side.sooner([TILE] * 3))  # nobody knows what the CPU takes
    side.cpu_took(TILE, 1.9)
    assert next(iter(side.sooner([TILE] * 3))) == 1
    side.cpu_took(TILE, 2.3)
    assert next(iter(side.sooner([TILE] * 3))) == 0
    trip = send(side, memory)
    assert next(iter(side.sooner([TILE] * 3))) == 1  # it comes a second after the one before it
    side.end(trip)
    assert next(iter(side.sooner([TILE] * 3))) == 0
    side.begin_step()
    assert not list(side.sooner([TILE] * 3))
    small = updates(device, 8192)
    small.cpu_took(TILE, 1e9)
    assert not list(small.sooner([TILE] * 3))


def test_tiles_that_leave_are_not_the_cpus_and_come_back_one_after_the_other() -> None:
    device, memory = SimulatedDevice(), torch.zeros(14_000, dtype=torch.uint8)
    side = updates(device)
    side.cpu_took(TILE, 1.1)  # there and back is 2 seconds, and each further tile a second later
    sent = []
    for index in side.sooner([TILE] * 8):
        sent.append((index, send(side, memory)))
    assert [index for index, _ in sent] == [1, 3, 5, 7]
    side.drain()  # before the memory goes


def test_tiles_are_sent_by_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, memory = SimulatedDevice(), torch.arange(14_000).to(torch.uint8)
    side, may_copy = updates(device), threading.Event()
    copy = SimulatedStream.copy

    def copy_later(stream: SimulatedStream, *ends: torch.Tensor) -> None:
        assert may_copy.wait(30)
        copy(stream, *ends)

    monkeypatch.setattr(SimulatedStream, "copy", copy_later)
    trips = [send(side, memory) for _ in range(3)]  # whoever sends goes on
    assert not any(trip.is_over() for trip in trips)
    may_copy.set()
    for trip in trips:
        side.end(trip)
    side.close()
    assert device.violations == [] and device.allocated_bytes == 0


def test_a_tile_that_cannot_be_sent_is_over_and_its_error_is_raised_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device, memory = SimulatedDevice(), torch.zeros(14_000, dtype=torch.uint8)
    side = updates(device)

    def fail(stream: SimulatedStream, *ends: torch.Tensor) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(SimulatedStream, "copy", fail)
    trip = send(side, memory)
    with pytest.raises(RuntimeError, match="the link is down"):
        side.end(trip)
    assert trip.is_over()
    side.drain()
    side.cpu_took(TILE, 2.3)
    assert next(iter(side.sooner([TILE]))) == 0, "nothing is under way any more"
    side.close()
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_tile_comes_to_memory_that_is_there(forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if forgotten:
        forget_in("__init__", SimulatedStream)(monkeypatch)
    device, memory = SimulatedDevice(), torch.arange(14_000).to(torch.uint8)
    side = updates(device)
    side.end(send(side, memory))
    side.close()
    assert torch.equal(memory, torch.arange(14_000).to(torch.uint8))
    assert bool(device.violations) == forgotten and device.allocated_bytes == 0


@pytest.mark.each_value
@pytest.mark.parametrize("on_nvme", [False, True], ids=["in RAM", "on NVMe"])
@pytest.mark.parametrize("where", ["copy", "kernel", "record", "wait"])
def test_a_fault_on_the_way_reaches_the_training_thread_and_nothing_hangs(
    make: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch, where: str, on_nvme: bool
) -> None:
    for number in (1, 7):
        device = SimulatedDevice(seed=number, link_speed=DEVICE)
        engine = make(device, on_nvme=on_nvme)
        train(engine, 1)
        kind, count = (SimulatedEvent, 0) if where == "wait" else (SimulatedStream, 0)
        work = getattr(kind, where)

        def fail(self: Any, *args: Any, number: int = number, work: Any = work) -> Any:
            nonlocal count
            stream = self.stream if isinstance(self, SimulatedEvent) else self
            count += stream.name.startswith("stream")
            if stream.name.startswith("stream") and count == number:
                raise RuntimeError("planted")
            return work(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(kind, where, fail)
            with pytest.raises(RuntimeError, match="planted"):
                train(engine, 3)
        with pytest.raises(RuntimeError, match="planted"):
            engine(batches(1)[0][0])
        engine.close()
        assert device.allocated_bytes == 0 and not device.pinned and device.violations == []


def test_an_engine_may_close_while_tiles_are_away(make: Callable[..., OffloadEngine]) -> None:
    for seed in range(4):
        device = SimulatedDevice(seed, link_speed=DEVICE)
        engine = make(device)
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        engine.close()
        assert device.allocated_bytes == 0 and not device.pinned and device.violations == []


# Every access is ordered; and each of these is one forgotten wait, or memory used twice, which shows.


def violations(make: Callable[..., OffloadEngine], seed: int, on_nvme: bool) -> list[str]:
    device = SimulatedDevice(seed, link_speed=DEVICE)
    engine = make(device, on_nvme=on_nvme)
    try:
        with engine, watched(device, engine), contextlib.suppress(NonFiniteGradient):  # wrong numbers may end a step
            train(engine, 3)
    except StorageCorrupt as error:  # bytes that were used too early had another checksum
        return [*device.violations, str(error)]
    return device.violations


@pytest.mark.parametrize("on_nvme", [False, True], ids=["in RAM", "on NVMe"])
def test_every_access_is_ordered(make: Callable[..., OffloadEngine], sides: Counter[str], on_nvme: bool) -> None:
    for seed in range(2):
        assert violations(make, seed, on_nvme) == []
    assert sides["device"] > 0


def _count_too_early(patch: pytest.MonkeyPatch) -> None:
    """A unit is given back while its last tile is away."""
    begin = DeviceSide.begin

    def begin_and_finish(updates: DeviceSide, *args: Any) -> Any:
        trip = begin(updates, *args)
        updates._trips.remove(trip)
        return trip

    patch.setattr(DeviceSide, "begin", begin_and_finish)
    patch.setattr(DeviceSide, "end", lambda updates, trip: None)


def _share_one_place(patch: pytest.MonkeyPatch) -> None:
    """Tiles on two streams meet in the same memory."""
    begin = DeviceSide.begin

    def begin_in_one(updates: DeviceSide, *args: Any) -> Any:
        updates._buffers[1].memory = updates._buffers[0].memory
        return begin(updates, *args)

    patch.setattr(DeviceSide, "begin", begin_in_one)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "forget",
    [forget_in("end", SimulatedEvent), _count_too_early, _share_one_place],
    ids=["back-before-use", "unit-before-tile", "one-place"],
)
@pytest.mark.parametrize("on_nvme", [False, True], ids=["in RAM", "on NVMe"])
def test_a_forgotten_wait_shows(
    make: Callable[..., OffloadEngine],
    forget: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    on_nvme: bool,
) -> None:
    forget(monkeypatch)
    assert violations(make, 0, on_nvme)
