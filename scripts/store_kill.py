#!/usr/bin/env python3
"""Kill a process that writes and commits in a loop, with `kill -9`, and start the next one at once, over and over.

Each process opens the store, checks that the last generation is the one that was last acknowledged or the next, and
that every byte of it is right; then it writes and commits, with a store without a name beside it, until it dies. One in
eight dies while it starts. No lock may outlive its owner, and of stores without a name nothing may be left.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from store_model import Difference, run

from swapper import Arena, DurableStore, Extent, StoreMissing, create_store, open_store

EXTENT_BYTES = 256 << 10
NUM_EXTENTS = 6
WAIT_SECONDS = 60


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    counts = {"kills": 0, "commits": 0, "at_next_generation": 0, "restart_ms_max": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        acknowledged = -1
        while counts["kills"] < arguments.kills:
            backend = rng.choice(("auto", "threads"))
            early = rng.random() < 1 / 8
            acknowledged = _one_life(path, acknowledged, backend, early, rng.random() * 0.04, counts)
            left = {entry.name for entry in path.iterdir()} - {"k.store"}
            if left:
                raise Difference(f"left behind: {left}")
        with open_store([path], "k") as store:
            _check(store, Arena(EXTENT_BYTES))
            counts["last_generation"] = store.generation
    return counts


def _one_life(path: Path, acknowledged: int, backend: str, early: bool, seconds: float, counts: dict[str, int]) -> int:
    """Start a process, kill it ``seconds`` after it has opened the store, or begun to. The last generation it told."""
    reading, writing = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _live(path, backend, writing)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    told = []
    try:
        if not early:
            told.append(_number(reading, child))
            counts["restart_ms_max"] = max(counts["restart_ms_max"], round(1000 * (time.monotonic() - start)))
        time.sleep(seconds)  # the moment of the kill is what is random here
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while (number := _number(reading, None)) >= 0:
        told.append(number)
    os.close(reading)
    counts["kills"] += 1
    if not told:
        return acknowledged
    counts["commits"] += len(told) - 1
    if told[0] not in (acknowledged, acknowledged + 1):
        raise Difference(f"generation {told[0]} was opened, {acknowledged} had been committed")
    counts["at_next_generation"] += told[0] == acknowledged + 1 and acknowledged >= 0
    return told[-1]


def _number(pipe: int, child: int | None) -> int:
    """The next number from the pipe; -1 at its end."""
    if child is not None and not select.select([pipe], [], [], WAIT_SECONDS)[0]:
        raise Difference(f"nothing from process {child} for {WAIT_SECONDS} s")
    data = os.read(pipe, 8)
    if len(data) < 8:
        if child is not None:
            raise Difference("the process found something wrong: see above")
        return -1
    return int(struct.unpack("<q", data)[0])


def _live(path: Path, backend: str, pipe: int) -> None:
    arena = Arena(EXTENT_BYTES * 2)
    try:
        store = open_store([path], "k", backend=backend)
    except StoreMissing:
        store = create_store([path], "k", [EXTENT_BYTES] * NUM_EXTENTS, retained_max=1, backend=backend)
    lease = arena.lease(EXTENT_BYTES)
    _check(store, arena)
    os.write(pipe, struct.pack("<q", store.generation))
    nameless = create_store([path], None, [EXTENT_BYTES], backend=backend)
    while True:
        number = store.generation + 1
        for extent in store.extents:
            if _writer(extent, number) == number:
                ctypes.memmove(lease.address, _bytes(extent, number), EXTENT_BYTES)
                beside = nameless.write(nameless.extents[0], lease.address, EXTENT_BYTES)
                store.write(extent, lease.address, EXTENT_BYTES).wait()
                beside.wait()
        store.commit(b"generation %d" % number)
        os.write(pipe, struct.pack("<q", number))


def _writer(extent: Extent, generation: int) -> int:
    """The last generation, up to this one, that wrote the extent: every one writes two thirds of them."""
    while generation > 0 and (generation + extent.index) % 3 == 0:
        generation -= 1
    return generation


def _bytes(extent: Extent, generation: int) -> bytes:
    return random.Random(generation * NUM_EXTENTS + extent.index).randbytes(64) * (EXTENT_BYTES // 64)


def _check(store: DurableStore, arena: Arena) -> None:
    if store.generation and store.metadata != b"generation %d" % store.generation:
        raise Difference(f"metadata of generation {store.generation}: {store.metadata!r}")
    lease = arena.lease(EXTENT_BYTES)
    for extent in store.extents:
        writer = _writer(extent, store.generation)
        if writer:
            store.read(extent, lease.address, EXTENT_BYTES).wait()
            if ctypes.string_at(lease.address, EXTENT_BYTES) != _bytes(extent, writer):
                raise Difference(f"generation {store.generation}: extent {extent.index} has other bytes")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run(__doc__, campaign, kills=1000)
