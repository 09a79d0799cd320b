#!/usr/bin/env python3
"""Bytes a parameter of optimizers, at rest and moved in a step: the table of docs/recipes/matrix-optimizers.md.

A model of linear layers trains for some steps in bf16 with the least memory that each optimizer works with. States are
what the plan has of them, the fp32 master of bf16 weights included; read and written is what the engine counted in the
last step, for forward, backward and update. Muon, LAMB and Adafactor are those of the page, whose code runs.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import BudgetError, OffloadEngine

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "matrix-optimizers.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
STEPS = 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
    return nn.Sequential(nn.Embedding(256, 256), *blocks, nn.Linear(256, 256))


def names_of_page(folder: Path) -> dict[str, Any]:
    """What the code of the page defines; its own trainings run in ``folder``."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(block.replace('nvme_path="."', f"nvme_path={str(folder)!r}"), names)
    return names


def candidates(page: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names, and functions that give the options of an engine over a model."""
    for name in ("adamw", "lion"):
        for moments in ("fp32", "bf16", "int8"):
            words = f"{name}, kernel" if moments == "fp32" else f"{name}, kernel, moments in {moments}"
            yield words, lambda model, name=name, moments=moments: {"optimizer": name, "moments_dtype": moments}
    momentum = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "lr": 1e-2}
    yield "sgd with momentum, kernel", lambda model: momentum
    for name in ("muon", "lamb", "adam_mini"):
        for moments in ("fp32", "bf16", "int8"):
            words = f"{name}, ours" if moments == "fp32" else f"{name}, ours, moments in {moments}"
            yield words, lambda model, name=name, moments=moments: {"optimizer": name, "moments_dtype": moments}
    yield "Muon, AdamW for the rest", lambda model: {"optimizer": page["muon"](model)}
    yield "LAMB", lambda model: {"optimizer": page["lamb"](model)}
    yield "Adafactor", lambda model: {"optimizer": page["adafactor"](model)}


def row(name: str, options_of: Any, folder: Path) -> str:
    def engine(host_memory: int) -> OffloadEngine:
        model = build()
        return OffloadEngine(model, nvme_path=folder, host_memory=host_memory, precision="bf16", **options_of(model))

    try:
        engine(1).close(discard=True)
    except BudgetError as error:
        least = error.needed_bytes
    with engine(least) as made:
        for _ in range(STEPS):
            made.backward(made(torch.arange(64)).square().mean())
            made.step()
            made.synchronize()
        plan, report = made.plan, made.report()
        numel = sum(item.unit.numel for item in plan.units)
        states = plan.resident_bytes["states"] + plan.nvme_bytes["states"]
        moved = report.nvme_read_bytes, report.nvme_write_bytes
        made.close(discard=True)
    return f"| {name} | {' | '.join(f'{each / numel:.1f}' for each in (states, *moved))} | {least / 2**20:.1f} MiB |"


def table() -> str:
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, options, Path(folder)) for name, options in candidates(names_of_page(Path(folder)))]
    head = "| optimizer | states | read in a step | written in a step | least memory |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the page")
    found = table()
    print(found)
    if parser.parse_args().write:
        before, _, after = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + found + END + after.partition(END)[2])


if __name__ == "__main__":
    main()
