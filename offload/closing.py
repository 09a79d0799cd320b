"""Undoing at the end of an engine: by ``close``, by the end of the program, or after it was collected."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import warnings
import weakref
from _thread import start_new_thread
from collections.abc import Callable

_log = logging.getLogger("offload")
_open: weakref.WeakSet[Closers] = weakref.WeakSet()
_numbers = itertools.count()


class Closers:
    """Calls that are made once, the last one first.

    An object that is collected with calls left to make hands them to a thread of their own: the collector runs in any
    thread, between any two instructions, and must not wait there for disks and threads.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._is_open = True
        self.number = next(_numbers)
        _open.add(self)

    def callback(self, call: Callable[[], object]) -> None:
        """Have ``call`` made at the end, before the calls that were added earlier. It may be made twice: after an
        interrupt."""
        self._calls.append(call)

    def close(self) -> None:
        """Make the calls. All are made, also when some raise; the last error is raised. Safe to call twice.

        An interrupt, such as Ctrl-C, leaves the rest for the next ``close``, which the program's end makes: what
        comes later gives memory back that a call which did not come to its end still needs.
        """
        try:
            _make(self._calls)
        finally:
            self._is_open = bool(self._calls)

    def __del__(self) -> None:
        if self._is_open:
            warnings.warn("an OffloadEngine was dropped without close()", ResourceWarning, stacklevel=2)
            with contextlib.suppress(RuntimeError):  # the program ends
                start_new_thread(_close, (self._calls,))  # no lock is taken here, unlike in threading.Thread


def _make(calls: list[Callable[[], object]]) -> None:
    """Make the calls, the last one first. Each leaves the list when it is over."""
    failure: Exception | None = None
    while calls:
        try:
            calls[-1]()
        except Exception as error:
            error.__context__ = failure
            failure = error
        calls.pop()
    if failure is not None:
        raise failure


def _close(calls: list[Callable[[], object]]) -> None:
    try:
        _make(calls)
    except Exception:
        _log.exception("an engine that was dropped could not be closed")


def _close_all() -> None:
    for closers in sorted(_open, key=lambda each: each.number, reverse=True):  # ranks close together: in one order
        closers._is_open = False
        _close(closers._calls)


def _forget_in_child() -> None:
    """Forget what was opened, which belongs to the parent: a process that was forked from it closes nothing."""
    for closers in list(_open):
        closers._is_open = False
        closers._calls.clear()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)
