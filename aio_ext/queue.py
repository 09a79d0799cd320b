"""The file queue."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from typing import TYPE_CHECKING, cast

from ._core import NATIVE, core
from .notify import notifier_of_thread
from .statistics import DirectionStatistics, Statistics
from .ticket import Ticket

if TYPE_CHECKING:
    from ._aio import FaultPlan
    from ._aio import Queue as CoreQueue
    from ._aio import Ticket as CoreTicket

DEPTH = 16
"""Blocks in flight unless something else is asked for. With blocks of 1 MiB a drive moves as much as it can, and an
urgent read has no more before it than what is in flight: twice as many only make it wait twice as long."""

_CLOSE_SECONDS = 30.0
"""Seconds that a queue that was dropped, or the end of the program, waits for I/O in flight."""


class Queue:
    """Reads and writes of any size on several files at once, in blocks, at a constant depth.

    Requests are cut into blocks of ``block_bytes``; up to ``depth`` of them are in flight across all requests, which
    start in order of submission: urgent ones first, reads and writes in turn. Every method may be called from any
    thread. One queue serves one device well; for several devices make several queues.

    backend:     ``"io_uring"``, ``"threads"`` (``num_threads`` times pread and pwrite), ``"portable"`` (Python
                 alone; docs/io.md lists what it does differently) or ``"auto"``: the first of these that works here;
                 :attr:`notes` tells what did not.
    depth:       blocks in flight, 1 to 4096; the thread backend has no more than it has threads.
    block_bytes: a multiple of 4096.
    Raises:      ``ValueError`` for a bad argument, ``OSError`` when the backend asked for does not work here; its text
                 says why, and the fix.
    """

    _plan: FaultPlan | None = None
    """Faults that tests inject."""

    def __init__(
        self, backend: str = "auto", depth: int = DEPTH, block_bytes: int = 1 << 20, num_threads: int = 4
    ) -> None:
        notifier_of_thread()  # since Python 3.12 no thread begins at a program's end, which may be the first to need it
        self._core = _make_core(backend, depth, block_bytes, num_threads, self._plan)
        self._names: dict[int, str] = {}
        self._finalizer = weakref.finalize(self, _close_dropped, self._core)

    @property
    def backend(self) -> str:
        """``"io_uring"``, ``"threads"`` or ``"portable"``."""
        return self._core.backend

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was dropped because it does not work here: a sentence each, with the reason and the fix."""
        return tuple(self._core.notes)

    def register_memory(self, address: int, nbytes: int) -> None:
        """Spare the kernel the look-up of these pages at each block. Optional: if it cannot be done there is a note.

        Effects: gives every page its memory. Only memory of a :class:`Memory` is registered: the queue keeps it alive
                 until it is closed.
        """
        self._core.register_memory(address, nbytes)

    def register_file(self, fd: int) -> int:
        """The number under which ``read``, ``write`` and ``sync`` know this file.

        Effects: duplicates the descriptor, so the caller may close its own; the file stays open, and locked if it is,
                 until :meth:`unregister_file` or :meth:`close`.
        Raises:  ``OSError`` for a bad descriptor, ``ValueError`` if it is opened O_DIRECT and ``block_bytes`` is no
                 multiple of what that needs.
        """
        file = self._core.register_file(fd)
        try:
            self._names[file] = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - not a path of this file system
        except OSError:
            self._names[file] = f"file {file}"
        return file

    def unregister_file(self, file: int) -> None:
        """Close the queue's own descriptor. Raises ``OSError`` (``EBUSY``) while requests on the file are not over."""
        self._core.unregister_file(file)

    def read(self, file: int, offset: int, address: int, nbytes: int, urgent: bool = False) -> Ticket:
        """Start reading ``nbytes`` at ``offset`` of ``file`` into memory at ``address``.

        The memory must stay valid until the ticket is done; that of a :class:`Memory` does by itself. Urgent requests
        overtake others block by block. Waits only while 16384 requests are not over. No order is kept between requests
        that overlap: wait for one before starting the other.
        Raises: ``ValueError`` for an unknown file or bad alignment, ``OSError`` (``ESHUTDOWN``) after :meth:`close`;
                the portable backend ``TimeoutError`` when there is no room for 30 seconds.
        """
        return self._ticket(self._core.read(file, offset, address, nbytes, urgent), "read", file, offset, nbytes)

    def write(self, file: int, offset: int, address: int, nbytes: int, urgent: bool = False) -> Ticket:
        """Start writing ``nbytes`` from memory at ``address`` to ``file`` at ``offset``. As :meth:`read`."""
        return self._ticket(self._core.write(file, offset, address, nbytes, urgent), "write", file, offset, nbytes)

    def sync(self, file: int) -> Ticket:
        """Make durable (fdatasync) what was written to ``file``: starts when all writes submitted before are over.

        A failed write does not fail it: look at the tickets of the writes, too. A failed sync is never repeated, and
        nothing can be said about what was written since the last good one.
        """
        return self._ticket(self._core.sync(file), "sync", file, 0, 0)

    def statistics(self) -> Statistics:
        """Statistics of the queue since it was made."""
        counters = self._core.counters()
        read = DirectionStatistics(**counters.pop("read"))
        write = DirectionStatistics(**counters.pop("write"))
        return Statistics(read=read, write=write, **counters)

    def cancel(self) -> None:
        """Fail what has not begun with ``ECANCELED`` and accept no more requests. For the way out after an error:
        returns at once, and :meth:`close` then waits for no more than the blocks in flight."""
        self._core.cancel()

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Accept no more requests and wait until all are over; then end the threads and close the files.

        Raises: ``TimeoutError`` after ``timeout`` seconds. Requests that had not begun have then failed with
                ``ECANCELED``; what is in flight keeps its memory, mapped and parked, as long as the kernel may use it.
                After this, or Ctrl-C, no more requests are accepted; called again, it waits again.
        """
        closed = self._core.close(timeout)
        self._finalizer.detach()  # not before: Ctrl-C may have ended the wait
        if not closed:
            count = self._core.blocks_in_flight
            raise TimeoutError(f"{count} blocks still in flight after {timeout} s; their memory stays parked")

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ticket(self, core: CoreTicket, operation: str, file: int, offset: int, nbytes: int) -> Ticket:
        return Ticket(core, operation, self._names.get(file, f"file {file}"), offset, nbytes)


def _close_dropped(core: CoreQueue) -> None:
    """Runs when a queue is collected, or at the end of the program."""
    if not core.close(_CLOSE_SECONDS):
        print(f"aio_ext: {core.blocks_in_flight} blocks still in flight; their memory stays parked", file=sys.stderr)


def _make_core(backend: str, depth: int, block_bytes: int, num_threads: int, plan: FaultPlan | None) -> CoreQueue:
    if depth < 1 or block_bytes < 1 or num_threads < 1:
        raise ValueError(f"depth, block_bytes and num_threads must be >= 1, got {depth}, {block_bytes}, {num_threads}")
    if backend == "portable" or (backend == "auto" and not NATIVE):
        from .portable import Queue as PortableQueue

        return cast("CoreQueue", PortableQueue(depth, block_bytes, num_threads, plan))
    if not NATIVE:
        if backend not in ("io_uring", "threads"):
            raise ValueError(f"there is no backend {backend!r}")
        raise OSError(errno.ENOSYS, core.uring_obstacle())
    from ._aio import Queue as NativeQueue

    return NativeQueue(backend, depth, block_bytes, num_threads, plan)


def available_backends() -> tuple[str, ...]:
    """The backends that work here, best first."""
    missing = unavailable_backends()
    return tuple(name for name in ("io_uring", "threads", "portable") if name not in missing)


def unavailable_backends() -> dict[str, str]:
    """Reasons why each of the other backends does not work here, and the fixes."""
    obstacle = core.uring_obstacle()
    if not obstacle:
        return {}
    return {"io_uring": obstacle} if NATIVE else {"io_uring": obstacle, "threads": obstacle}
