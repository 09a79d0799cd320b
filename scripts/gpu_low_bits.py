#!/usr/bin/env python3
"""Layers that compute in few bits, on a GPU: the same bits at every budget, and the losses of plain PyTorch.

    python scripts/gpu_low_bits.py [--device cuda] [KIND...]

Kinds: LoRA over ``Linear4bit`` of bitsandbytes; float8 layers, int8 layers and classes of weights (BitNet, float8) of
torchao. What is not installed is left out, and said. Each is trained in plain PyTorch, then by the engine with all of
it on the device, with the least device memory and with the least of both memories and the rest on NVMe. Losses must
agree to a thousandth with plain PyTorch, whose optimizer rounds differently, and in all bits among the budgets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used

import torch
import torch.nn.functional as F
from device_schedules import least
from torch import Tensor, nn

from offload import OffloadEngine

_WIDTH, _VOCABULARY, _BLOCKS, _STEPS = 512, 1024, 6, 6
_TOLERANCE = 1e-3


class Adapted(nn.Module):
    """A frozen layer and a trained product of rank eight."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(torch.randn(8, inputs) / 32), nn.Parameter(torch.randn(outputs, 8) / 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


def build(linear: Callable[[int, int], nn.Module] = lambda i, o: nn.Linear(i, o, bias=False)) -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(_WIDTH), linear(_WIDTH, 2 * _WIDTH), nn.GELU(), linear(2 * _WIDTH, _WIDTH))

    blocks = [block() for _ in range(_BLOCKS)]
    return nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *blocks, nn.Linear(_WIDTH, _VOCABULARY))


def _in_blocks(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "." in name


def linear_4bit(device: str) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    model = build(lambda i, o: Adapted(Linear4bit(i, o, compute_dtype=torch.bfloat16, quant_type="nf4"), i, o))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("down", "up")))
    return model.to("cpu").to(device)  # the first one quantises, for every run in the same way


def float8_layers(device: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device == "cpu")
    return convert_to_float8_training(build().bfloat16(), config=config, module_filter_fn=_in_blocks).to(device)


def int8_layers(device: str) -> nn.Module:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    model = build().bfloat16()
    quantize_(model, int8_mixed_precision_training(module_swap=True), _in_blocks)
    return model.to(device)


def bitnet_weights(device: str) -> nn.Module:
    from torchao.prototype.quantized_training import bitnet_training
    from torchao.quantization import quantize_

    model = build().bfloat16()
    quantize_(model, bitnet_training(), _in_blocks)
    return model.to(device)


def float8_weights(device: str) -> nn.Module:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization import quantize_

    model = build().bfloat16()
    quantize_(model, Float8TrainingOpConfig(), _in_blocks)
    return model.to(device)


KINDS = (linear_4bit, float8_layers, int8_layers, bitnet_weights, float8_weights)


def losses(model: nn.Module, optimizer: Any, device: str) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(_STEPS):
        tokens = torch.randint(_VOCABULARY, (8, 65), generator=generator).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def check(make: Callable[[str], nn.Module], device: str, folder: str) -> dict[str, Any]:
    """Train one kind in each way: the largest error against plain PyTorch, and the budgets with other bits."""
    plain = make(device)
    expected = losses(plain, adamw(plain), device)

    def engine(**options: Any) -> OffloadEngine:
        model = make("cpu")
        return OffloadEngine(model, optimizer=adamw(model), device=device, nvme_path=folder, **options)

    budgets: dict[str, dict[str, Any]] = {"all there is": {}}
    if device != "cpu":  # whose device memory is the host's
        budgets["in RAM"] = {"device_memory": least(engine, "device_memory")}
    budgets["on NVMe"] = {**list(budgets.values())[-1]}
    budgets["on NVMe"]["host_memory"] = least(engine, "host_memory", **budgets["on NVMe"])
    found = {}
    for name, options in budgets.items():
        with engine(**options) as made:
            found[name] = losses(made.module, made.optimizer, device)
    first = found["all there is"]
    error = max(abs(mine - wanted) / wanted for mine, wanted in zip(first, expected, strict=True))
    return {"error": error, "other_bits": [name for name, seen in found.items() if seen != first]}


def main() -> int:
    names = [kind.__name__ for kind in KINDS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(names):
        parser.error(f"no kind {', '.join(sorted(unknown))}; kinds: {', '.join(names)}")
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            if options.kinds and kind.__name__ not in options.kinds:
                continue
            started = time.monotonic()
            try:
                found[kind.__name__] = result = check(kind, options.device, folder)
            except ModuleNotFoundError as missing:
                print(f"{kind.__name__:<16}not run: {missing}", flush=True)
                continue
            except Exception as error:  # of this kind alone
                print(f"FAILED {kind.__name__} - {type(error).__name__}: {error}", flush=True)
                found[kind.__name__] = {"error": float("inf"), "other_bits": []}
                continue
            bits = ", ".join(result["other_bits"])
            print(
                f"{kind.__name__:<16}error {result['error']:.1e}; "
                f"{f'OTHER BITS {bits}' if bits else 'the same bits at every budget'}; "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    print(json.dumps({"low_bits": found}))
    return int(any(each["error"] > _TOLERANCE or each["other_bits"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
