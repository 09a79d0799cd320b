"""Weights that pass through slots: how often each unit's come from NVMe in a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from offload.units import UnitSpec


def returning(units: Sequence[UnitSpec], first_uses: Sequence[float] = ()) -> list[bool]:
    """Tell of each unit whether backward uses its weights: what is frozen, and has nothing before it that is trained,
    gets no gradient. ``first_uses``: when a step uses each first; none are known: in this order."""
    uses = first_uses or range(len(units))
    begins = min((use for use, unit in zip(uses, units, strict=True) if unit.trainable_numel), default=float("inf"))
    return [use >= begins or unit.is_tied for use, unit in zip(uses, units, strict=True)]


def lying(
    units: Sequence[UnitSpec], streamed: Sequence[int], slots: int, back: Sequence[bool]
) -> tuple[set[int], set[int]]:
    """Of the units in ``streamed``, those that are in their slots still when forward turns to backward, and those when
    backward turns to the forward of the next micro-batch. Experts take the slots of what was before them, and a unit
    that backward leaves out takes one at the end of it. A step's end leaves none: updates pass through the slots.
    ``back``: see ``returning``."""
    passing = [index for index in streamed if not units[index].is_tied]
    at_end = takewhile(lambda index: units[index].experts is None, reversed(passing))
    again = [index for index in passing if back[index]]
    at_begin = takewhile(lambda index: units[index].experts is None, again)
    left = slots - (len(again) < len(passing))
    return {index for index in list(at_end)[:slots] if back[index]}, set(list(at_begin)[: max(left, 0)])


def times_read(
    units: Sequence[UnitSpec], streamed: Sequence[int], slots: int, back: Sequence[bool], passes: int
) -> dict[int, int]:
    """Times that the weights of each unit in ``streamed`` come in a step of so many passes. Of experts each counts that
    tokens are sent to."""
    there, here = lying(units, streamed, slots, back)
    return {
        index: passes * (1 + (back[index] and index not in there)) - (passes - 1) * (index in here)
        for index in streamed
    }
