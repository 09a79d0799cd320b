"""Parameters that ranks hold parts of already: ``DTensor``, which tensor parallelism makes of a model's parameters.

What rests in the engine is the part of this rank, an ordinary tensor. What the model computes with is a ``DTensor``
over the memory that the unit's weights are in; so are values that are read from outside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError


class Distribution:
    """Layout of a parameter over the ranks of a mesh. Made by ``distributions_in``."""

    def __init__(self, tensor: Any) -> None:
        self.shape: torch.Size = tensor.shape
        """Of the whole parameter."""
        self.own_shape: torch.Size = local_tensor(tensor).shape
        self.mesh = tensor.device_mesh
        self.placements = tensor.placements
        self._stride = tensor.stride()

    own_attributes = frozenset[str]()
    """Attributes that the tensor itself consists of."""

    @property
    def is_sharded(self) -> bool:
        """Each rank has other elements. Else all have the same."""
        return bool(self.placements[0].is_shard())

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that have parts, as the whole program counts them."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    def over(self, own: torch.Tensor) -> torch.Tensor:
        """The whole over this rank's part of it, without a copy."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            own, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self._stride
        )

    @torch.no_grad()
    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value: a ``DTensor`` that may lie otherwise, for which all ranks call this, or an
        ordinary tensor. One that has the size of a part is a part."""
        if is_distributed(value):
            same = value.placements == self.placements  # type: ignore[attr-defined]
            return local_tensor(value if same else value.redistribute(placements=self.placements))  # type: ignore[attr-defined]
        if value.numel() == self.own_shape.numel():
            return value
        rank, dim = self.mesh.get_local_rank(), self.placements[0].dim
        parts = value.chunk(self.mesh.size(), dim)  # fewer than ranks, if there are not so many rows
        return parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)


def is_distributed(value: Any) -> bool:
    """The tensor is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it, there is none
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(value: Any) -> torch.Tensor:
    """The ordinary tensor that a ``DTensor`` has on this rank, over the same memory; any other tensor as it is."""
    if not is_distributed(value):
        return value  # type: ignore[no-any-return]
    with torch.no_grad():
        found: torch.Tensor = value.to_local()
    wait = getattr(found, "wait", None)  # a collective may still bring it
    return found if wait is None else wait()  # type: ignore[no-any-return]


def distributions_in(model: nn.Module) -> dict[int, Distribution]:
    """Layout of each ``DTensor`` of the model, by the ``id`` of the parameter.

    Raises ``ConfigError`` for a model that ``fully_shard`` has sharded, for parameters that lie over several dimensions
    of a mesh, in uneven strides, as partial sums or over other ranks than the first one, and for those without values.
    """
    tensors = [(name, parameter) for name, parameter in model.named_parameters() if is_distributed(parameter)]
    if not tensors:
        return {}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        raise ConfigError(
            "the model was sharded by fully_shard, which brings its parameters in by itself: make the engine in its "
            "place, with mesh= for the ranks to shard over"
        )
    found: dict[int, Distribution] = {}
    for name, parameter in tensors:
        own = found[id(parameter)] = _distribution(name, parameter.detach())
        first = found[id(tensors[0][1])]
        if own.members != first.members:
            raise ConfigError(
                f"parameters {tensors[0][0]} and {name} are DTensors over different ranks, {first.members} and "
                f"{own.members}: the engine holds models that are parallelised over one mesh"
            )
    return found


def _distribution(name: str, tensor: Any) -> Distribution:
    from torch.distributed.tensor import Replicate, Shard

    if len(tensor.placements) != 1 or type(tensor.placements[0]) not in (Shard, Replicate):
        raise ConfigError(
            f"parameter {name} is a DTensor that lies as {tensor.placements}: the engine holds those that "
            "parallelize_module makes, over one dimension of a mesh, sharded or replicated. It shards over "
            "data-parallel ranks by itself: mesh="
        )
    if tensor.is_meta:
        raise ConfigError(f"parameter {name} is a DTensor on the meta device: parallelise the model when it has values")
    return Distribution(tensor)


def check_peers(found: Iterable[Distribution], members: Iterable[int]) -> None:
    """Raise ``ConfigError`` if ranks that are to hold equal parameters, ``members`` of the whole program, hold
    different parts of a ``DTensor``."""
    for own in found:
        together = sorted({*own.members} & {*members})
        if len(together) > 1:
            raise ConfigError(
                f"ranks {together} have different parts of the model's DTensors, and were taken for ranks with equal "
                'parameters: give the data-parallel part of the mesh, such as mesh=world_mesh["dp"], also where that '
                "has one rank"
            )
