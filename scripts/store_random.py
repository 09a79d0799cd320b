#!/usr/bin/env python3
"""Random operations on a durable store whose disk lies, against a dict: no silent corruption, no hang, no leak.

Everything goes wrong at random: errors, short and torn and lost and misdirected transfers, flipped bits, refused syncs
and renames. A read must give what the dict has, or an error; a store must open at a generation that was committed.
"""

from __future__ import annotations

import argparse
import random
import resource
import threading
from typing import Any

from store_model import DISK_BYTES, Difference, close_quietly, content, get, make_store, put, put_shadow, reopen, run
from store_ram_disk import Fault, FaultPlan, Kind, Operation, RamDisk, RandomFaults

from swapper import Extent, OffloadError, StorageCorrupt, StoreMissing, StoreMisuse

KINDS: tuple[Kind, ...] = ("error", "short", "torn", "lost", "misdirected", "flip")


class Streaks(RandomFaults):
    """A write that failed fails again at once, every second time: so the second try is not always good."""

    _again: Fault | None = None

    def next(self, operation: Operation) -> Fault | None:
        fault = super().next(operation)
        if fault is None and operation == "write" and self._again is not None and self.random.random() < 0.5:
            fault = self._again
        failed = operation == "write" and fault is not None and fault.kind in ("error", "short")
        self._again = fault if failed else None
        return fault


class Twin:
    """A store on a faulty disk, and what it should hold."""

    def __init__(self, rng: random.Random, rate: float, counts: dict[str, int]) -> None:
        self._rng = rng
        self._rate = rate
        self._counts = counts
        self._start()

    def step(self) -> None:
        """One operation, checked."""
        operation = self._rng.choices(
            (
                self._write, self._write_shadow, self._flip, self._read,
                self._commit, self._retain, self._release, self._reopen,
            ),
            (30, 15, 10, 45, 8, 2, 2, 3),
        )[0]  # fmt: skip
        self._counts["operations"] += 1
        try:
            operation()
        except OffloadError as error:
            self._counts[type(error).__name__] = self._counts.get(type(error).__name__, 0) + 1
            if self._store._turns.failure is not None:
                self._reopen()

    def close(self) -> None:
        close_quietly(self._store)

    def _start(self) -> None:
        self._disk = RamDisk(bytearray(DISK_BYTES))
        self._store = make_store(self._disk, identity=self._rng.randbytes(16))
        self._now: dict[int, bytes] = {}
        self._beside: dict[int, bytes] = {}
        self._generations: dict[int, tuple[bytes, dict[int, bytes]]] = {0: (b"", {})}
        self._possible = {0}
        self._arm()

    def _arm(self) -> None:
        """From here on the disk goes wrong."""
        plan = Streaks(self._rng.randrange(1 << 32), self._rate, KINDS)
        self._plan: FaultPlan = plan
        self._store._transfers.device._plan = plan  # type: ignore[attr-defined]
        self._store._directory._plan = plan  # type: ignore[attr-defined]

    def _write(self) -> None:
        extent = self._rng.choice(self._store.extents)
        data = content(extent, self._rng)
        self._beside.pop(extent.index, None)
        if not self._has_spare(extent):
            self._now[extent.index] = data  # it writes over what is current: should it fail, this or an error is read
        put(self._store, extent, data)  # otherwise what was current is so again, should it fail
        self._now[extent.index] = data

    def _write_shadow(self) -> None:
        extent = self._rng.choice(self._store.extents)
        data = content(extent, self._rng)
        if not self._has_spare(extent):
            put_shadow(self._store, extent, data)
            raise Difference(f"{self._where(extent)} was written beside, without a place for it")
        self._beside.pop(extent.index, None)
        put_shadow(self._store, extent, data)
        self._beside[extent.index] = data

    def _flip(self) -> None:
        extent = self._rng.choice([self._store.extents[index] for index in self._beside] or self._store.extents)
        try:
            self._store.flip(extent)
        except StoreMisuse:
            if extent.index in self._beside:
                raise Difference(f"{self._where(extent)} was written beside and cannot be flipped") from None
            raise
        if extent.index not in self._beside:
            raise Difference(f"{self._where(extent)} was flipped, and nothing good was written beside")
        self._now[extent.index] = self._beside.pop(extent.index)
        self._counts["flips"] += 1

    def _has_spare(self, extent: Extent) -> bool:
        """True if a write leaves what is current as it is."""
        return self._store._places.records[extent.index].spare(self._store._places.needed()[extent.index]) is not None

    def _where(self, extent: Extent) -> str:
        return f"operation {self._counts['operations']}: extent {extent.index}"

    def _read(self) -> None:
        extent = self._rng.choice(self._store.extents)
        data = get(self._store, extent)
        if data != self._now.get(extent.index):
            raise Difference(f"{self._where(extent)} has other bytes")
        self._counts["reads_checked"] += 1

    def _commit(self) -> None:
        number, metadata = self._store.generation + 1, self._rng.randbytes(20)
        self._generations[number] = (metadata, dict(self._now))
        self._possible.add(number)
        if self._store.commit(metadata) != number:
            raise Difference(f"committed as another generation than {number}")
        self._possible = {number}
        self._generations = {number: self._generations[number]}
        self._counts["commits"] += 1

    def _retain(self) -> None:
        self._store.retain()

    def _release(self) -> None:
        for number in self._store.generations[:1]:
            self._store.release(number)

    def _reopen(self) -> None:
        close_quietly(self._store)
        self._counts["reopened"] += 1
        try:
            self._store = reopen(self._disk)
        except StorageCorrupt:
            self._counts["manifests_lost"] += 1
            self._start()
            return
        except StoreMissing:
            raise Difference("the store is gone") from None
        if self._store.generation not in self._possible:
            raise Difference(f"opened at generation {self._store.generation}, possible are {self._possible}")
        metadata, now = self._generations[self._store.generation]
        if self._store.metadata != metadata:
            raise Difference(f"generation {self._store.generation} has other metadata")
        self._now, self._beside = dict(now), {}
        self._possible = {self._store.generation}
        self._arm()


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    counts = {"operations": 0, "reads_checked": 0, "flips": 0, "commits": 0, "reopened": 0, "manifests_lost": 0}
    rng = random.Random(arguments.seed)
    twin = Twin(rng, arguments.faults_per_thousand / 1000, counts)
    memory = 0
    while counts["operations"] < arguments.operations:
        twin.step()
        if counts["operations"] == min(50_000, arguments.operations // 2):
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    twin.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    if grown > 8 << 10:
        raise Difference(f"the process has grown by {grown} KiB")
    others = [thread.name for thread in threading.enumerate()]
    if len(others) > 1:
        raise Difference(f"threads are left: {others}")
    return {**counts, "grown_kib": grown}


if __name__ == "__main__":
    run(__doc__, campaign, operations=1_000_000, faults_per_thousand=20)
