"""What ``interrupts.py`` trains: a small model, and where its state rests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import BudgetError, OffloadEngine
from offload.testing.simulated import SimulatedDevice

DEVICE_UPDATES = 1e15
"""Bytes per second of a link over which it is worth while to update on the device what rests on the host."""

WIDTH, VOCABULARY, BATCH = 16, 32, 4


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks: the second one is called twice, the last two are recomputed in backward. ``gain`` is a unit around those
    of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (24, 40, 24, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, twice, recomputed, reentrant = self.blocks
        x = twice(twice(first(x * self.gain)))
        x = checkpoint(recomputed, x, use_reentrant=False)
        return checkpoint(reentrant, x, use_reentrant=True)


class Model(nn.Module):
    """Units within units. The embedding is frozen, and a part of one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.stack = Stack()
        self.stack.blocks[0].up.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.stack(self.first(self.embed(tokens))))


@dataclass(frozen=True)
class Variant:
    """Where the model's state rests, and how it is trained.

    ``least_host``: host memory is the least that works. ``on_device``: a simulated device computes, with this multiple
    of the least memory. ``loop``: "engine" for ``engine.backward`` and ``engine.step``, "own" for PyTorch's.
    ``clip``: the loop calls ``clip_grad_norm_``.
    """

    least_host: bool = False
    on_device: float | None = None
    num_ranks: int = 1
    loop: str = "engine"
    clip: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def settings(self, folder: Path) -> dict[str, Any]:
        """The engine's options. All ranks call this together."""
        found = {"precision": "fp32", "lr": 1e-2, "tile_bytes": 65536, "nvme_path": folder, **self.options}
        if self.num_ranks > 1:
            found["rank_timeout"] = 5.0
        if self.on_device is not None:
            found["device_memory"] = int(least("device_memory", self.with_device(found)) * self.on_device)
        if self.least_host:
            found["host_memory"] = least("host_memory", self.with_device(found))
        return found

    @property
    def once(self) -> bool:
        """One run takes one interrupt: gradients that were sent to other ranks end it, and a durable run hands the
        second Ctrl-C, if it comes soon, to the system."""
        return self.num_ranks > 1 or "durable" in self.options

    def with_device(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The same, with a new device, if one computes."""
        if self.on_device is None:
            return settings
        return {**settings, "device": SimulatedDevice(seed=1, link_speed=DEVICE_UPDATES)}


BF16 = {"precision": "bf16"}
CLIPPED = {"gradient_clipping": 0.1}
VARIANTS = {
    "ram": Variant(),
    "ram, own loop": Variant(loop="own", clip=True, options=BF16),
    "nvme": Variant(least_host=True),
    "nvme, own loop": Variant(least_host=True, loop="own", clip=True, options=BF16),
    "nvme, clipped": Variant(least_host=True, options={**CLIPPED, "gradient_accumulation_steps": 2}),
    "nvme, durable": Variant(least_host=True, loop="own", options={"durable": 1}),
    "device": Variant(on_device=1),
    "device, nvme": Variant(on_device=1, least_host=True, loop="own", clip=True, options=BF16),
    "device, resident": Variant(on_device=2, loop="own"),
    "device, resident, nvme": Variant(on_device=2, least_host=True, options={**BF16, **CLIPPED}),
    "ranks": Variant(num_ranks=2, options={"shard": "weights"}),
    "ranks, own loop": Variant(num_ranks=2, loop="own", clip=True, options={"shard": "states"}),
    "ranks, nvme": Variant(num_ranks=2, least_host=True, options={**BF16, **CLIPPED, "shard": "weights"}),
    "ranks, device": Variant(num_ranks=2, on_device=1.5, options={"shard": "weights"}),
}


def least(option: str, settings: dict[str, Any]) -> int:
    """The least that works, as the engine says."""
    try:
        OffloadEngine(Model(), **{**settings, option: 1}).close()
    except BudgetError as error:
        return error.needed_bytes
    raise AssertionError(f"{option}=1 is enough")


def batch(step: int, micro: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, VOCABULARY, (BATCH, 7), generator=generator)[rank::num_ranks]
    return tokens[:, :-1], tokens[:, 1:]


def take_step(engine: OffloadEngine, variant: Variant, rank: int, losses: dict[int, list[float]]) -> None:
    """One step of the user's loop. ``losses`` gets those of its micro-batches."""
    step = engine.global_step
    optimizer = engine.optimizer
    assert optimizer is not None
    if variant.loop == "own":
        optimizer.zero_grad()
    losses[step] = []
    for micro in range(engine.config.gradient_accumulation_steps):
        tokens, targets = batch(step, micro, rank, variant.num_ranks)
        logits = engine(tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        losses[step].append(loss.item())
        engine.backward(loss) if variant.loop == "engine" else loss.backward()
    if variant.clip:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    engine.step() if variant.loop == "engine" else optimizer.step()
