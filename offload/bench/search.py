"""The search for the setting that moves most, with as little in flight as that takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from aio_ext.queue import DEPTH
from offload.bench.subject import ENGINE_BYTES, KIB, MIB, Setting, Subject

BLOCKS = (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
DEPTHS = (4, 8, 16, 32, 64, 128)
THREADS = (2, 4)
"""Depths of the other backends: the engine gives them no more threads."""
ROUNDS = 7
FASTER = 1.05
"""A setting is faster than another if in three rounds of four it is so by this factor."""


def default(backend: str) -> Setting:
    """Setting that the engine takes without a profile."""
    return Setting(backend, MIB, DEPTH if backend == "io_uring" else max(THREADS))


def grid(backend: str, blocks: Sequence[int] = BLOCKS) -> list[Setting]:
    """The settings of a backend with these blocks whose blocks in flight fit into the engine's buffers."""
    depths = DEPTHS if backend == "io_uring" else THREADS
    settings = [Setting(backend, block, depth) for block in blocks for depth in depths]
    return [setting for setting in settings if setting.block_bytes * setting.depth <= ENGINE_BYTES]


def rivals(backend: str) -> list[Setting]:
    """The default's rivals: with other blocks, and the default's depth or what fits of it."""
    start = default(backend)
    deepest = {setting.block_bytes: setting for setting in grid(backend) if setting.depth <= start.depth}
    return list(deepest.values())


def chosen(scores: Mapping[Setting, Sequence[float]]) -> Setting:
    """The first setting, unless one is faster; of those that nothing is faster than, the one with least in flight.

    ``scores``: one of each setting in each round. Rounds are compared with themselves, so that what the machine does
    meanwhile takes no part; and noise alone does not move the choice from one run to the next.
    """

    def faster(one: Setting, other: Setting) -> bool:
        ratios = [a / b for a, b in zip(scores[one], scores[other], strict=True)]
        return statistics.quantiles(ratios, n=4)[0] >= FASTER

    first = next(iter(scores))
    best = max(scores, key=lambda setting: statistics.median(scores[setting]))
    good = [setting for setting in scores if faster(setting, first) and not faster(best, setting)]
    return min(good, key=lambda setting: (setting.depth * setting.block_bytes, setting.depth), default=first)


def search(it: Subject, bar: tqdm[Any], backends: Sequence[str], full: bool) -> Setting:
    """The setting to use. Adaptive: the block size, then the depth at that block size, then the backend. The default
    and the first of the backends are the ones to be beaten, twice: the best of many is often the luckiest."""

    def best(first: Setting, others: Sequence[Setting]) -> Setting:
        settings = [first, *(setting for setting in others if setting != first)]
        scores: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for turn in range(ROUNDS):
            for setting in settings[turn % len(settings) :] + settings[: turn % len(settings)]:
                bar.set_description(f"{setting}, {turn + 1} of {ROUNDS}")
                scores[setting].append(it.probe(setting))
                bar.update()
        return chosen(scores)

    def settled(first: Setting, others: Sequence[Setting]) -> Setting:
        winner = best(first, others)
        return first if winner == first else best(first, [winner])

    winners = []
    for backend in backends:
        if full:
            winners.append(settled(default(backend), grid(backend)))
            continue
        first = settled(default(backend), rivals(backend))
        winners.append(settled(first, grid(backend, [first.block_bytes])))
    return settled(winners[0], winners[1:]) if len(winners) > 1 else winners[0]


def num_probes(backends: Sequence[str], full: bool) -> int:
    """About as many as the search makes."""
    settings = sum(len(grid(b)) if full else len(rivals(b)) + len(grid(b, [MIB])) for b in backends)
    return ROUNDS * (settings + (len(backends) if len(backends) > 1 else 0))
