"""Checksums that know what they belong to: xxh3, seeded with store, extent, generation and length.

A block that is stale, misplaced or swapped with another has a good checksum, but not this one.

[Note: Where hashing runs] Hashing runs in a few threads of its own, which let other Python code run. A read is verified
as soon as it has arrived, mostly long before a program asks for it. A write is sealed while the device takes the bytes.
A thread that waits for a ticket whose hashing has not begun does it itself, instead of waiting for another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from _thread import start_new_thread
from collections.abc import Callable
from queue import SimpleQueue

import xxhash

from aio_ext.latch import Latch
from swapper.device import IO_TIMEOUT_S

_THREADS = min(4, os.cpu_count() or 1)
"""One thread hashes as fast as memory is read, so a few serve any number of devices."""

_LOOK_S = 0.1
"""Seconds between two looks of a thread that waits for another one's work at whether it was given back."""


def seed(store: bytes, extent: int, generation: int, nbytes: int) -> int:
    """Return what the checksum of ``nbytes`` of this extent and generation starts from."""
    return xxhash.xxh3_64_intdigest(struct.pack("<16s3Q", store, extent, generation, nbytes))


def digest(address: int, nbytes: int, seed: int) -> int:
    """The checksum of ``nbytes`` of memory at ``address``. Other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address), seed)


class Once:
    """A piece of work that is done once, by the thread that comes first; what it raises is kept in ``error``.

    ``call`` gets the seconds that it may take. It is to be done again if it raises ``TimeoutError``, or if Ctrl-C ends
    it. ``then`` is called with this when it is over. No lock is held meanwhile: the work belongs to the first thread
    of those that have put themselves down for it, and Ctrl-C takes a thread off that list wherever it strikes.
    """

    __slots__ = ("_at_it", "_call", "_over", "_then", "error")

    def __init__(self, call: Callable[[float], None], then: Callable[[Once], object] = lambda _: None) -> None:
        self._call: Callable[[float], None] | None = call
        self._then = then
        self._at_it: list[object] = []
        self._over = Latch()
        self.error: Exception | None = None

    def over(self) -> bool:
        """True once the work is done, well or not."""
        return self._over.is_set()

    def start(self) -> None:
        """Have it done by one of the threads."""
        with contextlib.suppress(RuntimeError):  # there are no more threads: who waits does it
            _line().put(self)

    def run(self, timeout_s: float = IO_TIMEOUT_S) -> None:
        """Do it, or wait until another thread has done it. Raises ``TimeoutError`` after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not self._over.is_set():
            left_s = deadline - time.monotonic()
            if self._try(max(left_s, 0.0)):
                return
            if left_s <= 0:
                raise TimeoutError
            self._over.wait(min(left_s, _LOOK_S))  # the other thread may give the work back

    def _try(self, timeout_s: float) -> bool:
        """Do it here, unless another thread is at it. True: it was done."""
        me = object()
        try:
            self._at_it.append(me)
            if self._at_it[0] is not me:
                return False
            if self._call is not None:
                self._do(self._call, timeout_s)
            return True
        finally:
            if me in self._at_it:
                self._at_it.remove(me)

    def _do(self, call: Callable[[float], None], timeout_s: float) -> None:
        try:
            call(timeout_s)
        except TimeoutError:
            raise
        except Exception as error:
            self.error = error
        self._over.set()
        self._call = None  # whoever keeps this keeps nothing that the work was about
        self._then(self)

    def run_quietly(self) -> None:
        """Do it, unless another thread is at it and gives it back."""
        with contextlib.suppress(TimeoutError):  # the next thread that waits goes on with it
            self.run()


_lines: dict[int, SimpleQueue[Once]] = {}
"""Work for the threads of this process, by its number. A forked child has no threads, and makes its own when needed."""


def _line() -> SimpleQueue[Once]:
    """What is put there is done by one of the threads. These are bare, and the line is of the interpreter's own, see
    [Note: Ctrl-C strikes anywhere]: the standard pool has locks that an interrupted call keeps."""
    line = _lines.get(os.getpid())
    if line is None:
        candidate: SimpleQueue[Once] = SimpleQueue()
        for _ in range(_THREADS):
            start_new_thread(_work_off, (candidate,))
        line = _lines.setdefault(os.getpid(), candidate)  # of two calls at a time one made threads with nothing to do
    return line


def _work_off(line: SimpleQueue[Once]) -> None:
    while True:
        line.get().run_quietly()


os.register_at_fork(after_in_child=_lines.clear)
