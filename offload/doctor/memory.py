"""Host memory: what is free, what a cgroup leaves of it, huge pages, memory that may be locked, and NUMA nodes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from aio_ext import Memory, Queue, unavailable_backends
from offload.doctor.finding import Finding, better, good, good_if
from offload.ranks.host_cores import host_cores
from offload.ranks.topology import text_of

_TRIED_BYTES = 32 << 20
_SYS = Path("/sys")
_LOCKING = "ulimit -l unlimited (docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"


def host_memory() -> Iterator[Finding]:
    from offload.memory import available_bytes, cgroup_limits
    from offload.planning import AUTO_SHARE

    available, total = available_bytes(), min([_total_bytes(), *(limit for _, limit, _ in cgroup_limits())])
    auto = decimal(int(available * AUTO_SHARE))
    says = f'{decimal(available)} of {decimal(total)} can be taken; host_memory="auto" takes {auto}'
    repair = "end what else holds memory: ps -eo rss,pid,args --sort=-rss | head"
    yield good_if(available >= total / 4, "host memory", says, repair)


def cgroup() -> Iterator[Finding]:
    """The tightest memory limit of the groups that this process is in."""
    from offload.memory import cgroup_limits

    limits = [(limit, used, folder) for folder, limit, used in cgroup_limits() if limit < _total_bytes()]
    if not limits:
        yield good("memory cgroup", "no limit below the machine's memory")
        return
    limit, used, folder = min(limits)
    says = f"{decimal(limit)} of the machine's {decimal(_total_bytes())} at most, {decimal(used)} used, by {folder}"
    repair = "docker run --memory, systemd-run -p MemoryMax=, Slurm --mem, or the pod's limits.memory"
    yield better("memory cgroup", says, repair)


def locked_memory() -> Iterator[Finding]:
    """Find whether the ring may hold buffers in place. Not so: each block looks its pages up."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"a limit of {decimal(soft)}"
    if "io_uring" in unavailable_backends():
        yield good("memlock", f"{limit}; without io_uring nothing needs more")
        return
    with Memory(_TRIED_BYTES) as memory, Queue("io_uring") as queue:
        before = set(queue.notes)
        queue.register_memory(memory.address, memory.nbytes)
        notes = [note for note in queue.notes if note not in before]
    if notes:
        yield better("memlock", f"{limit}: {notes[0].partition('; ')[0]}", _LOCKING)
    else:
        yield good("memlock", f"{limit}; {decimal(_TRIED_BYTES)} were registered with a ring")


def huge_pages() -> Iterator[Finding]:
    """The state of transparent huge pages, and whether a buffer gets them."""
    file = _SYS / "kernel/mm/transparent_hugepage/enabled"
    state = text_of(file).partition("[")[2].partition("]")[0] or "missing in this kernel"
    with Memory(_TRIED_BYTES) as memory:
        memory.populate()
        huge = memory.huge_bytes()
    says = f"transparent ones: {state}; a buffer of {decimal(_TRIED_BYTES)} has {decimal(huge)} of them"
    compact = "echo 1 | sudo tee /proc/sys/vm/compact_memory"
    repair = f"echo madvise | sudo tee {file}" if state == "never" else compact
    yield good_if(huge >= _TRIED_BYTES / 2, "huge pages", says, repair)


def numa() -> Iterator[Finding]:
    nodes = sorted(_SYS.glob("devices/system/node/node[0-9]*"), key=lambda node: int(node.name[4:]))
    if len(nodes) < 2:
        yield good("NUMA", "one node: all memory is equally near")
        return
    cores = ", ".join(f"{node.name} with cores {text_of(node / 'cpulist')}" for node in nodes)
    says = f"{len(nodes)} nodes: {cores}; the storage below says which one its drive is at"
    spans = len(host_cores(_SYS.parent).nodes) > 1
    says += "; the engine's memory comes from each by turns, and updates read that of all" * spans
    repair = "a rank for each node (torchrun --nproc-per-node), which is bound to it and has its memory there"
    yield good_if(not spans, "NUMA", says, repair)


def _total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


CHECKS = (host_memory, cgroup, locked_memory, huge_pages, numa)
