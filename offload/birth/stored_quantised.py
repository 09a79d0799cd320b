"""Weights that are quantised in a file: several tensors of it are one of the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload.birth.origin import Origin
from offload.birth.weights_file import StoredTensor
from offload.quantised import Fp8Blocks, Mxfp4, QuantisedWeight
from offload.units import Packing
from swapper import FilePart

_FP8_SCALES = "_scale_inv"
_MXFP4_CODES, _MXFP4_SCALES = "_blocks", "_scales"


@dataclass(frozen=True, eq=False)
class StoredQuantised:
    """A weight whose codes and scales are in files; ``shape`` is that of the dequantised one."""

    name: str
    kind: type[QuantisedWeight]
    shape: torch.Size
    codes: StoredTensor
    scales: StoredTensor

    def over(self, dtype: torch.dtype, device: str) -> QuantisedWeight:
        """The weight in this dtype, with memory for what the files have."""
        codes, scales = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in (self.codes, self.scales))
        return self.kind(codes, scales, self.shape, dtype)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight."""
        return self._read(dtype).dequantize()

    def origin(self, dtype: torch.dtype) -> Origin:
        """The origin of the bytes that the engine stores of such a weight."""
        meta = self.over(dtype, "meta")
        packing = Packing(meta)
        parts = tuple(
            FilePart(tensor.file.read_only, tensor.start, tensor.nbytes, offset)
            for tensor, offset in zip((self.codes, self.scales), packing.offsets(meta), strict=True)
        )
        return Origin(lambda: packing.pack(self._read(dtype)), None, dtype, parts)

    def _read(self, dtype: torch.dtype) -> QuantisedWeight:
        codes, scales = (tensor.whole(tensor.dtype) for tensor in (self.codes, self.scales))
        return self.kind(codes, scales, self.shape, dtype)


def paired(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | StoredQuantised]:
    """The tensors of files by name, where those that are one weight are joined: FP8 with scales for blocks
    (``weight`` and ``weight_scale_inv``), and MXFP4 (``_blocks`` and ``_scales``)."""
    found: dict[str, StoredTensor | StoredQuantised] = dict(tensors)
    for name, codes in tensors.items():
        joined = _fp8(name, codes, tensors) or _mxfp4(name, codes, tensors)
        if joined is not None:
            del found[codes.name], found[joined.scales.name]
            found[joined.name] = joined
    return found


def _fp8(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    scales = tensors.get(name + _FP8_SCALES)
    if codes.dtype != torch.float8_e4m3fn or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    if any(size % count for size, count in zip(codes.shape, scales.shape, strict=True)):
        return None
    return StoredQuantised(name, Fp8Blocks, codes.shape, codes, scales)


def _mxfp4(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    base = name.removesuffix(_MXFP4_CODES)
    scales = tensors.get(base + _MXFP4_SCALES)
    if base == name or scales is None or codes.dtype != torch.uint8 or scales.shape != codes.shape[:-1]:
        return None
    *stack, rows, groups, width = codes.shape
    columns = 2 * groups * width
    shape = torch.Size((*stack, columns, rows) if stack else (rows, columns))
    return StoredQuantised(base, Mxfp4, shape, codes, scales)
