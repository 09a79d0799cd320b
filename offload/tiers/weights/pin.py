"""Units in a weight cache: the state of each, and pins, which keep it where it is."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from offload.tiers.home import Transfer
from offload.units import UnitSpec


class UnitState(Enum):
    """State of a unit's weights, as seen from the tier of a cache.

    - ``ABSENT``: only a lower tier holds them.
    - ``SHADOWED``: the same, and new weights are, or will be, in the shadow of those below: nothing is fetched ahead.
    - ``FETCHING``: a place is reserved, and the fetch is in flight or over.
    - ``RESIDENT``: the bytes in its place are valid.
    - ``OUTDATED``: the place holds old weights, which a use still needs; the next use fetches anew.
    - ``PERMANENT``: the unit is resident by the plan, and never evicted; without a place it has left for a higher tier.
    """

    ABSENT = auto()
    SHADOWED = auto()
    FETCHING = auto()
    RESIDENT = auto()
    OUTDATED = auto()
    PERMANENT = auto()


WITHOUT_PLACE = (UnitState.ABSENT, UnitState.SHADOWED)

_NEXT = {
    UnitState.ABSENT: {UnitState.SHADOWED, UnitState.FETCHING, UnitState.PERMANENT},
    UnitState.SHADOWED: {UnitState.ABSENT, UnitState.FETCHING, UnitState.PERMANENT},
    UnitState.FETCHING: {UnitState.RESIDENT, UnitState.OUTDATED, UnitState.ABSENT},
    UnitState.RESIDENT: {UnitState.OUTDATED, UnitState.ABSENT},
    UnitState.OUTDATED: {UnitState.ABSENT},
    UnitState.PERMANENT: set(),
}


class Purpose(Enum):
    """Purpose of a pin, which says whom it may take a place from.

    - ``COMPUTE``: a use by the model. The order of uses learns it, and any unit that is not in use may make room.
    - ``LOOK``: a look from outside of that order. Any unit may make room.
    - ``UPDATE``: the unit's certain update. While a forward goes on, units that it needs sooner stay.
    - ``SPECULATION``: the unit's speculative update. Any unit may make room.
    """

    COMPUTE = auto()
    LOOK = auto()
    UPDATE = auto()
    SPECULATION = auto()


P = TypeVar("P")
_Owner = TypeVar("_Owner", contravariant=True)


class Entry(Generic[P]):
    """One unit in the cache. Guarded by the cache's monitor, except ``write``, which belongs to the thread that may
    change the bytes of a pinned unit."""

    def __init__(self, unit: UnitSpec, state: UnitState, place: P | None) -> None:
        self.unit = unit
        self.state = state
        self.place = place
        self.fetch: Transfer | None = None
        self.write: Transfer | None = None
        """The write-back in flight from its place, if any: the bytes may be read, not changed."""
        self.pins: set[Pin[P]] = set()
        """Uses that need the unit to stay where it is."""

    def become(self, state: UnitState) -> None:
        """Go on to another state."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"unit {self.unit.name} cannot be {state.name} after {self.state.name}")
        self.state = state

    def is_settled(self) -> bool:
        """No transfer to or from its place is in flight."""
        return all(transfer.done() for transfer in self.transfers())

    def transfers(self) -> Iterator[Transfer]:
        """Those to and from its place, over or not."""
        return (transfer for transfer in (self.fetch, self.write) if transfer is not None)


class Taker(Protocol[_Owner]):
    """Level that takes and releases pins."""

    def take(self, pin: _Owner, *, training: bool) -> None: ...

    def release(self, pin: _Owner) -> None: ...


class Pin(Generic[P]):
    """The right to find a unit where it is, between ``take`` and ``release``, or within the pin as a context manager.

    To make one has no effect, and to release one that is not taken, or again, has none: whoever keeps the pin can give
    back what an interrupt has left, wherever it came.
    """

    __slots__ = ("_taker", "entry", "purpose")

    def __init__(self, entry: Entry[P], purpose: Purpose, taker: Taker[Pin[P]]) -> None:
        self.entry = entry
        self.purpose = purpose
        self._taker = taker

    @property
    def place(self) -> P:
        """Place of the unit. Only while it is pinned."""
        place = self.entry.place
        if place is None:
            raise RuntimeError(f"unit {self.entry.unit.name} has no place in this tier")
        return place

    def take(self, *, training: bool = False) -> None:
        """Wait until the unit is there and up to date, and keep it. ``training``: a step ends this order of uses, and
        the weights of later uses will have changed."""
        self._taker.take(self, training=training)

    def release(self) -> None:
        """The use is over."""
        self._taker.release(self)

    def __enter__(self) -> Pin[P]:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
