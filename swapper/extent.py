"""The extents of a store, and how their places lie in its space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapper.arena import align
from swapper.record import Record


@dataclass(frozen=True)
class Extent:
    """One piece of a store, moved as a whole. ``nbytes`` is a multiple of the page size; ``offset`` is that of the
    extent's first place in the store's space."""

    index: int
    offset: int
    nbytes: int


def lay_out(sizes: Sequence[int], places: Sequence[int]) -> tuple[tuple[Extent, ...], list[Record], int]:
    """The extents, sizes rounded up to whole pages, with their records; and the bytes of all places.

    Extents with the same number of places lie together: all their first places, one after the other, then all their
    second ones, and so on.
    """
    per_place: dict[int, int] = {}
    starts = []
    for size, count in zip(sizes, places, strict=True):
        starts.append(per_place.setdefault(count, 0))
        per_place[count] += align(size)
    begin, nbytes = {}, 0
    for count, stride in per_place.items():
        begin[count] = nbytes
        nbytes += count * stride
    extents = tuple(
        Extent(index, begin[count] + start, align(size))
        for index, (size, count, start) in enumerate(zip(sizes, places, starts, strict=True))
    )
    records = [Record(e.index, e.offset, per_place[count], count) for e, count in zip(extents, places, strict=True)]
    return extents, records, nbytes
