"""The first fatal error wins: it is kept, and every later call of the engine raises it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from swapper import StorageError


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

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around whatever waits for the store on the training thread: a fault there is fatal. Raises the first one."""
        self.check()
        try:
            yield
        except StorageError as error:
            self.record(error)
            self.check()
