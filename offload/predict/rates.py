"""Rates, sizes and counts as people write them: ``7GB/s``, ``400TFLOPS``, ``600TB``, ``7e9``."""

from __future__ import annotations

import re

from offload import option_values
from offload.errors import ConfigError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def bytes_per_second(option: str, text: str) -> float:
    """``7GB/s``, ``3.5 GiB/s`` or, of networks, ``400Gb/s``: a small b is a bit."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGTkmgt]?)(i?)([Bb])/s\s*", text)
    number = _number(match[1]) if match else None
    if match is None or number is None or number <= 0:
        option_values.refuse(option, 'a rate such as "7GB/s" or "400Gb/s"', text)
    rate = number * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    return float(rate / 8 if match[4] == "b" else rate)


def flops_per_second(option: str, text: str) -> float:
    """``400TFLOPS``, ``1.2PFLOPS``."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGTPE]?)(?:FLOPS|FLOP/s|F)\s*", text, re.IGNORECASE)
    number = _number(match[1]) if match else None
    if match is None or number is None or number <= 0:
        option_values.refuse(option, 'a rate such as "400TFLOPS"', text)
    return float(number * 1000 ** _POWERS[match[2].lower()])


def count(option: str, text: str) -> int:
    """``7e9``, ``7B``, ``350M`` or ``7000000000``."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kKmMbBgGtT]?)\s*", text)
    number = _number(match[1]) if match else None
    if match is None or number is None or number < 1:
        option_values.refuse(option, 'a number such as "7e9" or "7B"', text)
    return int(number * _COUNTS[match[2].lower()])


def nbytes(option: str, text: str) -> int:
    """``3.8TB``, ``1.5TiB``: never "auto"."""
    found = option_values.parse_bytes(option, text)
    if not isinstance(found, int):
        raise ConfigError(f'{option}: expected bytes such as "1.5TiB", got {text!r}')
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
