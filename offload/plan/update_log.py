"""Units of which a commit writes the gradients of a step, instead of all that the step has changed.

Gradients take a sixth of the bytes of weights and states (bf16 with AdamW), and what a step changes follows from them
to the bit: see [Note: The log of updates] in ``offload.checkpoint.native.update_log``. Each such unit has room for the
gradients of ``LOGGED_STEPS`` steps in the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload.optim.formats import Formats
from offload.plan.plan import Plan, Tier, UnitPlan
from swapper import align

LOGGED_STEPS = 7
"""Updates of a unit that are logged, one after the other, before its records are written again. Of AdamW in bf16 a
commit writes 3.3 bytes a parameter then, and not 12; with twice as many 2.7, for twice the room."""


def with_update_log(plan: Plan) -> Plan:
    """The plan with a log of each unit where that saves bytes: all that an update reads and writes rests in host
    memory, and the gradients take half of it at most."""
    units = (replace(item, is_logged=_saves_bytes(item, plan.formats)) for item in plan.units)
    return replace(plan, units=tuple(units))


def log_bytes(plan: Plan) -> int:
    """NVMe that the logs of all units take."""
    logged = (item for item in plan.units if item.is_logged)
    return LOGGED_STEPS * sum(sum(gradient_bytes(item, plan.formats)) for item in logged)


def gradient_bytes(item: UnitPlan, formats: Formats) -> Iterator[int]:
    """Bytes of the gradients of each tile of a unit."""
    return (align(tile.numel * formats.grads) for tile, _ in item.tiles)


def _saves_bytes(item: UnitPlan, formats: Formats) -> bool:
    if not item.tiles or any(tier is not Tier.HOST for tier in (item.weights, item.grads, *(t for _, t in item.tiles))):
        return False
    written = item.unit.trainable_numel * formats.weights + sum(tile.nbytes for tile, _ in item.tiles)
    return 2 * item.unit.trainable_numel * formats.grads <= written
