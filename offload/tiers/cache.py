"""One weight cache: units of a tier that come from the tier below, fetched ahead of use, evicted when needed last.

It is used three times: for slots in host memory, filled from NVMe (``HostWeights``); for copies in a device's memory,
filled from host memory or from other ranks (``DeviceWeights``); and for whole units in host memory, of which ranks have
shards (``GatheredWeights``). They differ in the carrier, which knows how much there is room for and brings the bytes.

[Note: Which thread may wait for which] Compute pins at most one place for each unit around the one at work, as far as
the model's structure shows; the update pins one, and the plan has a place for each of them. So some place is always
free, or becomes free without the help of the thread that waits. Where a unit calls one that is not below it in the
model, compute can hold them all: then one place is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Generic, Protocol, TypeVar

from offload.errors import warn
from offload.report.meter import Meter
from offload.tiers.home import Transfer
from offload.tiers.order import UseOrder
from offload.units import UnitSpec
from offload.waiting import Deadline, Failure, Monitor

_SLICE_S = 0.1


class Residency(Enum):
    """Where a unit's weights are, as seen from the tier of the cache.

    - ``ABSENT``: only a lower tier holds them.
    - ``FETCHING``: a place is reserved, and the fetch is in flight.
    - ``RESIDENT``: the bytes in its place are valid.
    - ``PERMANENT``: the unit is resident by the plan, and never evicted; or it has left for a higher tier.
    """

    ABSENT = auto()
    FETCHING = auto()
    RESIDENT = auto()
    PERMANENT = auto()


P = TypeVar("P")


class Carrier(Protocol[P]):
    """The memory of one tier for units that rest in a lower one, and the way of their bytes to it."""

    @property
    def num_places(self) -> int | None:
        """How many places there are; None if their sizes differ."""

    def take_place(self, unit: UnitSpec) -> P | None:
        """Memory for the unit; None if there is none until some is freed. Never waits."""

    def add_place(self, unit: UnitSpec) -> P:
        """Memory beyond the plan, because compute holds all there is. Raises ``OffloadError`` if there is none."""

    def free_place(self, unit: UnitSpec, place: P) -> None:
        """Take a place back whose unit is evicted."""

    def blocking_transfer(self, unit: UnitSpec) -> Transfer | None:
        """A transfer that must be over before the unit can be fetched."""

    def fetch(self, unit: UnitSpec, place: P) -> Transfer:
        """Start bringing the unit to its place. The place may be freed once the transfer is ``done``."""

    def pending(self) -> Transfer | None:
        """A transfer whose end frees a place."""


class Entry(Generic[P]):
    """What the cache knows of one unit. Guarded by the cache's monitor, except ``write``, which belongs to the thread
    that may change the bytes of a pinned unit, and ``updating`` of a permanent unit, which only the update ends."""

    def __init__(self, unit: UnitSpec, residency: Residency) -> None:
        self.unit = unit
        self.residency = residency
        self.place: P | None = None
        self.fetch: Transfer | None = None
        self.write: Transfer | None = None
        """The write-back in flight from its place, if any: the bytes may be read, not changed."""
        self.pins = 0
        """Uses that need the unit to stay where it is."""
        self.num_computing = 0
        """Those of them that belong to compute."""
        self.updating = False
        """The last step's update is not done: the weights are the old ones, and not for use."""
        self.beside = False
        """A speculative update has, or will have, new weights for it beside the current ones."""
        self.outdated = False
        """The place holds old weights, which a use still needs; the next use fetches anew."""

    def is_settled(self) -> bool:
        """No transfer to or from its place is in flight."""
        fetch, write = self.fetch, self.write
        return (fetch is None or fetch.done()) and (write is None or write.done())


class WeightCache(Generic[P]):
    """Each use of a unit is between an acquire and a release. A released unit stays until its place is needed: then
    the unit is evicted whose next use is farthest away."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        permanent: Callable[[UnitSpec], bool],
        carrier: Carrier[P],
        failure: Failure,
        meter: Meter,
        *,
        prefetch: bool,
        look_ahead: int,
        may_add_places: bool,
    ) -> None:
        """``look_ahead`` uses ahead of the present one are considered by prefetching.

        ``may_add_places``: it is compute that uses the cache, and may hold every place at a time.
        """
        self._entries = [Entry[P](unit, Residency.PERMANENT if permanent(unit) else Residency.ABSENT) for unit in units]
        self._carrier = carrier
        self._failure = failure
        self._meter = meter
        self._prefetch = prefetch
        self._look_ahead = look_ahead
        self._may_add_places = may_add_places
        self._order = UseOrder(len(units))
        self._changed = Monitor(failure)
        """Guards the entries, the order of uses, the carrier's places and the counts below. After speculative updates
        in the order of locks, a device's cache before the host's, and before gradients."""
        self._present: dict[Entry[P], None] = {}
        """The entries that have a place, in the order in which they got it."""
        self._num_lent = 0
        """Places that the update has, and gives back by itself."""
        self._num_waiting_for_place = 0
        """Uses that wait for one: nothing is fetched ahead meanwhile."""

    # What subclasses build on; called with the monitor held.

    def _learn(self, entry: Entry[P]) -> None:
        """Compute uses the unit now."""
        self._order.use(entry.unit.index)

    def _pin(self, entry: Entry[P], *, computing: bool, polite: Callable[[], bool] | None = None) -> None:
        """Pin the unit; an absent one gets a place, and its fetch begins. See ``_bring`` for ``polite``."""
        if entry.residency is Residency.ABSENT:
            self._bring(entry, polite)
        entry.pins += 1
        entry.num_computing += computing

    def _pin_for_compute(self, entry: Entry[P], *, wrap: bool = True) -> None:
        """Pin the unit for compute, and fetch the units that come next."""
        self._pin(entry, computing=True)
        try:
            self._fetch_ahead(wrap=wrap)
        except BaseException:
            self._unpin(entry, computing=True)
            raise

    def _unpin(self, entry: Entry[P], *, computing: bool) -> None:
        entry.pins -= 1
        entry.num_computing -= computing
        self._changed.notify_all()

    def end_computing(self, units: Sequence[UnitSpec] | None = None) -> list[UnitSpec]:
        """Unpin those of the ``units`` (by default all) that compute was interrupted in; which they are."""
        entries = self._entries if units is None else [self._entries[unit.index] for unit in units]
        left = [entry for entry in entries if entry.num_computing]
        if left:
            with self._changed:
                for entry in left:
                    entry.pins -= entry.num_computing
                    entry.num_computing = 0
                self._changed.notify_all()
        return [entry.unit for entry in left]

    def _bring(self, entry: Entry[P], polite: Callable[[], bool] | None) -> None:
        """Reserve a place for an absent unit and start its fetch; waits for a place if it must.

        An update gives ``polite``: while it says so, units that are needed before this one keep their places.
        """
        deadline = Deadline(lambda: f"a place for unit {entry.unit.name} ({self._held()})")
        is_use = polite is None
        self._num_waiting_for_place += is_use
        try:
            self._bring_by(deadline, entry, polite or _never)
        finally:
            self._num_waiting_for_place -= is_use

    def _bring_by(self, deadline: Deadline, entry: Entry[P], polite: Callable[[], bool]) -> None:
        while entry.residency is Residency.ABSENT:
            self._failure.check()
            must = not polite()
            transfer = self._carrier.blocking_transfer(entry.unit)
            if transfer is None:
                if self._try_to_bring(entry, must=must):
                    return
                transfer = self._transfer_in_the_way(entry, must)
            if transfer is not None:
                self._changed.wait_for_transfer(transfer.wait)
            elif must and self._compute_holds_all():
                self._start_fetch(entry, self._add_place(entry))
            else:
                deadline.check()
                self._changed.wait(_SLICE_S)

    def _try_to_bring(self, entry: Entry[P], *, must: bool) -> bool:
        """Start the fetch of an absent unit if there is a place, or units that may be evicted for it."""
        while (place := self._carrier.take_place(entry.unit)) is None:
            victim = self._victim(entry, must)
            if victim is None:
                return False
            self._evict(victim)
        self._start_fetch(entry, place)
        return True

    def _victim(self, entry: Entry[P], must: bool) -> Entry[P] | None:
        """The unit needed last of those that are not in use; unless it ``must`` be, of those needed after ``entry``."""
        own = -1.0 if must else self._distance(entry)
        best: Entry[P] | None = None
        for other in self._present:
            if other.pins == 0:
                distance = self._distance(other)
                if distance > own and other.is_settled():
                    best, own = other, distance
        return best

    def _distance(self, entry: Entry[P]) -> float:
        return float("inf") if entry.outdated else self._order.distance(entry.unit.index)

    def _transfer_in_the_way(self, entry: Entry[P], must: bool) -> Transfer | None:
        """A transfer whose end would free a place for ``entry``: see ``_victim``."""
        pending = self._carrier.pending()
        if pending is not None:
            return pending
        own = -1.0 if must else self._distance(entry)
        for other in self._present:
            if other.pins == 0 and self._distance(other) > own:
                for transfer in (other.write, other.fetch):
                    if transfer is not None and not transfer.done():
                        return transfer
        return None

    def _compute_holds_all(self) -> bool:
        return self._may_add_places and self._num_lent == 0 and all(entry.num_computing for entry in self._present)

    def _add_place(self, entry: Entry[P]) -> P:
        place = self._carrier.add_place(entry.unit)
        users = ", ".join(other.unit.name for other in self._present)
        warn(
            f"unit {entry.unit.name} is called from inside of units that it is no part of ({users}): the engine took "
            "memory for one more unit than was planned"
        )
        return place

    def _start_fetch(self, entry: Entry[P], place: P) -> None:
        try:
            entry.fetch = self._carrier.fetch(entry.unit, place)
        except BaseException:
            self._carrier.free_place(entry.unit, place)
            raise
        entry.place = place
        entry.residency = Residency.FETCHING
        self._present[entry] = None

    def _evict(self, entry: Entry[P]) -> None:
        """Give the place of a unit back that is not in use and settled. Raises what its write-back failed with."""
        if entry.write is not None:
            entry.write.wait()
        self._carrier.free_place(entry.unit, self._detach(entry))

    def _detach(self, entry: Entry[P]) -> P:
        """The unit is absent from now on; its place."""
        place = entry.place
        if place is None:
            raise RuntimeError(f"unit {entry.unit.name} has no place to give")
        del self._present[entry]
        entry.place = entry.fetch = entry.write = None
        entry.outdated = False
        entry.residency = Residency.ABSENT
        return place

    def _fetch_ahead(self, *, wrap: bool = True) -> None:
        """Start fetching the units that come next, into places of units that are needed later."""
        if not self._prefetch or self._num_waiting_for_place:
            return
        num_ahead, num_places = 0, self._carrier.num_places
        seen: set[int] = set()
        for index in islice(self._order.upcoming(wrap=wrap), self._look_ahead):
            entry = self._entries[index]
            if entry.residency is not Residency.ABSENT:
                if entry.residency is not Residency.PERMANENT and index not in seen:
                    seen.add(index)
                    num_ahead += 1
                    if num_ahead == num_places:  # units that come still later find no place
                        return
                continue
            if entry.beside:  # the store's current weights are not the ones that will be asked for
                continue
            if entry.updating or self._carrier.blocking_transfer(entry.unit) is not None:
                return
            if not self._try_to_bring(entry, must=False):
                return
            seen.add(index)
            num_ahead += 1

    def _held(self) -> str:
        held = [f"{entry.unit.name} with {entry.pins} uses" for entry in self._present]
        return f"places hold {', '.join(held) or 'nothing'}"

    # Without the monitor: the unit is pinned.

    def _wait_for_fetch(self, entry: Entry[P], cause: str | None, *, computing: bool) -> None:
        """Wait for the fetch of a pinned unit, as a stall for ``cause``. After an error it is pinned no more."""
        fetch = entry.fetch
        if entry.residency is not Residency.FETCHING or fetch is None:
            return
        try:
            if cause is None or fetch.done():
                fetch.wait()
            else:
                with self._meter.stall(cause):
                    fetch.wait()
        except BaseException:
            with self._changed:
                self._unpin(entry, computing=computing)
            raise
        with self._changed:
            if entry.residency is Residency.FETCHING:
                entry.residency = Residency.RESIDENT
                entry.fetch = None


def _never() -> bool:
    return False
