"""The extents of a store, and how their places lie in its space."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swapper.arena import align
from swapper.record import Record


@dataclass(frozen=True, slots=True)
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
    offsets, strides = offsets_of(sizes, places)
    extents = tuple(
        Extent(index, offset, align(size)) for index, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
    )
    records = [Record(e.index, e.offset, strides[count], count) for e, count in zip(extents, places, strict=True)]
    return extents, records, sum(count * stride for count, stride in strides.items())


def offsets_of(sizes: Iterable[int], places: Sequence[int]) -> tuple[array[int], dict[int, int]]:
    """The offset of each extent's first place; and, by the number of places, how far a place is from the one before."""
    strides: dict[int, int] = {}
    offsets = array("Q")
    for size, count in zip(sizes, places, strict=True):
        offsets.append(strides.setdefault(count, 0))
        strides[count] += align(size)
    begin, nbytes = {}, 0
    for count, stride in strides.items():
        begin[count] = nbytes
        nbytes += count * stride
    for index, count in enumerate(places):
        offsets[index] += begin[count]
    return offsets, strides
