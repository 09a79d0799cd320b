"""Formats that are worked out by torch's operations, and stacks of weights in any format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.quantised.weight import QuantisedWeight


class Fp8Blocks(QuantisedWeight):
    """FP8 codes with a scale for each block of them, as ``weight`` and ``weight_scale_inv`` of DeepSeek-V3 and others.

    Source: ``Fp8Dequantize`` of ``transformers``, whose bits these are.
    """

    joins = True

    @property
    def grain(self) -> int:
        return len(self.codes) // len(self.scales)

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        across = self.scales.shape[1]
        blocks = self.codes[start:stop].float().view(-1, self.grain, across, self.codes.shape[1] // across)
        scales = self.scales[start // self.grain : stop // self.grain].float()
        return blocks.mul_(scales[:, None, :, None]).view(stop - start, -1)


class Gptq(QuantisedWeight):
    """Codes in int32, down the columns of the transposed weight, scales and zeros for groups of its rows, and for each
    row its group: ``qweight``, ``scales``, ``qzeros`` and ``g_idx`` of GPTQ.

    Settings: bits of a code; what is added to a zero as it lies there, 1 in the first version of the format.
    Source: ``TorchLinear`` of ``gptqmodel``, whose bits these are.
    """

    names = ("codes", "scales", "zeros", "groups")
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def grain(self) -> int:
        return 32 // int(self.settings[0])

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        bits, added = self.settings
        ones = sum(added << shift for shift in range(0, 32, bits))
        words = self.zeros[:, start // self.grain : stop // self.grain].long() + ones
        zeros = _fields(words.int(), range(0, 32, bits), bits).t()
        codes = _fields(self.codes[:, start:stop].t(), range(0, 32, bits), bits)
        groups = self.groups.long()
        values: torch.Tensor = self.scales[:, start:stop].t()[:, groups] * (codes - zeros[:, groups])
        return values


class Awq(QuantisedWeight):
    """4-bit codes in int32, along the rows of the transposed weight, scales and zeros for groups of these rows:
    ``qweight``, ``scales`` and ``qzeros`` of AWQ (version ``gemm``).

    Source: ``dequantize_gemm`` of ``autoawq``, whose bits these are.
    """

    names = ("codes", "scales", "zeros")
    zeros: torch.Tensor

    @property
    def grain(self) -> int:
        return len(_AWQ_SHIFTS)

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        words = slice(start // self.grain, stop // self.grain)
        codes, zeros = (_fields(part[:, words], _AWQ_SHIFTS, 4) for part in (self.codes, self.zeros))
        groups = codes.unflatten(0, (len(zeros), -1)) - zeros[:, None]
        values: torch.Tensor = groups * self.scales[:, None, start:stop]
        return values.flatten(0, 1).t()


_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit offsets of the codes of eight columns in an int32."""


class Stack(QuantisedWeight):
    """Weights of one format, one below the other, and such a stack for each expert: what files have of experts one by
    one, and the model as one. The parts have their numbers in dimensions in front.

    Settings: the class of one, and its settings.
    """

    @classmethod
    def names_with(cls, settings: tuple[Any, ...]) -> tuple[str, ...]:
        kind: type[QuantisedWeight] = settings[0]
        return kind.names

    def put_into(self, out: torch.Tensor) -> None:
        if self.dim() > 2:
            super().put_into(out)
            return
        kind, *settings = self.settings
        if kind.joins:
            kind([part.flatten(0, 1) for part in self.parts], self.shape, self.dtype, tuple(settings)).put_into(out)
            return
        for index, rows in enumerate(out.chunk(len(self.parts[0]))):
            parts = [part[index] for part in self.parts]
            kind(parts, rows.shape, self.dtype, tuple(settings)).put_into(rows)


def _fields(words: torch.Tensor, shifts: Sequence[int], bits: int) -> torch.Tensor:
    """Numbers of so many bits that lie at these places of int32, in their order along the last dimension."""
    places = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    fields: torch.Tensor = (words[..., None] >> places & (1 << bits) - 1).to(torch.int16)
    return fields.flatten(-2)
