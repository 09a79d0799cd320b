"""What each rank has of a machine, on machines made of files."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import Tiny

from aio_ext.profile import IoProfile, save_profile
from aio_ext.queue import DEPTH
from offload import OffloadConfig
from offload.optim.formats import Formats
from offload.plan.placement import make_plan
from offload.ranks import machine, topology
from offload.ranks.machine import Share, assign, bind, queue_share, share
from offload.ranks.ranks import Ranks
from offload.ranks.topology import node_distances, node_of_device, node_of_path, numa_nodes
from offload.tiers import store
from offload.units.find import find_units


class FakeMachine:
    """A sysfs of nodes with four cores each, and of drives and GPUs at them."""

    def __init__(self, root: Path, num_nodes: int) -> None:
        self.sys = root / "sys"
        self._mounts: dict[Path, int] = {}
        for node in range(num_nodes):
            distances = " ".join("10" if other == node else "21" for other in range(num_nodes))
            self._write(f"devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 2},{4 * node + 3}")
            self._write(f"devices/system/node/node{node}/distance", distances)

    def gpu(self, bus: int, node: int) -> None:
        slot = self._slot(bus, node)
        (self.sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (self.sys / "bus/pci/devices" / slot.name).symlink_to(slot)

    def nvme(self, bus: int, node: int, *, num_ports: int = 1) -> Path:
        """A drive with one partition, whose folder is returned. That of several ports belongs to a subsystem."""
        name = f"nvme{bus}n1"
        if num_ports == 1:
            drive = self._slot(bus, node) / f"nvme/nvme{bus}" / name
        else:
            drive = self.sys / f"devices/virtual/nvme-subsystem/nvme-subsys{bus}" / name
            drive.mkdir(parents=True)
            for port in range(num_ports):
                controller = self._slot(bus + port, node) / f"nvme/nvme{bus + port}"
                controller.mkdir(parents=True)
                (drive.parent / f"nvme{bus + port}").symlink_to(controller)
        self._write(drive.relative_to(self.sys) / f"{name}p1/partition", "1")
        return drive / f"{name}p1"

    def stacked(self, name: str, *below: Path) -> Path:
        """A device of the mapper, or a RAID, over others."""
        slaves = self.sys / "devices/virtual/block" / name / "slaves"
        slaves.mkdir(parents=True)
        for each in below:
            (slaves / each.name).symlink_to(each)
        return slaves.parent

    def mount(self, path: Path, device: Path) -> Path:
        """Say that ``path`` is on this block device."""
        path.mkdir()
        self._mounts[path] = os.makedev(259, len(self._mounts))
        link = self.sys / "dev/block" / f"259:{len(self._mounts) - 1}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        return path

    def number(self, path: Path) -> int:
        return self._mounts.get(path) or path.stat().st_dev

    def _slot(self, bus: int, node: int) -> Path:
        slot = f"devices/pci0000:{bus:02x}/0000:{bus:02x}:00.0"
        self._write(f"{slot}/numa_node", f"{node}")
        return self.sys / slot

    def _write(self, name: str | Path, text: str) -> None:
        (self.sys / name).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / name).write_text(f"{text}\n")


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(num_nodes: int) -> FakeMachine:
        made = FakeMachine(tmp_path, num_nodes)
        monkeypatch.setattr(topology, "block_device_number", made.number)
        return made

    return make


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch):
    """The affinity of every thread, which starts as that of eight cores."""
    of = SimpleNamespace(now=set(range(8)), threads={})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: of.now)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: of.threads.update({thread: set(cpus)}))
    return of


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``machine`` logs, whatever other libraries have done to loggers."""
    said: list[str] = []
    monkeypatch.setattr(machine, "_log", SimpleNamespace(info=lambda text, *values: said.append(text % values)))
    return said


# Where things are.


def test_nodes_have_cores_and_distances(make_machine):
    made = make_machine(2)
    (made.sys / "devices/system/node/node2").mkdir()
    (made.sys / "devices/system/node/node2/cpulist").write_text("\n")  # memory alone
    assert numa_nodes(made.sys) == {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    assert node_distances(made.sys) == {(0, 0): 10, (0, 1): 21, (1, 0): 21, (1, 1): 10}
    assert numa_nodes(made.sys / "nothing") == {}


def test_a_gpu_is_at_the_node_of_its_slot(make_machine):
    made = make_machine(2)
    made.gpu(0x41, node=1)
    made.gpu(0x42, node=-1)
    assert node_of_device("0000:41:00.0", made.sys) == 1
    assert node_of_device("0000:42:00.0", made.sys) is None
    assert node_of_device("0000:99:00.0", made.sys) is None


def test_a_directory_is_at_the_node_of_all_drives_below_it(make_machine, tmp_path: Path):
    made = make_machine(2)
    near, far, other = made.nvme(1, node=0), made.nvme(2, node=1), made.nvme(3, node=1)
    virtio = made.sys / "devices/pci0000:00/0000:00:04.0/virtio1/block/vda"
    virtio.mkdir(parents=True)
    (virtio.parents[2] / "numa_node").write_text("-1\n")
    expected = {
        near: 0,
        made.stacked("dm-0", far): 1,
        made.stacked("md0", far, other): 1,
        made.stacked("dm-1", made.stacked("md1", near, far)): None,
        made.nvme(5, node=1, num_ports=2): 1,
        virtio: None,
    }
    for index, (device, node) in enumerate(expected.items()):
        assert node_of_path(made.mount(tmp_path / str(index), device), made.sys) == node, device
    (tmp_path / "elsewhere").mkdir()
    assert node_of_path(tmp_path / "elsewhere", made.sys) is None


# Cores.


def test_ranks_without_a_gpu_are_spread_over_the_nodes(make_machine, affinity):
    made = make_machine(2)
    assert [bind(rank, 4, sys=made.sys) for rank in range(4)] == [0, 0, 1, 1]
    threads = {int(entry.name) for entry in Path("/proc/self/task").iterdir()}
    assert threads <= affinity.threads.keys() and os.getpid() in threads
    assert all(affinity.threads[thread] == {4, 5, 6, 7} for thread in threads)


def test_a_rank_is_bound_to_the_node_of_its_gpu(make_machine, affinity, monkeypatch, log):
    made = make_machine(2)
    made.gpu(0x41, node=1)
    of_torch = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_torch)
    assert bind(0, 2, torch.device("cuda:0"), made.sys) == 1
    assert log == ["local rank 0: bound to the 4 CPUs of NUMA node 1"]
    assert affinity.threads[os.getpid()] == {4, 5, 6, 7}
    affinity.threads.clear()
    assert bind(0, 1, torch.device("cuda:0"), made.sys) == 1
    assert affinity.threads == {}, "alone, it has the cores of both nodes"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())  # an older torch
    assert bind(0, 2, torch.device("cuda:0"), made.sys) == 0


@pytest.mark.parametrize(("chosen", "node"), [({4, 5}, 1), ({3, 4}, None), ({0, 1, 2, 3}, 0)])
def test_an_affinity_that_was_narrowed_stays(make_machine, affinity, log, chosen: set[int], node: int | None):
    made = make_machine(2)
    affinity.now = chosen
    assert bind(0, 2, sys=made.sys) == node
    assert affinity.threads == {}
    assert log == [f"local rank 0: its {len(chosen)} CPUs were chosen before, and stay"]


def test_nobody_is_bound_on_a_machine_of_one_node(make_machine, affinity):
    assert bind(1, 2, sys=make_machine(1).sys) is None
    assert affinity.threads == {}


# Drives.


def loads(assigned: list[list[int]], num_drives: int) -> list[int]:
    return [sum(drive in of_rank for of_rank in assigned) for drive in range(num_drives)]


def placements(count: int, num_nodes: int):
    """Ways to put things at nodes, up to the order of things at one node, and one without order."""
    yield from itertools.combinations_with_replacement(range(num_nodes), count)
    yield [(3 * index + 1) % num_nodes for index in range(count)]


def most_near(ranks: list[int], drives: list[int], num_nodes: int) -> int:
    """The pairs of one node that a balanced assignment can have: a node with more of the many than its few must serve
    takes what is over by one each."""
    many, few = (ranks, drives) if len(ranks) >= len(drives) else (drives, ranks)
    least, num_more = divmod(len(many), len(few))
    there = [(many.count(node), few.count(node)) for node in range(num_nodes)]
    over = sum(min(max(of_many - of_few * least, 0), of_few) for of_many, of_few in there)
    return sum(min(of_many, of_few * least) for of_many, of_few in there) + min(num_more, over)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_drives_are_shared_evenly_and_as_near_as_can_be(num_nodes: int):
    nodes = range(num_nodes)
    distances = {(a, b): 10 if a == b else 21 for a in nodes for b in nodes}
    for num_ranks, num_drives in itertools.product(range(1, 9), repeat=2):
        of_ranks = [[rank * num_nodes // num_ranks for rank in range(num_ranks)], [num_nodes - 1] * num_ranks]
        for ranks, drives in itertools.product(of_ranks, placements(num_drives, num_nodes)):
            found = assign(ranks, drives, distances)
            sizes, served = [len(of_rank) for of_rank in found], loads(found, num_drives)
            assert len(found) == num_ranks and max(sizes) - min(sizes) <= 1 and max(served) - min(served) <= 1
            assert sum(sizes) == max(num_ranks, num_drives) and min(sizes) >= 1 and min(served) >= 1
            near = sum(ranks[rank] == drives[drive] for rank, of_rank in enumerate(found) for drive in of_rank)
            assert near == most_near(list(ranks), list(drives), num_nodes), (ranks, drives)


def test_of_far_drives_the_less_far_is_taken():
    distances = {(0, 0): 10, (0, 1): 12, (0, 2): 32}
    assert assign([0, 0], [2, 1], distances) == [[1], [0]]
    assert assign([0], [2, 1, 0], distances) == [[0, 1, 2]]


def test_where_nothing_is_known_drives_go_round_robin():
    assert assign([None] * 5, [None] * 2, {}) == [[0], [1], [0], [1], [0]]
    assert assign([None] * 2, [None] * 5, {}) == [[0, 2, 4], [1, 3]]
    assert assign([0, 1], [None, 1], {(1, 1): 10}) == [[0], [1]], "who is near goes first"
    assert assign([None] * 2, [], {}) == [[], []]


def test_each_rank_has_its_drives_and_knows_with_whom(make_machine, tmp_path: Path):
    made = make_machine(2)
    paths = [made.mount(tmp_path / str(bus), made.nvme(bus, node=bus % 2)) for bus in range(1, 5)]
    config = OffloadConfig(nvme_path=paths, host_memory="10GiB", nvme_capacity=100)

    def shares(*nodes: int) -> list[Share]:
        return [share(config, rank, nodes, made.sys) for rank in range(len(nodes))]

    four = [(paths[1],), (paths[3],), (paths[0],), (paths[2],)]
    assert shares(0, 0, 1, 1) == [Share(replace(config, nvme_path=own), sharers=1) for own in four]
    eight = shares(0, 0, 0, 0, 1, 1, 1, 1)
    assert [of_rank.config.paths for of_rank in eight] == [four[0], four[1]] * 2 + [four[2], four[3]] * 2
    assert [of_rank.sharers for of_rank in eight] == [2] * 8
    assert [of_rank.config.paths for of_rank in shares(0, 1)] == [(paths[1], paths[3]), (paths[0], paths[2])]
    assert [of_rank.sharers for of_rank in shares(0, 0, 1, 1, 1)] == [1, 1, 2, 1, 2]


def test_one_drive_is_shared_by_all(tmp_path: Path):
    config = OffloadConfig(nvme_path=tmp_path)
    assert share(config, 1, [None] * 3) == Share(config, sharers=3)
    assert share(OffloadConfig(), 1, [None] * 3) == Share(OffloadConfig(), sharers=1)
    with pytest.raises(FileNotFoundError):
        share(OffloadConfig(nvme_path=tmp_path / "nothing"), 0, [None])


def test_two_paths_on_one_drive_are_one_drive(make_machine, tmp_path: Path):
    made = make_machine(1)
    shared = made.nvme(1, node=0)
    second = shared.parent / "nvme1n1p2"
    second.mkdir()
    (second / "partition").write_text("2\n")
    paths = [made.mount(tmp_path / str(number), part) for number, part in enumerate((shared, second))]
    paths.append(made.mount(tmp_path / "alone", made.nvme(2, node=0)))
    config = OffloadConfig(nvme_path=paths)
    assert [share(config, rank, [0, 0], made.sys).config.paths for rank in range(2)] == [tuple(paths[:2]), (paths[2],)]


# Queues.


def test_ranks_on_a_drive_have_the_queue_of_one():
    assert [queue_share(32, sharers) for sharers in (1, 2, 3, 8, 16, 64)] == [32, 16, 10, 4, 2, 2]
    assert queue_share(1, 1) == 1


@pytest.mark.parametrize("measured", [False, True])
def test_the_store_has_its_part_of_queue_and_bandwidth(measured: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = IoProfile(
        backend="portable",
        block_bytes=1 << 20,
        queue_depth=24,
        num_threads=4,
        read_bytes_per_s=8e9,
        write_bytes_per_s=4e9,
        mixed_bytes_per_s=6e9,
        mixed_q=1.5,
    )
    if measured:
        save_profile(tmp_path, profile)
    depths = []
    made = store.create_store
    monkeypatch.setattr(store, "create_store", lambda *args, **o: depths.append(o["queue_depth"]) or made(*args, **o))
    plan = make_plan(find_units(Tiny()), Formats(weights=4, master=0, grads=0), None, 2 << 20, 1 << 40)
    opened = store.open_engine_store(OffloadConfig(nvme_path=tmp_path, optimizer=None), plan, 4, Ranks.single())
    opened.close()
    assert depths == [24 // 4 if measured else DEPTH // 4]
    rates = None if opened.profile is None else (opened.profile.read_bytes_per_s, opened.profile.write_bytes_per_s)
    assert rates == ((2e9, 1e9) if measured else None)
