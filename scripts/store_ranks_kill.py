#!/usr/bin/env python3
"""Kill some of the ranks that commit together, with `kill -9`, and start all of them again, over and over.

Each rank is a process with a durable store of its own. They meet over pipes: at the start to tell their generations,
and in each commit after preparing and after finishing; every tenth they abandon. One rank in turn is slow to finish.
A rank that misses another ends. At the start each finishes what another has committed and abandons the rest. Then all
must have one generation, the last that was acknowledged or the next, and every byte of it must be right. One start in
eight is cut short itself.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import struct
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from store_model import Difference, run

from swapper import Arena, DurableStore, Extent, StoreMissing, create_store, open_store

EXTENT_BYTES = 64 << 10
NUM_EXTENTS = 4
NUM_RANKS = 3
NUMBER = struct.Struct("<q")


class Ended(Exception):
    """Another rank is gone."""


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    counts = {"kills": 0, "commits": 0, "finished_by_the_next": 0, "abandoned_by_the_next": 0}
    with tempfile.TemporaryDirectory() as folder:
        acknowledged = 0
        while counts["kills"] < arguments.kills:
            acknowledged = _one_life(Path(folder), acknowledged, rng, counts)
    return {**counts, "last_generation": acknowledged}


def _one_life(path: Path, acknowledged: int, rng: random.Random, counts: dict[str, int]) -> int:
    """Start the ranks, kill some of them. The last generation that any of them told of."""
    prepared_before = _prepared(path)
    to_each = [os.pipe() for _ in range(NUM_RANKS * NUM_RANKS)]  # from rank k to rank n: NUM_RANKS * k + n
    told = [os.pipe() for _ in range(NUM_RANKS)]
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            _child(path, rank, to_each, told)
        children.append(child)
    for pipe in to_each:
        os.close(pipe[0]), os.close(pipe[1])
    for pipe in told:
        os.close(pipe[1])
    numbers = [[] if rng.random() < 1 / 8 else [_number(pipe[0])] for pipe in told]
    time.sleep(rng.random() * 0.04)  # the moment of the kill is what is random here
    for child in rng.sample(children, rng.randint(1, NUM_RANKS)):
        os.kill(child, signal.SIGKILL)
    ends = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    for begun, pipe in zip(numbers, told, strict=True):
        begun += _all_numbers(pipe[0])
    if ends - {-signal.SIGKILL, 0}:
        raise Difference("a rank found something wrong: see above")
    first = {begun[0] for begun in numbers if begun}
    if len(first) > 1 or not first <= {acknowledged, acknowledged + 1}:
        raise Difference(f"the ranks begin at the generations {first}, {acknowledged} was acknowledged")
    counts["kills"] += 1
    counts["commits"] += max(len(begun[1:]) for begun in numbers)
    for number in prepared_before if first else ():
        counts["finished_by_the_next" if number in first else "abandoned_by_the_next"] += 1
    return max([acknowledged, *(number for begun in numbers for number in begun)])


def _prepared(path: Path) -> list[int]:
    return [int(name.suffix[1:], 16) for name in path.glob("*.store/prepared.*")]


def _number(pipe: int) -> int:
    """The next number from the pipe. Raises ``Ended`` at its end."""
    data = os.read(pipe, NUMBER.size)
    if len(data) < NUMBER.size:
        raise Ended
    return int(NUMBER.unpack(data)[0])


def _all_numbers(pipe: int) -> list[int]:
    with os.fdopen(pipe, "rb") as file:
        return [number for (number,) in NUMBER.iter_unpack(file.read())]


def _child(path: Path, rank: int, to_each: list[tuple[int, int]], told: list[tuple[int, int]]) -> None:
    """One rank, to its end."""
    for index, (reading, writing) in enumerate(to_each):
        sender, receiver = divmod(index, NUM_RANKS)
        if receiver != rank:
            os.close(reading)
        if sender != rank:
            os.close(writing)
    from_others = [to_each[NUM_RANKS * other + rank][0] for other in range(NUM_RANKS)]
    to_others = [to_each[NUM_RANKS * rank + other][1] for other in range(NUM_RANKS)]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for index, pipe in enumerate(told):
        os.close(pipe[0])
        if index != rank:
            os.close(pipe[1])

    def meet(number: int) -> list[int]:
        """The numbers of all ranks, once all are here."""
        for pipe in to_others:
            os.write(pipe, NUMBER.pack(number))
        return [_number(pipe) for pipe in from_others]

    status = 0
    try:
        _live(path, rank, meet, told[rank][1])
    except (Ended, BrokenPipeError):
        pass
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def _live(path: Path, rank: int, meet: Any, pipe: int) -> None:
    arena = Arena(EXTENT_BYTES)
    lease = arena.lease(EXTENT_BYTES)
    try:
        store = open_store([path], f"rank-{rank}")
    except StoreMissing:
        store = create_store([path], f"rank-{rank}", [EXTENT_BYTES] * NUM_EXTENTS)
    newest = max(meet(store.generation))
    if store.prepared == newest:
        store.finish()
    else:
        store.abandon()
    _check(store, rank, lease.address)
    os.write(pipe, NUMBER.pack(store.generation))
    attempt = 0
    while True:
        attempt += 1
        number = store.generation + 1
        for extent in store.extents:
            ctypes.memmove(lease.address, _bytes(extent, rank, number), EXTENT_BYTES)
            store.write(extent, lease.address, EXTENT_BYTES).wait()
        store.prepare(b"generation %d" % number)
        meet(number)
        if attempt % 10 == 0:
            store.abandon()
            meet(number)
            continue
        time.sleep(0.01 * (number % NUM_RANKS == rank))
        store.finish()
        meet(number)
        os.write(pipe, NUMBER.pack(number))


def _bytes(extent: Extent, rank: int, generation: int) -> bytes:
    seed = (generation * NUM_RANKS + rank) * NUM_EXTENTS + extent.index
    return random.Random(seed).randbytes(64) * (EXTENT_BYTES // 64)


def _check(store: DurableStore, rank: int, address: int) -> None:
    number = store.generation
    if number and store.metadata != b"generation %d" % number:
        raise Difference(f"metadata of generation {number}: {store.metadata!r}")
    for extent in store.extents if number else ():
        store.read(extent, address, EXTENT_BYTES).wait()
        if ctypes.string_at(address, EXTENT_BYTES) != _bytes(extent, rank, number):
            raise Difference(f"generation {number}: extent {extent.index} of rank {rank} has other bytes")


if __name__ == "__main__":
    run(__doc__, campaign, kills=1000)
