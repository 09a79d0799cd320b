"""Kinds of values that a key of a ``ds_config`` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offload import option_values

AUTO = "auto"


@dataclass(frozen=True)
class Kind:
    """``check`` gives the value as it is used, or raises ``ConfigError`` that names the key."""

    check: Callable[[str, Any], Any]
    takes_auto: bool = True


def _whole(value: object) -> object:
    """JSON writes large numbers as 5e8, which are floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _count(key: str, value: object) -> int:
    return option_values.as_count(key, _whole(value))


def _natural(key: str, value: object) -> int:
    return option_values.as_count(key, _whole(value), 0)


def _integer(key: str, value: object) -> int:
    return option_values.as_count(key, _whole(value), -(2**63))


def _whole_or_inf(key: str, value: object) -> int | float:
    return math.inf if value == math.inf else _natural(key, value)


def _share(key: str, value: object) -> float:
    number = option_values.as_number(key, value)
    if number > 1:
        option_values.refuse(key, "a number from 0 to 1", value)
    return number


def _rates(key: str, value: object) -> float | list[float]:
    if isinstance(value, (list, tuple)):
        return [option_values.as_number(key, item) for item in value]
    return option_values.as_number(key, value)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        option_values.refuse(key, "a text", value)
    return value


def _dict(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        option_values.refuse(key, "an object in braces, {...}", value)
    return value


def _paths(key: str, value: object) -> list[str]:
    return [str(path) for path in option_values.as_paths(key, value)]


ANY = Kind(lambda key, value: value)
FLAG = Kind(option_values.as_flag)
COUNT = Kind(_count)
NATURAL = Kind(_natural)
INTEGER = Kind(_integer)
WHOLE_OR_INF = Kind(_whole_or_inf, takes_auto=False)
NUMBER = Kind(option_values.as_number)
SHARE = Kind(_share)
RATES = Kind(_rates)
BETAS = Kind(option_values.as_betas)
TEXT = Kind(_text, takes_auto=False)
DICT = Kind(_dict, takes_auto=False)
OPTIONS = Kind(option_values.as_options, takes_auto=False)
PATHS = Kind(_paths, takes_auto=False)


def choice(*names: str) -> Kind:
    """One of these texts."""
    return Kind(lambda key, value: option_values.as_choice(key, value, names), takes_auto=False)


def whole_up_to(most: int) -> Kind:
    """A whole number from 0 to ``most``."""

    def check(key: str, value: object) -> int:
        number = _whole(value)
        allowed: Sequence[int] = range(most + 1)
        if isinstance(number, bool) or not isinstance(number, int) or number not in allowed:
            option_values.refuse(key, f"a whole number from 0 to {most}", value)
        return number

    return Kind(check, takes_auto=False)
