"""Looks at every key of a ``ds_config``: is it known, can its value be, and what becomes of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload import option_values
from offload.compat.deepspeed.keys import Block, Effect, Feature, Key
from offload.compat.deepspeed.kinds import AUTO, DICT, is_auto
from offload.errors import ConfigError

_KNOWN_MAX = 8
"""So many known names a message lists; more would not be read."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a key that was given, its value, and what became of it."""

    key: str
    given: str
    effect: Effect
    says: str


@dataclass(frozen=True)
class Checked:
    """``values`` are those of the blocks that are on, as they are used, with ``"auto"`` where it was written; what is
    null is left out."""

    values: dict[str, Any]
    rows: tuple[Row, ...]


def check(config: Mapping[str, Any], block: Block, path: str = "") -> Checked:
    """Check ``config``, which stands under ``path``. Raises ``ConfigError``, in one line, for what is wrong first."""
    rows: list[Row] = []
    return Checked(_block(config, block, path, rows, on=True), tuple(rows))


def type_of(section: Mapping[str, Any], path: str, example: str) -> str | None:
    """The type that an optimizer's or scheduler's section names; None if it names none. Raises ``ConfigError`` for
    parameters of no type."""
    if section.get("params") and "type" not in section:
        raise ConfigError(f'{path}.params is given without {path}.type: write "type": "{example}"')
    return section.get("type")


def joined(path: str, name: str) -> str:
    """The name of a key under a path."""
    return f"{path}.{name}" if path else name


def _block(given: Mapping[str, Any], block: Block, path: str, rows: list[Row], *, on: bool) -> dict[str, Any]:
    """The block's values. ``on``: they have an effect; else they are checked alone."""
    enabled = given.get("enabled")
    is_off = block.is_switched and (enabled is None or enabled is False)
    found: dict[str, Any] = {}
    for name, value in given.items():
        spec = _known(name, block.keys, path)
        key = joined(path, name)
        if value is None:
            continue
        if isinstance(spec, Block):
            if isinstance(value, bool):  # old files switch blocks by a flag
                value = {}
            found[name] = _block(DICT.check(key, value), spec, key, rows, on=on)
        elif isinstance(spec, Feature):
            rows.append(_feature(key, value, spec))
        else:
            found[name] = _value(key, value, spec)
            if spec.kind is DICT and spec.effect is Effect.HONOURED and path:
                continue  # what is in it has rows of its own
            counts = on and (name == "enabled" or not is_off)
            rows.append(Row(key, option_values.shown(value), *_becomes(spec, counts=counts)))
    return {} if is_off else found


def _value(key: str, value: object, spec: Key) -> Any:
    if is_auto(value) and spec.takes_auto:
        return AUTO
    checked = spec.kind.check(key, value)
    if spec.effect is Effect.REFUSED and checked not in spec.harmless:
        raise ConfigError(f"{key}={option_values.shown(value)} is not there: {spec.says}")
    return checked


def _becomes(spec: Key, *, counts: bool) -> tuple[Effect, str]:
    """Effect of a value that is given, in a block that counts or is off, and the reason."""
    if not counts:
        return Effect.IDLE, "its block is off"
    return (Effect.IDLE, "it asks for nothing") if spec.effect is Effect.REFUSED else (spec.effect, spec.says)


def _feature(key: str, value: object, spec: Feature) -> Row:
    """The row of a block that is not looked into further than its first level."""
    given: Mapping[str, Any] = {} if isinstance(value, bool) else DICT.check(key, value)
    for name in given:
        _known(name, dict.fromkeys(spec.keys), key)
    if "enabled" in given:
        option_values.as_flag(joined(key, "enabled"), given["enabled"])
    on = value is True or (_is_on(given) if spec.is_switched else value is not False)
    if on and spec.effect is Effect.REFUSED:
        raise ConfigError(f"{key} is not there: {spec.says}")
    shown = option_values.shown(value) if isinstance(value, bool) else "{...}"
    return Row(key, shown, Effect.IDLE, spec.says if on else "its block is off")


def _is_on(given: Mapping[str, Any]) -> bool:
    """A switch is on somewhere in the block, and no switch at the top is off."""
    if given.get("enabled") is False:
        return False
    return given.get("enabled") is True or any(_is_on(part) for part in given.values() if isinstance(part, Mapping))


def _known(name: object, keys: Mapping[str, Any], path: str) -> Any:
    """Return what is known of a key. Raises ``ConfigError`` with the name that may have been meant."""
    if name in keys:
        return keys[name]  # type: ignore[index]
    where = f" in {path}" if path else ""
    raise ConfigError(f"unknown key {option_values.shown(name)}{where}{_hint(str(name), keys)}")


def _hint(name: str, keys: Mapping[str, Any]) -> str:
    parts = (known for known in keys if len(name) > 3 and (f"_{name.lower()}" in known or known in name.lower()))
    near = option_values.nearest(name, keys) or next(parts, None)
    if near is not None:
        return f", did you mean {near!r}?"
    known = sorted(keys)
    more = f" and {len(known) - _KNOWN_MAX} more" if len(known) > _KNOWN_MAX else ""
    return f", known are: {', '.join(known[:_KNOWN_MAX])}{more}"


def torch_rows(given: Mapping[str, Any], kind: type, path: str, of: str) -> tuple[Row, ...]:
    """Rows of settings that a class of torch takes as they are. Raises ``ConfigError`` for one that it has not."""
    known = dict.fromkeys(list(inspect.signature(kind).parameters)[1:])
    for name in given:
        _known(name, known, path)
    return tuple(
        Row(joined(path, name), option_values.shown(value), Effect.HONOURED, f"{name} of {of}")
        for name, value in given.items()
    )


def all_keys(block: Block, path: str = "") -> Iterator[tuple[str, Key | Feature]]:
    """Every key that is known, with its path."""
    for name, spec in block.keys.items():
        key = joined(path, name)
        if isinstance(spec, Block):
            yield from all_keys(spec, key)
        else:
            yield key, spec
