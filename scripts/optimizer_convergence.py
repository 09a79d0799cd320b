#!/usr/bin/env python3
"""Bytes of states a parameter against the loss that they lead to: a table of docs/recipes/matrix-optimizers.md.

A small transformer learns bytes of this project's pages in bf16 under the engine, in memory. Of each optimizer three
learning rates run for a quarter of the steps; the best one runs all steps from two seeds. The table has the mean loss
of the tenth of the steps before a half and before the end, and half of the difference of the two seeds. ``--only`` runs
some optimizers, ``--formats`` some formats; ``--write`` puts each row into the page once it is there, beside others.

``--curve SEED ...`` is a longer look at one optimizer: losses on the way, all formats with one learning rate. Seeds are
the outer loop, so that a run that is cut off has whole ones. Formats with the same seed see the same tokens from the
same weights: the last column is the difference to fp32 of each such pair.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import OffloadEngine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes" / "matrix-optimizers.md"
BEGIN, END = "<!-- convergence -->\n", "<!-- end of convergence -->"
HEAD = "| optimizer | bytes of states | learning rate | loss at a half | loss at the end |\n|---|---|---|---|---|\n"
WIDTH, DEPTH, LENGTH, BATCH = 128, 3, 64, 8

RATES = {
    "adamw": (1e-3, 2e-3, 4e-3),
    "lion": (1e-4, 3e-4, 1e-3),
    "muon": (2e-3, 4e-3, 8e-3),
    "lamb": (5e-3, 1e-2, 2e-2),
    "adam_mini": (1e-3, 2e-3, 4e-3),
}
FORMATS = {
    "fp32": {"moments_dtype": "fp32"},
    "bf16": {"moments_dtype": "bf16"},
    "int8": {"moments_dtype": "int8"},
    "bf16 without a master": {"moments_dtype": "bf16", "master_dtype": "bf16"},
    "int8 without a master": {"moments_dtype": "int8", "master_dtype": "bf16"},
}
ROWS = [(name, formats) for name in RATES for formats in FORMATS]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> torch.Tensor:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


def losses(data: torch.Tensor, name: str, formats: str, lr: float, seed: int, steps: int) -> tuple[list[float], float]:
    """The loss of each step, and the bytes of states a parameter."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model()
    options: dict[str, Any] = {"optimizer": name, "precision": "bf16", "lr": lr, **FORMATS[formats]}
    with OffloadEngine(model, gradient_clipping=1.0, **options) as engine:
        found = []
        for step in range(steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 20) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
            starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
            tokens = data[starts + torch.arange(LENGTH + 1)]
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        numel = sum(parameter.numel() for parameter in model.parameters())
        return found, engine.plan.resident_bytes["states"] / numel


def row(data: torch.Tensor, name: str, formats: str, steps: int) -> str:
    def mean(found: list[float], end: int) -> float:
        part = found[end - steps // 10 : end]
        return sum(part) / len(part) if all(map(math.isfinite, part)) else math.inf

    quarter = steps // 4
    short = {lr: losses(data, name, formats, lr, 0, quarter)[0][-quarter // 3 :] for lr in RATES[name]}
    lr = min(short, key=lambda lr: sum(short[lr]))
    runs = [losses(data, name, formats, lr, seed, steps) for seed in (1, 2)]
    half, last = ([mean(found, end) for found, _ in runs] for end in (steps // 2, steps))
    cells = [f"{sum(each) / 2:.3f} ± {abs(each[0] - each[1]) / 2:.3f}" for each in (half, last)]
    return f"| {name}, {formats} | {runs[0][1]:.1f} | {lr:g} | {cells[0]} | {cells[1]} |"


def curve(data: torch.Tensor, name: str, formats: list[str], lr: float, seeds: list[int], steps: int) -> None:
    """Print a table for each seed more."""
    ends, tenth = [steps * part // 4 for part in (1, 2, 3, 4)], max(steps // 10, 1)
    runs: dict[str, list[list[float]]] = {each: [] for each in formats}
    for seed in seeds:
        for each in formats:
            found, nbytes = losses(data, name, each, lr, seed, steps)
            runs[each].append([sum(found[end - tenth : end]) / tenth for end in ends] + [nbytes])
        print(f"\n{name}, learning rate {lr:g}, {len(runs[formats[0]])} seeds: mean and half of the range")
        print(f"| states | bytes | {' | '.join(f'{end} steps' for end in ends)} | against {formats[0]} |")
        print("|---|---|---|---|---|---|---|")
        for each in formats:
            of_ends = [_with_range([run[index] for run in runs[each]], ".3f") for index in range(len(ends))]
            pairs = [run[-2] - first[-2] for run, first in zip(runs[each], runs[formats[0]], strict=True)]
            last = "" if each == formats[0] else _with_range(pairs, "+.4f")
            print(f"| {each} | {runs[each][0][-1]:.1f} | {' | '.join(of_ends)} | {last} |", flush=True)


def _with_range(values: list[float], form: str) -> str:
    return f"{sum(values) / len(values):{form}} ± {(max(values) - min(values)) / 2:{form.lstrip('+')}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(RATES), choices=list(RATES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS), help="of states")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--curve", nargs="+", type=int, metavar="SEED", help="with the largest learning rate of each")
    parser.add_argument("--write", action="store_true", help="into the page")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="precision=")
    data = text()
    if given.curve:
        for name in given.only:
            curve(data, name, given.formats, RATES[name][-1], given.curve, given.steps)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    present, _, after = rest.partition(END)
    rows = dict(line[2:].split(" |", 1) for line in present.splitlines() if ", " in line.split("|")[1])
    order = [f"{name}, {formats}" for name, formats in ROWS]
    for name, formats in ROWS:
        if name not in given.only or formats not in given.formats:
            continue
        line = row(data, name, formats, given.steps)
        rows.update([line[2:].split(" |", 1)])
        print(line, flush=True)
        if given.write:
            lines = [f"| {key} |{rows[key]}" for key in order if key in rows]
            PAGE.write_text(before + BEGIN + HEAD + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
