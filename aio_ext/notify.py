"""Telling Python code that a request is over, without the I/O threads ever needing the interpreter."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import select
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._core import core

if TYPE_CHECKING:
    from ._aio import Ticket as CoreTicket

_log = logging.getLogger(__name__)


class Notifier:
    """A channel of the core, and what to call for each token that comes out of it."""

    def __init__(self) -> None:
        self._channel = core.Channel()
        self._calls: dict[int, Callable[[], object]] = {}
        self._tokens = itertools.count(1)

    @property
    def fd(self) -> int:
        """Readable while there is something to :meth:`deliver`."""
        return self._channel.fd

    def call_when_done(self, ticket: CoreTicket, call: Callable[[], object]) -> None:
        """Have ``call`` made by the thread that delivers, once the request is over."""
        token = self._expect(call)
        if not ticket.watch(self._channel, token):
            self._channel.post(token)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have ``call`` made by the thread that delivers, after those that are due already."""
        self._channel.post(self._expect(call))

    def _expect(self, call: Callable[[], object]) -> int:
        token = next(self._tokens)
        self._calls[token] = call
        return token

    def deliver(self) -> None:
        """Make the calls that are due. Never waits."""
        for token in self._channel.drain():
            call = self._calls.pop(token)
            try:
                call()
            except (Exception, SystemExit):  # the calls after it are made all the same
                _log.exception("a done-callback of a ticket raised")


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Notifier] = weakref.WeakKeyDictionary()
_of_thread: dict[int, Notifier] = {}
"""The one of this process, by its number."""


def notifier_of_loop(loop: asyncio.AbstractEventLoop) -> Notifier:
    """The notifier whose calls are made by ``loop``, which watches its descriptor. To be called in that loop."""
    notifier = _loops.get(loop)
    if notifier is None:
        notifier = _loops[loop] = Notifier()
        loop.add_reader(notifier.fd, notifier.deliver)
    return notifier


def notifier_of_thread() -> Notifier:
    """The notifier whose calls are made by one daemon thread of this process."""
    notifier = _of_thread.get(os.getpid())
    if notifier is None:
        # Without a lock, and with a bare thread, see [Note: Ctrl-C strikes anywhere]. Of several threads that come here
        # at once, the first one sets the notifier for all; those of the others have nothing to do.
        candidate = Notifier()
        try:
            start_new_thread(_deliver_forever, (candidate,))
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None  # as the core says it of its own threads
        notifier = _of_thread.setdefault(os.getpid(), candidate)
    return notifier


def _deliver_forever(notifier: Notifier) -> None:
    while True:
        select.select([notifier.fd], [], [])
        notifier.deliver()


def _forget() -> None:
    """In a forked child: threads are gone and descriptors are closed, so notifiers are made anew when needed."""
    _of_thread.clear()
    _loops.clear()


os.register_at_fork(after_in_child=_forget)
