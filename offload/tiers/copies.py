"""A weight cache of copies: an update changes the originals below, and makes what was fetched void.

All calls come from one thread at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from offload.tiers.cache import Entry, P, WeightCache
from offload.units import UnitSpec


class CopyCache(WeightCache[P]):
    """A copy that is ``outdated`` stays until its uses are over; the next use fetches it anew."""

    def end_step(self) -> None:
        """A step ends the order of uses; the first units of the next one are fetched as their updates end."""
        with self._changed:
            self._order.end_step()
            self._fetch_ahead(wrap=False)

    @contextlib.contextmanager
    def _borrowed(self, unit: UnitSpec) -> Iterator[Entry[P]]:
        """The unit's entry, fetched and pinned, outside of the model's order."""
        entry = self._entries[unit.index]
        with self._changed:
            self._pin(entry, computing=False)
        self._wait_for_fetch(entry, None, computing=False)
        try:
            yield entry
        finally:
            with self._changed:
                self._unpin(entry, computing=False)

    # With the monitor held.

    def _pin(self, entry: Entry[P], *, computing: bool, polite: Callable[[], bool] | None = None) -> None:
        if entry.outdated and entry.pins == 0:
            self._drop(entry)
        super()._pin(entry, computing=computing, polite=polite)

    def _drop(self, entry: Entry[P]) -> None:
        """Evict a unit that is not in use, once its fetch is over."""
        while (fetch := entry.fetch) is not None and not fetch.done():
            self._changed.wait_for_transfer(fetch.wait)
        if entry.place is not None:
            self._evict(entry)
