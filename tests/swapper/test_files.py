"""Files take their space as the system lets them."""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from swapper import PAGE_BYTES, Spool, StorageFull, StorageIOError, create_store, let_go
from swapper.files import open_direct, reserve_ranges


def test_where_the_file_system_cannot_take_space_it_is_taken_through_the_page_cache(tmp_path: Path, monkeypatch):
    """The C library writes to each block there, and direct I/O refuses that with EINVAL."""
    take = os.posix_fallocate

    def in_the_c_library(descriptor: int, offset: int, nbytes: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        take(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", in_the_c_library)
    descriptor = open_direct(tmp_path / "file", os.O_CREAT)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    reserve_ranges(descriptor, [(PAGE_BYTES, PAGE_BYTES)])
    assert os.fstat(descriptor).st_size == 2 * PAGE_BYTES
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) == flags, "transfers go past the page cache again"
    os.close(descriptor)
    create_store([tmp_path], "s", [PAGE_BYTES]).close()


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StorageIOError), (errno.EDQUOT, StorageFull)])
def test_a_device_that_fails_when_space_is_taken_is_not_full(tmp_path: Path, monkeypatch, number: int, kind: type):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        create_store([tmp_path], "s", [PAGE_BYTES])


def test_pages_that_the_process_has_locked_stay_when_they_are_let_go(tmp_path: Path):
    memory = Spool(tmp_path).memory(PAGE_BYTES)
    memory[:4] = b"kept"
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE_BYTES)):
        pytest.skip("this process may lock no memory")
    with pytest.raises(OSError, match="Invalid argument"):
        memory.madvise(mmap.MADV_DONTNEED)
    let_go(memory)
    assert memory[:4] == b"kept"
