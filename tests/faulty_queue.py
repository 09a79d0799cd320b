"""For tests: queues that fail on request, and the bytes behind an address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aio_ext._core import core
from aio_ext.queue import Queue

_OPERATIONS: tuple[Literal["read", "write", "sync"], ...] = ("read", "write", "sync")


@dataclass(frozen=True)
class Attempt:
    """One block handed to the kernel, retries and remainders of short transfers included."""

    operation: Literal["read", "write", "sync"]
    file: int
    offset: int
    nbytes: int


class FaultPlan:
    """Faults of a queue made by :func:`faulty_queue`. One plan serves one queue.

    A fault strikes one attempt at one block: first it is delayed or held, then it fails with ``error`` (nothing is
    transferred), or leaves ``short_by`` bytes undone, or goes through.
    """

    def __init__(self, log: bool = True) -> None:
        self._core = core.FaultPlan()
        if log:
            self._core.keep_log()

    def strike(
        self, nth: int, *, error: int = 0, short_by: int = 0, delay_us: int = 0, hold: bool = False
    ) -> FaultPlan:
        """Strike the attempt number ``nth``, from 0."""
        self._core.strike(nth, error, short_by, delay_us, hold)
        return self

    def strike_range(
        self, begin: int, end: int, *, error: int = 0, short_by: int = 0, delay_us: int = 0, hold: bool = False
    ) -> FaultPlan:
        """Strike every attempt that touches ``[begin, end)`` of a file."""
        self._core.strike_range(begin, end, error, short_by, delay_us, hold)
        return self

    def strike_at_random(
        self,
        seed: int,
        *,
        error: float = 0.0,
        errors: Sequence[int] = (),
        shortfall: float = 0.0,
        delay: float = 0.0,
        delay_us_max: int = 0,
    ) -> FaultPlan:
        """Strike attempts with these chances; an error is drawn evenly from ``errors`` (repeat one to weigh it)."""
        self._core.strike_at_random(seed, error, list(errors), shortfall, delay, delay_us_max)
        return self

    def release(self) -> None:
        """Let go of everything that is held, now and later."""
        self._core.release()

    def log(self) -> list[Attempt]:
        """All attempts so far, in the order in which they were handed out."""
        return [Attempt(_OPERATIONS[op], file, offset, nbytes) for op, file, offset, nbytes in self._core.log()]


class _FaultyQueue(Queue):
    def __init__(self, plan: FaultPlan, backend: str, depth: int, block_bytes: int, num_threads: int) -> None:
        self._plan = plan._core
        super().__init__(backend, depth, block_bytes, num_threads)


def faulty_queue(
    plan: FaultPlan, backend: str = "auto", depth: int = 32, block_bytes: int = 1 << 20, num_threads: int = 4
) -> Queue:
    """A queue in which ``plan`` goes wrong, below the one function that reads results."""
    return _FaultyQueue(plan, backend, depth, block_bytes, num_threads)


def store(address: int, data: bytes) -> None:
    """Copy ``data`` to memory at ``address``."""
    ctypes.memmove(address, data, len(data))


def load(address: int, nbytes: int) -> bytes:
    """A copy of ``nbytes`` of memory at ``address``."""
    return ctypes.string_at(address, nbytes)
