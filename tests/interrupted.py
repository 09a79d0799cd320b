"""Ctrl-C at every line of some part of the engine, one after the other."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptAt:
    """Sends SIGINT before the ``position``-th line that this thread executes in files whose path has ``part``. With
    ``once`` a line counts where it comes there for the first time."""

    def __init__(self, position: int, part: str, *, once: bool) -> None:
        self.came = False
        self._position = position
        self._part = part
        self._once = once
        self._before: dict[FrameType, int] = {}
        self._lines: set[tuple[str, int, int]] = set()

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if self._part in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.came and not self._leaves_a_block(frame):
            self._lines.add((frame.f_code.co_filename, frame.f_lineno, 0 if self._once else len(self._lines)))
            if len(self._lines) == self._position:
                self.came = True
                signal.raise_signal(signal.SIGINT)
        return self._line

    def _leaves_a_block(self, frame: FrameType) -> bool:
        """The next thing done is the exit of a ``with``: Python handles no signal between the last call in a block and
        that one."""
        line, before = frame.f_lineno, self._before.get(frame, 0)
        self._before[frame] = line
        return before > line and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("with ")


def at_every_line(part: str, run: Callable[[Callable[[Callable[[], object]], bool]], None], *, once: bool) -> int:
    """Call ``run`` once for each line, with a function that makes a call which is interrupted there, and says whether
    it was. The number of lines."""
    position = 0
    while True:
        position += 1
        interrupt = InterruptAt(position, part, once=once)

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
