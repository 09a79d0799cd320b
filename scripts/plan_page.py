#!/usr/bin/env python
"""What of docs/plan.md is made by the code: the printed examples of described machines, the tables of what models of
several sizes take at the least, of played schedules and of published set-ups. ``python scripts/plan_page.py`` writes
them anew."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import _played_schedules
import _published_setups

from offload.cli import main
from offload.predict.endurance import Endurance
from offload.predict.machine import described, parse_drive
from offload.predict.model import from_count
from offload.predict.prediction import least_host_bytes, predict
from offload.predict.workload import Workload

SIZES = {"1B": 1e9, "7B": 7e9, "13B": 13e9, "70B": 70e9}
DRIVES = {"3.5": "3.5GB/s,3GB/s,4TB", "7": "7GB/s,5GB/s,4TB", "14": "14GB/s,10GB/s,4TB"}
"""By what they read, GB/s."""
GPU = "rtx4090"
WORKLOAD = Workload(batch=1, sequence=2048, activations="recompute", device_bytes=8 << 30)
"""A third of the GPU's memory is the engine's, so that each of the models is larger than it."""
RATED_BYTES = 600 * 10**12


PAGE = Path(__file__).parents[1] / "docs" / "plan.md"


EXAMPLE = re.compile(r"```console\n\$ offload (plan [^\n]*--gpu[^\n]*)\n.*?```", re.DOTALL)


def with_sizes(text: str) -> str:
    """The page with the table of sizes as the code gives it now."""
    return _with_table(text, r"\| parameters \| least host memory", lines())


def with_published(text: str) -> str:
    """The page with the table of published set-ups as the code gives it now."""
    return _with_table(text, r"\| system \| model \| GPUs", _published_setups.lines())


def with_played(text: str) -> str:
    """The page with the table of played schedules as the code gives it now."""
    return _with_table(text, r"\| parameters \| host \| drives", _played_schedules.lines())


def _with_table(text: str, begin: str, rows: Iterator[str]) -> str:
    table = "\n".join(rows)
    return re.sub(rf"{begin}.*?\n\n", lambda _: f"{table}\n\n", text, flags=re.DOTALL)


def example(found: re.Match[str]) -> str:
    """An example as the code gives it now."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(shlex.split(found[1]))
    answer = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
    return f"```console\n$ offload {found[1]}\n{answer}\n```"


def lines() -> Iterator[str]:
    """The table in Markdown."""
    speeds = " | ".join(f"s a step at {speed} GB/s" for speed in DRIVES)
    yield f"| parameters | least host memory, GiB | NVMe, GB | {speeds} | written a step, GB | steps until 600 TB |"
    yield "|" + "---|" * (5 + len(DRIVES))
    for name, count in SIZES.items():
        yield _row(name, int(count))


def _row(name: str, count: int) -> str:
    model = from_count(count)
    machines = [described(GPU, host_bytes=0, drives=[parse_drive(drive)]) for drive in DRIVES.values()]
    least = least_host_bytes(model, machines[0], WORKLOAD)
    predictions = [predict(model, replace(machine, host_bytes=least), WORKLOAD) for machine in machines]
    last = predictions[-1]
    assert last.plan is not None
    wear = Endurance.of(last, RATED_BYTES)
    on_nvme = sum(tiers["nvme"] for tiers in last.plan.memory.values())
    seconds = " | ".join(f"{prediction.seconds:.1f}" for prediction in predictions)
    return (
        f"| {name} | {last.machine.host_bytes / 2**30:.1f} | {on_nvme / 1e9:,.0f} | {seconds} | "
        f"{wear.written_bytes / 1e9:,.0f} | {wear.steps:,} |"
    )


if __name__ == "__main__":
    PAGE.write_text(with_played(with_published(with_sizes(EXAMPLE.sub(example, PAGE.read_text())))))
