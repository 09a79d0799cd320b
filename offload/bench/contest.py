"""The queue and fio in turns, at two sizes of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from aio_ext import Memory
from aio_ext.measure import Mode, Range, Sample
from offload.bench.fio import Fio
from offload.bench.subject import MIB, MODES, Setting, Subject

PAIR_SECONDS = 0.4

Samples = dict[str, list[Sample]]


@dataclass
class Contest:
    """Ours and fio's samples of each mode, both going around ``footprint_bytes`` of memory."""

    footprint_bytes: int
    range: Range
    fio: Fio | None
    ours: Samples = field(default_factory=lambda: {mode: [] for mode in MODES})
    theirs: Samples = field(default_factory=lambda: {mode: [] for mode in MODES})

    def turns(self, mode: Mode, nbytes: int) -> list[Callable[[], None]]:
        turns = [lambda: self.ours[mode].append(self.range.measure(mode, nbytes))]
        if self.fio:
            fio = self.fio
            turns.append(lambda: self.theirs[mode].append(fio.measure(mode, nbytes)))
        return turns


def compare(it: Subject, setting: Setting, with_fio: bool, pairs: int, bar: tqdm[Any]) -> tuple[Contest, Contest]:
    """Ours and fio's samples at the engine's footprint, and at that of what is in flight, which a cache may hold.

    All are taken in turns, so that they meet the same moods of the machine.
    """
    in_flight = setting.block_bytes * setting.depth
    with Memory(in_flight) as small, it.range(setting) as large_range, it.range(setting, small) as small_range:
        small.populate()
        contests = [
            Contest(size, range_, Fio(it, setting.block_bytes, size) if with_fio else None)
            for size, range_ in ((it.memory.nbytes, large_range), (in_flight, small_range))
        ]
        for contest in contests:
            if contest.fio:
                bar.set_description(f"fio: io_uring or libaio, {contest.footprint_bytes // MIB} MiB")
                contest.fio.choose_engines()
        for pair in range(pairs):
            for mode in MODES:
                bar.set_description(f"{mode} {pair + 1} of {pairs}")
                nbytes = it.bytes_for(PAIR_SECONDS) // (32 * MIB) * (32 * MIB)
                turns = [turn for contest in contests for turn in contest.turns(mode, nbytes)]
                for turn in turns if pair % 2 == 0 else reversed(turns):
                    turn()
                bar.update()
    return contests[0], contests[1]
