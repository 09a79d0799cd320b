"""Telling Python code that a request is over, without the I/O threads ever needing the interpreter."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._core import Channel

if TYPE_CHECKING:
    from ._aio import Ticket as CoreTicket

_log = logging.getLogger(__name__)


class Notifier:
    """A channel of the core, and what to call for each token that comes out of it."""

    def __init__(self) -> None:
        self._channel = Channel()
        self._calls: dict[int, Callable[[], object]] = {}
        self._tokens = itertools.count(1)

    @property
    def fd(self) -> int:
        """Readable while there is something to :meth:`deliver`."""
        return self._channel.fd

    def call_when_done(self, ticket: CoreTicket, call: Callable[[], object]) -> None:
        """Have ``call`` made by whoever delivers; at once, by this thread, if the request is over already."""
        token = next(self._tokens)
        self._calls[token] = call
        if not ticket.watch(self._channel, token):
            del self._calls[token]
            call()

    def deliver(self) -> None:
        """Make the calls that are due. Never waits."""
        for token in self._channel.drain():
            call = self._calls.pop(token)
            try:
                call()
            except Exception:
                _log.exception("a done-callback of a ticket raised")


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Notifier] = weakref.WeakKeyDictionary()
_threaded: Notifier | None = None
_lock = threading.Lock()


def notifier_of_loop(loop: asyncio.AbstractEventLoop) -> Notifier:
    """The notifier whose calls are made by ``loop``, which watches its descriptor. To be called in that loop."""
    notifier = _loops.get(loop)
    if notifier is None:
        notifier = _loops[loop] = Notifier()
        loop.add_reader(notifier.fd, notifier.deliver)
    return notifier


def notifier_of_thread() -> Notifier:
    """The notifier whose calls are made by one daemon thread of this process."""
    global _threaded
    with _lock:
        if _threaded is None:
            _threaded = Notifier()
            threading.Thread(target=_deliver_forever, args=(_threaded,), name="aio-callbacks", daemon=True).start()
        return _threaded


def _deliver_forever(notifier: Notifier) -> None:
    while True:
        select.select([notifier.fd], [], [])
        notifier.deliver()


def _forget() -> None:
    """In a forked child: the thread is gone and the descriptors are closed, so both are made anew when needed."""
    global _threaded, _lock
    _threaded, _lock = None, threading.Lock()
    _loops.clear()


os.register_at_fork(after_in_child=_forget)
