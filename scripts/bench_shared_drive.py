#!/usr/bin/env python3
"""Ranks on one drive: what each gets when 1, 2 and 4 processes update tiles in stores of their own at once.

Each process does what an update does with everything on NVMe: it reads a tile, writes it, and has three reads and three
writes in flight. Two ways to share take turns, in an order drawn from the seed: "divided", where the processes together
have the queue of one, and "whole", where each has all of it. Bytes are those that a process's own queue has counted.

Prints what each process gets in all rounds; the total, and what it is of that of one process alone in the same round;
the least of Jain's index of fairness (1: all get the same, 1/n: one gets everything); and the 99th percentile of a
block's latency in the slowest process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Every process imports what is named here: no torch, which would take seconds.
from aio_ext.measure import NUM_BUFFERS, REQUEST_BYTES
from aio_ext.profile import file_system, load_profile
from swapper import Arena, DurableStore, Ticket, create_store

NUM_PROCESSES = (1, 2, 4)
NUM_TILES = 32
SETTLE_SECONDS = 0.5
"""All processes are at work when counting begins."""
MEETING_SECONDS = 120


@dataclass(frozen=True)
class Case:
    """``depth``: that of each process's queue."""

    num_processes: int
    way: str
    depth: int


@dataclass(frozen=True)
class Task:
    """What one process is told."""

    path: Path
    backend: str
    block_bytes: int
    depth: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class Counted:
    """What the queue of one process counted between two moments."""

    num_bytes: int
    seconds: float
    latency_p99_s: float

    @property
    def mb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e6


def main() -> None:
    from offload.ranks.machine import queue_share

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="a directory on the drive; default: one of its own under the current")
    parser.add_argument("--seconds", type=float, default=5.0, help="that each case is counted for, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shared-drive-", dir=arguments.path or Path.cwd()) as folder:
        path = Path(folder)
        profile = load_profile(path)
        backend, depth, block_bytes = "auto", 32, 1 << 20  # as the engine opens its store
        if profile is not None:
            backend, depth, block_bytes = profile.backend, profile.queue_depth, profile.block_bytes
        cases = [Case(1, "alone", depth)]
        for num in NUM_PROCESSES[1:]:
            cases += [Case(num, "divided", queue_share(depth, num)), Case(num, "whole", depth)]
        print(f"{platform.node()}, {os.cpu_count()} cores, Linux {platform.release()}, {file_system(path)}, "
              f"Python {platform.python_version()}")  # fmt: skip
        print(f"backend {backend}, depth {depth}, blocks of {block_bytes >> 10} KiB, {NUM_TILES} tiles of "
              f"{REQUEST_BYTES >> 20} MiB a process, {arguments.seconds:g} s x {arguments.rounds} rounds, "
              f"seed {arguments.seed}\n")  # fmt: skip
        found: dict[Case, list[list[Counted]]] = {case: [] for case in cases}
        order = random.Random(arguments.seed)
        for index in range(arguments.rounds):
            for case in order.sample(cases, len(cases)):
                seeds = range(arguments.seed + 100 * index, arguments.seed + 100 * index + case.num_processes)
                tasks = [Task(path, backend, block_bytes, case.depth, arguments.seconds, seed) for seed in seeds]
                found[case].append(run(tasks))
    print_table(found)


def run(tasks: list[Task]) -> list[Counted]:
    """Have each task done by a process of its own, all at once."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(tasks))
    with ProcessPoolExecutor(len(tasks), context, _enter, (barrier,)) as processes:
        return list(processes.map(measure, tasks))


def measure(task: Task) -> Counted:
    """Update tiles together with the other processes, and count while all of them do."""
    with create_store(
        [task.path],
        None,
        [REQUEST_BYTES] * NUM_TILES,
        places=1,
        backend=task.backend,
        queue_depth=task.depth,
        block_bytes=task.block_bytes,
    ) as store:
        arena = Arena(NUM_BUFFERS * REQUEST_BYTES)
        store.register(arena)
        buffers = [arena.lease(REQUEST_BYTES).address for _ in range(NUM_BUFFERS)]
        for extent in store.extents:
            store.write(extent, buffers[0], REQUEST_BYTES).wait()
        _barrier.wait(MEETING_SECONDS)
        start = time.monotonic() + SETTLE_SECONDS
        return update(store, buffers, random.Random(task.seed), start, start + task.seconds)


def update(store: DurableStore, buffers: list[int], order: random.Random, start: float, end: float) -> Counted:
    """Update tiles until ``end``, and count from ``start`` on."""
    tiles = order.sample(store.extents, NUM_TILES)
    half = len(buffers) // 2
    reads: list[Ticket | None] = [None] * len(buffers)
    writes: list[Ticket | None] = [None] * len(buffers)
    before = since = None
    for step in count():
        now = time.monotonic()
        if before is None and now >= start:
            before, since = moved(store), now
        if now >= end:
            break
        into, ready = step % len(buffers), (step - half) % len(buffers)
        if (written := writes[into]) is not None:
            written.wait()
        reads[into] = store.read(tiles[step % NUM_TILES], buffers[into], REQUEST_BYTES)
        if (read := reads[ready]) is not None:
            read.wait()
            writes[ready] = store.write(tiles[(step - half) % NUM_TILES], buffers[ready], REQUEST_BYTES)
    counted = store.statistics()
    p99 = max(counted.read.latency_p99_s, counted.write.latency_p99_s)
    return Counted(moved(store) - before, now - since, p99)


def moved(store: DurableStore) -> int:
    counted = store.statistics()
    return counted.read.bytes + counted.write.bytes


def print_table(found: dict[Case, list[list[Counted]]]) -> None:
    alone = [sum(each.mb_per_s for each in round_) for round_ in next(iter(found.values()))]
    print(f"{'processes':>9} {'queue':<8}{'depth':>6}{'MB/s of each (min median max)':>33}{'total MB/s (min max)':>24}"
          f"{'of one alone':>14}{'Jain':>7}{'p99 ms':>8}")  # fmt: skip
    for case, rounds in found.items():
        each = [counted.mb_per_s for round_ in rounds for counted in round_]
        totals = [sum(counted.mb_per_s for counted in round_) for round_ in rounds]
        ratio = statistics.median(total / one for total, one in zip(totals, alone, strict=True))
        fairness = min(jain([counted.mb_per_s for counted in round_]) for round_ in rounds)
        p99 = statistics.median(max(counted.latency_p99_s for counted in round_) for round_ in rounds)
        of_each = f"{min(each):,.0f} {statistics.median(each):,.0f} {max(each):,.0f}"
        total = f"{statistics.median(totals):,.0f} ({min(totals):,.0f} {max(totals):,.0f})"
        print(f"{case.num_processes:>9} {case.way:<8}{case.depth:>6}{of_each:>33}{total:>24}{ratio:>14.2f}"
              f"{fairness:>7.3f}{1000 * p99:>8.1f}")  # fmt: skip


def jain(rates: list[float]) -> float:
    """Jain, Chiu and Hawe, DEC-TR-301 (1984): the square of the sum over n times the sum of squares."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def _enter(barrier: Barrier) -> None:
    """In a new process, before its task."""
    global _barrier
    _barrier = barrier


if __name__ == "__main__":
    main()
