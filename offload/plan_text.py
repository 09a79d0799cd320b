"""A plan in words and numbers, for people: where everything rests and why, and what a step will take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.plan import Plan

_MIB = 1 << 20


def describe(plan: Plan) -> str:
    """What ``print(engine.plan)`` shows."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield (
        f"{len(plan.units)} units, {plan.num_parameters:,} parameters, "
        f"{plan.model_state_bytes / _MIB:,.1f} MiB of model state"
    )
    yield f"{'kind':<10}{'B/param':>8}{'host MiB':>12}{'nvme MiB':>12}"
    numel = max(sum(item.unit.trainable_numel for item in plan.units), 1)
    for kind in plan.resident_bytes:
        host, nvme = plan.resident_bytes[kind], plan.nvme_bytes[kind]
        width = plan.formats.weights if kind == "weights" else sum(plan.memory[kind].values()) / numel
        yield f"{kind:<10}{width:>8.3g}{host / _MIB:>12,.1f}{nvme / _MIB:>12,.1f}"
    staging = plan.staging
    yield (
        f"{'staging':<10}{'':>8}{plan.staging_bytes / _MIB:>12,.1f}{'':>12}  "
        f"{staging.num_slots} weight slots, {staging.num_grad_buffers} gradient buffers, "
        f"{staging.num_tile_buffers} tiles of {staging.tile_bytes / _MIB:.2f} MiB"
    )
    yield f"host memory {plan.host_bytes / _MIB:,.1f} of {plan.host_budget_bytes / _MIB:,.1f} MiB"
    yield from _reasons(plan)
    yield _step(plan)
    if plan.device is not None:
        yield str(plan.device)


def _reasons(plan: Plan) -> Iterator[str]:
    """Why things rest where they do."""
    on_host = [item for item in plan.units if item.unit.index not in (plan.device.homes if plan.device else ())]
    if not any(plan.nvme_bytes.values()):
        if on_host:
            yield "all of it fits into host memory"
    elif plan.shadows:
        whole = sum(1 for item in on_host if not item.passes_through)
        order = ", the first one and then evenly spread" if whole else ""
        yield (
            f"{whole} of {len(on_host)} units rest in RAM with all that belongs to them{order}; those on NVMe are "
            "updated during backward"
        )
    else:
        yield (
            "weights come to RAM first (a byte there saves 3 of traffic a step), then gradients and states (2), evenly "
            "spread over the units"
        )
    if any(item.unit.reused for item in on_host):
        yield "the tied weight in pieces and its gradients rest in RAM: each place that uses it would bring it in anew"
    if plan.nvme_bytes["grads"]:
        yield "gradients are spilled to NVMe: the budget is below what would keep them all in RAM"
    if plan.vacant_bytes:
        in_ram, on_nvme = (nbytes / _MIB for nbytes in plan.vacant_bytes.values())
        yield f"empty, of units that are on the device now: {in_ram:,.1f} MiB of RAM, {on_nvme:,.1f} on NVMe"


def _step(plan: Plan) -> str:
    """What a step moves, and how long that must take."""
    line = f"a step reads {plan.step_read_bytes / _MIB:,.1f} and writes {plan.step_write_bytes / _MIB:,.1f} MiB"
    if not plan.seconds:
        return line
    limit = max(plan.seconds, key=lambda name: plan.seconds[name])
    taken = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in plan.seconds.items())
    until = "" if "compute" in plan.seconds else "; compute is known after a step"
    return f"{line}: {plan.seconds[limit]:.3g} s or more, limited by {limit} ({taken}{until})"
