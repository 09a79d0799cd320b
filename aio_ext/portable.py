"""The queue in Python alone, on aiofiles: slower than the native backends, the same in everything else.

One asyncio loop in a thread owns all state, so nothing here needs a lock; the calls that can wait go to a pool of
threads. Names and behaviour are those of the native core, which :class:`aio_ext.Queue` puts the public face on.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiofiles.os import wrap

from ._core import NATIVE, direct_io_alignment, lease_containing
from .portable_counters import Counters
from .portable_pool import DaemonPool

if TYPE_CHECKING:
    from ._aio import Channel, FaultPlan, Lease

_ATTEMPTS_MAX = 16
_REQUESTS_MAX = 16384
_preadv, _pwritev, _fdatasync = wrap(os.preadv), wrap(os.pwritev), wrap(os.fdatasync)


@dataclass(eq=False)
class Ticket:
    """A request and its outcome. Only the loop's thread writes to it until ``_over`` is set."""

    operation: str
    file: _File
    offset: int
    address: int
    nbytes: int
    urgent: bool
    lease: Lease | None
    issued_bytes: int = 0
    blocks_in_flight: int = 0
    waiting_for: set[Ticket] = field(default_factory=set)
    """Of a sync: the earlier writes of the file that are not over yet."""
    bytes_done: int = 0
    error: int = 0
    error_offset: int = 0
    _watches: list[tuple[Channel, int]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None) -> bool:
        if self.file.pid != os.getpid():
            raise RuntimeError(_FORKED)
        if timeout is not None and not timeout >= 0:
            raise ValueError("timeout must be >= 0 seconds")
        return self._over.wait(timeout)

    def watch(self, channel: Channel, token: int) -> bool:
        with self._lock:
            if self.done():
                return False
            self._watches.append((channel, token))
            return True

    def complete(self) -> None:
        self.lease = None
        with self._lock:
            self._over.set()
        for channel, token in self._watches:
            channel.post(token)
        self._watches.clear()


@dataclass(eq=False)
class _File:
    index: int
    fd: int
    memory_alignment: int = 1
    offset_alignment: int = 1
    outstanding: int = 0
    writes: set[Ticket] = field(default_factory=set)
    """Accepted and not over."""
    pid: int = field(default_factory=os.getpid)


@dataclass(eq=False)
class _Block:
    ticket: Ticket
    offset: int
    address: int
    remaining: int
    total: int
    attempts: int = 0
    error: int = 0
    started: float = field(default_factory=time.monotonic)


_FORKED = "this queue belongs to the process that made it: a forked child must make its own"
_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


class Queue:
    """See :class:`aio_ext.Queue`. As many blocks are in flight as there are threads, and no more than ``depth``."""

    backend = "portable"

    def __init__(self, depth: int, block_bytes: int, num_threads: int, plan: FaultPlan | None) -> None:
        if not (1 <= depth <= 4096 and 1 <= num_threads <= 256):
            raise ValueError("depth must be in [1, 4096], num_threads in [1, 256]")
        if block_bytes % 4096 or not 4096 <= block_bytes <= 1 << 30:
            raise ValueError("block_bytes must be a multiple of 4096 in [4096, 2^30]")
        self.notes = [] if NATIVE else ["the extension aio_ext._aio is not built: I/O goes through Python"]
        self._block_bytes = block_bytes
        self._slots = min(depth, num_threads)
        self._plan = plan
        self._pid = os.getpid()
        self._files: dict[int, _File] = {}
        self._lanes: tuple[tuple[deque[Ticket], deque[Ticket]], ...] = ((deque(), deque()), (deque(), deque()))
        self._waiting_syncs: list[Ticket] = []
        self._turn = 0
        self._in_flight: set[asyncio.Task[None]] = set()
        self._requests = 0
        self._closed = False
        self._ended = False
        self._changed = threading.Condition()  # of _requests and _closed
        self._counters = Counters(self._slots)
        self._pool = DaemonPool(self._slots)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="aio-portable", daemon=True).start()
        _queues.add(self)

    # --- callers: any thread ---

    @property
    def blocks_in_flight(self) -> int:
        return len(self._in_flight)

    def register_memory(self, address: int, nbytes: int) -> None:
        pass

    def register_file(self, fd: int) -> int:
        self._refuse_in_child()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        alignment = direct_io_alignment(fd) if flags & os.O_DIRECT else (1, 1)
        if self._block_bytes % alignment[1]:
            raise ValueError(f"block_bytes must be a multiple of {alignment[1]} for this file")
        with self._changed:
            index = next(i for i in range(len(self._files) + 1) if i not in self._files)
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
            self._files[index] = _File(index, own, *alignment)
        return index

    def unregister_file(self, file: int) -> None:
        self._refuse_in_child()
        with self._changed:
            if self._file(file).outstanding:
                raise OSError(errno.EBUSY, "the file has requests outstanding")
            os.close(self._files.pop(file).fd)

    def read(self, file: int, offset: int, address: int, nbytes: int, urgent: bool) -> Ticket:
        return self._submit("read", file, offset, address, nbytes, urgent)

    def write(self, file: int, offset: int, address: int, nbytes: int, urgent: bool) -> Ticket:
        return self._submit("write", file, offset, address, nbytes, urgent)

    def sync(self, file: int) -> Ticket:
        return self._submit("sync", file, 0, 0, 0, True)

    def counters(self) -> dict[str, Any]:
        self._refuse_in_child()
        return self._counters.snapshot()

    def cancel(self) -> None:
        self._refuse_in_child()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._call(self._cancel())

    def close(self, timeout: float) -> bool:
        if self._pid != os.getpid():
            return True
        with self._changed:
            was_closed, self._ended, self._closed = self._ended, True, True
            self._changed.notify_all()
            drained = self._changed.wait_for(lambda: self._requests == 0, 0 if was_closed else timeout)
        if was_closed:
            return drained
        if not drained:
            self._call(self._cancel())
            return False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._pool.shutdown()
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        return True

    def _submit(self, operation: str, index: int, offset: int, address: int, nbytes: int, urgent: bool) -> Ticket:
        self._refuse_in_child()
        with self._changed:
            self._changed.wait_for(lambda: self._requests < _REQUESTS_MAX or self._closed)
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the queue is closed")
            file = self._file(index)
            if operation != "sync":
                _check(file, offset, address, nbytes)
            self._requests += 1
            file.outstanding += 1
            ticket = Ticket(operation, file, offset, address, nbytes, urgent, lease_containing(address, nbytes))
            if nbytes > 0 or operation == "sync":
                self._loop.call_soon_threadsafe(self._accept, ticket)  # in order: the lock is held
                return ticket
        self._complete(ticket)
        return ticket

    def _file(self, index: int) -> _File:
        if index not in self._files:
            raise ValueError(f"file {index} is not registered with this queue")
        return self._files[index]

    def _refuse_in_child(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(_FORKED)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    # --- the loop's thread ---

    def _accept(self, ticket: Ticket) -> None:
        if ticket.operation == "write":
            ticket.file.writes.add(ticket)
        if ticket.operation == "sync" and ticket.file.writes:
            ticket.waiting_for = set(ticket.file.writes)
            self._waiting_syncs.append(ticket)
        else:
            self._lane(ticket).append(ticket)
        self._start_blocks()

    def _lane(self, ticket: Ticket) -> deque[Ticket]:
        return self._lanes[0 if ticket.urgent else 1][0 if ticket.operation == "read" else 1]

    def _start_blocks(self) -> None:
        self._counters.account(len(self._in_flight), any(lane for lanes in self._lanes for lane in lanes))
        while len(self._in_flight) < self._slots:
            block = self._take()
            if block is None:
                break
            task = self._loop.create_task(self._carry(block))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
        self._counters.depth_max = max(self._counters.depth_max, len(self._in_flight))

    def _take(self) -> _Block | None:
        """The next block: urgent before background, reads and writes in turn."""
        for lanes in self._lanes:
            if lanes[self._turn]:
                lane, self._turn = lanes[self._turn], 1 - self._turn
            elif lanes[1 - self._turn]:
                lane = lanes[1 - self._turn]
            else:
                continue
            ticket = lane[0]
            at = ticket.issued_bytes
            nbytes = min(self._block_bytes, ticket.nbytes - at)
            ticket.issued_bytes += nbytes
            ticket.blocks_in_flight += 1
            if ticket.issued_bytes == ticket.nbytes:
                lane.popleft()
            return _Block(ticket, ticket.offset + at, ticket.address + at, nbytes, nbytes)
        return None

    async def _carry(self, block: _Block) -> None:
        while not self._finish(block, await self._attempt(block)):
            pass
        self._finish_block(block)
        self._in_flight.discard(asyncio.current_task())
        self._start_blocks()

    async def _attempt(self, block: _Block) -> int:
        """The kernel's result: bytes moved, or minus an errno."""
        ticket, nbytes, short_by = block.ticket, block.remaining, 0
        if self._plan is not None:
            operation = ("read", "write", "sync").index(ticket.operation)
            error, short_by, delay_us, hold = self._plan.next(operation, ticket.file.index, block.offset, nbytes)
            await asyncio.sleep(delay_us * 1e-6)
            while hold and not self._plan.released:
                await asyncio.sleep(0.001)
            if error:
                return -error
            if not 0 < short_by < nbytes:
                short_by = 0
        asked = min(nbytes, -(-(nbytes - short_by) // 512) * 512) if short_by else nbytes
        try:
            if ticket.operation == "sync":
                await _fdatasync(ticket.file.fd, executor=self._pool)
                return 0
            call = _preadv if ticket.operation == "read" else _pwritev
            view = (ctypes.c_char * asked).from_address(block.address)
            moved: int = await call(ticket.file.fd, [view], block.offset, executor=self._pool)
            return min(moved, nbytes - short_by)
        except OSError as error_of_kernel:
            return -(error_of_kernel.errno or errno.EIO)

    def _finish(self, block: _Block, result: int) -> bool:
        """Every result passes through here. True: the block is over (see its error). False: there is more to do."""
        if block.ticket.operation == "sync":
            block.error = -result
            return True
        if result in (-errno.EAGAIN, -errno.EINTR):
            return self._give_up(block, -result)
        if result <= 0:
            block.error = -result or (errno.ENODATA if block.ticket.operation == "read" else errno.EIO)
            return True
        if result < block.remaining:
            self._counters.short_transfers += 1
            result -= result % block.ticket.file.offset_alignment
            if result == 0:
                return self._give_up(block, errno.EIO)
        block.address += result
        block.offset += result
        block.remaining -= result
        block.attempts = 0
        return block.remaining == 0

    def _give_up(self, block: _Block, error: int) -> bool:
        block.attempts += 1
        if block.attempts < _ATTEMPTS_MAX:
            self._counters.retries += 1
            return False
        block.error = error
        return True

    def _finish_block(self, block: _Block) -> None:
        ticket = block.ticket
        moved = block.total - block.remaining
        if ticket.operation != "sync":
            self._counters.of(ticket.operation).add(moved, time.monotonic() - block.started)
        ticket.bytes_done += moved
        if block.error and not ticket.error:
            ticket.error, ticket.error_offset = block.error, block.offset
            if ticket.issued_bytes < ticket.nbytes:
                self._lane(ticket).remove(ticket)
        ticket.blocks_in_flight -= 1
        if ticket.blocks_in_flight == 0 and (ticket.issued_bytes == ticket.nbytes or ticket.error):
            self._complete(ticket)

    def _complete(self, ticket: Ticket) -> None:
        file = ticket.file
        with self._changed:
            file.outstanding -= 1
            self._requests -= 1
            self._counters.failed_requests += ticket.error != 0
            if ticket.operation == "sync":
                self._counters.syncs += 1
            else:
                self._counters.of(ticket.operation).requests += 1
            self._changed.notify_all()
        ticket.complete()
        if ticket in file.writes:
            file.writes.remove(ticket)
            for sync in [s for s in self._waiting_syncs if ticket in s.waiting_for]:
                sync.waiting_for.remove(ticket)
                if not sync.waiting_for:
                    self._waiting_syncs.remove(sync)
                    self._lane(sync).append(sync)

    async def _cancel(self) -> None:
        pending = [*self._waiting_syncs, *(ticket for lanes in self._lanes for lane in lanes for ticket in lane)]
        self._waiting_syncs.clear()
        for lanes in self._lanes:
            for lane in lanes:
                lane.clear()
        for ticket in pending:
            ticket.error = ticket.error or errno.ECANCELED
            if ticket.blocks_in_flight == 0:
                self._complete(ticket)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _check(file: _File, offset: int, address: int, nbytes: int) -> None:
    if min(offset, nbytes) < 0 or offset + nbytes >= 1 << 63:
        raise ValueError("offset + nbytes overflows")
    if offset % file.offset_alignment or nbytes % file.offset_alignment or address % file.memory_alignment:
        raise ValueError(
            f"O_DIRECT on this file needs offset and nbytes in multiples of {file.offset_alignment} "
            f"and address of {file.memory_alignment}"
        )


def _close_in_child() -> None:
    """A lock taken by flock would outlive its owner in a child that kept the descriptors."""
    for queue in list(_queues):
        for file in queue._files.values():
            os.close(file.fd)
        queue._files.clear()


os.register_at_fork(after_in_child=_close_in_child)
