"""Charts as HTML: lines, areas that are stacked, and lanes of a timeline.

The drawing is an SVG that is stretched to its place; the letters stand beside it in HTML, so they have their size at
any width. ``page.js`` adds values under the pointer, from what the chart carries in ``data-chart``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from offload.run.thin import Thinned
from offload.run.units import number, places, short, ticks

WIDTH, HEIGHT = 1000, 300
"""Of the drawing, in its own units."""

NOTHING = Markup('<p class="empty">Nothing to draw.</p>')

_CUT_FACTOR = 3.0
"""A value so many times as high as almost all others is cut off."""


@dataclass(frozen=True)
class Line:
    """One line: its name, its colour (a class of ``page.css``), its values. ``band``: between low and high, too."""

    name: str
    colour: str
    values: Thinned
    band: bool = False


def lines(
    label: str,
    series: Sequence[Line],
    shown: Callable[[float], str],
    *,
    from_zero: bool = True,
    marks: Sequence[float] = (),
) -> Markup:
    """Lines over steps. ``marks`` are steps at which something happened: the run went on there."""
    axes = _axes([each.values for each in series], from_zero=from_zero)
    if axes is None:
        return NOTHING
    drawing = [_mark(axes.x(at)) for at in marks]
    for each in series:
        if each.band:
            drawing.append(_band(axes, each))
        drawing.append(_line(axes, each))
    return _chart(label, axes, drawing, series, shown, legend=len(series) > 1)


def stacked(label: str, series: Sequence[Line], shown: Callable[[float], str]) -> Markup:
    """Areas on top of one another, over steps."""
    x = series[0].values.x
    filled = [[value if math.isfinite(value) else 0.0 for value in each.values.mean] for each in series]
    tops = [[math.fsum(column[: index + 1]) for column in zip(*filled, strict=True)] for index in range(len(filled))]
    axes = _axes([Thinned(x, tops[-1], tops[-1], tops[-1])], from_zero=True)
    if axes is None:
        return NOTHING
    drawing, below = [], [0.0] * len(x)
    for each, top in zip(series, tops, strict=True):
        drawing.append(_area(axes, each.colour, x, below, top, each.name))
        below = top
    return _chart(label, axes, drawing, series, shown, legend=True)


@dataclass(frozen=True)
class _Axes:
    """Axes of a chart: numbers to coordinates of the drawing. ``is_cut``: there are values above ``high``."""

    x_low: float
    x_high: float
    low: float
    high: float
    is_cut: bool

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return WIDTH / 2 if span == 0 else (value - self.x_low) / span * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT * (1 - (value - self.low) / (self.high - self.low))


def _axes(series: Sequence[Thinned], *, from_zero: bool) -> _Axes | None:
    """The axes that these values need; None if nothing is finite."""
    x = series[0].x
    means = sorted(value for each in series for value in each.mean if math.isfinite(value))
    if not means:
        return None
    highest = max((value for each in series for value in each.high if math.isfinite(value)), default=means[-1])
    usual = means[min(int(len(means) * 0.98), len(means) - 1)]
    is_cut = len(means) > 10 and usual > 0 and highest > _CUT_FACTOR * usual
    high = 1.3 * usual if is_cut else highest
    low = min(0.0, means[0]) if from_zero else min(value for each in series for value in each.low if value == value)
    if high == low:
        high, low = (high * 1.5, 0.0) if high > 0 else (high + 1.0, low)
    margin = 0.04 * (high - low)
    return _Axes(x[0], x[-1], low if from_zero else low - margin, high + margin, is_cut)


def _point(axes: _Axes, x: float, y: float) -> str:
    return f"{axes.x(x):.1f},{max(min(axes.y(y), 2 * HEIGHT), -HEIGHT):.1f}"


def _line(axes: _Axes, line: Line) -> Markup:
    """A line, with gaps where there is no value; a value that stands alone is a dot."""
    parts: list[list[str]] = [[]]
    for x, y in zip(line.values.x, line.values.mean, strict=True):
        if math.isfinite(y):
            parts[-1].append(_point(axes, x, y))
        elif parts[-1]:
            parts.append([])
    path = " ".join(f"M{part[0]}L{' '.join(part[1:])}" for part in parts if len(part) > 1)
    dots = " ".join(f"M{part[0]}h0" for part in parts if len(part) == 1)
    drawn = [
        Markup('<path class="{} {}" d="{}"/>').format(kind, line.colour, d)
        for kind, d in (("line", path), ("line dot", dots))
        if d
    ]
    return Markup("").join(drawn)


def _band(axes: _Axes, line: Line) -> Markup:
    rows = [row for row in zip(line.values.x, line.values.low, line.values.high, strict=True) if row[1] == row[1]]
    if all(low == high for _, low, high in rows):
        return Markup("")
    there = " ".join(_point(axes, x, high) for x, _, high in rows)
    back = " ".join(_point(axes, x, low) for x, low, _ in reversed(rows))
    return Markup('<polygon class="band {}" points="{} {}"/>').format(line.colour, there, back)


def _area(
    axes: _Axes, colour: str, x: Sequence[float], below: Sequence[float], top: Sequence[float], name: str
) -> Markup:
    if len(x) == 1:  # one step: a column
        x, below, top = [axes.x_low - 1, axes.x_low + 1], [below[0]] * 2, [top[0]] * 2
        axes = replace(axes, x_low=x[0] - 1, x_high=x[1] + 1)
    there = " ".join(_point(axes, at, value) for at, value in zip(x, top, strict=True))
    back = " ".join(_point(axes, at, value) for at, value in zip(reversed(x), reversed(below), strict=True))
    return Markup('<polygon class="area {}" points="{} {}"><title>{}</title></polygon>').format(
        colour, there, back, name
    )


def _mark(x: float) -> Markup:
    return Markup('<path class="mark" d="M{:.1f},0V{}"><title>went on from a checkpoint</title></path>').format(
        x, HEIGHT
    )


def _texts(values: Sequence[float], shown: Callable[[float], str]) -> list[str]:
    return [shown(value) if math.isfinite(value) else "-" for value in values]


def _chart(
    label: str,
    axes: _Axes,
    drawing: Sequence[Markup],
    series: Sequence[Line],
    shown: Callable[[float], str],
    *,
    legend: bool,
) -> Markup:
    x = series[0].values.x
    values = [{"name": each.name, "colour": each.colour, "y": _texts(each.values.mean, shown)} for each in series]
    y_ticks = places(axes.low, axes.high, 6, shown)
    x_ticks = [value for value in ticks(axes.x_low, axes.x_high, 5) if value == int(value)]
    grid = [Markup('<path class="grid" d="M0,{0:.1f}H{1}"/>').format(axes.y(value), WIDTH) for value in y_ticks]
    y_texts = [_at("top", axes.y(value) / HEIGHT, short(shown(value))) for value in y_ticks]
    x_texts = [_at("left", axes.x(value) / WIDTH, number(value)) for value in x_ticks]
    data = {"x": [f"step {number(value)}" for value in x], "at": [round(axes.x(v) / WIDTH, 4) for v in x]}
    return Markup(
        '<figure class="chart"><div class="y">{y}</div>'
        '<div class="plot" data-chart="{data}"><svg role="img" aria-label="{label}" viewBox="0 0 {w} {h}" '
        'preserveAspectRatio="none">{grid}{drawing}</svg></div><div class="x">{x}</div>{legend}{cut}</figure>'
    ).format(
        y=Markup("").join(y_texts),
        data=json.dumps({**data, "series": values}, separators=(",", ":")),
        label=label,
        w=WIDTH,
        h=HEIGHT,
        grid=Markup("").join(grid),
        drawing=Markup("").join(drawing),
        x=Markup("").join(x_texts),
        legend=key([(each.name, each.colour) for each in series]) if legend else "",
        cut=Markup('<p class="note">Higher values are cut off.</p>') if axes.is_cut else "",
    )


def _at(side: str, share: float, text: str) -> Markup:
    return Markup('<span style="{}:{:.2f}%">{}</span>').format(side, 100 * share, text)


def key(entries: Sequence[tuple[str, str]]) -> Markup:
    """The names of colours."""
    items = [Markup('<span class="key"><i class="{}"></i>{}</span>').format(colour, name) for name, colour in entries]
    return Markup('<figcaption class="keys">{}</figcaption>').format(Markup("").join(items))
