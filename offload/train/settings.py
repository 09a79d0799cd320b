"""Settings of one training run: the same for the engine and for the in-memory repetition."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from offload.train.model import GPT
from offload.train.text import Text, batches, open_text

Precision = Literal["fp32", "bf16"]

OPTIMIZER: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""AdamW beside its learning rate, for all parameters alike."""

GRADIENT_CLIPPING = 1.0
"""Upper bound of the global gradient norm."""

STATE_BYTES: dict[Precision, dict[str, int]] = {
    "fp32": {"weights, which are the master": 4, "gradients": 4, "moments": 8},
    "bf16": {"weights": 2, "rest of the master": 2, "gradients": 2, "moments": 8},
}
"""Bytes of model state a parameter, by what they are."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the text and the course of the training; plain values, so that it can be written as JSON."""

    text: tuple[str, ...]
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float
    seed: int
    precision: Precision

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """The settings that ``dataclasses.asdict`` gave, after their way through JSON."""
        return cls(**{**values, "text": tuple(values["text"])})

    def empty_model(self) -> GPT:
        """The model without memory: its parameters are on the ``meta`` device."""
        with torch.device("meta"):
            return GPT(layers=self.layers, width=self.width, heads=self.heads)

    def open_text(self) -> Text:
        """The text to learn from. Raises ``InputError`` if there is none or too little."""
        return open_text([Path(path) for path in self.text], window=self.context + 1)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the run, in order, without end. Raises ``InputError``."""
        return batches(self.open_text(), batch=self.batch, context=self.context, seed=self.seed)

    def schedule(self, optimizer: torch.optim.Optimizer, done: int = 0) -> torch.optim.lr_scheduler.LambdaLR:
        """Warm-up over the first 5 % of the steps, then half a cosine down to a tenth of the learning rate; after
        ``done`` steps."""
        warmup = max(1, self.steps // 20)

        def factor(step: int) -> float:
            progress = (step - warmup) / max(1, self.steps - warmup)
            return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

        for group in optimizer.param_groups:
            group["lr"] = self.lr  # a checkpoint has that of its step
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(done + step))

    @property
    def activation_bytes_estimated(self) -> int:
        """Bytes that autograd keeps for backward: 18 numbers a width, block and token, plus five rows of 256 logits."""
        numbers = 18 * self.width * self.layers + 5 * 256
        return self.batch * self.context * numbers * torch.finfo(dtype_of(self.precision)).bits // 8


def dtype_of(precision: Precision) -> torch.dtype:
    """dtype of the weights that the model computes with."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def choose_precision(asked: Literal["auto", "fp32", "bf16"]) -> tuple[Precision, str]:
    """The precision, and the reason in words. "auto" takes some milliseconds: what this CPU multiplies faster."""
    if asked != "auto":
        return asked, "as asked for"
    rates = {precision: _matmul_gflops(dtype_of(precision)) for precision in STATE_BYTES}
    best: Precision = "bf16" if rates["bf16"] > rates["fp32"] else "fp32"
    return best, f"this CPU multiplies fp32 at {rates['fp32']:.0f} and bf16 at {rates['bf16']:.0f} GFLOP/s"


def _matmul_gflops(dtype: torch.dtype) -> float:
    size = 384
    square = torch.ones(size, size, dtype=dtype)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(square, square)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9
