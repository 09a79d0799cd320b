"""Ranks for tests: processes that are started once, and make calls together.

The processes are forked from one that has imported torch and the engine already, which takes seconds. Each keeps
``torch.distributed`` (gloo, on 127.0.0.1) for all its calls. A call that takes too long ends the processes, and says
where each thread of each of them was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
"""Of one call. Those that are meant to meet a deadline of the engine's have shorter ones."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "offload.engine"])


class RanksFailed(AssertionError):
    """A call has raised, or took too long; the message has what each rank says."""


class Pool:
    """``size`` ranks, which are started by the first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        self._dumps: list[Path] = []

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float = DEADLINE_S, **options: Any) -> Any:
        """Call ``function(rank, size, *args, **options)``, which stands in a module of this directory, on all ranks;
        what each returns. Raises ``RanksFailed``; the next call starts the ranks anew then."""
        if not self._processes:
            self._start()
        message = (Path(function.__code__.co_filename).stem, function.__name__, args, options)
        for end in self._ends:
            end.send(message)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = [end for rank, end in enumerate(self._ends) if rank not in answers]
            for end in wait(waiting, left):
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    answers[rank] = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"it has ended: {self._processes[rank].exitcode}")
        wrong = [f"rank {rank}: {answer}" for rank, (good, answer) in sorted(answers.items()) if not good]
        wrong += [f"rank {rank}: not over after {timeout_s:g} s\n{self._dump(rank)}" for rank in self._missing(answers)]
        if wrong:
            self.stop()
            raise RanksFailed("\n".join(wrong))
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        for dump in self._dumps:
            dump.unlink()
        self._processes, self._ends, self._dumps = [], [], []

    def _start(self) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        for rank in range(self.size):
            own, other = _context.Pipe()
            dump = Path(tempfile.mkstemp(prefix="offload-ranks-")[1])
            process = _context.Process(target=_serve, args=(rank, self.size, other, dump), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._ends.append(own)
            self._dumps.append(dump)
        port = self._ends[0].recv()
        for end in self._ends[1:]:
            end.send(port)

    def _missing(self, answers: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.size) if rank not in answers]

    def _dump(self, rank: int) -> str:
        """Where the threads of a rank are."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._dumps[rank].read_text()


def _serve(rank: int, size: int, parent: Connection, dump: Path) -> None:
    """Make the calls that come from ``parent``, until it is gone."""
    import torch
    from torch import distributed

    from offload.tiers import bandwidth

    with dump.open("w") as file, contextlib.suppress(EOFError):
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
        bandwidth._SECONDS = 0.02  # as in the conftest of all tests
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if rank == 0:
            store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            parent.send(store.port)
        else:
            store = distributed.TCPStore("127.0.0.1", parent.recv())
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        while True:
            module, function, args, options = parent.recv()
            try:
                call = getattr(importlib.import_module(f"ranks.{module}"), function)
                answer = True, call(rank, size, *args, **options)
            except BaseException:
                answer = False, traceback.format_exc()
            parent.send(answer)
