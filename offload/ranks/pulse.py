"""The pulse of each rank: who has failed, who is gone, and with which error all of them end.

Each rank counts in the store that the ranks share, and looks whether the others do. A rank that computes for an hour
counts on; one that was killed or stopped does not. The first error of any rank is put into the store once, and ends all
of them.
"""

from __future__ import annotations

import contextlib
import threading
import time

from offload.errors import RankError
from offload.ranks.world import World
from offload.waiting import Failure

_FIRST = "first error"
_BEATS_PER_TIMEOUT = 8


class Pulse:
    """A thread that counts, looks, and tells ``failure``. ``timeout_s``: a rank that is silent for so long is gone."""

    def __init__(self, world: World, timeout_s: float, failure: Failure) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._failure = failure
        self._store = world.store
        self._interval_s = min(timeout_s / _BEATS_PER_TIMEOUT, 5.0)
        self._heard = {rank: ("", time.monotonic()) for rank in range(world.size) if rank != world.rank}
        """Of each other rank: what it had counted to, and when that was new."""
        self._wake = threading.Event()
        self._stopping = False
        self._lost: BaseException | None = None
        self._lost_at = 0.0
        failure.told = self._wake.set
        self._thread = threading.Thread(target=self._run, name="offload-pulse", daemon=True)
        self._thread.start()

    def lost(self, error: BaseException) -> None:
        """A collective has failed, as it does when a rank is gone: find out which, and why."""
        self._lost, self._lost_at = error, time.monotonic()
        self._wake.set()

    def leave(self, error: BaseException | None) -> None:
        """This rank's engine ends, by this ``error`` if by one: the others end by it, too. Else they have left."""
        if error is not None:
            self._failure.record(error)
        self._stopping = True
        self._wake.set()
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        count = 0
        try:
            while True:
                count += 1
                self._store.set(str(self._world.rank), f"{count}")
                if self._failure.first is not None:
                    self._tell(self._failure.first)
                    return
                self._look()
                if self._stopping:
                    return
                soon = self._lost is not None
                self._wake.wait(min(self._interval_s, 0.2) if soon else self._interval_s)
                if self._lost is None:
                    self._wake.clear()
        except (RuntimeError, OSError) as error:  # the store is gone, and with it the rank that has it
            if not self._stopping:
                self._failure.record(RankError(f"the ranks' store does not answer: rank 0 is gone ({_line(error)})"))

    def _tell(self, error: BaseException) -> None:
        """Put the error where the others find it, unless they ended for another one before."""
        if isinstance(error, RankError):
            return
        text = f"rank {self._world.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_FIRST, "", text)

    def _look(self) -> None:
        """See whether an error is there, and who has been silent for too long."""
        if self._store.check([_FIRST]):
            self._failure.record(RankError(self._store.get(_FIRST).decode()))
            return
        now, silent = time.monotonic(), []
        patience_s = self._timeout_s if self._lost is None else min(self._timeout_s, 3 * self._interval_s)
        for rank, (before, since) in self._heard.items():
            key = str(rank)
            counted = self._store.get(key).decode() if self._store.check([key]) else ""
            if counted != before:
                self._heard[rank] = counted, now
            elif now - since > patience_s:
                silent.append(rank)
        if silent and not self._stopping:
            said = f"rank {silent[0]} is gone, or hangs: nothing was heard of it for {patience_s:.3g} s"
            first = self._store.compare_set(_FIRST, "", said).decode()
            self._failure.record(RankError(first))
        elif self._lost is not None and now - self._lost_at > patience_s + self._interval_s:  # nobody is gone
            self._failure.record(self._lost)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
