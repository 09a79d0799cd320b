"""Training programs that any number of ranks runs, and what is left of each: losses, weights, states.

A program's global batch has ``ROWS`` rows, of which each rank feeds an equal part. So a program of one rank, of two and
of four ranks trains on the same data.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from device_schedules import watched

from offload import BudgetError, OffloadEngine
from offload.testing.simulated import SimulatedDevice

ROWS = 4
WIDTH = 31
VOCABULARY = 53
DEVICE_UPDATES = 1e15
"""Bytes per second of a link over which it is worth while to update on the device what rests on the host."""

LARGE_VOCABULARY = 17_011
"""Embedding and head of so many rows are cut into pieces."""


class Block(nn.Module):
    def __init__(self, hidden: int, recompute: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self._body(x)
        return checkpoint(self._body, x, use_reentrant=self.recompute == "reentrant")

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes are primes. It owns ``gain`` itself; ``path`` says in which order it uses its blocks."""

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (59, 113, 61),
        large: bool = False,
        tied: bool = False,
        frozen: Sequence[int] = (),
        recompute: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        vocabulary = LARGE_VOCABULARY if large else VOCABULARY
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(size, recompute) for size in hidden)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, path: Sequence[int] | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for index in range(len(self.blocks)) if path is None else path:
            x = self.blocks[index](x)
        return self.head(x * self.gain)


def batch(step: int, micro: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a global batch: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, VOCABULARY, (ROWS, 9), generator=generator)
    own = tokens[rank * ROWS // size : (rank + 1) * ROWS // size]
    return own[:, :-1], own[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten().to(logits.device))


@dataclass(frozen=True)
class Placement:
    """How shards rest: ``shard=`` of the engine, host memory as a multiple of the least budget (None is plenty), and
    what moves bytes to NVMe. ``on_device``: a simulated device computes, or a ``gpu``, with that multiple of the least
    memory."""

    shard: str = "weights"
    budget: float | None = None
    backend: str = "auto"
    on_device: float | None = None
    gpu: bool = False
    seed: int = 0
    """Of the simulated device."""

    def __str__(self) -> str:
        below = f"{self.shard}, RAM" if self.budget is None else f"{self.shard}, NVMe by {self.backend}"
        return below if self.on_device is None else f"{below}, {self.on_device} on a {'GPU' if self.gpu else 'device'}"


STATES, GRADIENTS, WEIGHTS = Placement("states"), Placement("gradients"), Placement("weights")
ON_NVME = Placement("weights", 1.0, "io_uring")
BY_THREADS = Placement("weights", 1.0, "threads")
ON_DEVICE = Placement("weights", on_device=1)
RESIDENT = Placement("weights", on_device=1.7)
BELOW_DEVICE = Placement("gradients", 1.0, on_device=1)
STATES_ON_DEVICE = Placement("states", on_device=20)
DEVICE_PLACEMENTS = (ON_DEVICE, RESIDENT, BELOW_DEVICE, STATES_ON_DEVICE)
PLACEMENTS = (STATES, GRADIENTS, WEIGHTS, ON_NVME, BY_THREADS)


_BETWEEN = ("evaluate", "read", "state dict", "write")


@dataclass(frozen=True)
class Program:
    """What is trained, and how. ``paths``: by rank, in turns, the order in which a rank uses the blocks."""

    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    loop: str = "engine"
    """"engine": ``backward`` and ``step``; "together": the same, by ``together``; "held": all but the last
    micro-batch within ``no_sync``; "plain": ``loss.backward()`` and
    ``engine.optimizer``."""
    steps: int = 2
    clip: float | None = None
    """For ``torch.nn.utils.clip_grad_norm_`` before each step."""
    paths: Sequence[Sequence[int] | None] = (None,)
    planted: tuple[int, int, float] | None = None
    """The loss of this rank in this step is multiplied by so much."""
    actions: Sequence[tuple[int, str, int]] = ()
    """What happens between steps: the step before it, what, and which rank does it, or which block is meant."""

    def make(self, folder: Path, **options: Any) -> OffloadEngine:
        settings = {"lr": 1e-2, "precision": "fp32", "tile_bytes": 65536, **self.options, **options}
        return OffloadEngine(Model(**self.model), nvme_path=folder, **settings)

    def placed(self, placement: Placement, folder: Path) -> OffloadEngine:
        """An engine whose shards rest so; on NVMe at the least budget, as the engine says."""
        settings: dict[str, Any] = {"shard": placement.shard, "io_backend": placement.backend}
        if placement.on_device is not None:
            simulated = SimulatedDevice(placement.seed, link_speed=DEVICE_UPDATES)
            settings["device"] = "cuda" if placement.gpu else simulated
            least = least_of(lambda: self.make(folder, **settings, device_memory=1))
            settings["device_memory"] = int(least * placement.on_device)
        if placement.budget is not None:
            least = least_of(lambda: self.make(folder, **settings, host_memory=1))
            settings["host_memory"] = int(least * placement.budget)
        return self.make(folder, **settings)

    def train(self, engine: OffloadEngine, rank: int, size: int) -> Iterator[dict[str, Any]]:
        """What each step shows; afterwards the engine has taken all of them."""
        for step in range(self.steps):
            if self.loop == "plain":
                engine.optimizer.zero_grad()

            def run(micro: int, step: int = step) -> float:
                tokens, targets = batch(step, micro, rank, size)
                loss = loss_of(engine(tokens, self.paths[rank % len(self.paths)]), targets)
                value = loss.item()
                if self.planted is not None and self.planted[:2] == (rank, step):
                    loss = loss * self.planted[2]
                if self.loop == "plain":
                    (loss / engine.config.gradient_accumulation_steps).backward()
                else:
                    follow = micro + 1 < engine.config.gradient_accumulation_steps
                    with engine.no_sync() if self.loop == "held" and follow else contextlib.nullcontext():
                        engine.backward(loss)
                return value

            micro_batches = range(engine.config.gradient_accumulation_steps)
            losses = (
                engine.together(micro_batches, run)
                if self.loop == "together"
                else [run(each) for each in micro_batches]
            )
            seen: dict[str, Any] = {"losses": losses}
            if self.clip is not None:
                seen["clipped"] = float(nn.utils.clip_grad_norm_(engine.module.parameters(), self.clip))
            seen["before"] = [self._act(engine, what, number, rank) for what, number in self._due(step, "gradient")]
            engine.optimizer.step() if self.loop == "plain" else engine.step()
            seen["norm"] = None if engine.global_step == 0 else engine.report().grad_norm
            seen["step"] = engine.global_step
            seen["after"] = [self._act(engine, what, number, rank) for what, number in self._due(step, *_BETWEEN)]
            yield seen

    def _due(self, step: int, *kinds: str) -> Iterator[tuple[str, int]]:
        return ((what, number) for at, what, number in self.actions if at == step and what in kinds)

    def _act(self, engine: OffloadEngine, what: str, number: int, rank: int) -> Any:
        """Do it; what was seen."""
        alone = what in ("evaluate", "read", "state dict")
        if alone and number != rank:
            return None
        block = engine.module.blocks[number % len(engine.module.blocks)]
        with torch.no_grad():
            if what == "evaluate":
                tokens, _ = batch(-1, 0, 0, 1)
                return [engine(tokens).float().sum().item() for _ in range(2)]
            if what == "read":
                return bits(block.up.weight.detach().clone())
            if what == "state dict":
                return bits(engine.state_dict())
            if what == "gradient":  # of all ranks, which read it together
                gradient = engine.module.embed.weight.grad
                return None if gradient is None else bits(gradient.detach().clone())
            block.down.weight.mul_(0.5)
            return None


def run(
    rank: int, size: int, program: Program, placement: Placement, folder: Path, *, states: bool = False
) -> dict[str, Any]:
    """Train; what every step has shown, the weights, and the optimizer's ``states``, if they are wanted."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(program.placed(placement, folder))
        device = engine.config.device
        if isinstance(device, SimulatedDevice):
            stack.enter_context(watched(device, engine))
        seen = list(program.train(engine, rank, size))
        of_optimizer = engine.optimizer.state_dict()["state"] if states else {}
        found = {"seen": seen, "weights": weights_of(engine), "states": of_optimizer}
    if isinstance(device, SimulatedDevice):
        assert not device.violations, device.violations[0]
        assert device.allocated_bytes == 0
    return found


def bits_of_placements(
    rank: int, size: int, program: Program, placements: Sequence[Placement], folder: Path, *, states: bool = False
) -> dict[str, Any]:
    """What ``run`` gives for the first placement, and of all of them the bits."""
    runs = [run(rank, size, program, placement, folder, states=states) for placement in placements]
    return {**runs[0], "bits": {str(place): bits(found) for place, found in zip(placements, runs, strict=True)}}


def least_of(make: Callable[[], OffloadEngine]) -> int:
    """The host memory that ``make``, which gives too little, says to be enough."""
    try:
        make().close()
    except BudgetError as error:
        return error.needed_bytes
    raise AssertionError("an engine was made with one byte of host memory")


def weights_of(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def bits(value: Any) -> str:
    """A digest that is the same if every bit is; all NaNs are one."""
    digest = hashlib.sha256()
    for part in _flat(value):
        digest.update(part)
    return digest.hexdigest()[:16]


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        found = value.detach().cpu().contiguous().view(-1)
        if found.is_floating_point():
            found = found.masked_fill(found.isnan(), float("nan"))
        yield found.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield str(key).encode()
            yield from _flat(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield repr(value).encode()


def raised(call: Callable[[], Any]) -> str:
    """The error of a call, by its type and message; nothing if there is none."""
    with contextlib.suppress(SystemExit):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
