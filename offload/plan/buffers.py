"""Sizes of the engine's own buffers in a device's memory, and how they are divided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from offload.kernels import SQUARES_BLOCK, SQUARES_LANES
from offload.optim.formats import Formats
from offload.units import ParameterSpec, Tile, UnitSpec
from swapper import align

NUM_LANDINGS = 2
"""Buffers in host memory for gradients from a device that must be added up: one is added while the next one comes."""

NUM_DEVICE_TILES = 2
"""Tiles under update on a device at a time: while one comes the other leaves."""

SquaresGroup = tuple[ParameterSpec, ...]
"""Parameters whose gradients lie in one piece of memory, each as far from the first as in its unit."""


def device_tile_bytes(tiles: Iterable[Tile], formats: Formats) -> int:
    """Device memory that updates of tiles as large as these take. A tile without states is not worth the way: 0."""
    return NUM_DEVICE_TILES * max(
        (sum(tile_parts(tile, formats)) // tile.count for tile in tiles if tile.nbytes), default=0
    )


def tile_sizes(tile: Tile, formats: Formats) -> tuple[int, int, int]:
    """Bytes of a tile's states, weights and gradients."""
    return tile.nbytes, tile.numel * formats.weights, tile.numel * formats.grads


def tile_parts(tile: Tile, formats: Formats) -> tuple[int, int, int]:
    """The same, in whole pages."""
    states, weights, grads = tile_sizes(tile, formats)
    return align(states), align(weights), align(grads)


def squares_bytes(units: Sequence[UnitSpec], resident: Collection[int]) -> int:
    """Device memory that sums of squares take for these units, of which ``resident`` are resident there."""
    return sum(squares_parts(squares_groups(units, resident)))


def squares_groups(units: Sequence[UnitSpec], resident: Collection[int]) -> list[SquaresGroup]:
    """The parameters whose squares are added up together: those of a resident unit; else each by itself."""
    groups: list[SquaresGroup] = []
    for unit in units:
        if unit.index in resident:
            groups.append(unit.trainable)
        else:
            groups += [(spec,) for spec in unit.trainable]
    return groups


def squares_parts(groups: Sequence[SquaresGroup]) -> tuple[int, int, int]:
    """Bytes of the ranges, of the lanes (which the groups use in turn), and of the sums."""
    num_ranges = sum(len(group) for group in groups)
    num_lanes = max((num_blocks(group) for group in groups), default=0) * SQUARES_LANES
    return align(num_ranges * 24), align(num_lanes * 8), align(num_ranges * 8)


def squares_rows(group: SquaresGroup) -> list[tuple[int, int, int]]:
    """Start, length and first block of each parameter."""
    rows, block = [], 0
    for spec in group:
        rows.append((spec.offset - group[0].offset, spec.numel, block))
        block += _blocks_of(spec)
    return rows


def num_blocks(group: SquaresGroup) -> int:
    """Blocks of elements whose squares are added up by themselves first."""
    return sum(_blocks_of(spec) for spec in group)


def _blocks_of(spec: ParameterSpec) -> int:
    return -(-spec.numel // SQUARES_BLOCK)
