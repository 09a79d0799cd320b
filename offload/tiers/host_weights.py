"""Weights in host memory: slots that units on NVMe pass through, and where updates change them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import aio_ext
from offload.report.meter import Meter
from offload.tiers.cache import Entry, Residency, WeightCache
from offload.tiers.home import Transfer, UnitHomes
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import Lease, OffloadError

_LOOK_AHEAD = 64


class Slot:
    """One buffer in host memory for the weights of a unit. ``write``: the last transfer from it, while it is free."""

    def __init__(self, memory: Lease | aio_ext.Memory) -> None:
        self.address: int = memory.address
        self.nbytes: int = memory.nbytes
        self.write: Transfer | None = None
        self._memory = memory


class HostCarrier:
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
        return Slot(aio_ext.Memory(self._slot_bytes))

    def free_place(self, unit: UnitSpec, place: Slot) -> None:
        self._free.append(place)

    def blocking_transfer(self, unit: UnitSpec) -> Transfer | None:
        home = self._homes[unit.index].weights.stored
        return None if home is None else home.write_in_flight

    def fetch(self, unit: UnitSpec, place: Slot) -> Transfer:
        home = self._homes[unit.index].weights.stored
        if home is None:
            raise RuntimeError(f"unit {unit.name} does not rest on NVMe")
        return home.read(place.address, urgent=True)

    def pending(self) -> Transfer | None:
        return next((slot.write for slot in self._free if slot.write is not None), None)

    def drain(self) -> None:
        """Wait for the transfers of free slots, whatever becomes of them."""
        for slot in self._free:
            if slot.write is not None:
                with contextlib.suppress(OffloadError):
                    slot.write.wait()


class HostWeights(WeightCache[Slot]):
    """The cache of host memory. Compute uses it on the CPU, copies to a device are made from it, updates change it."""

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
        self._slots = HostCarrier(slots, homes, slot_bytes)
        super().__init__(
            units,
            lambda unit: homes[unit.index].weights.stored is None,
            self._slots,
            failure,
            meter,
            prefetch=prefetch,
            look_ahead=_LOOK_AHEAD,
            may_add_places=may_add_places,
        )
        self._homes = homes
        self._streams = bool(slots)
        self._resident = [homes[unit.index].weights.address for unit in units]
        """Where the weights are of units that are resident in host memory; None for others."""
        self._forward_under_way = False
        """Compute has used units since the last step was frozen. Guarded by the monitor, as is the next one."""
        self._num_waiting_for_update = 0

    @property
    def added_bytes(self) -> int:
        """Host memory of slots beyond the plan."""
        return self._slots.added_bytes

    # Uses, on any thread.

    def acquire(self, unit: UnitSpec, *, computing: bool = True) -> int:
        """Wait until the unit's weights are in host memory and up to date, pin them, and return their address.

        ``computing`` marks a use that belongs to the model's order: it is learnt, and the next units are prefetched.
        Where all weights are resident there is nothing to learn, to pin or to fetch.
        """
        entry = self._entries[unit.index]
        if not self._streams:
            if entry.updating:
                self.wait_for_update(unit)
            return self._resident[unit.index] or self._address(entry)
        with self._changed:
            if computing:
                self._learn(entry)
                self._forward_under_way = True
            if entry.updating:
                self._wait_for_update(entry)
            pin = self._pin_for_compute if computing else partial(self._pin, computing=False)
            if entry.residency is Residency.ABSENT:
                with self._meter.stall("slot"):
                    pin(entry)
            else:
                pin(entry)
        self._wait_for_fetch(entry, "read", computing=computing)
        return self._address(entry)

    def release(self, unit: UnitSpec, *, computing: bool = True) -> None:
        """A use is over."""
        if not self._streams:
            return
        with self._changed:
            self._unpin(self._entries[unit.index], computing=computing)
            if computing:
                self._fetch_ahead()

    @contextlib.contextmanager
    def borrow(self, unit: UnitSpec, *, change: bool = False) -> Iterator[int]:
        """The address of the unit's weights, to read or (``change``) to change them outside of the model's order."""
        entry = self._entries[unit.index]
        address = self.acquire(unit, computing=False)
        try:
            if change:
                self._wait_for_write(entry)
            yield address
            home = self._homes[unit.index].weights.stored
            if change and home is not None:
                entry.write = home.fill(address)
        finally:
            self.release(unit, computing=False)

    def wait_for_update(self, unit: UnitSpec) -> None:
        """Block until the last step's update has reached the unit."""
        entry = self._entries[unit.index]
        if entry.updating:
            with self._changed:
                self._wait_for_update(entry)

    def wait_for_updates(self) -> None:
        """Block until no unit waits for its update."""
        with self._changed:
            for entry in self._entries:
                if entry.updating:
                    self._wait_for_update(entry)

    def begin_updates(self, units: Sequence[UnitSpec]) -> None:
        """From now on these units may only be used once their update is done. Ends the step for the order of uses."""
        with self._changed:
            self._order.end_step()
            self._forward_under_way = False
            for unit in units:
                self._entries[unit.index].updating = True

    def forget_copies(self) -> None:
        """What the store holds has changed: nothing that lies in a slot is good any more. No update is under way."""
        for entry in self._entries:
            with self._changed:
                while entry.place is not None:
                    self._changed.wait_until(lambda: entry.pins == 0, lambda: f"the use of unit {entry.unit.name}")  # noqa: B023
                    if entry.is_settled():
                        self._evict(entry)
                        break
                    for transfer in (entry.fetch, entry.write):
                        if transfer is not None:
                            self._changed.wait_for_transfer(transfer.wait)

    def leave(self, unit: UnitSpec) -> None:
        """The unit is resident in a higher tier from now on: nothing fetches it any more. Its update is over."""
        entry = self._entries[unit.index]
        with self._changed:
            while True:
                self._changed.wait_until(lambda: entry.pins == 0, lambda: f"the use of unit {unit.name}")
                if entry.is_settled():
                    break
                for transfer in (entry.fetch, entry.write):
                    if transfer is not None:
                        self._changed.wait_for_transfer(transfer.wait)
            if entry.place is not None:
                self._evict(entry)
            entry.residency = Residency.PERMANENT
            self._resident[unit.index] = None

    # The update thread.

    def acquire_for_update(self, unit: UnitSpec) -> int:
        """Like ``acquire``, for the unit whose update comes next; its bytes may be changed."""
        entry = self._entries[unit.index]
        if entry.residency is not Residency.PERMANENT:
            with self._changed:
                self._pin(entry, computing=False, polite=self._forward_goes_on)
            self._wait_for_fetch(entry, None, computing=False)
            self._wait_for_write(entry)
        return self._address(entry)

    def try_fetch(self, unit: UnitSpec) -> None:
        """Start reading the unit if a slot is to be had at once."""
        entry = self._entries[unit.index]
        if entry.residency is Residency.ABSENT:
            with self._changed:
                if entry.residency is Residency.ABSENT and self._carrier.blocking_transfer(unit) is None:
                    self._try_to_bring(entry, must=False)

    def end_update(self, unit: UnitSpec) -> None:
        """The pinned weights are the new ones. They go back to the store, and waiting uses may go on."""
        entry = self._entries[unit.index]
        if entry.residency is Residency.PERMANENT:
            entry.updating = False  # only this thread clears it, and no place depends on it: no lock is needed
            if self._num_waiting_for_update:
                with self._changed:
                    self._changed.notify_all()
            return
        self._write_back(entry)
        with self._changed:
            entry.updating = False
            self._unpin(entry, computing=False)

    # Speculative updates: see offload.update.speculative.

    def hold(self, unit: UnitSpec) -> bool:
        """Keep the weights of a unit in use where they are, for a speculative update; False if they are not in use."""
        entry = self._entries[unit.index]
        with self._changed:
            if entry.residency is not Residency.RESIDENT or entry.pins == 0:
                return False
            entry.pins += 1
            return True

    def end_hold(self, unit: UnitSpec) -> None:
        """No speculative update will come."""
        with self._changed:
            self._unpin(self._entries[unit.index], computing=False)

    def bring(self, unit: UnitSpec) -> None:
        """Hold the weights of a unit, which are read if they are not here. The unit that is needed last makes room: one
        that backward is done with, so that nothing is waited for which this backward still needs."""
        entry = self._entries[unit.index]
        with self._changed:
            self._pin(entry, computing=False, polite=lambda: False)
        self._wait_for_fetch(entry, None, computing=False)

    def lend(self, unit: UnitSpec, wanted: Callable[[], bool]) -> Slot | None:
        """The slot of a unit that is held, once nothing else uses it. The unit itself is absent from now on.

        None if it is not ``wanted`` any more: the thread that says so may be the one that uses the unit. It is held no
        more then.
        """
        entry = self._entries[unit.index]
        with self._changed:
            while True:
                self._changed.wait_until(
                    lambda: entry.pins == 1 or not wanted(), lambda: f"the use of unit {unit.name}"
                )
                if not wanted():
                    self._unpin(entry, computing=False)
                    return None
                if entry.is_settled():
                    break
                for transfer in (entry.fetch, entry.write):  # meanwhile others may use the unit again
                    if transfer is not None:
                        self._changed.wait_for_transfer(transfer.wait)
            entry.pins = 0
            entry.beside = True
            self._num_lent += 1
            return self._detach(entry)

    def give_back(self, unit: UnitSpec, slot: Slot) -> None:
        """Send the new weights in a lent slot beside the current ones; the slot is free when they have arrived."""
        home = self._homes[unit.index].weights.stored
        write = None if home is None else home.write_shadow(slot.address)
        with self._changed:
            slot.write = write
            self._num_lent -= 1
            self._slots.free_place(unit, slot)
            self._changed.notify_all()

    def flip(self, unit: UnitSpec) -> None:
        """The weights beside are the unit's from now on; its update is done."""
        entry, home = self._entries[unit.index], self._homes[unit.index].weights.stored
        with self._changed:
            while True:
                self._changed.wait_until(lambda: entry.pins == 0, lambda: f"the use of unit {unit.name}")
                if entry.fetch is None or entry.fetch.done():
                    break
                self._changed.wait_for_transfer(entry.fetch.wait)
            if entry.place is not None:
                self._evict(entry)
            if home is not None:
                home.flip()
            entry.beside = entry.updating = False
            self._changed.notify_all()

    def forget_shadow(self, unit: UnitSpec) -> None:
        """The weights beside, if any, are not wanted."""
        with self._changed:
            self._entries[unit.index].beside = False

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for entry in list(self._present):
            for transfer in (entry.fetch, entry.write):
                if transfer is not None:
                    with contextlib.suppress(OffloadError):
                        transfer.wait()
        self._slots.drain()

    def _address(self, entry: Entry[Slot]) -> int:
        """Where the weights are. Only while they are pinned, or permanently resident."""
        if entry.place is not None:
            return entry.place.address
        address = self._resident[entry.unit.index]
        if address is None:
            raise RuntimeError(f"unit {entry.unit.name} is not in host memory")
        return address

    def _forward_goes_on(self) -> bool:
        """Compute has used units since the last step, and does not wait for an update: units that it needs sooner than
        the next one to be updated keep their slots, since the update would only evict what it has just brought in. As
        soon as compute waits for an update, or has not begun, the update may evict any unit that is not in use."""
        return self._forward_under_way and self._num_waiting_for_update == 0

    def _wait_for_update(self, entry: Entry[Slot]) -> None:
        self._num_waiting_for_update += 1
        self._changed.notify_all()
        try:
            with self._meter.stall("update"):
                self._changed.wait_until(
                    lambda: not entry.updating, lambda: f"the update of unit {entry.unit.name} ({self._held()})"
                )
        finally:
            self._num_waiting_for_update -= 1

    # Without the monitor: the unit is pinned.

    def _write_back(self, entry: Entry[Slot]) -> None:
        """The weights were changed: put them into the store, too. Returns when the write is on its way."""
        home = self._homes[entry.unit.index].weights.stored
        if home is not None:
            entry.write = home.write(self._address(entry))

    def _wait_for_write(self, entry: Entry[Slot]) -> None:
        """Bytes in flight must not change, and a place of the store must not get two writes at a time: wait for the
        last write before the weights are touched again, also for one beside, which came from another slot."""
        home = self._homes[entry.unit.index].weights.stored
        for write in (entry.write, None if home is None else home.write_in_flight):
            if write is not None:
                write.wait()
