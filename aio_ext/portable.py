"""The queue in Python alone, on asyncio and aiofiles: the fall-back where the extension cannot be built.

One asyncio loop in a thread of its own has all state. Its tasks take requests from a priority queue and carry a block
of each; aiofiles makes the system calls in a pool of threads. Callers hand over what they want done, see [Note: Ctrl-C
strikes anywhere]. Names are those of the native core, under :class:`aio_ext.Queue`; docs/io.md lists the differences.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import itertools
import os
import time
import weakref
from _thread import start_new_thread
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, partialmethod
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from aiofiles.os import wrap

from ._core import NATIVE, core
from .latch import Latch

if TYPE_CHECKING:
    from ._aio import Channel, FaultPlan

_ATTEMPTS_MAX = 16
_REQUESTS_MAX = 16384
_WAIT_SECONDS = 30.0
"""Seconds that a caller waits for the loop's thread, or for room among the requests."""
_preadv, _pwritev, _fdatasync = wrap(os.preadv), wrap(os.pwritev), wrap(os.fdatasync)
_queues: weakref.WeakSet[Queue] = weakref.WeakSet()
_T = TypeVar("_T")


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise RuntimeError("this queue belongs to the process that made it: a forked child must make its own")


@dataclass(eq=False)
class _File:
    index: int
    fd: int
    memory_alignment: int
    offset_alignment: int


@dataclass(eq=False)
class Ticket:
    """A request and its outcome. Belongs to the loop's thread until it is over."""

    operation: str
    file: _File
    offset: int
    address: int
    nbytes: int
    urgent: bool
    lease: object
    """Keeps the memory mapped until the request is over."""
    earlier_writes: list[Ticket] = field(default_factory=list)
    """Writes that a sync waits for."""
    bytes_done: int = 0
    """From the front: one block is carried after the other."""
    failure: int = 0
    over: Latch = field(default_factory=Latch)
    pid: int = field(default_factory=os.getpid)

    def done(self) -> bool:
        return self.over.is_set()

    @property
    def error(self) -> int:
        return self.failure if self.done() else 0

    @property
    def error_offset(self) -> int:
        return self.offset + self.bytes_done

    def wait(self, timeout: float | None) -> bool:
        _check_process(self.pid)
        if timeout is not None and not timeout >= 0:
            raise ValueError("timeout must be >= 0 seconds")
        return self.over.wait(timeout)

    def watch(self, channel: Channel, token: int) -> bool:
        _check_process(self.pid)
        return self.over.call_when_set(partial(channel.post, token))


class _Pool(Executor):
    """Threads that make calls until ``None`` comes. The standard pool refuses calls as soon as the program begins to
    end, when a queue still has requests to finish."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def work(self) -> None:
        """Do the work of each of the threads."""
        while (item := self.calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # belongs to the task that awaits the future
                future.set_exception(error)
        self.calls.put(None)  # for the next thread


class Queue:
    """See :class:`aio_ext.Queue`. As many requests are carried at a time as there are threads, at most ``depth``."""

    backend = "portable"

    def __init__(self, depth: int, block_bytes: int, num_threads: int, plan: FaultPlan | None) -> None:
        if not (1 <= depth <= 4096 and 1 <= num_threads <= 256):
            raise ValueError("depth must be in [1, 4096], num_threads in [1, 256]")
        if block_bytes % 4096 or not 4096 <= block_bytes <= 1 << 30:
            raise ValueError("block_bytes must be a multiple of 4096 in [4096, 2^30]")
        self.notes = [] if NATIVE else ["the extension aio_ext._aio is not built: I/O goes through Python"]
        self.blocks_in_flight = 0
        self._block_bytes, self._depth, self._plan, self._pid = block_bytes, min(depth, num_threads), plan, os.getpid()
        self._inbox: deque[Callable[[], object]] = deque()
        self._closed = False
        self._ended = Latch()
        # From here on: the loop's thread's. Other threads only look.
        self._files: dict[int, _File] = {}
        self._live: set[Ticket] = set()
        self._line: asyncio.PriorityQueue[tuple[int, int, Ticket | None]] = asyncio.PriorityQueue()
        """Rank (0: urgent, 1: background, 2: the end of a task), number, and the request whose next block is due."""
        self._numbers = itertools.count()
        self._refusing = self._cancelled = False
        self._counts = Counter(syncs=0, failed_requests=0, retries=0, short_transfers=0, depth_max=0)
        self._moved = {kind: Counter(bytes=0, requests=0, operations=0) for kind in ("read", "write")}
        self._latency_max = {"read": 0.0, "write": 0.0}
        self._started, self._busy_seconds, self._carried_seconds = time.monotonic(), 0.0, 0.0
        self._busy_since = self._started
        self._loop, self._pool = asyncio.new_event_loop(), _Pool()
        try:
            for work in [self._pool.work] * self._depth + [self._run]:
                start_new_thread(work, ())
        except BaseException:  # no more threads, or Ctrl-C
            self._pool.calls.put(None)
            raise
        _queues.add(self)

    # --- callers: any thread ---

    def register_memory(self, address: int, nbytes: int) -> None:
        self._refuse()

    def register_file(self, fd: int) -> int:
        self._refuse()
        alignment = core.direct_io_alignment(fd) if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else (1, 1)
        if self._block_bytes % alignment[1]:
            raise ValueError(f"block_bytes must be a multiple of {alignment[1]} for this file")
        return self._call("registering a file", partial(self._add_file, fd, *alignment))

    def unregister_file(self, file: int) -> None:
        self._refuse()
        self._call("giving a file back", partial(self._remove_file, file))

    def counters(self) -> dict[str, Any]:
        _check_process(self._pid)
        return self._call("statistics", self._snapshot)

    def cancel(self) -> None:
        _check_process(self._pid)
        self._closed = True
        self._call("cancelling", self._cancel)

    def close(self, timeout: float) -> bool:
        if self._pid != os.getpid():
            return True
        if not timeout >= 0:
            raise ValueError("timeout must be >= 0 seconds")
        self._closed = True
        self._hand_over(self._end)
        if self._ended.wait(timeout):
            return True
        self._call("cancelling", self._cancel)
        return False

    def _submit(
        self, operation: str, index: int, offset: int = 0, address: int = 0, nbytes: int = 0, urgent: bool = False
    ) -> Ticket:
        self._refuse()
        file = self._file(index)
        if min(offset, nbytes) < 0 or offset + nbytes >= 1 << 63:
            raise ValueError("offset + nbytes overflows")
        if address == 0 and nbytes > 0:
            raise ValueError("address is null")
        if offset % file.offset_alignment or nbytes % file.offset_alignment or address % file.memory_alignment:
            raise ValueError(
                f"O_DIRECT on this file needs offset and nbytes in multiples of {file.offset_alignment} "
                f"and address of {file.memory_alignment}"
            )
        ticket = Ticket(operation, file, offset, address, nbytes, urgent, core.lease_containing(address, nbytes))
        if operation != "sync" and nbytes == 0:
            ticket.over.set()
            return ticket
        deadline = time.monotonic() + _WAIT_SECONDS
        while len(self._inbox) + len(self._live) >= _REQUESTS_MAX:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{operation} at {offset}: no room among {_REQUESTS_MAX} requests in {_WAIT_SECONDS} s"
                )
            time.sleep(0.001)
            self._refuse()
        self._hand_over(partial(self._accept, ticket))
        return ticket

    read = partialmethod(_submit, "read")
    write = partialmethod(_submit, "write")
    sync = partialmethod(_submit, "sync")

    def _file(self, index: int) -> _File:
        file = self._files.get(index)
        if file is None:
            raise ValueError(f"file {index} is not registered with this queue")
        return file

    def _refuse(self) -> None:
        _check_process(self._pid)
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the queue is closed")

    def _hand_over(self, call: Callable[[], object]) -> None:
        """Have the loop's thread make ``call``, after those handed over before. Once that has ended, make it here."""
        self._inbox.append(call)
        try:
            self._loop.call_soon_threadsafe(self._work_off)
        except RuntimeError:  # The loop is closed. Its thread looks into the inbox once more, or has done so.
            with suppress(ValueError):
                self._inbox.remove(call)
                call()

    def _call(self, what: str, function: Callable[[], _T]) -> _T:
        """Give or raise what ``function`` does, made by the loop's thread; ``TimeoutError`` if that does not answer."""
        over = Latch()
        outcome: Future[_T] = Future()

        def act() -> None:
            try:
                outcome.set_result(function())
            except Exception as error:
                outcome.set_exception(error)
            over.set()

        self._hand_over(act)
        if not over.wait(_WAIT_SECONDS):
            raise TimeoutError(f"{what}: no answer from the queue's thread in {_WAIT_SECONDS} s")
        return outcome.result(0)

    # --- the loop's thread ---

    def _run(self) -> None:
        try:
            tasks = [self._loop.create_task(self._work()) for _ in range(self._depth)]
            self._loop.run_until_complete(asyncio.gather(*tasks))
        finally:
            self._refusing = True
            self._close_files()
            self._pool.calls.put(None)
            self._loop.close()
            self._ended.set()
            self._work_off()

    def _work_off(self) -> None:
        with suppress(IndexError):
            while True:
                self._inbox.popleft()()

    def _add_file(self, fd: int, memory_alignment: int, offset_alignment: int) -> int:
        if self._refusing:
            raise OSError(errno.ESHUTDOWN, "the queue is closed")
        index = next(i for i in itertools.count() if i not in self._files)
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        self._files[index] = _File(index, own, memory_alignment, offset_alignment)
        return index

    def _remove_file(self, index: int) -> None:
        file = self._file(index)
        if any(ticket.file is file for ticket in self._live):
            raise OSError(errno.EBUSY, "the file has requests outstanding")
        os.close(self._files.pop(index).fd)

    def _close_files(self) -> None:
        while self._files:
            with suppress(OSError):  # what was written is safe only after a sync, which tells its own errors
                os.close(self._files.popitem()[1].fd)

    def _accept(self, ticket: Ticket) -> None:
        if not self._live:
            self._busy_since = time.monotonic()
        if ticket.operation == "sync":
            ticket.earlier_writes = [t for t in self._live if t.operation == "write" and t.file is ticket.file]
        self._live.add(ticket)
        if self._refusing or self._files.get(ticket.file.index) is not ticket.file:
            self._complete(ticket, errno.ECANCELED)  # closed, or given back, by another thread in between
        else:
            self._line.put_nowait((0 if ticket.urgent else 1, next(self._numbers), ticket))

    async def _work(self) -> None:
        """Carry one block of the request that is due and put it back in its place: an urgent one may overtake it."""
        while (entry := await self._line.get())[-1] is not None:
            ticket = entry[-1]
            self.blocks_in_flight += 1
            self._counts["depth_max"] = max(self._counts["depth_max"], self.blocks_in_flight)
            failure = await (self._sync(ticket) if ticket.operation == "sync" else self._carry(ticket))
            self.blocks_in_flight -= 1
            if failure or ticket.bytes_done == ticket.nbytes:
                self._complete(ticket, failure)
            elif self._cancelled:
                self._complete(ticket, errno.ECANCELED)
            else:
                self._line.put_nowait(entry)

    async def _sync(self, ticket: Ticket) -> int:
        # No deadlock: earlier writes stood before the sync in the line, so other tasks have them.
        while ticket.earlier_writes:
            over = self._loop.create_future()
            if ticket.earlier_writes.pop().over.call_when_set(partial(over.set_result, None)):
                await over
        # Never repeated: the kernel reports a lost page once, and a second fdatasync would claim success.
        return -await self._attempt(ticket, 0)

    async def _carry(self, ticket: Ticket) -> int:
        """Transfer one block; gives the error, or 0. Every result of the kernel is read here."""
        started, begin, attempts, error = time.monotonic(), ticket.bytes_done, 0, 0
        end = min(begin + self._block_bytes, ticket.nbytes)
        while (left := end - ticket.bytes_done) > 0 and not error:
            result = await self._attempt(ticket, left)
            again = result in (-errno.EAGAIN, -errno.EINTR)
            if 0 < result < left:
                self._counts["short_transfers"] += 1
                result -= result % ticket.file.offset_alignment  # O_DIRECT resumes there
                if result == 0:
                    result, again = -errno.EIO, True
            if result > 0:
                ticket.bytes_done, attempts = ticket.bytes_done + result, 0
            elif again and attempts + 1 < _ATTEMPTS_MAX:
                attempts += 1
                self._counts["retries"] += 1
            else:  # 0: the file ended before the request
                error = -result or (errno.ENODATA if ticket.operation == "read" else errno.EIO)
        seconds = time.monotonic() - started
        self._carried_seconds += seconds
        self._latency_max[ticket.operation] = max(self._latency_max[ticket.operation], seconds)
        self._moved[ticket.operation].update(bytes=ticket.bytes_done - begin, operations=1)
        return error

    async def _attempt(self, ticket: Ticket, nbytes: int) -> int:
        """The kernel's result: bytes moved, or minus an errno."""
        file, offset, asked, most = ticket.file, ticket.offset + ticket.bytes_done, nbytes, nbytes
        if self._plan is not None:
            kind = ("read", "write", "sync").index(ticket.operation)
            error, short_by, delay_us, hold = self._plan.next(kind, file.index, offset, nbytes)
            await asyncio.sleep(delay_us * 1e-6)
            while hold and not self._plan.released:
                await asyncio.sleep(0.001)
            if error:
                return -error
            if 0 < short_by < nbytes:
                most = nbytes - short_by
                asked = min(nbytes, -(-most // 512) * 512)
        try:
            if ticket.operation == "sync":
                await _fdatasync(file.fd, executor=self._pool)
                return 0
            view = (ctypes.c_char * asked).from_address(ticket.address + ticket.bytes_done)
            call = _preadv if ticket.operation == "read" else _pwritev
            moved: int = await call(file.fd, [view], offset, executor=self._pool)
            return min(moved, most)
        except (OSError, MemoryError) as failure:
            return -(getattr(failure, "errno", None) or errno.ENOMEM)

    def _complete(self, ticket: Ticket, failure: int) -> None:
        ticket.failure = failure
        self._live.discard(ticket)
        if not self._live:
            self._busy_seconds += time.monotonic() - self._busy_since
        self._counts["failed_requests"] += failure != 0
        if ticket.operation == "sync":
            self._counts["syncs"] += 1
        else:
            self._moved[ticket.operation]["requests"] += 1
        ticket.lease = None
        ticket.over.set()

    def _cancel(self) -> None:
        self._refusing = self._cancelled = True
        for entry in [self._line.get_nowait() for _ in range(self._line.qsize())]:
            if entry[-1] is None:
                self._line.put_nowait(entry)
            else:
                self._complete(entry[-1], errno.ECANCELED)

    def _end(self) -> None:
        """Have each task end when nothing else is in the line."""
        self._refusing = True
        for _ in range(self._depth):
            self._line.put_nowait((2, next(self._numbers), None))

    def _snapshot(self) -> dict[str, Any]:
        now = time.monotonic()
        busy = self._busy_seconds + (now - self._busy_since if self._live else 0.0)
        return {
            **{kind: {**self._moved[kind], "latency_max_s": self._latency_max[kind]} for kind in self._moved},
            **self._counts,
            "depth_mean": self._carried_seconds / busy if busy > 0 else 0.0,
            "busy_seconds": busy,
            "idle_seconds": now - self._started - busy,
        }


def _close_in_child() -> None:
    """A lock taken by flock would outlive its owner in a child that kept the descriptors."""
    for queue in list(_queues):
        queue._close_files()


os.register_at_fork(after_in_child=_close_in_child)
