"""The heartbeat of each rank: who has failed, who is gone, and with which error all of them end.

Each rank counts in the store that the ranks share, and looks whether the rank after it does. A rank that computes for
an hour counts on; one that was killed or stopped does not. The first error of any rank is put into the store once, and
ends all of them; none goes before all know, since the store may be in its process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from offload.errors import RankError
from offload.ranks.places import Place
from offload.ranks.signs import NO_SIGNS, Signs
from offload.waiting import Failure
from swapper import OffloadError

T = TypeVar("T")

_log = logging.getLogger("offload")

PATIENCE_S = 1800.0
"""A rank that lives may let the others wait for this long."""

_FIRST = "first error"
_CALLS = "calls of ranks that wait"
_WANTS = 1 << 32
"""A call of a rank that can be given what it waits for counts so many more."""
_CALL_S = 0.5
"""A rank that wants what others can give lets them come to the same by themselves for so long."""
_NUM_KNOWING = "ranks that know the end"
_BEATS_PER_TIMEOUT = 8
_SLICE = timedelta(seconds=0.2)
STORE_IS_GONE = (
    "the store that all ranks share does not answer: the process that has it, that of rank 0 or its launcher, is gone "
    "or hangs"
)


class Waiting:
    """Answers of a rank to its heartbeat about what it does together with others: nothing so far."""

    def waited_s(self) -> float:
        """Seconds since which an operation of this rank has waited for others to come to it, or to another."""
        return 0.0

    def can_be_given(self) -> bool:
        """Tell whether ranks that do something else can give what the operation wants."""
        return False

    def give(self) -> None:
        """Others wait for what this rank can give: give it, if it has nothing to do with them itself."""

    def place(self) -> Place:
        """The place of this rank."""
        return Place("the making of the engine", 0.0)


_QUIET_S = 0.5
"""A collective that a failure has left may take so long to end."""


class Heartbeat:
    """A thread that counts, looks, and tells ``failure``. ``timeout_s``: a rank that is silent for so long is gone.

    No call of a store has a deadline that holds: whoever waits for other ranks looks whether the thread is stuck.
    """

    def __init__(
        self, rank: int, size: int, store: Any, timeout_s: float, failure: Failure, signs: Signs = NO_SIGNS
    ) -> None:
        self._rank = rank
        self._signs = signs
        self._attached: Callable[[], Waiting | None] = lambda: None
        self._num_calls = self._num_wants = 0
        """Calls of all ranks that were seen, and those that wanted something."""
        self._has_told = False
        self._size = size
        self._store = store
        self._timeout_s = timeout_s
        self.failure = failure
        self._interval_s = min(timeout_s / _BEATS_PER_TIMEOUT, 1.0)
        self._heard: dict[int, tuple[int, float]] = {}
        """Of another rank: what it had counted to, and since when."""
        self._wake = threading.Event()
        self._stopping = False
        self._work: Any = None
        """The collective that is waited for, or that a failure has left."""
        self._lost: BaseException | None = None
        self._lost_at = 0.0
        self._beat_at = self._checked_at = self._looked_at = time.monotonic()
        failure.when_known(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="offload-heartbeat", daemon=True)
        self._thread.start()

    def attach(self, waiting: Waiting) -> None:
        """Look after what waits for other ranks from now on, as long as it is referred to elsewhere."""
        self._attached = weakref.ref(waiting)

    def check(self) -> None:
        """Raise the first error of any rank. Whoever waits for ranks calls this again and again."""
        now = time.monotonic()
        if now - self._checked_at > self._timeout_s / 2:  # a first look; or this process was stopped, and its thread
            self._beat_at = now
        self._checked_at = now
        if now - self._beat_at > self._timeout_s:
            self.failure.record(RankError(STORE_IS_GONE))
        self.failure.check()

    def wait_for(self, work: Any) -> None:
        """Wait for a collective, as long as no rank has failed: the interpreter cannot end a thread that is inside."""
        self._work = work
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not in this slice of time; what else it may be is raised below
                work.wait(_SLICE)
            self.check()
        try:
            work.wait()
        except RuntimeError as error:
            self.blame(error)
        self._work = None

    def is_quiet(self) -> bool:
        """The collective that was waited for last is over: it ends, too, when another rank's connections do."""
        deadline = time.monotonic() + _QUIET_S
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.005)
        is_over, self._work = self._work is None or bool(self._work.is_completed()), None
        return is_over

    def wait_for_call(self, call: Callable[[], T], what: str) -> T:
        """The result of ``call``, which waits for all ranks to come to the same without looking whether one is gone; it
        is left behind then, in a thread of its own. Raises ``RankError`` for ``what`` they do not come to in time."""
        made: Future[T] = Future()

        def run() -> None:
            try:
                made.set_result(call())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=run, name="offload-meet", daemon=True).start()
        deadline = time.monotonic() + PATIENCE_S
        while not made.done():
            self.check()
            if time.monotonic() > deadline:
                raise RankError(f"not all of the {self._size} ranks have come to {what} in {PATIENCE_S:g} s")
            time.sleep(0.005)
        error = made.exception()
        if error is not None:
            self.blame(error)
        return made.result()

    def blame(self, error: BaseException) -> None:
        """A collective has failed, as it does when a rank is gone: find out which, and raise why."""
        self._lost, self._lost_at = error, time.monotonic()
        self._wake.set()
        while True:
            self.check()
            time.sleep(0.01)

    def leave(self, error: BaseException | None) -> None:
        """This rank ends, by this ``error`` if by one: the others end by it, too. Waits until they know, or are gone.
        Safe to call twice."""
        if error is not None:
            self.failure.record(error)
        self._stopping = True
        self._wake.set()
        self._thread.join(4 * self._interval_s)

    def _run(self) -> None:
        try:
            while not self._stopping and not self.failure.is_known:
                self._beat_at = time.monotonic()
                self._store.add(str(self._rank), 1)
                self._look()
                self._call_and_answer()
                self._wake.wait(self._interval_s if self._lost is None else min(self._interval_s, 0.1))
                self._wake.clear()
            if self.failure.first is not None:
                self._tell(self.failure.first)
            self._wait_for_others()
        except (RuntimeError, OSError):
            if not self._stopping:
                self.failure.record(RankError(STORE_IS_GONE))

    def _wait_for_others(self) -> None:
        """Return when all ranks know how this ends, or those that live must have looked."""
        num_knowing, deadline = self._store.add(_NUM_KNOWING, 1), time.monotonic() + 2 * self._interval_s
        while num_knowing < self._size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_knowing = self._store.add(_NUM_KNOWING, 0)

    def _tell(self, error: BaseException) -> str:
        """Put the error where the others find it. Returns the one that was there first."""
        said = str(error.args[0]) if isinstance(error, OffloadError) and error.args else str(error)
        if not isinstance(error, RankError):
            said = f"rank {self._rank}: {type(error).__name__}" + (f": {said}" if said else "")
        first: bytes = self._store.compare_set(_FIRST, "", said)
        return first.decode()

    def _look(self) -> None:
        """See whether an error is there, and who has been silent for too long."""
        if self._store.check([_FIRST]):
            self.failure.record(RankError(self._store.get(_FIRST).decode()))
            return
        now = time.monotonic()
        if now - self._looked_at > self._timeout_s / 2:  # this process was stopped, and others may have been with it
            self._heard.clear()
        self._looked_at = now
        patience_s = self._timeout_s if self._lost is None else min(self._timeout_s, 5 * self._interval_s)
        for rank in (each % self._size for each in self._watched()):
            count = self._store.add(str(rank), 0)
            before, since = self._heard.get(rank, (-1, now))
            if count != before or self._signs.has_answered(rank):
                self._heard[rank] = count, now
            elif count and now - since > patience_s / 2:
                self._signs.ask(rank)
            _, since = self._heard[rank]
            if count and now - since > patience_s:  # one that has not come yet counts to 0
                self._end_all(f"rank {rank} is gone, or hangs: nothing was heard of it for {now - since:.1f} s")
                return
        if self._lost is not None and now - self._lost_at > patience_s + 2 * self._interval_s:
            self._end_all(f"a collective has failed, and no rank is gone: {str(self._lost).partition(chr(10))[0]}")

    # Ranks that wait.

    def _call_and_answer(self) -> None:
        """Call the others if this rank has waited for long; if one has called, give it what it waits for, and say where
        this rank is."""
        attached = self._attached() or Waiting()
        waited_s = attached.waited_s()
        if waited_s > self._timeout_s / 2 or (waited_s > _CALL_S and attached.can_be_given()):
            self._store.add(_CALLS, 1 + _WANTS * attached.can_be_given())
        num_wants, num_calls = divmod(self._store.add(_CALLS, 0), _WANTS)
        if num_wants != self._num_wants:
            self._num_wants = num_wants
            attached.give()
        if num_calls != self._num_calls:
            self._num_calls = num_calls
            place = attached.place()
            self._store.set(f"place of {self._rank}", f"{num_calls} {place.stuck_s} {place.name}")
        if waited_s > self._timeout_s:
            self._tell_who_waits(waited_s)
        self._has_told &= waited_s > self._timeout_s

    def _tell_who_waits(self, waited_s: float) -> None:
        """End all ranks if none of them can go on by itself; else say once whom this one waits for."""
        names = [f"place of {rank}" for rank in range(self._size)]
        told = [self._store.get(name).decode().split(" ", 2) if self._store.check([name]) else None for name in names]
        oldest = self._num_calls - 2 * self._size  # each that waits calls at each beat
        known = {
            rank: (float(place[1]), place[2])
            for rank, place in enumerate(told)
            if place is not None and int(place[0]) >= oldest
        }
        where = ", ".join(f"rank {rank} at {name}" for rank, (_, name) in known.items())
        if len(known) == self._size and all(stuck_s > self._timeout_s / 4 for stuck_s, _ in known.values()):
            self._end_all(
                f"the ranks wait for each other: {where}. One of these is a call of all ranks together, to which the "
                "others have not come: an `if rank == 0:` around it ends so (docs/ranks.md)."
            )
        elif not self._has_told:
            self._has_told = True
            _log.warning("rank %d has waited for %.0f s for the others: %s", self._rank, waited_s, where)

    def _watched(self) -> range:
        """The rank after this one, so that the nearest one before it that lives sees a rank go. All, while it is asked
        who is gone."""
        num = 1 if self._lost is None else self._size - 1
        return range(self._rank + 1, self._rank + 1 + num)

    def _end_all(self, why: str) -> None:
        """End all ranks with this error, or the one that another rank was first with."""
        self.failure.record(RankError(self._tell(RankError(why))))


class NoHeartbeat(Heartbeat):
    """The heartbeat of a world of one: nobody listens, and nobody can be gone."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure

    def attach(self, waiting: Waiting) -> None:
        pass

    def check(self) -> None:
        self.failure.check()

    def wait_for(self, work: Any) -> None:
        work.wait()

    def is_quiet(self) -> bool:
        return True

    def wait_for_call(self, call: Callable[[], T], what: str) -> T:
        return call()

    def leave(self, error: BaseException | None) -> None:
        pass
