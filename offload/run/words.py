"""The figures of a run for people, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.run import units


def words(figures: Mapping[str, Any]) -> str:
    """A line for each thing that is known."""
    return "\n".join(_lines(figures))


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    again = f", {figures['repeated_steps']:,} taken again" if figures["repeated_steps"] else ""
    yield f"{figures['path']}: {figures['state']}, {figures['steps']:,} steps{again}"
    if figures["loss_last_mean"] is not None:
        first, last = units.number(figures["loss_first"]), units.number(figures["loss_last_mean"])
        yield f"loss: {first} at first, {last} (mean of the last {figures['loss_last_steps']} steps)"
    if figures["step_seconds"] is not None:
        share = units.share(figures["efficiency"])
        yield f"step: {units.seconds(figures['step_seconds'])}, {share} of the bound ({figures['bound_by']})"
        total = sum(figures["seconds"].values()) or 1.0
        parts = sorted(figures["seconds"].items(), key=lambda part: -part[1])
        shares = [f"{name} {units.share(value / total)}" for name, value in parts if value / total >= 0.005]
        yield f"time: {', '.join(shares)}"
    for drive in figures["drives"]:
        line = (
            f"{drive['path']}: {units.nbytes(drive['read_bytes'])} read, {units.nbytes(drive['write_bytes'])} written"
        )
        if drive["endurance_steps"] is not None:
            line += f"; an SSD rated for 600 TB lasts for {units.count(drive['endurance_steps'])} more such steps"
        yield line
