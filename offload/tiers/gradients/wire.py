"""Formats in which ranks send each other gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from offload.units import ALIGNMENT

_PIECE = 1 << 18
"""Elements that are rounded in one go: what is made beside the gradients is as large, or a few times that."""


class Wire(Protocol):
    """A format, the same on all ranks."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes in which so many gradients of this dtype are sent."""

    def pack(self, flat: torch.Tensor, num_parts: int, present: Collection[slice]) -> torch.Tensor:
        """The gradients of a unit, flat, as they are sent, one part after the other, in the memory that they are in:
        what they were is gone. There are gradients in the elements that are ``present``, in the others anything."""

    def add(self, total: torch.Tensor, part: torch.Tensor, dtype: torch.dtype, first: int, factor: float) -> None:
        """Add ``factor`` times the gradients of a part, which were of this dtype, from element ``first`` on to
        ``total``, flat and in fp32. ``part`` is the bytes that were sent."""


class AsTheyAre:
    """Gradients go as they were made, or added up."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def pack(self, flat: torch.Tensor, num_parts: int, present: Collection[slice]) -> torch.Tensor:
        return flat

    def add(self, total: torch.Tensor, part: torch.Tensor, dtype: torch.dtype, first: int, factor: float) -> None:
        total.add_(part.view(dtype)[first : first + total.numel()], alpha=factor)


class Rounded:
    """Gradients in fp32 are rounded to bf16, to nearest, before they are sent; a rank's own part as well, so that the
    sum does not depend on who has which shard."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self._dtype(dtype).itemsize

    def pack(self, flat: torch.Tensor, num_parts: int, present: Collection[slice]) -> torch.Tensor:
        if self._dtype(flat.dtype) == flat.dtype:
            return flat
        packed = flat.view(torch.bfloat16)[: flat.numel()]
        for start in range(0, flat.numel(), _PIECE):  # what is written lies before all that is still to be read
            packed[start : start + _PIECE] = flat[start : start + _PIECE].to(torch.bfloat16)
        return packed

    def add(self, total: torch.Tensor, part: torch.Tensor, dtype: torch.dtype, first: int, factor: float) -> None:
        total.add_(part.view(self._dtype(dtype))[first : first + total.numel()], alpha=factor)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype == torch.float32 else dtype


_SCALED = ALIGNMENT
"""Elements with one scale. Parameters begin at a multiple of it, in a unit and in a shard."""


class In8Bits:
    """Integers of 8 bits, and an fp32 scale for each block: ``[integers | scales]`` of each part.

    The largest of a block is 127, and all are rounded at random, so that their mean is exact and nothing is to be kept
    of what was rounded away. Random bits follow from the block's largest, an element's place in its block and itself:
    the same on all ranks and devices, and wherever a unit is cut. A block with a number that is not finite has no other
    ones: it shows.
    """

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel + numel // _SCALED * torch.float32.itemsize

    def pack(self, flat: torch.Tensor, num_parts: int, present: Collection[slice]) -> torch.Tensor:
        numel = flat.numel() // num_parts
        nbytes, end = self.nbytes(numel, flat.dtype), 0
        for elements in sorted(present, key=lambda elements: elements.start):
            flat[end : elements.start] = 0  # it would be in a block with others
            end = elements.stop
        flat[end:] = 0
        packed = flat.view(torch.uint8)[: num_parts * nbytes]
        for part in range(num_parts):
            own, scales = packed[part * nbytes :], []
            for start in range(0, numel, _PIECE):  # as above; scales wait until the part has been read
                stop = min(start + _PIECE, numel)
                integers, of_blocks = _encoded(flat[part * numel + start : part * numel + stop])
                own[start:stop].view(torch.int8).copy_(integers)
                scales.append(of_blocks)
            own[numel:nbytes].view(torch.float32).copy_(torch.cat(scales))
        return packed

    def add(self, total: torch.Tensor, part: torch.Tensor, dtype: torch.dtype, first: int, factor: float) -> None:
        numel = part.numel() * _SCALED // self.nbytes(_SCALED, dtype)
        integers, scales = part[:numel].view(torch.int8), part[numel:].view(torch.float32)
        for start in range(0, total.numel(), _PIECE):
            target = total[start : start + _PIECE]
            begin, end = first + start, first + start + target.numel()
            of_elements = scales[begin // _SCALED : -(-end // _SCALED)].repeat_interleave(_SCALED)[: target.numel()]
            target.add_(integers[begin:end].float().mul_(of_elements), alpha=factor)


WIRES: Mapping[str, Callable[[], Wire]] = {"auto": AsTheyAre, "bf16": Rounded, "int8": In8Bits}
"""By the names that ``exchange_dtype`` takes."""


def _encoded(gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers and the scales of whole blocks."""
    numbers = gradients.float().view(-1, _SCALED)
    largest = numbers.abs().amax(1, keepdim=True)
    scales = largest / 127
    scaled = numbers / torch.where(scales == 0, 1.0, scales)
    random = _mixed(largest.view(torch.int32), torch.arange(_SCALED, dtype=torch.int32, device=numbers.device))
    random = _mixed(_mixed(random, numbers.view(torch.int32)), 0)
    scaled += ((random >> 8) & 0xFFFFFF) * 2.0**-24
    return scaled.floor_().clamp_(-127, 127).to(torch.int8).view(-1), scales.view(-1)


def _mixed(random: torch.Tensor, bits: torch.Tensor | int) -> torch.Tensor:
    """A round of a hash, as in ``kernels/src/vec_scalar.h``."""
    product = (random ^ bits) * -0x61C88647  # 0x9e3779b9, which a 32-bit integer of torch's holds with its sign
    return product ^ ((product >> 15) & 0x1FFFF)
