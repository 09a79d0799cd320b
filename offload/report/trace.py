"""Timeline of a step, for Perfetto: compute, waits, updates and each transfer on its own track."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapper import Ticket

_SPANS_MAX = 100_000
"""The latest ones are kept: evaluation without end has no step that ends."""


@dataclass(slots=True)
class Span:
    """One thing that took time. Seconds of ``time.perf_counter``; ``stop`` is None while it goes on."""

    track: str
    name: str
    start: float
    stop: float | None = None
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Duration; up to now while it goes on."""
        return (time.perf_counter() if self.stop is None else self.stop) - self.start


class Trace:
    """Collects the spans of the present step; keeps those of the last one. Spans may end in any thread."""

    def __init__(self) -> None:
        self._present: deque[Span] = deque(maxlen=_SPANS_MAX)
        self._last: deque[Span] = deque()
        self._over: deque[str | float] = deque(maxlen=4 * _SPANS_MAX)
        """Those of the present step that were given when they were over, four values for each, one after the other: a
        small unit has three of them in each step, and as objects they would be work for the collector."""
        self._last_over: deque[str | float] = deque()

    def begin(self, track: str, name: str, nbytes: int = 0) -> Span:
        """Something begins now."""
        span = Span(track, name, time.perf_counter(), nbytes=nbytes)
        self._present.append(span)
        return span

    def end(self, span: Span) -> None:
        """It is over."""
        span.stop = time.perf_counter()

    def over(self, track: str, name: str, start: float, stop: float | None = None) -> float:
        """Note that what began at ``start`` was over at ``stop``, or is now; when it was."""
        if stop is None:
            stop = time.perf_counter()
        self._over.extend((track, name, start, stop))  # one step of the interpreter
        return stop

    def transfer(self, track: str, name: str, nbytes: int, ticket: Ticket) -> Ticket:
        """A transfer has begun; it ends when the device says so."""
        span = self.begin(track, name, nbytes)
        ticket.add_done_callback(lambda: self.end(span))
        return ticket

    @property
    def last(self) -> Sequence[Span]:
        """The spans of the last step, in the order in which they began. What was under way at its end may be still."""
        over: Any = iter(tuple(self._last_over))
        spans = [*self._last, *map(Span, over, over, over, over)]
        return tuple(sorted(spans, key=lambda span: span.start))

    def end_step(self) -> None:
        """Begin the next step: what comes now belongs to it."""
        self._last, self._present = self._present, deque(maxlen=_SPANS_MAX)
        self._last_over, self._over = self._over, deque(maxlen=4 * _SPANS_MAX)

    def write(self, path: Path) -> None:
        """Write the last step as a Chrome trace. What goes on still is drawn up to now."""
        now = time.perf_counter()
        spans = self.last
        origin = spans[0].start if spans else now
        events: list[dict[str, object]] = []
        for tid, (track, lane) in enumerate(lanes(spans, now)):
            of_lane = {"pid": 1, "tid": tid}
            events.append({"ph": "M", "name": "thread_name", "args": {"name": track}, **of_lane})
            events.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": tid}, **of_lane})
            for span in lane:
                time_us = {"ts": (span.start - origin) * 1e6, "dur": ((span.stop or now) - span.start) * 1e6}
                moved = {"bytes": span.nbytes} if span.nbytes else {}
                events.append({"ph": "X", "name": span.name, "cat": span.track, "args": moved, **time_us, **of_lane})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def lanes(spans: Iterable[Span], now: float) -> list[tuple[str, list[Span]]]:
    """Each track, cut into as many lanes as it has spans at the same time: a lane draws one after the other."""
    tracks: dict[str, list[list[Span]]] = {}
    for span in spans:
        lanes = tracks.setdefault(span.track, [])
        lane = next((lane for lane in lanes if (lane[-1].stop or now) <= span.start), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return [(track, lane) for track in sorted(tracks) for lane in tracks[track]]
