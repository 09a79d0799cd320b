"""Weights that are quantised in a file: several tensors of it are one of the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload.birth.origin import Origin
from offload.birth.weights_file import StoredTensor
from offload.quantised import Fp8Blocks, Int4Groups, Mxfp4, Nvfp4, QuantisedWeight
from offload.units import Packing
from swapper import FilePart

_FP8_SCALES = "_scale_inv"
_MXFP4_CODES, _MXFP4_SCALES = "_blocks", "_scales"
_PACKED = "_packed"


@dataclass(frozen=True, eq=False)
class StoredQuantised:
    """A weight whose ``parts`` are in files; ``shape`` is that of the dequantised one. ``others`` are in the files
    beside them, and say nothing more."""

    name: str
    kind: type[QuantisedWeight]
    shape: torch.Size
    parts: tuple[StoredTensor, ...]
    others: tuple[StoredTensor, ...] = ()

    def over(self, dtype: torch.dtype, device: str) -> QuantisedWeight:
        """The weight in this dtype, with memory for what the files have."""
        return self.kind([torch.empty(t.shape, dtype=t.dtype, device=device) for t in self.parts], self.shape, dtype)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight."""
        return self._read(dtype).dequantize()

    def origin(self, dtype: torch.dtype) -> Origin:
        """The origin of the bytes that the engine stores of such a weight."""
        meta = self.over(dtype, "meta")
        packing = Packing(meta)
        parts = tuple(
            FilePart(tensor.file.read_only, tensor.start, tensor.nbytes, offset)
            for tensor, offset in zip(self.parts, packing.offsets(meta), strict=True)
        )
        return Origin(lambda: packing.pack(self._read(dtype)), None, dtype, parts)

    def _read(self, dtype: torch.dtype) -> QuantisedWeight:
        return self.kind([tensor.whole(tensor.dtype) for tensor in self.parts], self.shape, dtype)


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | StoredQuantised]:
    """The tensors of files by name, where those that are one weight are joined: FP8 with scales for blocks
    (``weight`` and ``weight_scale_inv``), MXFP4 (``_blocks`` and ``_scales``), and of ``compressed-tensors`` symmetric
    int4 and NVFP4 (``weight_packed``, ``weight_scale`` and what belongs to them)."""
    found: dict[str, StoredTensor | StoredQuantised] = dict(tensors)
    for name, codes in tensors.items():
        weight = _fp8(name, codes, tensors) or _mxfp4(name, codes, tensors) or _packed(name, codes, tensors)
        if weight is not None:
            for tensor in (*weight.parts, *weight.others):
                del found[tensor.name]
            found[weight.name] = weight
    return found


def _fp8(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    scales = tensors.get(name + _FP8_SCALES)
    if codes.dtype != torch.float8_e4m3fn or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    if any(size % count for size, count in zip(codes.shape, scales.shape, strict=True)):
        return None
    return StoredQuantised(name, Fp8Blocks, codes.shape, (codes, scales))


def _mxfp4(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    base = name.removesuffix(_MXFP4_CODES)
    scales = tensors.get(base + _MXFP4_SCALES)
    if base == name or scales is None or codes.dtype != torch.uint8 or scales.shape != codes.shape[:-1]:
        return None
    *stack, rows, groups, width = codes.shape
    columns = 2 * groups * width
    shape = torch.Size((*stack, columns, rows) if stack else (rows, columns))
    return StoredQuantised(base, Mxfp4, shape, (codes, scales))


def _packed(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    base = name.removesuffix(_PACKED)
    scales, divisor = tensors.get(base + "_scale"), tensors.get(base + "_global_scale")
    if base == name or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    if base + "_zero_point" in tensors or base + "_g_idx" in tensors:
        return None
    shape = torch.Size((codes.shape[0], codes.shape[1] * 2 * codes.dtype.itemsize))
    if scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
        return None
    kind: type[QuantisedWeight] = Int4Groups
    parts: tuple[StoredTensor, ...] = (codes, scales)
    if codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn and divisor is not None:
        kind, parts = Nvfp4, (codes, scales, divisor)
    elif codes.dtype != torch.int32 or divisor is not None:
        return None
    beside = (base + "_shape", base.removesuffix("weight") + "input_global_scale")
    return StoredQuantised(base, kind, shape, parts, tuple(tensors[other] for other in beside if other in tensors))
