"""Blocks of GGUF files: so many numbers of a row in so many bytes, with their scales among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from offload.quantised.weight import QuantisedWeight

_SUPER_NUMEL = 256
"""Numbers of a block of the K types."""


class GgmlType(NamedTuple):
    """One form of numbers. ``work_out`` makes fp32 ``(blocks, numel)`` of uint8 ``(blocks, nbytes)``."""

    numel: int
    nbytes: int
    work_out: Callable[[torch.Tensor], torch.Tensor]


class GgmlBlocks(QuantisedWeight):
    """A tensor as a GGUF file has it: each of its rows is blocks of one type. One of one dimension that has a number a
    block has a row for each.

    Settings: the type by its name; how many rows, those of a head, are in a file by the pairs that a rotary embedding
    turns together, of which the model has all first ones before all second ones (0: no such order); what is added to
    each number.
    Source: ``dequantize`` of the library ``gguf``, whose bits these are.
    """

    names = ("blocks",)
    blocks: torch.Tensor
    joins = True

    @property
    def grain(self) -> int:
        return max(int(self.settings[1]), 1)

    def put_into(self, out: torch.Tensor) -> None:
        of_rows = self.blocks.flatten(0, -2)
        shape = torch.Size((len(of_rows), out.numel() // len(of_rows)))
        whole = type(self)([of_rows], shape, self.dtype, self.settings)
        QuantisedWeight.put_into(whole, out.view(whole.shape))

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        name, paired, added = self.settings
        kind = GGML_TYPES[name]
        values = kind.work_out(self.blocks[start:stop].reshape(-1, kind.nbytes)).reshape(stop - start, -1)
        if paired:
            values = values.view(-1, paired // 2, 2, values.shape[1]).transpose(1, 2).flatten(0, 2)
        return values + added if added else values  # of fp32 it is the bytes themselves

    def take_rows(self, indices: torch.Tensor) -> torch.Tensor | None:
        if self.dim() != 2 or self.blocks.dim() != 2 or self.settings[1]:
            return None
        rows = self.blocks[indices.flatten()]
        shape = torch.Size((len(rows), self.shape[1]))
        return type(self)([rows], shape, self.dtype, self.settings).dequantize().view(*indices.shape, -1)


def _plain(dtype: torch.dtype) -> GgmlType:
    return GgmlType(1, dtype.itemsize, lambda blocks: blocks.view(dtype).float())


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at this byte of each block, in fp32, ``(blocks, 1)``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The lower halves of all bytes, and then the upper ones: ``(..., bytes)`` to ``(..., 2 * bytes)``."""
    return torch.cat((codes & 0xF, codes >> 4), dim=-1)


def _bits(words: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Fields of ``width`` bits, the lowest of all bytes first: ``(..., bytes)`` to ``(..., count, bytes)``."""
    fields = [words >> width * index & (1 << width) - 1 for index in range(count)]
    return torch.stack(fields, dim=-2)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A bit for each of 32 numbers, in the order of the numbers, as 16."""
    return _bits(blocks[:, at : at + 4], 8, 1).transpose(1, 2).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _scaled(values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """Numbers of blocks in groups, with a scale and what is taken off for each group. Writes to ``values``."""
    groups = values.view(len(values), scales.shape[1], -1).mul_(scales[:, :, None])
    if minima is not None:
        groups.sub_(minima[:, :, None])
    return values


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    both = blocks[:, :16]
    codes = _bits(blocks[:, 16:80].view(-1, 2, 32), 4, 2).flatten(1)
    scales, minima = _half(blocks, 80) * (both & 0xF).float(), _half(blocks, 82) * (both >> 4).float()
    return _scaled(codes.float(), scales, minima)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    lower, upper = _nibbles(blocks[:, 96:104]), _bits(blocks[:, 104:108], 4, 2).flatten(1)
    scales = _half(blocks, 108) * ((lower | upper << 4).float() - 32)
    codes = _bits(blocks[:, 32:96].view(-1, 2, 32), 4, 2).flatten(1)
    third = _bits(blocks[:, :32], 8, 1).flatten(1)
    return _scaled((codes | third << 2).float().sub_(4), scales)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and eight minima of a block, which have 12 bytes together."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 0xF | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _six_bits(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1)
    return _scaled(codes.float(), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _six_bits(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1)
    fifth = _bits(blocks[:, 16:48], 8, 1).flatten(1)
    return _scaled((codes | fifth << 4).float(), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64)).flatten(1)
    upper = _bits(blocks[:, 128:192].view(-1, 2, 32), 4, 2).flatten(1)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _scaled((lower | upper << 4).float().sub_(32), scales)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers of the 4-bit codes of IQ4 (``kvalues_iq4nl`` of ggml)."""


def _of_iq4(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=codes.device)[_nibbles(codes).int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _of_iq4(blocks[:, 2:]).mul_(_half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    lower = torch.stack((blocks[:, 4:8] & 0xF, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    upper = _bits(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1)
    scales = _half(blocks, 0) * ((lower | upper << 4).float() - 32)
    return _scaled(_of_iq4(blocks[:, 8:].view(-1, 8, 16)).flatten(1), scales)


GGML_TYPES: dict[str, GgmlType] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": GgmlType(32, 18, _q4_0),
    "Q4_1": GgmlType(32, 20, _q4_1),
    "Q5_0": GgmlType(32, 22, _q5_0),
    "Q5_1": GgmlType(32, 24, _q5_1),
    "Q8_0": GgmlType(32, 34, _q8_0),
    "Q2_K": GgmlType(_SUPER_NUMEL, 84, _q2_k),
    "Q3_K": GgmlType(_SUPER_NUMEL, 110, _q3_k),
    "Q4_K": GgmlType(_SUPER_NUMEL, 144, _q4_k),
    "Q5_K": GgmlType(_SUPER_NUMEL, 176, _q5_k),
    "Q6_K": GgmlType(_SUPER_NUMEL, 210, _q6_k),
    "IQ4_NL": GgmlType(32, 18, _iq4_nl),
    "IQ4_XS": GgmlType(_SUPER_NUMEL, 136, _iq4_xs),
}
"""Those that are read, by the names that the format has for them."""
