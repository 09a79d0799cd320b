"""Checksums that know what they belong to: xxh3, seeded with store, extent, generation and length.

A block that is stale, misplaced or swapped with another has a good checksum, but not this one.

[Note: Who hashes] Hashing runs in a few threads of its own, which let other Python code run: a read is verified as
soon as it has arrived, mostly long before anybody asks for it; a write is sealed while the device takes the bytes.
Whoever waits for a ticket whose hashing has not begun does it himself, instead of waiting for a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

_THREADS = min(4, os.cpu_count() or 1)
"""One thread hashes as fast as memory is read, so a few serve any number of devices."""


def seed(store: bytes, extent: int, generation: int, nbytes: int) -> int:
    """What the checksum of ``nbytes`` of this extent and generation starts from."""
    return xxhash.xxh3_64_intdigest(struct.pack("<16s3Q", store, extent, generation, nbytes))


def digest(address: int, nbytes: int, seed: int) -> int:
    """The checksum of ``nbytes`` of memory at ``address``. Other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address), seed)


class Once:
    """A piece of work that is done once, by whoever comes first; what it raises is kept in ``error``."""

    __slots__ = ("_call", "_lock", "error")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def over(self) -> bool:
        """True once the work is done, well or not."""
        return self._call is None

    def start(self) -> None:
        """Have it done by one of the threads."""
        with contextlib.suppress(RuntimeError):  # the program ends: nobody will ask
            _threads().submit(self.run)

    def run(self, timeout_s: float = -1) -> None:
        """Do it, or wait until it is done. Raises ``TimeoutError`` if another thread takes too long over it."""
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        try:
            if self._call is not None:
                try:
                    self._call()
                except Exception as error:  # Ctrl-C is not kept: the work is then still to be done
                    self.error = error
                self._call = None
        finally:
            self._lock.release()


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="swapper-checksum")
        return _pool


def _forget() -> None:
    """In a forked child the threads are gone: they are made anew when needed."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
