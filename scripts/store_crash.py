#!/usr/bin/env python3
"""Crash a committing store at every point and in every way, and recover: it must be the last or the next generation.

Each story writes, writes beside, flips, commits, retains and releases at random on a recorded disk. For a crash after
each change of the disk, the states that it may have left are enumerated: see `store_crash_states.py`. Recovery must
give the generation that was last acknowledged, or the one whose commit was under way; bytes, metadata, retained
generations must be right.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from store_crash_states import Recorder, crash_states
from store_model import DISK_BYTES, Difference, check_equal, content, make_store, put, put_shadow, reopen, run
from store_ram_disk import RamDisk

from swapper import DurableStore, Extent, OffloadError, StorageFull, StoreMissing

State = tuple[bytes, dict[int, bytes]]
"""Metadata of a generation, and the bytes of its extents."""


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    counts = {"stories": 0, "states": 0, "last": 0, "next": 0, "no_store_yet": 0, "retained_checked": 0}
    while counts["states"] < arguments.states:
        seed = arguments.seed * 1_000_003 + counts["stories"]
        recorder, generations = _story(random.Random(seed), arguments.commits)
        for disk, marks in crash_states(recorder, arguments.per_point, seed):
            counts["states"] += 1
            try:
                _recover(disk, marks, generations, counts)
            except (Difference, OffloadError) as difference:
                raise Difference(f"story {seed}, state {counts['states']}, after {marks[-3:]}: {difference}") from None
        counts["stories"] += 1
    return counts


def _story(rng: random.Random, num_commits: int) -> tuple[Recorder, dict[int, State]]:
    disk = RamDisk(bytearray(DISK_BYTES))
    recorder = Recorder(disk)
    recorder.mark("begin", 0)
    store = make_store(disk, identity=rng.randbytes(16))
    recorder.mark("done", 0)
    now: dict[int, bytes] = {}
    generations: dict[int, State] = {0: (b"", {})}
    for number in range(1, num_commits + 1):
        for extent in rng.choices(store.extents, k=rng.randrange(4)):
            data = content(extent, rng)
            if _changed(store, extent, data, rng):
                now[extent.index] = data
        metadata = rng.randbytes(rng.choice((0, 8, 1500)))
        generations[number] = (metadata, dict(now))
        recorder.mark("begin", number)
        store.commit(metadata)
        recorder.mark("done", number)
        kept = store.generations[:-1]
        if kept and rng.random() < 0.5:
            recorder.mark("release", kept[0])
            store.release(kept[0])
        elif not kept and rng.random() < 0.5:
            store.retain()
            recorder.mark("retain", number)
    store.close()
    return recorder, generations


def _changed(store: DurableStore, extent: Extent, data: bytes, rng: random.Random) -> bool:
    """Write ``data``, in place of what is current or beside it; True if it is current then."""
    way = rng.choice(("write", "write", "flip", "beside"))
    if way != "write":
        try:
            put_shadow(store, extent, data)
        except StorageFull:
            way = "write"  # the retained generation and the last one leave no copy for it
    if way == "write":
        put(store, extent, data)
    if way == "flip":
        store.flip(extent)
    return way != "beside"


def _recover(disk: RamDisk, marks: list[Any], generations: dict[int, State], counts: dict[str, int]) -> None:
    acknowledged = max((number for what, number in marks if what == "done"), default=-1)
    begun = max((number for what, number in marks if what == "begin"), default=0)
    retained = {n for what, n in marks if what == "retain"} - {n for what, n in marks if what == "release"}
    try:
        store = reopen(disk)
    except StoreMissing:
        if acknowledged >= 0:
            raise Difference(f"generation {acknowledged} is gone") from None
        counts["no_store_yet"] += 1
        return
    if store.generation not in (acknowledged, begun):
        raise Difference(f"recovered generation {store.generation}, not {acknowledged} or {begun}")
    counts["last" if store.generation == acknowledged else "next"] += 1
    _check_generation(store, generations)
    if not retained <= set(store.generations):
        raise Difference(f"retained {sorted(retained)}, there are {store.generations}")
    store.close()
    for number in store.generations[:-1]:
        with reopen(disk, number) as old:
            _check_generation(old, generations)
            counts["retained_checked"] += 1


def _check_generation(store: Any, generations: dict[int, State]) -> None:
    metadata, expected = generations[store.generation]
    if store.metadata != metadata:
        raise Difference(f"generation {store.generation} has other metadata")
    check_equal(store, expected, f"generation {store.generation}")


if __name__ == "__main__":
    run(__doc__, campaign, states=100_000, commits=6, per_point=64)
