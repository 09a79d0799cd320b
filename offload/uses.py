"""Uses of units by compute: begun and ended by hooks, here and nowhere else, wherever the model computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from offload.device.protocol import Device, Event
from offload.interrupts import held_back
from offload.report.meter import Meter
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.level import Level
from offload.tiers.weights.pin import Pin, UnitState
from offload.tiers.window import DeviceWindow, HostWindow
from offload.torch_internals import itself
from offload.units import UnitSpec
from offload.waiting import of_thread
from swapper import OffloadError

_USES_AHEAD = 4
"""Uses that are given to a device at a time: enough for a launch that is late, far fewer than its queue holds."""


class Windows(Protocol):
    """The memory under the parameters of each unit, while it is used."""

    def open(self, pin: Pin[Any]) -> bool:
        """Put the pinned weights under the parameters. Whether these are a copy, beside what rests elsewhere."""

    def close(self, pin: Pin[Any]) -> None:
        """The use is over. Safe to call twice, or without ``open``."""


class HostWindows:
    """Windows on host memory, over the place that a pin gives. Where somebody looks at it beyond the use, the memory is
    left to the window, and the place goes on without it.

    [Note: Windows that stay open] Memory of a unit that is resident by the plan is no other unit's before the engine's
    end. Its window stays open over it from the first use on: it shows the weights to who looks there, as in PyTorch,
    and a use has nothing to exchange. ``shut`` closes it."""

    def __init__(self, windows: Sequence[HostWindow], leave: Callable[[Pin[Any]], Callable[[], object]]) -> None:
        """``leave``: see ``WeightCache.leave_memory``."""
        self._windows = windows
        self._leave = leave

    def open(self, pin: Pin[Any]) -> bool:
        entry = pin.entry
        window = self._windows[entry.unit.index]
        address = (entry.place or pin.place).address
        if window.open_at != address:
            window.open(address)
        return window.copies or entry.state is not UnitState.PERMANENT

    def close(self, pin: Pin[Any]) -> None:
        entry = pin.entry
        window = self._windows[entry.unit.index]
        is_resident = entry.state is UnitState.PERMANENT
        if window.keeps and window.left is None and not window.copies:  # else it would be another unit's memory
            with held_back():
                window.leave(self._leave(pin), is_copy=not is_resident)
        nobody_looks = window.left is not None and not window.keeps  # any more, at what was left
        if nobody_looks or not is_resident or window.copies:
            window.close()

    def shut(self) -> None:
        """The memory goes, but for what somebody looks at: that stays in the windows that keep it."""
        for window in self._windows:
            window.close()


class DeviceWindows:
    """Windows in a device's memory, which are the places of its level."""

    def __init__(self, windows: Sequence[DeviceWindow], parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        """``parameters`` are those of each unit that are ordinary tensors."""
        self._windows = windows
        self._parameters = parameters

    def open(self, pin: Pin[Any]) -> bool:
        return pin.entry.state is not UnitState.PERMANENT

    def close(self, pin: Pin[Any]) -> None:
        unit, place = pin.entry.unit, pin.entry.place
        if place is not None:
            place.window.used()
        with itself():  # the unit may rest, after an interrupt
            is_whole = all(map(self._windows[unit.index].holds, self._parameters[unit.index]))
        if not is_whole:
            raise OffloadError(f"unit {unit.name}: its forward has moved its parameters to other memory of its own")


class Clock(Protocol):
    """Clock of how long the model has computed, as far as the training thread's time does not tell."""

    runs: bool
    """``begin`` and ``end`` are to be called."""

    def begin(self, *, training: bool) -> None:
        """A use has begun: the weights of it, and of those around it, are there, or are waited for by the device."""

    def end(self) -> None:
        """The last of nested uses is over, or another one within is about to begin, and may wait."""

    def busy_seconds(self) -> float | None:
        """Seconds that the device has worked on units since this was asked last. None: it is the training thread's
        time."""


class HostClock:
    """The training thread computes."""

    runs = False

    def begin(self, *, training: bool) -> None:
        pass

    def end(self) -> None:
        pass

    def busy_seconds(self) -> float | None:
        return None


class DeviceClock:
    """Events around uses, in the stream that computes. They also bound how far the host runs ahead of the device.

    [Note: How far the host runs ahead] A device's queue holds about a thousand launches. Who launches into a full one
    waits with the interpreter's lock, and the threads that update, copy and tell that this rank lives wait with it. So
    before a use the host waits, without that lock, for the end of the use some uses before."""

    runs = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Event | None = None
        self._training = False
        self._uses: list[tuple[Event, Event]] = []
        self._ahead: deque[Event] = deque()
        """Ends of the last uses, as many as may be given to the device before it has done the first of them."""

    def begin(self, *, training: bool) -> None:
        self._began, self._training = self._device.compute.record(), training

    def end(self) -> None:
        began, self._began = self._began, None
        if began is None:
            return
        ended = self._device.compute.record()
        if self._training:
            self._uses.append((began, ended))
        self._ahead.append(ended)
        if len(self._ahead) > _USES_AHEAD:
            self._ahead.popleft().wait()

    def busy_seconds(self) -> float | None:
        uses, self._uses = self._uses, []
        for _, end in uses:
            end.wait()
        return sum(end.seconds_since(begin) for begin, end in uses)


class Uses:
    """See the module's docstring. Calls come from the thread that computes, one at a time.

    A use is open from before its pin is taken until after it is released, and to end one twice does nothing: whatever
    an interrupt has left, ``reset`` ends.
    """

    def __init__(self, units: Sequence[UnitSpec], level: Level, windows: Windows, clock: Clock, meter: Meter) -> None:
        self._units = units
        self._windows = windows
        self._clock = clock
        self._trace = meter.trace
        self.announce = level.announce
        self._pins = [level.pin(unit) for unit in units]
        self._open: dict[int, float] = {}
        """By unit, when compute began to use it; 0 until then."""
        self._passed = 0.0
        """When it was done with the last one of those that it does not use."""

    def begin(self, unit: UnitSpec, *, training: bool) -> bool:
        """Put the unit's weights under its parameters, for the model's next work: see ``Windows.open``. ``training``: a
        step will follow."""
        index = unit.index
        pin = self._pins[index]
        if self._clock.runs and self._open:  # what compute waits for from here on is no work of the use around
            self._clock.end()
        try:
            self._open[index] = 0.0
            pin.take(training=training)
            is_copy = self._windows.open(pin)
            if self._clock.runs:
                self._clock.begin(training=training)
            self._open[index] = perf_counter()
        except BaseException:  # a failed fetch, or an interrupt: nobody will end this use
            self.end(unit)
            raise
        return is_copy

    def end(self, unit: UnitSpec) -> None:
        """The use is over, or was abandoned."""
        pin = self._pins[unit.index]
        try:
            self._windows.close(pin)
        finally:
            pin.release()
            start = self._open.pop(unit.index, 0.0)
            if start:
                self._trace.over("compute", unit.name, start)
            if self._clock.runs and not self._open:
                self._clock.end()

    def begin_passing(self) -> None:
        """Compute comes to units that it does not use, and whose weights stay: see ``Listener``."""
        self._passed = perf_counter()

    def passed(self, unit: UnitSpec) -> None:
        """It is done with this one."""
        self._passed = self._trace.over("compute", unit.name, self._passed)

    def busy_seconds(self) -> float | None:
        """See ``Clock``."""
        return self._clock.busy_seconds()

    def reset(self) -> None:
        """No unit is in use: end the uses that an exception or an interrupt has left."""
        for index in list(self._open):
            self.end(self._units[index])


class UsesOfResidents(Uses):
    """The same where all weights are resident in RAM. Each use waits for its unit's update alone, and its window is
    open from the first one on: see [Note: Windows that stay open]."""

    def __init__(
        self, units: Sequence[UnitSpec], level: HostLevel, shown: Sequence[HostWindow], windows: Windows, meter: Meter
    ) -> None:
        super().__init__(units, level, windows, HostClock(), meter)
        self._shown = shown
        self._fence = level.fence
        self._pending = level.fence.pending

    def begin(self, unit: UnitSpec, *, training: bool) -> bool:
        index = unit.index
        place = self._pins[index].entry.place
        if place is None or self._shown[index].open_at != place.address:
            return super().begin(unit, training=training)
        if index in self._pending or of_thread.stepping:
            self._fence.wait(unit)
            return super().begin(unit, training=training)  # the update may have written to its other place
        self._open[index] = perf_counter()
        return False

    def end(self, unit: UnitSpec) -> None:
        window = self._shown[unit.index]
        if window.keeps or window.left is not None or not window.open_at:
            super().end(unit)
        elif start := self._open.pop(unit.index, 0.0):
            self._trace.over("compute", unit.name, start)
