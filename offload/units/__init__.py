"""What a model is cut into: the units that move together, their parameters, and large weights in pieces."""

from offload.units.packed import Packing
from offload.units.pieces import Piece, WeightInPieces
from offload.units.shard import shard_unit
from offload.units.spec import ALIGNMENT, GRAIN, ParameterSpec, Site, Tile, UnitSpec, num_nested

__all__ = [
    "ALIGNMENT",
    "GRAIN",
    "Packing",
    "ParameterSpec",
    "Piece",
    "Site",
    "Tile",
    "UnitSpec",
    "WeightInPieces",
    "num_nested",
    "shard_unit",
]
