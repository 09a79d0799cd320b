"""A small model and a few steps of it, for every test of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadEngine


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """An embedding, four blocks, a norm and a head: 1.1 M parameters at width 128."""

    def __init__(self, width: int = 128, num_blocks: int = 4, vocab: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batches(count: int, vocab: int = 256, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (count, 4, 17), generator=generator)
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def as_weight(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the engine holds for an fp32 ``value``: bf16 is rounded to nearest, ties away from zero."""
    if dtype == torch.float32:
        return value.detach()
    bits = value.detach().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def train(engine: OffloadEngine, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a few steps."""
    losses = []
    for tokens, targets in batches(steps):
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def least_budget(model: nn.Module, path: Path, **options: object) -> int:
    """The least host memory that the engine says it needs for ``model``."""
    from offload import BudgetError

    with pytest.raises(BudgetError) as caught:
        OffloadEngine(model, nvme_path=path, host_memory=1, **options)
    return caught.value.needed_bytes
