"""Stopping a command: a signal becomes an exception in the main thread, and all is closed on its way."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from offload.train.stopped import Stopped

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a request of the system, and the terminal that goes away."""


class Signals:
    """Within ``with``, turns a signal to stop into ``Stopped`` in the main thread. A second one ends the process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._handlers = {number: signal.signal(number, self._handle) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise ``Stopped`` if a signal has come: it may have hit a place that swallows exceptions (``__del__``)."""
        if self.received is not None:
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._handlers:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped
