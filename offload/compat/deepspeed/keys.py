"""Every key of a ``ds_config``: which values it takes, and what becomes of it here, as ``keys.ini`` says.

The table in ``docs/deepspeed.md``, the one that is printed at the start, the checks and the translation are this data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from configparser import ConfigParser, ExtendedInterpolation
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from offload.compat.deepspeed.kinds import KINDS, Kind


class Effect(Enum):
    """Effect of a key."""

    HONOURED = "honoured"
    IDLE = "accepted, no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Key:
    """One value. ``harmless``: what a refused key may be, since it asks for nothing."""

    effect: Effect
    kind: Kind
    says: str
    harmless: tuple[Any, ...]

    @property
    def takes_auto(self) -> bool:
        return self.effect is not Effect.REFUSED and self.kind.takes_auto


@dataclass(frozen=True)
class Block:
    """Keys under one name; ``is_switched`` by ``enabled``, and off without it."""

    keys: Mapping[str, Key | Block | Feature]
    is_switched: bool = False


@dataclass(frozen=True)
class Feature:
    """A block of which nothing is taken over: its effect if it is on. Only the names at its first level are known.

    ``is_switched``: on if ``enabled`` is true somewhere in it. Else it is on when it is there.
    """

    effect: Effect
    says: str
    keys: frozenset[str]
    is_switched: bool


class _Table:
    """The file ``keys.ini``, which says in its first lines how it is written."""

    def __init__(self, text: str) -> None:
        self._sections = ConfigParser(
            delimiters=("=",), interpolation=ExtendedInterpolation(), default_section="sentences"
        )
        self._sections.read_string(text)

    def block(self, name: str, *, is_switched: bool = False) -> Block:
        """The block that a section describes."""
        return Block(dict(self._entries(name)), is_switched)

    def texts(self, section: str) -> dict[str, str]:
        """The rows of a section as they are written, each in one line."""
        sentences = self._sections.defaults()
        return {name: " ".join(row.split()) for name, row in self._sections[section].items() if name not in sentences}

    def _entries(self, section: str) -> Iterator[tuple[str, Key | Block | Feature]]:
        for name, row in self.texts(section).items():
            what, _, says = row.partition(": ")
            yield name, self._entry(name, what.split(), says or name)

    def _entry(self, name: str, what: list[str], says: str) -> Key | Block | Feature:
        match what:
            case ["block", section, *switch]:
                return self.block(section, is_switched=bool(switch))
            case [effect, "block", *switch]:
                known = frozenset(self._sections["names in blocks of which nothing is taken over"][name].split())
                return Feature(Effect[effect.upper()], says, known, is_switched=bool(switch))
            case [effect, kind, *harmless]:
                return Key(Effect[effect.upper()], KINDS[kind], says, tuple(map(json.loads, harmless[1:])))
        raise ValueError(f"keys.ini: {name}: {what}")


TABLE = _Table(Path(__file__).with_name("keys.ini").read_text(encoding="utf-8"))

TOP = TABLE.block("ds_config")
