"""Calls of ranks over a frozen base that was given as files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import frozen_bases

from offload import BudgetError, ConfigError, OffloadEngine


def trains(rank: int, size: int, base: Path, folder: Path, in_place: bool) -> tuple[list[float], str, int]:
    """Losses, weights, and bytes of the base that this rank reads where they are, with the least budget."""
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": folder}
    if in_place:
        options["weights"] = base
    make = frozen_bases.unborn if in_place else frozen_bases.build
    try:
        OffloadEngine(make(), host_memory=1, **options)
    except BudgetError as error:
        options["host_memory"] = error.needed_bytes
    with OffloadEngine(make(), **options) as engine:
        losses = frozen_bases.steps(engine, range(3))
        held = frozen_bases.held(engine)
        found = hashlib.sha256(b"".join(held[name].float().numpy().tobytes() for name in sorted(held))).hexdigest()
        return losses, found, engine.plan.in_place_bytes


def refused(rank: int, size: int, bases: list[Path], folder: Path) -> str:
    try:
        OffloadEngine(frozen_bases.unborn(), weights=bases[rank], precision="bf16", nvme_path=folder)
    except ConfigError as error:
        return str(error)
    return ""
