"""Budget of cores: one rank's cores of the CPU, divided between the optimizer's kernels and everything else.

[Note: Who has which cores] Compute, checksums, I/O and the interpreter take what they need, and nobody asks them: torch
has threads of its own, checksums and I/O have a few that sleep without work. The optimizer's kernels, which can use any
number of cores, get what all of those leave. What that is, each step measures: the seconds of cores that the process
has spent beside these kernels, over the seconds in which compute was at work. So a model whose compute keeps three of
sixteen cores busy leaves thirteen, whatever torch was given, and many checksums leave fewer. Before the first step it
is assumed. While compute waits, for an update or for the disk, the kernels have all of them.

[Note: Where no core is idle] Compute's threads then wait for the slowest of them at each of their barriers. A kernel on
one thread makes that one slow for as long as it runs, and the cores of the others idle meanwhile. On as many threads as
there are cores it slows all of them alike, and is over so much sooner: nothing is lost. What the kernels take so counts
as what compute would have kept busy."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from offload.memory import tensor_at

GRAIN = 1 << 16
"""Elements for which a further thread is woken: 70 us of its work, and to wake it takes five."""

_LEAST = 1.0
"""Cores that are left to everything else at least: that of the thread that computes, or drives the device."""


class CoreBudget:
    """Says how many threads a kernel of the optimizer runs on. See [Note: Who has which cores].

    The thread that updates borrows; the training thread ends steps.
    """

    def __init__(
        self,
        total: float,
        others: float,
        compute_waits: Callable[[], bool],
        process_seconds: Callable[[], float] = time.process_time,
        thread_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        """``total`` are the cores of this rank, ``others`` what is assumed to be busy of them while compute goes on.

        ``process_seconds`` and ``thread_seconds`` are the seconds of cores that the process and a thread have spent.
        """
        self.total = total
        self.others = others
        """Cores that everything but the kernels of the optimizer keeps busy while compute goes on."""
        self.thread_seconds = thread_seconds
        self.lent = 0.0
        """Seconds of idle cores that kernels have spent; the thread that updates alone adds to it."""
        self._compute_waits = compute_waits
        self._process_seconds = process_seconds
        self._at_last_step = process_seconds(), 0.0

    def lend(self, numel: int) -> CoreLoan:
        """Lend threads to an update of ``numel`` elements for the time of the block; at least one."""
        idle = self.total if self._compute_waits() else max(self.total - self.others, 0.0)
        wanted = idle if idle >= 1 else self.total  # see [Note: Where no core is idle]
        return CoreLoan(self, max(1, min(int(wanted), numel // GRAIN)), idle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy so many bytes between two addresses, by torch's threads; it counts as the update's work."""
        with self.lend(nbytes):
            tensor_at(target, nbytes, torch.uint8).copy_(tensor_at(source, nbytes, torch.uint8))

    def end_step(self, seconds: float) -> None:
        """A step is over, in which compute was at work for so long: where the CPU computes without what it waited for,
        where a device does all of the step."""
        now, lent = self._process_seconds(), self.lent
        before, lent_before = self._at_last_step
        self._at_last_step = now, lent
        if seconds > 0:
            busy = (now - before - (lent - lent_before)) / seconds
            self.others = (self.others + min(max(busy, _LEAST), max(self.total, _LEAST))) / 2


class CoreLoan:
    """Cores for one kernel: a context manager without a generator, as there is one for each small unit."""

    __slots__ = ("_cores", "_idle", "_start", "num_threads")

    def __init__(self, cores: CoreBudget, num_threads: int, idle: float) -> None:
        self._cores = cores
        self.num_threads = num_threads
        self._idle = idle

    def __enter__(self) -> int:
        self._start = self._cores.thread_seconds()
        return self.num_threads

    def __exit__(self, *_: object) -> None:
        self.end(self._cores.thread_seconds() - self._start)

    def end(self, seconds: float) -> None:
        """The kernel took so long: its threads share the blocks of a tile, so each has worked all the time."""
        self._cores.lent += min(self.num_threads, self._idle) * seconds
