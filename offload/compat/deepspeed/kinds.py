"""Kinds of values that a key of a ``ds_config`` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload import option_values

AUTO = "auto"


def is_auto(value: object) -> bool:
    """The value is left to the script's arguments and the optimizer."""
    return isinstance(value, str) and value == AUTO


@dataclass(frozen=True)
class Kind:
    """``check`` gives the value as it is used, or raises ``ConfigError`` that names the key."""

    check: Callable[[str, Any], Any]
    takes_auto: bool = True


def _whole(value: object) -> object:
    """JSON writes large numbers as 5e8, which are floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at_least(least: int) -> Callable[[str, Any], int]:
    return lambda key, value: option_values.as_count(key, _whole(value), least)


def _whole_or_inf(key: str, value: object) -> int | float:
    return math.inf if value == math.inf else option_values.as_count(key, _whole(value), 0)


def _stage(key: str, value: object) -> int:
    stage = _whole(value)
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        option_values.refuse(key, "a whole number from 0 to 3", value)
    return stage


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
    if not isinstance(value, Mapping):
        option_values.refuse(key, "an object in braces, {...}", value)
    return dict(value)


def _paths(key: str, value: object) -> list[str]:
    return [str(path) for path in option_values.as_paths(key, value)]


def _one_of(*names: str) -> Kind:
    return Kind(lambda key, value: option_values.as_choice(key, value, names), takes_auto=False)


ANY = Kind(lambda key, value: value)
DICT = Kind(_dict, takes_auto=False)

KINDS = {
    "any": ANY,
    "flag": Kind(option_values.as_flag),
    "count": Kind(_at_least(1)),
    "natural": Kind(_at_least(0)),
    "integer": Kind(_at_least(-(2**63))),
    "whole_or_inf": Kind(_whole_or_inf, takes_auto=False),
    "stage": Kind(_stage, takes_auto=False),
    "number": Kind(option_values.as_number),
    "share": Kind(_share),
    "rates": Kind(_rates),
    "betas": Kind(option_values.as_betas),
    "text": Kind(_text, takes_auto=False),
    "dict": DICT,
    "options": Kind(option_values.as_options, takes_auto=False),
    "paths": Kind(_paths, takes_auto=False),
    "dtype": _one_of("fp32", "fp16", "bf16"),
    "device": _one_of("none", "cpu", "nvme"),
    "mean_or_sum": _one_of("mean", "sum"),
    "log_or_linear": _one_of("log", "linear"),
}
"""The kinds, by the names that ``keys.ini`` calls them."""
