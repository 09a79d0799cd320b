"""Weights between the store and compute: slots, fetches ahead of use, eviction of what is needed last.

[Note: Who may wait for whom] Compute pins at most one slot for each unit around the one at work, the update pins one,
and the plan has a slot for each of them: some slot is always free, or becomes free without help from whoever waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from offload.failure import Failure
from offload.order import UseOrder
from offload.report import Meter
from offload.unit import Residency, Slot, Unit
from swapper import OffloadError, Store, Ticket

WAIT_TIMEOUT_S = 600.0
"""No wait for a slot or an update may take longer: something has died that did not say so."""

_LOOK_AHEAD = 64
"""Uses ahead of the present one that prefetching considers."""

_IDLE_S = 0.05
"""So long the update leaves updated units in their slots for a forward that has not begun."""


class Weights:
    """Brings the weights of units into RAM and lets them go, within a fixed number of slots.

    ``acquire`` and ``release`` bracket each use. What is released stays in its slot until the slot is needed: then
    the unit goes whose next use is farthest away.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        slots: Sequence[Slot],
        store: Store | None,
        failure: Failure,
        meter: Meter,
        prefetch: bool,
    ) -> None:
        self._units = units
        self._slots = slots
        self._store = store
        self._failure = failure
        self._meter = meter
        self._prefetch = prefetch
        self._changed = threading.Condition()
        self._order = UseOrder(len(units))
        self._num_computing = 0
        self._num_waiting_for_update = 0

    # The training thread.

    def acquire(self, unit: Unit, *, computing: bool = True) -> int:
        """Wait until the unit's weights are in RAM and up to date, pin them, and return their address.

        ``computing`` marks a use that belongs to the model's order: it is learnt, and the next ones are prefetched.
        Where all weights are at home there is nothing to learn, to pin or to fetch.
        """
        if unit.weights_home is not None and not self._slots:
            if unit.updating:
                self.wait_for_update(unit)
            return unit.weights_home.address
        with self._changed:
            if computing:
                self._order.use(unit.spec.index)
            self._wait_for_update(unit)
            self._pin(unit)
            self._num_computing += computing
            if computing:
                self._fetch_ahead()
        self._wait_for_fetch(unit, "read")
        return unit.address

    def release(self, unit: Unit, *, computing: bool = True) -> None:
        """Say that a use is over."""
        if unit.weights_home is not None and not self._slots:
            return
        with self._changed:
            unit.pins -= 1
            self._num_computing -= computing
            if computing:
                self._fetch_ahead()
            self._changed.notify_all()

    def count_computing(self, change: int) -> None:
        """A use of a copy begins (1) or ends (-1): the update does not overtake it by more than the slots."""
        with self._changed:
            self._num_computing += change

    @contextlib.contextmanager
    def borrowed(self, unit: Unit, *, to_change: bool = False) -> Iterator[int]:
        """The address of the unit's weights, to look at or (``to_change``) change outside of the model's order."""
        address = self.acquire(unit, computing=False)
        try:
            if to_change:
                self._wait_for_write(unit)
            yield address
            if to_change:
                self._write_back(unit)
        finally:
            self.release(unit, computing=False)

    def give_up(self, unit: Unit) -> None:
        """The unit is at home elsewhere from now on: nobody brings it in any more. Its update is over."""
        with self._changed:
            self._wait_until(lambda: unit.pins == 0, f"the use of unit {unit.name}")
            while unit.fetch is not None and not unit.fetch.done():
                self._unlocked_wait(unit.fetch)
            if unit.slot is not None:
                self._empty(unit.slot)
            unit.residency = Residency.ABSENT
            unit.weights_home = unit.weights_extent = None

    def hold(self, unit: Unit) -> None:
        """Keep the weights of a unit in use where they are, for an early update."""
        with self._changed:
            assert unit.pins > 0
            unit.pins += 1

    def let_go(self, unit: Unit) -> None:
        """No early update will come."""
        with self._changed:
            unit.pins -= 1
            self._changed.notify_all()

    def begin_updates(self, units: Sequence[Unit]) -> None:
        """From now on these units may only be used once their update is done. Ends the step for the order."""
        with self._changed:
            self._order.end_step()
            for unit in units:
                unit.updating = True

    def wait_for_update(self, unit: Unit) -> None:
        """Block until the last step's update has reached the unit."""
        if unit.updating:
            with self._changed:
                self._wait_for_update(unit)

    def wait_for_updates(self) -> None:
        """Block until no unit waits for its update."""
        with self._changed:
            for unit in self._units:
                self._wait_for_update(unit)

    # The update thread.

    def acquire_for_update(self, unit: Unit) -> int:
        """Like ``acquire``, for the unit whose update comes next."""
        if unit.weights_home is not None:
            return unit.weights_home.address
        with self._changed:
            self._pin(unit, for_update=True)
        self._wait_for_fetch(unit, None)
        self._wait_for_write(unit)
        return unit.address

    def try_fetch(self, unit: Unit) -> None:
        """Start reading the unit if a slot is to be had at once."""
        if unit.residency is not Residency.ABSENT:
            return
        with self._changed:
            if unit.residency is Residency.ABSENT:
                slot = self._victim(unit, must=False)
                if slot is not None:
                    self._fetch(unit, slot)

    def end_update(self, unit: Unit) -> None:
        """The pinned weights are the new ones. They go back to the store, and whoever waits for them may go on."""
        if unit.weights_home is not None:
            unit.updating = False
            if self._num_waiting_for_update:
                self.wake()
            return
        self._write_back(unit)
        with self._changed:
            unit.updating = False
            unit.pins -= 1
            self._changed.notify_all()

    def take_slot(self, unit: Unit) -> Slot:
        """The slot of a unit that is held, for an early update alone. The unit itself is absent from now on."""
        with self._changed:
            self._wait_until(lambda: unit.pins == 1, f"the use of unit {unit.name}")
        self._wait_for_write(unit)
        with self._changed:
            slot = unit.slot
            assert slot is not None and unit.pins == 1
            unit.pins = 0
            self._empty(slot)
            slot.taken = True
            return slot

    def return_slot(self, slot: Slot, unit: Unit) -> None:
        """Send what is in the slot to the unit's shadow; the slot is free when it has arrived."""
        assert self._store is not None and unit.weights_shadow is not None
        if unit.shadow_write is not None:
            unit.shadow_write.wait()
        write = self._store.write(unit.weights_shadow, slot.lease.address, unit.weight_bytes)
        with self._changed:
            slot.write = unit.shadow_write = self._traced("write", unit, write)
            slot.taken = False
            self._changed.notify_all()

    def exchange(self, unit: Unit) -> None:
        """The unit's shadow holds its weights from now on; its update is done."""
        with self._changed:
            self._wait_until(lambda: unit.pins == 0, f"the use of unit {unit.name}")
            if unit.fetch is not None:
                with contextlib.suppress(OffloadError):
                    unit.fetch.wait()
            if unit.slot is not None:
                self._empty(unit.slot)
            unit.weights_extent, unit.weights_shadow = unit.weights_shadow, unit.weights_extent
            unit.weights_write, unit.shadow_write = unit.shadow_write, None
            unit.updating = False
            self._changed.notify_all()

    def wake(self) -> None:
        """Let everyone who waits look again: something failed, or the engine closes."""
        with self._changed:
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for slot in self._slots:
            fetch = slot.unit.fetch if slot.unit is not None else None
            for ticket in (slot.write, fetch):
                if ticket is not None:
                    with contextlib.suppress(OffloadError):
                        ticket.wait()

    # All below is called with the lock held.

    def _wait_for_update(self, unit: Unit) -> None:
        if not unit.updating:
            return
        self._num_waiting_for_update += 1
        self._changed.notify_all()
        try:
            with self._meter.stall("update"):
                self._wait_until(lambda: not unit.updating, f"the update of unit {unit.name}")
        finally:
            self._num_waiting_for_update -= 1

    def _pin(self, unit: Unit, *, for_update: bool = False) -> None:
        """Pin the unit, reserving a slot and starting its read if it is absent."""
        if unit.residency is Residency.ABSENT:
            if for_update:
                slot = self._wait_for_slot(unit)
            else:
                with self._meter.stall("slot"):
                    slot = self._wait_for_slot(unit, must=True)
            if unit.residency is Residency.ABSENT:
                self._fetch(unit, slot)
        unit.pins += 1

    def _wait_for_slot(self, unit: Unit, must: bool = False) -> Slot:
        """A slot that ``unit`` may have.

        ``must`` takes one from any unit that is not in use. Otherwise (the update) units that are needed before this
        one keep their slots, as long as a forward is under way and does not itself wait for an update: the update would
        only push out what it has just brought in.
        """
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        idle_since = time.monotonic()
        while True:
            self._failure.check()
            if self._num_computing:
                idle_since = time.monotonic()
            hurry = self._num_waiting_for_update > 0 or time.monotonic() - idle_since > _IDLE_S
            slot = self._victim(unit, must=must or hurry)
            if slot is not None:
                return slot
            transfer = self._transfer_in_the_way(unit, must=must or hurry)
            if transfer is not None:
                self._unlocked_wait(transfer)
                continue
            if time.monotonic() > deadline:
                raise OffloadError(
                    f"no slot became free for unit {unit.name} in {WAIT_TIMEOUT_S:.0f} s: {self._held()}"
                )
            self._changed.wait(_IDLE_S)

    def _victim(self, unit: Unit, *, must: bool) -> Slot | None:
        """The best slot that can be had at once: a free one, or that of the unit that is needed last."""
        candidates = [slot for slot in self._evictable(unit, must) if slot.write is None or slot.write.done()]
        return max(candidates, key=self._slot_distance, default=None)

    def _transfer_in_the_way(self, unit: Unit, *, must: bool) -> Ticket | None:
        """A transfer whose end would free a slot for ``unit``: a write-back, or a fetch that nobody waits for."""
        for slot in self._evictable(unit, must):
            if slot.write is not None:
                return slot.write
        for slot in self._slots if must else ():
            if slot.unit is not None and slot.unit.pins == 0 and slot.unit.fetch is not None:
                return slot.unit.fetch
        return None

    def _evictable(self, unit: Unit, must: bool) -> list[Slot]:
        own_distance = self._order.distance(unit.spec.index)
        return [
            slot
            for slot in self._slots
            if not slot.taken
            and (
                slot.unit is None
                or (
                    slot.unit.pins == 0
                    and (slot.unit.residency is Residency.RESIDENT or self._fetch_is_over(slot.unit))
                    and (must or self._slot_distance(slot) > own_distance)
                )
            )
        ]

    def _slot_distance(self, slot: Slot) -> float:
        return float("inf") if slot.unit is None else self._order.distance(slot.unit.spec.index)

    def _fetch_is_over(self, unit: Unit) -> bool:
        return unit.fetch is not None and unit.fetch.done()

    def _fetch(self, unit: Unit, slot: Slot) -> None:
        """Give the slot to ``unit`` and start reading."""
        assert self._store is not None and unit.weights_extent is not None
        if slot.write is not None:
            slot.write.wait()
            slot.write = None
        self._empty(slot)
        if unit.weights_write is not None:
            unit.weights_write.wait()
            unit.weights_write = None
        slot.unit, unit.slot = unit, slot
        unit.residency = Residency.FETCHING
        fetch = self._store.read(unit.weights_extent, slot.lease.address, unit.weight_bytes, urgent=True)
        unit.fetch = self._traced("read", unit, fetch)

    def _empty(self, slot: Slot) -> None:
        """Whatever unit is in the slot is absent from now on."""
        if slot.unit is not None:
            slot.unit.residency = Residency.ABSENT
            slot.unit.slot = None
            slot.unit.fetch = None
            slot.unit = None

    def _fetch_ahead(self) -> None:
        """Start reading the units that come next, into slots whose units are needed later."""
        if not self._prefetch:
            return
        present: set[int] = set()
        for index in islice(self._order.upcoming(), _LOOK_AHEAD):
            if len(present) == len(self._slots):  # what comes still later finds no slot
                return
            unit = self._units[index]
            if unit.on_device:
                continue
            if unit.residency is not Residency.ABSENT or unit.weights_home is not None:
                if unit.weights_home is None:
                    present.add(index)
                continue
            if unit.updating:
                return
            if unit.speculation is not None:  # what is in the store now is not what will be asked for
                continue
            slot = self._victim(unit, must=False)
            if slot is None:
                return
            self._fetch(unit, slot)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition():
            self._failure.check()
            if time.monotonic() > deadline:
                raise OffloadError(f"{what} is not done after {WAIT_TIMEOUT_S:.0f} s: {self._held()}")
            self._changed.wait(1.0)

    def _held(self) -> str:
        held = [f"{slot.unit.name} ({slot.unit.pins} pins)" for slot in self._slots if slot.unit is not None]
        return f"slots hold {', '.join(held) or 'nothing'}"

    def _unlocked_wait(self, ticket: Ticket) -> None:
        self._changed.release()
        try:
            ticket.wait()
        finally:
            self._changed.acquire()

    # Without the lock: the unit is pinned.

    def _write_back(self, unit: Unit) -> None:
        """The weights were changed: put them into the store too. Returns when the write is on its way."""
        if unit.weights_extent is not None:
            assert self._store is not None and unit.slot is not None
            write = self._store.write(unit.weights_extent, unit.slot.lease.address, unit.weight_bytes)
            unit.slot.write = self._traced("write", unit, write)

    def _traced(self, track: str, unit: Unit, ticket: Ticket) -> Ticket:
        return self._meter.trace.transfer(track, f"weights of {unit.name}", unit.weight_bytes, ticket)

    def _wait_for_write(self, unit: Unit) -> None:
        """Bytes in flight must not change: wait for the last write-back before the weights are touched again."""
        if unit.slot is not None and unit.slot.write is not None:
            unit.slot.write.wait()

    def _wait_for_fetch(self, unit: Unit, cause: str | None) -> None:
        """Wait for the read of a pinned unit. On an error the unit is absent again and no longer pinned."""
        fetch = unit.fetch
        if unit.residency is not Residency.FETCHING or fetch is None:
            return
        try:
            if cause is None or fetch.done():
                fetch.wait()
            else:
                with self._meter.stall(cause):
                    fetch.wait()
        except BaseException:
            with self._changed:
                unit.pins -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            if unit.residency is Residency.FETCHING:
                unit.residency = Residency.RESIDENT
                unit.fetch = None
