import ctypes
import mmap

import torch

from offload.memory import copy_memory, resident_bytes


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
