"""Parts that a model is cut into: the units that move together, their parameters, and large weights in pieces."""

from offload.units.distributed_tensor import Distribution, local_tensor
from offload.units.experts import Experts, FusedExperts, SeparateExperts
from offload.units.packed import Packing
from offload.units.pieces import Piece, WeightInPieces
from offload.units.shard import shard_unit
from offload.units.spec import (
    ALIGNMENT,
    GRAIN,
    ParameterSpec,
    Site,
    Tile,
    UnitSpec,
    largest_numel,
    largest_trainable_numel,
    num_nested,
)
from offload.units.wrapped import innermost

__all__ = [
    "ALIGNMENT",
    "GRAIN",
    "Distribution",
    "Experts",
    "FusedExperts",
    "Packing",
    "ParameterSpec",
    "Piece",
    "SeparateExperts",
    "Site",
    "Tile",
    "UnitSpec",
    "WeightInPieces",
    "innermost",
    "largest_numel",
    "largest_trainable_numel",
    "local_tensor",
    "num_nested",
    "shard_unit",
]
