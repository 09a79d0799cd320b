"""Architecture of a decoder as the fields of a Hugging Face ``config.json`` say it: shapes, without any library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Ranks and widths of attention whose keys and values come from a latent vector (DeepSeek's MLA). ``query_rank`` 0:
    queries are projected at once."""

    query_rank: int
    rank: int
    plain_width: int
    rotary_width: int
    value_width: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts of a layer: ``count`` of ``hidden`` each, of which a token passes ``chosen``; one that all tokens
    pass has ``shared_hidden``. The first ``dense_layers`` of the model have an ordinary MLP."""

    count: int
    chosen: int
    hidden: int
    shared_hidden: int = 0
    dense_layers: int = 0
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of a decoder. ``positions`` are rows of a learned table; ``norms`` those of a layer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    hidden: int
    kv_heads: int
    head_width: int
    tied: bool = False
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norms: int = 2
    norm_of_table: bool = False
    activation: str = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    positions: int = 0
    dropout: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def attention_width(self) -> int:
        """Of all heads of a layer together."""
        return self.heads * self.head_width

    @classmethod
    def of_config(cls, fields: Mapping[str, Any]) -> Architecture | None:
        """Return the architecture of a ``config.json``; None for one that cannot be told from its fields alone."""
        kind = fields.get("model_type")
        if kind not in _TRAITS:
            return None
        given = _Fields(fields)
        if not all(given.number(*names) for names in _NEEDED):
            return None
        width, heads = given.number("hidden_size", "n_embd", "n_embed"), given.number("num_attention_heads", "n_head")
        traits = dict(_TRAITS[kind])
        if kind == "falcon":
            traits |= _of_falcon(fields)
        if fields.get("attention_bias"):
            traits |= {"qkv_bias": True, "out_bias": kind in ("llama", "gpt_oss")}
        tied = fields.get("tie_word_embeddings")
        return cls(
            layers=given.number("num_hidden_layers", "n_layer"),
            width=width,
            heads=heads,
            vocabulary=given.number("vocab_size"),
            hidden=given.number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * width),
            kv_heads=given.number("num_key_value_heads", "num_kv_heads", default=traits.pop("kv_heads", heads)),
            head_width=given.number("head_dim", default=width // heads),
            tied=traits.pop("tied", False) if tied is None else bool(tied),
            positions=given.number("n_positions", "max_position_embeddings") + 2 * (kind == "opt")
            if kind in ("gpt2", "opt")
            else 0,
            qk_norm=traits.pop("qk_norm", False) or bool(fields.get("use_qk_norm")),
            experts=given.experts(bias=kind == "gpt_oss"),
            latent=given.latent(),
            dropout=float(fields.get("resid_pdrop", traits.pop("dropout", 0.0))),
            **traits,
        )


_NEEDED = (
    ("hidden_size", "n_embd", "n_embed"), ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer"),
    ("vocab_size",),
)  # fmt: skip
"""Fields without which shapes are not known."""

_PLAIN: dict[str, Any] = {
    "norm": "layer", "gated": False, "tied": True, "activation": "gelu", "qkv_bias": True, "out_bias": True,
    "mlp_bias": True,
}  # fmt: skip
"""Of the decoders before Llama."""

_TRAITS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"tied": True, "activation": "gelu_tanh"},
    "gemma2": {"tied": True, "activation": "gelu_tanh", "norms": 4},
    "gemma3_text": {"tied": True, "activation": "gelu_tanh", "norms": 4, "qk_norm": True},
    "gpt_oss": {"qkv_bias": True, "out_bias": True, "sinks": True},
    "glm4_moe": {},
    "deepseek_v3": {},
    "kimi_k2": {},
    "gpt2": {**_PLAIN, "activation": "gelu_new", "dropout": 0.1},
    "opt": {**_PLAIN, "activation": "relu"},
    "bloom": {**_PLAIN, "norm_of_table": True},
    "falcon": _PLAIN,
}
"""Facts of a ``model_type`` that its fields do not say."""


def _of_falcon(fields: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(fields.get("bias", False))
    new = bool(fields.get("new_decoder_architecture", False))
    norms = 2 if new or not fields.get("parallel_attn", True) else 1
    shared = {"kv_heads": 1} if fields.get("multi_query", True) and not new else {}
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "norms": norms, **shared}


class _Fields:
    """Fields under the several names that models have for them."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def number(self, *names: str, default: int = 0) -> int:
        """The first of these that is there and not 0."""
        return next((int(value) for value in map(self._fields.get, names) if value), default)

    def experts(self, *, bias: bool) -> Experts | None:
        count = self.number("n_routed_experts", "num_local_experts", "num_experts")
        if not count:
            return None
        hidden = self.number("moe_intermediate_size", "intermediate_size")
        return Experts(
            count=count,
            chosen=self.number("num_experts_per_tok", default=1),
            hidden=hidden,
            shared_hidden=self.number("n_shared_experts") * hidden,
            dense_layers=self.number("first_k_dense_replace"),
            bias=bias,
        )

    def latent(self) -> Latent | None:
        rank = self.number("kv_lora_rank")
        if not rank:
            return None
        return Latent(
            query_rank=self.number("q_lora_rank"),
            rank=rank,
            plain_width=self.number("qk_nope_head_dim"),
            rotary_width=self.number("qk_rope_head_dim"),
            value_width=self.number("v_head_dim"),
        )
