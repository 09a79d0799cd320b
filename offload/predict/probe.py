"""This machine as a forecast needs it: what its cores, memory and drives do in the few seconds of a probe."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aio_ext import Memory, Queue, available_backends
from aio_ext.measure import Range
from aio_ext.profile import file_system_key, load_profile
from offload import kernels
from offload.dtypes import kernel_dtype
from offload.errors import ConfigError
from offload.memory import available_bytes
from offload.native_optimizers import AdamCoef
from offload.planning import AUTO_SHARE, free_bytes_of
from offload.predict.machine import Cores, Machine
from offload.predict.measurements import UNKEPT, Unkept
from offload.predict.model import Model
from offload.predict.workload import Workload
from offload.ranks.host_cores import host_cores
from offload.report.report import Bandwidths
from offload.tiers.bandwidth import fitted
from swapper import checksum

_ROUNDS = 5
_ROUNDS_BESIDE = 2
"""Of compute beside sweeps, where it takes longer."""
_ROUND_SECONDS = 0.25
"""No round of products takes much longer, on however slow a core: a forecast is waited for."""
_MIB = 1 << 20
_FILE_BYTES = 256 * _MIB
_DEPTH, _BLOCK_BYTES = 16, 1 * _MIB
_HEAD_WIDTH = 64
_MOST_WIDTH = 1024
"""Wider layers are no faster than these, and take long to try."""
_MOST_ROWS = 32_768
"""The same of a head."""
_MOST_TOKENS = 2048
_LEAST_TOKENS = 16
_MOST_FLOPS = 8e10
"""The most work of a round, on however fast a core."""
_SWEPT = 1 << 22
"""Elements of the tile that the kernel is tried on: far more than caches hold, 32 MiB of moments."""

_MOST_LOST = 0.75
"""Of the cores' work. What seems to be more is the work of other programs."""

_BLOCKS_BYTES = 96 * _MIB
"""Weights of the blocks that are tried: more than caches hold, as those of a model are."""


def probe(
    paths: Sequence[Path],
    model: Model,
    workload: Workload,
    *,
    host_bytes: int | None = None,
    backend: str = "auto",
    drives: Bandwidths | None = None,
    ranks: int = 1,
    meet: Callable[[], object] = lambda: None,
    measurements: Unkept = UNKEPT,
) -> Machine:
    """This machine, computing on its CPU, for such a model and batch. What the engine itself takes is left out, see
    ``offload.predict.overhead``.

    ``host_bytes`` is the budget; None: what the engine takes by itself. ``drives`` are those of a described machine, in
    place of what is found under ``paths``. As many as ``ranks`` look at once: they wait for each other in ``meet``,
    before and after each round, as ranks go on when the last one has come. ``measurements`` may know some already.
    """
    count = host_cores().available / ranks
    nvme, how = drives, "as given"
    if paths and drives is None:
        nvme, how = drive_rates(paths, backend, measurements)
    sweep = functools.cache(_Sweep)  # its memory is taken where something is measured
    update = measurements.of("updates of weights", lambda: _Sweep.nbytes / _seconds(sweep(), meet)[0])
    trial = Trial.of(model, workload)
    cores = Cores(**measurements.of(trial.of_blocks, lambda: asdict(core_rates(trial, count, meet, sweep()))))
    if trial.rows:
        cores = replace(cores, head=measurements.of(trial.of_head, lambda: head_rate(trial, meet)))
    assumptions = [
        f"a block of this width and batch was tried here: {cores.blocks / 1e9:,.0f} GFLOPS, and the head and loss: "
        f"{cores.head / 1e9:,.0f} GFLOPS",
        f"where compute and updates have the same cores, {cores.lost:.0%} of their work is lost, as was tried here",
    ]
    if nvme is not None:
        assumptions.append(
            f"NVMe reads {nvme.read / 1e9:,.2f} and writes {nvme.write / 1e9:,.2f} GB/s, q = {nvme.q:.2f} ({how})"
        )
    free = available_bytes()
    host_bytes = int(free * AUTO_SHARE) if host_bytes is None else host_bytes
    return Machine(
        host_bytes=host_bytes,
        beside_bytes=max(free - host_bytes, 0) / ranks,
        nvme_bytes=free_bytes_of(paths),
        nvme=nvme,
        cores=cores,
        update=update,
        checksum=measurements.of("checksums", lambda: _checksum_rate(meet)),
        unit_seconds=0.0,
        record_seconds=0.0,
        assumptions=tuple(assumptions),
    )


def drive_rates(paths: Sequence[Path], backend: str = "auto", measurements: Unkept = UNKEPT) -> tuple[Bandwidths, str]:
    """Rates of the paths together, and their source: the profile that is kept for them, or a look at them."""
    profile = load_profile(*paths)
    if profile is not None:
        return Bandwidths(profile.read_bytes_per_s, profile.write_bytes_per_s, profile.mixed_q), "stored profile"
    each = []
    for path in paths:
        name, look = f"{backend} on {file_system_key(path)}", functools.partial(_looked_at, path, backend)
        each.append(Bandwidths(*measurements.of(name, look)))
    together = Bandwidths(sum(one.read for one in each), sum(one.write for one in each), min(one.q for one in each))
    return together, "measured here"


@dataclass(frozen=True)
class Trial:
    """What is tried of a model and batch: a layer as wide as the model's, but no wider, and no more of them and no more
    tokens, than it takes to know. So models of some size have the same trial."""

    width: int
    number: int
    """Of the blocks."""
    batch: int
    sequence: int
    most_tokens: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    """Of each piece of the head; none without a vocabulary."""

    @classmethod
    def of(cls, model: Model, workload: Workload) -> Trial:
        dtype = workload.dtype
        width = max(min(model.width, _MOST_WIDTH) // _HEAD_WIDTH, 1) * _HEAD_WIDTH
        number = max(min(_BLOCKS_BYTES // (12 * width**2 * dtype.itemsize), model.layers), 2)
        most_tokens = min(int(_MOST_FLOPS / (6 * 12 * width**2 * number)), _MOST_TOKENS)
        sequence = min(workload.sequence, most_tokens)
        batch = min(workload.batch, -(-most_tokens // sequence))
        rows = tuple(_rows(model, dtype)) if model.vocabulary else ()
        return cls(width, number, batch, sequence, most_tokens, dtype, rows)

    @property
    def of_blocks(self) -> str:
        """The name of what is measured of the blocks."""
        of = f"of {self.batch} x {self.sequence} tokens in {self.dtype}"
        return f"{self.number} blocks of width {self.width}, {of}"

    @property
    def of_head(self) -> str:
        """The same of the head."""
        rows = " + ".join(map(str, self.rows))
        return f"head of {rows} rows after {self.of_blocks}"


def core_rates(trial: Trial, count: float, meet: Callable[[], object], sweep: Callable[[], object]) -> Cores:
    """Measure the rates that these ``count`` cores reach in such a transformer's blocks, forward and backward, and what
    they lose beside a ``sweep`` of an update. Each gradient is put away and let go as soon as it is there, as in the
    engine: what a process keeps, and what it asks the system for, bears on its speed."""
    width, number = trial.width, trial.number
    blocks = nn.Sequential(*(_Block(width) for _ in range(number))).to(trial.dtype)

    def through_blocks(batch: int, sequence: int) -> Callable[[], object]:
        x = torch.randn(batch, sequence, width, dtype=trial.dtype, requires_grad=True)
        return lambda: blocks(x).sum().backward()

    batch, sequence = _size_of_round(through_blocks, trial)
    homes = _Homes(blocks)
    tokens = batch * sequence
    matrices = sum(weight.numel() for weight in blocks.parameters() if weight.dim() > 1)
    flops = 6.0 * tokens * matrices + number * 3 * 2.0 * tokens * sequence * width
    compute = through_blocks(batch, sequence)
    seconds, busy = _seconds(compute, meet)
    rate, busy = flops / (seconds - homes.seconds), min(busy / count, 1.0)
    cores = Cores(rate, rate, busy, count, homes.bytes_per_s)
    return replace(cores, lost=_lost(compute, seconds, busy, sweep, meet))


def head_rate(trial: Trial, meet: Callable[[], object]) -> float:
    """Measure the rate in the table and the head with the loss, forward and backward; large weights are used in pieces,
    as in the engine."""
    ends = _Ends(trial.rows, trial.width).to(trial.dtype)

    def through_ends(batch: int, sequence: int) -> Callable[[], object]:
        targets = torch.randint(0, sum(trial.rows), (batch, sequence))
        return lambda: ends(targets).backward()

    batch, sequence = _size_of_round(through_ends, trial)
    seconds, _ = _seconds(through_ends(batch, sequence), meet)
    return 6.0 * batch * sequence * trial.width * sum(trial.rows) / seconds


def _lost(
    compute: Callable[[], object], seconds: float, busy: float, sweep: Callable[[], object], meet: Callable[[], object]
) -> float:
    """Share of the cores' work that is lost where sweeps of an update go on beside ``compute``, which alone takes
    ``seconds`` and keeps ``busy`` of them. See [Note: Lost cores] in ``offload.play.simulator``."""
    alone, _ = _seconds(sweep, meet)
    is_over, ends = threading.Event(), [time.perf_counter()]

    def sweeps() -> None:
        while not is_over.is_set():
            sweep()
            ends.append(time.perf_counter())

    beside = threading.Thread(target=sweeps, name="offload-probe")
    beside.start()
    try:
        slower, _ = _seconds(compute, meet, _ROUNDS_BESIDE)
    finally:
        is_over.set()
        beside.join()
    swept = (len(ends) - 1) * alone / (ends[-1] - ends[0])
    return min(max((1 - busy * seconds / slower - swept) / busy, 0.0), _MOST_LOST)


def _size_of_round(work: Callable[[int, int], Callable[[], object]], trial: Trial) -> tuple[int, int]:
    """The batch and the sequence of a round: those of the trial, or as much of them as these cores compute in
    ``_ROUND_SECONDS``. Twice as many tokens are tried until another doubling would take longer."""
    tokens, most_tokens = _LEAST_TOKENS, trial.most_tokens
    while True:
        sequence = min(trial.sequence, tokens)
        batch = max(min(trial.batch, min(tokens, most_tokens) // sequence), 1)
        if tokens >= min(trial.batch * trial.sequence, most_tokens):
            return batch, sequence
        round_ = work(batch, sequence)
        taken = []
        for _ in range(2):  # the first one of a shape also prepares it
            start = time.perf_counter()
            round_()
            taken.append(time.perf_counter() - start)
        if min(taken) > _ROUND_SECONDS / 2:
            return batch, sequence
        tokens *= 2


def _rows(model: Model, dtype: torch.dtype) -> list[int]:
    """Of each piece of the head, or of the part of a large one that is tried."""
    if model.vocabulary > _MOST_ROWS:
        return [_MOST_ROWS]
    shapes = [spec.shape for unit in model.units(dtype) for spec in unit.parameters if spec.piece is not None]
    rows = [shape[0] for shape in shapes if shape[1] == model.width]
    return rows if sum(rows) == model.vocabulary else [model.vocabulary]


class _Homes:
    """Memory in which the gradients of a module rest, and the seconds in which they are put there.

    They are timed where they come, in a backward: compute's threads look for work for a while after each of its parts,
    and are in the way of the kernel's then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._taken: list[float] = []
        """Seconds of each of them, a round after the other."""
        self._homes = {parameter: torch.zeros_like(parameter) for parameter in module.parameters()}
        for parameter in self._homes:
            parameter.register_post_accumulate_grad_hook(self._put)

    @property
    def seconds(self) -> float:
        """Of a round, the median; the first does not count."""
        count = len(self._homes)
        return statistics.median(sum(self._taken[at : at + count]) for at in range(count, len(self._taken), count))

    @property
    def bytes_per_s(self) -> float:
        """Traffic: what is read, and what is written."""
        return 2 * sum(home.nbytes for home in self._homes.values()) / self.seconds

    def _put(self, parameter: Tensor) -> None:
        gradient, home = parameter.grad, self._homes[parameter]  # type: ignore[index]
        assert gradient is not None
        dtype, start = kernel_dtype(home.dtype), time.perf_counter()
        threads = torch.get_num_threads()
        kernels.convert(home.numel(), home.data_ptr(), dtype, gradient.data_ptr(), dtype, threads)
        self._taken.append(time.perf_counter() - start)
        parameter.grad = None


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


class _Ends(nn.Module):
    """The table of tokens and the head of a model, one weight in pieces of so many ``rows``, and the loss."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(nn.Parameter(0.02 * torch.randn(count, width)) for count in rows)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor | None = None
        start = 0
        for piece in self._leaves():
            mine = (tokens >= start) & (tokens < start + len(piece))
            looked_up = F.embedding(torch.where(mine, tokens - start, 0), piece)
            found = looked_up if found is None else torch.where(mine.unsqueeze(-1), looked_up, found)
            start += len(piece)
        assert found is not None
        logits = torch.cat([F.linear(found, piece) for piece in self._leaves()], dim=-1)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def _leaves(self) -> Iterator[nn.Parameter]:
        """Each use has gradients of its own."""
        for piece in self.pieces:
            leaf = nn.Parameter(piece.detach())
            leaf.register_post_accumulate_grad_hook(_let_go)
            yield leaf


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


class _Sweep:
    """A sweep of Adam's kernel on this thread's cores, over a tile that no cache holds."""

    nbytes = 28 * _SWEPT
    """Traffic in memory."""

    def __init__(self) -> None:
        self._data = [torch.full((_SWEPT,), 1e-3) for _ in range(4)]
        self._coefficients = AdamCoef(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)

    def __call__(self) -> None:
        master, grad, first, second = (tensor.data_ptr() for tensor in self._data)
        kernels.update(
            self._coefficients, _SWEPT, grad=grad, grad_dtype=kernels.Dtype.F32, weight=master,
            weight_dtype=kernels.Dtype.F32, moments_dtype=kernels.Dtype.F32, exp_avg=first, exp_avg_sq=second,
        )  # fmt: skip


def _checksum_rate(meet: Callable[[], object]) -> float:
    """Bytes that a core checks in a second of its time."""
    data = torch.ones(16 * _SWEPT, dtype=torch.uint8)  # zeros would be one page of the system's, read again and again
    seconds, busy = _seconds(lambda: checksum.digest(data.data_ptr(), data.nbytes, 0), meet)
    return data.nbytes / (seconds * busy)


def _seconds(work: Callable[[], object], meet: Callable[[], object], num_rounds: int = _ROUNDS) -> tuple[float, float]:
    """The median of a few rounds, after one that does not count, and how many cores this process kept busy."""
    taken, used = [], []
    for _ in range(1 + num_rounds):
        meet()
        start, before = time.perf_counter(), time.process_time()
        work()
        busy = time.process_time() - before
        meet()
        taken.append(time.perf_counter() - start)
        used.append(busy / taken[-1])
    return statistics.median(taken[1:]), statistics.median(used[1:])


def _looked_at(path: Path, backend: str) -> tuple[float, float, float]:
    """Rates of reads, of writes, and q, which says what both reach at once; on a nameless file."""
    backend = available_backends()[0] if backend == "auto" else backend
    nbytes = min(_FILE_BYTES, free_bytes_of([path]) // 4) // _BLOCK_BYTES * _BLOCK_BYTES
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
    mixed = samples["mixed"]
    found = fitted(
        samples["read"].bytes_per_s, samples["write"].bytes_per_s, mixed.read_bytes, mixed.write_bytes, mixed.seconds
    )
    return found.read, found.write, found.q
