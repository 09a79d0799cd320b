"""Numbers in words: seconds, bytes, counts, and round places for an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def seconds(value: float) -> str:
    """Such as ``1.28 s``, ``63 ms`` or ``3.4 h``."""
    return _scaled(value, _SECONDS)


def nbytes(value: float) -> str:
    """Such as ``39.3 MB``."""
    return _scaled(value, _BYTES)


def rate(value: float) -> str:
    """Such as ``1.2 GB/s``."""
    return f"{nbytes(value)}/s"


def count(value: float) -> str:
    """Such as ``15,300,000``: three digits that count."""
    digits = 3 - len(str(abs(round(value))))
    return f"{round(value, min(digits, 0)):,.0f}"


def short(text: str) -> str:
    """Without zeros at the end of a fraction: ``50.0 ms`` is ``50 ms``."""
    return re.sub(r"\.?0+(?= |$)", "", text) if "." in text else text


def number(value: float) -> str:
    """Such as ``2.193``, ``12,000`` or ``3e-05``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """Such as ``76 %`` or ``0.03 %``."""
    return f"{value * 100:.0f} %" if value >= 0.01 or value == 0 else f"{value * 100:.2g} %"


def _scaled(value: float, scale: tuple[tuple[float, str], ...]) -> str:
    if not math.isfinite(value):
        return f"{value:g}"
    if value == 0:
        return f"0 {'s' if scale is _SECONDS else 'B'}"
    size, unit = next((entry for entry in scale if abs(value) >= entry[0]), scale[-1])
    scaled = value / size
    digits = 0 if scaled >= 100 or (unit == "B") else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {unit}"


def places(low: float, high: float, count: int, shown: Callable[[float], str]) -> list[float]:
    """At most ``count`` places from ``low`` to ``high`` that are round as ``shown`` writes them: half a minute, say."""
    unit = next((size for size, _ in _SECONDS if high >= size), 1.0) if shown is seconds else 1.0
    return [value * unit for value in ticks(low / unit, high / unit, count)]


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most ``count`` round numbers from ``low`` to ``high``."""
    span = high - low
    if span <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / count))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]
