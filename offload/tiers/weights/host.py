"""Weights in host memory: slots that units on NVMe pass through, and where updates change them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from offload.memory import private_memory
from offload.report.meter import Meter
from offload.tiers.fence import UpdateFence
from offload.tiers.home import Transfer, UnitHomes
from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.carrier import Carrier
from offload.tiers.weights.level import CacheLevel
from offload.tiers.weights.pin import Entry, Pin, Purpose, UnitState
from offload.tiers.weights.shadow import ShadowSlots, Slot
from offload.units import UnitSpec
from offload.waiting import Failure, of_thread
from swapper import OffloadError

T = TypeVar("T")

_LOOK_AHEAD = 64


class HostPlace(Protocol):
    """Host memory with the weights of a unit: a slot, or the home of one that is resident."""

    @property
    def address(self) -> int: ...

    def leave(self, spares: list[Any]) -> Callable[[], None]:
        """See ``WeightCache.leave_memory``."""


class NvmeCarrier(Carrier[HostPlace]):
    """Brings units from NVMe into slots."""

    def __init__(self, slots: Sequence[Slot], homes: Sequence[UnitHomes], slot_bytes: int) -> None:
        self.num_places: int = len(slots)
        self.added_bytes = 0
        """Of slots beyond the plan."""
        self._free = list(slots)
        self._homes = homes
        self._slot_bytes = slot_bytes

    def take_place(self, unit: UnitSpec) -> Slot | None:
        for slot in self._free:
            if slot.write is None or slot.write.done():
                if slot.write is not None:
                    slot.write.wait()  # raises what it failed with
                    slot.write = None
                self._free.remove(slot)
                return slot
        return None

    def add_place(self, unit: UnitSpec) -> Slot:
        self.num_places += 1
        self.added_bytes += self._slot_bytes
        return Slot(private_memory(self._slot_bytes))

    def free_place(self, unit: UnitSpec, place: HostPlace) -> None:
        assert isinstance(place, Slot)  # what is resident is never evicted
        self._free.append(place)

    def blocking_transfer(self, unit: UnitSpec) -> Transfer | None:
        home = self._homes[unit.index].weights.stored
        return None if home is None else home.write_in_flight

    def fetch(self, unit: UnitSpec, place: HostPlace) -> Transfer:
        home = self._homes[unit.index].weights.stored
        if home is None:
            raise RuntimeError(f"unit {unit.name} is not stored on NVMe")
        return home.read(place.address, urgent=True)

    def pending(self) -> Transfer | None:
        return next((slot.write for slot in self._free if slot.write is not None), None)

    def drain(self) -> None:
        """Wait for the transfers of free slots, whatever becomes of them."""
        for slot in self._free:
            if slot.write is not None:
                with contextlib.suppress(OffloadError):
                    slot.write.wait()


class HostLevel(CacheLevel[HostPlace]):
    """The level of host memory. Compute uses it on the CPU, levels above copy from it, updates change it.

    Where all weights are resident there is nothing to learn, to pin or to fetch: a use waits for its update, and takes
    no lock.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        slots: Sequence[Slot],
        slot_bytes: int,
        failure: Failure,
        meter: Meter,
        *,
        prefetch: bool,
        may_add_places: bool = True,
    ) -> None:
        self.carrier = NvmeCarrier(slots, homes, slot_bytes)
        super().__init__(
            WeightCache(
                units,
                self.carrier,
                failure,
                meter,
                is_permanent=lambda unit: homes[unit.index].weights.stored is None,
                permanent=lambda unit: _resident_place(homes[unit.index]),
                prefetch=prefetch,
                look_ahead=_LOOK_AHEAD,
                may_add_places=may_add_places,
            )
        )
        self.fence = self.cache.fence
        self.shadows = ShadowSlots(self.cache, homes)
        self._homes = homes
        self._streams = bool(slots)
        self._updates = [self.pin(unit, Purpose.UPDATE) for unit in units]

    @property
    def all_are_resident(self) -> bool:
        """No unit passes through slots."""
        return not self._streams

    @property
    def added_bytes(self) -> int:
        """Host memory of slots beyond the plan."""
        return self.carrier.added_bytes

    # Uses, on any thread.

    def pin(self, unit: UnitSpec, purpose: Purpose = Purpose.COMPUTE) -> Pin[HostPlace]:
        if self._streams:
            return super().pin(unit, purpose)
        return _PinOfResident(self.cache.entries[unit.index], purpose, self, self.fence)

    def take(self, pin: Pin[HostPlace], *, training: bool) -> None:
        self.cache.take(pin)

    def release(self, pin: Pin[HostPlace]) -> None:
        with self.cache.monitor:
            self.cache.release(pin)
            if pin.purpose is Purpose.COMPUTE:
                self.cache.fetch_ahead()

    @contextlib.contextmanager
    def borrow(self, unit: UnitSpec, *, change: bool = False) -> Iterator[int]:
        """The address of the unit's weights, to read or (``change``) to change them outside of the model's order."""
        with self.pin(unit, Purpose.LOOK) as pin:
            address = pin.place.address
            if change:
                self._wait_for_write(pin.entry)
            yield address
            home = self._homes[unit.index].weights.stored
            if change and home is not None:
                pin.entry.write = home.fill(address)

    def announce(self, units: Sequence[UnitSpec]) -> None:
        if self._streams:
            super().announce(units)

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        """Nothing: this is where weights change."""

    def end_step(self) -> None:
        """Nothing: see ``begin_updates``."""

    def begin_updates(self, units: Sequence[UnitSpec]) -> None:
        """From now on these units may only be used once their update is done. Ends the step for the order of uses."""
        with self.cache.monitor:
            self.cache.end_step()
            self.fence.begin(units)

    def by_first_use(self, items: Iterable[T], unit: Callable[[T], UnitSpec]) -> list[T]:
        """These in the order in which a step uses the ``unit`` of each first: what is used first is updated first. In
        their own order where all weights are resident."""
        return sorted(items, key=lambda item: self.cache.first_use(unit(item))) if self._streams else list(items)

    def forget_copies(self) -> None:
        """Forget copies, since what the store holds has changed: nothing that lies in a slot is good any more. No
        update is under way."""
        for entry in list(self.cache.present):
            self.cache.drop(entry.unit)

    def leave(self, unit: UnitSpec) -> None:
        """The unit is resident in a higher tier from now on: nothing fetches it any more. Its update is over."""
        self.cache.make_permanent(unit)

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        self.cache.drain()
        self.carrier.drain()

    # The update thread.

    def begin_update(self, unit: UnitSpec) -> int:
        """The address of the weights of the unit whose update comes next; its bytes may be changed."""
        pin = self._updates[unit.index]
        if pin.entry.state is not UnitState.PERMANENT:
            self.cache.take(pin)
            self._wait_for_write(pin.entry)
        return pin.place.address

    def try_fetch(self, unit: UnitSpec) -> None:
        """Start reading the unit if a slot is to be had at once."""
        self.cache.try_fetch(unit)

    def end_update(self, unit: UnitSpec) -> None:
        """The weights are the new ones. They go back to the store, and waiting uses may go on."""
        pin, home = self._updates[unit.index], self._homes[unit.index].weights.stored
        if home is not None and pin.entry.state is not UnitState.PERMANENT:
            pin.entry.write = home.write(pin.place.address)
        self.fence.done(unit)
        self.cache.release(pin)

    def updated(self, units: Sequence[UnitSpec]) -> None:
        """The weights of these units, which are resident, are the new ones."""
        self.fence.done(*units)

    def _wait_for_write(self, entry: Entry[HostPlace]) -> None:
        """Bytes in flight must not change, and a place of the store must not get two writes at a time: wait for the
        last write before the weights are touched again, also for one to the shadow, which came from another slot."""
        home = self._homes[entry.unit.index].weights.stored
        for write in (entry.write, None if home is None else home.write_in_flight):
            if write is not None:
                write.wait()


class _PinOfResident(Pin[HostPlace]):
    """Pin where all weights are resident: each use goes through here, and waits for its update alone."""

    __slots__ = ("_fence", "_index")

    def __init__(self, entry: Entry[HostPlace], purpose: Purpose, level: HostLevel, fence: UpdateFence) -> None:
        super().__init__(entry, purpose, level)
        self._index = entry.unit.index
        self._fence = fence

    def take(self, *, training: bool = False) -> None:
        if self._index in self._fence.pending or of_thread.stepping:
            self._fence.wait(self.entry.unit)

    def release(self) -> None:
        pass


def _resident_place(homes: UnitHomes) -> HostPlace | None:
    """Place of the weights of a unit that is resident in host memory."""
    return homes.weights if homes.weights.address is not None else None  # type: ignore[return-value]
