"""Workload of a step: the batch, and the options of the engine that bear on bytes and seconds."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from offload.config import OffloadConfig

Mode = Literal["keep", "recompute", "host", "nvme"]
"""Treatment of activations: the values of the engine's option."""

Precision = Literal["bf16", "fp16", "fp32"]
MomentsDtype = Literal["fp32", "bf16", "int8"]
MasterDtype = Literal["fp32", "bf16"]
ExchangeDtype = Literal["auto", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step of one rank: ``micro_batches`` of ``batch`` sequences of ``sequence`` tokens.

    ``clipped`` says that the norm is over the bound in each step, so that no update may begin in backward.
    """

    batch: int = 1
    sequence: int = 2048
    micro_batches: int = 1
    precision: Precision = "bf16"
    moments_dtype: MomentsDtype = "fp32"
    master_dtype: MasterDtype = "fp32"
    optimizer: str = "adamw"
    gradient_clipping: float = 0.0
    """The engine's option: with one, the plan is for steps with and without clipping."""
    clipped: bool = False
    activations: Mode = "keep"
    activation_memory: int | None = None
    """Host memory set aside for activations of "host" and "nvme"; None: what serves them."""
    together: bool = False
    """Micro-batches pass each unit together, by ``engine.together``."""
    loss_rows: int | None = None
    """Tokens of which logits exist at a time, by ``cross_entropy_in_tiles``; None: all."""
    shard: Literal["auto", "states", "gradients", "weights"] = "auto"
    """Parts of the state that ranks hold shards of."""
    exchange_dtype: ExchangeDtype = "auto"
    """Format in which ranks send each other gradients."""
    device_bytes: int | None = None
    """``device_memory``; None: what activations leave."""

    @property
    def size(self) -> int:
        """Return the number that can be raised while each unit is fetched as often: of sequences, or of micro-batches
        that are together."""
        return self.micro_batches if self.together else self.batch

    def of_size(self, size: int) -> Workload:
        """All else as it is."""
        return replace(self, micro_batches=size) if self.together else replace(self, batch=size)

    @property
    def passes(self) -> int:
        """Of a step: so many times each unit is fetched for forward, and for backward."""
        return 1 if self.together else self.micro_batches

    @property
    def tokens(self) -> int:
        """Of one pass: of a micro-batch, or of all that are together."""
        return self.batch * self.sequence * (self.micro_batches // self.passes)

    @property
    def recomputed(self) -> bool:
        """Blocks keep their inputs alone, and are computed once more in backward."""
        return self.activations != "keep"

    @property
    def leave(self) -> bool:
        """Activations leave the memory where the model computes."""
        return self.activations in ("host", "nvme")

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.config.dtype

    @functools.cached_property
    def config(self) -> OffloadConfig:
        """The engine's options, checked once. Raises ``ConfigError``."""
        return OffloadConfig(
            precision=self.precision,
            moments_dtype=self.moments_dtype,
            master_dtype=self.master_dtype,
            optimizer=self.optimizer,
            gradient_accumulation_steps=self.micro_batches,
            gradient_clipping=self.gradient_clipping,
            shard=self.shard,
            exchange_dtype=self.exchange_dtype,
            device_memory="auto" if self.device_bytes is None else self.device_bytes,
        )
