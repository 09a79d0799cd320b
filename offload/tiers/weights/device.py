"""Weights in a device's memory: copies of units that are stored in host memory or on NVMe, fetched ahead of use.

Updates change the weights in host memory, so a copy is good until the unit's next update. What fills the windows there
is ``HostSource``, or, where ranks have shards of units, ``RanksSource``. Within a step
the training thread waits for no copy: it waits until a copy has been *started*, and the device's own queue does the
rest. Only ``outdate``, in ``step()``, waits until copies are over whose source will change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from offload.device.protocol import Device, Event
from offload.errors import DeviceMemoryError, warn
from offload.report.meter import Meter
from offload.tiers.bounce import Bounce
from offload.tiers.home import Transfer
from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.carrier import Carrier
from offload.tiers.weights.level import CacheLevel
from offload.tiers.weights.pin import Pin, Purpose
from offload.tiers.window import DeviceWindow
from offload.units import UnitSpec
from offload.waiting import Failure
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

    def waits_for(self, unit: UnitSpec) -> str:
        """See ``Carrier.waits_for``."""

    def settle(self) -> None:
        """Wait until nothing reads host memory any more for what was started."""

    def end_step(self) -> None:
        """Compute was given the updates of units that are resident on the device."""

    def close(self) -> None:
        """Wait for all that was started."""


class DeviceCarrier(Carrier[Copy]):
    """The memory of windows on the device."""

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

    def has_room(self, units: Sequence[UnitSpec]) -> bool:
        needed = sum(self._windows[unit.index].nbytes for unit in units)
        return len(units) == 1 or needed + self._headroom_bytes <= self.max_bytes

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

    def fetch(self, unit: UnitSpec, place: Copy) -> Transfer:
        return self.source.start(unit, place)

    def waits_for(self, unit: UnitSpec) -> str:
        return self.source.waits_for(unit)

    def settle(self) -> None:
        self.source.settle()

    def _shrink(self, nbytes: int) -> int:
        before = self.max_bytes
        self.max_bytes = min(before, max(nbytes, self._least_bytes))
        return before - self.max_bytes


class DeviceLevel(CacheLevel[Copy]):
    """The level of a device's memory. Units that are resident there only count as used. All calls come from one thread
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
            WeightCache(
                units, carrier, failure, meter, is_permanent=resident, prefetch=prefetch, look_ahead=_LOOK_AHEAD
            )
        )
        self.carrier = carrier
        self._device = device
        self._bounce = bounce

    def take(self, pin: Pin[Copy], *, training: bool) -> None:
        """The weights are there before any work that compute is given next."""
        if pin.purpose is Purpose.COMPUTE:
            self._give_way()
        super().take(pin, training=training)
        place = pin.entry.place
        if place is not None and place.arrived is not None and pin.purpose is Purpose.COMPUTE:
            self._device.compute.wait(place.arrived)

    @contextlib.contextmanager
    def borrow(self, unit: UnitSpec, start: int, stop: int) -> Iterator[int]:
        """The address of a copy, in host memory, of the elements ``[start, stop)`` of a unit that has no other home
        than shards."""
        with self.pin(unit, Purpose.LOOK) as pin:
            place = pin.place
            assert place.arrived is not None
            part = place.window.target[start:stop].view(torch.uint8)
            on_host = torch.empty_like(part, device="cpu")
            self._device.to_host.wait(place.arrived)
            self._bounce.to_host(on_host, part)
        yield on_host.data_ptr()

    def end_step(self) -> None:
        self.carrier.source.end_step()
        super().end_step()

    def close(self) -> None:
        """Wait for copies under way, and free the device's memory."""
        try:
            self.carrier.source.close()
        finally:
            for entry in list(self.cache.present):
                if entry.place is not None and entry.place.arrived is not None:
                    entry.place.arrived.wait()
                self.cache.evict(entry)

    def _give_way(self) -> None:
        """Drop copies that are not in use, those needed last first, where the model's own operations lack memory."""
        if not self.cache.present:
            return
        more = self.carrier.shrink_if_short()
        if more is None:
            return
        self.cache.shrink(lambda: self.carrier.used_bytes > self.carrier.max_bytes)
        if more:
            warn(
                f"the device had no room for what the model computes: copies of weights there, which took up to "
                f"{readable_bytes(more)} more, give way from now on. What failed can be run again."
            )
