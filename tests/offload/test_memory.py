import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload import OffloadEngine
from offload.assembly import tiers
from offload.memory import copy_memory, interleave, on_cpu, resident_bytes
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
