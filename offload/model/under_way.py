"""Tells those who run a forward in another order than the program's, or once more, what it does beside computing: the
micro-batches that are under way together, and the first run of a forward that a backward runs again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class UnderWay(Protocol):
    """Micro-batches of which this thread is one: see ``offload.model.interleave``."""

    def touched(self, what: str) -> None:
        """Raises ``OffloadError`` if others have come too far."""


class _OfThread(threading.local):
    under_way: UnderWay | None = None
    changed: Callable[[str], None] | None = None


_thread = _OfThread()


@contextmanager
def in_thread(under_way: UnderWay) -> Iterator[None]:
    """This thread is one of these micro-batches within."""
    _thread.under_way = under_way
    try:
        yield
    finally:
        _thread.under_way = None


@contextmanager
def in_first_run(changed: Callable[[str], None]) -> Iterator[None]:
    """A forward runs within, and will run again. ``changed`` is told what it changes that is not its unit's."""
    before, _thread.changed = _thread.changed, changed
    try:
        yield
    finally:
        _thread.changed = before


def touch(what: str) -> None:
    """The program does ``what`` outside of the model's forward and backward, where the order of a loop matters."""
    if _thread.under_way is not None:
        _thread.under_way.touched(what)


def tell_first_run(what: str) -> None:
    """The program does ``what``, which is not to be done twice."""
    if _thread.changed is not None:
        _thread.changed(what)


def change(what: str) -> None:
    """Both of it."""
    tell_first_run(what)
    touch(what)
