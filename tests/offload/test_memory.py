import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload import OffloadEngine
from offload.assembly import tiers
from offload.memory import cgroup_limits, copy_memory, interleave, on_cpu, resident_bytes
from offload.torch_internals import function_modes


def test_a_copy_of_memory_is_no_part_of_a_transform_that_is_under_way():
    weight, copy = torch.arange(6.0), torch.zeros(6)

    def function(x: torch.Tensor) -> torch.Tensor:
        copy_memory(copy.data_ptr(), weight.data_ptr(), weight.nbytes)
        return x.square().sum()

    torch.func.grad(function)(torch.ones(2))
    assert copy.tolist() == weight.tolist()


def test_of_a_mapping_the_pages_of_a_range_are_counted_that_are_in_memory():
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 64 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert resident_bytes([(address, 64 * page)]) == 0
        memory[8 * page : 12 * page] = bytes([1]) * (4 * page)
        assert resident_bytes([(address, 64 * page)]) == 4 * page
        assert resident_bytes([(address + 10 * page, page + 1)]) == 2 * page, "whole pages, whatever is asked of one"
        assert resident_bytes([(address, 9 * page), (address + 11 * page, 53 * page)]) == 2 * page
        assert resident_bytes([]) == 0


def test_the_kernel_is_asked_to_take_the_pages_of_a_mapping_from_nodes_by_turns():
    with mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not interleave(address, 64 * mmap.PAGESIZE, {0}):
            pytest.skip("this machine refuses it")
        policies = dict(line.split()[:2] for line in Path("/proc/self/numa_maps").read_text().splitlines())
        assert policies[f"{address:08x}"] == "interleave:0"
        assert not interleave(address, 64 * mmap.PAGESIZE, {1000}), "no machine has that one"
        assert not interleave(address, 64 * mmap.PAGESIZE, ())


@pytest.mark.parametrize(("nodes", "spreads"), [((), False), ((1,), False), ((0, 1), True)])
def test_an_engine_whose_cores_are_at_several_nodes_has_memory_of_each(
    make_model: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], spreads: bool
):
    asked: list[tuple[int, frozenset[int]]] = []
    monkeypatch.setattr(tiers, "host_nodes", lambda: frozenset(nodes))
    monkeypatch.setattr(tiers, "interleave", lambda address, nbytes, nodes: asked.append((nbytes, nodes)))
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        assert asked == [(engine.plan.arena_bytes, frozenset(nodes))] * spreads


def test_tensors_are_made_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"), on_cpu():
        assert torch.empty(1).device.type == "cpu"
    with on_cpu():
        assert torch.empty(1).device.type == "cpu" and not function_modes()


def _files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_nested_memory_cgroups_are_found_and_pages_of_files_count_as_free(tmp_path: Path):
    """A container that has read more files than its limit has pages of them in all of it."""
    stat = "anon 100\nfile 850\nshmem 50\ninactive_anon 60\nactive_anon 90\ninactive_file 500\nactive_file 300\n"
    own, outer = "sys/fs/cgroup/pod/job", "sys/fs/cgroup/pod"
    _files(tmp_path, {"proc/self/cgroup": "0::/pod/job\n"})
    _files(tmp_path, {f"{own}/{name}": text for name, text in {"memory.max": "max\n", "memory.high": "900\n"}.items()})
    _files(tmp_path, {f"{own}/memory.current": "880\n", f"{own}/memory.stat": stat})
    _files(tmp_path, {f"{outer}/memory.max": "1000\n", f"{outer}/memory.high": "max\n"})
    _files(tmp_path, {f"{outer}/memory.current": "990\n", f"{outer}/memory.stat": stat})
    assert [*cgroup_limits(tmp_path)] == [(tmp_path / own, 900, 80), (tmp_path / outer, 1000, 190)]


def test_limits_of_the_older_memory_cgroups_count_groups_within(tmp_path: Path):
    """In a container the process's path is the host's, and its own group is at the top of what is mounted."""
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 500\ntotal_active_file 300\n"
    top = "sys/fs/cgroup/memory"
    _files(tmp_path, {"proc/self/cgroup": "4:memory:/docker/0123\n3:cpu:/docker/0123\n0::/\n"})
    _files(tmp_path, {f"{top}/memory.limit_in_bytes": "1000\n", f"{top}/memory.usage_in_bytes": "990\n"})
    _files(tmp_path, {f"{top}/memory.stat": stat})
    assert [*cgroup_limits(tmp_path)] == [(tmp_path / top, 1000, 190)]
