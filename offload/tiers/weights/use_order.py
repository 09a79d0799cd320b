"""The order in which units are used: learnt from the uses so far, tolerant of change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

NEVER = float("inf")


class UseOrder:
    """Predicts the next uses of units: what followed the same uses before follows them again.

    It keeps the uses of the last step and those since, and a cursor in them, at the use that is expected next. In
    training the cursor is a step behind the present. In generation, where one sweep through the model follows another
    and no step ends, it is a sweep behind. A use that was not expected moves the cursor to where that unit last
    followed the same one; the worst that a wrong guess can cost is one fetch on demand.
    """

    def __init__(self, num_units: int) -> None:
        self._max_uses = 64 * max(num_units, 64)
        """Of the uses since the last step, about that many are kept."""
        self._cursor = 0
        """Position in the uses at which the next one is expected."""
        forward = list(range(num_units))
        self._begin([*forward, *reversed(forward)])

    @property
    def visit(self) -> object:
        """Another one than before, where distances are to be compared anew: at any time."""
        return object()

    def announce(self, indices: Sequence[int]) -> None:
        """The next uses are of these units, which are experts: of other units nobody knows."""

    def use(self, index: int) -> bool:
        """Unit ``index`` is being used now. It is no expert."""
        if self._uses[self._cursor] != index:
            self._cursor = self._place_of(index)
        else:
            self._cursor += 1
        self._positions.setdefault(index, []).append(len(self._uses))
        self._uses.append(index)
        if len(self._uses) > self._step_end + 2 * self._max_uses:
            self._forget_oldest()
        return False

    def end_step(self) -> None:
        """A step is over: what was seen in it is what the next one will look like."""
        if len(self._uses) > self._step_end:
            self._begin(self._uses[self._step_end :])

    def distance(self, index: int) -> float:
        """Number of uses of other units before the next use of this one. ``NEVER`` if none is expected."""
        positions = self._positions.get(index, [])
        ahead = bisect_left(positions, self._cursor)
        return positions[ahead] - self._cursor if ahead < len(positions) else NEVER

    def first_use(self, index: int) -> float:
        """Place of the unit's first use among those of a step. ``NEVER`` if it had none in the last one."""
        positions = self._positions.get(index)
        return positions[0] if positions else NEVER

    def upcoming(self, *, wrap: bool = True) -> Iterator[int]:
        """The units of the coming uses, one step's or sweep's worth; without ``wrap`` no further than the step's
        end."""
        end = self._step_end if not wrap and self._cursor < self._step_end else len(self._uses)
        for position in range(self._cursor, end):
            yield self._uses[position]

    def _place_of(self, index: int) -> int:
        """The position after the use that is most like the present one: the last of the unit after the same one, or
        else the next one ahead; where the cursor is, if there is none."""
        positions, before = self._positions.get(index, []), self._uses[-1]
        for position in reversed(positions):
            if position > 0 and self._uses[position - 1] == before:
                return position + 1
        ahead = bisect_left(positions, self._cursor)
        if ahead < len(positions):
            return positions[ahead] + 1
        return positions[-1] + 1 if positions else self._cursor

    def _begin(self, uses: Sequence[int]) -> None:
        """A step with these uses has ended."""
        self._uses = list(uses)
        self._step_end = len(self._uses)
        """Number of the uses that are the last step's."""
        self._cursor = 0
        self._positions: dict[int, list[int]] = {}
        """Positions of each unit in the uses."""
        for position, index in enumerate(self._uses):
            self._positions.setdefault(index, []).append(position)

    def _forget_oldest(self) -> None:
        """Generation or evaluation without end: the step before it is not what comes next. What is kept begins with
        the unit that the present step began with."""
        num_forgotten = len(self._uses) - self._max_uses
        positions = self._positions[self._uses[self._step_end]]
        ahead = bisect_left(positions, num_forgotten)
        if ahead < len(positions):
            num_forgotten = positions[ahead]
        cursor = max(self._cursor - num_forgotten, 0)
        self._begin(self._uses[num_forgotten:])
        self._step_end, self._cursor = 0, cursor
