"""The queue in Python alone, on aiofiles: slower than the native backends, the same in everything else.

One asyncio loop in a thread owns all state: callers hand it what they want done and wait for the outcome, see [Note:
Ctrl-C strikes anywhere]. The calls of the kernel that can wait go to a pool of threads. Names and behaviour are those
of the native core, which :class:`aio_ext.Queue` puts the public face on.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import time
import weakref
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiofiles.os import wrap

from ._core import NATIVE, direct_io_alignment, lease_containing
from .latch import Latch
from .portable_counters import Counters
from .portable_pool import DaemonPool
from .portable_request import FORKED, Block, File, Ticket

if TYPE_CHECKING:
    from ._aio import FaultPlan

_ATTEMPTS_MAX = 16
_REQUESTS_MAX = 16384
_preadv, _pwritev, _fdatasync = wrap(os.preadv), wrap(os.pwritev), wrap(os.fdatasync)
_queues: weakref.WeakSet[Queue] = weakref.WeakSet()
_T = TypeVar("_T")


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
        self._inbox: deque[Callable[[], object]] = deque()
        self._closed = False
        self._ended = Latch()
        # From here on: the loop's thread's. Others only look.
        self._files: dict[int, File] = {}
        self._lanes: tuple[tuple[deque[Ticket], deque[Ticket]], ...] = ((deque(), deque()), (deque(), deque()))
        self._waiting_syncs: list[Ticket] = []
        self._turn = 0
        self._in_flight: set[asyncio.Task[None]] = set()
        self._requests = 0
        self._waiting_for_room: list[Latch] = []
        self._refusing = False
        self._ending = False
        self._counters = Counters(self._slots)
        self._pool = DaemonPool(self._slots)
        self._loop = asyncio.new_event_loop()
        start_new_thread(self._run, ())
        _queues.add(self)

    # --- callers: any thread ---

    @property
    def blocks_in_flight(self) -> int:
        return len(self._in_flight)

    def register_memory(self, address: int, nbytes: int) -> None:
        self._refuse()

    def register_file(self, fd: int) -> int:
        self._refuse()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        alignment = direct_io_alignment(fd) if flags & os.O_DIRECT else (1, 1)
        if self._block_bytes % alignment[1]:
            raise ValueError(f"block_bytes must be a multiple of {alignment[1]} for this file")
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        return self._call(partial(self._add_file, File(own, *alignment)))

    def unregister_file(self, file: int) -> None:
        self._refuse()
        self._call(partial(self._remove_file, file))

    def read(self, file: int, offset: int, address: int, nbytes: int, urgent: bool) -> Ticket:
        return self._submit("read", file, offset, address, nbytes, urgent)

    def write(self, file: int, offset: int, address: int, nbytes: int, urgent: bool) -> Ticket:
        return self._submit("write", file, offset, address, nbytes, urgent)

    def sync(self, file: int) -> Ticket:
        return self._submit("sync", file, 0, 0, 0, True)

    def counters(self) -> dict[str, Any]:
        self._refuse_in_child()
        return self._call(self._counters.snapshot)

    def cancel(self) -> None:
        self._refuse_in_child()
        self._closed = True
        self._call(self._cancel)

    def close(self, timeout: float) -> bool:
        if self._pid != os.getpid():
            return True
        if not timeout >= 0:
            raise ValueError("timeout must be >= 0 seconds")
        self._closed = True
        self._hand_over(self._end_when_idle)
        ended = self._ended.wait(timeout)
        if not ended:
            self._call(self._cancel)
        return ended

    def _submit(self, operation: str, index: int, offset: int, address: int, nbytes: int, urgent: bool) -> Ticket:
        self._refuse()
        file = self._file(index)
        if operation != "sync":
            file.check(offset, address, nbytes)
        while self._requests + len(self._inbox) >= _REQUESTS_MAX:
            room = Latch()
            self._hand_over(partial(self._tell_of_room, room))
            room.wait()
            self._refuse()
        ticket = Ticket(operation, file, offset, address, nbytes, urgent, lease_containing(address, nbytes))
        if nbytes == 0 and operation != "sync":
            ticket.complete()  # at once; what follows only counts it
        self._hand_over(partial(self._accept, ticket))
        return ticket

    def _file(self, index: int) -> File:
        if index not in self._files:
            raise ValueError(f"file {index} is not registered with this queue")
        return self._files[index]

    def _refuse_in_child(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(FORKED)

    def _refuse(self) -> None:
        self._refuse_in_child()
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the queue is closed")

    def _hand_over(self, call: Callable[[], object]) -> None:
        """Have the loop's thread make ``call``, after those handed over before; once it has ended, make it here."""
        if self._ended.is_set():
            call()
            return
        self._inbox.append(call)
        try:
            self._loop.call_soon_threadsafe(self._work_off)
        except RuntimeError:
            # The loop has been closed since. Its thread looks into the inbox once more, or has done so.
            with suppress(ValueError):
                self._inbox.remove(call)
                call()

    def _call(self, function: Callable[[], _T]) -> _T:
        """What ``function`` gives or raises, made by the loop's thread."""
        over = Latch()
        outcome: list[_T | Exception] = []

        def act() -> None:
            try:
                outcome.append(function())
            except Exception as error:
                outcome.append(error)
            over.set()

        self._hand_over(act)
        over.wait()
        result = outcome[0]
        if isinstance(result, Exception):
            raise result
        return result

    # --- the loop's thread ---

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            self._ended.set()
            self._work_off()

    def _work_off(self) -> None:
        while True:
            try:
                call = self._inbox.popleft()
            except IndexError:
                return
            call()

    def _add_file(self, file: File) -> int:
        if self._refusing:
            os.close(file.fd)
            raise OSError(errno.ESHUTDOWN, "the queue is closed")
        file.index = next(i for i in range(len(self._files) + 1) if i not in self._files)
        self._files[file.index] = file
        return file.index

    def _remove_file(self, index: int) -> None:
        if self._file(index).outstanding:
            raise OSError(errno.EBUSY, "the file has requests outstanding")
        os.close(self._files.pop(index).fd)

    def _tell_of_room(self, room: Latch) -> None:
        if self._requests < _REQUESTS_MAX or self._refusing:
            room.set()
        else:
            self._waiting_for_room.append(room)

    def _accept(self, ticket: Ticket) -> None:
        self._requests += 1
        ticket.file.outstanding += 1
        if self._refusing or self._files.get(ticket.file.index) is not ticket.file:
            # Closed, or given back, by another thread since the caller looked.
            ticket.fail(errno.ECANCELED, ticket.offset)
        if ticket.failure or (ticket.nbytes == 0 and ticket.operation != "sync"):
            self._complete(ticket)
            return
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

    def _take(self) -> Block | None:
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
            return Block(ticket, ticket.offset + at, ticket.address + at, nbytes, nbytes)
        return None

    async def _carry(self, block: Block) -> None:
        while not self._finish(block, await self._attempt(block)):
            pass
        self._finish_block(block)
        self._in_flight.discard(asyncio.current_task())
        self._start_blocks()

    async def _attempt(self, block: Block) -> int:
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

    def _finish(self, block: Block, result: int) -> bool:
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

    def _give_up(self, block: Block, error: int) -> bool:
        block.attempts += 1
        if block.attempts < _ATTEMPTS_MAX:
            self._counters.retries += 1
            return False
        block.error = error
        return True

    def _finish_block(self, block: Block) -> None:
        ticket = block.ticket
        moved = block.total - block.remaining
        if ticket.operation != "sync":
            self._counters.of(ticket.operation).add(moved, time.monotonic() - block.started)
        ticket.bytes_done += moved
        if block.error and not ticket.failure:
            ticket.fail(block.error, block.offset)
            if ticket.issued_bytes < ticket.nbytes:
                self._lane(ticket).remove(ticket)
        ticket.blocks_in_flight -= 1
        if ticket.blocks_in_flight == 0 and (ticket.issued_bytes == ticket.nbytes or ticket.failure):
            self._complete(ticket)

    def _complete(self, ticket: Ticket) -> None:
        file = ticket.file
        file.outstanding -= 1
        self._requests -= 1
        self._counters.failed_requests += ticket.failure != 0
        if ticket.operation == "sync":
            self._counters.syncs += 1
        else:
            self._counters.of(ticket.operation).requests += 1
        ticket.complete()
        if ticket in file.writes:
            file.writes.remove(ticket)
            for sync in [s for s in self._waiting_syncs if ticket in s.waiting_for]:
                sync.waiting_for.remove(ticket)
                if not sync.waiting_for:
                    self._waiting_syncs.remove(sync)
                    self._lane(sync).append(sync)
        if self._requests < _REQUESTS_MAX:
            self._wake_for_room()
        self._end_if_idle()

    def _wake_for_room(self) -> None:
        for room in self._waiting_for_room:
            room.set()
        self._waiting_for_room.clear()

    def _cancel(self) -> None:
        self._refusing = True
        pending = [*self._waiting_syncs, *(ticket for lanes in self._lanes for lane in lanes for ticket in lane)]
        self._waiting_syncs.clear()
        for lanes in self._lanes:
            for lane in lanes:
                lane.clear()
        for ticket in pending:
            ticket.fail(errno.ECANCELED, ticket.offset + ticket.issued_bytes)
            if ticket.blocks_in_flight == 0:
                self._complete(ticket)
        self._wake_for_room()

    def _end_when_idle(self) -> None:
        self._refusing = self._ending = True
        self._wake_for_room()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if not self._ending or self._requests > 0:
            return
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        self._pool.shutdown()
        self._loop.stop()


def _close_in_child() -> None:
    """A lock taken by flock would outlive its owner in a child that kept the descriptors."""
    for queue in list(_queues):
        for file in queue._files.values():
            os.close(file.fd)
        queue._files.clear()


os.register_at_fork(after_in_child=_close_in_child)
