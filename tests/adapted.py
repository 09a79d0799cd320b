"""A small Llama with adapters of ``peft`` over its frozen weights, as they are or quantised by ``torchao``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny import least_budget
from torch import nn

from offload import OffloadEngine

pytest.importorskip("torchao")
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

try:
    from torchao.quantization import to_nf4
except ImportError:  # of earlier releases
    from torchao.dtypes.nf4tensor import to_nf4

TARGETS = ["q_proj", "v_proj", "down_proj"]

OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}


def llama(num_layers: int = 4, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def _to_nf4(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(to_nf4(module.weight.detach(), 64, 4), requires_grad=False)


QUANTISED: dict[str, Callable[[nn.Module], object]] = {
    "bf16": lambda model: None,
    "int8": lambda model: quantize_(model, Int8WeightOnlyConfig()),
    "int4 in int8": lambda model: quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "nf4": _to_nf4,
}

ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=4, init_lora_weights=False, use_dora=True, target_modules=TARGETS),
    "DoRA that drops": lambda: peft.LoraConfig(r=4, use_dora=True, lora_dropout=0.1, target_modules=TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
}

WITH_COPIES: dict[str, Callable[[], peft.PeftConfig]] = {
    "a head of its own": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
}
"""Adapters that train copies of layers."""


def adapted(
    adapter: str = "LoRA",
    base: str = "bf16",
    num_layers: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
) -> Any:
    """The Llama, its weights times ``scale``, with quantised blocks and an adapter, the same each time."""
    model = llama(num_layers, dtype)
    with torch.no_grad():
        for parameter in model.parameters() if scale != 1.0 else ():
            parameter.mul_(scale)
    QUANTISED[base](model.model.layers)
    torch.manual_seed(1)
    return peft.get_peft_model(model, (ADAPTERS | WITH_COPIES)[adapter](), autocast_adapter_dtype=False)


def on_nvme(make: Callable[[], nn.Module], path: Path, **options: Any) -> OffloadEngine:
    """An engine with the least budget that works."""
    options = {**OPTIONS, **options}
    return OffloadEngine(make(), nvme_path=path, host_memory=least_budget(make(), path, **options), **options)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: range = range(3)) -> list[float]:
    assert optimizer is not None
    losses = []
    for step in steps:
        batch = tokens(step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(9)).logits  # type: ignore[no-any-return]


def same_values(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Two state dicts have the same bytes and classes, wrapped tensors included."""
    return list(left) == list(right) and all(_same(value, right[name]) for name, value in left.items())


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if type(left) is not type(right):
        return False
    if hasattr(left, "__tensor_flatten__"):
        names, _ = left.__tensor_flatten__()
        return all(_same(getattr(left, name), getattr(right, name)) for name in names)
    return torch.equal(left, right)
