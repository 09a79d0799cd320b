"""SIGTERM and Ctrl-C while a durable run trains: the step at hand is abandoned, and the last one is committed.

The first signal is an exception in the main thread, wherever it is: ``SystemExit`` or ``KeyboardInterrupt``. It ends
the user's program, whose end closes the engine, which commits. Should that take too long, a second signal ends the
process at once, as if nobody had a handler; nothing that was committed is lost by that.
"""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType

_OURS = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Signals:
    """Handles the two signals from ``watch`` on until ``restore``, unless the program has handlers of its own."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, object] = {}
        self.came = False
        """A signal is ending the program."""

    def watch(self) -> None:
        """Have the next signal end the program in good order. Does nothing in other threads than the main one."""
        if current_thread() is not main_thread():
            return
        for number in _OURS:
            handler = signal.getsignal(number)
            if number not in self._before and handler in _DEFAULTS:
                self._before[number] = handler
                signal.signal(number, self._handle)
        if self.came:  # the program went on after all
            self.came = False
            for number in self._before:
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Have what was there before ``watch`` handle the signals from now on."""
        if current_thread() is not main_thread():
            return
        for number, handler in self._before.items():
            if self.came or signal.getsignal(number) == self._handle:
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        for own in self._before:
            signal.signal(own, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
