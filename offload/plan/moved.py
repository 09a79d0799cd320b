"""Bytes that each unit of a plan moves over NVMe in a step, and the places that it passes through: what is played."""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.plan import Plan, Tier, UnitPlan
from offload.play.schedule import Places


@dataclass(frozen=True)
class UnitBytes:
    """Bytes that one unit moves over NVMe in a step: its weights, for a forward or a backward; those that its update
    reads, and of them those that are trained; its states; its gradients. Of experts as many as are expected."""

    weights: float
    updated: float
    trained: float
    states: float
    grads: float
    in_memory: float
    """Traffic of its update in host memory."""

    @classmethod
    def of(cls, item: UnitPlan, plan: Plan) -> UnitBytes:
        """Count them by the tiers of its records."""
        unit, on_nvme, formats = item.unit, Tier.NVME, plan.formats
        if item.weights is Tier.DEVICE:
            return cls(0, 0, 0, 0, 0, 0)
        changed, used = plan.routing.changed(unit), plan.routing.used(unit)
        states = sum(tile.nbytes for tile, _ in item.tiles)
        sweep = formats.update_bytes(states, unit.trainable_numel)
        weights = unit.read_bytes(formats.weights) * (item.weights is on_nvme)
        return cls(
            weights * used,
            weights * (changed if unit.trainable_numel else used),
            changed * unit.trainable_numel * formats.weights * (item.weights is on_nvme),
            changed * sum(tile.nbytes for tile, tier in item.tiles if tier is on_nvme),
            changed * unit.trainable_numel * formats.grads * (item.grads is on_nvme),
            changed * sweep if unit.trainable_numel else 0,
        )


def num_tiles(item: UnitPlan) -> int:
    """Tiles of its states on NVMe."""
    return sum(tile.count for tile, tier in item.tiles if tier is Tier.NVME)


def places_of(plan: Plan) -> Places:
    """Places that the plan has for units on their way."""
    windows = len(plan.units)
    if plan.device.all_bytes:
        offloaded = len(plan.units) - (0 if plan.ranks.gathers else len(plan.device.resident))
        windows = max(int(plan.device.weights_bytes / plan.device.all_bytes * offloaded), 2)
    whole = windows if plan.ranks.device else len(plan.ranks.places)
    return Places(plan.staging.num_slots or len(plan.units), windows, whole, plan.staging.num_grad_buffers)
