"""Adapters and a narrow base put on a model without memory: what is trained then, and the bytes that the rest takes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.predict.activations import blocks_of
from offload.predict.variants import Base, Lora
from offload.units import GRAIN, UnitSpec
from offload.units.spec import ALIGNMENT
from swapper import align


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, layer: nn.Module, shape: tuple[int, int], rank: int) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Parameter(torch.empty(rank, shape[1]))
        self.lora_B = nn.Parameter(torch.empty(shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)
        return out


def adapted(module: nn.Module, lora: Lora) -> nn.Module:
    """A copy of the model whose own parameters are frozen, with adapters over the linear layers of its blocks.

    Raises ``ConfigError`` if it has none of the ``targets``.
    """
    module = copy.deepcopy(module).requires_grad_(False)
    found = [
        (parent, name, child, shape)
        for block in blocks_of(module) or [module]
        for parent in block.modules()
        for name, child in parent.named_children()
        if (shape := _shape_of(child)) is not None
    ]
    chosen = [one for one in found if not lora.targets or one[1] in lora.targets]
    missing = set(lora.targets) - {name for _, name, *_ in chosen}
    if missing or not chosen:
        names = ", ".join(dict.fromkeys(name for _, name, *_ in found)) or "none"
        raise ConfigError(f"--lora: no linear layer is named {', '.join(sorted(missing))}. There are: {names}")
    with torch.device("meta"):
        for parent, name, child, shape in chosen:
            setattr(parent, name, _Adapted(child, shape, lora.rank))
    return module


def _shape_of(layer: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer, also of GPT-2's, whose matrix is the other way round; None for others."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    weight: Any = getattr(layer, "weight", None)
    if type(layer).__name__ == "Conv1D" and weight is not None and weight.dim() == 2:
        return weight.shape[1], weight.shape[0]
    return None


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """Frozen matrices of the blocks: what a quantised base has in fewer bits."""
    for block in blocks_of(module):
        for parameter in block.parameters():
            if not parameter.requires_grad and parameter.dim() > 1:
                yield parameter


@functools.lru_cache(maxsize=8)
def matrix_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the largest frozen matrix in ``dtype``; of experts that of one."""
    return max((math.prod(matrix.shape[-2:]) for matrix in _matrices(module)), default=0) * dtype.itemsize


def of_base(
    units: Sequence[UnitSpec], module: nn.Module, base: Base, dtype: torch.dtype, num_ranks: int
) -> list[UnitSpec]:
    """The units with as many elements for each frozen matrix as its bytes in ``base`` fill, as for quantised ones."""
    narrow = {id(matrix) for matrix in _matrices(module)}
    return [_of_base(unit, narrow, base.bits / 8 / dtype.itemsize, GRAIN * num_ranks) for unit in units]


def _of_base(unit: UnitSpec, narrow: set[int], share: float, multiple: int) -> UnitSpec:
    specs, offset = [], unit.trainable_numel
    for spec in unit.parameters:
        if not spec.trainable:
            numel = math.ceil(spec.numel * share) if id(spec.parameter) in narrow else spec.numel
            offset = align(offset, ALIGNMENT if numel < GRAIN else GRAIN)
            spec = replace(spec, numel=numel, offset=offset)
            offset += numel
        specs.append(spec)
    return replace(unit, parameters=tuple(specs), numel=align(offset, multiple))
