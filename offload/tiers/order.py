"""The order in which units are used: learnt from the last step, tolerant of change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

NEVER = float("inf")


class UseOrder:
    """Predicts the next uses of units from the last step's, and follows the present one with a cursor.

    A use that was not predicted moves the cursor to the next place where that unit was used; the worst that a wrong
    guess can cost is one fetch on demand.
    """

    def __init__(self, num_units: int) -> None:
        self._observed: list[int] = []
        self._max_observed = 64 * max(num_units, 64)
        forward = list(range(num_units))
        self._learn([*forward, *reversed(forward)])

    def use(self, index: int) -> None:
        """Unit ``index`` is being used now."""
        if len(self._observed) == self._max_observed:  # evaluation without end: there is no step to wait for
            self.end_step()
        self._observed.append(index)
        position = self._next_position(index)
        if position is not None:
            self._cursor = (position + 1) % len(self._order)

    def end_step(self) -> None:
        """A step is over: what was seen in it is what the next one will look like."""
        if self._observed:
            self._learn(self._observed)
        self._observed = []

    def distance(self, index: int) -> float:
        """How many uses of other units come before the next use of this one. ``NEVER`` if none is expected."""
        position = self._next_position(index)
        return NEVER if position is None else (position - self._cursor) % len(self._order)

    def upcoming(self, *, wrap: bool = True) -> Iterator[int]:
        """The units of the coming uses, one step's worth; without ``wrap`` no further than the step's end."""
        for position in range(len(self._order) if wrap else len(self._order) - self._cursor):
            yield self._order[(self._cursor + position) % len(self._order)]

    def _learn(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._cursor = 0
        self._positions: dict[int, list[int]] = {}
        for position, index in enumerate(self._order):
            self._positions.setdefault(index, []).append(position)

    def _next_position(self, index: int) -> int | None:
        positions = self._positions.get(index)
        if not positions:
            return None
        return positions[bisect_left(positions, self._cursor) % len(positions)]
