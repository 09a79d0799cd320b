"""Waiting for what another thread does, in a way that Ctrl-C cannot break.

[Note: Ctrl-C strikes anywhere]
``KeyboardInterrupt`` is raised in the main thread between any two of its instructions, those inside
``threading.Condition`` and ``Event`` included. A lock that was taken there is never given back, and a count that was
raised there is never lowered: a thread that needs it waits for ever. So a thread of the program holds no lock and keeps
no count that a thread of ours depends on. What it wants done it hands over with one ``append`` to a list, the thread
that owns the state does it, and the caller sleeps on a lock of its own, which no other thread takes.
"""

from __future__ import annotations

import time
from _thread import RLock, allocate_lock, get_ident
from collections.abc import Callable
from contextlib import suppress

_SLICE_SECONDS = 0.1
"""A sleep goes in slices, so that Ctrl-C is noticed even by a thread that the signal does not wake."""


class Latch:
    """Something that happens once. Any number of threads sleep until then, and calls can be left that are made then."""

    __slots__ = ("_calls", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._calls: list[Callable[[], object]] = []
        """A list: a deque takes ten times as much memory, and there is one for each transfer that somebody knows."""

    def is_set(self) -> bool:
        """True from the moment on at which it happened."""
        return self._is_set

    def set(self) -> None:
        """Make it happen: wakes the sleeping threads and makes the calls left here, in order. They must not raise."""
        self._is_set = True
        while True:
            try:
                call = self._calls.pop(0)
            except IndexError:
                return
            call()

    def call_when_set(self, call: Callable[[], object]) -> bool:
        """Have ``call`` made by the thread that sets this. False: that has happened, and the call will not be made."""
        self._calls.append(call)
        if not self._is_set:
            return True
        try:
            self._calls.remove(call)
        except ValueError:
            return True  # set() found it after all
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until it happens, for ``timeout`` seconds at most (None: no limit). True: it has happened."""
        if self._is_set or timeout == 0:
            return self._is_set
        # Guards no data: held from here on, and released by set(), it is what this one thread sleeps on.
        alarm = allocate_lock()
        alarm.acquire()
        self._calls.append(alarm.release)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
            if left <= 0:
                with suppress(ValueError):  # set() took it
                    self._calls.remove(alarm.release)
                break
            if alarm.acquire(timeout=left):
                break
        return self._is_set


class Lock(RLock):  # type: ignore[misc]  # final in the stubs alone
    """A lock for ``with``. It is the interpreter's own: no line of Python stands between its being taken and the block
    that gives it back, where Ctrl-C would leave it taken for ever (https://bugs.python.org/issue29988)."""

    _is_held = property(RLock._is_owned)  # type: ignore[attr-defined]
    """The calling thread has it. To look at this is no call, after which CPython would handle signals."""

    def free_during(self, wait: Callable[[], object]) -> None:
        """Make the blocking call ``wait`` without the lock, which is held once; what it guards may have changed
        afterwards."""
        held_once = 1, get_ident()
        try:
            self.release()
            wait()
        finally:
            if not self._is_held:  # Ctrl-C may have come before the release
                self._acquire_restore(held_once)  # type: ignore[attr-defined]  # which no signal ends, as it does acquire
