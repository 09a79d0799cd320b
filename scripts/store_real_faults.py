#!/usr/bin/env python3
"""Real faults of real file systems: full, limited, read-only, removed, failing, slow. What does the store say and keep?

Most need root, loop devices and `mkfs.ext4`; what a machine does not have is skipped, with the reason. Each case runs
on a file system of its own that is gone at the end. Expected: the documented error, and the last generation whole.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from store_model import Difference, run

from swapper import (
    Arena,
    DurableStore,
    OffloadError,
    StorageFull,
    StorageIOError,
    StorageTimeout,
    StoreUnsafe,
    create_store,
    open_store,
)

MIB = 1 << 20
EXTENT_BYTES = 8 * MIB


class Skipped(Exception):
    """This machine lacks the means."""


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for backend in ("io_uring", "threads"):
        for case in (full, limited, read_only, remounted_read_only, removed, failing, slow, killed_in_flight):
            name = f"{case.__name__} ({backend})"
            try:
                results[name] = case(backend)
            except Skipped as reason:
                results[name] = f"skipped: {reason}"
    return results


def full(backend: str) -> str:
    """The disk under the file system has no room where the file system believes that it has."""
    with _mounted(image_bytes=400 * MIB, room_bytes=64 * MIB) as path, _store(path, backend, 5) as store:
        before = _commit_something(store)
        error = _error_of(lambda: _write_all(store, 2), StorageFull)
        store.close()
        return f"{error}; {_survivor(path, before)}"


def limited(backend: str) -> str:
    """RLIMIT_FSIZE, in a process of its own, below the size of the file."""
    with tempfile.TemporaryDirectory() as folder:
        return _in_child(lambda: _limited(Path(folder), backend))


def _limited(path: Path, backend: str) -> str:
    with _store(path, backend, 2) as store:
        before = _commit_something(store)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (EXTENT_BYTES, EXTENT_BYTES))
        error = _error_of(lambda: _write_all(store, 2), StorageIOError)
        store.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (EXTENT_BYTES, EXTENT_BYTES))
        return f"{error}; {_survivor(path, before)}"


def read_only(backend: str) -> str:
    """At the start."""
    with _mounted(image_bytes=100 * MIB) as path:
        _command("mount", "-o", "remount,ro", path)
        named = _error_of(lambda: create_store([path], "s", [EXTENT_BYTES], backend=backend), StoreUnsafe)
        nameless = _error_of(lambda: create_store([path], None, [EXTENT_BYTES], backend=backend), StoreUnsafe)
        return f"with a name: {named}; without one: {nameless}"


def remounted_read_only(backend: str) -> str:
    """In the middle: an error that the file system is told of makes it read-only."""
    with _mounted(image_bytes=200 * MIB) as path, _store(path, backend, 2) as store:
        before = _commit_something(store)
        _write_all(store, 2)
        loop = _command("findmnt", "-n", "-o", "SOURCE", "--target", path)
        _command("mount", "-o", "remount,abort", path)
        error = _error_of(lambda: store.commit(b"2"), StorageIOError)
        store.close()
        _command("umount", path)
        _command("mount", loop, path)
        return f"{error}; {_survivor(path, before)}"


def removed(backend: str) -> str:
    """The directory of a store that is open is removed."""
    with tempfile.TemporaryDirectory() as folder, _store(Path(folder), backend, 2) as store:
        _commit_something(store)
        shutil.rmtree(Path(folder) / "s.store")
        with create_store([folder], None, [EXTENT_BYTES], backend=backend) as nameless:
            _write_all(nameless, 3)
            _check(nameless, 3)
        _check(store, 1)
        _write_all(store, 2)
        return f"{_error_of(lambda: store.commit(b'2'), StorageIOError)}; a store without a name is not affected"


def failing(backend: str) -> str:
    """The backing file of the device is cut off: reads of what lay there fail with EIO."""
    with _mounted(image_bytes=200 * MIB) as path, _store(path, backend, 4) as store:
        _commit_something(store)
        image = path.parent / "room" / "image"
        os.truncate(image, 12 * MIB)
        error = _error_of(lambda: _check(store, 1), StorageIOError)
        os.truncate(image, 200 * MIB)
        return error


def slow(backend: str) -> str:
    """A device of 8 MiB/s, by the block controller: a deadline is kept, and the transfer comes in later."""
    with _mounted(image_bytes=200 * MIB) as path, _store(path, backend, 2) as store, _throttled(path, 8 * MIB):
        arena = Arena(EXTENT_BYTES)
        lease = arena.lease(EXTENT_BYTES)
        start = time.monotonic()
        ticket = store.write(store.extents[0], lease.address, EXTENT_BYTES)
        error = _error_of(lambda: ticket.wait(0.2), StorageTimeout)
        ticket.wait(60)
        seconds = time.monotonic() - start
        store.commit(b"1")
        return f"{error}; over after {seconds:.1f} s, and committed"


def killed_in_flight(backend: str) -> str:
    """An owner is killed with a write of one second in flight: who gets the lock sees nothing written after that."""
    with _mounted(image_bytes=200 * MIB) as path, _throttled(path, 8 * MIB):
        with _store(path, backend, 2) as store:
            store.commit(b"1")
        child = os.fork()
        if child == 0:
            _write_and_die(path, backend)
        start = time.monotonic()
        _, status = os.waitpid(child, 0)
        dead = time.monotonic() - start
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise Difference(f"the owner was not killed: status {status}")
        with open_store([path], "s", backend="threads"):
            owned = time.monotonic() - start
            before = _sectors_written(path)
            time.sleep(2)
            if _sectors_written(path) != before:
                raise Difference("something was written after the lock was had")
            return f"dead after {dead:.2f} s, its lock had after {owned:.2f} s, nothing written after that"


def _write_and_die(path: Path, backend: str) -> None:
    try:
        arena = Arena(EXTENT_BYTES)
        store = open_store([path], "s", backend=backend)
        with contextlib.suppress(StorageTimeout):
            store.write(store.extents[0], arena.lease(EXTENT_BYTES).address, EXTENT_BYTES).wait(0.3)
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(2)


def _sectors_written(path: Path) -> int:
    number = os.stat(path).st_dev  # noqa: PTH116 - beside os.major
    return int(Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()[6])


def _store(path: Path, backend: str, num_extents: int) -> DurableStore:
    try:
        return create_store([path], "s", [EXTENT_BYTES] * num_extents, backend=backend)
    except OffloadError:
        raise
    except OSError as error:
        raise Skipped(str(error)) from None


def _commit_something(store: DurableStore) -> int:
    _write_all(store, 1)
    return store.commit(b"1")


def _write_all(store: DurableStore, value: int) -> None:
    arena = Arena(EXTENT_BYTES)
    lease = arena.lease(EXTENT_BYTES)
    for extent in store.extents:
        ctypes.memset(lease.address, value, EXTENT_BYTES)
        store.write(extent, lease.address, EXTENT_BYTES).wait(60)


def _check(store: DurableStore, value: int) -> None:
    arena = Arena(EXTENT_BYTES)
    lease = arena.lease(EXTENT_BYTES)
    for extent in store.extents:
        store.read(extent, lease.address, EXTENT_BYTES).wait(60)
        if ctypes.string_at(lease.address, EXTENT_BYTES) != bytes([value]) * EXTENT_BYTES:
            raise Difference(f"extent {extent.index} has other bytes")


def _survivor(path: Path, generation: int) -> str:
    with open_store([path], "s") as store:
        if store.generation != generation:
            raise Difference(f"generation {store.generation}, not {generation}")
        _check(store, 1)
    return f"generation {generation} is whole"


def _error_of(call: Callable[[], object], kind: type[OffloadError]) -> str:
    """The documented error, by its name and the system's. Raises ``Difference`` for none or any other."""
    try:
        call()
    except kind as error:
        text = str(error).split("\n")[0]
        number = text[text.index("[Errno") :].split(" at offset")[0].rstrip(".") if "[Errno" in text else text
        return f"{type(error).__name__}: {number}"
    except OffloadError as error:
        raise Difference(f"{kind.__name__} was expected, not {type(error).__name__}: {error}") from error
    raise Difference(f"{kind.__name__} was expected, and nothing happened")


def _in_child(call: Callable[[], str]) -> str:
    """The result of ``call`` in a forked process, whose limits end with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, call().encode())
        except BaseException as error:
            os.write(writing, f"!{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    text = os.read(reading, 1 << 16).decode()
    os.close(reading)
    os.waitpid(child, 0)
    if text.startswith("!Skipped"):
        raise Skipped(text)
    if text.startswith("!") or not text:
        raise Difference(f"in the child: {text[1:]}")
    return text


def _command(*words: object) -> str:
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Skipped(f"no {words[0]}") from None
    except subprocess.CalledProcessError as error:
        raise Skipped(f"{words[0]}: {error.stderr.strip()}") from None
    return done.stdout.strip()


@contextlib.contextmanager
def _mounted(image_bytes: int, room_bytes: int | None = None) -> Iterator[Path]:
    """An ext4 file system on a loop device over a tmpfs that has room for ``room_bytes`` only."""
    if os.geteuid() != 0:
        raise Skipped("needs root")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        room, path = Path(folder) / "room", Path(folder) / "path"
        room.mkdir()
        path.mkdir()
        _command("mount", "-t", "tmpfs", "-o", f"size={room_bytes or 2 * image_bytes}", "tmpfs", room)
        closing.callback(_command, "umount", "--lazy", room)
        with (room / "image").open("wb") as image:
            image.truncate(image_bytes)
        _command("mkfs.ext4", "-q", "-O", "^has_journal", room / "image")
        loop = _command("losetup", "--find", "--show", room / "image")
        closing.callback(_command, "losetup", "--detach", loop)
        _command("mount", loop, path)
        closing.callback(_command, "umount", "--lazy", path)
        yield path


@contextlib.contextmanager
def _throttled(path: Path, bytes_per_s: int) -> Iterator[None]:
    """This process in a group whose writes to the device of ``path`` are limited."""
    number = os.stat(path).st_dev  # noqa: PTH116 - beside os.major
    group = Path("/sys/fs/cgroup/blkio/store-faults")
    if not group.parent.exists():
        raise Skipped("no block controller (cgroup v1)")
    group.mkdir()
    try:
        rule = f"{os.major(number)}:{os.minor(number)} {bytes_per_s}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


if __name__ == "__main__":
    run(__doc__, campaign)
