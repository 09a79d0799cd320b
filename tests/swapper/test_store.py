"""What any store does, tried on stores without a name."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import fill, memory, open_files_under

from swapper import (
    PAGE_BYTES,
    Arena,
    OffloadError,
    StorageCorrupt,
    StorageFull,
    StoreMisuse,
    StoreUnsafe,
    create_store,
)

BACKENDS = ["io_uring", "threads"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_extents_keep_what_was_written_and_do_not_touch_each_other(tmp_path: Path, backend):
    sizes = [PAGE_BYTES, 5 << 20, 3 * PAGE_BYTES, 100]
    arena = Arena(6 << 20)
    with_room = arena.lease(5 << 20)
    store = create_store([tmp_path], None, sizes, backend=backend)
    store.register(arena)
    assert [extent.nbytes for extent in store.extents] == [PAGE_BYTES, 5 << 20, 3 * PAGE_BYTES, PAGE_BYTES]
    for number, extent in enumerate(store.extents):
        fill(with_room, number + 1)
        store.write(extent, with_room.address, extent.nbytes).wait()
    for number, extent in enumerate(store.extents):
        fill(with_room, 0)
        store.read(extent, with_room.address, extent.nbytes).wait()
        assert set(memory(with_room)[: extent.nbytes]) == {number + 1}
    assert store.statistics().write.bytes == sum(extent.nbytes for extent in store.extents)
    store.close()
    arena.close()


def test_one_extent_is_spread_over_several_paths(tmp_path: Path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    arena = Arena(24 << 20)
    lease = arena.lease(24 << 20)
    store = create_store(paths, None, [PAGE_BYTES, 24 << 20])
    expected = bytes(range(256)) * (lease.nbytes // 256)
    memory(lease)[:] = expected
    store.write(store.extents[1], lease.address, lease.nbytes).wait()
    fill(lease, 0)
    store.read(store.extents[1], lease.address, lease.nbytes).wait()
    assert memory(lease) == expected
    assert store.statistics().write.bytes == lease.nbytes
    written = [os.fstat(fd).st_size for fd in open_files_under(tmp_path)]
    assert len(written) == 2 and min(written) >= 12 << 20
    store.close()
    arena.close()


def test_nothing_has_a_name_and_the_file_is_private(tmp_path: Path):
    mask = os.umask(0)
    try:
        store = create_store([tmp_path], None, [1 << 20])
    finally:
        os.umask(mask)
    assert list(tmp_path.iterdir()) == []
    files = [os.fstat(descriptor) for descriptor in open_files_under(tmp_path)]
    assert files and all(stat.S_IMODE(info.st_mode) == 0o600 and info.st_nlink == 0 for info in files)
    store.close()


def test_any_number_of_stores_share_a_path(tmp_path: Path):
    arena = Arena(2 * PAGE_BYTES)
    stores = [create_store([tmp_path], None, [PAGE_BYTES]) for _ in range(3)]
    leases = [arena.lease(PAGE_BYTES), arena.lease(PAGE_BYTES)]
    for value, store in enumerate(stores):
        fill(leases[0], value)
        store.write(store.extents[0], leases[0].address, PAGE_BYTES).wait()
    for value, store in enumerate(stores):
        store.read(store.extents[0], leases[1].address, PAGE_BYTES).wait()
        assert memory(leases[1])[0] == value
        store.close()
    arena.close()


def test_a_killed_owner_leaves_nothing(tmp_path: Path):
    code = (
        "import sys, swapper\n"
        f"store = swapper.create_store([{str(tmp_path)!r}], None, [64 << 20])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_keeps_nothing_of_the_store_open(tmp_path: Path):
    store = create_store([tmp_path], None, [PAGE_BYTES])
    child = os.fork()
    if child == 0:
        os._exit(len(open_files_under(tmp_path)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(open_files_under(tmp_path)) == 1
    store.close()
    assert open_files_under(tmp_path) == []


def test_paths_that_cannot_hold_a_store_are_refused(tmp_path: Path):
    with pytest.raises(StoreUnsafe, match="does not exist"):
        create_store([tmp_path / "missing"], None, [PAGE_BYTES])
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnsafe, match="not a directory"):
        create_store([tmp_path / "file"], None, [PAGE_BYTES])
    with pytest.raises(StorageFull, match="are needed"):
        create_store([tmp_path], None, [1 << 60])
    with pytest.raises(StoreUnsafe, match=r"cannot (be opened|create a file)"):
        create_store(["/proc"], None, [PAGE_BYTES])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]
    create_store([tmp_path], None, [PAGE_BYTES]).close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_write_is_an_error_with_a_name(tmp_path: Path, backend):
    code = f"""
import resource, swapper, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = swapper.create_store([{str(tmp_path)!r}], None, [8 << 20], backend={backend!r})
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
    assert "write of extent 0, generation 1 on" in run.stdout and "File too large" in run.stdout, (
        run.stdout + run.stderr
    )


def test_wrong_bytes_are_never_returned(tmp_path: Path):
    """Whatever was changed, moved or left over on the disk: the read fails, and says which extent it was."""
    arena = Arena(4 * PAGE_BYTES)
    lease = arena.lease(4 * PAGE_BYTES)
    store = create_store([tmp_path], None, [4 * PAGE_BYTES] * 2)
    first, second = store.extents
    for value, extent in ((1, first), (2, second)):
        fill(lease, value)
        store.write(extent, lease.address, extent.nbytes).wait()
    [descriptor] = open_files_under(tmp_path)
    whole = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # without O_DIRECT
    good = os.pread(whole, 2 * first.nbytes, 0)

    def check(extent, data: bytes) -> None:
        os.pwrite(whole, data, 0)
        os.fsync(whole)
        with pytest.raises(StorageCorrupt, match=rf"extent {extent.index}.* checksum [0-9a-f]+, expected") as caught:
            store.read(extent, lease.address, extent.nbytes).wait()
        assert caught.value.seen != caught.value.expected

    check(first, good[:700] + bytes([good[700] ^ 4]) + good[701:])  # one bit
    check(second, good[: first.nbytes] * 2)  # the bytes of another extent, good as they are
    check(first, bytes(PAGE_BYTES) + good[PAGE_BYTES:])  # a page that was never written
    check(second, good[:-512] + bytes(512))  # a torn sector
    os.pwrite(whole, good, 0)
    store.read(first, lease.address, first.nbytes).wait()
    assert memory(lease)[0] == 1
    os.close(whole)
    store.close()
    arena.close()


def test_misuse_is_refused_before_anything_moves(tmp_path: Path):
    arena = Arena(2 * PAGE_BYTES)
    lease = arena.lease(2 * PAGE_BYTES)
    store = create_store([tmp_path], None, [PAGE_BYTES])
    [extent] = store.extents
    with pytest.raises(StoreMisuse, match="extent 0 was never written"):
        store.read(extent, lease.address, extent.nbytes)
    with pytest.raises(StoreMisuse, match="extent 0 has 4096 bytes, not 8192"):
        store.write(extent, lease.address, 2 * PAGE_BYTES)
    assert store.statistics().write.requests == store.statistics().read.requests == 0
    store.write(extent, lease.address, extent.nbytes).wait()
    store.close()
    for transfer in (store.read, store.write):
        with pytest.raises(StoreMisuse, match=r" is closed"):
            transfer(extent, lease.address, extent.nbytes)
    arena.close()


def test_tickets_can_be_awaited(tmp_path: Path):
    arena = Arena(1 << 20)
    lease = arena.lease(1 << 20)
    store = create_store([tmp_path], None, [1 << 20])
    [extent] = store.extents

    async def there_and_back() -> None:
        fill(lease, 7)
        await store.write(extent, lease.address, extent.nbytes)
        fill(lease, 0)
        await store.read(extent, lease.address, extent.nbytes)

    asyncio.run(there_and_back())
    assert set(memory(lease)) == {7}
    store.close()
    arena.close()


def test_the_arena_gives_exactly_what_it_has():
    arena = Arena(10 * PAGE_BYTES)
    leases = [arena.lease(PAGE_BYTES + 1) for _ in range(5)]
    assert all(lease.address % PAGE_BYTES == 0 and lease.nbytes == 2 * PAGE_BYTES for lease in leases)
    assert len({lease.address for lease in leases}) == 5
    with pytest.raises(OffloadError, match="used up"):
        arena.lease(1)
    arena.close()
