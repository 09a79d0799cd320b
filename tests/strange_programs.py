"""Random programs, each run by PyTorch alone, by the engine in RAM, and by the engine with the least budget and the
rest on NVMe: the same numbers must come out, or one typed error."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PLACES = ("torch", "ram", "nvme")


@dataclass
class Found:
    """What came of a program in one place."""

    numbers: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    error: str | None = None
    is_typed: bool = False
    message: str = ""


Draw = Callable[[int], Any]
"""Gives the program of a number."""

Run = Callable[[Any, str, Path], Found]
"""Runs a program in a place, with a folder for what is on NVMe."""


def try_program(draw: Draw, run: Run, seed: int, folder: Path) -> tuple[str | None, str]:
    """What is wrong with the program of this number, and what came of it."""
    program = draw(seed)
    outcomes = {place: run(program, place, folder) for place in PLACES}
    typed = [found.message for found in outcomes.values() if found.is_typed]
    plain = outcomes["torch"].error
    return judge(outcomes), typed[0][:100] if typed else f"{plain}, as in PyTorch" if plain else "the same"


def judge(outcomes: dict[str, Found]) -> str | None:
    """What is wrong, if anything is."""
    plain, ram, nvme = (outcomes[place] for place in PLACES)
    for place in ("ram", "nvme"):
        found = outcomes[place]
        if found.error is not None:
            if not found.is_typed and found.error != plain.error:
                return f"{place}: {found.error}: {found.message[:300]}"
        elif plain.error is not None:
            return f"{place}: no error, and {plain.error} in PyTorch: {plain.message[:200]}"
        elif not _near(plain, found):
            return f"{place}: other numbers than PyTorch: {_apart(plain, found)}"
    if ram.error is None and nvme.error is None and not _same(ram, nvme):
        return f"RAM and NVMe: other bits: {_apart(ram, nvme)}"
    return None


def _near(left: Found, right: Found) -> bool:
    return len(left.numbers) == len(right.numbers) and _apart(left, right) < 1e-4


def _apart(left: Found, right: Found) -> float:
    apart = [abs(a - b) / (1 + abs(a)) for a, b in zip(left.numbers, right.numbers, strict=True)]
    apart += [(a - b).abs().max().item() for a, b in zip(left.weights, right.weights, strict=True)]
    return max((float("inf") if number != number else number for number in apart), default=0.0)


def _same(left: Found, right: Found) -> bool:
    return left.numbers == right.numbers and all(map(torch.equal, left.weights, right.weights))


def main(draw: Draw, run: Run, description: str) -> None:
    """Try as many programs as the command line says; the exit status is 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: Counter[str] = Counter()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first, arguments.first + arguments.programs):
            fault, result = try_program(draw, run, seed, Path(folder))
            results[result] += 1
            if fault is not None:
                wrong += 1
                print(f"{seed}: {fault}\n    {draw(seed)}", flush=True)
    for result, count in results.most_common():
        print(f"{count:>6}  {result}")
    print(f"{arguments.programs} programs, {wrong} wrong")
    sys.exit(wrong > 0)
