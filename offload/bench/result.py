"""The figures of a measurement, as values of JSON, and the profile that they make."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aio_ext import unavailable_backends
from aio_ext.measure import READS, WRITES, Sample, mixed_q
from aio_ext.profile import IoProfile, file_system
from offload.bench.contest import Contest, Samples
from offload.bench.further import median_rate
from offload.bench.subject import GIB, KIB, MODES, Setting, Subject
from offload.ranks.topology import text_of


def result_of(it: Subject, setting: Setting, engine: Contest, in_flight: Contest) -> dict[str, Any]:
    rates = {mode: median_rate(engine.ours[mode]) for mode in MODES}
    share = READS / (READS + WRITES)
    q = mixed_q(share / rates["read"], (1 - share) / rates["write"], 1 / rates["mixed"])
    return {
        "path": str(it.path),
        "file_system": file_system(it.path),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "cache_bytes": last_level_cache_bytes(),
        "backend": setting.backend,
        "block_bytes": setting.block_bytes,
        "queue_depth": setting.depth,
        "mixed_q": round(q, 2),
        **contest_of(engine),
        "in_flight": contest_of(in_flight),
        "huge_bytes": it.memory.huge_bytes(),
        "unavailable": unavailable_backends(),
    }


def contest_of(contest: Contest) -> dict[str, Any]:
    """Figures at one footprint."""
    fio = contest.fio
    return {
        "footprint_bytes": contest.footprint_bytes,
        **_figures(contest.ours),
        "fio": fio
        and {
            **_figures(contest.theirs),
            "ratio": {mode: round(_ratio(contest.ours[mode], contest.theirs[mode]), 3) for mode in MODES},
            "queue_depth": fio.depth,
            "engines": fio.engines,
            "huge_pages": fio.huge_pages,
        },
    }


def _figures(samples: Samples) -> dict[str, Any]:
    cpu = {mode: statistics.median(sample.cpu_seconds_per_gib for sample in samples[mode]) for mode in MODES}
    return {
        **{f"{mode}_gib_per_s": round(median_rate(samples[mode]), 3) for mode in MODES},
        "cpu_seconds_per_gib": {mode: round(cpu[mode], 4) for mode in MODES},
        "samples_gib_per_s": {mode: [round(s.gib_per_s, 3) for s in samples[mode]] for mode in MODES},
    }


def _ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    return statistics.median(a.bytes_per_s / b.bytes_per_s for a, b in zip(ours, theirs, strict=True))


def last_level_cache_bytes() -> int | None:
    """The largest cache of the first processor, as Linux tells; None where it does not."""
    sizes = [text_of(file) for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * KIB for size in sizes if size), default=None)


def profile_of(result: dict[str, Any]) -> IoProfile:
    threads = result["queue_depth"] if result["backend"] == "threads" else 4
    return IoProfile(
        backend=result["backend"],
        block_bytes=result["block_bytes"],
        queue_depth=result["queue_depth"],
        num_threads=threads,
        read_bytes_per_s=result["read_gib_per_s"] * GIB,
        write_bytes_per_s=result["write_gib_per_s"] * GIB,
        mixed_bytes_per_s=result["mixed_gib_per_s"] * GIB,
        mixed_q=result["mixed_q"],
    )
