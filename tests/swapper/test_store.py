import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swapper import (
    PAGE_BYTES,
    Arena,
    OffloadError,
    StorageFull,
    Store,
    StoreLocked,
    StoreUnsafe,
)

BACKENDS = ["io_uring", "threads"]


def fill(lease, value: int) -> None:
    memory(lease)[:] = bytes([value]) * lease.nbytes


def memory(lease) -> memoryview:
    import ctypes

    return memoryview((ctypes.c_char * lease.nbytes).from_address(lease.address)).cast("B")


@pytest.mark.parametrize("backend", BACKENDS)
def test_extents_keep_what_was_written_and_do_not_touch_each_other(tmp_path: Path, backend):
    sizes = [PAGE_BYTES, 5 << 20, 3 * PAGE_BYTES, 100]
    arena = Arena(6 << 20)
    with_room = arena.lease(5 << 20)
    store = Store([tmp_path], sizes, backend=backend)
    store.register(arena)
    assert [extent.nbytes for extent in store.extents] == [PAGE_BYTES, 5 << 20, 3 * PAGE_BYTES, PAGE_BYTES]
    for number, extent in enumerate(store.extents):
        fill(with_room, number + 1)
        store.write(extent, with_room.address, extent.nbytes).wait()
    for number, extent in enumerate(store.extents):
        fill(with_room, 0)
        store.read(extent, with_room.address, extent.nbytes).wait()
        assert set(memory(with_room)[: extent.nbytes]) == {number + 1}
    store.read(store.extents[2], with_room.address, PAGE_BYTES, offset=PAGE_BYTES).wait()
    assert memory(with_room)[0] == 3
    assert store.statistics().write.bytes == sum(extent.nbytes for extent in store.extents)
    store.close()
    arena.close()


def test_several_paths_carry_equal_shares(tmp_path: Path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    store = Store(paths, [1 << 20] * 9)
    assert sorted(extent.path_index for extent in store.extents) == [0] * 3 + [1] * 3 + [2] * 3
    store.close()


def test_nothing_has_a_name_and_the_file_is_private(tmp_path: Path):
    mask = os.umask(0)
    try:
        store = Store([tmp_path], [1 << 20])
    finally:
        os.umask(mask)
    assert list(tmp_path.iterdir()) == []
    descriptors = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    ours = [fd.stat() for fd in descriptors if str(fd.readlink()).startswith(str(tmp_path))]
    files = [info for info in ours if stat.S_ISREG(info.st_mode)]
    assert files and all(stat.S_IMODE(info.st_mode) == 0o600 and info.st_nlink == 0 for info in files)
    store.close()


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path):
    store = Store([tmp_path], [PAGE_BYTES])
    with pytest.raises(StoreLocked, match=rf"in use by process {os.getpid()}"):
        Store([tmp_path], [PAGE_BYTES])
    store.close()
    Store([tmp_path], [PAGE_BYTES]).close()


def test_a_killed_owner_leaves_nothing(tmp_path: Path):
    code = (
        "import sys, swapper\n"
        f"store = swapper.Store([{str(tmp_path)!r}], [64 << 20])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with pytest.raises(StoreLocked, match=rf"process {child.pid}\b"):
        Store([tmp_path], [PAGE_BYTES])
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(tmp_path.iterdir()) == []
    Store([tmp_path], [PAGE_BYTES]).close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    store = Store([tmp_path], [PAGE_BYTES])
    read_end, write_end = os.pipe()
    started_read, started_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(started_write, b"x")
        os.read(read_end, 1)
        os._exit(0)
    os.read(started_read, 1)
    try:
        store.close()
        Store([tmp_path], [PAGE_BYTES]).close()
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        for descriptor in (read_end, write_end, started_read, started_write):
            os.close(descriptor)


def test_paths_that_cannot_hold_a_store_are_refused(tmp_path: Path):
    with pytest.raises(StoreUnsafe, match="does not exist"):
        Store([tmp_path / "missing"], [PAGE_BYTES])
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnsafe, match="not a directory"):
        Store([tmp_path / "file"], [PAGE_BYTES])
    with pytest.raises(StorageFull, match="are needed"):
        Store([tmp_path], [1 << 60])
    with pytest.raises(StoreUnsafe, match="cannot create a file"):
        Store(["/proc"], [PAGE_BYTES])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]
    Store([tmp_path], [PAGE_BYTES]).close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_write_is_an_error_with_a_name(tmp_path: Path, backend):
    code = f"""
import resource, swapper, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = swapper.Store([{str(tmp_path)!r}], [8 << 20], backend={backend!r})
arena = swapper.Arena(8 << 20)
lease = arena.lease(8 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
ticket = store.write(store.extents[0], lease.address, 8 << 20)
try:
    ticket.wait(30)
except swapper.StorageIOError as error:
    print(error)
store.close()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "write of 8388608 bytes failed" in run.stdout and "File too large" in run.stdout, run.stdout + run.stderr


def test_the_arena_gives_exactly_what_it_has():
    arena = Arena(10 * PAGE_BYTES)
    leases = [arena.lease(PAGE_BYTES + 1) for _ in range(5)]
    assert all(lease.address % PAGE_BYTES == 0 and lease.nbytes == 2 * PAGE_BYTES for lease in leases)
    assert len({lease.address for lease in leases}) == 5
    with pytest.raises(OffloadError, match="used up"):
        arena.lease(1)
    arena.close()
