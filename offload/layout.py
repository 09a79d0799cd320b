"""What a unit's bytes look like in each tier: flat weights, flat gradients, and state tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.config import OffloadConfig
from offload.units import GRAIN, UnitSpec

DEFAULT_TILE_BYTES = 8 << 20
"""Measured: from 2 MiB up the disk does not care, below 8 MiB the training thread does (see docs/design.md)."""


@dataclass(frozen=True)
class Formats:
    """Bytes per parameter of each kind.

    | kind    | bf16                                        | fp32                  |
    |---------|---------------------------------------------|-----------------------|
    | weights | 2: the upper half of the fp32 master        | 4: they are the master |
    | master  | 2: the rest of the fp32 master              | 0                     |
    | moments | 8: fp32                                     | 8                     |
    | grads   | 2, or 4 when micro-batches are accumulated  | 4                     |
    """

    weights: int
    master: int
    moments: int
    grads: int

    @classmethod
    def of(cls, config: OffloadConfig) -> Formats:
        training = config.optimizer is not None
        weights = config.dtype.itemsize
        return cls(
            weights=weights,
            master=(torch.float32.itemsize - weights) if training else 0,
            moments=8 if training else 0,
            grads=config.gradient_dtype.itemsize if training else 0,
        )

    @property
    def states(self) -> int:
        """Bytes per parameter of a tile ``[master | m | v]``."""
        return self.master + self.moments


@dataclass(frozen=True)
class Tile:
    """One piece of a unit's optimizer states, laid out ``[master | m | v]`` for the elements ``[start, stop)``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def addresses(self, base: int, formats: Formats) -> tuple[int, int, int]:
        """Where master, first and second moment begin when the tile lies at ``base``."""
        first = base + self.numel * formats.master
        return base, first, first + self.numel * (formats.moments // 2)


def cut_tiles(unit: UnitSpec, formats: Formats, tile_bytes: int) -> tuple[Tile, ...]:
    """The unit's trainable elements in tiles of at most ``tile_bytes`` of states (at least one grain each)."""
    if formats.states == 0:
        return ()
    step = max(tile_bytes // formats.states // GRAIN, 1) * GRAIN
    return tuple(Tile(start, min(start + step, unit.trainable_numel)) for start in range(0, unit.trainable_numel, step))
