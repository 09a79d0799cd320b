"""Shapes of known models, adapters over them, and what backward keeps of their forward: all without memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from offload import ConfigError
from offload.predict import known
from offload.predict.activations import blocks_of, kept_of
from offload.predict.architecture import Architecture
from offload.predict.model import Model, from_architecture
from offload.predict.transformer import Transformer
from offload.predict.variants import AS_WEIGHTS, BASES, Lora

ENTRIES = json.loads(Path(known.__file__).with_name("known_models.json").read_text())
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "head_dim": 32, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"tie_word_embeddings": True},
    "gemma2": SMALL,
    "gemma3_text": SMALL,
    "phi3": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": SMALL | EXPERTS | {"n_routed_experts": 4, "attention_bias": True},
    "deepseek_v3": SMALL | EXPERTS | LATENT | {"n_routed_experts": 8, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 64, "resid_pdrop": 0.0,
             "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {
        "hidden_size": 128, "ffn_dim": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
        "max_position_embeddings": 64, "word_embed_proj_dim": 128, "dropout": 0.0,
    },
    "bloom": {"hidden_size": 128, "n_layer": 3, "n_head": 4, "vocab_size": 300},
    "falcon": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300},
}  # fmt: skip
"""A small one of each kind."""


def described(fields: dict[str, Any]) -> Model:
    shapes = Architecture.of_config(fields)
    assert shapes is not None
    return from_architecture("described", shapes)


def theirs(kind: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: next(iter(entry["names"])))
def test_a_known_model_has_as_many_parameters_as_were_published(entry):
    shapes = Architecture.of_config(entry["config"])
    assert shapes is not None
    dense = shapes.experts.dense_layers if shapes.experts else 0
    one, two = (from_architecture("", replace(shapes, layers=dense + count)) for count in (1, 2))
    each = two.num_parameters - one.num_parameters
    numel = one.num_parameters + (shapes.layers - dense - 1) * each
    assert numel == pytest.approx(entry["published"], rel=0.02)
    assert all(parameter.is_meta for parameter in one.module.parameters())


def test_a_model_is_known_by_its_name_on_the_hub_whatever_its_ending():
    assert len(known.configs()) >= 40
    for name in ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"):
        assert known.config_of(name) == known.configs()["llama-3-8b"]
    assert known.config_of("Qwen/Qwen3-235B-A22B-Instruct-2507") == known.configs()["qwen3-235b-a22b"]
    assert known.config_of("mistralai/Mistral-7B-v0.1") == known.configs()["mistral-7b"]
    assert known.config_of("someone/Llama-9-8B") is None and "llama-3-8b" in known.nearest("lama-3-8b")


def test_the_hub_s_own_name_of_each_known_model_is_known_and_is_what_code_loads():
    for entry in ENTRIES:
        for name, on_the_hub in entry["names"].items():
            assert known.hub_name(name) == on_the_hub == known.hub_name(on_the_hub)
            assert known.config_of(on_the_hub) == entry["config"], on_the_hub
    assert known.hub_name("Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert known.hub_name("package.module:factory") == "package.module:factory"


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_described_model_has_the_parameters_of_the_real_one(kind: str):
    with torch.device("meta"):
        real = theirs(kind)
    model = described({"model_type": kind, **CONFIGS[kind]})
    assert model.num_parameters == sum(parameter.numel() for parameter in real.parameters())


def kept_in_truth(kind: str, tokens: int) -> int:
    """Bytes that autograd keeps of the blocks of a real model."""
    model = theirs(kind).train()
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda *_: hooks.__enter__())
        block.register_forward_hook(lambda *_: hooks.__exit__())
    model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(saved[key].untyped_storage().nbytes() for key in saved.keys() - parameters)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt"])
def test_backward_keeps_of_a_described_model_what_it_keeps_of_the_real_one(kind: str):
    model = described({"model_type": kind, **CONFIGS[kind]})
    kept = model.kept(48, torch.float32)
    assert not kept.reason and kept.blocks == pytest.approx(kept_in_truth(kind, 48), rel=0.05)


def test_a_llama_keeps_49_bytes_for_each_token_layer_and_unit_of_width():
    model = described(dict(known.configs()["llama-3-8b"]))
    kept = model.kept(2048, torch.bfloat16)
    assert kept.blocks / (32 * 4096 * 2048) == pytest.approx(49, abs=0.5)
    assert kept.nbytes(3, recomputed=False) == 3 * (kept.blocks + kept.around)
    assert kept.inputs == pytest.approx(32 * 4096 * 2048 * 2, rel=0.01)  # and rotary embeddings once
    assert kept.nbytes(1, recomputed=True) == kept.inputs + kept.blocks // 32 + kept.around


def test_a_model_of_ones_own_is_followed_and_one_that_cannot_be_is_estimated():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 64)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    class Curious(Own):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) if tokens.sum() > 0 else super().forward(-tokens)

    with torch.device("meta"):
        own, curious = Own(), Curious()
    assert kept_of(own, 3, 64, 10, torch.float32).blocks == 3 * 2 * 10 * 64 * 4  # inputs of the matrix and of GELU
    estimate = kept_of(curious, 3, 64, 10, torch.float32)
    assert "meta" in estimate.reason and estimate.blocks == 3 * 34 * 10 * 64 * 2


def test_blocks_are_those_that_have_the_most_parameters():
    expert = [nn.ModuleList(nn.Linear(8, 8) for _ in range(6)) for _ in range(2)]
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), experts) for experts in expert)
    assert blocks_of(model) == list(model.layers)


def test_adapters_are_all_that_is_trained_and_the_base_takes_fewer_bits():
    model = described(dict(known.configs()["llama-3-8b"]))
    lora = model.with_adapters(Lora(16), AS_WEIGHTS)
    of_block = 16 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336))
    assert lora.num_trained == 32 * of_block and model.num_trained == model.num_parameters
    block = next(unit for unit in lora.units(torch.bfloat16) if unit.name == "layers.0")
    narrow = model.with_adapters(Lora(16), BASES["nf4"])
    of_base = next(unit for unit in narrow.units(torch.bfloat16) if unit.name == "layers.0")
    assert of_base.trainable_numel == block.trainable_numel
    frozen = (of_base.numel - of_base.trainable_numel) / (block.numel - block.trainable_numel)
    assert frozen == pytest.approx(4.127 / 16, rel=0.01)
    assert narrow.widened_bytes(torch.bfloat16) == 2 * 4096 * 14336 and lora.widened_bytes(torch.bfloat16) == 0
    assert sum(lora.flops(block)) == pytest.approx(2 * sum(s.numel for s in block.parameters) + 2 * of_block, rel=1e-3)
    only = model.with_adapters(Lora(8, ("q_proj", "v_proj")), AS_WEIGHTS)
    assert only.num_trained == 32 * 8 * (2 * 4096 + 4096 + 1024)
    with pytest.raises(ConfigError, match=r"no linear layer is named wrong. There are: q_proj, k_proj"):
        model.with_adapters(Lora(8, ("wrong",)), AS_WEIGHTS)


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("16", Lora(16)),
        ("r=8", Lora(8)),
        ("r=4,targets=q_proj+v_proj", Lora(4, ("q_proj", "v_proj"))),
        ("r=2,all", Lora(2)),
    ],
)
def test_adapters_are_written_as_people_write_them(text: str, lora: Lora):
    assert Lora.parse(text) == lora


def test_what_is_no_rank_is_refused():
    with pytest.raises(ConfigError, match="r=16"):
        Lora.parse("r=many")


def test_a_token_passes_the_active_parameters():
    model = described(dict(known.configs()["deepseek-v3"]))
    assert model.num_active == pytest.approx(37.5e9, rel=0.01)
    assert isinstance(model.module, Transformer)
