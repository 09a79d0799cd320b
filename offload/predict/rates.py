"""Rates, sizes and counts as people write them: ``7GB/s``, ``400TFLOPS``, ``600TB``, ``7e9``."""

from __future__ import annotations

import re
from typing import Any

from offload import option_values

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_LEAST_WITHOUT_UNIT = 1 << 20
"""Nobody means fewer bytes than these by a plain number."""

_MOST = 10**16
"""No model and no data set has more."""

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def bytes_per_second(option: str, text: str) -> float:
    """``7GB/s``, ``3.5 GiB/s``: never bits, in which nobody counts drives and memory."""
    expected = 'a rate in bytes such as "7GB/s"'
    rate, unit = _rate(option, text, expected)
    if unit == "b":
        option_values.refuse(option, expected, text, f'"{text.strip().replace("b/", "B/")}"')
    return rate


def network_bytes_per_second(option: str, text: str) -> float:
    """The same, or ``400Gb/s``: a small b is a bit."""
    rate, unit = _rate(option, text, 'a rate such as "50GB/s" or "400Gb/s"')
    return rate / 8 if unit == "b" else rate


def _rate(option: str, text: str, expected: str) -> tuple[float, str]:
    """The number a second, and whether it counts bits or bytes."""
    number, power, binary, unit = _parsed(option, text, r"([kMGTkmgt]?)(i?)([Bb])/s", expected)
    return number * (1024 if binary else 1000) ** _POWERS[power.lower()], unit


def flops_per_second(option: str, text: str) -> float:
    """``400TFLOPS``, ``1.2PFLOPS``."""
    number, power = _parsed(option, text, r"(?i:([kMGTPE]?)(?:FLOPS|FLOP/s|F))", 'a rate such as "400TFLOPS"')
    return float(number) * 1000.0 ** _POWERS[power.lower()]


def count(option: str, text: str) -> int:
    """``7e9``, ``7B``, ``350M`` or ``7000000000``."""
    number, power = _parsed(option, text, r"([kKmMbBgGtT]?)", 'a number such as "7e9" or "7B"', least=1)
    found = int(number * _COUNTS[power.lower()])
    if found > _MOST:
        option_values.refuse(option, "at most 1e16", text)
    return found


def nbytes(option: str, text: str) -> int:
    """``3.8TB``, ``1.5TiB``: never "auto"."""
    expected = 'a size with its unit, such as "64GiB" or "3.8TB"'
    if text.isdigit() and int(text) < _LEAST_WITHOUT_UNIT:
        option_values.refuse(option, expected, text, f'"{text}GiB"' if int(text) else None)
    found = option_values.parse_bytes(option, text, expected)
    if not isinstance(found, int) or not found:
        option_values.refuse(option, expected, text)
    return found


def _parsed(option: str, text: str, unit: str, expected: str, least: float = 5e-324) -> Any:
    """The number in front of the unit, and the groups of the unit. Raises ``ConfigError``."""
    match = re.fullmatch(rf"\s*([\d.]+(?:[eE]\d+)?)\s*{unit}\s*", text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number < least:
        option_values.refuse(option, expected, text)
    return number, *match.groups()[1:]
