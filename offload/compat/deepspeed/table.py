"""The tables of keys: of one configuration, for a terminal, and of all that are known, for the guide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from offload.compat.deepspeed import optimizers, schedulers
from offload.compat.deepspeed.checking import Row, all_keys
from offload.compat.deepspeed.keys import TOP, Block, Effect, Feature, Key

_WIDTH = 120
_OF_TYPES = {"optimizer.params": optimizers.PARAMS, "scheduler.params": schedulers.PARAMS}
"""Blocks whose keys depend on the type beside them."""


def table_of(rows: Sequence[Row]) -> str:
    """Table of what becomes of each key that was given: a line each, and of those without an effect a line for each
    reason."""
    honoured = [f"{row.key} = {row.given}: {row.says}" for row in rows if row.effect is Effect.HONOURED]
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.effect is Effect.IDLE:
            by_reason.setdefault(row.says, []).append(row.key.removeprefix("zero_optimization."))
    idle = [f"{', '.join(keys)}: {says}" for says, keys in by_reason.items()]
    lines = []
    for effect, of_effect in ((Effect.HONOURED, honoured), (Effect.IDLE, idle)):
        lines += [f"{effect.value}:", *(_wrapped(line) for line in of_effect)] if of_effect else []
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def markdown() -> str:
    """All keys that are known, as ``docs/deepspeed.md`` has them."""
    parts = ["### The file", _of_block(TOP)]
    for title, blocks in _OF_TYPES.items():
        parts.append(f"### {title}")
        for types, block in blocks.items():
            parts += [f"{types}:", _of_block(block)]
    return "\n\n".join(parts)


def key_facts() -> dict[str, Any]:
    """The same as values of JSON."""
    facts: dict[str, Any] = {"file": _facts_of_block(TOP)}
    for title, blocks in _OF_TYPES.items():
        facts[title] = {types: _facts_of_block(block) for types, block in blocks.items()}
    return facts


def _facts_of_block(block: Block) -> list[dict[str, Any]]:
    return [{"key": key, "effect": spec.effect.value, "says": spec.says} for key, spec in all_keys(block)]


def _of_block(block: Block) -> str:
    lines = ["| key | here | |", "|---|---|---|"]
    return "\n".join([*lines, *(_markdown_line(key, spec) for key, spec in all_keys(block))])


def _markdown_line(key: str, spec: Key | Feature) -> str:
    name = f"`{key}`" if isinstance(spec, Key) else f"`{key}` (block)"
    unless = ""
    if isinstance(spec, Key) and spec.harmless:
        unless = f", unless {' or '.join(str(value).lower() for value in spec.harmless)}"
    if isinstance(spec, Feature) and spec.is_switched and spec.effect is Effect.REFUSED:
        unless = ", if it is on"
    return f"| {name} | {spec.effect.value}{unless} | {spec.says} |"
