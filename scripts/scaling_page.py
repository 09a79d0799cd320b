#!/usr/bin/env python
"""The tables of docs/scaling.md, made by the forecast. ``python scripts/scaling_page.py`` writes them into the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from _published_ranks import STEPS, Step

from offload.predict.facts import memory_of
from offload.predict.machine import described, parse_drive
from offload.predict.model import Model, from_count
from offload.predict.prediction import Prediction, predict
from offload.predict.workload import Workload

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"

PARAMETERS = 10**12
GPUS = (8, 64, 128, 512)
GPUS_A_NODE = 8
HOST_BYTES = 1536 << 30
DRIVES = [parse_drive("7GB/s,5GB/s,3.84TB")] * 8
NETWORK = 8 * 50e9
WORKLOAD = Workload(batch=1, sequence=1024, activations="recompute", shard="weights")


def page(text: str) -> str:
    """The page with its tables as the code gives them now."""
    for name, lines in (("trillion", trillion()), ("published", published())):
        table = f"<!-- {name} -->\n\n" + "\n".join(lines) + f"\n\n<!-- end of {name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, table=table: table, text, flags=re.DOTALL)
    return text


def trillion() -> Iterator[str]:
    """A trillion parameters on one node and on more."""
    titles = (
        "GPUs | gradients are added up | device, GiB | host, GiB | NVMe, GiB | s a step | limited by | tokens/s "
        "| TFLOPS a GPU"
    )
    yield f"| {titles} |"
    yield "|" + "---|" * len(titles.split("|"))
    model = from_count(PARAMETERS)
    for added_inside in (False, True):
        for gpus in GPUS:
            if gpus > GPUS_A_NODE or not added_inside:  # within one node it is the same
                yield _trillion(model, gpus, added_inside)


def _trillion(model: Model, gpus: int, added_inside: bool) -> str:
    machine = described(
        "h100", host_bytes=HOST_BYTES, gpus=GPUS_A_NODE, nodes=gpus // GPUS_A_NODE, drives=DRIVES, network=NETWORK,
        added_inside=added_inside,
    )  # fmt: skip
    found = predict(model, machine, WORKLOAD)
    held = " | ".join(f"{_gib(found, tier):,.0f}" for tier in ("device", "host", "nvme"))
    where = "inside of nodes first" if added_inside else "where they are stored"
    computed = sum(flops for unit in model.units(WORKLOAD.dtype) for flops in model.flops(unit)) * found.tokens
    return (
        f"| {gpus} | {where} | {held} | {_seconds(found.seconds)} | {found.limit} ({_seconds(found.bound_seconds)} s) "
        f"| {found.tokens_per_second:,.0f} | {2 * computed / found.seconds / gpus / 1e12:,.0f} |"
    )


def _gib(found: Prediction, tier: str) -> float:
    return sum(places.get(tier, 0) for places in memory_of(found).values()) / 2**30


def published() -> Iterator[str]:
    """What others have measured, and the forecast for their hardware."""
    titles = (
        "system | parameters, billions | GPUs | batch x tokens a GPU | measured, tokens/s a GPU | predicted "
        "| limited by | predicted over measured"
    )
    yield f"| {titles} |"
    yield "|" + "---|" * len(titles.split("|"))
    yield from map(_published, STEPS)


def _published(step: Step) -> str:
    micro = f"{step.micro_batches} x " if step.micro_batches > 1 else ""
    return (
        f"| {step.system.name} | {step.parameters / 1e9:,.4g} | {step.gpus} {step.system.gpu} | "
        f"{micro}{step.batch} x {step.sequence} | {_tokens(step.measured)} | {_tokens(step.predicted)} | "
        f"{step.prediction.limit} | {step.predicted / step.measured:.2f} |"
    )


def _tokens(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
