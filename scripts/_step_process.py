"""The processes of ``bench_step.py``: one for each turn of a system, in a memory cgroup if asked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _cgroups import memory_limit

_OF_RANK = re.compile(r"^\[rank\d+\]: ?")
"""Begins each line of an error where there is a process group."""

_WORKER = Path(__file__).with_name("_step_worker.py")


class WorkerFailed(Exception):
    """A system ended before its answer: its error, or the last line that it wrote."""


@dataclass(frozen=True)
class Limit:
    """Memory for a turn of the engine beyond its budget and what imports take: that of the activations."""

    activation_bytes: int


class Turns:
    """Takes turns; ``lock`` names a file whose lock is held while steps run. A process that takes more than so many
    ``seconds`` is ended."""

    def __init__(self, lock: str | None, seconds: float | None = None) -> None:
        self._lock, self._seconds = lock, seconds

    def take(self, request: dict[str, Any], warm_up: int, steps: int, limit: Limit | None = None) -> dict[str, Any]:
        """Start a process for ``request``, let it take its steps, and end it. Raises ``WorkerFailed``."""
        return next(self.take_each(request, [{"warm_up": warm_up, "steps": steps}], limit))

    def take_each(
        self, request: dict[str, Any], wanted: Sequence[dict[str, Any]], limit: Limit | None = None
    ) -> Iterator[dict[str, Any]]:
        """The same for several turns of one process, one after the other, each as ``_step_worker`` has it."""
        with _worker(request, self._seconds) as (ask, pid), contextlib.ExitStack() as after:
            first = ask(None)
            imports_bytes = first["imports_bytes"]
            limit_bytes = None
            if limit is not None:
                limit_bytes = first["host_memory"] + imports_bytes + limit.activation_bytes
                after.enter_context(memory_limit(pid, limit_bytes))
            ask({})
            for one in wanted:
                with _held(self._lock):
                    answer = ask(one)
                yield {**answer, "imports_bytes": imports_bytes, "limit_bytes": limit_bytes}

    def least_host_memory(self, request: dict[str, Any]) -> int:
        """The least budget that works for this request of an engine, which is not built. Raises ``WorkerFailed``."""
        with _worker({**request, "host_memory": 0}) as (ask, _):
            return int(ask(None)["host_memory"])


@contextlib.contextmanager
def _worker(request: dict[str, Any], seconds: float | None = None) -> Iterator[tuple[Any, int]]:
    """A worker as a function that sends it a message (none: only listens) and returns its answer, and its pid. The
    function raises ``WorkerFailed`` when the worker has ended."""
    command = [sys.executable, str(_WORKER), json.dumps(request)]
    pipe = subprocess.PIPE
    # An interpreter that belongs to an environment finds that environment's tools (ninja) beside itself.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout, is_late = process.stdin, process.stdout, threading.Event()

        def ask(message: dict[str, Any] | None) -> dict[str, Any]:
            if message is not None:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(json.dumps(message) + "\n")
                    stdin.flush()
            line = stdout.readline()
            if not line:
                raise WorkerFailed(f"it took more than {seconds:g} s" if is_late.is_set() else last_words(errors))
            return dict(json.loads(line))

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds or 0.0, end)
        if seconds is not None:
            timer.start()
        try:
            yield ask, process.pid
        finally:
            timer.cancel()
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
            process.wait()


@contextlib.contextmanager
def _held(lock: str | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with Path(lock).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def last_words(errors: IO[str]) -> str:
    """The first line of the last error that Python wrote: what follows is advice, as in errors of CUDA, or what
    libraries say at exit. Where there is none, the last line."""
    errors.seek(0)
    lines = [_OF_RANK.sub("", line) for line in errors.read().splitlines()]
    lines = [line for line in lines if line.strip()]
    tracebacks = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if tracebacks:
        lines = [line for line in lines[tracebacks[-1] + 1 :] if not line.startswith(" ")][:1] or lines
    return lines[-1] if lines else "it ended without a word (out of memory?)"
