"""A pool of threads that does not stand in the way of the end of the program."""

from __future__ import annotations

import queue
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(Executor):
    """An executor of daemon threads. The one of the standard library refuses calls as soon as the program begins to
    end, when a queue still has requests to finish. The threads are bare ones: the start of a ``threading.Thread``
    waits for an event, see [Note: Ctrl-C strikes anywhere]."""

    def __init__(self, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        try:
            for _ in range(num_threads):
                start_new_thread(self._work, ())
        except BaseException:  # no more threads, or Ctrl-C
            self.shutdown()
            raise

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)
