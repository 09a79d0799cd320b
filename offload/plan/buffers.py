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
    of_each_size = {(tile.nbytes, tile.stop - tile.start, tile.count): tile for tile in tiles if tile.nbytes}
    return NUM_DEVICE_TILES * max(
        (sum(tile_parts(tile, formats)) // tile.count for tile in of_each_size.values()), default=0
    )


def tile_sizes(tile: Tile, formats: Formats) -> tuple[int, int, int]:
    """Bytes of a tile's states, weights and gradients."""
    return tile.nbytes, tile.numel * formats.weights, tile.numel * formats.grads


def tile_parts(tile: Tile, formats: Formats) -> tuple[int, int, int]:
    """The same, in whole pages."""
    states, weights, grads = tile_sizes(tile, formats)
    return align(states), align(weights), align(grads)


class SquaresOf:
    """Sums of squares of some units, for a choice of those that are resident on a device."""

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        blocks = [(unit.index, [_blocks_of(spec) for spec in unit.trainable]) for unit in units]
        self._num_ranges = sum(len(of_unit) for _, of_unit in blocks)
        self._blocks = [(index, sum(of_unit), max(of_unit, default=0)) for index, of_unit in blocks]
        """Of each unit: its index, all of its blocks, and those of one parameter."""

    def nbytes(self, resident: Collection[int]) -> int:
        """Device memory that they take where ``resident`` are resident there."""
        of_groups = (together if index in resident else most for index, together, most in self._blocks)
        return sum(_squares_parts(self._num_ranges, max(of_groups, default=0)))


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
    return _squares_parts(sum(map(len, groups)), max(map(num_blocks, groups), default=0))


def _squares_parts(num_ranges: int, most_blocks: int) -> tuple[int, int, int]:
    num_lanes = most_blocks * SQUARES_LANES
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
