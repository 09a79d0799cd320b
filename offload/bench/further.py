"""Measurements that are made on request: sustained writes, and many small tensors."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from aio_ext import Memory
from aio_ext.measure import Sample
from offload.bench.subject import GIB, KIB, MIB, Setting, Subject

TENSOR_MEMORY_BYTES = 288 * MIB


def sustained(it: Subject, setting: Setting, gib: float, bar: tqdm[Any]) -> dict[str, float]:
    """GiB/s of writing at the start, and of the last quarter, when a drive's fast cache may be full."""
    rates = []
    step = it.bytes_for(1.0)
    left = int(gib * GIB)
    with it.range(setting) as range_:
        while left > 0:
            bar.set_description(f"sustained, {left / GIB:.1f} GiB to go")
            rates.append(range_.measure("write", min(step, max(left, 16 * MIB))).gib_per_s)
            left -= step
    last = rates[-max(1, len(rates) // 4) :]
    return {"first_gib_per_s": rates[0], "last_gib_per_s": statistics.median(last), "written_gib": gib}


def tensors(it: Subject, setting: Setting, count: int, bar: tqdm[Any]) -> dict[str, Any]:
    """``count`` tensors of 64 KiB to 1 MiB, asked for at once, against the same bytes in requests of 256 MiB."""
    draw = random.Random(1)
    small = [draw.randrange(64 * KIB, MIB + 1, 4 * KIB) for _ in range(count)]
    large = [256 * MIB] * (sum(small) // (256 * MIB)) or [sum(small)]
    result: dict[str, Any] = {"count": count, "bytes": sum(small)}
    with Memory(TENSOR_MEMORY_BYTES) as memory, it.range(setting, memory) as range_:
        memory.populate()
        for kind in ("read", "write"):
            samples: dict[str, list[Sample]] = {"small": [], "large": []}
            for turn in range(5):
                bar.set_description(f"{count} tensors, {kind} {turn + 1} of 5")
                sizes = {"small": small, "large": large}
                for name in sizes if turn % 2 == 0 else reversed(sizes):
                    samples[name].append(range_.move(kind, sizes[name]))
            rates = {name: median_rate(samples[name]) for name in samples}
            result[kind] = {
                **{f"{name}_gib_per_s": round(rate, 3) for name, rate in rates.items()},
                "ratio": round(rates["small"] / rates["large"], 3),
                "samples_gib_per_s": {name: [round(s.gib_per_s, 3) for s in samples[name]] for name in samples},
            }
    return result


def median_rate(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.gib_per_s for sample in samples)
