"""Frozen models of ``transformers`` with low-rank adapters, by ``peft``, on top."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from zoo import perception, text
from zoo.specimen import Specimen

_BASES = {base.name: base for base in [*text.SPECIMENS, *perception.SPECIMENS]}


def _adapted(base: Specimen, settings: dict[str, Any]) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)
    model: nn.Module = peft.get_peft_model(base.build(), config)
    return model


def _specimen(base: str, name: str = "LoRA", **settings: Any) -> Specimen:
    specimen = _BASES[base]
    build = partial(_adapted, specimen, settings)
    return replace(specimen, name=f"{base} with {name}", family="adapters", build=build)


SPECIMENS = [
    _specimen("llama", target_modules="all-linear"),
    _specimen("llama", "DoRA", target_modules=["q_proj", "v_proj"], use_dora=True),
    _specimen("gpt2", target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True),
    _specimen("t5", target_modules=["q", "v"], bias="lora_only"),
    _specimen("mixtral", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    _specimen("vit", target_modules="all-linear", modules_to_save=["classifier"]),
]
