"""The first fatal error wins: it is kept, and every later call of the engine raises it."""

from __future__ import annotations

import threading


class Failure:
    """Holds the first fatal error of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def record(self, error: BaseException) -> None:
        """Keep ``error`` unless there was one before it."""
        with self._lock:
            if self._error is None:
                self._error = error

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error
