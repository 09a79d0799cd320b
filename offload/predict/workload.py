"""Workload of a step: the batch, and the options of the engine that bear on bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from offload.config import OffloadConfig


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step of one rank: ``micro_batches`` of ``batch`` sequences of ``sequence`` tokens.

    ``clipped`` says that the norm is over the bound in each step, so that no update may begin in backward.
    ``recomputed``: activation checkpointing, blocks keep their inputs alone and are computed once more in backward.
    """

    batch: int = 1
    sequence: int = 2048
    micro_batches: int = 1
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    moments_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    optimizer: str = "adamw"
    clipped: bool = False
    recomputed: bool = False
    shard: Literal["auto", "states", "gradients", "weights"] = "auto"
    """Parts of the state that ranks hold shards of."""
    device_bytes: int | None = None
    """``device_memory``; None: what activations leave."""

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.batch * self.sequence

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.config().dtype

    def config(self) -> OffloadConfig:
        """The engine's options. Raises ``ConfigError``."""
        return OffloadConfig(
            precision=self.precision,
            moments_dtype=self.moments_dtype,
            optimizer=self.optimizer,
            gradient_accumulation_steps=self.micro_batches,
            shard=self.shard,
            device_memory="auto" if self.device_bytes is None else self.device_bytes,
        )
