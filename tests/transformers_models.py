"""Tiny models of ``transformers``, one for each way in which these are built, tied, or saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

VOCAB = 200
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
_OF_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
_SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
}
_PICTURES = {**SMALL, "image_size": 32, "patch_size": 8}

MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("AutoModelForCausalLM", transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "llama tied": ("AutoModelForCausalLM", transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "gpt2": ("AutoModelForCausalLM", transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=VOCAB)),
    "t5": ("AutoModelForSeq2SeqLM", transformers.T5Config(**_OF_T5, decoder_start_token_id=0)),
    "bert": ("AutoModelForMaskedLM", transformers.BertConfig(**SMALL)),
    "mixtral": (
        "AutoModelForCausalLM",
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4),
    ),
    "gemma2": ("AutoModelForCausalLM", transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16)),
    "mamba": ("AutoModelForCausalLM", transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=VOCAB)),
    "bart": ("AutoModelForSeq2SeqLM", transformers.BartConfig(d_model=64, vocab_size=VOCAB, **_SIDES)),
    "vit": ("AutoModelForImageClassification", transformers.ViTConfig(**{**_PICTURES, "pad_token_id": None})),
    "clip": ("AutoModel", transformers.CLIPConfig(text_config=dict(SMALL), vision_config=dict(_PICTURES))),
}
"""By a name: the class that loads it, and its config."""

OF_TEXT = ("llama", "llama tied", "gpt2", "t5", "bert", "mixtral")
"""Those that learn from tokens."""


def class_and_config(name: str) -> tuple[Any, Any]:
    """The class that loads a model, and a config of its own: a class may write its dtype into it."""
    class_name, config = MODELS[name]
    return getattr(transformers, class_name), copy.deepcopy(config)
