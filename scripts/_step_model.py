"""The models of ``bench_step.py`` in plain PyTorch: shapes of GPT-2 and Llama, and a chain of small units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32_000
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """A model and the batch that it trains on. ``kind`` is a key of ``MODELS``.

    ``checkpointing`` keeps only the inputs of blocks for backward, and computes the rest once more.
    """

    kind: str
    layers: int
    width: int
    batch: int
    context: int
    checkpointing: bool = False

    @classmethod
    def parse(cls, size: str, batch: int, context: int, checkpointing: bool = False) -> Shape:
        """``LAYERSxWIDTH`` is a GPT-2, ``llama:LAYERSxWIDTH`` a Llama, ``chain:LAYERSxWIDTH`` a chain."""
        *kind, layers_by_width = size.split(":")
        layers, width = (int(part) for part in layers_by_width.split("x"))
        return cls(kind[0] if kind else "gpt2", layers, width, batch, context, checkpointing)

    def model(self) -> nn.Module:
        return MODELS[self.kind](self)

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


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class LlamaBlock(nn.Module):
    """Rotary attention without biases, and a gated MLP of 8/3 the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-8 * width // 3 // 256) * 256
        self.norm_attention = RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotated(heads: Tensor) -> Tensor:
    """Each pair of elements turned by an angle that grows with the position."""
    half = heads.shape[-1] // 2
    rates = 10_000 ** -(torch.arange(half, device=heads.device) / half)
    angles = torch.arange(heads.shape[-2], device=heads.device)[:, None] * rates
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Llama(nn.Module):
    """Returns the mean cross-entropy of the next token, in fp32. May be built on the ``meta`` device."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Table(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape.width) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._checkpointing = shape.checkpointing

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = _through(self.blocks, self.tokens(tokens), self._checkpointing)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def _through(blocks: nn.ModuleList, x: Tensor, checkpointing: bool) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
    return x


class GPT2(nn.Module):
    """Returns the mean cross-entropy of the next token, in fp32. May be built on the ``meta`` device."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._checkpointing = shape.checkpointing
        self.tokens = Table(VOCABULARY, shape.width)
        self.positions = Table(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = _through(self.blocks, x, self._checkpointing)
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


MODELS: dict[str, Callable[[Shape], nn.Module]] = {"gpt2": GPT2, "llama": Llama, "chain": Chain}
