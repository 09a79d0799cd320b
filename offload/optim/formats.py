"""Bytes that a parameter takes of each kind, and the fp32 master beside its 16-bit weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload import kernels
from offload.config import OffloadConfig
from offload.dtypes import BY_PRECISION
from offload.memory import tensor_at

DEFAULT_TILE_BYTES = 8 << 20
"""Measured: from 2 MiB up the disk does not care, below 8 MiB the training thread does (see docs/design.md)."""

RAM_TILE_BYTES = 64 << 20
"""Of states that rest in RAM, where a device computes. A tile takes some 60 us of Python, in which the cores of such a
machine sweep through 8 MiB of states; and a trip to the device and back takes more, on two threads."""

_MASTER_BYTES = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}
"""Bytes that an fp32 master takes beside a trained weight of this dtype."""


@dataclass(frozen=True)
class Formats:
    """Bytes per parameter of each kind; the moments are the optimizer's.

    | kind    | bf16                                        | fp16                  | fp32                   |
    |---------|---------------------------------------------|-----------------------|------------------------|
    | weights | 2: the upper half of the fp32 master        | 2: the master rounded | 4: they are the master |
    | master  | 2: the rest of the fp32 master; 0: none     | 4                     | 0                      |
    | grads   | 2, or 4 when micro-batches are accumulated  | 2 or 4                | 4                      |
    """

    weights: int
    master: int
    grads: int

    @classmethod
    def of(cls, config: OffloadConfig) -> Formats:
        training = config.optimizer is not None
        return cls(
            weights=config.dtype.itemsize,
            master=_MASTER_BYTES[config.dtype] if training and config.master_dtype == "fp32" else 0,
            grads=config.gradient_dtype.itemsize if training else 0,
        )

    def update_bytes(self, states: int, numel: int) -> int:
        """Traffic of an update in memory: states and weights are read and written, gradients are read."""
        return 2 * states + numel * (2 * self.weights + self.grads)

    @property
    def identity(self) -> dict[str, str]:
        """The part of ``Rule.identity`` that says in what the master is; empty: in fp32."""
        return {"master": "bf16"} if self._in_bf16 else {}

    @property
    def _in_bf16(self) -> bool:
        """The weight is its own master, and rounded at random."""
        return self.weights == 2 and self.master == 0

    def get_master(self, numel: int, weight: int, master: int) -> torch.Tensor:
        """The fp32 masters whose weights and masters are at these addresses: the memory itself, or else a copy."""
        if self._in_bf16:
            return tensor_at(weight, numel, torch.bfloat16).float()
        if self.master != 2:
            return tensor_at(master if self.master else weight, numel, torch.float32)
        value = torch.empty(numel)
        kernels.join_master(numel, value.data_ptr(), weight, master)
        return value

    def copy_master(self, target: torch.Tensor, weight: int, master: int) -> None:
        """Copy the fp32 masters whose weights and masters are at these addresses to ``target``, flat and fp32."""
        if self.master == 2:
            kernels.join_master(target.numel(), target.data_ptr(), weight, master)
            return
        dtype = torch.bfloat16 if self._in_bf16 else torch.float32
        target.copy_(tensor_at(master if self.master else weight, target.numel(), dtype))

    def put_master(self, value: torch.Tensor, weight: int, master: int, step: int = 0, *, num_threads: int = 1) -> None:
        """Write fp32 ``value`` (flat) as the weights and masters at these addresses. It may be what is there. ``step``
        is the one that made it, for random rounding."""
        value = value.contiguous()
        if self._in_bf16:
            kernels.round_randomly(value.numel(), weight, value.data_ptr(), step=step, num_threads=num_threads)
            return
        if self.master == 2:
            kernels.split_master(value.numel(), value.data_ptr(), weight, master, num_threads)
            return
        tensor_at(master if self.master else weight, value.numel(), torch.float32).copy_(value)
        if self.master:
            tensor_at(weight, value.numel(), torch.float16).copy_(value)


def master_bytes(precision: str, optimizer: Mapping[str, Any] | None) -> int:
    """Bytes beside a trained weight in a checkpoint of this precision, whose optimizer has this ``Rule.identity``."""
    in_fp32 = optimizer is not None and optimizer.get("master", "fp32") == "fp32"
    return _MASTER_BYTES[BY_PRECISION[precision]] if in_fp32 else 0
