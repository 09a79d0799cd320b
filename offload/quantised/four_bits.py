"""Formats of two 4-bit codes a byte: one kernel works out all of them."""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar, NamedTuple

import torch

from offload import kernels
from offload.quantised.weight import QuantisedWeight

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of E2M1 by their codes (OCP Microscaling Formats 1.0, table 2)."""


class Codes4(NamedTuple):
    """Rows in 4-bit codes, flat: two a byte, and a scale for each ``per_scale`` elements in fp32. ``pairs`` has
    both numbers of each of the 256 bytes, in fp32; a number times its scale is rounded to ``dtype``."""

    codes: torch.Tensor
    scales: torch.Tensor
    per_scale: int
    pairs: torch.Tensor
    dtype: torch.dtype


class FourBits(QuantisedWeight):
    """Two 4-bit codes a byte with scales: formats differ in where these are, and in which numbers codes stand for."""

    def coded(self, start: int, stop: int) -> Codes4:
        """The rows ``[start, stop)`` of one weight."""
        raise NotImplementedError

    def put_rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        found = self.coded(start, stop)
        if out.device.type != "cpu" or found.dtype not in _OF_KERNELS:
            values = found.pairs[found.codes.int()].flatten()[: out.numel()]
            out.copy_(values.mul_(_each(found.scales, found.per_scale, out.numel())).to(found.dtype).view(out.shape))
            return
        numbers = out if out.is_contiguous() and out.dtype is found.dtype else torch.empty(out.shape, dtype=found.dtype)
        kernels.dequantize(
            numbers.numel(),
            numbers.data_ptr(),
            _OF_KERNELS[found.dtype],
            found.codes.data_ptr(),
            found.scales.data_ptr(),
            found.per_scale,
            found.pairs.data_ptr(),
            torch.get_num_threads(),
        )
        if numbers is not out:
            out.copy_(numbers)


_OF_KERNELS = {
    torch.float32: kernels.Dtype.F32,
    torch.bfloat16: kernels.Dtype.BF16,
    torch.float16: kernels.Dtype.F16,
}


class Mxfp4(FourBits):
    """Two 4-bit codes a byte, and a power of two for each 32, as ``_blocks`` and ``_scales`` of GPT-OSS.

    Settings: the shape is that of the transposed weight, as GPT-OSS has its stacks of experts.
    Source: ``convert_moe_packed_tensors`` of ``transformers``, whose bits these are.
    """

    joins = True

    def put_into(self, out: torch.Tensor) -> None:
        (is_transposed,) = self.settings
        super().put_into(out.t() if is_transposed and out.dim() == 2 else out)

    def coded(self, start: int, stop: int) -> Codes4:
        codes, scales = self.codes[start:stop], self.scales[start:stop].flatten()
        dtype = torch.promote_types(self.dtype, torch.bfloat16)  # which has all powers of two that scales are
        powers = _powers_of_two(self.device).index_select(0, scales.int())
        return Codes4(codes.flatten(), powers, 2 * codes.shape[-1], _pairs_of_fp4(self.device), dtype)


class Int4Groups(FourBits):
    """Eight 4-bit codes an int32, and a scale for each group of a row, as ``weight_packed`` and ``weight_scale`` of
    ``compressed-tensors`` (format ``pack-quantized``, symmetric).

    Source: ``PackedQuantizationCompressor`` of that library, whose bits these are.
    """

    joins = True

    def coded(self, start: int, stop: int) -> Codes4:
        codes, scales = self.codes[start:stop].view(torch.uint8), self.scales[start:stop]
        per_scale = 2 * codes.shape[-1] // scales.shape[-1]
        return Codes4(codes.flatten(), scales.float().flatten(), per_scale, _pairs_of_int4(self.device), scales.dtype)


class Nvfp4(FourBits):
    """Two 4-bit codes a byte, an FP8 scale for each 16, and what divides these scales, as ``weight_packed``,
    ``weight_scale`` and ``weight_global_scale`` of ``compressed-tensors`` (format ``nvfp4-pack-quantized``).

    Source: ``NVFP4PackedCompressor`` of that library, whose bits these are.
    """

    names = ("codes", "scales", "divisor")
    divisor: torch.Tensor

    def coded(self, start: int, stop: int) -> Codes4:
        codes, scales = self.codes[start:stop], self.scales[start:stop].float() / self.divisor
        per_scale = 2 * codes.shape[-1] // scales.shape[-1]
        return Codes4(codes.flatten(), scales.flatten(), per_scale, _pairs_of_fp4(self.device), self.dtype)


class Blocks4(FourBits):
    """Two 4-bit codes a byte, the upper one first, whose values are in a ``table``, and a scale for so many elements,
    wherever rows end: NF4 and FP4 of ``bitsandbytes``, ``weight`` and what its ``quant_state`` has.

    Settings: elements for a scale; the dtype that was quantised, to which values are rounded.
    Source: ``dequantize_4bit`` of that library, whose bits these are. Its kernel for AVX-512 (0.50) takes other scales
    than those that values were quantised with where a row is not a whole number of blocks; those are taken here.
    """

    names: ClassVar[tuple[str, ...]] = ("codes", "scales", "table")
    table: torch.Tensor

    @property
    def grain(self) -> int:
        even = math.lcm(self.settings[0], 2)
        return min(len(self), math.lcm(self.shape[1], even) // self.shape[1])

    def coded(self, start: int, stop: int) -> Codes4:
        per_scale, dtype, *_ = self.settings
        begin, end = start * self.shape[1], stop * self.shape[1]
        codes = self.codes.reshape(-1).view(torch.uint8)[begin // 2 : -(-end // 2)]
        scales = self.block_scales()[begin // per_scale : -(-end // per_scale)]
        return Codes4(codes, scales, per_scale, _pairs(self.table.float(), upper_first=True), dtype)

    def block_scales(self) -> torch.Tensor:
        """The scales in fp32."""
        return self.scales.float()


class Blocks4Nested(Blocks4):
    """The same with scales that are quantised themselves, to 8 bits ("double quantisation").

    Settings: besides, scales for an outer one, and what is added to each.
    """

    names = ("codes", "scales", "table", "outer_scales", "outer_table")
    outer_scales: torch.Tensor
    outer_table: torch.Tensor

    def block_scales(self) -> torch.Tensor:
        _, _, per_scale, offset, *_ = self.settings
        values = self.outer_table[self.scales.int()]
        scales: torch.Tensor = values * _each(self.outer_scales, per_scale, len(values)) + offset
        return scales


def _each(scales: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """The scale of each of so many elements, where ``count`` of them have one."""
    return scales.repeat_interleave(count)[:numel]


def _pairs(table: torch.Tensor, *, upper_first: bool) -> torch.Tensor:
    """For each byte the numbers of its two 4-bit codes, in their order."""
    byte = torch.arange(256, device=table.device)
    return table[torch.stack((byte >> 4, byte & 0xF) if upper_first else (byte & 0xF, byte >> 4), dim=-1)]


@cache
def _pairs_of_fp4(device: torch.device) -> torch.Tensor:
    return _pairs(torch.tensor(_FP4, device=device), upper_first=False)


@cache
def _pairs_of_int4(device: torch.device) -> torch.Tensor:
    return _pairs(torch.arange(-8.0, 8.0, device=device), upper_first=False)


@cache
def _powers_of_two(device: torch.device) -> torch.Tensor:
    """In fp32, as a scale in E8M0 has them by its code."""
    return torch.pow(2.0, torch.arange(256, device=device) - 127)
