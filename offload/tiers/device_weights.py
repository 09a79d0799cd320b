"""Weights in a device's memory: copies of units that rest in host memory or on NVMe, fetched ahead of use.

Updates change the weights in host memory, so a copy is good until the unit's next update. What fills the windows there
is ``HostSource``, or, where ranks have shards of units, ``RanksSource`` (``offload.tiers.ranks_source``). Within a step
the training thread waits for no copy: it waits until a copy has been *started*, and the device's own queue does the
rest. Only ``outdate``, in ``step()``, waits until copies are over whose source will change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from offload.device.protocol import Device, Event
from offload.errors import DeviceMemoryError, warn
from offload.memory import tensor_at
from offload.report.meter import Meter
from offload.report.trace import Span
from offload.tiers.bounce import Bounce
from offload.tiers.cache import Residency
from offload.tiers.copies import CopyCache
from offload.tiers.home import Transfer
from offload.tiers.host_weights import HostWeights
from offload.tiers.window import DeviceWindow
from offload.units import UnitSpec
from offload.waiting import WAIT_TIMEOUT_S, Failure, Job, Worker, timed_out
from swapper import readable_bytes

_LOOK_AHEAD = 16
"""Uses ahead of the present one that prefetching considers: no device has more room to spare than that takes time."""


class Copy:
    """A unit's weights in device memory. Once their fetch is done the device keeps the order, and they are there at
    ``arrived``. ``allocated``: from here on the memory is theirs."""

    def __init__(self, window: DeviceWindow, allocated: Event) -> None:
        self.window = window
        self.allocated = allocated
        self.arrived: Event | None = None


class Source(Protocol):
    """Fills windows on the device."""

    copied_bytes: int
    """Host to device, since the engine was made."""

    def start(self, unit: UnitSpec, place: Copy) -> Transfer:
        """Have the window filled, after ``allocated``; ``arrived`` is set when the transfer is done."""

    def settle(self) -> None:
        """Wait until nothing reads host memory any more for what was started."""

    def end_step(self) -> None:
        """Compute was given the updates of units that are resident on the device."""

    def close(self) -> None:
        """Wait for all that was started."""


class HostSource:
    """Copies units from host memory. Two threads stand between: one waits until a unit is there and up to date and
    starts its copy, one waits for copies to end and lets the host's memory go."""

    def __init__(self, lower: HostWeights, device: Device, failure: Failure, meter: Meter) -> None:
        self.copied_bytes = 0
        self._lower = lower
        self._device = device
        self._failure = failure
        self._meter = meter
        self._starter = Worker("offload-to-device")
        self._finisher = Finisher(lower, failure, meter)

    def start(self, unit: UnitSpec, place: Copy) -> Transfer:
        started = _Started(self._failure)
        self._starter.submit(partial(self._start, unit, place, started))
        return started

    def settle(self) -> None:
        self._finisher.settle()

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        self._starter.stop()
        self._finisher.close()

    def _start(self, unit: UnitSpec, place: Copy, started: _Started) -> None:
        try:
            self._failure.check()
            target = place.window.target
            place.arrived = copy_from_host(self._device, self._lower, unit, target, place.allocated, self._finisher)
            self.copied_bytes += target.nbytes
        except BaseException as error:
            self._failure.record(error)
        finally:
            started.event.set()


class _Started:
    """The start of a copy."""

    def __init__(self, failure: Failure) -> None:
        self.event = threading.Event()
        self._failure = failure

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        if not self.event.wait(WAIT_TIMEOUT_S):
            self._failure.record(timed_out("the start of a copy to the device"))
        self._failure.check()


def copy_from_host(
    device: Device, lower: HostWeights, unit: UnitSpec, target: torch.Tensor, after: Event, finisher: Finisher
) -> Event:
    """Wait until the unit's weights are in host memory and up to date, and start their copy to ``target``, on the
    device, after this event. ``finisher`` lets them go. Returns when the copy is over on the device."""
    source = tensor_at(lower.acquire(unit), target.numel(), target.dtype)
    span = finisher.begin(unit, target.nbytes)
    stream = device.to_device
    stream.wait(after)
    stream.copy(target, source)
    arrived = stream.record()
    finisher.submit(unit, arrived, (source, target), span)
    return arrived


class Finisher:
    """A thread that waits for copies from host memory, one after the other, and lets units go."""

    def __init__(self, lower: HostWeights, failure: Failure, meter: Meter) -> None:
        self._lower = lower
        self._failure = failure
        self._meter = meter
        self._last: Job | None = None
        self._worker = Worker("offload-to-device-end")

    def begin(self, unit: UnitSpec, nbytes: int) -> Span:
        """A copy begins."""
        return self._meter.trace.begin("to device", f"weights of {unit.name}", nbytes)

    def submit(self, unit: UnitSpec, arrived: Event, ends: tuple[torch.Tensor, torch.Tensor], span: Span) -> None:
        """Release the unit when its copy has ``arrived``; both ``ends`` of it live until then."""
        self._last = self._worker.submit(partial(self._finish, unit, arrived, ends, span))

    def settle(self) -> None:
        """Wait until all units were let go."""
        last = self._last
        if last is not None:
            last.wait(lambda: "the last copy to the device")
        self._failure.check()

    def close(self) -> None:
        """The same, whatever has failed."""
        self._worker.finish()

    def _finish(self, unit: UnitSpec, arrived: Event, ends: object, span: Span) -> None:
        try:
            arrived.wait()
            self._meter.trace.end(span)
        except BaseException as error:
            self._failure.record(error)
        try:
            self._lower.release(unit)
        except BaseException as error:
            self._failure.record(error)


class DeviceCarrier:
    """The memory of windows on the device."""

    num_places = None

    def __init__(
        self, windows: Sequence[DeviceWindow], source: Source, device: Device, max_bytes: int, least_bytes: int
    ) -> None:
        """``least_bytes`` are what compute takes at a time: below that nothing works."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.source = source
        self._least_bytes = least_bytes
        self._headroom_bytes = max((window.nbytes for window in windows), default=0)
        self._windows = windows
        self._device = device
        self._seen = device.shortages()

    def take_place(self, unit: UnitSpec) -> Copy | None:
        if self.used_bytes + self._windows[unit.index].nbytes > self.max_bytes:
            return None
        try:
            return self.add_place(unit)
        except DeviceMemoryError:  # activations take more than they did when room was measured
            self._shrink(self.used_bytes - self._headroom_bytes)
            self._seen = self._device.shortages()
            return None

    def shrink_if_short(self) -> int | None:
        """Keep to fewer bytes if memory was short since the last call; None if it was not. Where an operation of the
        model found none, to the least; that many bytes more were allowed before. Where one found some after torch had
        emptied its cache, which is slow, to room for one more unit: 0."""
        before, self._seen = self._seen, self._device.shortages()
        if self._seen.failed != before.failed:
            return self._shrink(0)
        if self._seen.emptied != before.emptied:
            self._shrink(self.used_bytes - self._headroom_bytes)
            return 0
        return None

    def add_place(self, unit: UnitSpec) -> Copy:
        window = self._windows[unit.index]
        window.allocate()
        self.used_bytes += window.nbytes
        return Copy(window, self._device.compute.record())

    def free_place(self, unit: UnitSpec, place: Copy) -> None:
        """The memory is for the work that compute is given next, and so for nothing before the copy is over."""
        if place.arrived is not None:
            self._device.compute.wait(place.arrived)
        self.used_bytes -= place.window.nbytes
        place.window.close()

    def blocking_transfer(self, unit: UnitSpec) -> Transfer | None:
        return None

    def fetch(self, unit: UnitSpec, place: Copy) -> Transfer:
        return self.source.start(unit, place)

    def pending(self) -> Transfer | None:
        return None

    def _shrink(self, nbytes: int) -> int:
        before = self.max_bytes
        self.max_bytes = min(before, max(nbytes, self._least_bytes))
        return before - self.max_bytes


class DeviceWeights(CopyCache[Copy]):
    """The cache of a device's memory. Units that are resident there only count as used. All calls come from one thread
    at a time."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        resident: Callable[[UnitSpec], bool],
        carrier: DeviceCarrier,
        device: Device,
        bounce: Bounce,
        failure: Failure,
        meter: Meter,
        *,
        prefetch: bool,
    ) -> None:
        super().__init__(
            units,
            resident,
            carrier,
            failure,
            meter,
            prefetch=prefetch,
            look_ahead=_LOOK_AHEAD,
            may_add_places=True,
        )
        self.copies = carrier
        self._device = device
        self._bounce = bounce

    def acquire(self, unit: UnitSpec, *, training: bool) -> None:
        """Have the unit's weights under its parameters before any work that compute is given next.

        ``training``: a step ends this order of uses, and the weights of later uses will have changed.
        """
        entry = self._entries[unit.index]
        self._give_way()
        with self._changed:
            self._learn(entry)
            self._pin_for_compute(entry, wrap=not training)
        self._wait_for_fetch(entry, "read", computing=True)
        if entry.place is not None and entry.place.arrived is not None:
            self._device.compute.wait(entry.place.arrived)

    def release(self, unit: UnitSpec) -> None:
        """Compute was given all that uses the unit for now."""
        entry = self._entries[unit.index]
        if entry.place is not None:
            entry.place.window.used()
        with self._changed:
            self._unpin(entry, computing=True)

    @contextlib.contextmanager
    def borrow(self, unit: UnitSpec, start: int, stop: int) -> Iterator[int]:
        """The address of a copy, in host memory, of the elements ``[start, stop)`` of a unit that has no other home
        than shards."""
        with self._borrowed(unit) as entry:
            if entry.place is None or entry.place.arrived is None:
                raise RuntimeError(f"unit {unit.name} was not gathered")
            part = entry.place.window.target[start:stop].view(torch.uint8)
            on_host = torch.empty_like(part, device="cpu")
            self._device.to_host.wait(entry.place.arrived)
            self._bounce.to_host(on_host, part)
        yield on_host.data_ptr()

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        """The weights of these units are about to change in host memory: copies of them are over, and void."""
        entries = [self._entries[unit.index] for unit in units]
        for entry in entries:
            if entry.fetch is not None:
                entry.fetch.wait()
        self.copies.source.settle()
        for entry in entries:
            if entry.place is None:
                continue
            with self._changed:
                entry.outdated = True
                if entry.pins == 0:
                    self._drop(entry)

    def arrive(self, unit: UnitSpec) -> None:
        """The unit is resident here from now on, and has no copy any more."""
        self.drop_copy(unit)
        self._entries[unit.index].residency = Residency.PERMANENT

    def drop_copy(self, unit: UnitSpec) -> None:
        """Evict the unit's copy, if there is one. It is not in use."""
        entry = self._entries[unit.index]
        with self._changed:
            if entry.place is not None:
                self._drop(entry)

    def end_step(self) -> None:
        self.copies.source.end_step()
        super().end_step()

    def close(self) -> None:
        """Wait for copies under way, and free the device's memory."""
        try:
            self.copies.source.close()
        finally:
            for entry in list(self._present):
                if entry.place is not None and entry.place.arrived is not None:
                    entry.place.arrived.wait()
                self._evict(entry)

    def _give_way(self) -> None:
        """Drop copies that are not in use, those needed last first, where the model's own operations lack memory."""
        if not self._present:
            return
        more = self.copies.shrink_if_short()
        if more is None:
            return
        with self._changed:
            idle = sorted((entry for entry in self._present if entry.pins == 0), key=self._distance, reverse=True)
            for entry in idle:
                if self.copies.used_bytes > self.copies.max_bytes and entry.pins == 0 and entry.place is not None:
                    self._drop(entry)
        if more:
            warn(
                f"the device had no room for what the model computes: copies of weights there, which took up to "
                f"{readable_bytes(more)} more, give way from now on. What failed can be run again."
            )
