"""Counts of the experts that compute has used, and of those that were fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from offload.units import Experts, UnitSpec


class ExpertNumel(NamedTuple):
    """Elements of experts: those that compute has used, each once in a visit of its layer (``routed``); those that were
    ``fetched`` for it or for others; those of all experts of the layers that were ``visited``."""

    routed: int = 0
    fetched: int = 0
    visited: int = 0


class ExpertCounts:
    """Counts since it was made, and of late."""

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        self._routed = self._fetched = self._visited = 0
        self._of_layers = Counter[Experts | None]()
        for unit in units:
            self._of_layers[unit.experts] += unit.numel
        self._visit: object = None
        self._marks = ExpertNumel(), ExpertNumel()
        """The counts when about a quarter was routed, or less, and half of it."""

    def use(self, unit: UnitSpec, visit: object) -> None:
        """Compute uses the expert for the first time in this visit of its layer."""
        if visit is not self._visit:
            if self._routed > 2 * self._marks[1].routed:
                self._marks = self._marks[1], self.all
            self._visit = visit
            self._visited += self._of_layers[unit.experts]
        self._routed += unit.numel

    def fetch(self, unit: UnitSpec) -> None:
        """Compute, which needs the unit or is expected to, has it brought in."""
        if unit.experts is not None:
            self._fetched += unit.numel

    @property
    def all(self) -> ExpertNumel:
        """Return the counts since it was made."""
        return ExpertNumel(self._routed, self._fetched, self._visited)

    @property
    def recent(self) -> ExpertNumel:
        """Return those of half of all uses or more: the first ones find nothing in the slots."""
        return ExpertNumel(*(now - then for now, then in zip(self.all, self._marks[0], strict=True)))
