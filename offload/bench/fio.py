"""fio, the yardstick."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

from aio_ext.measure import READS, WRITES, Mode, Sample
from offload.bench.subject import MIB, MODES, PROBE_SECONDS, Subject
from offload.ranks.topology import text_of
from swapper import OffloadError

ENGINE_ROUNDS = 3
GLIBC_HUGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0"
"""From the heap, not by mmap: that would begin at any page, and cost small buffers most of their 2 MiB pages."""


class Fio:
    """fio on the same file, at the same block size, with as much in flight as its buffers are to have.

    It has no buffers beside those in flight: with as much memory as the engine it has more in flight than the engine.
    2 MiB pages are those reserved, where there are enough; else glibc asks the kernel for transparent ones.
    """

    def __init__(self, it: Subject, block_bytes: int, footprint_bytes: int) -> None:
        self._it = it
        self._block_bytes = block_bytes
        self.depth = footprint_bytes // block_bytes
        needed = -(-block_bytes * (self.depth + 1) // (2 * MIB))
        self._reserved = _free_huge_pages() >= needed
        self.huge_pages = self._reserved or _transparent_pages()
        self.engines: dict[Mode, str] = {}

    def choose_engines(self) -> None:
        """The faster of io_uring and libaio, for each mode."""
        nbytes = self._it.bytes_for(PROBE_SECONDS)
        for mode in MODES:
            rates: dict[str, list[float]] = {"io_uring": [], "libaio": []}
            for _ in range(ENGINE_ROUNDS):
                for engine, found in rates.items():
                    found.append(self._run(mode, nbytes, engine).bytes_per_s)
            self.engines[mode] = max(rates, key=lambda engine: statistics.median(rates[engine]))

    def measure(self, mode: Mode, nbytes: int) -> Sample:
        return self._run(mode, nbytes, self.engines[mode])

    def _run(self, mode: Mode, nbytes: int, engine: str) -> Sample:
        command = [
            *("fio", "--name=bench", "--output-format=json", "--direct=1", "--allow_file_create=0"),
            *(f"--filename=/proc/{os.getpid()}/fd/{self._it.fd}", f"--ioengine={engine}", "--group_reporting"),
            *(f"--bs={self._block_bytes}", f"--iodepth={self.depth}", "--invalidate=0"),
            *(f"--size={self._it.nbytes}", f"--io_size={nbytes // MIB * MIB}", "--scramble_buffers=0"),
            f"--rw={'rw' if mode == 'mixed' else mode}",
            f"--rwmixread={round(100 * READS / (READS + WRITES))}",
            *(["--mem=shmhuge", f"--hugepage-size={2 * MIB}"] if self._reserved else []),
        ]
        environment = os.environ if self._reserved else {**os.environ, "GLIBC_TUNABLES": GLIBC_HUGE_PAGES}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode != 0:
            raise OffloadError(f"fio failed: {result.stderr.strip().splitlines()[-1:] or result.returncode}")
        job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
        return Sample(
            read_bytes=job["read"]["io_bytes"],
            write_bytes=job["write"]["io_bytes"],
            seconds=seconds,
            cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
            depth_mean=float(self.depth),
        )


def _free_huge_pages() -> int:
    return int(text_of(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")) or 0)


def _transparent_pages() -> bool:
    """glibc 2.35 and later can ask for them, if the kernel gives any."""
    libc, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    switch = text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    is_able = libc == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    return is_able and switch != "" and "[never]" not in switch
