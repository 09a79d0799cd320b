"""One rank of ``scale_check.py``: looks at what the ranks of this machine do at once, then takes steps with them."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _step_model import VOCABULARY, Shape
from torch import Tensor, distributed

from offload import OffloadEngine
from offload.memory import trim_heap
from offload.predict.machine import Cores, Machine
from offload.predict.model import Model
from offload.predict.network import ALONE, Network
from offload.predict.overhead import record_seconds, unit_seconds
from offload.predict.prediction import least_host_bytes
from offload.predict.probe import drive_rates, probe
from offload.predict.workload import Workload
from offload.report.report import Bandwidths

CONTEXT = 128
STATE_BYTES = 16
"""Of a parameter in fp32: weight, gradient and two moments."""
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_ROUNDS = 3
_TURNS = 100
"""Small messages of which the median is taken."""


@dataclass(frozen=True)
class Case:
    """A run. ``budget`` is "all" or "least", ``shard`` an option of the engine."""

    ranks: int
    size: str
    batch: int
    budget: str
    shard: str

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks, {self.size}, batch {self.batch}, {self.budget}, {self.shard}"

    @property
    def shape(self) -> Shape:
        return Shape.parse(self.size, self.batch, CONTEXT)

    @property
    def workload(self) -> Workload:
        return Workload(batch=self.batch, sequence=CONTEXT, precision="fp32", shard=self.shard)  # type: ignore[arg-type]

    def model(self) -> Model:
        """Without memory."""
        shape = self.shape
        with torch.device("meta"):
            module = shape.model()
        return Model(self.size, module, shape.layers, shape.width, shape.width, VOCABULARY)

    @property
    def num_threads(self) -> int:
        """Of each rank: the cores are divided."""
        return max(_num_cores() // self.ranks, 1)


def work(rank: int, case: Case, folder: str, meeting: str, warm_up: int, steps: int, answer: Any) -> None:
    """Look at the machine and take the steps. Rank 0 puts the machine and the seconds of each step into ``answer``."""
    torch.set_num_threads(case.num_threads)
    of_record = record_seconds(Path(folder)) if rank == 0 else None  # before the ranks meet: an engine of one process
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.ranks)
    try:
        machine = _machine(case, Path(folder), of_record)
        seconds, memory = _steps(rank, case, machine, folder, warm_up, steps)
        if rank == 0:
            answer.put((machine, seconds, memory))
    finally:
        distributed.destroy_process_group()


def _machine(case: Case, folder: Path, of_record: float | None) -> Machine:
    """One rank's part of this machine while all ranks do the same. The same on all of them. The first rank alone knows
    ``record_seconds``."""
    model, workload = case.model(), case.workload
    probed = probe([], model, workload, host_bytes=0, ranks=case.ranks, meet=distributed.barrier)
    of_first: list[Any] = [None, None] if of_record is None else [of_record, drive_rates([folder])[0]]
    distributed.broadcast_object_list(of_first)
    of_record, drive = of_first
    assert of_record is not None and drive is not None
    machine = replace(
        probed,
        cores=Cores(
            _mean(probed.cores.blocks),
            _mean(probed.cores.head),
            _mean(probed.cores.busy),
            probed.cores.count,
            _mean(probed.cores.gradients),
        ),
        update=_mean(probed.update),
        checksum=_mean(probed.checksum),
        unit_seconds=_mean(unit_seconds()),
        record_seconds=of_record,
        nvme=Bandwidths(drive.read / case.ranks, drive.write / case.ranks, drive.q),
        nvme_bytes=1 << 40,
        network=_network(case, model) if case.ranks > 1 else ALONE,
    )
    state_bytes = STATE_BYTES * model.num_parameters
    budget = 3 * state_bytes if case.budget == "all" else least_host_bytes(model, machine, workload)
    return replace(machine, host_bytes=budget)


def _network(case: Case, model: Model) -> Network:
    """What the two collectives of the units take, and a turn of a few bytes while all ranks compute."""
    sizes = [unit.trainable_numel for unit in model.units(torch.float32, case.ranks)]
    whole, landing = torch.ones(max(sizes)), torch.ones(max(sizes))

    def gather(numel: int) -> None:
        _all_gather(landing[:numel], whole[: numel // case.ranks])

    def exchange(numel: int) -> None:
        distributed.all_to_all_single(landing[:numel], whole[:numel])
        total = torch.zeros(numel // case.ranks)
        for part in landing[:numel].view(case.ranks, -1):
            total.add_(part)
        total.div_(case.ranks)

    passed = 4 * sum(sizes) * (case.ranks - 1) / case.ranks
    gathering, exchanging = _collectives(gather, sizes), _collectives(exchange, sizes)
    with _computing() as computed:
        gathering_cores = _collectives(gather, sizes, computed)
        exchanging_cores = _collectives(exchange, sizes, computed)
        wait_seconds = _mean(_turn_seconds())
    return Network(
        num_ranks=case.ranks,
        ranks_a_node=case.ranks,
        gather=passed / gathering.seconds,
        exchange=passed / exchanging.seconds,
        between=math.inf,
        wait_seconds=wait_seconds,
        gather_cores=gathering_cores.of_cores / passed,
        exchange_cores=exchanging_cores.of_cores / passed,
    )


@dataclass(frozen=True)
class _Taken:
    """What one collective of each unit takes: seconds, and seconds of cores."""

    seconds: float
    of_cores: float


def _collectives(
    work: Callable[[int], None], sizes: Sequence[int], beside: Callable[[], float] = lambda: 0.0
) -> _Taken:
    """Medians of a few rounds, after one that does not count, by a thread of its own as in the engine. ``beside`` are
    seconds of cores that something else has taken so far. gloo gathers into memory of its own, which the C library may
    give back each time: it comes from the system anew here."""
    seconds, of_cores = [], []

    def rounds() -> None:
        for _ in range(1 + _ROUNDS):
            taken = used = 0.0
            for numel in sizes:
                trim_heap()
                distributed.barrier()
                start, before = time.perf_counter(), time.process_time() - beside()
                work(numel)
                taken += time.perf_counter() - start
                used += time.process_time() - beside() - before
            seconds.append(taken)
            of_cores.append(used)

    thread = threading.Thread(target=rounds)
    thread.start()
    thread.join()
    return _Taken(_mean(statistics.median(seconds[1:])), _mean(statistics.median(of_cores[1:])))


@contextlib.contextmanager
def _computing() -> Iterator[Callable[[], float]]:
    """Meanwhile a thread of this rank computes; how many seconds of a core it has taken."""
    over = threading.Event()
    matrices = [torch.randn(128, 512), *(torch.randn(512, 512) for _ in range(48))]

    def compute() -> None:
        torch.set_num_threads(1)
        while not over.is_set():
            for matrix in matrices[1:]:
                matrices[0] @ matrix

    thread = threading.Thread(target=compute)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    try:
        yield lambda: time.clock_gettime(clock)
    finally:
        over.set()
        thread.join()


def _turn_seconds() -> float:
    """A few bytes of each rank to all others."""
    own, all_of_them = torch.zeros(8), torch.zeros(8 * distributed.get_world_size())
    taken = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        _all_gather(all_of_them, own)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _steps(
    rank: int, case: Case, machine: Machine, folder: str, warm_up: int, steps: int
) -> tuple[list[float], dict[str, dict[str, int]]]:
    """Seconds of each step, and what the engine's plan has in each tier."""
    with torch.device("meta"):
        module = case.shape.model()
    generator = torch.Generator().manual_seed(rank)
    options: dict[str, Any] = {"host_memory": machine.host_bytes * case.ranks, "shard": case.shard}
    with (
        tempfile.TemporaryDirectory(prefix="scale-check-", dir=folder) as own,
        OffloadEngine(module, precision="fp32", nvme_path=own, **options) as engine,
    ):
        seconds = []
        for _ in range(warm_up + steps):
            tokens, targets = case.shape.tokens(generator)
            distributed.barrier()
            start = time.perf_counter()
            engine.backward(engine(tokens, targets))
            engine.step()
            seconds.append(time.perf_counter() - start)
        return seconds[warm_up:], engine.plan.memory


def _mean(value: float) -> float:
    """Of all ranks."""
    total: Tensor = torch.tensor([value], dtype=torch.float64)
    distributed.all_reduce(total)
    return total.item() / distributed.get_world_size()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
