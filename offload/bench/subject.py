"""Subject of a measurement: a path's file, under one setting of the queue."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aio_ext import Memory, Queue
from aio_ext.measure import NUM_BUFFERS, REQUEST_BYTES, Mode, Range
from aio_ext.profile import file_system
from offload.errors import ConfigError
from swapper.paths import Medium, medium_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MODES: tuple[Mode, ...] = ("read", "write", "mixed")
"""Modes that are compared and kept in the profile."""
USES: tuple[Mode, ...] = ("read", "update")
"""Uses that settings are chosen by: the engine reads weights ahead of compute, and its update reads and writes
tiles."""
ENGINE_BYTES = NUM_BUFFERS * REQUEST_BYTES
"""The engine's tile buffers. No more than that is tried in flight."""
PROBE_SECONDS = 0.1


class BenchError(ConfigError, explained=False):
    """Refusal of a measurement, with the reason in one line."""


@dataclass(frozen=True)
class Setting:
    backend: str
    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.backend} {self.block_bytes // KIB} KiB x {self.depth}"


@dataclass
class Subject:
    """A path under test: the nameless file, memory as large as the engine's buffers, and the GiB/s that were found."""

    path: Path
    fd: int
    nbytes: int
    memory: Memory
    bytes_per_s: float = 1e9
    tried: dict[Setting, dict[str, list[float]]] = field(default_factory=dict)

    @contextmanager
    def range(self, setting: Setting, memory: Memory | None = None) -> Iterator[Range]:
        memory = memory or self.memory
        with Queue(setting.backend, setting.depth, setting.block_bytes) as queue:
            queue.register_memory(memory.address, memory.nbytes)
            file = queue.register_file(self.fd)
            yield Range(queue, file, self.nbytes, memory, setting.depth, setting.block_bytes)

    def bytes_for(self, seconds: float) -> int:
        return int(min(max(self.bytes_per_s * seconds, 32 * MIB), 16 * GIB))

    def probe(self, setting: Setting) -> float:
        """GiB/s that count: of what the engine does, by the time that all of it takes together."""
        nbytes = self.bytes_for(PROBE_SECONDS)
        with self.range(setting) as range_:
            rates = {use: range_.measure(use, nbytes).gib_per_s for use in USES}
        found = self.tried.setdefault(setting, {use: [] for use in USES})
        for use in USES:
            found[use].append(rates[use])
        return statistics.harmonic_mean(rates.values())


@contextmanager
def subject(path: Path, size: int | None, any_file_system: bool) -> Iterator[Subject]:
    if not path.is_dir():
        raise BenchError(f"{path} is not a directory")
    kind = file_system(path)
    medium = medium_of(kind)
    if not any_file_system and medium is not Medium.DISK:
        raise BenchError(f"{path} is on {kind}, behind {medium.value}; --any-file-system measures it all the same")
    free = shutil.disk_usage(path).free
    nbytes = size or min(GIB, free // 4) // (16 * MIB) * (16 * MIB)
    if nbytes < 64 * MIB or nbytes + 64 * MIB > free:
        raise BenchError(
            f"{path} has {free // MIB} MiB free, too little for a file of {max(nbytes, 64 * MIB) // MIB} MiB"
        )
    try:
        named, name = tempfile.mkstemp(dir=path, prefix="aio_bench.")
        os.close(named)
        try:
            fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        finally:
            os.unlink(name)  # noqa: PTH108
    except OSError as error:
        raise BenchError(f"no file with direct I/O can be made in {path}: {error.strerror}") from None
    try:
        os.posix_fallocate(fd, 0, nbytes)
        with Memory(ENGINE_BYTES) as memory:
            memory.populate()
            yield Subject(path, fd, nbytes, memory)
    finally:
        os.close(fd)
