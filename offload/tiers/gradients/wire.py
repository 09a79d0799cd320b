"""Formats in which ranks send each other gradients."""

from __future__ import annotations

from typing import Protocol

import torch

_PIECE = 1 << 18
"""Elements that are rounded in one go: what is made beside the gradients is as large."""


class Wire(Protocol):
    """A format, the same on all ranks."""

    def dtype(self, kept: torch.dtype) -> torch.dtype:
        """The dtype in which gradients that are ``kept`` in one are sent."""

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat gradients as they are sent, in the memory that they are in: what they were is gone."""


class AsTheyAre:
    """Gradients go as they were made, or added up."""

    def dtype(self, kept: torch.dtype) -> torch.dtype:
        return kept

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        return flat


class Rounded:
    """Gradients in fp32 are rounded to bf16, to nearest, before they are sent; a rank's own part as well, so that the
    sum does not depend on who has which shard."""

    def dtype(self, kept: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if kept == torch.float32 else kept

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        if self.dtype(flat.dtype) == flat.dtype:
            return flat
        packed = flat.view(torch.bfloat16)[: flat.numel()]
        for start in range(0, flat.numel(), _PIECE):  # what is written lies before all that is still to be read
            packed[start : start + _PIECE] = flat[start : start + _PIECE].to(torch.bfloat16)
        return packed
