import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_helpers import fill, memory, open_files_under
from store_ram_disk import Fault, FaultPlan, RamDisk

from swapper import (
    PAGE_BYTES,
    Arena,
    StorageCorrupt,
    StorageFull,
    StorageIOError,
    StoreExists,
    StoreLocked,
    StoreMissing,
    StoreMisuse,
    StoreUnsafe,
    create_store,
    open_store,
    remove_store,
)

SIZES = [PAGE_BYTES, 3 * PAGE_BYTES]


@pytest.fixture
def lease():
    arena = Arena(4 * PAGE_BYTES)
    yield arena.lease(3 * PAGE_BYTES)
    arena.close()


def put(store, index: int, value: int, lease) -> None:
    fill(lease, value)
    store.write(store.extents[index], lease.address, store.extents[index].nbytes).wait()


def get(store, index: int, lease) -> set[int]:
    extent = store.extents[index]
    fill(lease, 0xEE)
    store.read(extent, lease.address, extent.nbytes).wait()
    return set(memory(lease)[: extent.nbytes])


def test_what_was_committed_comes_back_and_what_was_not_does_not(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, metadata=b"empty") as store:
        assert (store.generation, store.metadata) == (0, b"empty")
        put(store, 0, 1, lease)
        put(store, 1, 1, lease)
        assert store.commit(b"step 1") == 1
        put(store, 0, 2, lease)
        assert get(store, 0, lease) == {2}
    with open_store([tmp_path], "run") as store:
        assert (store.generation, store.metadata, store.generations) == (1, b"step 1", (1,))
        assert get(store, 0, lease) == get(store, 1, lease) == {1}


def test_an_extent_that_was_not_rewritten_stays_through_many_commits(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES) as store:
        put(store, 1, 9, lease)
        for step in range(1, 6):
            put(store, 0, step, lease)
            store.commit(b"%d" % step)
    with open_store([tmp_path], "run") as store:
        assert store.generation == 5
        assert get(store, 0, lease) == {5} and get(store, 1, lease) == {9}
    assert sorted(entry.name for entry in (tmp_path / "run.store").iterdir()) == [
        f"committed.{5:016x}",
        "data.0",
        f"generation.{5:016x}",
        "owner",
    ]


def test_a_retained_generation_stays_and_can_be_gone_back_to(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, retained_max=1) as store:
        for step in (1, 2, 3):
            put(store, 0, step, lease)
            store.commit(b"%d" % step)
            if step == 1:
                assert store.retain() == store.retain() == 1
        assert store.generations == (1, 3)
        with pytest.raises(StorageFull, match=r"room for 1 retained generations, and holds \[1\]"):
            store.retain()
    with open_store([tmp_path], "run", generation=1) as store:
        assert store.metadata == b"1" and get(store, 0, lease) == {1}
        put(store, 0, 4, lease)
        assert store.commit(b"another way") == 4
        assert store.generations == (1, 4)
        store.release(1)
        assert store.generations == (4,)
        with pytest.raises(StoreMissing, match="generation 1 is not retained"):
            store.release(1)
    with pytest.raises(StoreMissing, match=r"no generation 1; there are \[4\]"):
        open_store([tmp_path], "run", generation=1)


def test_several_paths_hold_one_store(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    arena = Arena(10 << 20)
    lease = arena.lease(10 << 20)
    with create_store(paths, "run", [9 << 20, PAGE_BYTES], retained_max=1) as store:
        for step in (1, 2, 3, 4):
            put(store, 0, step, lease)
            put(store, 1, step, lease)
            store.commit()
            if step == 2:
                store.retain()
        put(store, 0, 99, lease)
    for generation in (2, 4):
        with open_store(paths, "run", generation=generation) as store:
            assert get(store, 0, lease) == get(store, 1, lease) == {generation}
    with pytest.raises(StoreMissing, match=r"data\.0; are the paths in the order"):
        open_store(paths[::-1], "run")
    with pytest.raises(StoreMisuse, match="lies on 2 paths, 1 were given"):
        open_store(paths[:1], "run")
    arena.close()


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path):
    with create_store([tmp_path], "run", SIZES):
        owner = rf"run.store is in use by process {os.getpid()} on \S+, which opened it at \d{{4}}-"
        with pytest.raises(StoreLocked, match=owner):
            open_store([tmp_path], "run")
        with pytest.raises(StoreLocked, match=owner):
            create_store([tmp_path], "run", SIZES)
        create_store([tmp_path], "other", SIZES).close()
    with pytest.raises(StoreExists, match="is there already"):
        create_store([tmp_path], "run", SIZES)


def test_a_forked_child_neither_keeps_nor_uses_the_store(tmp_path: Path, lease):
    store = create_store([tmp_path], "run", SIZES)
    child = os.fork()
    if child == 0:
        try:
            store.commit()
        except StoreMisuse:
            os._exit(len(open_files_under(tmp_path)))
        os._exit(100)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    put(store, 0, 1, lease)
    store.commit()
    store.close()


def test_a_store_is_read_and_removed_on_a_full_disk_by_an_owner_without_a_name(tmp_path: Path, lease, monkeypatch):
    with create_store([tmp_path], "run", SIZES) as store:
        put(store, 0, 1, lease)
        put(store, 1, 1, lease)
        store.commit(b"step 1")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("swapper.owner.os.write", full)
    with open_store([tmp_path], "run", reserved=()) as store:
        assert (store.metadata, get(store, 0, lease)) == (b"step 1", {1})
        assert not list((tmp_path / "run.store").glob("owner*"))
        with pytest.raises(StoreLocked, match=r"run.store is in use by another process"):
            open_store([tmp_path], "run")
    remove_store([tmp_path], "run")
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_owner_is_gone(tmp_path: Path):
    code = f"import swapper, sys; s = swapper.create_store([{str(tmp_path)!r}], 'run', [4096]); s.commit(b'1')\n"
    code += "print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with pytest.raises(StoreLocked, match=rf"process {child.pid} on"):
        open_store([tmp_path], "run")
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with open_store([tmp_path], "run") as store:
        assert store.metadata == b"1"


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_everything_is_private_under_any_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        create_store([tmp_path], "run", SIZES).close()
        with open_store([tmp_path], "run") as store:
            store.commit()
    finally:
        os.umask(before)
    folder = tmp_path / "run.store"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()} == {0o600}


def test_what_cannot_be_trusted_is_refused(tmp_path: Path):
    create_store([tmp_path], "run", SIZES).close()
    folder = tmp_path / "run.store"
    (tmp_path / "link.store").symlink_to(folder)
    with pytest.raises(StoreUnsafe, match=r"link\.store cannot be opened"):
        open_store([tmp_path], "link")
    folder.chmod(0o770)
    with pytest.raises(StoreUnsafe, match="mode 770"):
        open_store([tmp_path], "run")
    folder.chmod(0o700)
    (folder / "data.0").rename(tmp_path / "elsewhere")
    (folder / "data.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnsafe, match=r"data\.0 of .* cannot be opened"):
        open_store([tmp_path], "run")
    (folder / "data.0").unlink()
    (folder / "data.0").mkdir()
    with pytest.raises(StoreUnsafe, match=r"data\.0 of .* cannot be opened"):
        open_store([tmp_path], "run")
    for name in ("", "../run", ".hidden", "a/b", "x" * 65):
        with pytest.raises(StoreMisuse, match="cannot be the name of a store"):
            open_store([tmp_path], name)
    with pytest.raises(StoreMissing, match="there is no store"):
        open_store([tmp_path], "nothing")


def test_a_creation_that_was_interrupted_is_no_store_and_is_made_anew(tmp_path: Path):
    folder = tmp_path / "run.store"
    create_store([tmp_path], "run", SIZES).close()
    (folder / f"generation.{0:016x}").rename(folder / "new")
    with pytest.raises(StoreMissing, match="never finished"):
        open_store([tmp_path], "run")
    create_store([tmp_path], "run", [PAGE_BYTES]).close()
    with open_store([tmp_path], "run") as store:
        assert len(store.extents) == 1
    assert not (folder / "new").exists()


def test_a_store_that_was_cut_short_or_damaged_is_refused(tmp_path: Path):
    with create_store([tmp_path], "run", SIZES) as store:
        store.commit()
    folder = tmp_path / "run.store"
    manifest = folder / f"generation.{1:016x}"
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-1])
    with pytest.raises(StorageCorrupt, match=r"manifest generation\.0+1 .*is damaged: it should have"):
        open_store([tmp_path], "run")
    manifest.write_bytes(good)
    manifest.rename(folder / f"generation.{2:016x}")
    with pytest.raises(StorageCorrupt, match="that of another store or generation"):
        open_store([tmp_path], "run")
    (folder / f"generation.{2:016x}").rename(manifest)
    os.truncate(folder / "data.0", PAGE_BYTES)
    with pytest.raises(StorageCorrupt, match=r"its data has 4,096 bytes .*, 32,768 bytes .* were reserved"):
        open_store([tmp_path], "run")


def test_nothing_can_be_committed_over_a_failed_write_until_it_is_repeated(ram, lease):
    plan = FaultPlan(Fault("error", 1, ("write",)), Fault("error", 2, ("write",)))  # the write, and its second try
    store = ram(plan)
    put(store, 0, 1, lease)
    with pytest.raises(StorageIOError, match=r"write of extent 1, generation 1 on ram failed: .*Input/output error"):
        put(store, 1, 1, lease)
    with pytest.raises(StorageIOError, match="write of extent 1"):
        store.commit()
    put(store, 1, 2, lease)
    assert store.commit() == 1


@pytest.mark.parametrize("operation", ["sync", "rename", "sync_names"])
def test_after_a_failure_that_leaves_doubt_the_store_serves_nothing_more(ram, lease, operation):
    plan = FaultPlan()
    store = ram(plan)
    put(store, 0, 1, lease)
    plan.faults.append(Fault("error", plan.counts.get(operation, 0), (operation,)))
    with pytest.raises(StorageIOError) as first:
        store.commit()
    for call in (store.commit, lambda: put(store, 0, 2, lease), lambda: get(store, 0, lease), store.retain):
        with pytest.raises(StorageIOError) as again:
            call()
        assert again.value is first.value


@pytest.mark.parametrize("moment", ["rename", "sync"])
def test_ctrl_c_in_the_middle_of_a_commit_leaves_a_store_that_does_no_harm(ram, lease, monkeypatch, moment):
    """What was published must never be written over, though the program may not know that it was."""
    store = ram(FaultPlan())
    put(store, 0, 1, lease)
    change = getattr(store._directory, moment)

    def interrupted(*names: str) -> None:
        change(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(store._directory, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.commit()
    with pytest.raises(StorageIOError, match=r"publication of generation\.0+1 was interrupted"):
        put(store, 0, 2, lease)


def test_ctrl_c_in_the_middle_of_a_write_is_noticed_by_commit(ram, lease, monkeypatch):
    store = ram(FaultPlan())
    put(store, 0, 1, lease)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store._transfers, "write", _interrupt)
        put(store, 1, 1, lease)
    with pytest.raises(StorageIOError, match="write of extent 1 was interrupted"):
        store.commit()
    put(store, 1, 2, lease)
    assert store.commit() == 1 and get(store, 1, lease) == {2}


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_read_that_went_wrong_once_is_tried_again_and_twice_is_an_error(ram, lease):
    for kind in ("error", "flip", "misdirected"):
        plan = FaultPlan(Fault(kind, 0, ("read",)), seed=3)
        store = ram(plan)
        put(store, 1, 7, lease)
        put(store, 0, 8, lease)
        assert get(store, 1, lease) == {7}
        assert store.num_second_reads == 1
        plan.faults.append(Fault(kind, plan.counts["read"], ("read",), for_good=True))
        with pytest.raises(StorageIOError if kind == "error" else StorageCorrupt):
            get(store, 1, lease)


def test_a_ticket_is_done_only_when_the_device_says_so(ram, lease):
    plan = FaultPlan(Fault("delay", 0, ("write",)))
    store = ram(plan)
    extent = store.extents[0]
    ticket = store.write(extent, lease.address, extent.nbytes)
    assert not ticket.done()
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    plan.release()
    waiter.join(30)
    assert not waiter.is_alive() and ticket.done()


@pytest.fixture
def ram():
    """Makes a store on a disk in memory, whose plan strikes after its creation."""
    from store_ram_disk import RamDevice, RamDirectory

    from swapper.manifest import Entry, Manifest
    from swapper.opening import begin

    def make(plan: FaultPlan):
        disk = RamDisk(bytearray(8 * PAGE_BYTES))
        empty = Manifest(b"s" * 16, 0, 2, 1, tuple(Entry(size, 0, 0, 0) for size in SIZES))
        directory, device = RamDirectory(disk), RamDevice(disk)
        store = begin(directory, lambda _: device, empty, "ram")
        directory._plan = device._plan = plan
        return store

    return make


def test_the_names_of_a_new_store_are_on_the_disk_on_each_of_its_paths(tmp_path: Path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    synced, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(os.fstat(descriptor).st_ino), real(descriptor))[1])
    with create_store(paths, "run", [4096]):
        pass
    assert {folder.stat().st_ino for path in paths for folder in (path, path / "run.store")} <= synced
