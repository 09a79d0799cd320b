"""The first fatal error wins: it is kept, and every later call of the engine raises it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NoReturn

from swapper import StorageError


class Failure:
    """Holds the first fatal error of any thread.

    ``with failure:`` is for whatever waits for the store on the training thread: a fault there is fatal. Raises the
    first one. It is entered several times for each unit and step, so it is no generator.
    """

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

    def raise_first(self, error: BaseException) -> NoReturn:
        """Keep ``error`` unless there was one before it, and raise the first."""
        self.record(error)
        assert self._error is not None
        raise self._error

    def guard(self) -> Failure:
        """This, for ``with``."""
        return self

    def __enter__(self) -> None:
        self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, StorageError):
            self.raise_first(error)
