"""A byte-level GPT in plain PyTorch. It knows nothing of the engine: every module initialises its own parameters in
``reset_parameters``, so the model can be built on the ``meta`` device and filled module by module."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token a byte: no tokenizer, nothing to download."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Shapes: ``(batch, context, width)`` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return out


def _rotate(x: Tensor) -> Tensor:
    """Turn each pair of numbers ``(i, i + half)`` of a head by an angle that grows with the position, so that a query
    and a key meet at an angle that says how far apart they are.

    Shapes: ``(batch, heads, context, even width)`` in and out.
    Source: Su et al., arXiv:2104.09864.
    """
    context, half = x.shape[2], x.shape[3] // 2
    frequencies = 1000.0 ** -torch.linspace(0, 1, half, device=x.device)
    angles = torch.outer(torch.arange(context, device=x.device), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.split(half, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a GELU network four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """Predicts the next byte. ``width`` must be a multiple of ``2 * heads``."""

    def __init__(self, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy in nats (FP32, a scalar) if there are targets, else the logits.

        Shapes: ``tokens`` and ``targets`` are int64 ``(batch, context)``; logits are ``(batch, context, 256)``.
        """
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: bytes,
    *,
    length: int,
    context: int,
    seconds_max: float,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """The prompt continued by up to ``length`` bytes.

    Cost: every byte is one forward pass of the whole model, and under the engine one fetch of every weight; hence
    ``seconds_max``, after which the text ends where it is. All passes have ``context`` tokens, as in training, because
    torch may keep a compiled product of each layer for each length. Attention is causal, so what fills a short text up
    changes nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    deadline = time.monotonic() + seconds_max
    for _ in range(length):
        recent = tokens[:, -context:]
        logits = model(F.pad(recent, (0, context - recent.shape[1])))[:, recent.shape[1] - 1].float().cpu()
        following = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, following), dim=1)
        if time.monotonic() > deadline:
            break
    return bytes(tokens[0].tolist())
