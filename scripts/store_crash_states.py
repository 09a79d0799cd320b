"""For tests: every state in which a crash can leave a disk, from a record of what was done to it.

What was synced is there. Of what was not, anything may be: each write whole, not at all, or torn between two sectors;
each change of a name done or not, independent of its neighbours; a file that was not synced with any part of its bytes.
This is harsher than any journaling file system: what survives it needs no promise but those of fsync.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from store_ram_disk import RamDisk

SECTORS = (512, 4096)


class Recorder:
    """Keeps, in order, what is done to a disk, together with marks of the program."""

    def __init__(self, disk: RamDisk) -> None:
        self.begin = bytes(disk.data)
        self.events: list[tuple[Any, ...]] = []
        disk.log = self.events.append

    def mark(self, *what: Any) -> None:
        """Note where the story stands: each crash state comes with the marks before it."""
        self.events.append(("mark", *what))


@dataclass
class _File:
    content: bytes
    synced: bool = False


@dataclass
class _Stable:
    """Content that is certain, and that is not, after some of the events."""

    data: bytearray
    names: dict[str, _File] = field(default_factory=dict)
    now: dict[str, _File] = field(default_factory=dict)
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    changes: list[tuple[str | None, str | None, _File | None]] = field(default_factory=list)

    def apply(self, event: tuple[Any, ...]) -> None:
        kind, *rest = event
        if kind == "write":
            self.writes.append((rest[0], rest[1]))
        elif kind == "sync":
            for offset, data in self.writes:
                self.data[offset : offset + len(data)] = data
            self.writes.clear()
        elif kind == "create":
            self._change(None, rest[0], _File(rest[1]))
        elif kind == "sync_file":
            self.now[rest[0]].synced = True
        elif kind == "rename":
            self._change(rest[0], rest[1], self.now[rest[0]])
        elif kind == "remove":
            self._change(rest[0], None, None)
        elif kind == "sync_names":
            self.names = dict(self.now)
            self.changes.clear()

    def _change(self, old: str | None, new: str | None, file: _File | None) -> None:
        change = (old, new, file)
        _rename(self.now, change)
        self.changes.append(change)

    def states(self, count_max: int, rng: random.Random) -> Iterator[RamDisk]:
        """The ways in which it may have ended, each one once: all of them, or ``count_max``, with those first in which
        everything uncertain is either whole or not there, as far as the count goes."""
        files = [file for _, _, file in self.changes if file is not None and not file.synced]
        files = list({id(file): file for file in files}.values())
        contents = [data for _, data in self.writes] + [file.content for file in files]
        options = [_parts(len(data)) for data in contents] + [[(0, 0), (0, 1)] for _ in self.changes]
        for choice in _choices([len(parts) for parts in options], count_max, rng):
            chosen = [parts[index] for parts, index in zip(options, choice, strict=True)]
            yield self._state(chosen, files)

    def _state(self, chosen: list[tuple[int, int]], files: list[_File]) -> RamDisk:
        num_writes = len(self.writes)
        data = bytearray(self.data)
        for (offset, written), (begin, end) in zip(self.writes, chosen, strict=False):
            data[offset + begin : offset + end] = written[begin:end]
        torn = {}
        for file, (begin, end) in zip(files, chosen[num_writes:], strict=False):
            torn[id(file)] = bytes(begin) + file.content[begin:end]
        names = dict(self.names)
        for change, (_, done) in zip(self.changes, chosen[num_writes + len(files) :], strict=True):
            if done:
                _rename(names, change)
        return RamDisk(data, {name: torn.get(id(file), file.content) for name, file in names.items()})


def _rename(names: dict[str, _File], change: tuple[str | None, str | None, _File | None]) -> None:
    old, new, file = change
    if old is not None:
        names.pop(old, None)
    if new is not None and file is not None:
        names[new] = file


def _parts(nbytes: int) -> list[tuple[int, int]]:
    """Parts of a write that may have arrived: nothing, all of it, or its beginning or end up to some sector."""
    cuts = sorted({cut for sector in SECTORS for cut in range(sector, nbytes, sector)})
    return [(0, 0), (0, nbytes), *((0, cut) for cut in cuts), *((cut, nbytes) for cut in cuts)]


def _choices(sizes: list[int], count_max: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Different indices into lists of these sizes. Every one if there are no more than the count; else first every
    combination of 0 and 1, or some of these: nothing, all, and others at random. Then others up to the count."""
    if math.prod(sizes) <= count_max:
        yield from itertools.product(*map(range, sizes))
        return
    seen: set[tuple[int, ...]] = set()
    if 1 << len(sizes) <= count_max:
        seen.update(itertools.product((0, 1), repeat=len(sizes)))
        yield from sorted(seen)
    else:
        seen.update([(0,) * len(sizes), (1,) * len(sizes)][:count_max])
        yield from sorted(seen)
    while len(seen) < count_max:
        choice = tuple(map(rng.randrange, sizes if rng.random() < 0.5 else [2] * len(sizes)))
        if choice not in seen:
            seen.add(choice)
            yield choice


def crash_states(
    recorder: Recorder, per_point: int, seed: int, share: float = 1.0
) -> Iterator[tuple[RamDisk, list[tuple[Any, ...]]]]:
    """Up to ``per_point`` states for a crash before the first event and after each one, or after this ``share`` of
    them; with the marks so far."""
    rng = random.Random(seed)
    stable = _Stable(bytearray(recorder.begin))
    marks: list[tuple[Any, ...]] = []
    for event in [("nothing",), *recorder.events]:
        if event[0] == "mark":
            marks.append(event[1:])
            continue
        stable.apply(event)
        if share < 1 and rng.random() >= share:
            continue
        for disk in stable.states(per_point, rng):
            yield disk, list(marks)
