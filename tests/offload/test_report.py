"""The report of a step: what it says to people, and the bound of a step whose updates had to wait."""

import gc
import sys
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import FrameType

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of
from torch import nn

import offload
from offload import OffloadEngine, Report
from offload.report.meter import Meter
from offload.report.report import Bandwidths, DriveUse, ExpertUse, LinkRates, MemoryRates
from offload.report.reporter import Reporter
from offload.report.trace import Span, Trace

RATES = Bandwidths(read=100.0, write=100.0, q=1.0)


class Store:
    """Bytes that were moved, as told."""

    backend = "io_uring"
    busy_seconds = 0.0

    class Moved:
        bytes = 0

    def __init__(self) -> None:
        self.read, self.write = Store.Moved(), Store.Moved()

    def statistics(self) -> "Store":
        return self

    def statistics_by_path(self) -> list["Store"]:
        return [self]


class Clock(Meter):
    """A meter whose time is told. All of it is compute but ``stalled``."""

    now = 0.0
    stalled = 0.0

    def so_far(self) -> tuple[float, float]:
        return self.now, self.stalled

    def restart(self) -> tuple[float, dict[str, float], float]:
        taken = self.now, {"update": self.stalled}, 0.0
        self.now = self.stalled = 0.0
        return taken


def a_step(reporter: Reporter, meter: Clock, store: Store, *, updates_wait: bool) -> Report:
    """Forward: 3 s, of which 2 s were waited for, and 250 bytes. Backward: 4 s and 100 bytes."""
    meter.now, meter.stalled = 3.0, 2.0
    store.read.bytes += 150
    store.write.bytes += 100
    reporter.backward_begins()
    meter.now = 7.0
    store.read.bytes += 100
    return reporter.report({}, 1, 1.0, 1.0, updates_wait=updates_wait)


def test_where_updates_had_to_wait_forward_and_backward_have_bounds_of_their_own():
    meter, store = Clock(), Store()
    received = chain([100], repeat(400))
    reporter = Reporter(
        meter,
        store,
        None,
        [Path("a")],
        lambda: (0, 0),
        lambda: next(received),
        lambda: None,
        RATES,
        LinkRates(),
    )
    free = a_step(reporter, meter, store, updates_wait=True)
    assert free.network_bytes == 300  # since the reporter was made
    assert (free.bound_by, free.bound_seconds, free.schedule_seconds) == ("compute", 5.0, 0.0)
    waited = a_step(reporter, meter, store, updates_wait=False)  # those of the step before it waited
    assert waited.schedule_seconds == max(1.0, 2.5) + max(4.0, 1.0)
    assert (waited.bound_by, waited.bound_seconds) == ("schedule", 6.5)
    assert waited.efficiency == pytest.approx(6.5 / 7)
    assert reporter.disk_busy == (pytest.approx(2.5 / 3), pytest.approx(1 / 4))
    assert a_step(reporter, meter, store, updates_wait=False).schedule_seconds == 0
    assert waited.drives == (DriveUse("a", 250, 100, 0.0),)


def test_updates_and_the_link_share_host_memory() -> None:
    meter, copied, updated = Clock(), chain([(0, 0)], repeat((300, 100))), chain([0], repeat(1000))
    reporter = Reporter(
        meter, None, None, [], lambda: next(copied), int, lambda: 1.0, None, LinkRates(100.0, 100.0),
        updated_bytes=lambda: next(updated), host_memory=MemoryRates(shared=200.0),
    )  # fmt: skip
    meter.now = 10.0
    report = reporter.report({}, 1, None, 1.0, updates_wait=False)
    assert (report.to_device_seconds, report.to_host_seconds, report.memory_seconds) == (3.0, 1.0, 7.0)
    assert (report.bound_by, report.bound_seconds, report.efficiency) == ("memory", 7.0, 0.7)
    assert "host memory, which updates and copies share, alone takes 7.00 s" in str(report)


def test_updates_take_their_own_time_where_the_link_is_idle() -> None:
    rates = MemoryRates(updates=50.0, shared=100.0)
    assert rates.seconds(100, 0) == 2.0 and rates.seconds(100, 300) == 4.0
    assert MemoryRates().seconds(1 << 40, 1 << 40) == 0.0


def test_a_report_is_read_by_people(tmp_path: Path):
    budget = least_budget(Tiny(), tmp_path)
    with OffloadEngine(Tiny(), nvme_path=tmp_path, host_memory=budget, gradient_clipping=1e-3) as engine:
        for tokens, targets in batches(3):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        report = engine.report()
    said = str(report)
    assert said.startswith("step 3 took ") and "NVMe (" in said and "host memory " in said and "gradient norm " in said
    assert "network" not in said and "device" not in said and "loss scale" not in said
    assert "GB/s, measured at the start" in said and "written to NVMe since the start: " in said
    on_device = replace(
        report, to_device_bytes=5_000_000, device_memory_bytes=3 << 20, loss_scale=1024.0, bound_by="to_device",
        bound_seconds=1.5, seconds=2.0, stall_seconds={"slot": 0.25, "read": 1e-5, "update": 0.5},
    )  # fmt: skip
    lines = str(on_device).splitlines()
    assert lines[0] == "step 3 took 2.00 s; copying to the device alone takes 1.50 s, 75% of it"
    faster = replace(on_device, bound_seconds=2.2)
    assert str(faster).startswith("step 3 took 2.00 s; copying to the device alone takes 2.20 s, 110% of it")
    assert "compute waited for: update 500 ms, slot 250 ms" in lines
    assert "link: 5.0 MB to the device, 0.0 MB to the host" in lines
    assert lines[-1].endswith("loss scale 1024")
    use = replace(report, experts=ExpertUse(10_000_000, 2_500_000))
    assert "experts: tokens were sent to 10.0 MB, 2.5 MB were read for it: 75% were there" in str(use).splitlines()
    assert "network: 2.5 MB from other ranks" in str(replace(report, network_bytes=2_500_000)).splitlines()


def test_what_is_over_is_kept_as_values_that_are_no_work_for_the_collector():
    trace = Trace()
    gc.disable()  # it would find out by itself, and has done the work then
    try:
        before = len(gc.get_objects())
        stops = [trace.over("compute", f"blocks.{index}", float(index)) for index in range(500)]
        assert len(gc.get_objects()) - before < 50, "a small unit has three of them in each step"
    finally:
        gc.enable()
    trace.end_step()
    assert list(trace.last) == [Span("compute", f"blocks.{i}", float(i), stop) for i, stop in enumerate(stops)]


def test_a_small_resident_unit_costs_a_bounded_number_of_calls(tmp_path: Path) -> None:
    """Calls of the engine's functions in a step: a cost that no other load of the machine changes."""
    package = str(Path(offload.__file__).parent)

    def calls_of(num_units: int) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(num_units)))
        num_calls = 0

        def look(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event == "call" and frame.f_code.co_filename.startswith(package)

        with OffloadEngine(model, nvme_path=tmp_path, host_memory="64MiB") as engine:
            for profile in (None, None, look):
                engine.synchronize()  # nothing is waited for in the step
                sys.setprofile(profile)
                try:
                    engine.backward(engine(torch.ones(1, 4)).sum())
                    engine.step()
                finally:
                    sys.setprofile(None)
        return num_calls

    assert (calls_of(14) - calls_of(4)) / 10 <= 210
