"""Units of which a commit writes the gradients of a step, instead of all that the step has changed.

Gradients take a sixth of the bytes of weights and states (bf16 with AdamW), and what a step changes follows from them
to the bit: see [Note: The log of updates] in ``offload.checkpoint.native.update_log``. Each such unit has room for the
gradients of ``LOGGED_STEPS`` steps in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from offload.optim.formats import Formats
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.units import Tile
from swapper import align

LOGGED_STEPS = 7
"""Updates of a unit that are logged, one after the other, before its records are written again. Of AdamW in bf16 a
commit writes 3.3 bytes a parameter then, and not 12; with twice as many 2.7, for twice the room."""


_PART_BYTES = 8 << 20
"""Gradients that are one write, at most, unless a tile has more. Whoever replays a log has so many of each step."""

_T = TypeVar("_T")


def with_update_log(plan: Plan) -> Plan:
    """The plan with a log of each unit where that saves bytes: all that an update reads and writes rests in host
    memory, and the gradients take half of it at most."""
    units = (replace(item, is_logged=_saves_bytes(item, plan.formats)) for item in plan.units)
    return replace(plan, units=tuple(units))


def log_bytes(plan: Plan) -> int:
    """NVMe that the logs of all units take."""
    logged = (item for item in plan.units if item.is_logged)
    return LOGGED_STEPS * sum(sum(part_bytes(item, plan.formats)) for item in logged)


def part_bytes(item: UnitPlan, formats: Formats) -> Iterator[int]:
    """Bytes of each part that a unit's gradients are logged in."""
    tiles = [tile for tile, _ in item.tiles]
    for part in in_parts(tiles, tiles_a_part(tiles, formats.grads)):
        yield align((part[-1].stop - part[0].start) * formats.grads)


def tiles_a_part(tiles: Sequence[Tile], width: int) -> int:
    """Number of tiles whose gradients, of ``width`` bytes an element, are logged together."""
    return max(_PART_BYTES // (max(tile.numel for tile in tiles) * width), 1)


def in_parts(tiles: Sequence[_T], num_tiles: int) -> list[Sequence[_T]]:
    """The tiles of a unit, so many together."""
    return [tiles[first : first + num_tiles] for first in range(0, len(tiles), num_tiles)]


def _saves_bytes(item: UnitPlan, formats: Formats) -> bool:
    if not item.tiles or any(tier is not Tier.HOST for tier in (item.weights, item.grads, *(t for _, t in item.tiles))):
        return False
    written = item.unit.trainable_numel * formats.weights + sum(tile.nbytes for tile, _ in item.tiles)
    return 2 * item.unit.trainable_numel * formats.grads <= written
