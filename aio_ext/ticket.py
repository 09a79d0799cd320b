"""The promise of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from .errors import QueueError
from .notify import notifier_of_loop, notifier_of_thread

if TYPE_CHECKING:
    from ._aio import Ticket as CoreTicket


class Ticket:
    """Done, failed with a :class:`QueueError`, or still in flight.

    Wait for it with :meth:`wait`, ``await`` it in asyncio, poll :meth:`done` or ask to be called. Dropping a ticket
    cancels nothing: the request runs on, and its memory stays in use until it is over.
    """

    __slots__ = ("__weakref__", "_core", "_file", "_nbytes", "_offset", "_operation")

    def __init__(self, core: CoreTicket, operation: str, file: str, offset: int, nbytes: int) -> None:
        self._core = core
        self._operation = operation
        self._file = file
        self._offset = offset
        self._nbytes = nbytes

    def done(self) -> bool:
        """True once the request is over, well or not."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the request has succeeded. Lets other threads run, and Ctrl-C through.

        Raises: :class:`QueueError` if it failed; ``TimeoutError`` after ``timeout`` seconds (None: no limit), with the
                request still in flight and its memory still in use.
        """
        if not self._core.wait(timeout):
            raise TimeoutError(f"{self._operation} of {self._file} at {self._offset}: not over after {timeout} s")
        error = self.error
        if error is not None:
            raise error

    @property
    def bytes_done(self) -> int:
        """Bytes transferred so far, in any order."""
        return self._core.bytes_done

    @property
    def error(self) -> QueueError | None:
        """Error by which the request failed; None while it is in flight and after it succeeded."""
        number = self._core.error
        if number == 0:
            return None
        core = self._core
        return QueueError(
            number, self._operation, self._file, self._offset, self._nbytes, core.bytes_done, core.error_offset
        )

    def add_done_callback(self, call: Callable[[Ticket], object]) -> None:
        """Have ``call(ticket)`` made by a thread of the package once the request is over. It should not wait: one
        thread makes all such calls, in order. What it raises is logged."""
        notifier_of_thread().call_when_done(self._core, lambda: call(self))

    def __await__(self) -> Generator[object, None, None]:
        """Wait in asyncio; the loop watches an eventfd. Raises :class:`QueueError` if the request failed."""
        if not self.done():
            loop = asyncio.get_running_loop()
            over: asyncio.Future[None] = loop.create_future()

            def tell() -> None:
                if not over.done():
                    over.set_result(None)

            notifier_of_loop(loop).call_when_done(self._core, tell)
            yield from over
        error = self.error
        if error is not None:
            raise error

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "done" if self._core.error == 0 else "failed"
        return f"<Ticket {self._operation} {self._file} [{self._offset}, {self._offset + self._nbytes}) {state}>"
