"""Cores that a process may use, on machines that are told by files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from offload.encoding import decode, encode
from offload.ranks.host_cores import HostCores, host_cores, host_nodes

CGROUP = "proc/self/cgroup"


class FakeHost:
    """The files that tell of a host with so many CPUs."""

    def __init__(self, root: Path, num_cpus: int, allowed: str | None = None) -> None:
        self.root = root
        every = f"0-{num_cpus - 1}"
        self.write("sys/devices/system/cpu/online", every)
        # A kernel tells CPUs that could be put in, too.
        self.write("proc/thread-self/status", f"Name:\tpython\nCpus_allowed_list:\t{allowed or '0-1023'}\nx:\t1")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"{text}\n")

    def pairs(self, pairs: Sequence[tuple[int, int]], file: str = "core_cpus_list") -> None:
        for pair in pairs:
            for cpu in pair:
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{file}", ",".join(map(str, pair)))

    def nodes(self, *lists: str) -> None:
        for number, cpus in enumerate(lists):
            self.write(f"sys/devices/system/node/node{number}/cpulist", cpus)

    def quota(self, quota: str, folder: str = "") -> None:
        self.write(CGROUP, "0::/of/this")
        self.write(f"sys/fs/cgroup/{folder}/cpu.max", quota)

    @property
    def found(self) -> HostCores:
        return host_cores(self.root)


@pytest.mark.parametrize(("num_cpus", "num_cores"), [(2, 2), (16, 16), (64, 64)])
def test_where_the_machine_tells_nothing_else_each_cpu_is_a_core(tmp_path: Path, num_cpus: int, num_cores: int):
    found = FakeHost(tmp_path, num_cpus).found
    assert (found.available, found.nodes, found.num_slow) == (num_cores, frozenset(), 0)


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_a_core_that_runs_two_threads_counts_once(tmp_path: Path, file: str):
    host = FakeHost(tmp_path, 32)
    host.pairs([(cpu, cpu + 16) for cpu in range(16)], file)
    assert host.found.available == 16
    half = FakeHost(tmp_path, 32, allowed="0-7,16-23")
    assert half.found.available == 8
    assert FakeHost(tmp_path, 32, allowed="0-15").found.available == 16  # one thread of each


def test_cores_of_two_sockets_are_told_with_their_nodes(tmp_path: Path):
    host = FakeHost(tmp_path, 64)
    host.nodes("0-31", "32-63", "")  # the third has memory alone
    assert (host.found.available, host.found.nodes) == (64, {0, 1})
    bound = FakeHost(tmp_path, 64, allowed="32-63").found
    assert (bound.available, bound.nodes) == (32, {1})


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("350000 100000", 3.5), ("max 100000", 16), ("50000 100000", 0.5), ("9900000 100000", 16), ("nonsense", 16)],
)
@pytest.mark.parametrize("folder", ["of/this", "of"])
def test_the_quota_of_a_cgroup_or_of_one_above_bounds_the_cores(
    tmp_path: Path, quota: str, expected: float, folder: str
):
    host = FakeHost(tmp_path, 16)
    host.quota(quota, folder)
    assert host.found.available == expected


def test_a_quota_of_the_older_cgroups_counts(tmp_path: Path):
    host = FakeHost(tmp_path, 16)
    host.write(CGROUP, "3:cpu,cpuacct:/mine\n2:memory:/mine")
    host.write("sys/fs/cgroup/cpu/mine/cpu.cfs_quota_us", "350000")
    host.write("sys/fs/cgroup/cpu/mine/cpu.cfs_period_us", "100000")
    assert host.found.available == 3.5
    host.write("sys/fs/cgroup/cpu/mine/cpu.cfs_quota_us", "-1")
    assert host.found.available == 16


def test_a_hybrid_processor_has_fast_cores_of_two_threads_and_slow_ones_of_one(tmp_path: Path):
    host = FakeHost(tmp_path, 24)
    host.pairs([(cpu, cpu + 1) for cpu in range(0, 16, 2)])
    host.write("sys/devices/cpu_core/cpus", "0-15")
    host.write("sys/devices/cpu_atom/cpus", "16-23")
    assert (host.found.available, host.found.num_slow) == (16, 8)


def test_arm_tells_slow_cores_by_their_capacity(tmp_path: Path):
    host = FakeHost(tmp_path, 8)
    for cpu in range(8):
        host.write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", "1024" if cpu < 2 else "512")
    assert (host.found.available, host.found.num_slow) == (8, 6)


def test_without_proc_the_affinity_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3})
    assert host_cores(tmp_path).available == 3


def test_this_machine_has_the_cores_of_the_affinity_at_most():
    assert 0 < host_cores().available <= len(os.sched_getaffinity(0))


def cores_of(*cpus: int, quota: float = 1e9) -> HostCores:
    return HostCores(frozenset(frozenset({cpu}) for cpu in cpus), quota)


def test_ranks_divide_the_cores_that_they_share():
    everywhere = cores_of(*range(64))
    assert everywhere.part([everywhere] * 4) == 16
    left, right = cores_of(*range(32)), cores_of(*range(32, 64))
    local = [left, left, right, right]
    assert [each.part(local) for each in local] == [16] * 4, "each pair is bound to a node"
    assert left.part([left, everywhere]) == 16
    assert everywhere.part([left, everywhere]) == 48


def test_a_rank_knows_of_the_cores_that_another_one_tells_of():
    for told in (cores_of(1, 2, quota=3.5), cores_of(7), HostCores(frozenset({frozenset({1, 9})}))):
        assert HostCores.of(decode(encode(told.told, "cores"), "cores")) == told


def test_ranks_divide_the_quota_of_their_group():
    each = cores_of(*range(64), quota=3.5)
    assert each.part([each, each]) == 1.75


@pytest.mark.parametrize(("allowed", "nodes"), [(None, {0, 1}), ("0-31", {0}), ("40", {1}), ("31-32", {0, 1})])
def test_memory_is_at_the_nodes_of_the_cores(tmp_path: Path, allowed: str | None, nodes: set[int]):
    host = FakeHost(tmp_path, 64, allowed)
    host.nodes("0-31", "32-63")
    assert host_nodes(host.root) == host.found.nodes == nodes
