"""A translated configuration, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from offload.compat.deepspeed.table import table_of
from offload.compat.deepspeed.translation import Translation


def facts_of(translation: Translation) -> dict[str, Any]:
    """All of it as values of JSON."""
    scheduler, batch = translation.scheduler, translation.batch
    options = {
        name: value.__name__ if isinstance(value, type) else value for name, value in translation.options.items()
    }
    return {
        "options": options,
        "batch": {"train": batch.train, "micro": batch.micro, "gradient_accumulation_steps": batch.steps},
        "scheduler": None if scheduler is None else {"type": scheduler.name, "params": scheduler.params},
        "missing": [] if scheduler is None else [f"scheduler.params.{name}" for name in scheduler.missing],
        "keys": [{**asdict(row), "effect": row.effect.value} for row in translation.rows],
    }


def text_of(translation: Translation) -> str:
    """The call of ``OffloadEngine`` and of the scheduler as Python to paste, and the table of keys."""
    lines = [*_imports(translation), "", "engine = OffloadEngine(", "    model,"]
    for name, value in translation.options.items():
        shown = f"torch.optim.{value.__name__}" if isinstance(value, type) else repr(value)
        lines.append(f"    {name}={shown},")
    lines.append(")")
    if translation.optimizer is None:
        lines.append("# The file names no optimizer: give optimizer=, lr=, ...; without them it is AdamW.")
    if translation.scheduler is not None:
        lines += _scheduler_lines(translation)
    batch = translation.batch
    lines.append(f"# A step takes {batch.train} samples, in {batch.steps} forwards of {batch.micro}.")
    return "\n".join([*lines, "", table_of(translation.rows)])


def _imports(translation: Translation) -> list[str]:
    """Arguments that the call needs beside ``model``."""
    names = [value for value in translation.options.values() if isinstance(value, type)]
    of_torch = translation.scheduler is not None and translation.scheduler.kind.__module__.startswith("torch.")
    lines = ["import torch", ""] if names or of_torch else []
    lines.append("from offload import OffloadEngine")
    if translation.scheduler is not None and not of_torch:
        lines.append("from offload.compat.deepspeed import schedules")
    return lines


def _scheduler_lines(translation: Translation) -> list[str]:
    scheduler = translation.scheduler
    assert scheduler is not None
    module = "torch.optim.lr_scheduler" if scheduler.kind.__module__.startswith("torch.") else "schedules"
    params = {**dict.fromkeys(scheduler.missing, ...), **scheduler.params}
    given = "".join(f", {name}={'...' if value is ... else repr(value)}" for name, value in params.items())
    lines = [f"scheduler = {module}.{scheduler.name}(engine.optimizer{given})"]
    lines += [f"# scheduler.params.{name} is auto: write the number." for name in scheduler.missing]
    return lines
