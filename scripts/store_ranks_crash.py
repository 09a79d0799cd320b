#!/usr/bin/env python3
"""Crash ranks that commit together, each at a point of its own and in every way: they must find a generation in common.

Each story has two stores on recorded disks. They write at random; both prepare, one after the other; then both finish,
or, because one had no room, the others abandon. They meet before and after, and nowhere else: a crash finds them
anywhere between two meetings. Each store must open at a generation that it may have, prepared or not, and by the rule
(finish what another has committed, abandon the rest) both must come to one step, with the right bytes.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import random
from collections import defaultdict
from typing import Any

from store_crash_states import Recorder, crash_states
from store_model import DISK_BYTES, Difference, check_equal, content, make_store, put, put_shadow, reopen, run
from store_ram_disk import Fault, FaultPlan, RamDisk

from swapper import DurableStore, OffloadError, StorageFull, StoreMisuse

NUM_RANKS = 2

Marks = list[tuple[Any, ...]]


class Rank:
    """A store on a recorded disk, what it holds, and what was in each generation that it prepared."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._disk = RamDisk(bytearray(DISK_BYTES))
        self._plan = FaultPlan()
        self._recorder = Recorder(self._disk)
        self.store = make_store(self._disk, self._plan, rng.randbytes(16))
        self.meet()
        self._now: dict[int, bytes] = {}
        self.contents: dict[bytes, dict[int, bytes]] = {b"": {}}

    def write(self) -> None:
        """Change some extents, as far as there are places."""
        for extent in self._rng.choices(self.store.extents, k=self._rng.randrange(4)):
            data = content(extent, self._rng)
            try:
                if self._rng.random() < 0.5:
                    put(self.store, extent, data)
                else:
                    put_shadow(self.store, extent, data)
                    self.store.flip(extent)
            except (StoreMisuse, StorageFull):
                if self.store.prepared is None:
                    raise
            else:
                self._now[extent.index] = data

    def prepare(self, metadata: bytes, *, has_room: bool) -> bool:
        """True if the store has it then."""
        number = self.store.generation + 1
        self.contents[metadata] = dict(self._now)
        if not has_room:
            nth = self._plan.counts.get("create", 0)
            self._plan.faults.append(Fault("error", nth, ("create",), errno=errno.ENOSPC))
        self._recorder.mark("prepare", number)
        try:
            self.store.prepare(metadata)
        except StorageFull:
            self._recorder.mark("abandoned", number)
            return False
        self._recorder.mark("prepared", number)
        return True

    def finish(self) -> None:
        number = self.store.prepared
        self._recorder.mark("finish", number)
        self.store.finish()
        self._recorder.mark("finished", number)

    def abandon(self) -> None:
        number = self.store.prepared
        self._recorder.mark("abandon", number)
        self.store.abandon()
        self._recorder.mark("abandoned", number)

    def meet(self) -> None:
        """Wait for the others. A crash may find this one before it, or after it and not yet under way."""
        self._recorder.mark("meet")
        self._disk.log(("nothing",))

    def crashes(self, per_point: int, seed: int) -> dict[int, list[tuple[RamDisk, Marks]]]:
        """What a crash may leave, by the number of meetings before it."""
        found = defaultdict(list)
        for disk, marks in crash_states(self._recorder, per_point, seed):
            found[marks.count(("meet",))].append((disk, marks))
        return found


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    counts = {"stories": 0, "states": 0, "finished": 0, "abandoned": 0}
    while counts["states"] < arguments.states:
        seed = arguments.seed * 1_000_003 + counts["stories"]
        ranks = _story(random.Random(seed), arguments.commits)
        crashes = [rank.crashes(arguments.per_point, seed) for rank in ranks]
        rng = random.Random(seed)
        for meetings in sorted(crashes[0])[1:]:  # before the first one there may be no store
            together = list(itertools.product(*(crash[meetings] for crash in crashes)))
            for crash in rng.sample(together, min(len(together), arguments.per_meeting)):
                counts["states"] += 1
                try:
                    _recover(ranks, crash, counts)
                except (Difference, OffloadError) as difference:
                    last = [marks[-2:] for _, marks in crash]
                    raise Difference(f"story {seed}, state {counts['states']}, after {last}: {difference}") from None
        counts["stories"] += 1
    return counts


def _story(rng: random.Random, num_commits: int) -> list[Rank]:
    ranks = [Rank(rng) for _ in range(NUM_RANKS)]
    for step in range(num_commits):
        for rank in ranks:
            rank.write()
        without_room = rng.choice(ranks) if rng.random() < 0.25 else None
        have_it = [rank for rank in ranks if rank.prepare(b"step %d" % step, has_room=rank is not without_room)]
        for rank in have_it:
            rank.write()
        for rank in ranks:
            rank.meet()
        for rank in have_it:
            if without_room is None:
                rank.finish()
            else:
                rank.abandon()
        for rank in ranks:
            rank.meet()
    return ranks


def _recover(ranks: list[Rank], crash: tuple[tuple[RamDisk, Marks], ...], counts: dict[str, int]) -> None:
    disks = [RamDisk(bytearray(disk.data), dict(disk.files)) for disk, _ in crash]
    stores = [reopen(disk) for disk in disks]
    for rank, store, disk, (_, marks) in zip(ranks, stores, disks, crash, strict=True):
        found = store.generation, store.prepared
        if found not in _possible(marks):
            raise Difference(f"opened at generation {found[0]}, prepared {found[1]}; possible: {_possible(marks)}")
        _check(rank, store)
        if store.prepared is not None:
            with reopen(RamDisk(bytearray(disk.data), dict(disk.files))) as twin:
                twin.finish()
                _check(rank, twin)
    newest = max(store.generation for store in stores)
    for store in stores:
        if store.prepared == newest:
            store.finish()
            counts["finished"] += 1
        elif store.prepared is not None:
            store.abandon()
            counts["abandoned"] += 1
    if len({(store.generation, store.metadata) for store in stores}) > 1:
        raise Difference(f"nothing in common: {[(store.generation, store.metadata) for store in stores]}")
    for rank, store in zip(ranks, stores, strict=True):
        _check(rank, store)
        put(store, store.extents[0], content(store.extents[0], random.Random(newest)))
        store.commit(b"on")
        store.close()


def _possible(marks: Marks) -> set[tuple[int, int | None]]:
    """Last generation and prepared one of a store, after what it began and what it was told is done."""
    last = max((number for what, *rest in marks if what == "finished" for number in rest), default=0)
    what, number = next(((what, rest[0]) for what, *rest in reversed(marks) if rest), ("finished", 0))
    without, with_it, committed = (last, None), (last, number), (number, None)
    return {
        "prepare": {without, with_it},
        "prepared": {with_it},
        "finish": {with_it, committed},
        "finished": {committed},
        "abandon": {with_it, without},
        "abandoned": {without},
    }[what]


def _check(rank: Rank, store: DurableStore) -> None:
    check_equal(store, rank.contents[store.metadata], f"generation {store.generation}")


if __name__ == "__main__":
    run(__doc__, campaign, states=50_000, commits=6, per_point=16, per_meeting=200)
