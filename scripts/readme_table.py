#!/usr/bin/env python
"""The tables of models and of batches of README.md, by ``offload plan``. ``python scripts/readme_table.py`` writes them
into the page."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.cli import main as offload

PAGE = Path(__file__).parents[1] / "README.md"

MACHINE = ("--gpu", "4090", "--host-memory", "64GiB", "--nvme", "7GB/s,5GB/s,2TB", "--sustained-write", "1.5GB/s")
ROWS = (
    ("Llama 3.1 8B, LoRA (r=16)", "meta-llama/Llama-3.1-8B", ("--lora", "r=16")),
    ("Llama 3.1 8B, full", "meta-llama/Llama-3.1-8B", ()),
    ("Llama 3.1 8B, full, 8-bit moments", "meta-llama/Llama-3.1-8B", ("--moments-dtype", "int8")),
    ("Qwen3 32B, LoRA (r=16)", "Qwen/Qwen3-32B", ("--lora", "r=16")),
    ("Llama 3.1 70B, LoRA (r=16), base in 4 bits", "meta-llama/Llama-3.1-70B", ("--lora", "r=16", "--base", "nf4")),
    ("Llama 3.1 70B, LoRA (r=16)", "meta-llama/Llama-3.1-70B", ("--lora", "r=16")),
    ("Llama 3.1 70B, full", "meta-llama/Llama-3.1-70B", ()),
)
"""Each with its best batch of 2,048 tokens."""


BATCHES = (
    "meta-llama/Llama-3.1-70B", *MACHINE[:-2], "--moments-dtype", "int8", "--loss-rows", "1024", "--batch", "4",
    "--activations", "recompute",
)  # fmt: skip
"""The drive is not bound by what it writes in the long run."""


def page(text: str) -> str:
    """The page with its tables as the forecast is now."""
    head = "| training | sequences | activations | a step | tokens/s | written a token | limited by |"
    lines = [head, "|---|---|---|---|---|---|---|", *(_row(*row) for row in ROWS)]
    table = "<!-- forecast -->\n\n" + "\n".join(lines) + "\n\n<!-- end of forecast -->"
    text = re.sub(r"<!-- forecast -->.*?<!-- end of forecast -->", lambda _: table, text, flags=re.DOTALL)
    batches = "<!-- batches -->\n\n" + "\n".join(_batches()) + "\n\n<!-- end of batches -->"
    return re.sub(r"<!-- batches -->.*?<!-- end of batches -->", lambda _: batches, text, flags=re.DOTALL)


def _batches() -> Iterator[str]:
    columns = (
        "activations",
        "largest",
        "best",
        "a step",
        "tokens/s",
        "written a token",
        "limited by",
        "GPU",
        "RAM",
        "NVMe",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in plan(*BATCHES)["best_batches"]:
        name = _activations(row)
        if not row["fits"]:
            yield f"| {name} | none fits | | | | | {row['shortage']} | | | |"
            continue
        kept = row["activation_bytes"]
        sizes = f"{kept['device'] / 2**30:.1f} GiB | {kept['host'] / 2**30:.1f} GiB | {kept['nvme'] / 1e9:.0f} GB"
        speed = f"{row['tokens_per_second']:,.0f} | {row['written_bytes_a_token'] / 1e6:,.0f} MB | {row['limit']}"
        yield f"| {name} | {row['largest_batch']:,} | {row['batch']:,} | {row['seconds']:,.0f} s | {speed} | {sizes} |"


def _row(title: str, model: str, options: tuple[str, ...]) -> str:
    fitting = [row for row in plan(model, *MACHINE, *options)["best_batches"] if row["fits"]]
    if not fitting:
        return f"| {title} | does not fit | | | | | |"
    best = max(fitting, key=lambda row: row["tokens_per_second"])
    written = f"{best['written_bytes_a_token'] / 1e6:,.1f} MB"
    speed = f"{best['seconds']:,.1f} s | {best['tokens_per_second']:,.0f} | {written} | {best['limit']}"
    return f"| {title} | {best['batch']:,} | {_activations(best)} | {speed} |"


def _activations(row: dict[str, Any]) -> str:
    together = f", {row['micro_batch']} at a time, together" if row["micro_batch"] is not None else ""
    return f"`{row['activations']}`{together}"


def plan(*arguments: str) -> dict[str, Any]:
    """The answer of ``offload plan`` to these arguments."""
    with contextlib.redirect_stdout(io.StringIO()) as answer:
        status = offload(["plan", *arguments, "--json"])
    if status:
        raise SystemExit(status)
    return dict(json.loads(answer.getvalue()))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
