"""Origin of one tensor's value."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from swapper import FilePart


@dataclass(frozen=True, eq=False)
class Origin:
    """It is asked for when the tensor's unit is stored, and again for each piece of a weight in pieces."""

    whole: Callable[[], torch.Tensor]
    """Gives the value, in host memory."""
    read_rows: Callable[[int, int], torch.Tensor] | None = None
    """Gives the rows ``[start, stop)`` of it, where that takes less than the whole."""
    dtype: torch.dtype | None = None
    """Dtype in which the value lies in ``parts``."""
    parts: tuple[FilePart, ...] = ()
    """Parts of files that hold the value, flat and as it is; none if it is made of what is there."""
    made: str = ""
    """How it is made then, in words."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The rows ``[start, stop)`` of the value."""
        return self.whole()[start:stop] if self.read_rows is None else self.read_rows(start, stop)

    def parts_within(self, begin: int, end: int) -> Iterator[FilePart]:
        """Yield the parts of files that hold the bytes ``[begin, end)`` of the value."""
        parts, starts = self._in_order
        for part in islice(parts, max(bisect_right(starts, begin) - 1, 0), None):
            if part.offset >= end:
                return
            found = part.within(begin, end)
            if found is not None:
                yield found

    @cached_property
    def _in_order(self) -> tuple[Sequence[FilePart], Sequence[int]]:
        """The parts as they lie in the value, and where each begins: a stack of experts has thousands."""
        parts = sorted(self.parts, key=lambda part: part.offset)
        return parts, [part.offset for part in parts]
