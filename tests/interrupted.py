"""Ctrl-C at every line of some part of the engine, or at every point where CPython looks for signals, one after the
other."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from _interrupts_watch import handling_points


class InterruptAt:
    """Sends SIGINT before the ``position``-th line that this thread executes in files whose path has ``part``. With
    ``once`` a line counts where it comes there for the first time. With ``points`` no lines count, but the moments at
    which CPython handles signals: after each call, before what it gave is kept, and where a function begins."""

    def __init__(self, position: int, part: str, *, once: bool, points: bool = False) -> None:
        self.came = False
        self._position = position
        self._part = part
        self._once = once
        self._points = points
        self._before: dict[FrameType, int] = {}
        self._places: set[tuple[str, int, int]] = set()

    def __enter__(self) -> InterruptAt:
        if self._points:
            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at settrace whether any frame has it
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._part not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = self._points
        if self._points:
            self._come_to(frame)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._counts(frame, event):
            self._come_to(frame)
        return self._step

    def _come_to(self, frame: FrameType) -> None:
        if self.came:
            return
        place = frame.f_lasti if self._points else frame.f_lineno
        self._places.add((frame.f_code.co_filename, place, 0 if self._once else len(self._places)))
        if len(self._places) == self._position:
            self.came = True
            signal.raise_signal(signal.SIGINT)

    def _counts(self, frame: FrameType, event: str) -> bool:
        if self._points:
            return event == "opcode" and frame.f_lasti in handling_points(frame.f_code)
        return event == "line" and not self._leaves_a_block(frame)

    def _leaves_a_block(self, frame: FrameType) -> bool:
        """The next thing done is the exit of a ``with``: Python handles no signal between the last call in a block and
        that one."""
        line, before = frame.f_lineno, self._before.get(frame, 0)
        self._before[frame] = line
        return before > line and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("with ")


Interrupted = Callable[[Callable[[], object]], bool]
"""Makes a call that is interrupted, and says whether it was."""


def at_every_line(part: str, run: Callable[[Interrupted], None], *, once: bool) -> int:
    """Call ``run`` once for each line, with a function that makes a call which is interrupted there. The number of
    lines."""
    return _at_every(lambda position: InterruptAt(position, part, once=once), run)


def at_every_point(part: str, run: Callable[[Interrupted], None]) -> int:
    """The same for each point, each time that the call comes there. The number of points."""
    return _at_every(lambda position: InterruptAt(position, part, once=False, points=True), run)


def _at_every(make: Callable[[int], InterruptAt], run: Callable[[Interrupted], None]) -> int:
    position = 0
    while True:
        position += 1
        interrupt = make(position)

        def interrupted(call: Callable[[], object], interrupt: InterruptAt = interrupt) -> bool:
            try:
                with interrupt:
                    call()
            except KeyboardInterrupt:
                assert interrupt.came
                return True
            return False

        run(interrupted)
        if not interrupt.came:
            return position - 1
