"""Waiting for other threads: every wait has a deadline, and the first fatal error ends all of them.

[Note: Where a fault goes] A read, or any transfer, that fails twice (``swapper/ticket.py``) raises where its ticket is
waited for. On the thread that computes, in forward or backward, that is ``WeightCache._wait_for_fetch``: ``take``
releases the pin, ``Uses.begin`` ends the use, and ``Passes.begin_use`` keeps the error by ``Failure.raise_first`` and
raises it. Other calls on that thread stand in ``with failure:``, which does the same. A thread of the engine's own
calls ``Failure.record`` and ends what it does (``Updater._guarded``, ``HostSource._start``, ``Finisher``,
``GradientTransport``, ``Committer.begin_commit``). Who waits meanwhile looks ten times a second
(``Monitor.wait_until``), or is woken (``when_known``, the ends of jobs and copies), and raises the first error; so does
each later call of the engine, by ``Failure.check``. What the error says of the bytes is ``OffloadError.survives``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import NoReturn

from aio_ext.latch import Latch, Lock
from offload.errors import ConfigError, RankError, WaitTimeout, cannot_run_alone
from offload.interrupts import held_back
from swapper import OffloadError, StorageError

WAIT_TIMEOUT_S = 600.0
"""No wait for another thread may take longer: something has died that did not say so."""

FATAL = (StorageError, WaitTimeout, RankError)
"""A fault of a disk, of another thread or of another rank, wherever it is met, ends the engine."""

_BEGIN_S = 60.0
"""A thread that has not begun by then never will."""

_SLICE_S = 0.1
"""A wait looks this often whether something has failed meanwhile."""


class Failure:
    """Holds the first fatal error of any thread; every later call of the engine raises it.

    ``with failure:`` is for code that waits for disks and threads on the training thread: a fault there is fatal. It is
    entered several times for each unit and step, so it is no generator.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards both below. Innermost: nothing else is taken while it is held."""
        self.first: BaseException | None = None
        """The first error, if there was one."""
        self._listeners: list[Callable[[], object]] = []
        _failures.add(self)

    def record(self, error: BaseException) -> BaseException:
        """Keep ``error`` unless there was one before it; returns the one that is kept."""
        with self._lock:
            first = self.first or error
            listeners = self._listeners if self.first is None else []
            self.first = first
        for listener in listeners:
            listener()
        return first

    def when_known(self, listener: Callable[[], object]) -> None:
        """Have ``listener`` called once, in any thread, when there is a first error: at once if there was one."""
        with self._lock:
            self._listeners = [*self._listeners, listener]
            is_known = self.first is not None
        if is_known:
            listener()

    @property
    def is_known(self) -> bool:
        """There was an error."""
        return self.first is not None

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.first is not None:
            raise self.first

    def raise_first(self, error: BaseException) -> NoReturn:
        """Keep ``error`` unless there was one before it, and raise the first."""
        raise self.record(error)

    def __enter__(self) -> None:
        self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, FATAL):
            self.raise_first(error)


_failures: weakref.WeakSet[Failure] = weakref.WeakSet()


def _fail_in_child() -> None:
    """A process that was forked has the engine's memory, and none of its threads: its first call must not wait."""
    for failure in list(_failures):
        failure._lock = threading.Lock()  # another thread may have held it
        failure._listeners = []
        failure.first = OffloadError(
            "the engine belongs to the process that made it, and this one was forked from it: use the model there, or "
            "start this process without it (DataLoader workers need the data alone)"
        )


os.register_at_fork(after_in_child=_fail_in_child)


class _OfThread(threading.local):
    stepping = ""
    """Name of the optimizer whose own step this thread runs, over one parameter; empty if it runs none."""
    updates = False
    """It hands over a step's updates, or makes them: others wait for it."""


of_thread = _OfThread()


@contextlib.contextmanager
def within_step_of(optimizer: str) -> Iterator[None]:
    """Run the step of a user's optimizer over one parameter: it may not look at others of the model, whose updates may
    wait for it (``refuse_within_step``)."""
    before, of_thread.stepping = of_thread.stepping, optimizer
    try:
        yield
    finally:
        of_thread.stepping = before


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
    """Updates that are awaited are not yet with the thread that makes them: this one may not wait for them
    (``refuse_finalizer``)."""
    of_thread.updates = True
    try:
        yield
    finally:
        of_thread.updates = False


def make_updates() -> None:
    """This thread makes the updates from now on (``refuse_finalizer``)."""
    of_thread.updates = True


def refuse_within_step() -> None:
    """Raise ``ConfigError`` if this thread takes the step of a user's optimizer."""
    if of_thread.stepping:
        why = "its step looks at a parameter of the model beside the one that it is given"
        raise ConfigError(cannot_run_alone(of_thread.stepping, why))


def refuse_finalizer(lock: Lock | None = None) -> None:
    """Raise ``OffloadError`` if this thread has updates to hand over or to make, or has ``lock``. Python runs
    finalizers and tracers in whatever thread they concern: one that looks at a weight there would wait for itself."""
    if of_thread.updates or (lock is not None and lock._is_held):
        raise OffloadError(
            "a finalizer (__del__, a callback of gc or weakref) or a tracer has asked for a weight, a gradient or a "
            "state in the middle of the engine's own work on them: have it put that on a queue for the training loop"
        )


class Monitor(Lock):  # type: ignore[misc]  # as before
    """A lock that guards the state of one room, and the wait for a change of that state.

    Each owner says beside its monitor what it guards, and its place in the order of locks. The order, outermost first:
    speculative updates (``update.speculative``), weights on a device or gathered, weights in host memory
    (``tiers.weights.cache``), gradients (``tiers.gradients``), the store, ``Failure``. docs/design.md lists all locks.
    No thread waits for I/O while it holds one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self._failure = failure
        self._next_change: Latch | None = None
        """What threads wait for; None: no thread waits."""

    def wait(self, timeout_s: float) -> None:
        """Block until the next ``notify_all``, for so long at most; the lock, which is held once, is free meanwhile."""
        change = self._next_change = self._next_change or Latch()
        self.free_during(partial(change.wait, timeout_s))

    def notify_all(self) -> None:
        """The state has changed. The lock must be held."""
        change, self._next_change = self._next_change, None
        if change is not None:
            change.set()

    def wait_until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Block until ``condition``; the lock, which is held once, is free meanwhile.

        Raises the first fatal error, and ``WaitTimeout`` with ``what`` was waited for.
        """
        deadline = Deadline(what)
        while not condition():
            self._failure.check()
            deadline.check()
            self.wait(_SLICE_S)


class Deadline:
    """The moment after which a wait for ``what`` is an error."""

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what
        self._at = time.monotonic() + WAIT_TIMEOUT_S

    def check(self) -> None:
        """Raise ``WaitTimeout`` once the moment has passed."""
        if time.monotonic() > self._at:
            raise timed_out(self._what())


def timed_out(what: str) -> WaitTimeout:
    """The error of a wait for ``what`` that has reached its deadline."""
    return WaitTimeout(f"{what}: not over after {WAIT_TIMEOUT_S:g} s.")


class DaemonThread(threading.Thread):
    """A daemon whose ``start`` ends. A thread that finds no memory to begin with ends without a word, and CPython waits
    for its sign for ever. Here ``start`` raises ``RuntimeError`` then, as where the system gives no thread; the call is
    not made if it begins after all."""

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(target=call, name=name, daemon=True)
        self._turn = [True]
        """Who takes it decides whether the call is made: the thread, or who has waited for long enough."""
        self._started = _Sign(self._take_turn)

    def run(self) -> None:
        """On the thread."""
        if self._take_turn():
            super().run()

    def _take_turn(self) -> bool:
        try:
            return self._turn.pop()
        except IndexError:
            return False


class _Sign(threading.Event):
    """What ``Thread.start`` waits for."""

    def __init__(self, give_up: Callable[[], bool]) -> None:
        super().__init__()
        self._give_up = give_up

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_BEGIN_S if timeout is None else timeout) and self._give_up():
            raise RuntimeError("can't start new thread")
        return True


class Job:
    """One call that a ``Worker`` makes."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._over = Latch()

    def run(self, *, cancelled: bool = False) -> None:
        """Make the call. Calls take care of their errors: one that raises ends its worker."""
        call, self._call = self._call, None
        try:
            if call is not None and not cancelled:
                call()
        finally:
            self._over.set()

    def wait(self, what: Callable[[], str]) -> None:
        """Block until the call was made, or will not be made. Raises ``WaitTimeout``."""
        if not self._over.wait(WAIT_TIMEOUT_S):
            raise timed_out(what())


class Worker:
    """A background thread that makes calls one after the other.

    It is a daemon: the program may end without it. While it has nothing to do it refers to nothing of its owner, so an
    engine without other references can be collected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = Latch()
        self._stopping = False

    def submit(self, call: Callable[[], None]) -> Job:
        """Have ``call`` made after those before it. After ``stop`` it is not made. Raises ``OffloadError`` where no
        thread begins: the system gives none, or the program ends (Python 3.12)."""
        job = Job(call)
        if self._stopping:
            job.run(cancelled=True)
            return job
        if self._thread is None:
            with held_back():
                self._has_ended = Latch()
                thread = DaemonThread(self._work, self._name)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OffloadError(
                        f"thread {self._name}: {error}",
                        advice="If the program does not end, raise a limit of this process (ulimit -u, ulimit -v).",
                    ) from error
                self._thread = thread  # that has begun: its end is waited for
        self._jobs.put(job)
        return job

    def stop(self) -> None:
        """Wait for the call at hand; those after it are not made. Raises ``WaitTimeout`` if it does not end."""
        self._end(cancel=True)

    def finish(self) -> None:
        """Wait until all calls are made. Raises ``WaitTimeout`` if they do not end."""
        self._end(cancel=False)

    def _end(self, *, cancel: bool) -> None:
        self._stopping = self._stopping or cancel
        thread = self._thread
        if thread is None:
            return
        self._jobs.put(None)
        if thread is threading.current_thread():
            return
        # An interrupted ``Thread.join`` may take a thread for ended that runs (Python 3.11).
        if not self._has_ended.wait(WAIT_TIMEOUT_S):
            raise timed_out(f"the end of thread {self._name}")
        self._thread = None

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job.run(cancelled=self._stopping)
                del job  # what it refers to may be collected while nothing is to do
        finally:
            self._has_ended.set()
