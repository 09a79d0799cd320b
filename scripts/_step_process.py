"""The processes of ``bench_step.py``: one for each turn of a system, in a memory cgroup if asked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _cgroups import memory_limit

_WORKER = Path(__file__).with_name("_step_worker.py")


class WorkerFailed(Exception):
    """A system ended before its answer: the last line that it wrote."""


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
        with tempfile.TemporaryFile("w+") as errors, _worker(request, errors, self._seconds) as (ask, pid):
            try:
                first = ask(None)
                imports_bytes = first["imports_bytes"]
                with contextlib.ExitStack() as after:
                    limit_bytes = None
                    if limit is not None:
                        limit_bytes = first["host_memory"] + imports_bytes + limit.activation_bytes
                        after.enter_context(memory_limit(pid, limit_bytes))
                    ask({})
                    for one in wanted:
                        with _held(self._lock):
                            answer = ask(one)
                        yield {**answer, "imports_bytes": imports_bytes, "limit_bytes": limit_bytes}
            except (BrokenPipeError, EOFError) as error:
                raise WorkerFailed(_last_line(errors)) from error

    def least_host_memory(self, request: dict[str, Any]) -> int:
        """The least budget that works for this request of an engine, which is not built. Raises ``WorkerFailed``."""
        with tempfile.TemporaryFile("w+") as errors, _worker({**request, "host_memory": 0}, errors) as (ask, _):
            try:
                return int(ask(None)["host_memory"])
            except EOFError as error:
                raise WorkerFailed(_last_line(errors)) from error


@contextlib.contextmanager
def _worker(request: dict[str, Any], errors: IO[str], seconds: float | None = None) -> Iterator[tuple[Any, int]]:
    """A worker as a function that sends it a message (none: only listens) and returns its answer, and its pid."""
    command = [sys.executable, str(_WORKER), json.dumps(request)]
    pipe = subprocess.PIPE
    # An interpreter that belongs to an environment finds that environment's tools (ninja) beside itself.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(message: dict[str, Any] | None) -> dict[str, Any]:
            if message is not None:
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
            line = stdout.readline()
            if not line:
                raise EOFError
            return dict(json.loads(line))

        def end() -> None:
            errors.write(f"it took more than {seconds:g} s\n")
            errors.flush()
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


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word (out of memory?)"
