"""The timeline of a step as HTML: a row for each thing that can happen beside others."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from offload.report.trace import Span, lanes
from offload.run.charts import NOTHING, WIDTH, key
from offload.run.units import nbytes, places, seconds, short

_ROW = 20
"""Height of a row in the drawing's units, which are pixels."""

_LANES_MAX = 4
"""Rows of one track; with deeper queues the others are left out, and counted."""

_SPANS_MAX = 3000
"""About as many spans are drawn; neighbours of a row that are short become one."""

_COLOURS = {
    "compute": "compute",
    "waiting": "wait",
    "update": "update",
    "read": "read",
    "write": "write",
    "to device": "to-device",
    "to host": "to-host",
}
_OTHER_COLOUR = "other"
_FIRST = ("compute", "waiting", "update", "read", "write")


def timeline(rows: Sequence[tuple[str, str, float, float, int]]) -> Markup:
    """The spans (track, name, start, seconds, bytes) of a step."""
    spans = [Span(track, name, start, start + length, size) for track, name, start, length, size in rows]
    end = max((span.stop or 0.0 for span in spans), default=0.0)
    if not end:
        return NOTHING
    found = lanes(sorted(spans, key=lambda span: span.start), end)
    found.sort(key=lambda lane: (_rank(lane[0]), lane[0]))
    numbered = [
        (track, sum(1 for other, _ in found[:at] if other == track), lane) for at, (track, lane) in enumerate(found)
    ]
    shown = [(track if nth == 0 else "", track, lane) for track, nth, lane in numbered if nth < _LANES_MAX]
    left_out = sum(len(lane) for _, nth, lane in numbered if nth >= _LANES_MAX)
    shortest = end * len(shown) / _SPANS_MAX
    drawing = [
        _bar(colour_of(track), row, end, span, count)
        for row, (_, track, lane) in enumerate(shown)
        for span, count in _joined(lane, shortest)
    ]
    names = [Markup("<span>{}</span>").format(name) for name, _, _ in shown]
    marks = [
        Markup('<span style="left:{:.2f}%">{}</span>').format(100 * at / end, short(seconds(at)))
        for at in places(0, end, 5, seconds)
    ]
    note = f"{left_out} more transfers were under way beside these." if left_out else ""
    return Markup(
        '<figure class="lanes" data-seconds="{end:.6f}"><div class="names">{names}</div><div class="plot" tabindex="0">'
        '<svg role="img" aria-label="Timeline of one step: {label}" viewBox="0 0 {w} {h}" style="height:{h}px" '
        'preserveAspectRatio="none">{drawing}</svg></div><div class="x">{marks}</div>{key}'
        '<p class="note">{note}</p></figure>'
    ).format(
        end=end,
        names=Markup("").join(names),
        label=", ".join(dict.fromkeys(track for _, track, _ in shown)),
        w=WIDTH,
        h=_ROW * len(shown),
        drawing=Markup("").join(drawing),
        marks=Markup("").join(marks),
        key=key([(track, colour_of(track)) for track in dict.fromkeys(track for _, track, _ in shown)]),
        note=note,
    )


def colour_of(track: str) -> str:
    """The colour of a track, a class of ``page.css``."""
    return _COLOURS.get(track, _OTHER_COLOUR)


def _rank(track: str) -> int:
    return _FIRST.index(track) if track in _FIRST else len(_FIRST)


def _joined(lane: Sequence[Span], shortest: float) -> list[tuple[Span, int]]:
    """The spans of a row, those together that are shorter than ``shortest`` and come close after one another."""
    joined: list[tuple[Span, int]] = []
    for span in lane:
        if joined:
            last, count = joined[-1]
            assert last.stop is not None
            if span.seconds < shortest and last.seconds < shortest and span.start - last.stop < shortest:
                joined[-1] = Span(last.track, last.name, last.start, span.stop, last.nbytes + span.nbytes), count + 1
                continue
        joined.append((span, 1))
    return joined


def _bar(colour: str, row: int, end: float, span: Span, count: int) -> Markup:
    what = span.name if count == 1 else f"{span.name} and {count - 1} more"
    size = f", {nbytes(span.nbytes)}" if span.nbytes else ""
    return Markup(
        '<rect class="{}" x="{:.2f}" y="{}" width="{:.2f}" height="{}"><title>{}: {}, {}{}, from {}</title></rect>'
    ).format(
        colour,
        span.start / end * WIDTH,
        row * _ROW + 2,
        max(span.seconds / end * WIDTH, 0.3),
        _ROW - 4,
        span.track,
        what,
        seconds(span.seconds),
        size,
        seconds(span.start),
    )
