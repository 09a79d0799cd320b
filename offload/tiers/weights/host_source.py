"""Fills windows on a device from host memory, by two threads: one waits until a unit is there and up to date and starts
its copy, one waits for copies to end and lets the host's memory go."""

from __future__ import annotations

from functools import partial

import torch

from aio_ext.latch import Latch
from offload.device.protocol import Device, Event
from offload.memory import tensor_at
from offload.report.meter import Meter
from offload.report.trace import Span
from offload.tiers.home import Transfer
from offload.tiers.weights.device import Copy
from offload.tiers.weights.host import HostLevel, HostPlace
from offload.tiers.weights.pin import Pin
from offload.units import UnitSpec
from offload.waiting import WAIT_TIMEOUT_S, Failure, Job, Worker, timed_out


class HostSource:
    """Copies units from host memory."""

    def __init__(self, lower: HostLevel, device: Device, failure: Failure, meter: Meter) -> None:
        self.copied_bytes = 0
        self._lower = lower
        self._device = device
        self._failure = failure
        self._meter = meter
        self._starter = Worker("offload-to-device")
        self._finisher = Finisher(failure, meter)

    def start(self, unit: UnitSpec, place: Copy) -> Transfer:
        started = _Started(self._failure)
        self._starter.submit(partial(self._start, unit, place, started))
        return started

    def waits_for(self, unit: UnitSpec) -> str:
        return "update" if self._lower.fence.is_pending(unit) else "read"

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
        self.event = Latch()
        self._failure = failure

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        if not self.event.wait(WAIT_TIMEOUT_S):
            self._failure.record(timed_out("the start of a copy to the device"))
        self._failure.check()


def copy_from_host(
    device: Device, lower: HostLevel, unit: UnitSpec, target: torch.Tensor, after: Event, finisher: Finisher
) -> Event:
    """Wait until the unit's weights are in host memory and up to date, and start their copy to ``target``, on the
    device, after this event. ``finisher`` lets them go. Returns when the copy is over on the device."""
    pin = lower.pin(unit)
    pin.take()
    source = tensor_at(pin.place.address, target.numel(), target.dtype)
    span = finisher.begin(unit, target.nbytes)
    stream = device.to_device
    stream.wait(after)
    stream.copy(target, source)
    arrived = stream.record()
    finisher.submit(pin, arrived, (source, target), span)
    return arrived


class Finisher:
    """A thread that waits for copies from host memory, one after the other, and lets units go."""

    def __init__(self, failure: Failure, meter: Meter) -> None:
        self._failure = failure
        self._meter = meter
        self._last: Job | None = None
        self._worker = Worker("offload-to-device-end")

    def begin(self, unit: UnitSpec, nbytes: int) -> Span:
        """A copy begins."""
        return self._meter.trace.begin("to device", f"weights of {unit.name}", nbytes)

    def submit(self, pin: Pin[HostPlace], arrived: Event, ends: tuple[torch.Tensor, torch.Tensor], span: Span) -> None:
        """Release the unit when its copy has ``arrived``; both ``ends`` of it live until then."""
        self._last = self._worker.submit(partial(self._finish, pin, arrived, ends, span))

    def settle(self) -> None:
        """Wait until all units were let go."""
        last = self._last
        if last is not None:
            last.wait(lambda: "the last copy to the device")
        self._failure.check()

    def close(self) -> None:
        """The same, whatever has failed."""
        self._worker.finish()

    def _finish(self, pin: Pin[HostPlace], arrived: Event, ends: object, span: Span) -> None:
        try:
            arrived.wait()
            self._meter.trace.end(span)
        except BaseException as error:
            self._failure.record(error)
        try:
            pin.release()
        except BaseException as error:
            self._failure.record(error)
