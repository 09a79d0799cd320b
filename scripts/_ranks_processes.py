"""Processes of ranks: forked from one that has imported everything, they begin in milliseconds and end as programs do.

The process that they are forked from runs the same script with ``--serve``; see ``serve``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVE = "--serve"


def serve() -> Any:
    """Fork a process for each request that comes on standard input, until its end. Returns in the forked ones, which
    then run to their natural end: what is to be done there."""
    gc.freeze()  # a collection would copy what forked processes share
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            found, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if found else None), flush=True)
            continue
        process = os.fork()
        if process == 0:
            nothing = os.open(os.devnull, os.O_RDONLY)
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor, own in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(descriptor, own)
            os.environ.update(request["environment"])
            return request["job"]
        print(process, flush=True)
    raise SystemExit


class Process:
    """One that was forked. ``status`` is None while it runs."""

    def __init__(self, launcher: Launcher, identity: int, output: Path) -> None:
        self.identity = identity
        self.output = output
        self.status: int | None = None
        self._launcher = launcher

    def poll(self) -> int | None:
        if self.status is None:
            self.status = self._launcher.ask({"poll": self.identity})
        return self.status

    def send(self, number: int) -> None:
        """A signal, unless it has ended. Its id is not given to another process before ``poll`` has seen its end."""
        if self.poll() is None:
            os.kill(self.identity, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.status is not None

    def told(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


class Launcher:
    """Starts processes of ``script``, which calls ``serve``, with its options."""

    def __init__(self, script: str, options: Sequence[str] = ()) -> None:
        command = [sys.executable, script, SERVE, *options]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, jobs: Sequence[Any], folder: Path) -> list[Process]:
        """Ranks that find each other as those of torchrun do: one for each job. Their output goes to ``folder``."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(len(jobs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for rank, job in enumerate(jobs):
            output = folder / f"rank-{rank}.txt"
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            request = {"environment": environment, "output": str(output), "job": job}
            processes.append(Process(self, self.ask(request), output))
        return processes

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def end_all(processes: Sequence[Process]) -> None:
    """Whatever they do."""
    for process in processes:
        process.send(signal.SIGKILL)
        process.wait(10)
