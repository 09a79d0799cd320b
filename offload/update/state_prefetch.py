"""States that are read before the verdict, where the update has to wait for it: what the next update begins with.

A step whose gradients are clipped can be updated only when the last one has come. Until then the disk has little to do
and the tile buffers nothing. So they are filled, in the order of the update, with states that no verdict changes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from offload.tiers.home import StoredHome, Transfer
from swapper import Lease, OffloadError


class StatePrefetch:
    """States in tile buffers of ``pool``, which the pipeline shares. The update thread reads them and takes them; any
    thread may drop them, which waits for the disk and for no thread."""

    def __init__(self, pool: list[Lease]) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        """Guards what follows. It is held until buffers are back in the pool, so that nobody finds them in neither.
        Only the store's lock is taken, and only reads are waited for, while it is held."""
        self._present: dict[StoredHome, tuple[Lease, Transfer, int]] = {}
        """With the number of flips of the home before its read."""
        self._num_drops = 0

    def reader(self, homes: Iterable[StoredHome]) -> Callable[[], None]:
        """A call that starts reading these states, as many as there are buffers. It does nothing once states that are
        here, or were to be, are dropped."""
        before = self._num_drops
        return lambda: self._read(homes, before)

    def take(self, home: StoredHome) -> tuple[Lease, Transfer] | None:
        """The buffer of states that are here, or on their way: it belongs to the caller now. None, too, if they were
        read before a speculative update of them counted."""
        if not self._present:
            return None
        with self._lock:
            if home not in self._present:
                return None
            lease, read, num_flips = self._present.pop(home)
            if num_flips == home.num_flips:
                return lease, read
            self._put_back(lease, read)
            return None

    def give_up(self) -> bool:
        """Put the buffer of the states that are needed last back into the pool; False if there are none."""
        with self._lock:
            if not self._present:
                return False
            self._put_back(*self._present.pop(next(reversed(self._present)))[:2])
            return True

    def drop(self) -> None:
        """States may change, or nobody wants them any more: all buffers are in the pool when this returns."""
        with self._lock:
            self._num_drops += 1
            while self._present:
                self._put_back(*self._present.popitem()[1][:2])

    def _read(self, homes: Iterable[StoredHome], before: int) -> None:
        for home in homes:
            with self._lock:
                if self._num_drops != before or not self._pool:
                    return
                if home not in self._present:
                    lease, num_flips = self._pool.pop(), home.num_flips
                    try:
                        self._present[home] = lease, home.read(lease.address), num_flips
                    except BaseException:
                        self._pool.append(lease)
                        raise

    def _put_back(self, lease: Lease, read: Transfer) -> None:
        with contextlib.suppress(OffloadError):  # whoever needs the bytes reads them again, and is told
            read.wait()
        self._pool.append(lease)
