"""What the portable queue works on: a file, a request with its ticket, and a block of it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .latch import Latch

if TYPE_CHECKING:
    from ._aio import Channel, Lease

FORKED = "this queue belongs to the process that made it: a forked child must make its own"


@dataclass(eq=False)
class File:
    """A registered file. Its counts belong to the loop's thread."""

    fd: int
    memory_alignment: int = 1
    offset_alignment: int = 1
    index: int = -1
    outstanding: int = 0
    writes: set[Ticket] = field(default_factory=set)
    """Accepted and not over."""
    pid: int = field(default_factory=os.getpid)

    def check(self, offset: int, address: int, nbytes: int) -> None:
        """Raises ``ValueError`` for a range that O_DIRECT, or nobody, can transfer."""
        if min(offset, nbytes) < 0 or offset + nbytes >= 1 << 63:
            raise ValueError("offset + nbytes overflows")
        if address == 0 and nbytes > 0:
            raise ValueError("address is null")
        if offset % self.offset_alignment or nbytes % self.offset_alignment or address % self.memory_alignment:
            raise ValueError(
                f"O_DIRECT on this file needs offset and nbytes in multiples of {self.offset_alignment} "
                f"and address of {self.memory_alignment}"
            )


@dataclass(eq=False)
class Ticket:
    """A request and its outcome. Belongs to the loop's thread until it is over."""

    operation: str
    file: File
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
    failure: int = 0
    error_offset: int = 0
    _over: Latch = field(default_factory=Latch)

    def done(self) -> bool:
        return self._over.is_set()

    @property
    def error(self) -> int:
        return self.failure if self.done() else 0

    def wait(self, timeout: float | None) -> bool:
        if self.file.pid != os.getpid():
            raise RuntimeError(FORKED)
        if timeout is not None and not timeout >= 0:
            raise ValueError("timeout must be >= 0 seconds")
        return self._over.wait(timeout)

    def watch(self, channel: Channel, token: int) -> bool:
        if self.file.pid != os.getpid():
            raise RuntimeError(FORKED)
        return self._over.call_when_set(partial(channel.post, token))

    def fail(self, error: int, offset: int) -> None:
        """The first failure is the one that counts."""
        if not self.failure:
            self.failure, self.error_offset = error, offset

    def complete(self) -> None:
        self.lease = None
        self._over.set()


@dataclass(eq=False)
class Block:
    """A piece of a request that is one operation of the kernel."""

    ticket: Ticket
    offset: int
    address: int
    remaining: int
    total: int
    attempts: int = 0
    error: int = 0
    started: float = field(default_factory=time.monotonic)
