"""One rank of ``scale_check.py``: looks at what the ranks of this machine do at once, then takes steps with them."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _step_model import VOCABULARY, Shape
from torch import Tensor, distributed

from offload import OffloadEngine
from offload.predict.machine import Cores, Machine
from offload.predict.model import Model
from offload.predict.network import Network
from offload.predict.prediction import least_host_bytes
from offload.predict.probe import drive_rates, probe
from offload.predict.workload import Workload
from offload.predict.works import compute_seconds
from offload.report.report import Bandwidths

CONTEXT = 128
STATE_BYTES = 16
"""Of a parameter in fp32: weight, gradient and two moments."""
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_ROUNDS = 5
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

    @property
    def ranks_a_core(self) -> float:
        """How many take turns on a core."""
        return max(self.ranks / _num_cores(), 1.0)


def work(rank: int, case: Case, folder: str, meeting: str, warm_up: int, steps: int, answer: Any) -> None:
    """Look at the machine and take the steps. Rank 0 puts the machine and the seconds of each step into ``answer``."""
    torch.set_num_threads(case.num_threads)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.ranks)
    try:
        machine = _machine(rank, case, Path(folder))
        seconds, memory = _steps(rank, case, machine, folder, warm_up, steps)
        if rank == 0:
            answer.put((machine, seconds, memory))
    finally:
        distributed.destroy_process_group()


def _machine(rank: int, case: Case, folder: Path) -> Machine:
    """One rank's part of this machine while all ranks do the same. The same on all of them."""
    model, workload = case.model(), case.workload
    distributed.barrier()
    probed = probe([], model, workload, host_bytes=0)
    computing = _mean(_plain_seconds(case))
    expected = sum(map(sum, compute_seconds(model, probed, workload, model.units(workload.dtype))))
    as_probed = expected / computing
    at_rest, moving = probed.unit_seconds
    rates: list[Any] = [drive_rates([folder])[0] if rank == 0 else None]
    distributed.broadcast_object_list(rates)
    drive: Bandwidths = rates[0]
    machine = replace(
        probed,
        cores=Cores(_mean(probed.cores.blocks * as_probed), _mean(probed.cores.head * as_probed)),
        update=_mean(probed.update),
        checksum=_mean(probed.checksum),
        unit_seconds=(at_rest * case.ranks_a_core, moving * case.ranks_a_core),
        nvme=Bandwidths(drive.read / case.ranks, drive.write / case.ranks, drive.q),
        nvme_bytes=1 << 40,
        network=_network(case, model) if case.ranks > 1 else None,
    )
    state_bytes = STATE_BYTES * model.num_parameters
    budget = 3 * state_bytes if case.budget == "all" else least_host_bytes(model, machine, workload)
    return replace(machine, host_bytes=budget)


def _plain_seconds(case: Case) -> float:
    """Forward and backward of the model in plain PyTorch, while all ranks do the same."""
    torch.manual_seed(0)
    module, (tokens, targets) = case.shape.model(), case.shape.tokens(torch.Generator().manual_seed(0))

    def once() -> None:
        module.zero_grad(set_to_none=True)
        module(tokens, targets).backward()

    return _seconds(once)


def _network(case: Case, model: Model) -> Network:
    """What the two collectives of a unit of middling size take, and a turn of a few bytes while all ranks compute."""
    sizes = sorted(unit.trainable_numel for unit in model.units(torch.float32, case.ranks))
    whole, numel = torch.zeros(sizes[len(sizes) // 2]), sizes[len(sizes) // 2] // case.ranks
    received, own, landing = torch.zeros_like(whole), torch.zeros(numel), torch.zeros_like(whole)

    def gather() -> None:
        _all_gather(received, own)

    def exchange() -> None:
        distributed.all_to_all_single(landing, whole)
        total = torch.zeros(numel)
        for part in landing.view(case.ranks, -1):
            total.add_(part)
        total.div_(case.ranks)

    passed = whole.nbytes * (case.ranks - 1) / case.ranks
    busy = time.process_time()
    seconds = [_mean(_seconds(collective)) for collective in (gather, exchange)]
    busy = (time.process_time() - busy) / (2 * (_ROUNDS + 1)) / passed
    return Network(
        num_ranks=case.ranks,
        ranks_a_node=case.ranks,
        gather=passed / seconds[0],
        exchange=passed / seconds[1],
        between=math.inf,
        wait_seconds=_mean(_turn_seconds()),
        core_seconds=_mean(busy) * case.ranks_a_core,
    )


def _turn_seconds() -> float:
    """A few bytes of each rank to all others, while a thread of each computes."""
    over = threading.Event()
    square = torch.randn(512, 512)

    def compute() -> None:
        while not over.is_set():
            square @ square

    own, all_of_them = torch.zeros(8), torch.zeros(8 * distributed.get_world_size())
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        taken = []
        for _ in range(_TURNS):
            start = time.perf_counter()
            _all_gather(all_of_them, own)
            taken.append(time.perf_counter() - start)
    finally:
        over.set()
        thread.join()
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


def _seconds(work: Callable[[], object]) -> float:
    """The median of a few rounds, each of which all ranks begin together, after one that does not count."""
    taken = []
    for _ in range(1 + _ROUNDS):
        distributed.barrier()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _mean(value: float) -> float:
    """Of all ranks."""
    total: Tensor = torch.tensor([value], dtype=torch.float64)
    distributed.all_reduce(total)
    return total.item() / distributed.get_world_size()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
