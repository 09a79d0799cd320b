"""Whose turn it is at a store: calls that go on side by side, and the one that has the store alone.

[Note: Turns] A transfer is begun under the lock of the store, which is held for moments. A commit, another change of
the generations and ``close`` wait for I/O. So they have the turn instead, and hold no lock: other calls sleep until
they are over, but for reads where what is current and kept stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from aio_ext.latch import Latch, Lock
from swapper.device import IO_TIMEOUT_S
from swapper.errors import OffloadError, StorageCorrupt, StorageError, StorageIOError, StorageTimeout, StoreMisuse

_Result = TypeVar("_Result")

_LOOK_S = 0.1
"""Seconds between two looks of who waits for a turn: Ctrl-C may come between its end and the word of that."""


class _Turn(Latch):
    """The turn of a call, set when that is over. ``reads``: others' reads may begin meanwhile."""

    __slots__ = ("reads",)

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads


class Turns:
    """The lock of a store, the turn, and the first failure after which the store serves nothing more.

    ``damage`` says what is wrong with generations of the store, which is only read then. ``where`` is what messages
    call it.
    """

    def __init__(self, where: str, damage: Sequence[str]) -> None:
        self.failure: OffloadError | None = None
        self.lock = Lock()
        """Lock of the store. Guards: its records and writes, its generations, ``failure`` and the turn.
        Order: after all of the engine's; the lock of the counts is taken under it. No I/O is waited for under it.
        One exception: with 16384 requests in flight a submission waits until one is over. The threads of ``aio_ext``
        see to that, and they take no lock of the store."""
        self._where = where
        self._damage = tuple(damage)
        self._turn: _Turn | None = None
        """That of the call that has the store alone. What that changes is its own until this is None again."""
        self._pid = os.getpid()

    def enter(self, *, reads: bool) -> None:
        """With the lock held, once: return when no call has the store alone, or one that lets ``reads`` go on; the lock
        is free meanwhile. Raises if the store or the caller is not fit for it."""
        self._check_process()
        turn = self._turn
        if not (reads and turn is not None and turn.reads):
            self._wait()
            if self.failure is not None:
                raise self.failure
        if not reads:
            self._check_whole()

    def alone(self, call: Callable[[], _Result], *, checked: bool = True, reads: bool = False) -> _Result:
        """Make the call without the lock, while all others wait: no write begins, and no generation changes. No read
        begins either, unless ``reads`` says that what is current and kept stays as it is. It is no block for ``with``:
        Ctrl-C at the end of one would keep the turn as long as somebody has the traceback."""
        if checked:
            self._check_process()
            self._check_whole()
        mine = _Turn(reads)
        try:
            with self.lock:
                self._wait()
                if checked and self.failure is not None:
                    raise self.failure
                self._turn = mine
            return call()
        finally:
            if self._turn is mine:  # nobody else changes it then; with the lock this could be interrupted
                self._turn = None
            mine.set()

    @contextlib.contextmanager
    def fatal(self, what: str) -> Iterator[None]:
        """An error or an interruption in the body is final: the store raises it from then on."""
        self.failure = StorageIOError(f"{what} was interrupted on {self._where}.")
        try:
            yield
        except StorageError as error:
            self.failure = error
            raise
        self.failure = None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreMisuse(f"{self._where} belongs to process {self._pid}: a forked child opens its own.")

    def _check_whole(self) -> None:
        if self._damage:
            error = StorageCorrupt(f"{self._where} is only read: {' '.join(self._damage)}")
            error.advice = "Copy what it holds into another store."
            raise error

    def _wait(self) -> None:
        """Sleep, without the lock, until no call has the store alone."""
        deadline = time.monotonic() + IO_TIMEOUT_S
        while (turn := self._turn) is not None:
            self.lock.free_during(partial(turn.wait, min(deadline - time.monotonic(), _LOOK_S)))
            if self._turn is not None and time.monotonic() >= deadline:
                raise StorageTimeout(
                    f"{self._where}: a commit, or another change of generations, is not over for {IO_TIMEOUT_S:.0f} s."
                )
