"""For tests: a disk in memory, with everything that can go wrong with one.

``RamDisk`` holds what a real path would: the bytes of the data file, and small files by name. ``RamDevice`` and
``RamDirectory`` are the store's two views of it. A ``FaultPlan`` strikes the operations of both as they come.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aio_ext
from swapper.arena import Arena
from swapper.device import IO_TIMEOUT_S

Operation = Literal["read", "write", "sync", "names", "load", "create", "sync_file", "rename", "remove", "sync_names"]
Kind = Literal["error", "short", "torn", "lost", "misdirected", "flip", "delay"]

SECTOR_BYTES = 512


@dataclass
class RamDisk:
    """Content of the disk now. ``log`` receives every change, for a replay."""

    data: bytearray
    files: dict[str, bytes] = field(default_factory=dict)
    log: Callable[[tuple[Any, ...]], None] = lambda event: None


@dataclass
class Fault:
    """Fault that befalls the operation number ``nth`` (from 0) of those named; with ``for_good`` every later one as
    well.

    Told to the caller: ``error`` (nothing is done) and ``short`` (a part is done), with ``errno``. Not told: ``torn``
    (a part is done), ``lost`` (nothing is), ``misdirected`` (it is done in another place), ``flip`` (one bit is wrong).
    ``delay``: the operation is done, but said to be only after ``FaultPlan.release``.
    """

    kind: Kind
    nth: int = 0
    operations: tuple[Operation, ...] = ()
    for_good: bool = False
    errno: int = errno.EIO

    def strikes(self, operation: Operation, counts: dict[Operation, int]) -> bool:
        names = self.operations or tuple(counts)
        number = sum(counts.get(name, 0) for name in names) - 1
        return operation in names and (number == self.nth or (self.for_good and number > self.nth))


class FaultPlan:
    """Counts operations, and decides which go wrong and how. ``struck`` tells what did, in order."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.faults = list(faults)
        self.random = random.Random(seed)
        self.counts: dict[Operation, int] = {}
        self.struck: list[tuple[Operation, Kind]] = []
        self.released = threading.Event()

    def next(self, operation: Operation) -> Fault | None:
        """To be called once for each operation, before it is done."""
        self.counts[operation] = self.counts.get(operation, 0) + 1
        for fault in self.faults:
            if fault.strikes(operation, self.counts):
                self.struck.append((operation, fault.kind))
                return fault
        return None

    def release(self) -> None:
        """Let go of what is delayed, now and later."""
        self.released.set()


class RandomFaults(FaultPlan):
    """Strikes each operation with a chance of ``rate``, with one of ``kinds``."""

    def __init__(self, seed: int, rate: float, kinds: tuple[Kind, ...], operations: tuple[Operation, ...] = ()) -> None:
        super().__init__(seed=seed)
        self.rate = rate
        self.kinds = kinds
        self.operations = operations

    def next(self, operation: Operation) -> Fault | None:
        self.counts[operation] = self.counts.get(operation, 0) + 1
        if (self.operations and operation not in self.operations) or self.random.random() >= self.rate:
            return None
        kind = self.random.choice(self.kinds)
        self.struck.append((operation, kind))
        return Fault(kind, errno=self.random.choice((errno.EIO, errno.ENOSPC)))


class RamTransfer:
    """A request that is over, or waits for a plan to be released."""

    def __init__(self, error: OSError | None = None, over: threading.Event | None = None) -> None:
        self._outcome = error
        self._over = over

    @property
    def error(self) -> OSError | None:
        return self._outcome if self.done() else None

    def done(self) -> bool:
        return self._over is None or self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        if self._over is not None and not self._over.wait(timeout):
            raise TimeoutError(f"not over after {timeout} s")
        if self._outcome is not None:
            raise self._outcome

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        if self.done():
            call(self)
        else:
            threading.Thread(target=self._call_when_over, args=(call,), daemon=True).start()

    def _call_when_over(self, call: Callable[[Any], object]) -> None:
        if self._over is None or self._over.wait(IO_TIMEOUT_S):
            call(self)

    def __await__(self) -> Generator[object, None, None]:
        yield from asyncio.get_running_loop().run_in_executor(None, self.wait, IO_TIMEOUT_S)


class RamDevice:
    """The data of a ``RamDisk``."""

    backend = "memory"
    notes: tuple[str, ...] = ()

    def __init__(self, disk: RamDisk, plan: FaultPlan | None = None) -> None:
        self._disk = disk
        self._plan = plan or FaultPlan()

    def read(self, offset: int, address: int, nbytes: int, *, urgent: bool = False) -> RamTransfer:
        fault = self._plan.next("read")
        data = bytes(self._disk.data[offset : offset + nbytes])
        if len(data) < nbytes:
            return RamTransfer(_error(errno.ENODATA))
        if fault is None:
            ctypes.memmove(address, data, nbytes)
            return RamTransfer()
        if fault.kind == "misdirected":
            elsewhere = self._elsewhere(offset, nbytes)
            data = bytes(self._disk.data[elsewhere : elsewhere + nbytes])
        data, error = spoilt(fault, data, self._plan.random)
        ctypes.memmove(address, data, len(data))
        return RamTransfer(error, self._plan.released if fault.kind == "delay" else None)

    def write(self, offset: int, address: int, nbytes: int, *, urgent: bool = False) -> RamTransfer:
        fault = self._plan.next("write")
        data = ctypes.string_at(address, nbytes)
        if offset + nbytes > len(self._disk.data):
            return RamTransfer(_error(errno.ENOSPC))
        if fault is None:
            self._put(offset, data)
            return RamTransfer()
        if fault.kind == "misdirected":
            offset = self._elsewhere(offset, nbytes)
        data, error = spoilt(fault, data, self._plan.random)
        self._put(offset, data)
        return RamTransfer(error, self._plan.released if fault.kind == "delay" else None)

    def sync(self) -> RamTransfer:
        fault = self._plan.next("sync")
        if fault is not None and fault.kind in ("error", "short"):
            return RamTransfer(_error(fault.errno))
        self._disk.log(("sync",))
        return RamTransfer()

    def table(self) -> list[tuple[int, int]]:
        return []

    @property
    def descriptors(self) -> tuple[int, ...]:
        return ()

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        end = max((offset + nbytes for offset, nbytes in ranges), default=0)
        self._disk.data.extend(bytes(max(end - len(self._disk.data), 0)))

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        for offset, nbytes in ranges:
            self._disk.data[offset : offset + nbytes] = bytes(nbytes)

    def register(self, arena: Arena) -> None:
        pass

    def statistics_by_file(self) -> list[aio_ext.Statistics]:
        return [aio_ext.Statistics()]

    def close(self) -> None:
        self._plan.release()

    def _put(self, offset: int, data: bytes) -> None:
        if data:
            self._disk.data[offset : offset + len(data)] = data
            self._disk.log(("write", offset, data))

    def _elsewhere(self, offset: int, nbytes: int) -> int:
        places = range(0, len(self._disk.data) - nbytes + 1, SECTOR_BYTES)
        return self._plan.random.choice([place for place in places if place != offset] or [offset])


class RamDirectory:
    """The small files of a ``RamDisk``."""

    def __init__(self, disk: RamDisk, plan: FaultPlan | None = None) -> None:
        self._disk = disk
        self._plan = plan or FaultPlan()

    def names(self) -> list[str]:
        self._strike("names")
        return sorted(self._disk.files)

    def read(self, name: str, nbytes_max: int) -> bytes:
        fault = self._strike("load")
        data = self._find(name)[: nbytes_max + 1]
        if fault is not None and fault.kind == "flip":
            data = flipped(data, self._plan.random.randrange(8 * len(data)))
        return data

    def create(self, name: str, data: bytes) -> None:
        if name in self._disk.files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        fault = self._plan.next("create")
        if fault is not None and fault.kind == "error":
            raise _error(fault.errno)
        error = None
        if fault is not None:
            data, error = spoilt(fault, data, self._plan.random)
        self._disk.files[name] = data
        self._disk.log(("create", name, data))
        if error is not None:
            raise error

    def sync_file(self, name: str) -> None:
        self._strike("sync_file")
        self._find(name)
        self._disk.log(("sync_file", name))

    def rename(self, old: str, new: str) -> None:
        self._strike("rename")
        self._disk.files[new] = self._find(old)
        del self._disk.files[old]
        self._disk.log(("rename", old, new))

    def remove(self, name: str) -> None:
        self._find(name)
        self._strike("remove")
        del self._disk.files[name]
        self._disk.log(("remove", name))

    def sync(self) -> None:
        self._strike("sync_names")
        self._disk.log(("sync_names",))

    def is_name_of(self, name: str, file: int) -> bool:
        return False

    def _strike(self, operation: Operation) -> Fault | None:
        fault = self._plan.next(operation)
        if fault is not None and fault.kind in ("error", "short"):
            raise _error(fault.errno)
        return fault

    def _find(self, name: str) -> bytes:
        if name not in self._disk.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._disk.files[name]


def spoilt(fault: Fault, data: bytes, rng: random.Random) -> tuple[bytes, OSError | None]:
    """Return what of ``data`` is transferred under this fault, and what the caller is told."""
    part = rng.randrange(0, len(data), SECTOR_BYTES) if data else 0
    if fault.kind == "error":
        return b"", _error(fault.errno)
    if fault.kind == "short":
        return data[:part], _error(fault.errno)
    if fault.kind == "torn":
        return data[:part], None
    if fault.kind == "lost":
        return b"", None
    if fault.kind == "flip":
        return flipped(data, rng.randrange(8 * len(data))), None
    return data, None


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    spoilt = bytearray(data)
    spoilt[bit // 8] ^= 1 << bit % 8
    return bytes(spoilt)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
