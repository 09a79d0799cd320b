"""Memory and patterns: sizes, pages, and what happens at their edges."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal

import pytest
from faulty_queue import load, store

from aio_ext import Memory, Pattern

MIB = 1 << 20


def test_memory_is_aligned_zeroed_and_of_the_size_asked_for() -> None:
    with Memory(3 * MIB + 17) as memory:
        assert memory.address % (2 * MIB) == 0
        assert memory.nbytes == 3 * MIB + 17
        assert load(memory.address, memory.nbytes) == bytes(memory.nbytes)


def test_populated_memory_rests_on_huge_pages_where_they_are_allowed() -> None:
    with Memory(16 * MIB) as memory, Memory(16 * MIB, huge_pages=False) as small:
        assert memory.huge_bytes() == 0
        memory.populate()
        small.populate()
        assert small.huge_bytes() == 0
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as setting:  # noqa: PTH123
            if "[never]" not in setting.read():
                assert memory.huge_bytes() == 16 * MIB


def test_populate_keeps_what_is_there() -> None:
    with Memory(4 * MIB) as memory:
        store(memory.address + 5000, b"kept")
        memory.populate()
        assert load(memory.address + 5000, 4) == b"kept"


def test_a_pattern_shows_its_value_everywhere_and_cannot_be_written() -> None:
    with Pattern(5 * MIB, 0x7FFF) as pattern:
        words = (ctypes.c_uint16 * (pattern.nbytes // 2)).from_address(pattern.address)
        assert set(words) == {0x7FFF}
        address = pattern.address + 4 * MIB
        assert _signal_of(lambda: store(address, b"x")) == signal.SIGSEGV


def test_running_over_the_end_of_memory_traps() -> None:
    with Pattern(2 * MIB, 1) as pattern:
        load(pattern.address + 2 * MIB - 1, 1)
        assert _signal_of(lambda: load(pattern.address + 2 * MIB, 1)) == signal.SIGSEGV
        assert _signal_of(lambda: load(pattern.address - 1, 1)) == signal.SIGSEGV


def test_a_child_does_not_have_the_memory_of_its_parent() -> None:
    with Memory(2 * MIB) as memory:
        load(memory.address, 1)
        assert _signal_of(lambda: load(memory.address, 1)) == signal.SIGSEGV


def test_a_child_that_drops_its_parents_memory_keeps_what_it_mapped_in_its_place() -> None:
    memories = [Memory(16 * MIB)]
    address = memories[0].address

    def act() -> None:
        own = mmap_at(address, 4096)
        memories.clear()
        load(own, 4096)

    assert _signal_of(act) == 0


def mmap_at(address: int, nbytes: int) -> int:
    """Private memory at exactly this address, which must be free."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    map_fixed_noreplace = 0x100000
    got = libc.mmap(address, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed_noreplace, -1, 0)
    assert got == address
    return address


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_impossible_sizes_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError):
        Memory(nbytes)
    with pytest.raises(ValueError):
        Pattern(nbytes, 0)


def test_values_of_more_than_16_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="16-bit"):
        Pattern(4096, 1 << 16)


def test_closing_twice_is_fine() -> None:
    memory = Memory(4096)
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.populate()


def _signal_of(act: object) -> int:
    """The signal that ended a child which did this; 0 if it survived."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        act()  # type: ignore[operator]
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
