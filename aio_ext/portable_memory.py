"""Parts of the native core besides its queue, in Python alone, for places where the extension cannot be built."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress

_HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE, _MADV_POPULATE_WRITE = 0x10, 0x4000, 23
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_live: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = weakref.WeakValueDictionary()
"""Mappings that have a lease, by the ``(address, nbytes)`` of the part that is used."""
_kept: list[mmap.mmap] = []
"""In a forked child: the mappings of the parent. To unmap them would hit what has taken their place since."""
os.register_at_fork(after_in_child=lambda: _kept.extend(_live.values()))


class Lease:
    """One user of a mapping, which is unmapped when the last one goes."""

    def __init__(self, address: int, nbytes: int, mapping: mmap.mmap) -> None:
        self.address, self.nbytes = address, nbytes
        self._mapping: mmap.mmap | None = mapping

    def populate(self) -> None:
        if self._mapping is None:
            raise ValueError("the memory is closed")
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE, self.address - _begin(self._mapping), self.nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.14: pages appear when first touched
                raise

    def close(self) -> None:
        self._mapping = None


def lease_containing(address: int, nbytes: int) -> Lease | None:
    for (begin, length), mapping in list(_live.items()):
        if begin <= address and address + nbytes <= begin + length:
            return Lease(begin, length, mapping)
    return None


def anonymous_memory(nbytes: int, huge_pages: bool) -> Lease:
    lease, mapping = _map(nbytes, 0)
    pages = mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE
    for advice in (pages, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with suppress(OSError):  # not in this kernel
            mapping.madvise(advice)
    return lease


def pattern_memory(nbytes: int, value: int) -> Lease:
    lease, _ = _map(nbytes, _MAP_NORESERVE)
    fd = os.memfd_create("aio_ext pattern")
    try:
        os.pwrite(fd, value.to_bytes(2, "little") * (_HUGE_PAGE_BYTES // 2), 0)
        for address in range(lease.address, lease.address + lease.nbytes, _HUGE_PAGE_BYTES):
            flags = mmap.MAP_SHARED | _MAP_FIXED
            if _libc.mmap(address, _HUGE_PAGE_BYTES, mmap.PROT_READ, flags, fd, 0) != address:
                raise OSError(ctypes.get_errno(), f"mapping a pattern: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    return lease


def _map(nbytes: int, flags: int) -> tuple[Lease, mmap.mmap]:
    """``nbytes``, rounded up to huge pages, on the boundary of one."""
    if not 0 < nbytes <= 1 << 46:
        raise ValueError("nbytes must be in [1, 2^46]")
    nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = -(-_begin(mapping) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    _live[address, nbytes] = mapping
    return Lease(address, nbytes, mapping), mapping


def _begin(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class Channel:
    """Tokens, and an eventfd that is readable while there are any."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tokens: deque[int] = deque()
        weakref.finalize(self, os.close, self.fd).atexit = False

    def post(self, token: int) -> None:
        self._tokens.append(token)
        os.eventfd_write(self.fd, 1)

    def drain(self) -> list[int]:
        with suppress(BlockingIOError):  # drained already
            os.eventfd_read(self.fd)
        return [self._tokens.popleft() for _ in range(len(self._tokens))]  # a later token makes it readable again


def direct_io_alignment(fd: int) -> tuple[int, int]:
    answer = (ctypes.c_uint32 * 64)()
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0 or not answer[0] & _STATX_DIOALIGN:
        return 4096, 4096
    return answer[0x98 // 4] or 4096, answer[0x9C // 4] or 4096


def uring_obstacle() -> str:
    return "the extension aio_ext._aio is not built; `pip install` of the project builds it"
