"""Ranges of a space of bytes that are taken and given back, in any order."""

from __future__ import annotations

from bisect import bisect_left

from swapper.arena import align


class Ranges:
    """Free and taken parts of ``[0, nbytes)``, in whole pages. What is taken lies as far in front as it can: what is
    given back in the reverse order leaves no gaps."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align(nbytes)
        self.taken_bytes = 0
        self._starts: list[int] = [0] if nbytes else []
        self._stops: list[int] = [self.nbytes] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """The offset of so many bytes, rounded up to whole pages; None if there is no such room in one piece."""
        nbytes = align(nbytes)
        for index, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self._starts[index], self._stops[index]
                else:
                    self._starts[index] += nbytes
                self.taken_bytes += nbytes
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free what ``take`` has given."""
        stop = start + align(nbytes)
        self.taken_bytes -= stop - start
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == stop:
            stop = self._stops[index]
            del self._starts[index], self._stops[index]
        if index and self._stops[index - 1] == start:
            self._stops[index - 1] = stop
        else:
            self._starts.insert(index, start)
            self._stops.insert(index, stop)
