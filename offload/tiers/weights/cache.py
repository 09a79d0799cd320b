"""One weight cache: units of a tier that come from the tier below, fetched ahead of use, evicted when needed last.

A *level* of the memory hierarchy is such a cache with what its tier needs besides: slots in host memory, filled from
NVMe (``HostLevel``); whole units in host memory, of which ranks have shards (``GatherLevel``); copies in a device's
memory (``DeviceLevel``). They differ in the carrier, which knows how much there is room for and brings the bytes.

[Note: Which thread may wait for which] Compute pins at most one place for each unit around the one at work, as far as
the model's structure shows; the update pins one, and the plan has a place for each of them. So some place is always
free, or becomes free without the help of the thread that waits. Where a unit calls one that is not below it in the
model, compute can hold them all: then one place is added.

[Note: Interrupts] An exception may come at any line of the thread that computes (Ctrl-C, a time limit). What it may
leave half done is one of three things. A pin is in a set or not: ``release`` takes it out, and may be called twice.
What was learnt of the order of uses is forgotten. While a place changes hands handlers wait (``held_back``).

[Note: Who frees a place] This file alone calls ``Carrier.free_place``, with the monitor held. ``evict`` does for a unit
without pins whose transfers are over (``Entry.is_settled``): for the sake of another one (``_try_to_bring``, of what
``_victim`` chooses); in ``_drop``, for ``outdate``, ``drop``, ``shrink`` and the next use of an outdated one; for
``ShadowSlots.flip``; and for ``DeviceLevel.close``, at the end. A fetch that could not begin frees the place that it
took (``_fetch_to``). A speculative update has a place between ``lend`` and ``take_back``. What is resident by the plan
has no place to free: its memory goes with the arena, or with the homes on a device.

[Note: Who is fetched next] ``_fetch_ahead`` takes the units of ``UseOrder.upcoming`` (``RoutedOrder`` where there are
experts) as long as each finds a place, and is called by every use of compute, by ``announce`` and by ``fetch_ahead``.
``_victim`` says whose place a unit gets. What is pinned and not there is fetched at once, whatever comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, Generic

from offload.errors import warn
from offload.interrupts import held_back
from offload.report.meter import Meter
from offload.tiers.fence import UpdateFence
from offload.tiers.home import Transfer
from offload.tiers.weights.carrier import Carrier
from offload.tiers.weights.expert_counts import ExpertCounts
from offload.tiers.weights.pin import WITHOUT_PLACE, Entry, P, Pin, Purpose, UnitState
from offload.tiers.weights.ranking import Ranking
from offload.tiers.weights.routed_order import RoutedOrder
from offload.tiers.weights.use_order import UseOrder
from offload.units import UnitSpec
from offload.waiting import Deadline, Failure, Monitor, refuse_finalizer

_SLICE_S = 0.1

_KNOW_NO_ADDRESS = (Purpose.COMPUTE, Purpose.SPECULATION)
"""Pins whose owners are the caller, or ask for the place once nobody else uses it."""


def order_of(units: Sequence[UnitSpec]) -> UseOrder | RoutedOrder:
    """Return what is known of the order of uses before the first one."""
    return RoutedOrder(units) if any(unit.experts is not None for unit in units) else UseOrder(len(units))


@dataclass(eq=False)
class WeightCache(Generic[P]):
    """Each use of a unit is between the taking and the release of a pin. A released unit stays until its place is
    needed: then the unit is evicted whose next use is farthest away."""

    units: Sequence[UnitSpec]
    carrier: Carrier[P]
    failure: Failure
    meter: Meter
    _: KW_ONLY
    is_permanent: Callable[[UnitSpec], bool] = lambda unit: False
    """Tells units that are resident by the plan."""
    permanent: Callable[[UnitSpec], P | None] = lambda unit: None
    """Gives their places, if they have one in this tier."""
    prefetch: bool
    look_ahead: int
    """Uses ahead of the present one that prefetching considers."""
    may_add_places: bool = True
    """It is compute that uses the cache, and may hold every place at a time."""

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.failure)
        """Guards the entries, the order of uses, the carrier's places and the counts below. After speculative updates
        in the order of locks, a device's cache before the host's, and before gradients."""
        self.fence = UpdateFence(self.units, self.monitor, self.meter, self.held)
        self.entries = [
            Entry(unit, UnitState.PERMANENT if self.is_permanent(unit) else UnitState.ABSENT, self.permanent(unit))
            for unit in self.units
        ]
        self.present: dict[Entry[P], None] = {}
        """The entries that have a place and may be evicted, in the order in which they got it."""
        self._ranking: Ranking[P] = Ranking()
        self._lent: set[UnitSpec] = set()
        """Units whose places speculative updates have."""
        self._order = order_of(self.units)
        self.experts = ExpertCounts(self.units)
        self._forward_under_way = False
        """Compute has used units since the last step was frozen."""
        self._spares: list[Any] = []
        """Memory that places had, and that nobody looks at any more."""
        self._waiting: set[Pin[P]] = set()
        """Uses that wait for a place: nothing is fetched ahead meanwhile."""
        self._in_use: set[Pin[P]] = set()
        """Pins that compute has taken."""

    # Uses.

    def take(self, pin: Pin[P], *, training: bool = False) -> None:
        """See ``Pin.take``. The units that compute uses next are fetched."""
        entry, computing = pin.entry, pin.purpose is Purpose.COMPUTE
        of_program = pin.purpose in (Purpose.COMPUTE, Purpose.LOOK)
        if of_program:
            refuse_finalizer(self.monitor)
        try:
            with self.monitor:
                if computing:
                    self._learn(entry)
                if of_program and self.fence.is_pending(entry.unit):
                    self.fence.wait_held(entry.unit)
                self._pin(pin)
                if computing:
                    self._fetch_ahead(wrap=not training)
            self._wait_for_fetch(pin)
        except BaseException:
            self.release(pin)
            raise

    def release(self, pin: Pin[P]) -> None:
        """A use is over. Safe to call twice, and for a pin that was not taken."""
        if pin in pin.entry.pins:
            with self.monitor:
                self._in_use.discard(pin)
                pin.entry.pins.discard(pin)
                self.monitor.notify_all()

    def announce(self, units: Sequence[UnitSpec]) -> None:
        """Compute will use these experts of one layer next, in this order: they are fetched."""
        with self.monitor:
            self._order.announce([unit.index for unit in units])
            self._fetch_ahead(wrap=False)

    def fetch_ahead(self, *, wrap: bool = True) -> None:
        """Start fetching the units that come next, into places of units that are needed later."""
        with self.monitor:
            self._fetch_ahead(wrap=wrap)

    def try_fetch(self, unit: UnitSpec) -> None:
        """Start fetching the unit if a place is to be had at once."""
        entry = self.entries[unit.index]
        if entry.state in WITHOUT_PLACE:
            with self.monitor:
                if entry.state in WITHOUT_PLACE and self.carrier.blocking_transfer(unit) is None:
                    self._try_to_bring(entry, must=False)

    def has_room(self, units: Sequence[UnitSpec]) -> bool:
        """Tell whether these may be in use at a time, beside what is resident by the plan."""
        passing = [unit for unit in units if self.entries[unit.index].state is not UnitState.PERMANENT]
        return not passing or self.carrier.has_room(passing)

    def first_use(self, unit: UnitSpec) -> float:
        """See ``UseOrder.first_use``."""
        with self.monitor:
            return self._order.first_use(unit.index)

    def end_step(self) -> None:
        """A step ends the order of uses."""
        with self.monitor:
            self._order.end_step()
            self._forward_under_way = False

    # Changes from outside of uses.

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        """Copies of these units are void. One that is in use stays until its uses are over."""
        entries = [self.entries[unit.index] for unit in units]
        for entry in entries:
            if entry.fetch is not None:
                entry.fetch.wait()
        self.carrier.settle()
        for entry in entries:
            with self.monitor:
                if entry.state in (UnitState.FETCHING, UnitState.RESIDENT):
                    entry.become(UnitState.OUTDATED)
                if not entry.pins:
                    self._drop(entry)

    def drop(self, unit: UnitSpec) -> None:
        """Evict the unit, if it is here, once nothing uses it."""
        with self.monitor:
            self.wait_until_unused(self.entries[unit.index])
            self._drop(self.entries[unit.index])

    def make_permanent(self, unit: UnitSpec) -> None:
        """The unit is resident in a higher tier, or in this one by other means, from now on."""
        entry = self.entries[unit.index]
        self.drop(unit)
        with self.monitor:
            if entry.state is not UnitState.PERMANENT:
                entry.become(UnitState.PERMANENT)
            entry.place = None

    def shrink(self, goes_on: Callable[[], bool]) -> None:
        """Evict units that are not in use, those needed last first, as long as this says so."""
        with self.monitor:
            for entry in sorted(self.present, key=self._distance, reverse=True):
                if goes_on() and not entry.pins:
                    self._drop(entry)

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for entry in list(self.present):
            for transfer in entry.transfers():
                with contextlib.suppress(Exception):
                    transfer.wait()

    def leave_memory(self, pin: Pin[P]) -> Callable[[], object]:
        """Have the memory under a unit that compute uses stay as it is for those who look at it beyond the use. Another
        unit may get it after the call that is returned."""
        place: Any = pin.place
        with self.monitor:
            self.wait_until_unused(pin.entry, but=_KNOW_NO_ADDRESS)
            return place.leave(self._spares)  # type: ignore[no-any-return]

    # With the monitor held.

    def wait_until_unused(self, entry: Entry[P], *, but: Sequence[Purpose] = ()) -> None:
        """Block until no pins but those for these purposes keep the unit, and no transfer to or from its place is in
        flight."""
        while True:
            self.monitor.wait_until(
                lambda: all(pin.purpose in but for pin in entry.pins), lambda: f"the use of unit {entry.unit.name}"
            )
            under_way = next((transfer for transfer in entry.transfers() if not transfer.done()), None)
            if under_way is None:
                return
            self.monitor.free_during(under_way.wait)  # meanwhile others may use the unit again

    def lend(self, entry: Entry[P]) -> P:
        """Give the place of a unit to its speculative update, until ``take_back``. Callers have seen that it has no
        other pins and is settled. The unit is absent from now on, and what is below has, or gets, a shadow."""
        self._lent.add(entry.unit)
        entry.pins.clear()
        place = self._detach(entry)
        entry.become(UnitState.SHADOWED)
        return place

    def take_back(self, unit: UnitSpec, place: P) -> None:
        """The place that was lent is for any unit again."""
        self._lent.discard(unit)
        self.carrier.free_place(unit, place)
        self.monitor.notify_all()

    def evict(self, entry: Entry[P]) -> None:
        """Give the place of a unit back. Callers have seen that it has no pins and is settled; at the end nobody asks.

        Raises what its write-back failed with.
        """
        if entry.write is not None:
            entry.write.wait()
        with held_back():
            self.carrier.free_place(entry.unit, self._detach(entry))

    def _detach(self, entry: Entry[P]) -> P:
        """The unit is without a place from now on; the place it had."""
        place = entry.place
        if place is None:
            raise RuntimeError(f"unit {entry.unit.name} has no place to give")
        entry.become(UnitState.ABSENT)
        self.present.pop(entry, None)
        entry.place = entry.fetch = entry.write = None
        return place

    def held(self) -> str:
        """Holders of the places, for messages."""
        held = [f"{entry.unit.name} with {len(entry.pins)} uses" for entry in self.present]
        return f"places hold {', '.join(held) or 'nothing'}"

    def _learn(self, entry: Entry[P]) -> None:
        """Compute uses the unit now."""
        self._forward_under_way = True
        try:
            if self._order.use(entry.unit.index):
                self.experts.use(entry.unit, self._order.visit)
        except BaseException:
            self._order = order_of(self.units)
            raise

    def _pin(self, pin: Pin[P]) -> None:
        """Pin the unit; an absent one gets a place, and its fetch begins."""
        entry = pin.entry
        if entry.state is UnitState.OUTDATED and not entry.pins:
            self._drop(entry)
        if entry.state in WITHOUT_PLACE:
            self._bring(pin)
        entry.pins.add(pin)
        if pin.purpose is Purpose.COMPUTE:
            self._in_use.add(pin)

    def _bring(self, pin: Pin[P]) -> None:
        """Reserve a place for an absent unit and start its fetch; waits for a place if it must."""
        if pin.purpose in (Purpose.UPDATE, Purpose.SPECULATION):
            self._bring_by(pin)
            return
        try:
            self._waiting.add(pin)
            with self.meter.stall("slot") if pin.purpose is Purpose.COMPUTE else contextlib.nullcontext():
                self._bring_by(pin)
            self.experts.fetch(pin.entry.unit)
        finally:
            self._waiting.discard(pin)

    def _bring_by(self, pin: Pin[P]) -> None:
        entry = pin.entry
        deadline = Deadline(lambda: f"a place for unit {entry.unit.name} ({self.held()})")
        while entry.state in WITHOUT_PLACE:
            self.failure.check()
            must = pin.purpose is not Purpose.UPDATE or not self._forward_goes_on()
            transfer = self.carrier.blocking_transfer(entry.unit)
            if transfer is None:
                if self._try_to_bring(entry, must=must):
                    return
                transfer = self._transfer_in_the_way(entry, must)
            if transfer is not None:
                self.monitor.free_during(transfer.wait)
            elif must and self._compute_holds_all():
                self._fetch_to(entry, self._add_place)
            else:
                deadline.check()
                self.monitor.wait(_SLICE_S)

    def _forward_goes_on(self) -> bool:
        """Compute has used units since the last step, and does not wait for an update: units that it needs sooner than
        the next one to be updated keep their places, since the update would only evict what it has just brought in. As
        soon as compute waits for an update, or has not begun, the update may evict any unit that is not in use."""
        return self._forward_under_way and not self.fence.is_waited_for

    def _try_to_bring(self, entry: Entry[P], *, must: bool) -> bool:
        """Start the fetch of an absent unit if there is a place, or units that may be evicted for it."""
        while not self._fetch_to(entry, self.carrier.take_place):
            victim = self._victim(entry, must)
            if victim is None:
                return False
            self.evict(victim)
        return True

    def _fetch_to(self, entry: Entry[P], take: Callable[[UnitSpec], P | None]) -> bool:
        """Start the fetch to the place that ``take`` gives, if it gives one."""
        with held_back():
            place = take(entry.unit)
            if place is None:
                return False
            try:
                fetch = self.carrier.fetch(entry.unit, place)
            except Exception:
                self.carrier.free_place(entry.unit, place)
                raise
            entry.place, entry.fetch = place, fetch
            entry.become(UnitState.FETCHING)
            self.present[entry] = None
            return True

    def _victim(self, entry: Entry[P], must: bool) -> Entry[P] | None:
        """The unit needed last of those that are not in use; unless it ``must`` be, of those needed after ``entry``."""
        own = -1.0 if must else self._distance(entry)
        return self._ranking.victim(self.present, self._order.visit, self._distance, own)

    def _distance(self, entry: Entry[P]) -> float:
        return float("inf") if entry.state is UnitState.OUTDATED else self._order.distance(entry.unit.index)

    def _transfer_in_the_way(self, entry: Entry[P], must: bool) -> Transfer | None:
        """A transfer whose end would free a place for ``entry``: see ``_victim``."""
        pending = self.carrier.pending()
        if pending is not None:
            return pending
        own = -1.0 if must else self._distance(entry)
        for other in self.present:
            if not other.pins and self._distance(other) > own:
                for transfer in (other.write, other.fetch):
                    if transfer is not None and not transfer.done():
                        return transfer
        return None

    def _compute_holds_all(self) -> bool:
        return (
            self.may_add_places
            and not self._lent
            and all(any(pin.purpose is Purpose.COMPUTE for pin in entry.pins) for entry in self.present)
        )

    def _add_place(self, unit: UnitSpec) -> P:
        place = self.carrier.add_place(unit)
        users = ", ".join(other.unit.name for other in self.present)
        warn(
            f"unit {unit.name} is called from inside of units that it is no part of ({users}): the engine took memory "
            "for one more unit than was planned"
        )
        return place

    def _drop(self, entry: Entry[P]) -> None:
        """Evict a unit that is not in use, once its fetch is over."""
        while (fetch := entry.fetch) is not None and not fetch.done():
            self.monitor.free_during(fetch.wait)
        if entry in self.present:
            self.evict(entry)

    def _fetch_ahead(self, *, wrap: bool) -> None:
        if not self.prefetch or self._waiting:
            return
        num_ahead = sum(pin.entry.state is not UnitState.PERMANENT for pin in self._in_use)
        seen: set[int] = set()
        for index in islice(self._order.upcoming(wrap=wrap), self.look_ahead):
            if num_ahead == self.carrier.num_places:  # units that come still later find no place
                return
            if index is None:  # some expert will need a place, whichever it is
                num_ahead += 1
                continue
            entry = self.entries[index]
            if entry.state not in WITHOUT_PLACE:
                if entry.state is not UnitState.PERMANENT and index not in seen and not entry.pins:
                    seen.add(index)
                    num_ahead += 1
                continue
            if entry.state is UnitState.SHADOWED:  # the weights below are not the ones that will be asked for
                continue
            if self.fence.is_pending(entry.unit) or self.carrier.blocking_transfer(entry.unit) is not None:
                return
            if not self._try_to_bring(entry, must=False):
                return
            self.experts.fetch(entry.unit)
            seen.add(index)
            num_ahead += 1

    # Without the monitor: the unit is pinned.

    def _wait_for_fetch(self, pin: Pin[P]) -> None:
        """Wait for the fetch of a pinned unit, as a stall if compute does."""
        entry = pin.entry
        fetch = entry.fetch
        if entry.state is not UnitState.FETCHING or fetch is None:
            return
        if pin.purpose is not Purpose.COMPUTE or fetch.done():
            fetch.wait()
        else:
            with self.meter.stall(self.carrier.waits_for(entry.unit)):
                fetch.wait()
        with self.monitor:
            if entry.state is UnitState.FETCHING:
                entry.become(UnitState.RESIDENT)
                entry.fetch = None
