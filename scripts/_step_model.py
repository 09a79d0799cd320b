"""The models of ``bench_step.py``: GPT-2's shapes in plain PyTorch, with a tied head, and a chain of small units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 32_000
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """A model and the batch that it trains on. ``kind`` is "gpt2" or "chain"."""

    kind: str
    layers: int
    width: int
    batch: int
    context: int

    @classmethod
    def parse(cls, size: str, batch: int, context: int) -> Shape:
        """``LAYERSxWIDTH`` is a GPT-2, ``chain:LAYERSxWIDTH`` a chain."""
        *kind, layers_by_width = size.split(":")
        layers, width = (int(part) for part in layers_by_width.split("x"))
        return cls(kind[0] if kind else "gpt2", layers, width, batch, context)

    def model(self) -> nn.Module:
        return GPT2(self) if self.kind == "gpt2" else Chain(self)

    def tokens(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One batch: inputs and targets."""
        drawn = torch.randint(0, VOCABULARY, (self.batch, self.context + 1), generator=generator)
        return drawn[:, :-1], drawn[:, 1:]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Returns the mean cross-entropy of the next token, in fp32. May be built on the ``meta`` device."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Table(VOCABULARY, shape.width)
        self.positions = Table(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Table(nn.Embedding):
    """An embedding that begins as small as GPT-2's: the head shares it."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Chain(nn.Module):
    """As many small units as there are layers: what a step costs here beyond arithmetic is overhead, unit by unit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = Table(256, shape.width)
        self.links = nn.ModuleList(nn.Sequential(nn.Linear(shape.width, shape.width)) for _ in range(shape.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens % 256)
        for link in self.links:
            x = torch.tanh(link(x))
        return (x - self.table(targets % 256)).square().mean()
