"""One extent's places in a store, and which of them is current.

[Note: Places] A record has several places. A write goes to a place that nobody needs; a flip makes it current.
So the bytes that were current stay readable until the new ones are certain. A place is needed if a generation that is
kept has its bytes there. A record with one place is written over.

[Note: A write that fails] A place knows whether its write has failed. A current place whose write has failed gives way
to the place that was current before it, at the next look. That place still has its bytes: only a later write could
have taken it, and a later write may begin only when the one before it is over. A place that was written over stays
current after a failure: its old bytes are lost, and a read finds that its checksum is wrong.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from swapper.errors import StoreMisuse
from swapper.ticket import Checksum


@dataclass(eq=False, slots=True)
class Place:
    """The bytes of one write: where they lie, and how to know them. ``generation`` is the one that they are for."""

    number: int
    offset: int
    checksum: Checksum
    generation: int


class Record:
    """The places of the extent number ``index``: place number k is at ``offset + k * stride`` of the store's space.

    One thread at a time may call the methods of one record.
    """

    __slots__ = ("_before", "_current", "_shadow", "index", "num_places", "offset", "stride")

    def __init__(self, index: int, offset: int, stride: int, num_places: int) -> None:
        self.index = index
        self.offset = offset
        self.stride = stride
        self.num_places = num_places
        self._current: Place | None = None
        self._before: Place | None = None
        """Place that was current before ``_current``."""
        self._shadow: Place | None = None
        """Place of the shadow that was written last, unless it was flipped."""

    @property
    def current(self) -> Place | None:
        """The place that a read takes; None before the first write. See [Note: A write that fails]."""
        current, before = self._current, self._before
        if current is None or current.checksum.error is None:
            return current
        if before is None or before.number != current.number:
            self._current = before  # its bytes are still there
        return self._current

    def readable(self) -> Place:
        """The current place. Raises ``StoreMisuse`` if nothing was ever written."""
        current = self.current
        if current is None:
            raise StoreMisuse(f"extent {self.index} was never written.")
        return current

    def offset_of(self, number: int) -> int:
        """Offset at which place ``number`` begins in the store's space."""
        return self.offset + number * self.stride

    def spare(self, needed: Container[int]) -> int | None:
        """The number of a place that is neither ``needed`` nor current; None if there is none."""
        current = self.current
        for number in range(self.num_places):
            if number not in needed and (current is None or number != current.number):
                return number
        return None

    def replaceable(self, needed: Container[int]) -> int:
        """The number of the place that a write takes: a spare one, else the current one, which it writes over."""
        number = self.spare(needed)
        if number is not None:
            return number
        current = self.readable()
        if current.number in needed:
            raise StoreMisuse(
                f"extent {self.index} has no place for a write: all {self.num_places} are needed.",
                advice="Finish or abandon the prepared generation, or release a retained one.",
            )
        return current.number

    def replaced(self, place: Place) -> None:
        """A write to ``place`` has begun: it is current from now on."""
        self._before, self._current = self.current, place

    def reset(self, place: Place | None) -> None:
        """Make ``place`` current, whatever was."""
        self._before, self._current = None, place

    def forget(self) -> None:
        """Nothing is current, and nothing is to be flipped."""
        self._before = self._current = self._shadow = None

    def give_up_shadow(self) -> None:
        """Give up the shadow: it is not to be flipped. To be called before its place is written again."""
        self._shadow = None

    def put_shadow(self, place: Place) -> None:
        """A write to ``place`` has begun; what is current stays current."""
        self._shadow = place

    def flip(self) -> None:
        """Make current what was written beside last. Raises ``StoreMisuse`` if there is nothing, and the error of its
        write if that has failed; nothing has changed then."""
        beside = self._shadow
        if beside is None:
            raise StoreMisuse(
                f"extent {self.index}: nothing was written beside since the last flip or write.",
                advice="Call write_shadow before flip.",
            )
        if beside.checksum.error is not None:
            raise beside.checksum.error
        self.replaced(beside)
        self._shadow = None
