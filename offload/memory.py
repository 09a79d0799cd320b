"""Raw memory as tensors, and the memory that is really free."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import aio_ext
from offload.errors import named

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later. Older ones refuse it."""

LARGE_BYTES = 1 << 20
"""A block of memory that is worth the call of the system and the faults that a mapping of its own costs."""

_M_MMAP_THRESHOLD = -3
_THRESHOLDS = ("mmap_threshold", "trim_threshold")

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of this call of Linux, by processor: the C library has none."""

_INTERLEAVE = 3
"""``MPOL_INTERLEAVE``."""

_FAULT_BYTES = 64 << 20
"""One thread faults in so much in one call."""

_LOOK_BYTES = 4 << 30
"""The kernel is asked about so much in one call: a byte of its answer for each page."""


def on_cpu() -> AbstractContextManager[Any]:
    """Within, new tensors are on the CPU, whatever the default device. Where it is the default, no mode says so again:
    a mode sees each operation."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu


def tensor_at(address: int, numel: int, dtype: torch.dtype, owner: object = None) -> torch.Tensor:
    """A flat tensor over memory that someone else owns. It must outlive the tensor: its storage keeps ``owner``."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    if owner is not None:
        buffer.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=dtype)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses. No operation of torch's does it: a transform of ``torch.func`` or a mode that is
    under way would take the copy for a part of its own computation."""
    ctypes.memmove(target, source, nbytes)


def passing_tensor(nbytes: int) -> torch.Tensor:
    """Zeros of ``uint8`` in memory that goes back to the system with the tensor. What is freed in between is often kept
    by the C library, in pieces: a hundred tensors that follow one another would take the memory of many."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with named("memory for a tensor"):
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def private_memory(nbytes: int) -> aio_ext.Memory:
    """Memory of this process, for transfers. Raises ``OffloadError`` where there is none."""
    with named("memory for a transfer"):
        return aio_ext.Memory(nbytes)


def fault_in(address: int, nbytes: int, num_threads: int) -> None:
    """Have the kernel put memory under whole pages of a mapping, by several threads; what they hold stays. Where it
    will not (an old kernel, no memory left), the first use of each page does, as always."""
    madvise = ctypes.CDLL(None).madvise  # ctypes lets other threads run meanwhile
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    parts = [(address + start, min(_FAULT_BYTES, nbytes - start)) for start in range(0, nbytes, _FAULT_BYTES)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda part: madvise(*part, _MADV_POPULATE_WRITE), parts))


def interleave(address: int, nbytes: int, nodes: Collection[int]) -> bool:
    """Have the kernel take the pages of a mapping from these NUMA nodes by turns, before any is there: a sweep over a
    few of them by the cores of all nodes then has the bandwidth of all. False where the kernel, or a container, will
    not: each page then comes from the node whose core touches it first."""
    number = _MBIND.get(platform.machine())
    if number is None or not nodes:
        return False
    num_bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (max(nodes) // num_bits + 1))()
    for node in nodes:
        mask[node // num_bits] |= 1 << node % num_bits
    num_nodes = ctypes.c_ulong(len(mask) * num_bits + 1)  # of which the kernel looks at one less
    syscall = ctypes.CDLL(None).syscall
    return not syscall(number, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _INTERLEAVE, mask, num_nodes, 0)


def trim_heap() -> None:
    """Give memory back to the system that was freed: glibc keeps blocks of up to 32 MiB, in pieces that the next
    temporaries may not fit into. Does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_blocks() -> None:
    """Have each block of ``LARGE_BYTES`` or more be a mapping of its own from now on, which goes back to the system
    when it is freed; one thread's heap cannot give back what lies below a block that lives. It holds for the whole
    process, and is left to who has set one of glibc's thresholds by the environment. Does nothing with other C
    libraries."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}" in tunables for name in _THRESHOLDS)
    if set_option is not None and not is_set:
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)


def available_bytes() -> int:
    """Host memory that can be taken without swapping or meeting a cgroup limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *(limit - used for _, limit, used in cgroup_limits())]))


def cgroup_limits(root: Path = Path("/")) -> Iterator[tuple[Path, int, int]]:
    """Folder, limit and bytes used of each memory cgroup with a limit that this process is in, the innermost first.

    Pages of files count as free, as they do in ``MemAvailable``: the kernel drops them for who needs memory. A group
    that has read more files than its limit is full of them. ``memory.high`` is a limit, too: above it the kernel lets
    the group wait."""
    for folder in cgroup_folders("memory", root):
        for limit, used, of_all in (
            ("memory.max", "memory.current", ""),
            ("memory.high", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            try:
                bound = (folder / limit).read_text().strip()
                if bound == "max":
                    continue
                counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                of_files = sum(int(counted.get(f"{of_all}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield folder, int(bound), max(0, int((folder / used).read_text()) - of_files)
            except OSError:
                continue


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Folders of this process's cgroup and those above it, the innermost first, as far as they may bound what a
    controller (``memory``, ``cpu``) counts (v2 and v1). ``proc`` and ``sys`` are below ``root``."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mounted / path.lstrip("/")
        for level in (folder, *folder.parents):
            yield level
            if level == mounted:
                break


def resident_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    """Bytes of the pages of these ranges (address, bytes) that are in memory, by the kernel's count.

    Cost: a look at the page tables of the ranges alone. ``/proc/self/smaps`` is one at those of the whole process,
    which take several milliseconds, and who trains asks each step."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    num_pages = 0
    for address, nbytes in ranges:
        first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + nbytes
        for start in range(first, end, _LOOK_BYTES):
            present = ctypes.create_string_buffer(-(-min(_LOOK_BYTES, end - start) // mmap.PAGESIZE))
            if mincore(start, min(_LOOK_BYTES, end - start), present):
                raise OSError(ctypes.get_errno(), f"mincore of {nbytes} bytes at {address:#x}")
            num_pages += present.raw.count(1)
    return num_pages * mmap.PAGESIZE
