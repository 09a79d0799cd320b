"""Tiny mixtures of experts, fused as ``transformers`` has them and as modules of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCAB = 100
_SMALL = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": VOCAB, "pad_token_id": 0},
}
_OF_DEEPSEEK = {
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 8},
    **{"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 48},
}
_OF_GPT_OSS = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**_SMALL, intermediate_size=96, num_local_experts=8),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SMALL, head_dim=16, intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**_SMALL, **_OF_DEEPSEEK}),
    "gpt_oss": lambda: transformers.GptOssConfig(**_SMALL, **_OF_GPT_OSS, intermediate_size=96),
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SMALL, head_dim=16, intermediate_size=96, intermediate_size_mlp=96, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=1,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_SMALL, head_dim=16, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


def built(config: Any) -> Any:
    """The model with random weights, computing its experts one after the other."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    return model


def text(batch: int = 2, length: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


class OfModules(nn.Module):
    """A router, and experts that are modules: a token passes the best one."""

    def __init__(self, num_experts: int = 8, width: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(self.norm(x)).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mine = chosen == index
            out[mine] = self.experts[index](x[mine]) * weights[mine].unsqueeze(-1)
        return x + out


def of_modules(num_layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(OfModules() for _ in range(num_layers)))
