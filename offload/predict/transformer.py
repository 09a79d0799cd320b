"""Decoder of a described architecture: parameters with the shapes and, but for fused ones, the names that
``transformers`` gives them, and a forward that keeps for backward what theirs keeps.

It is made on the meta device and never computes a number: the forecast counts its parameters, and what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.predict.architecture import Architecture, Experts, Latent


def _gelu_new(x: Tensor) -> Tensor:
    """GPT-2's, as it is written out: it keeps more than one operator would."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": _gelu_new,
    "relu": F.relu,
}


class Transformer(nn.Module):
    """The decoder. ``forward`` takes tokens and returns logits."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.embed_tokens = _table(of.vocabulary, of.width)
        self.embed_positions = _table(of.positions, of.width) if of.positions else None
        self.norm_of_table = _norm(of) if of.norm_of_table else None
        self.layers = nn.ModuleList(Layer(of, index) for index in range(of.layers))
        self.norm = _norm(of)
        self.lm_head = nn.Linear(of.width, of.vocabulary, bias=False)
        if of.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def _table(rows: int, width: int) -> nn.Embedding:
    """Without its initialiser, for which torch brings in its compiler on the meta device: that takes a second."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return table


class Layer(nn.Module):
    """A block: attention, then an MLP or experts, each around a norm; with four norms after them, too."""

    def __init__(self, of: Architecture, index: int) -> None:
        super().__init__()
        routed = of.experts is not None and index >= of.experts.dense_layers
        self.self_attn = _Attention(of) if of.latent is None else _LatentAttention(of, of.latent)
        self.mlp = _Routed(of, of.experts) if routed and of.experts is not None else _Mlp(of, of.hidden)
        self.norms = nn.ModuleList(_norm(of) for _ in range(of.norms))
        self._dropout = of.dropout

    def forward(self, x: Tensor) -> Tensor:
        if len(self.norms) == 1:  # attention and MLP have one input
            found = self.norms[0](x)
            sum_: Tensor = x + self._dropped(self.self_attn(found)) + self._dropped(self.mlp(found))
            return sum_
        after = list(self.norms[2:]) or [nn.Identity(), nn.Identity()]
        x = x + self._dropped(after[0](self.self_attn(self.norms[0](x))))
        x = x + self._dropped(after[1](self.mlp(self.norms[1](x))))
        return x

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self._dropout) if self._dropout else x


class _RmsNorm(nn.Module):
    """As ``transformers`` computes it: in fp32, of which autograd keeps the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        out: Tensor = self.weight * wide.to(x.dtype)
        return out


def _norm(of: Architecture, width: int = 0) -> nn.Module:
    return _RmsNorm(width or of.width) if of.norm == "rms" else nn.LayerNorm(width or of.width)


def _rotated(x: Tensor) -> Tensor:
    """With rotary positions: another tensor, for which nothing large is kept."""
    angles = torch.empty(x.shape[-2:], dtype=x.dtype, device=x.device)
    return x * angles


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Heads side by side again. All are (batch, heads, tokens, width of a head)."""
    grouped = query.shape[1] != key.shape[1]
    mixed: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(2)


class _Attention(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self._head_width = of.head_width
        of_keys = of.kv_heads * of.head_width
        self.q_proj = nn.Linear(of.width, of.attention_width, bias=of.qkv_bias)
        self.k_proj = nn.Linear(of.width, of_keys, bias=of.qkv_bias)
        self.v_proj = nn.Linear(of.width, of_keys, bias=of.qkv_bias)
        self.o_proj = nn.Linear(of.attention_width, of.width, bias=of.out_bias)
        self.q_norm = _norm(of, of.head_width) if of.qk_norm else nn.Identity()
        self.k_norm = _norm(of, of.head_width) if of.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(of.heads)) if of.sinks else None
        self._turned = of.norm == "rms"

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        query, key = self.q_norm(query), self.k_norm(key)
        if self._turned:
            query, key = _rotated(query), _rotated(key)
        out: Tensor = self.o_proj(_attended(query, key, value))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self._head_width))
        return heads.transpose(1, 2)


class _LatentAttention(nn.Module):
    def __init__(self, of: Architecture, latent: Latent) -> None:
        super().__init__()
        self._latent, self._heads = latent, of.heads
        head_width = latent.plain_width + latent.rotary_width
        if latent.query_rank:
            self.q_a_proj = nn.Linear(of.width, latent.query_rank, bias=False)
            self.q_a_layernorm = _RmsNorm(latent.query_rank)
        self.q_b_proj = nn.Linear(latent.query_rank or of.width, of.heads * head_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(of.width, latent.rank + latent.rotary_width, bias=False)
        self.kv_a_layernorm = _RmsNorm(latent.rank)
        of_each = of.heads * (latent.plain_width + latent.value_width)
        self.kv_b_proj = nn.Linear(latent.rank, of_each, bias=False)
        self.o_proj = nn.Linear(of.heads * latent.value_width, of.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latent = self._latent
        low = self.q_a_layernorm(self.q_a_proj(x)) if latent.query_rank else x
        query = self.q_b_proj(low).unflatten(-1, (self._heads, -1)).transpose(1, 2)
        plain, turned = query.split([latent.plain_width, latent.rotary_width], dim=-1)
        query = torch.cat([plain, _rotated(turned)], dim=-1)
        low, turned = self.kv_a_proj_with_mqa(x).split([latent.rank, latent.rotary_width], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(low)).unflatten(-1, (self._heads, -1)).transpose(1, 2)
        plain, value = both.split([latent.plain_width, latent.value_width], dim=-1)
        turned = _rotated(turned).unsqueeze(1).expand(-1, self._heads, -1, -1)
        out: Tensor = self.o_proj(_attended(query, torch.cat([plain, turned], dim=-1), value))
        return out


class _Mlp(nn.Module):
    def __init__(self, of: Architecture, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(of.width, hidden, bias=of.mlp_bias) if of.gated else None
        self.up_proj = nn.Linear(of.width, hidden, bias=of.mlp_bias)
        self.down_proj = nn.Linear(hidden, of.width, bias=of.mlp_bias)
        self._act = _ACTIVATIONS[of.activation]

    def forward(self, x: Tensor) -> Tensor:
        inner = self._act(self.up_proj(x)) if self.gate_proj is None else self._act(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner)
        return out


class _Routed(nn.Module):
    """Experts, the router that chooses among them, and one that all tokens pass."""

    def __init__(self, of: Architecture, experts: Experts) -> None:
        super().__init__()
        self.gate = nn.Linear(of.width, experts.count, bias=experts.bias)
        self.experts = _Experts(of, experts)
        self.shared_experts = _Mlp(of, experts.shared_hidden) if experts.shared_hidden else None
        self._chosen = experts.chosen

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, _ = F.softmax(self.gate(flat), dim=-1).topk(self._chosen, dim=-1)
        out: Tensor = self.experts(flat, weights).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class _Experts(nn.Module):
    """Weights of all experts in one parameter each. All tokens go through the first one: the shapes are the same."""

    def __init__(self, of: Architecture, experts: Experts) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts.count, 2 * experts.hidden, of.width))
        self.down_proj = nn.Parameter(torch.empty(experts.count, of.width, experts.hidden))
        if experts.bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts.count, 2 * experts.hidden))
            self.down_proj_bias = nn.Parameter(torch.empty(experts.count, of.width))
        self._act = _ACTIVATIONS[of.activation]

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        chosen = weights.shape[-1]
        rows = x.repeat_interleave(chosen, dim=0)
        gate, up = F.linear(rows, self.gate_up_proj[0]).chunk(2, dim=-1)
        out = F.linear(self._act(gate) * up, self.down_proj[0]) * weights.reshape(-1, 1)
        return out.view(-1, chosen, x.shape[-1]).sum(1)
