"""Long series made short enough to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

POINTS_MAX = 400


@dataclass(frozen=True)
class Thinned:
    """A series, or the means of its bins with the lowest and highest value of each. NaN: nothing finite is there."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def thin(x: Sequence[float], y: Sequence[float], points_max: int = POINTS_MAX) -> Thinned:
    """The series in at most ``points_max`` bins of equally many values; ``x`` is that of each bin's last value."""
    size = -(-len(x) // points_max) or 1
    bins = [[value for value in y[start : start + size] if math.isfinite(value)] for start in range(0, len(y), size)]
    ends = [x[min(start + size, len(x)) - 1] for start in range(0, len(x), size)]
    return Thinned(
        ends,
        [math.fsum(values) / len(values) if values else math.nan for values in bins],
        [min(values, default=math.nan) for values in bins],
        [max(values, default=math.nan) for values in bins],
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last ``window`` finite values at each place; NaN where the value itself is."""
    means: list[float] = []
    recent: list[float] = []
    for value in values:
        if not math.isfinite(value):
            means.append(math.nan)
            continue
        recent = [*recent[-window + 1 :], value] if window > 1 else [value]
        means.append(math.fsum(recent) / len(recent))
    return means
