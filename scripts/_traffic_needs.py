"""Bytes that a step has to read and write, worked out from PyTorch alone.

A program runs on its plain model, and every operation that takes a parameter's memory is noted: the order in which
units are needed, forward and backward. How often a unit must come then is what a cache needs that knows the future,
step after step (the unit whose next use is farthest away leaves). Of the engine only the placement counts: which record
is stored where, and the number of slots, one of which is for what comes next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.plan.plan import Plan, Tier, UnitPlan

_VIEWS = {"t", "view", "detach", "transpose", "alias", "unsqueeze", "squeeze", "expand", "select", "slice", "permute"}
_VIEWS |= {"_unsafe_view", "as_strided", "split", "chunk", "unbind", "_reshape_alias", "_local_scalar_dense"}


class Uses(TorchDispatchMode):
    """Notes, in order, the names of parameters whose values are needed, of those that the model has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
        self._name_of = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _VIEWS:
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided:
                    name = self._name_of.get(leaf.untyped_storage().data_ptr())
                    if name is not None and self.names[-1:] != [name]:
                        self.names.append(name)
        return out


@dataclass
class Plain:
    """What a program is given to train in PyTorch: the model, whose gradients a step drops."""

    model: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self) -> None:
        self.updated = {name for name, value in self.model.named_parameters() if value.grad is not None}
        self.model.zero_grad()

    def together(self, batches: Sequence[Any], run: Callable[[Any], Any]) -> list[Any]:
        return [run(batch) for batch in batches]


@dataclass(frozen=True)
class Needs:
    """Of a program's step: parameters in the order in which they are needed, and those that it updates."""

    order: tuple[str, ...]
    updated: frozenset[str]
    num_backwards: int

    @classmethod
    def of(cls, model: nn.Module, step: Callable[[Any, int], None], index: int) -> Needs:
        plain, backwards = Plain(model), 0
        run = plain.backward

        def counted(loss: torch.Tensor, **options: Any) -> None:
            nonlocal backwards
            backwards += 1
            run(loss, **options)

        plain.backward = counted  # type: ignore[method-assign]
        with Uses(model) as uses:
            step(plain, index)
        return cls(tuple(uses.names), frozenset(getattr(plain, "updated", ())), backwards)


@dataclass(frozen=True)
class Bytes:
    """Bounds of a step's bytes, and of its transfers."""

    weights_read: float
    """With a cache that knows the future."""
    weights_read_each: float
    """With one that holds no unit beyond its use: each run of uses reads it once more."""
    weights_written: float
    states: float
    """Read, and written."""
    grads: float
    """Written and read by each backward, of those that are spilled."""
    frozen: float
    """Bytes of frozen weights on NVMe."""


def bound(plan: Plan, needs: Needs) -> Bytes:
    """Bytes of a step that has these needs, where records are stored as the plan says."""
    units_of: dict[str, list[UnitPlan]] = {}
    for item in plan.units:
        for spec in item.unit.parameters:
            units_of.setdefault(spec.name if spec.piece is None else spec.piece.whole.name, []).append(item)
    used = [item.unit.index for name in needs.order for item in units_of[name]]
    away = {item.unit.index for item in plan.units if item.weights is Tier.NVME}
    order = [index for at, index in enumerate(used) if index in away and (not at or used[at - 1] != index)]
    size = {item.unit.index: item.unit.read_bytes(plan.formats.weights) for item in plan.units}
    touched = {item.unit.index for name in needs.updated for item in units_of[name]}
    # An update needs its unit's weights, too, at any time from its last use in a step to the first in the next one.
    order += [index for index in sorted(touched & away) if index not in set(order)]
    of_touched = [item for item in plan.units if item.unit.index in touched]
    return Bytes(
        weights_read=sum(size[index] for index in _misses(order, plan.staging.num_slots - 1)),
        weights_read_each=sum(size[index] for index in order),
        weights_written=sum(i.unit.trainable_numel for i in of_touched if i.weights is Tier.NVME)
        * plan.formats.weights,
        states=sum(_padded(tile.nbytes) for i in of_touched for tile, tier in i.tiles if tier is Tier.NVME),
        grads=sum(i.unit.trainable_numel for i in of_touched if i.grads is Tier.NVME) * plan.formats.grads,
        frozen=sum(i.unit.numel - i.unit.trainable_numel for i in plan.units if i.weights is Tier.NVME)
        * plan.formats.weights,
    )


def _misses(order: Sequence[int], num_slots: int) -> Iterable[int]:
    """Those that have to come in a step whose uses are these, of many such steps, into so many slots."""
    cycle = list(order) * 4
    positions: dict[int, list[int]] = {}
    for at, index in enumerate(cycle):
        positions.setdefault(index, []).append(at)
    present: set[int] = set()
    missed = []
    for at, index in enumerate(cycle):
        if index in present:
            continue
        if 2 * len(order) <= at < 3 * len(order):
            missed.append(index)
        if len(present) >= max(num_slots, 1):
            present.remove(max(present, key=lambda other: _next(positions[other], at, len(cycle))))
        present.add(index)
    return missed


def _next(positions: Sequence[int], at: int, never: int) -> int:
    after = bisect_right(positions, at)
    return positions[after] if after < len(positions) else never


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
