"""Ranks for tests: processes that are started once, and make calls together.

The processes are forked from one that has imported torch and the engine already (see ``forked``). Each keeps
``torch.distributed`` (gloo, on 127.0.0.1) for all its calls. A call that takes too long ends the processes, and says
where each thread of each of them was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import forked

DEADLINE_S = 60.0
"""Of one call. Those that are meant to meet a deadline of the engine's have shorter ones."""
_POOL_S = 3600.0
"""Of a pool's processes: longer than all tests take."""


class RanksFailed(AssertionError):
    """A call has raised, or took too long; the message has what each rank says."""


class Pool:
    """``size`` ranks, which are started by the first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[forked.Program] = []
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
                    answers[rank] = (False, f"it has ended: {self._processes[rank].wait()}\n{self._told(rank)}")
        wrong = [f"rank {rank}: {answer}" for rank, (good, answer) in sorted(answers.items()) if not good]
        wrong += [f"rank {rank}: not over after {timeout_s:g} s\n{self._dump(rank)}" for rank in self._missing(answers)]
        if wrong:
            self.stop()
            raise RanksFailed("\n".join(wrong))
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.__exit__()
        for end in self._ends:
            end.close()
        for dump in self._dumps:
            dump.unlink()
        self._processes, self._ends, self._dumps = [], [], []

    def _start(self) -> None:
        for rank in range(self.size):
            own, other = socket.socketpair()
            file, dump = tempfile.mkstemp(prefix="offload-ranks-")
            os.close(file)
            text = "from ranks import pool; pool.serve()"
            key = current_process().authkey.hex()  # by which tensors come over
            process = forked.Program(text, rank, self.size, dump, key, stdin=other.fileno(), timeout_s=_POOL_S)
            other.close()
            self._processes.append(process)
            self._ends.append(Connection(own.detach()))
            self._dumps.append(Path(dump))
        port = self._ends[0].recv()
        for end in self._ends[1:]:
            end.send(port)

    def _missing(self, answers: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.size) if rank not in answers]

    def _dump(self, rank: int) -> str:
        """What a rank has told, and where its threads are."""
        self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self._told(rank)

    def _told(self, rank: int) -> str:
        return self._dumps[rank].read_text(errors="replace")


def serve() -> None:
    """Make the calls that come on standard input, which is a socket, until its other end is gone."""
    import torch
    from torch import distributed

    rank, size = int(sys.argv[1]), int(sys.argv[2])
    parent = Connection(os.dup(0))
    current_process().authkey = bytes.fromhex(sys.argv[4])
    with Path(sys.argv[3]).open("w") as file, contextlib.suppress(EOFError):
        for output in (1, 2):
            os.dup2(file.fileno(), output)
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
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
