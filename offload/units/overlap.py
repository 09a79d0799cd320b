"""Parameters that look into each other's memory, or at one place of it several times: the engine would move and update
each, and each element, by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError


class _Range(NamedTuple):
    """Range in memory where a parameter's elements lie."""

    device: str
    start: int
    end: int
    name: str
    parameter: nn.Parameter


def check_memory_is_distinct(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ``ConfigError`` if two of these named parameters overlap in memory and one of them is to be trained, or if
    elements of one that is to be trained do.

    In PyTorch an update of one is an update of the other. Weights that lie side by side in one memory do not overlap.
    """
    parameters = [(name, p) for name, p in parameters if p.numel() and _has_memory(p)]
    for name, parameter in parameters:
        if parameter.requires_grad and _overlaps_itself(parameter):
            raise ConfigError(
                f"parameter {name} has several elements at one place of memory (strides {parameter.stride()}), which "
                "cannot be trained by themselves. Make the tensor that it was expanded from the parameter, and expand "
                "that in forward; or give each element a place of its own: nn.Parameter(parameter.detach().clone())"
            )
    ranges = [_range_of(name, p) for name, p in parameters]
    ranges.sort(key=lambda item: item[:3])
    farthest: _Range | None = None
    for found in ranges:
        if farthest is None or farthest.device != found.device:
            farthest = found
        elif found.start < farthest.end and (farthest.parameter.requires_grad or found.parameter.requires_grad):
            raise ConfigError(
                f"parameters {farthest.name} and {found.name} share memory and are two: the engine would train each by "
                f"itself. Tie them, so that they are one ({found.name} = {farthest.name}), or give one a clone()."
            )
        elif found.end > farthest.end:
            farthest = found


def _has_memory(parameter: nn.Parameter) -> bool:
    """It is where ``data_ptr`` says: a quantised one wraps tensors that are elsewhere."""
    is_ordinary = parameter.layout is torch.strided and not hasattr(parameter, "__tensor_flatten__")
    return is_ordinary and not parameter.is_meta


def _overlaps_itself(parameter: nn.Parameter) -> bool:
    dimensions = [(step, num) for step, num in zip(parameter.stride(), parameter.shape, strict=True) if num > 1]
    span = 1
    for stride, length in sorted(dimensions):
        if stride < span:
            break
        span += (length - 1) * stride
    else:
        return False
    offsets = torch.zeros(1, dtype=torch.int64)  # of steps that interlock: which elements are where
    for stride, length in dimensions:
        offsets = (offsets[:, None] + stride * torch.arange(length)).flatten()
    return bool(offsets.unique().numel() < parameter.numel())


def _range_of(name: str, parameter: nn.Parameter) -> _Range:
    span = sum((length - 1) * stride for length, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
    start = parameter.data_ptr()
    return _Range(str(parameter.device), start, start + span * parameter.element_size(), name, parameter)
