"""A plan in words and numbers, for people."""

from __future__ import annotations

from collections.abc import Iterator

from offload.plan.plan import Drives, Plan, Tier
from offload.plan.routing import EVERYWHERE

_MIB = 1 << 20

_NAMES = {"nvme": "nvme MiB", "host": "host MiB", "device": "device MiB"}


def lines(plan: Plan) -> Iterator[str]:
    """Its table, and what is to be said of it."""
    yield (
        f"{len(plan.units)} units, {plan.num_parameters:,} parameters, "
        f"{plan.model_state_bytes / _MIB:,.1f} MiB of model state{' on this rank' if plan.ranks.gathers else ''}"
    )
    yield from _table(plan)
    if parts := _staging(plan):
        yield f"staging: {parts}"
    yield f"host memory {plan.host_bytes / _MIB:,.1f} of {plan.host_budget_bytes / _MIB:,.1f} MiB"
    yield from _reasons(plan)
    yield from _step(plan)
    if plan.device.computes:
        yield str(plan.device)


def _table(plan: Plan) -> Iterator[str]:
    """Bytes of each kind in each tier, and in all. What is nowhere has no row."""
    tiers = ["device", "host", "nvme"] if plan.device.computes else ["host", "nvme"]
    rows = {kind: places for kind, places in plan.memory.items() if any(places.values())}
    trained = max(sum(item.unit.trainable_numel for item in plan.units), 1)
    rows["in all"] = {tier: sum(places.get(tier, 0) for places in rows.values()) for tier in tiers}
    yield f"{'kind':<14}{'B/param':>8}" + "".join(f"{_NAMES[tier]:>14}" for tier in tiers)
    for kind, places in rows.items():
        width = ""
        if kind in plan.resident_bytes:
            each = plan.formats.weights if kind == "weights" else sum(places.values()) / trained
            width = f"{each:.3g}"
        yield f"{kind:<14}{width:>8}" + "".join(f"{places.get(tier, 0) / _MIB:>14,.1f}" for tier in tiers)


def _staging(plan: Plan) -> str:
    """The buffers that there are."""
    staging = plan.staging
    counts = {
        f"weight slots of {_size(staging.slot_bytes)}": staging.num_slots,
        f"gradient buffers of {_size(staging.grad_buffer_bytes)}": staging.num_grad_buffers,
        f"tile buffers of {_size(staging.tile_buffer_bytes)}": staging.num_tile_buffers,
    }
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    ranks = plan.ranks
    compute_bytes = plan.compute_bytes - ranks.nbytes - plan.activation_bytes
    if compute_bytes:
        parts.append(f"{_size(compute_bytes)} for {'gradients as they come' if plan.formats.grads else 'copies'}")
    if plan.activation_bytes:
        parts.append(f"{_size(plan.activation_bytes)} for activations")
    if ranks.nbytes:
        what = "whole units and their gradients" if plan.formats.grads else "whole units"
        parts.append(f"{_size(ranks.nbytes)} for {what}, of which {ranks.num_ranks} ranks have shards")
    return ", ".join(parts)


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f} MiB" if nbytes >= _MIB // 10 else f"{nbytes / 1024:,.0f} KiB"


def _reasons(plan: Plan) -> Iterator[str]:
    """Reasons why things rest where they do."""
    on_host = [item for item in plan.units if item.unit.index not in plan.device.resident]
    training = bool(plan.formats.grads)
    if not plan.streams:
        if on_host:
            yield "all of it fits into host memory"
    elif plan.speculative:
        streamed = sum(1 for item in on_host if item.streamed)
        yield (
            f"{streamed} of {len(on_host)} units rest on NVMe with weights and states, evenly spread, and are updated "
            "during backward"
            if streamed
            else "every unit has weights or states in RAM, and is updated after the step is certain"
        )
    elif training:
        yield (
            "weights come to RAM first (a byte there saves 3 of traffic a step), then states or gradients (2), evenly "
            "spread over the units"
        )
    else:
        in_ram = sum(1 for item in on_host if item.weights is Tier.HOST)
        yield (
            f"the weights of {in_ram} of {len(on_host)} units rest in RAM, evenly spread"
            if in_ram
            else "no weights rest in RAM"
        )
    spared = sum(item.has_spares for item in on_host)
    if spared:
        yield f"{spared} of {len(on_host)} units have spare places in RAM, and are updated during backward"
    if streamed_experts := _streamed_experts(plan):
        told = "" if plan.routing is EVERYWHERE else f" (a forward is sent to {plan.routing.touched:.1%} of them)"
        yield f"{streamed_experts} experts rest on NVMe: those that a batch has no token for are not read{told}"
    if any(item.unit.reused for item in on_host):
        gradients = " and its gradients rest" if training else " rests"
        yield f"the tied weight in pieces{gradients} in RAM: each place that uses it would bring it in anew"
    if plan.spare_copy_bytes and training:
        second = f"{plan.spare_copy_bytes / _MIB:,.1f} MiB"
        if plan.record_copies == 2:
            yield "trained records on NVMe have a spare copy each: no write overwrites current bytes"
        else:
            yield (
                f"trained records on NVMe are written in place, for want of {second} more: a write that fails loses "
                "its record, and no update begins during backward"
            )
    if plan.in_place_bytes:
        names = [str(file.path) for file in plan.files]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"{_size(plan.in_place_bytes)} of frozen weights are read where they are, in {', '.join(names[:3])}{more}: "
            "they take no room under nvme_path, and are never written"
        )
    if plan.nvme_bytes["grads"]:
        yield "gradients are spilled to NVMe: the budget is below what would keep them all in RAM"
    if plan.vacant_bytes:
        vacant_ram, vacant_nvme = (nbytes / _MIB for nbytes in plan.vacant_bytes.values())
        yield f"empty, of units that are on the device now: {vacant_ram:,.1f} MiB of RAM, {vacant_nvme:,.1f} on NVMe"


def _streamed_experts(plan: Plan) -> int:
    """Number of experts that rest on NVMe."""
    return sum(item.unit.count for item in plan.units if item.unit.experts is not None and item.weights is Tier.NVME)


def _step(plan: Plan) -> Iterator[str]:
    """Bytes that a step moves, by what means, and the time that it must take."""
    what = "step" if plan.formats.grads else "forward"
    if not plan.streams:
        yield f"a {what} moves nothing to or from NVMe"
    else:
        written = f" and writes {plan.step_write_bytes / _MIB:,.1f}" if plan.step_write_bytes else ""
        reads = "reads" if plan.routing is not EVERYWHERE or not _streamed_experts(plan) else "reads at most"
        moved = f"{reads} {plan.step_read_bytes / _MIB:,.1f}{written} MiB in {plan.step_transfers:,} transfers"
        yield f"a {what} {moved}{_through(plan.drives)}"
    taken = {name: seconds for name, seconds in plan.seconds.items() if seconds > 0}
    if not taken:
        return
    limit = max(taken, key=lambda name: taken[name])
    others = [f"{name} {seconds:.3g} s" for name, seconds in taken.items() if name != limit]
    beside = f" (beside it {', '.join(others)})" if others else ""
    until = "" if "compute" in taken else "; compute is known after a step"
    yield f"that takes {taken[limit]:.3g} s or more, limited by {limit}{beside}{until}"


def _through(drives: Drives | None) -> str:
    if drives is None:
        return ""
    rates = drives.bandwidths
    source = "by the stored profile" if rates.stored else "measured at the start"
    return (
        f", by {drives.backend}: {rates.read / 1e9:.2f} GB/s read and {rates.write / 1e9:.2f} GB/s written ({source}), "
        f"{'one after the other' if rates.q < 1.1 else 'partly at once'}"
    )
