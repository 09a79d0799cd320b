#!/usr/bin/env python3
"""Fail every call that the store makes, one after the other, once and for good: the error must be the right one.

Two rounds. In memory: each operation of the device and of the directory, as the story below makes them. On a real
path: each system call of `swapper` itself. Always: only documented errors, and afterwards a store that opens at a
generation that was committed, with nothing left open or locked.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import gc
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from store_model import DISK_BYTES, SIZES, Difference, check_equal, content, make_store, put, reopen, run
from store_ram_disk import Fault, FaultPlan, Operation, RamDisk

import swapper.directory
import swapper.files
import swapper.folders
import swapper.owner
from swapper import (
    DurableStore,
    OffloadError,
    StorageError,
    StorageFull,
    StorageIOError,
    StoreExists,
    StoreMissing,
    StoreUnsafe,
    create_store,
    open_store,
)

Generations = dict[int, tuple[bytes, dict[int, bytes]]]

OPERATIONS: tuple[Operation, ...] = (
    "read", "write", "sync", "names", "load", "create", "sync_file", "rename", "remove", "sync_names",
)  # fmt: skip


def documented(number: int) -> tuple[type[OffloadError], ...]:
    """What a failure with this errno may end in."""
    return (StorageFull,) if number == errno.ENOSPC else (StorageIOError,)


class Story:
    """Create, write, commit, retain, release, reopen, read; what was begun and done is kept for the check."""

    def __init__(self, make: Callable[[], DurableStore], again: Callable[[], DurableStore]) -> None:
        self.generations: Generations = {0: (b"", {})}
        self.done = -1
        self._make = make
        self._again = again
        self._rng = random.Random(7)

    def tell(self) -> None:
        now: dict[int, bytes] = {}
        with contextlib.closing(self._make()) as store:
            self.done = 0
            for number in (1, 2, 3):
                self._fill_and_commit(store, now, number)
                if number == 1:
                    store.retain()
            store.release(1)
        with contextlib.closing(self._again()) as store:
            check_equal(store, now, "after reopening")
            self._fill_and_commit(store, now, 4)

    def _fill_and_commit(self, store: DurableStore, now: dict[int, bytes], number: int) -> None:
        for extent in store.extents[number - 1 :]:
            now[extent.index] = content(extent, self._rng)
            put(store, extent, now[extent.index])
        self.generations[number] = (b"step %d" % number, dict(now))
        store.commit(b"step %d" % number)
        self.done = number


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    counts = {"in_memory": 0, "silently_mended": 0, "on_a_path": 0, "call_sites": 0}
    _in_memory(counts)
    with tempfile.TemporaryDirectory() as folder:
        _on_a_path(Path(folder), counts, arguments.every)
    return counts


def _in_memory(counts: dict[str, int]) -> None:
    for operation in OPERATIONS:
        for number in (errno.EIO, errno.ENOSPC):
            for for_good in (False, True):
                for nth in range(10_000):
                    plan = FaultPlan(Fault("error", nth, (operation,), for_good, number))
                    disk = RamDisk(bytearray(DISK_BYTES))
                    story = Story(lambda d=disk, p=plan: make_store(d, p), lambda d=disk, p=plan: reopen(d, plan=p))
                    error = _error_of(story)
                    if not plan.struck:
                        break
                    counts["in_memory"] += 1
                    counts["silently_mended"] += error is None
                    _judge(error, documented(number), f"{operation} {nth}, errno {number}, for good: {for_good}")
                    _check_recovered(story, lambda d=disk: reopen(d))


def _error_of(story: Story) -> BaseException | None:
    try:
        story.tell()
    except OffloadError as error:
        return error
    except Difference:
        raise
    except Exception as error:
        raise Difference(f"an undocumented {type(error).__name__}: {error}") from error
    return None


def _judge(error: BaseException | None, allowed: tuple[type[OffloadError], ...], what: str) -> None:
    if error is not None and not isinstance(error, allowed):
        raise Difference(f"{what}: {type(error).__name__}: {error}")


def _check_recovered(story: Story, again: Callable[[], DurableStore]) -> None:
    try:
        store = again()
    except StoreMissing:
        if story.done >= 0:
            raise Difference(f"generation {story.done} is gone") from None
        return
    with store:
        if store.generation not in (story.done, story.done + 1, max(story.done, 0)):
            raise Difference(f"recovered generation {store.generation}, {story.done} was committed")
        metadata, expected = story.generations[store.generation]
        if store.metadata != metadata:
            raise Difference(f"generation {store.generation} has other metadata")
        check_equal(store, expected, f"generation {store.generation}")


# On a real path: a module of swapper sees a system module whose calls fail on request.


class _Calls:
    """Stands in for ``os`` or ``fcntl`` in one module, counts the calls and fails those it is told to."""

    def __init__(self, real: ModuleType, site: Site) -> None:
        self._real = real
        self._site = site

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value) or isinstance(value, type) or name in _HARMLESS:
            return value
        return lambda *args, **kwargs: self._site.call(name, value, *args, **kwargs)


_HARMLESS = {"close", "getpid", "geteuid", "urandom", "fspath", "strerror", "register_at_fork"}
"""Calls that cannot fail, and close, which must not be repeated."""


class Site:
    """Counts calls; those from ``nth`` on (or that one only) fail with ``number``."""

    def __init__(self, nth: int, for_good: bool, number: int) -> None:
        self.nth = nth
        self.for_good = for_good
        self.number = number
        self.count = 0
        self.struck: list[str] = []

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count - 1 == self.nth or (self.for_good and self.count - 1 > self.nth):
            self.struck.append(name)
            raise OSError(self.number, os.strerror(self.number))
        return real(*args, **kwargs)


@contextlib.contextmanager
def _failing(site: Site) -> Iterator[None]:
    modules = (swapper.files, swapper.directory, swapper.folders, swapper.owner)
    before = [(module, name) for module in modules for name in ("os", "fcntl") if hasattr(module, name)]
    try:
        for module, name in before:
            setattr(module, name, _Calls(os if name == "os" else fcntl, site))
        yield
    finally:
        for module, name in before:
            setattr(module, name, os if name == "os" else fcntl)


def _on_a_path(folder: Path, counts: dict[str, int], every: int) -> None:
    allowed = (StorageError, StoreUnsafe, StoreMissing, StoreExists)
    sites: set[str] = set()
    with create_store([folder], "first", SIZES) as store:  # the first write opens what the process keeps to its end
        put(store, store.extents[0], bytes(SIZES[0]))
    for number in (errno.EIO, errno.ENOSPC):
        for for_good in (False, True):
            for nth in range(0, 10_000, every):
                path = folder / f"{number}-{for_good}-{nth}"
                path.mkdir()
                open_before = _open_files()
                story = Story(
                    lambda p=path: create_store([p], "s", SIZES, retained_max=1), lambda p=path: open_store([p], "s")
                )
                site = Site(nth, for_good, number)
                with _failing(site):
                    error = _error_of(story)
                gc.collect()
                if not site.struck:
                    break
                sites.update(site.struck)
                counts["on_a_path"] += 1
                _judge(error, allowed, f"call {nth} ({site.struck[0]}), errno {number}, for good: {for_good}")
                if _open_files() != open_before:
                    raise Difference(f"call {nth} ({site.struck[0]}) leaves {_open_files() - open_before} files open")
                _check_recovered(story, lambda p=path: open_store([p], "s"))
    counts["call_sites"] = len(sites)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


if __name__ == "__main__":
    run(__doc__, campaign, every=1)
