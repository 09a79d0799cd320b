"""What the native core gives besides its queue, in Python alone, for places where the extension cannot be built."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress

_HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_DONTDUMP, _MADV_POPULATE_WRITE = 10, 14, 15, 16, 23
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if got is None or got == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping memory: {os.strerror(number)}")
    return int(got)


def _unmap(owner: int, address: int, nbytes: int) -> None:
    # In a forked child the pages are gone, and others may have taken their place.
    if owner == os.getpid():
        _libc.munmap(address, nbytes)


class _Mapping:
    """Addresses between two guard pages, unmapped when the last reference goes."""

    def __init__(self, nbytes: int) -> None:
        if not 0 < nbytes <= 1 << 46:
            raise ValueError("nbytes must be in [1, 2^46]")
        self.nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        reserved_bytes = self.nbytes + 2 * _HUGE_PAGE_BYTES
        reserved = _map(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.address = -(-(reserved + mmap.PAGESIZE) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        weakref.finalize(self, _unmap, os.getpid(), reserved, reserved_bytes).atexit = False


_live: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()


class Lease:
    """One user of a mapping."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping: _Mapping | None = mapping
        _live[mapping.address] = mapping

    def _open(self) -> _Mapping:
        if self._mapping is None:
            raise ValueError("the memory is closed")
        return self._mapping

    @property
    def address(self) -> int:
        return self._open().address

    @property
    def nbytes(self) -> int:
        return self._open().nbytes

    def populate(self) -> None:
        mapping = self._open()
        if _libc.madvise(mapping.address, mapping.nbytes, _MADV_POPULATE_WRITE) != 0:
            for address in range(mapping.address, mapping.address + mapping.nbytes, mmap.PAGESIZE):
                byte = ctypes.c_uint8.from_address(address)
                byte.value = byte.value

    def close(self) -> None:
        self._mapping = None


def lease_containing(address: int, nbytes: int) -> Lease | None:
    for mapping in list(_live.values()):
        if mapping.address <= address and address + nbytes <= mapping.address + mapping.nbytes:
            return Lease(mapping)
    return None


def anonymous_memory(nbytes: int, huge_pages: bool) -> Lease:
    mapping = _Mapping(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    _map(mapping.address, mapping.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags)
    for advice in (_MADV_HUGEPAGE if huge_pages else _MADV_NOHUGEPAGE, _MADV_DONTFORK, _MADV_DONTDUMP):
        _libc.madvise(mapping.address, mapping.nbytes, advice)
    return Lease(mapping)


def pattern_memory(nbytes: int, value: int) -> Lease:
    mapping = _Mapping(nbytes)
    fd = os.memfd_create("aio_ext pattern")
    try:
        os.pwrite(fd, value.to_bytes(2, "little") * (_HUGE_PAGE_BYTES // 2), 0)
        for at in range(0, mapping.nbytes, _HUGE_PAGE_BYTES):
            _map(mapping.address + at, _HUGE_PAGE_BYTES, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
    finally:
        os.close(fd)
    return Lease(mapping)


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
        # What is posted from here on makes it readable again.
        return [self._tokens.popleft() for _ in range(len(self._tokens))]


def direct_io_alignment(fd: int) -> tuple[int, int]:
    answer = (ctypes.c_uint32 * 64)()
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0 or not answer[0] & _STATX_DIOALIGN:
        return 4096, 4096
    return answer[0x98 // 4] or 4096, answer[0x9C // 4] or 4096


def uring_obstacle() -> str:
    return "the extension aio_ext._aio is not built; `pip install` of the project builds it"
