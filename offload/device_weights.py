"""Copies of weights in device memory: brought in ahead of use, dropped when what is needed sooner wants the room.

The weights themselves are at home in host memory or on NVMe (``Weights``), where updates change them; so a copy is good
until the unit's next update. (Units at home on the device, ``DeviceHomes``, need none: they only count as used.) Two
threads stand between: one waits until a unit is in host memory and up to date and starts its copy, one waits for copies
to end and lets go of the host's memory. The training thread starts no copy and waits for none: it waits until one has
been *started*, and the device's own queue does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from offload.device import Device, Event
from offload.errors import DeviceMemoryError
from offload.failure import Failure
from offload.memory import tensor_at
from offload.order import UseOrder
from offload.report import Meter
from offload.residency import WAIT_TIMEOUT_S, Weights
from offload.trace import Span
from offload.unit import Unit
from offload.window import DeviceWindow
from swapper import OffloadError

_LOOK_AHEAD = 16
"""Uses ahead of the present one that prefetching considers: no device has more room to spare than that takes time."""


class _Copy:
    """A unit's weights in device memory. ``arrived`` is set before ``started`` is."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.pins = 0
        self.stale = False
        """The weights have changed since it was asked for: not for use any more."""
        self.started = threading.Event()
        self.arrived: Event | None = None


class DeviceWeights:
    """``acquire`` and ``release`` bracket each use, as in ``Weights``. All calls come from one thread at a time."""

    def __init__(
        self,
        units: Sequence[Unit],
        weights: Weights,
        device: Device,
        max_bytes: int,
        failure: Failure,
        meter: Meter,
        prefetch: bool,
    ) -> None:
        self.max_bytes = max_bytes
        """Device memory that copies may take."""
        self.copied_bytes = 0
        """Host to device, since the engine was made."""
        self._units = units
        self._weights = weights
        self._device = device
        self._failure = failure
        self._meter = meter
        self._prefetch = prefetch
        self._order = UseOrder(len(units))
        self._copies: dict[Unit, _Copy] = {}
        self._used_bytes = 0
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="offload-to-device")
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="offload-to-device-end")

    def acquire(self, unit: Unit, *, training: bool) -> None:
        """Have the unit's weights under its parameters before whatever compute is given next.

        ``training``: a step ends this order of uses, and what is used after it will have changed.
        """
        self._order.use(unit.spec.index)
        if unit.on_device:  # its weights are there, in the order of compute
            self._weights.count_computing(1)
            self._fetch_ahead(wrap=not training)
            return
        copy = self._copies.get(unit)
        if copy is not None and copy.stale and copy.pins == 0:
            self._wait_until_started(copy)
            self._drop(copy)
            copy = None
        if copy is None:
            copy = self._fetch(unit, must=True)
            assert copy is not None
        copy.pins += 1
        self._weights.count_computing(1)
        self._fetch_ahead(wrap=not training)
        try:
            self._wait_until_started(copy)
        except BaseException:
            self.release(unit)
            raise
        assert copy.arrived is not None
        self._device.compute.wait(copy.arrived)

    def release(self, unit: Unit) -> None:
        """Compute was given all that uses the unit for now."""
        if not unit.on_device:
            self._copies[unit].pins -= 1
        self._weights.count_computing(-1)

    def outdate(self, units: Iterable[Unit]) -> None:
        """The weights of these units are about to change: their copies are over, and of no use any more."""
        for unit in units:
            copy = self._copies.get(unit)
            if copy is not None:
                copy.stale = True
                self._wait_until_started(copy)
                if copy.arrived is not None:
                    copy.arrived.wait()
                if copy.pins == 0:
                    self._drop(copy)

    def give_up(self, unit: Unit) -> None:
        """Drop the unit's copy for good: it moves to the device."""
        copy = self._copies.get(unit)
        if copy is not None:
            self._wait_until_started(copy)
            self._drop(copy)

    def end_step(self) -> None:
        """A step ends the order of uses; the first units of the next one are fetched as their updates end."""
        self._order.end_step()
        self._fetch_ahead(wrap=False)

    def close(self) -> None:
        """Wait for copies under way, and free the device's memory."""
        self._starter.shutdown(wait=True, cancel_futures=True)
        self._finisher.shutdown(wait=True)
        for copy in list(self._copies.values()):
            if copy.arrived is not None:
                copy.arrived.wait()
            self._drop(copy)

    def _fetch_ahead(self, *, wrap: bool) -> None:
        """Ask for the units that come next, while there is room or somebody who is needed later."""
        if not self._prefetch:
            return
        for index in islice(self._order.upcoming(wrap=wrap), _LOOK_AHEAD):
            unit = self._units[index]
            if not unit.on_device and unit not in self._copies and self._fetch(unit, must=False) is None:
                return

    def _fetch(self, unit: Unit, *, must: bool) -> _Copy | None:
        """Make room and ask for a copy. None if that would push out what is needed sooner, unless it ``must`` be."""
        window = unit.window
        assert isinstance(window, DeviceWindow)
        while self._used_bytes + unit.weight_bytes > self.max_bytes:
            if not self._evict_for(unit, must):
                if must:
                    in_use = ", ".join(other.name for other in self._copies)
                    raise OffloadError(f"no room for unit {unit.name} in device memory: {in_use} are all in use")
                return None
        while True:
            try:
                window.allocate()
                break
            except DeviceMemoryError:  # activations take more than they did when room was measured
                if not self._evict_for(unit, must):
                    if must:
                        raise
                    return None
        copy = self._copies[unit] = _Copy(unit)
        self._used_bytes += unit.weight_bytes
        self._starter.submit(self._start, copy, window, self._device.compute.record())
        return copy

    def _evict_for(self, unit: Unit, must: bool) -> bool:
        """Drop the copy that is needed last. False if all are in use, or needed sooner than ``unit`` is."""
        idle = [copy for copy in self._copies.values() if copy.pins == 0 and (must or copy.started.is_set())]
        victim = max(idle, key=self._distance, default=None)
        if victim is None or not (must or self._distance(victim) > self._order.distance(unit.spec.index)):
            return False
        self._wait_until_started(victim)
        self._drop(victim)
        return True

    def _distance(self, copy: _Copy) -> float:
        return float("inf") if copy.stale else self._order.distance(copy.unit.spec.index)

    def _drop(self, copy: _Copy) -> None:
        """Free the memory: for whatever compute does next, and so for nobody before the copy is over."""
        if copy.arrived is not None:
            self._device.compute.wait(copy.arrived)
        copy.unit.window.close()
        del self._copies[copy.unit]
        self._used_bytes -= copy.unit.weight_bytes

    def _wait_until_started(self, copy: _Copy) -> None:
        if not copy.started.is_set():
            with self._meter.stall("read"):
                if not copy.started.wait(WAIT_TIMEOUT_S):
                    self._failure.record(
                        OffloadError(f"unit {copy.unit.name} did not come to the device in {WAIT_TIMEOUT_S:.0f} s")
                    )
        self._failure.check()

    # The two threads.

    def _start(self, copy: _Copy, window: DeviceWindow, allocated: Event) -> None:
        unit = copy.unit
        try:
            self._failure.check()
            source = tensor_at(self._weights.acquire(unit), window.numel, window.dtype)
            span = self._meter.trace.begin("to device", f"weights of {unit.name}", unit.weight_bytes)
            stream = self._device.to_device
            stream.wait(allocated)
            stream.copy(window.target, source)
            copy.arrived = stream.record()
            self.copied_bytes += unit.weight_bytes
            self._finisher.submit(self._finish, unit, copy.arrived, source, span)
        except BaseException as error:
            self._failure.record(error)
            self._weights.wake()
        finally:
            copy.started.set()

    def _finish(self, unit: Unit, arrived: Event, source: object, span: Span) -> None:
        try:
            arrived.wait()  # ``source`` must live until then
            self._meter.trace.end(span)
        except BaseException as error:
            self._failure.record(error)
        finally:
            self._weights.release(unit)
