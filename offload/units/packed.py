"""Quantised parameters: tensors that wrap others, such as torchao's. What the engine stores is the others' bytes.

The class of such a tensor says by ``__tensor_flatten__`` which tensors it wraps, and by ``__tensor_unflatten__`` how to
make one of them. Their bytes lie one after the other among a unit's frozen weights, and nobody looks into them. What
the model computes with is a tensor of the same class, made anew over the memory that the unit's weights are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.quantised import QuantisedWeight
from swapper import align

_ALIGNMENT_BYTES = 64
"""Each wrapped tensor begins at a multiple of this: a cache line, and a multiple of every dtype's width."""

_OF_BITSANDBYTES = ("Params4bit", "Int8Params")


@dataclass(frozen=True)
class _Plain:
    """An ordinary tensor that is wrapped: ``offset`` in bytes, from the parameter's first."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def over(self, content: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
        part = content[self.offset : self.offset + self.nbytes].view(self.dtype)
        tensor = part.as_strided(self.shape, self.stride)
        return tensor.clone() if copied else tensor


@dataclass(frozen=True)
class _Wrapper:
    """A tensor that wraps others. ``context`` is what its class wants to know beside them."""

    kind: Any
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    wrapped: Mapping[str, _Plain | _Wrapper]

    def over(self, content: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
        inner = {name: item.over(content, copied=copied) for name, item in self.wrapped.items()}
        tensor: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)
        return tensor.detach()  # some remember that what they were made of required grad

    def like(self) -> Any:
        """Such a tensor on the meta device."""
        inner = {
            name: item.like()
            if isinstance(item, _Wrapper)
            else torch.empty(item.shape, dtype=item.dtype, device="meta")
            for name, item in self.wrapped.items()
        }
        return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)

    def plain(self, tensor: torch.Tensor) -> Iterator[tuple[_Plain, torch.Tensor]]:
        """Each ordinary tensor, with what is known of it."""
        for name, item in self.wrapped.items():
            inner = getattr(tensor, name)
            if isinstance(item, _Wrapper):
                yield from item.plain(inner)
            else:
                yield item, inner


class Packing:
    """Layout of the tensors that a parameter wraps in its bytes. Made by ``packing_of``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kind: type[torch.Tensor] = type(tensor)
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        """Dtype that the model takes it for."""
        self._outer, self.nbytes = _wrapper_of(tensor, 0)
        self.own_attributes = frozenset(vars(tensor))
        """Attributes that each tensor of this class and structure has; all else is something that others have hung on
        it."""
        self._of_rows: dict[int, Packing] = {}
        """By their number: thousands of experts have one."""

    @property
    def is_of_files(self) -> bool:
        """Its bytes lie in weights files as they are: the tensor can be without values."""
        return issubclass(self.kind, QuantisedWeight)

    @property
    def has_rows(self) -> bool:
        """It stands for several weights, of which some can be taken by themselves."""
        return self.is_of_files and self._outer.like().has_rows

    def rows(self, start: int, stop: int) -> Packing:
        """The packing of some of them, the same for as many others."""
        count = stop - start
        if count not in self._of_rows:
            self._of_rows[count] = Packing(self._outer.like().rows(start, stop))
        return self._of_rows[count]

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the byte ranges of these rows among those of all: first, behind the last, and the first's place in
        ``rows(start, stop)``."""
        own = self.rows(start, stop)._outer.wrapped.values()
        for item, rows in zip(self._outer.wrapped.values(), own, strict=True):
            assert isinstance(item, _Plain) and isinstance(rows, _Plain)
            row_bytes = item.nbytes // item.shape[0]
            yield item.offset + start * row_bytes, item.offset + stop * row_bytes, rows.offset

    def offsets(self, tensor: torch.Tensor) -> list[int]:
        """Return the first byte of each ordinary tensor that ``tensor`` wraps, in order."""
        return [item.offset for item, _ in self._outer.plain(tensor)]

    def __str__(self) -> str:
        """The same for two tensors if the bytes of one can be those of the other."""
        return _said(self._outer)

    def fits(self, tensor: torch.Tensor) -> bool:
        """The tensor has the same class and structure."""
        return type(tensor) is self.kind and str(Packing(tensor)) == str(self)

    def knows(self, name: str) -> bool:
        """Tensors of this class have the attribute or method."""
        return name in self.own_attributes or hasattr(self.kind, name)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of such a tensor: a copy in its device's memory, ``(nbytes,)``, uint8."""
        content = torch.zeros(self.nbytes, dtype=torch.uint8, device=tensor.device)
        for item, inner in self._outer.plain(tensor):
            item.over(content).copy_(inner)
        return content

    def over(self, content: torch.Tensor) -> torch.Tensor:
        """A tensor of this structure over ``content``, uint8 and ``(nbytes,)``, without a copy."""
        return self._outer.over(content)

    def copied(self, content: torch.Tensor) -> torch.Tensor:
        """The same with memory of its own for each tensor that it wraps: ``torch.save`` refuses memory that is shared
        by dtypes."""
        return self._outer.over(content, copied=True)


def packing_of(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Packing | None:
    """Return the packing of a quantised parameter; None for an ordinary one. ``dtype`` is that of the engine's weights.

    Raises ``ConfigError`` for a parameter of a class that cannot be stored: sharded, quantised by ``bitsandbytes``,
    quantised and to be trained, of another dtype, or without values.
    """
    if any(kind.__name__ in _OF_BITSANDBYTES for kind in type(parameter).__mro__):
        raise ConfigError(
            f"parameter {name} is quantised by bitsandbytes ({type(parameter).__name__}), which keeps a part of its "
            "values beside it: the engine brings in weights of Linear4bit that are quantised already, by "
            "model.to(device), without weights=. Or quantise the frozen base with torchao: Int8WeightOnlyConfig, or "
            "to_nf4 for 4 bits."
        )
    value = parameter.detach()
    if type(value) is torch.Tensor:
        return None
    kind = type(value).__name__
    if not hasattr(value, "__tensor_flatten__") or type(value).__module__.startswith("torch.distributed"):
        raise ConfigError(
            f"parameter {name} is a {kind}: the engine holds ordinary tensors, and quantised ones that are frozen. "
            "Make the engine before the model is sharded, or without that."
        )
    if parameter.requires_grad:
        raise ConfigError(
            f"parameter {name} is a {kind} and requires grad: a quantised parameter can only be frozen. Call "
            "parameter.requires_grad_(False) and train an adapter over it, or train the model before it is quantised."
        )
    if value.dtype != dtype:
        raise ConfigError(
            f"parameter {name} is a {kind} that stands for {value.dtype}, and the engine's weights are {dtype}: "
            "convert the model to that before it is quantised, or set precision=."
        )
    packing = Packing(value)
    if value.is_meta and not packing.is_of_files:
        raise ConfigError(f"parameter {name} is a {kind} on the meta device: quantise the model when it has values")
    return packing


def _wrapper_of(tensor: torch.Tensor, offset: int) -> tuple[_Wrapper, int]:
    """Description of a tensor that wraps others, and where the bytes of the next one begin."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    wrapped: dict[str, _Plain | _Wrapper] = {}
    for name in names:
        inner = getattr(tensor, name)
        if hasattr(inner, "__tensor_flatten__"):
            wrapped[name], offset = _wrapper_of(inner, offset)
            continue
        dense = torch.empty_like(inner, device="meta")  # where elements share memory or leave gaps, the copy does not
        plain = _Plain(inner.dtype, inner.shape, dense.stride(), offset)
        wrapped[name] = plain
        offset += align(plain.nbytes, _ALIGNMENT_BYTES)
    return _Wrapper(type(tensor), context, tensor.shape, tensor.stride(), wrapped), offset


def _said(item: _Plain | _Wrapper) -> str:
    if isinstance(item, _Plain):
        return f"{str(item.dtype).removeprefix('torch.')}{tuple(item.shape)}{item.stride}"
    inner = ", ".join(f"{name}={_said(wrapped)}" for name, wrapped in item.wrapped.items())
    return f"{item.kind.__name__}({inner}; {item.context})"
