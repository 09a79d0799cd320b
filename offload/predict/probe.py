"""This machine as a forecast needs it: what its cores, memory and drives do in the few seconds of a probe."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aio_ext import Memory, Queue, available_backends
from aio_ext.measure import Range, Sample, mixed_q
from aio_ext.profile import load_profile
from offload import kernels
from offload.errors import ConfigError
from offload.memory import available_bytes
from offload.planning import AUTO_SHARE
from offload.predict.machine import Cores, Machine
from offload.predict.model import Model
from offload.predict.workload import Workload
from offload.report.report import Bandwidths
from swapper import checksum

_ROUNDS = 3
_MIB = 1 << 20
_FILE_BYTES = 256 * _MIB
_DEPTH, _BLOCK_BYTES = 16, 1 * _MIB
_HEAD_WIDTH = 64
_MOST_WIDTH = 2048
"""Wider layers are no faster than these, and take long to try."""
_MOST_TOKENS = 2048
_MOST_Q = 8.0
"""Both at once at full speed; what is more comes of a moment that was slow."""
_SWEPT = 1 << 22
"""Elements of the tile that the kernel is tried on: far more than caches hold, 32 MiB of moments."""

UNIT_SECONDS = (1.5e-4, 2e-3)
"""What the engine takes for a unit and step, all in memory and brought from NVMe (docs/benchmarks.md)."""


def probe(
    paths: Sequence[Path],
    model: Model,
    workload: Workload,
    *,
    host_bytes: int | None = None,
    backend: str = "auto",
    drives: Bandwidths | None = None,
) -> Machine:
    """This machine, computing on its CPU, for such a model and batch.

    ``host_bytes`` is the budget; None: what the engine takes by itself. ``drives`` are those of a described machine, in
    place of what is found under ``paths``.
    """
    nvme, how = drives, "as given"
    if paths and drives is None:
        nvme, how = drive_rates(paths, backend)
    cores = core_rates(model.width, workload.batch, workload.sequence, model.vocabulary, workload.dtype)
    assumptions = [
        f"a block of this width and batch was tried here: {cores.blocks / 1e9:,.0f} GFLOPS, and the head and loss: "
        f"{cores.head / 1e9:,.0f} GFLOPS",
    ]
    if nvme is not None:
        assumptions.append(
            f"NVMe reads {nvme.read / 1e9:,.2f} and writes {nvme.write / 1e9:,.2f} GB/s, q = {nvme.q:.2f} ({how})"
        )
    return Machine(
        host_bytes=int(available_bytes() * AUTO_SHARE) if host_bytes is None else host_bytes,
        nvme_bytes=_free_bytes(paths),
        nvme=nvme,
        cores=cores,
        update=_update_rate(),
        checksum=_checksum_rate(),
        unit_seconds=UNIT_SECONDS,
        assumptions=tuple(assumptions),
    )


def drive_rates(paths: Sequence[Path], backend: str = "auto") -> tuple[Bandwidths, str]:
    """What the paths do together, and where that is from: the profile that is kept for them, or a look at it now."""
    profile = load_profile(*paths)
    if profile is not None:
        return Bandwidths(profile.read_bytes_per_s, profile.write_bytes_per_s, profile.mixed_q), "stored profile"
    each = [_measured(path, backend) for path in paths]
    together = Bandwidths(sum(one.read for one in each), sum(one.write for one in each), min(one.q for one in each))
    return together, "measured now"


def core_rates(width: int, batch: int, sequence: int, vocabulary: int, dtype: torch.dtype) -> Cores:
    """FLOP/s that a transformer's block, and the head with its loss, reach here in forward and backward."""
    width = max(min(width, _MOST_WIDTH) // _HEAD_WIDTH, 1) * _HEAD_WIDTH
    sequence = min(sequence, _MOST_TOKENS)
    batch = max(min(batch, _MOST_TOKENS // sequence), 1)
    tokens = batch * sequence
    blocks = nn.Sequential(_Block(width), _Block(width)).to(dtype)
    x = torch.randn(batch, sequence, width, dtype=dtype, requires_grad=True)

    def through_blocks() -> None:
        blocks.zero_grad(set_to_none=True)
        blocks(x).sum().backward()

    matrices = sum(weight.numel() for weight in blocks.parameters() if weight.dim() > 1)
    flops = 6.0 * tokens * matrices + 3 * 2 * 2.0 * tokens * sequence * width
    rate = flops / _seconds(through_blocks)
    if not vocabulary:
        return Cores(rate, rate)
    head = nn.Linear(width, vocabulary, bias=False).to(dtype)
    targets = torch.zeros(tokens, dtype=torch.long)

    def through_head() -> None:
        head.zero_grad(set_to_none=True)
        F.cross_entropy(head(x).flatten(0, 1).float(), targets).backward()

    return Cores(rate, 6.0 * tokens * width * vocabulary / _seconds(through_head))


class _Block(nn.Module):
    """A block of a transformer, as wide as the model's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, width // _HEAD_WIDTH, _HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return out


def _update_rate() -> float:
    """Bytes of memory traffic a second that the kernel of Adam reaches on this thread's cores."""
    master, grad, first, second = (torch.zeros(_SWEPT) for _ in range(4))
    coefficients = kernels.AdamCoef(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)

    def sweep() -> None:
        kernels.adam(
            coefficients, _SWEPT, grad=grad.data_ptr(), grad_dtype=kernels.Dtype.F32, weight=master.data_ptr(),
            weight_dtype=kernels.Dtype.F32, moments_dtype=kernels.Dtype.F32, exp_avg=first.data_ptr(),
            exp_avg_sq=second.data_ptr(),
        )  # fmt: skip

    return 28 * _SWEPT / _seconds(sweep)


def _checksum_rate() -> float:
    """Bytes a second that one core checks."""
    data = torch.zeros(4 * _SWEPT, dtype=torch.uint8)
    return data.nbytes / _seconds(lambda: checksum.digest(data.data_ptr(), data.nbytes, 0))


def _seconds(work: Callable[[], object]) -> float:
    """The median of a few rounds, after one that does not count."""
    work()
    taken = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _measured(path: Path, backend: str) -> Bandwidths:
    """Reads, writes and both at once, on a nameless file."""
    backend = available_backends()[0] if backend == "auto" else backend
    nbytes = min(_FILE_BYTES, _free_bytes([path]) // 4) // _BLOCK_BYTES * _BLOCK_BYTES
    if nbytes < 16 * _MIB:
        raise ConfigError(f"{path} has too little room to look at its bandwidth: free some, or give --nvme")
    with tempfile.TemporaryFile(dir=path) as file, Memory(min(64 * _MIB, nbytes)) as memory:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            memory.populate()
            with Queue(backend, _DEPTH, _BLOCK_BYTES) as queue:
                queue.register_memory(memory.address, memory.nbytes)
                range_ = Range(queue, queue.register_file(descriptor), nbytes, memory, _DEPTH, _BLOCK_BYTES)
                range_.measure("write", nbytes)  # the first time it allocates
                samples = {mode: range_.measure(mode, 2 * nbytes) for mode in ("read", "write", "mixed")}
        finally:
            os.close(descriptor)
    read, write = samples["read"].bytes_per_s, samples["write"].bytes_per_s
    return Bandwidths(read, write, _q(samples["mixed"], read, write))


def _q(mixed: Sample, read: float, write: float) -> float:
    return min(mixed_q(mixed.read_bytes / read, mixed.write_bytes / write, mixed.seconds), _MOST_Q)


def _free_bytes(paths: Sequence[Path]) -> int:
    """Free on the paths, one file system counted once."""
    found = {path.stat().st_dev: os.statvfs(path) for path in paths}
    return sum(status.f_bavail * status.f_frsize for status in found.values())
