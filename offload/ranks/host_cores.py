"""Cores of the host: those that a process may use, and its part of them where several processes may use the same."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.memory import cgroup_folders
from offload.ranks.topology import numa_nodes, numbers_in, text_of

ROOT = Path("/")


@dataclass(frozen=True)
class HostCores:
    """Cores that the affinity of a thread leaves it, and what bounds the time on them.

    A core that runs two threads at a time (SMT) counts once: its units of arithmetic and its way to memory are one.
    """

    cores: frozenset[frozenset[int]]
    """CPUs of each core, as the kernel numbers them: two or more where a core runs several threads."""
    quota: float = math.inf
    """Cores whose time the cgroups of this process grant it."""
    nodes: frozenset[int] = frozenset()
    """NUMA nodes that these cores are at; none where the machine does not tell."""
    num_slow: int = 0
    """Cores of a hybrid processor that are slower than its others."""

    @property
    def told(self) -> tuple[list[list[int]], float]:
        """The facts that another process needs of them."""
        return sorted(map(sorted, self.cores)), self.quota

    @classmethod
    def of(cls, told: tuple[Sequence[Sequence[int]], float]) -> HostCores:
        """Those that another process has ``told`` of."""
        cores, quota = told
        return cls(frozenset(map(frozenset, cores)), quota)

    @property
    def available(self) -> float:
        """Cores that can be busy at a time, a part of one where the quota says so."""
        return min(float(len(self.cores)), self.quota)

    def part(self, local: Sequence[HostCores]) -> float:
        """Cores that this process has where the processes of ``local``, itself among them, divide the ones they share.

        Each core is divided by those whose affinity has it, and the quota by all.
        """
        shared = (sum(core in other.cores for other in local) for core in self.cores)
        return min(sum(1 / num for num in shared), self.quota / len(local))


def host_cores(root: Path = ROOT) -> HostCores:
    """Cores of the calling thread, as the files of ``proc`` and ``sys`` below ``root`` tell."""
    cpus_folder = root / "sys/devices/system/cpu"
    allowed = _allowed(root, numbers_in(text_of(cpus_folder / "online")))
    cores = frozenset(_siblings(cpus_folder / f"cpu{cpu}" / "topology") & allowed | {cpu} for cpu in allowed)
    nodes = _nodes(root, allowed)
    slow = _slow(root, allowed)
    return HostCores(cores, min(_quotas(root), default=math.inf), nodes, sum(core <= slow for core in cores))


def host_nodes(root: Path = ROOT) -> frozenset[int]:
    """NUMA nodes that the calling thread's cores are at."""
    return _nodes(root, _allowed(root, numbers_in(text_of(root / "sys/devices/system/cpu/online"))))


def _nodes(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    return frozenset(node for node, cpus in numa_nodes(root / "sys").items() if cpus & allowed)


def _allowed(root: Path, online: frozenset[int]) -> frozenset[int]:
    for line in text_of(root / "proc/thread-self/status").splitlines():
        name, _, listed = line.partition(":")
        if name == "Cpus_allowed_list":
            return numbers_in(listed) & online
    return frozenset(os.sched_getaffinity(0))


def _siblings(topology: Path) -> frozenset[int]:
    """CPUs of one core. Kernels before 5.7 have the older of the two files alone."""
    return numbers_in(text_of(topology / "core_cpus_list") or text_of(topology / "thread_siblings_list"))


def _slow(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    """CPUs of a hybrid processor that are not its fastest, as Intel's driver tells, or Arm's firmware."""
    of_intel = numbers_in(text_of(root / "sys/devices/cpu_atom/cpus"))
    capacities = {cpu: text_of(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity") for cpu in allowed}
    of_arm = {cpu: int(capacity) for cpu, capacity in capacities.items() if capacity.isdigit()}
    largest = max(of_arm.values(), default=0)
    return of_intel | {cpu for cpu, capacity in of_arm.items() if capacity < largest}


def _quotas(root: Path) -> Iterator[float]:
    """Quota, in cores, of each cgroup above this process that has one (v2 and v1)."""
    for folder in cgroup_folders("cpu", root):
        try:
            if (both := folder / "cpu.max").exists():
                quota, period = both.read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue
