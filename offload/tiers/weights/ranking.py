"""Ranking of the units to evict, where experts are too many to be compared each time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic

from offload.tiers.weights.pin import Entry, P


class Ranking(Generic[P]):
    """Units with a place, as they were compared once in a visit of a layer: a token evicts as many as it uses."""

    def __init__(self) -> None:
        self._entries: list[Entry[P]] = []
        """Those that were not evicted since, the one needed last at the end."""
        self._visit: object = None

    def victim(
        self, present: Collection[Entry[P]], visit: object, distance: Callable[[Entry[P]], float], own: float
    ) -> Entry[P] | None:
        """The unit needed last of those ``present`` that are not in use, if its ``distance`` is more than ``own``. They
        are compared anew in another ``visit``, where none of before will do, and where one must be found."""
        if visit is self._visit and own >= 0:
            found = self._first(present, distance, own)
            if found is not None:
                return found
        self._visit = visit
        self._entries = sorted(present, key=distance, reverse=True)[::-1]
        return self._first(present, distance, own)

    def _first(
        self, present: Collection[Entry[P]], distance: Callable[[Entry[P]], float], own: float
    ) -> Entry[P] | None:
        while self._entries:
            entry = self._entries[-1]
            if entry in present and not entry.pins and entry.is_settled():
                return self._entries.pop() if distance(entry) > own else None
            self._entries.pop()
        return None
