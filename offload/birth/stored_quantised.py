"""Weights that are quantised in a file: several tensors of it are one of the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.birth.gguf_file import GgufTensor
from offload.birth.origin import Origin
from offload.birth.weights_file import StackedTensor, StoredTensor
from offload.errors import WeightsError
from offload.quantised import (
    Awq,
    Blocks4,
    Blocks4Nested,
    Fp8Blocks,
    GgmlBlocks,
    Gptq,
    Int4Groups,
    Mxfp4,
    Nvfp4,
    QuantisedWeight,
    Stack,
)
from offload.units import Packing
from swapper.checked import (
    TEXT,
    Cursor,
    Int,
    OneOf,
    Real,
    Record,
    Shape,
    read_regular,
    refusals,
    require_held,
    text_of,
)

_FP8_SCALES = "_scale_inv"
_MXFP4_CODES, _MXFP4_SCALES = "_blocks", "_scales"
_PACKED = "_packed"
_QWEIGHT = "qweight"
_QUANT_STATE = ".quant_state.bitsandbytes__"
_ENDINGS = (_FP8_SCALES, _MXFP4_CODES, _PACKED, ".qweight", ".absmax", ".SCB", "weight_scale")
"""Of names of tensors that are a quantised weight's and no other's."""
_CONFIG_BYTES_MAX = 16 << 20
_STATE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, eq=False)
class StoredQuantised:
    """A weight whose ``parts`` are in files; ``shape`` is that of the dequantised one. ``others`` are in the files
    beside them, and say nothing more. ``settings`` are those of its kind."""

    name: str
    kind: type[QuantisedWeight]
    shape: torch.Size
    parts: tuple[StoredTensor | StackedTensor, ...]
    others: tuple[StoredTensor, ...] = ()
    settings: tuple[object, ...] = ()

    def over(self, dtype: torch.dtype, device: str) -> QuantisedWeight:
        """The weight in this dtype, with memory for what the files have."""
        parts = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in self.parts]
        return self.kind(parts, self.shape, dtype, self.settings)

    def ordinary(self, dtype: torch.dtype) -> StoredQuantised | StoredTensor | StackedTensor:
        """The tensor itself where its bytes in the file are numbers of ``dtype`` as they are."""
        kind, *settings = self.settings if self.kind is Stack else (self.kind, *self.settings)
        if kind is not GgmlBlocks or settings != [*_AS_IT_IS.get(dtype, ())]:
            return self
        return self.parts[0].viewed(dtype, self.shape)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight."""
        return self._read(dtype).dequantize()

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The same of the rows ``[start, stop)``."""
        if not self.over(dtype, "meta").has_rows:
            return self.whole(dtype)[start:stop]
        return self._read_rows(start, stop, dtype).dequantize()

    def origin(self, dtype: torch.dtype) -> Origin:
        """The origin of the bytes that the engine stores of such a weight."""
        meta = self.over(dtype, "meta")
        packing = Packing(meta)
        parts = tuple(
            part
            for tensor, offset in zip(self.parts, packing.offsets(meta), strict=True)
            for part in tensor.in_files(offset)
        )

        def rows(start: int, stop: int) -> torch.Tensor:
            return Packing(meta.rows(start, stop)).pack(self._read_rows(start, stop, dtype))

        return Origin(lambda: packing.pack(self._read(dtype)), rows, dtype, parts)

    def _read(self, dtype: torch.dtype) -> QuantisedWeight:
        return self.kind([part.whole(part.dtype) for part in self.parts], self.shape, dtype, self.settings)

    def _read_rows(self, start: int, stop: int, dtype: torch.dtype) -> QuantisedWeight:
        parts = [part.rows(start, stop, part.dtype) for part in self.parts]
        return self.kind(parts, torch.Size((stop - start, *self.shape[1:])), dtype, self.settings)


def joined(tensors: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor | StoredQuantised]:
    """The tensors of files by name, where those that are one weight are joined: FP8 with scales for blocks
    (``weight`` and ``weight_scale_inv``), MXFP4 (``_blocks`` and ``_scales``), of ``compressed-tensors`` symmetric
    int4 and NVFP4 (``weight_packed``, ``weight_scale`` and what belongs to them), 4 bits of ``bitsandbytes``
    (``weight``, ``weight.absmax``, ``weight.quant_state.``...), GPTQ and AWQ (``qweight``, ``qzeros``, ``scales``).

    Each of a GGUF file is one by itself, in the file's own order of rows.

    ``directory`` has the configs that go with the files. Raises ``WeightsError`` for those that are damaged.
    """
    found: dict[str, StoredTensor | StoredQuantised] = dict(tensors)
    added = _added_to_zeros(directory) if any(name.endswith(_QWEIGHT) for name in tensors) else 0
    for name, codes in tensors.items():
        weight = (
            _ggml(name, codes)
            or _fp8(name, codes, tensors)
            or _mxfp4(name, codes, tensors)
            or _packed(name, codes, tensors)
            or _blocks4(name, codes, tensors)
            or _gptq(name, codes, tensors, added)
            or _awq(name, codes, tensors)
        )
        if weight is not None:
            for tensor in (*weight.parts, *weight.others):
                del found[tensor.name]
            found[weight.name] = weight
    return found


def check_known(names: Iterable[str], path: Path) -> None:
    """Raise ``WeightsError`` if some of these tensors, which nobody has asked for, are a quantised weight's."""
    unknown = [name for name in names if name.endswith(_ENDINGS)]
    if unknown:
        raise WeightsError(
            f"the weights in {path} are quantised in a way that is not read ({', '.join(unknown[:3])}, ...). Load the "
            "model in memory, dequantise it, save it, and give that."
        )


def of_gguf(
    name: str, tensor: GgufTensor, shape: torch.Size, *, paired: int = 0, added: float = 0.0
) -> StoredQuantised:
    """A weight of this shape with all rows of a GGUF file's tensor. See ``GgmlBlocks`` for what changes them."""
    part = tensor.viewed(torch.uint8, torch.Size((*shape[: len(shape) - _of_a_row(tensor)], tensor.shape[-1])))
    return StoredQuantised(name, GgmlBlocks, shape, (part,), settings=(tensor.kind, paired, added))


def _of_a_row(tensor: GgufTensor) -> int:
    """Dimensions of the numbers that a row has: one of a row of one number has none."""
    return len(tensor.numbers) + 1 - len(tensor.shape)


def _ggml(name: str, codes: StoredTensor) -> StoredQuantised | None:
    return of_gguf(name, codes, codes.numbers) if isinstance(codes, GgufTensor) else None


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
    return StoredQuantised(base, Mxfp4, shape, (codes, scales), settings=(bool(stack),))


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


def _blocks4(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    state = next((t for kind in ("nf4", "fp4") if (t := tensors.get(name + _QUANT_STATE + kind)) is not None), None)
    parts = _beside(name, (".absmax", ".quant_map"), tensors)
    if state is None or parts is None:
        return None
    with refusals(f"{state.name} in the weights file {state.file.path}", WeightsError):
        text = state.bytes(_STATE_BYTES_MAX)
        require_held(text)
        said = _STATE.take(Cursor(text_of(text)).whole())
    shape = torch.Size(said["shape"])
    settings: tuple[object, ...] = (said["blocksize"], said["dtype"])
    scales = -(-shape.numel() // said["blocksize"])
    kind: type[Blocks4] = Blocks4
    if "nested_offset" in said:
        outer = _beside(name, (".nested_absmax", ".nested_quant_map"), tensors)
        if outer is None or outer[0].shape.numel() != -(-scales // said["nested_blocksize"]):
            return None
        kind, parts = Blocks4Nested, (*parts, *outer)
        settings = (*settings, said["nested_blocksize"], said["nested_offset"])
    if 2 * codes.nbytes != shape.numel() + shape.numel() % 2 or parts[0].shape.numel() != scales:
        return None
    return StoredQuantised(name, kind, shape, (codes, *parts), (state,), settings)


def _gptq(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor], added: int) -> StoredQuantised | None:
    base = name.removesuffix(_QWEIGHT)
    parts = _beside(base, ("scales", "qzeros", "g_idx"), tensors)
    if base == name or parts is None or codes.dtype != torch.int32:
        return None
    scales, zeros, groups = parts
    columns, rows = groups.shape.numel(), codes.shape[-1]
    bits = codes.shape[0] * 32 // columns if columns else 0
    if bits not in (2, 4, 8) or codes.shape != (columns * bits // 32, rows) or scales.shape[1:] != (rows,):
        return None
    if rows * bits % 32 or zeros.dtype != torch.int32 or zeros.shape != (scales.shape[0], rows * bits // 32):
        return None
    return StoredQuantised(base + "weight", Gptq, torch.Size((rows, columns)), (codes, *parts), (), (bits, added))


def _awq(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredQuantised | None:
    base = name.removesuffix(_QWEIGHT)
    parts = _beside(base, ("scales", "qzeros"), tensors)
    if base == name or parts is None or base + "g_idx" in tensors or codes.dtype != torch.int32:
        return None
    scales, zeros = parts
    if len(codes.shape) != 2 or zeros.dtype != torch.int32 or zeros.shape[1:] != codes.shape[1:]:
        return None
    shape = torch.Size((8 * codes.shape[1], codes.shape[0]))
    if scales.shape != (zeros.shape[0], shape[0]) or shape[1] % zeros.shape[0]:
        return None
    return StoredQuantised(base + "weight", Awq, shape, (codes, *parts))


def _beside(base: str, endings: Iterable[str], tensors: Mapping[str, StoredTensor]) -> tuple[StoredTensor, ...] | None:
    """The tensors of these names, if all of them are there."""
    found = tuple(tensors[base + ending] for ending in endings if base + ending in tensors)
    return found if len(found) == len(tuple(endings)) else None


def _added_to_zeros(directory: Path) -> int:
    """Return the number that GPTQ adds to each zero: 1, or 0 in the second version of its format. A config names it."""
    for file, member in (("config.json", "quantization_config"), ("quantize_config.json", "checkpoint_format")):
        path = directory / file
        if not path.exists():
            continue
        with refusals(f"the config {path}", WeightsError):
            text = read_regular(path, _CONFIG_BYTES_MAX, links=True)
            require_held(text)
            value = dict(Cursor(text_of(text)).whole()).get(member)
            value = value.get("checkpoint_format") if isinstance(value, dict) else value
            if value == "gptq_v2":
                return 0
    return 1


_AS_IT_IS = {
    torch.float32: ("F32", 0, 0.0),
    torch.float16: ("F16", 0, 0.0),
    torch.bfloat16: ("BF16", 0, 0.0),
}
"""Settings of tensors of a GGUF file whose bytes are numbers of a dtype."""

_VALUE_DTYPES = OneOf({"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16})
_STATE: Record[dict[str, Any]] = Record(
    dict,
    {"quant_type": TEXT, "blocksize": Int(1), "dtype": _VALUE_DTYPES, "shape": Shape()},
    {"nested_blocksize": Int(1), "nested_dtype": TEXT, "nested_offset": Real(finite=True)},
)
"""Fields that ``bitsandbytes`` stores of a weight in JSON."""
