"""The native parts, the processor that they run on, torch, and io_uring."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import offload
from aio_ext import Queue, available_backends, unavailable_backends
from offload.doctor.finding import Finding, better, broken, good, good_if
from offload.errors import OLDEST_TORCH
from offload.ranks.host_cores import host_cores
from offload.ranks.topology import cpuinfo, text_of

_ROOT = Path("/")
_BUILD = "pip install . in the project's folder, with a C++ compiler, cmake and liburing-dev"
_BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
_SHOWN_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def package() -> Iterator[Finding]:
    python, linux = platform.python_version(), platform.release()
    yield good("offload", f"{offload.__version__} on Python {python}, Linux {linux}")


def processor() -> Iterator[Finding]:
    """Its features, and the cores that this process may use."""
    facts = cpuinfo()
    name = facts.get("model name") or platform.machine()
    features = set((facts.get("flags") or facts.get("Features") or "").split())
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    shown = " ".join(feature for feature in _SHOWN_FEATURES if feature in features) or "no vector units that count"
    bf16 = "" if features & _BF16_UNITS else "; no bf16 units, so that on the CPU fp32 computes faster"
    says = f"{name}, {allowed} of {there} cores, {shown}{bf16}"
    repair = "it is bound to some of the cores: see taskset, numactl, docker run --cpuset-cpus"
    yield good_if(allowed >= there, "processor", says, repair)


def cores() -> Iterator[Finding]:
    """The number of them that the optimizer's kernels and compute can keep busy, and their kinds."""
    found = host_cores(_ROOT)
    count = len(found.cores)
    slow = f", {found.num_slow} of them slower than the others: they take fewer blocks of a tile" * (found.num_slow > 0)
    threads = sum(map(len, found.cores))
    says = f"{count} cores with {threads} threads{slow}"
    if found.quota < count:
        says = f"{found.quota:g} of {count} cores, by a CPU quota, beyond which all threads are stopped for a while"
    repair = "docker run --cpus, the pod's limits.cpu, systemd-run -p CPUQuota="
    yield good_if(found.quota >= count, "cores", says, repair)
    if "microsoft" in text_of(_ROOT / "proc/version").lower():
        says = "WSL2: Windows lets a program pin little memory, and copies of what is not pinned block"
        yield better("pinned memory", says, "a smaller host_memory, or Linux without Windows below it")


def kernels() -> Iterator[Finding]:
    try:
        from offload.kernels import ISA
    except ImportError as error:
        yield broken("kernels", " ".join(str(error).split()), _BUILD)
        return
    if os.environ.get("OFFLOAD_ISA"):
        yield better("kernels", f"{ISA}, because OFFLOAD_ISA says so", "unset OFFLOAD_ISA")
    elif ISA == "scalar":
        yield better("kernels", "scalar: this processor has neither AVX2, AVX-512 nor NEON")
    else:
        yield good("kernels", f"native, {ISA}")


def torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield broken("torch", str(error), f"pip install 'torch>={OLDEST_TORCH}'")
        return
    from offload.errors import TorchUnsupported
    from offload.torch_internals import check

    try:
        check()
    except TorchUnsupported as error:
        yield broken("torch", str(error), "pip install --upgrade torch")
        return
    threads, available = torch.get_num_threads(), host_cores(_ROOT).available
    says = f"{torch.__version__}, {threads} threads"
    if threads < available and "OMP_NUM_THREADS" in os.environ:
        yield better("torch", f"{says} for {available:g} cores", "unset OMP_NUM_THREADS")
    else:
        yield good("torch", says)


def queues() -> Iterator[Finding]:
    """The native core of the queue. Without it the engine works only if it is asked for the portable one."""
    if "threads" in unavailable_backends():
        yield broken("aio_ext", unavailable_backends()["threads"], _BUILD)
    else:
        yield good("aio_ext", f"native, I/O by {available_backends()[0]}")


def io_uring() -> Iterator[Finding]:
    unsupported_reason = unavailable_backends().get("io_uring")
    if unsupported_reason:
        says, repair = _split(unsupported_reason)
        yield better("io_uring", f"{says}: I/O goes by {available_backends()[0]}", repair)
        return
    with Queue("io_uring") as queue:
        notes = queue.notes
    for note in notes:
        yield better("io_uring", note, "a newer Linux")
    if not notes:
        yield good("io_uring", "works, with all that the queue uses of it")


def _split(sentence: str) -> tuple[str, str]:
    """Split into what is wrong, and the repair that follows a semicolon; the system's own words at the end say no
    more."""
    says, _, repair = sentence.partition("; ")
    words, _, last = repair.rpartition(": ")
    return says, words if last in map(os.strerror, errno.errorcode) else repair


CHECKS = (package, processor, cores, kernels, torch, queues, io_uring)
