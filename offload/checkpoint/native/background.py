"""Checkpoints that go to another file system while training goes on: a generation is retained until it is copied.

[Note: A copy under way] One checkpoint at a time is on its way. What comes next to the checkpoints (a save, a load, the
end of the engine or of the program) waits for it. A copy that fails is warned of at once, and what comes next raises
its error, once. The training is not concerned. A signal that ends a durable run gives the copy up: what it holds was
committed. A process that is killed leaves a folder without a tag, which the next save there removes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from aio_ext.latch import Latch
from offload.checkpoint.native.folder import SavingDirectory
from offload.errors import warn
from offload.interrupts import held_back
from offload.waiting import DaemonThread, Deadline, Failure
from swapper import DurableStore, OffloadError, StorageError, copy_generation
from swapper.errors import failed

_LOOK_S = 0.1
"""Seconds between two looks of a thread that waits for a copy at whether it makes progress."""


class _GivenUp(Exception):
    """Ends a copy that is not wanted any more."""


class BackgroundCopy:
    """Copies generations of the engine's store. One thread at a time calls the methods."""

    def __init__(self, store: DurableStore, failure: Failure) -> None:
        self._store = store
        self._failure = failure
        self._thread: threading.Thread | None = None
        self._over = Latch()
        self._name = ""
        self._copied_bytes = 0
        self._is_given_up = False
        self._error: Exception | None = None
        """Error by which the last copy failed. The thread sets it before it ends, who has waited for the thread takes
        it."""

    def begin(self, generation: int, directory: SavingDirectory, then: Callable[[], None]) -> None:
        """Copy a retained generation into ``directory``, give it its tag, call ``then``, and release it. No other copy
        may be under way: see ``wait``."""
        self._name = str(directory.target)
        self._over = Latch()
        self._thread = DaemonThread(partial(self._run, generation, directory, then), "offload-checkpoint")
        try:
            with held_back():
                self._thread.start()
        except RuntimeError:  # the system gives no more threads
            self._thread = None
            self._run(generation, directory, then)

    def wait(self) -> None:
        """Return when no copy is under way. Raises, once, what the last one has failed with, and ``WaitTimeout``."""
        seen, deadline = 0, Deadline(lambda: f"the copy of checkpoint {self._name}")
        # Nobody joins the thread: an interrupted join takes it for ended. After a fork there is none in the child.
        while self._thread is not None and self._thread.is_alive() and not self._over.wait(_LOOK_S):
            if self._copied_bytes != seen:
                seen, deadline = self._copied_bytes, Deadline(lambda: f"the copy of checkpoint {self._name}")
            deadline.check()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def finish(self, *, give_up: bool = False) -> None:
        """The end of the engine: as ``wait``. With ``give_up``, or when this wait is interrupted, the copy ends
        unfinished."""
        self._is_given_up = self._is_given_up or give_up
        try:
            self.wait()
        finally:
            self._is_given_up = True

    def _run(self, generation: int, directory: SavingDirectory, then: Callable[[], None]) -> None:
        try:
            warning = self._try(generation, directory, then)
            try:
                self._store.release(generation)
            except OffloadError as error:
                self._failure.record(error)
            if warning:
                warn(warning)
        finally:
            self._over.set()

    def _try(self, generation: int, directory: SavingDirectory, then: Callable[[], None]) -> str:
        """Copy, and say what went wrong."""
        try:
            self._copy(generation, directory, then)
        except _GivenUp:
            return f"checkpoint {self._name} was not finished: the program is to end"
        except Exception as error:
            if isinstance(error, StorageError):
                error.args = (f"checkpoint {self._name}: {error.args[0]}",)
                error.survives = "The checkpoints before it are whole, and training goes on."
            self._error = error
            return f"{error}\nThe next save_checkpoint, load_checkpoint or close raises this"
        return ""

    def _copy(self, generation: int, directory: SavingDirectory, then: Callable[[], None]) -> None:
        try:
            with directory.unfinished() as folder:
                copy_generation(self._store, generation, folder, self._passed)
                directory.publish(folder)
            then()
        except OSError as error:
            raise failed(f"saving the checkpoint {self._name}", error) from error

    def _passed(self, nbytes: int) -> None:
        self._copied_bytes += nbytes
        if self._is_given_up:
            raise _GivenUp
