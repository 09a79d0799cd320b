"""Weights in the formats of files: tensors that hold a file's bytes, and are dequantised where they are used.

Each class wraps the tensors that a file has for one weight, and stands for the dequantised weight in the dtype of the
model. Frozen weights alone: there is a gradient for what is multiplied with them, and none for themselves. What
autograd keeps of one for backward is the wrapper, so that no dequantised weight outlives its use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from offload.memory import passing_tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of E2M1 by their codes (OCP Microscaling Formats 1.0, table 2)."""

_AT_ONCE_NUMEL = 1 << 20
"""Elements that are worked out at a time: temporaries stay in a processor's cache, and small."""

_aten = torch.ops.aten


class QuantisedWeight(torch.Tensor):
    """A weight of ``shape`` and ``dtype`` that is made of several tensors of a file, its ``parts``: codes, their
    scales, and what else its class has a name for."""

    names: ClassVar[tuple[str, ...]] = ("codes", "scales")
    """Attributes that the parts are, in order."""

    codes: torch.Tensor
    scales: torch.Tensor
    settings: tuple[Any, ...]
    """What its class has to know beside the parts."""

    def __new__(
        cls, parts: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype, settings: tuple[Any, ...] = ()
    ) -> Any:
        device = parts[0].device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]

    def __init__(
        self, parts: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype, settings: tuple[Any, ...] = ()
    ) -> None:
        self.settings = settings
        for name, part in zip(self.names_with(settings), parts, strict=True):
            setattr(self, name, part)

    @classmethod
    def names_with(cls, settings: tuple[Any, ...]) -> tuple[str, ...]:
        """The names of the parts."""
        return cls.names

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it is made of."""
        return tuple(getattr(self, name) for name in self.names_with(self.settings))

    @property
    def has_rows(self) -> bool:
        """Several weights that lie one after the other: each part has a row for each."""
        return self.dim() == 3 and all(part.dim() > 2 and len(part) == len(self) for part in self.parts)

    @property
    def grain(self) -> int:
        """Rows that are worked out together, at least."""
        return 1

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        """The rows ``[start, stop)`` of one weight, each bound a multiple of ``grain``, as an ordinary tensor."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The weight as an ordinary tensor, in memory that goes back to the system with it. Takes a few MiB besides."""
        if self.device.type == "cpu":
            out = passing_tensor(self.shape.numel() * self.dtype.itemsize).view(self.dtype).view(self.shape)
        else:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            self.put_into(out)
        return out

    def put_into(self, out: torch.Tensor) -> None:
        """Fill ``out``, of this shape and dtype, with the weight."""
        if self.dim() > 2:
            for index in range(len(self)):
                self.select_first(index).put_into(out[index])
            return
        rows, columns = out.shape
        step = max(_AT_ONCE_NUMEL // columns // self.grain, 1) * self.grain
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[start:stop] = self.work_out(start, stop)

    def select_first(self, index: int) -> QuantisedWeight:
        """One of several weights that lie one after the other, without a copy."""
        return type(self)([part[index] for part in self.parts], self.shape[1:], self.dtype, self.settings)

    def rows(self, start: int, stop: int) -> QuantisedWeight:
        """Those of several weights from ``start`` to ``stop``, without a copy."""
        shape = torch.Size((stop - start, *self.shape[1:]))
        return type(self)([part[start:stop] for part in self.parts], shape, self.dtype, self.settings)

    def over(self, call: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedWeight:
        """The same weight over what ``call`` makes of the tensors."""
        return type(self)([call(part) for part in self.parts], self.shape, self.dtype, self.settings)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.names_with(self.settings)), (self.dtype, *self.settings)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: torch.Size, outer_stride: Any
    ) -> QuantisedWeight:
        dtype, *settings = context
        parts = [inner[name] for name in cls.names_with(tuple(settings))]
        return cls(parts, torch.Size(outer_size), dtype, tuple(settings))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), QuantisedWeight):
            return _linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, QuantisedWeight):
            if function in (_aten.detach.default, _aten.alias.default):
                return weight.over(torch.Tensor.detach)
            if function is _aten.clone.default:
                return weight.over(torch.Tensor.clone)
            if function is _aten._to_copy.default and kwargs.get("dtype", weight.dtype) in (None, weight.dtype):
                device = kwargs.get("device") or weight.device
                return weight.over(lambda tensor: tensor.to(device, copy=True))
            if function is _aten.select.int and args[1] == 0 and weight.has_rows:
                return weight.select_first(args[2])
            if function is _aten.squeeze.dim and args[1] == 0 and weight.has_rows and len(weight) == 1:
                return weight.select_first(0)
            if function is _aten.slice.Tensor and weight.has_rows and args[1] == 0 and len(args) == 4:
                found = range(len(weight))[args[2] : args[3]]
                return weight.rows(found.start, found.stop)
        return function(*tree_map(_ordinary, args), **tree_map(_ordinary, kwargs))


class Fp8Blocks(QuantisedWeight):
    """FP8 codes with a scale for each block of them, as ``weight`` and ``weight_scale_inv`` of DeepSeek-V3 and others.

    Source: ``Fp8Dequantize`` of ``transformers``, whose bits these are.
    """

    @property
    def grain(self) -> int:
        return len(self.codes) // len(self.scales)

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        across = self.scales.shape[1]
        blocks = self.codes[start:stop].float().view(-1, self.grain, across, self.codes.shape[1] // across)
        scales = self.scales[start // self.grain : stop // self.grain].float()
        return blocks.mul_(scales[:, None, :, None]).view(stop - start, -1)


class Mxfp4(QuantisedWeight):
    """Two 4-bit codes a byte, and a power of two for each 32, as ``_blocks`` and ``_scales`` of GPT-OSS.

    Settings: the shape is that of the transposed weight, as GPT-OSS has its stacks of experts.
    Source: ``convert_moe_packed_tensors`` of ``transformers``, whose bits these are.
    """

    def put_into(self, out: torch.Tensor) -> None:
        (is_transposed,) = self.settings
        super().put_into(out.t() if is_transposed and out.dim() == 2 else out)

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        dtype = torch.promote_types(self.dtype, torch.bfloat16)  # which has all powers of two that scales are
        scales = torch.pow(2.0, self.scales[start:stop].int() - 127).to(dtype)
        return _values(self.codes[start:stop], torch.tensor(_FP4, dtype=dtype)).mul_(scales[..., None]).flatten(-2)


class Int4Groups(QuantisedWeight):
    """Eight 4-bit codes an int32, and a scale for each group of a row, as ``weight_packed`` and ``weight_scale`` of
    ``compressed-tensors`` (format ``pack-quantized``, symmetric).

    Source: ``PackedQuantizationCompressor`` of that library, whose bits these are.
    """

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        values = _values(self.codes[start:stop].view(torch.uint8), torch.arange(-8, 8, dtype=self.scales.dtype))
        return _scaled(values, self.scales[start:stop])


class Nvfp4(QuantisedWeight):
    """Two 4-bit codes a byte, an FP8 scale for each 16, and what divides these scales, as ``weight_packed``,
    ``weight_scale`` and ``weight_global_scale`` of ``compressed-tensors`` (format ``nvfp4-pack-quantized``).

    Source: ``NVFP4PackedCompressor`` of that library, whose bits these are.
    """

    names = ("codes", "scales", "divisor")
    divisor: torch.Tensor

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        scales = self.scales[start:stop].float() / self.divisor
        return _scaled(_values(self.codes[start:stop], torch.tensor(_FP4)), scales)


class Blocks4(QuantisedWeight):
    """Two 4-bit codes a byte, the upper one first, whose values are in a ``table``, and a scale for so many elements,
    wherever rows end: NF4 and FP4 of ``bitsandbytes``, ``weight`` and what its ``quant_state`` has.

    Settings: elements for a scale; the dtype that was quantised, to which values are rounded.
    Source: ``dequantize_4bit`` of that library, whose bits these are.
    """

    names: ClassVar[tuple[str, ...]] = ("codes", "scales", "table")
    table: torch.Tensor

    @property
    def grain(self) -> int:
        per_scale = self.settings[0]
        return min(len(self), math.lcm(self.shape[1], per_scale) // self.shape[1])

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        per_scale, dtype, *_ = self.settings
        begin, end = start * self.shape[1], stop * self.shape[1]
        codes = self.codes.reshape(-1).view(torch.uint8)[begin // 2 : -(-end // 2)]
        values = _values(codes, self.table, upper_first=True)[: end - begin]
        scales = self.block_scales()[begin // per_scale : -(-end // per_scale)]
        return values.mul_(_each(scales, per_scale, end - begin)).to(dtype).view(stop - start, -1)

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
        _, _, per_scale, offset = self.settings
        values = self.outer_table[self.scales.int()]
        scales: torch.Tensor = values * _each(self.outer_scales, per_scale, len(values)) + offset
        return scales


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
"""Where in an int32 the codes of eight columns lie."""


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
        for index, rows in enumerate(out.chunk(len(self.parts[0]))):
            parts = [part[index] for part in self.parts]
            kind(parts, rows.shape, self.dtype, tuple(settings)).put_into(rows)


def _fields(words: torch.Tensor, shifts: Sequence[int], bits: int) -> torch.Tensor:
    """Numbers of so many bits that lie at these places of int32, in their order along the last dimension."""
    places = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    fields: torch.Tensor = (words[..., None] >> places & (1 << bits) - 1).to(torch.int16)
    return fields.flatten(-2)


def _each(scales: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """The scale of each of so many elements, where ``count`` of them have one."""
    return scales.repeat_interleave(count)[:numel]


def _values(codes: torch.Tensor, table: torch.Tensor, *, upper_first: bool = False) -> torch.Tensor:
    """The values of two 4-bit codes a byte, the lower one first, along the last dimension. Both
    are looked up at once."""
    table = table.to(codes.device)
    byte = torch.arange(256, device=codes.device)
    halves = (byte >> 4, byte & 0xF) if upper_first else (byte & 0xF, byte >> 4)
    pairs = table[torch.stack(halves, dim=-1)].view(_PAIRS[table.itemsize])
    found = pairs.view(-1).index_select(0, codes.flatten().int()).view(table.dtype)
    return found.view(*codes.shape[:-1], -1)


_PAIRS = {2: torch.int32, 4: torch.int64}
"""Dtypes of two numbers of so many bytes."""


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows times the scales of their groups, in their memory."""
    values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    return values


class _Linear(torch.autograd.Function):
    """``F.linear`` that keeps the weight as it is, and dequantises it for backward once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        of_x = gradient @ weight.dequantize() if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, None, of_bias


def _linear(input: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _ordinary(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantisedWeight) else value
