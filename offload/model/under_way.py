"""Tells the micro-batches that are under way together what one of them does beside running the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class UnderWay(Protocol):
    """Micro-batches of which this thread is one: see ``offload.model.interleave``."""

    def touched(self, what: str) -> None:
        """Raises ``OffloadError`` if others have come too far."""


class _OfThread(threading.local):
    under_way: UnderWay | None = None


_thread = _OfThread()


@contextmanager
def in_thread(under_way: UnderWay) -> Iterator[None]:
    """This thread is one of these micro-batches within."""
    _thread.under_way = under_way
    try:
        yield
    finally:
        _thread.under_way = None


def touch(what: str) -> None:
    """The program does ``what`` outside of the model's forward and backward, where the order of a loop matters."""
    if _thread.under_way is not None:
        _thread.under_way.touched(what)
