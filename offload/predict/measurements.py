"""Measurements of this machine that are kept, so that its first plan alone waits for them.

[Note: What counts as the same machine] A measurement holds for the processor, cores, threads, torch and version of the
engine that it was taken with, and for ``_DAYS``: kernels, libraries and a machine's settings change. What was measured
beside other programs is that of a slower machine: it serves the plan that waited for it, and is not kept.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import offload
from aio_ext.kept import KeptFile
from offload.ranks.host_cores import host_cores
from offload.ranks.topology import cpuinfo, text_of

_FILE = KeptFile("machine.json", "measurements", version=1)
_DAYS = 30
_MOST_OTHERS = 0.1
"""Share of the cores that other programs may take while what is kept is measured."""


class Unkept:
    """Measures anew whenever it is asked."""

    def of(self, what: str, measure: Callable[[], Any]) -> Any:
        """The measurement of that name: a value of JSON."""
        return measure()


UNKEPT = Unkept()


class Measurements(Unkept):
    """Measurements that are kept, and others that are taken now. ``say`` is told that something is measured, and why
    it is not kept, if so. At the end of the context what was measured is kept."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._machine = say, _machine()
        self._kept = _FILE.entries()
        self._new: dict[str, Any] = {}
        self._others = _Others()
        self.since: datetime | None = None
        """The oldest of those that were found."""

    def of(self, what: str, measure: Callable[[], Any]) -> Any:
        key = f"{self._machine}: {what}"
        found: Any = self._kept.get(key)
        try:
            taken = datetime.fromisoformat(found["taken"])
            if timedelta(0) <= datetime.now() - taken < timedelta(days=_DAYS):
                self.since = min(taken, self.since or taken)
                return found["value"]
        except (KeyError, TypeError, ValueError):
            pass  # not there, or damaged
        if not self._new:
            self._say(f"measuring this machine, once: it takes a dozen seconds, and is kept in {_FILE.path}")
        self._say(f"measuring {what}")
        with self._others:
            value = measure()
        self._new[key] = {"taken": datetime.now().isoformat(timespec="seconds"), "value": value}
        return value

    @property
    def origin(self) -> str | None:
        """Where what was found comes from, in words; None: all was measured now."""
        if self.since is None:
            return None
        return f"this machine was measured on {self.since:%Y-%m-%d}; without {_FILE.path} it is measured anew"

    def __enter__(self) -> Measurements:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None or not self._new:
            return
        if self._others.share > _MOST_OTHERS:
            self._say(
                f"other programs took {self._others.share:.0%} of the cores meanwhile: the forecast is that of a "
                "slower machine, and the next plan measures again"
            )
            return
        try:
            _FILE.add(self._new)
        except OSError as error:
            self._say(f"what was measured cannot be kept: {error}")


class _Others:
    """Share of this process's cores that other programs take, in all of the times that the context is entered."""

    def __init__(self) -> None:
        self._seconds = self._taken = 0.0
        self._cpus = os.sched_getaffinity(0)

    @property
    def share(self) -> float:
        return max(self._taken, 0.0) / self._seconds if self._seconds else 0.0

    def __enter__(self) -> None:
        self._at = time.perf_counter(), _busy_seconds(self._cpus) - time.process_time()

    def __exit__(self, *error: object) -> None:
        start, taken = self._at
        self._seconds += (time.perf_counter() - start) * len(self._cpus)
        self._taken += _busy_seconds(self._cpus) - time.process_time() - taken


def _busy_seconds(cpus: Collection[int]) -> float:
    """Seconds that these CPUs have been at work for anyone, or kept waiting by other machines on the same host."""
    user, nice, system, irq, softirq, steal = 0, 1, 2, 5, 6, 7
    ticks = 0
    for line in text_of(Path("/proc/stat")).splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            ticks += sum(int(counts[kind]) for kind in (user, nice, system, irq, softirq, steal))
    return ticks / os.sysconf("SC_CLK_TCK")


def _machine() -> str:
    """See [Note: What counts as the same machine]."""
    processor = cpuinfo().get("model name") or platform.machine()
    cores = host_cores()
    return (
        f"{processor}, {cores.available:g} cores of {len(os.sched_getaffinity(0))} CPUs, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}, offload-engine {offload.__version__}"
    )
