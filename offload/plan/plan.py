"""The plan: the tier of every record, the buffers that the others pass through, and what a step moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.optim.formats import Formats
from offload.plan.device import MARGIN, ON_HOST, DeviceNeeds, DevicePlan, plan_device
from offload.plan.passing import returning, times_read
from offload.plan.ranks import ONE_RANK, RanksPlan
from offload.plan.routing import EVERYWHERE, Routing
from offload.plan.unit_plan import Drives, Staging, Tier, TilesOf, UnitPlan, shown_bytes
from offload.units import UnitSpec
from offload.units.spread import spread_rank
from swapper import ReadOnlyFile, align

__all__ = ["Drives", "Plan", "Staging", "Tier", "TilesOf", "UnitPlan"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Placement of everything, the staging, and the bytes that a step must move. ``print`` it for the whole table."""

    units: tuple[UnitPlan, ...]
    formats: Formats
    staging: Staging
    host_budget_bytes: int
    compute_bytes: int
    """Memory that compute takes beside: the gradient that autograd has just made, copies of the weights in use where
    torch cannot use them where they are; or buffers that gradients come to from a device."""
    activation_bytes: int = 0
    """The part of it that is set aside for activations."""
    record_copies: int = 1
    """Copies of each trained record that NVMe has room for: with 2 a write never overwrites what is current."""
    speculative: bool = False
    """Streamed units are updated during backward, which takes two copies."""
    ranks: RanksPlan = ONE_RANK
    """Memory that a rank takes for whole units, where there are several ranks and ``units`` are its shards."""
    device: DevicePlan = ON_HOST
    """Memory that the engine may hold on a device."""
    routing: Routing = EVERYWHERE
    """Experts that tokens are sent to, where it is known: a step reads no others."""
    passes: int = 1
    """Forwards and backwards of a step for which weights come anew: its micro-batches; those that run together are
    one."""
    first_uses: tuple[float, ...] = ()
    """When a step uses each unit first; before a step was seen nobody knows."""
    vacant_bytes: dict[Tier, int] = field(default_factory=dict)
    """Reserved for units that have moved to a device since."""
    drives: Drives | None = None
    """Mover of NVMe's bytes, once the engine is made."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that a step takes of NVMe at the measured bandwidth, and of compute once a step was taken."""

    @cached_property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each kind that are stored in host memory."""
        return self._bytes_in(Tier.HOST)

    @cached_property
    def nvme_bytes(self) -> dict[str, int]:
        """Bytes of each kind that are stored on NVMe."""
        return self._bytes_in(Tier.NVME)

    @cached_property
    def in_place_bytes(self) -> int:
        """Bytes of frozen weights that are read from the files that they were given in, and stored nowhere else."""
        units = (item.unit for item in self.units if item.weights is Tier.NVME)
        return sum(unit.numel - unit.stored_numel for unit in units) * self.formats.weights

    @property
    def files(self) -> tuple[ReadOnlyFile, ...]:
        """Files that frozen weights are read from in place."""
        units = (item.unit for item in self.units if item.weights is Tier.NVME)
        return tuple(dict.fromkeys(part.file for unit in units for part in unit.in_files))

    @property
    def streams(self) -> bool:
        """Something of the model state is not in memory between uses."""
        return any(self.nvme_bytes.values()) or self.in_place_bytes > 0

    def _bytes_in(self, tier: Tier) -> dict[str, int]:
        formats, units = self.formats, self.units
        tiles = (tile for item in units for tile, of_tile in item.tiles if of_tile is tier)
        weights = (item.unit for item in units if item.weights is tier)
        return {
            "weights": sum(unit.stored_numel if tier is Tier.NVME else unit.numel for unit in weights)
            * formats.weights,
            "grads": sum(item.unit.trainable_numel for item in units if item.grads is tier) * formats.grads,
            "states": sum(align(tile.nbytes) for tile in tiles),
        }

    @property
    def spare_host_bytes(self) -> int:
        """Host memory of the spare places that units in RAM have."""
        return sum(item.spare_bytes(self.formats) for item in self.units if item.has_spares)

    @property
    def updates_early(self) -> bool:
        """Some units can be updated during backward, before their step is certain."""
        return self.speculative or any(item.has_spares for item in self.units)

    @property
    def spare_copy_bytes(self) -> int:
        """NVMe that spare copies of all trained records take, or would take."""
        weights = sum(i.unit.trainable_numel for i in self.units if i.weights is Tier.NVME) * self.formats.weights
        return weights + self.nvme_bytes["states"]

    @property
    def step_read_bytes(self) -> int:
        """NVMe reads of a step: weights for each forward and each backward that uses them, sums of gradients that more
        are added to, and what an update needs.

        Updates during backward find the gradients where they came to; where a device computes, which has no use for the
        weights in a slot any more, they bring them in again. What still lies in a slot is read no more. Of experts come
        those that tokens are sent to, and the others for their update, if they are fused.
        """
        sizes = [(item.unit, item.unit.read_bytes(self.formats.weights)) for item in self._streamed]
        passing = sum(nbytes * self._reads(unit) for unit, nbytes in sizes)
        if not self.formats.grads:
            return round(passing)
        left_out = sum(nbytes * self._left_out(unit) for unit, nbytes in sizes)
        early = [item for item in self._streamed if self.speculative and item.streamed]
        again = sum(item.unit.numel for item in early) * self.formats.weights * self.device.computes
        found = sum(self.routing.used(i.unit) * i.unit.trainable_numel for i in early if i.grads is Tier.NVME)
        read = passing + self.passes * self._moved_grads + left_out + again + self._moved_states
        return round(read - found * self.formats.grads)

    @property
    def step_write_bytes(self) -> int:
        """NVMe writes of a step. Frozen weights are never written."""
        if not self.formats.grads:
            return 0
        weights = sum(self._changed(item.unit.trainable_numel, item.unit) for item in self._streamed)
        return round(weights * self.formats.weights + self._moved_states + self.passes * self._moved_grads)

    @property
    def step_transfers(self) -> int:
        """Reads and writes of a step on NVMe: of a unit's weights, of a tile's states, of a tile's gradients."""
        streamed, changed = [item.unit for item in self._streamed], self._changed
        passing = sum(self._reads(unit) * unit.count for unit in streamed)
        if not self.formats.grads:
            return round(passing)
        sweeps = 2 * self.passes
        passing += sum(self._left_out(unit) * unit.count for unit in streamed)
        written = sum(changed(unit.count, unit) for unit in streamed if unit.trainable_numel)
        tiles = ((tile, tier, item.unit) for item in self.units for tile, tier in item.tiles)
        of_states = sum(changed(tile.count, unit) for tile, tier, unit in tiles if tier is Tier.NVME)
        spilled = (item for item in self.units if item.grads is Tier.NVME)
        of_grads = sum(
            (sweeps * changed(1.0, item.unit) - self.routing.used(item.unit) * (self.speculative and item.streamed))
            * sum(tile.count for tile, _ in item.tiles)
            for item in spilled
        )
        early = (item.unit.count for item in self._streamed if self.speculative and item.streamed)
        return round(passing + written + sum(early) * self.device.computes + 2 * of_states + of_grads)

    @cached_property
    def _streamed(self) -> tuple[UnitPlan, ...]:
        """Units whose weights are stored on NVMe."""
        return tuple(item for item in self.units if item.weights is Tier.NVME)

    def _reads(self, unit: UnitSpec) -> float:
        """Times that a streamed unit is read in a step, or in a forward if nothing is trained; of experts the part of
        them that tokens are sent to, and that lies in no slot."""
        times = self._times_read[unit.index] if self.formats.grads else 1
        return times * self.routing.used(unit) * (1.0 if unit.experts is None else self._missed)

    @cached_property
    def returning(self) -> list[bool]:
        """Tells of each unit whether backward uses its weights."""
        return returning([item.unit for item in self.units], self.first_uses)

    @cached_property
    def _times_read(self) -> dict[int, int]:
        units, streamed = [item.unit for item in self.units], [item.unit.index for item in self._streamed]
        return times_read(units, streamed, self.staging.num_slots, self.returning, self.passes)

    def _left_out(self, unit: UnitSpec) -> float:
        """Share of a streamed unit that nothing but its update reads."""
        return self._changed(1.0, unit) - self.routing.used(unit) if unit.trainable_numel else 0.0

    def _changed(self, count: float, unit: UnitSpec) -> float:
        """The part of a count of the unit that a step changes."""
        return count * self.routing.changed(unit)

    @cached_property
    def _missed(self) -> float:
        """Share of the experts on NVMe that are in no slot when tokens are sent to them. Where nothing is trained slots
        hold those that were used last."""
        if self.routing.missed is not None:
            return self.routing.missed
        if self.formats.grads:
            return 1.0
        count = sum(item.unit.count for item in self._streamed if item.unit.experts is not None)
        return 1.0 - min(self.staging.num_slots / count, 1.0) if count else 1.0

    @cached_property
    def _moved_states(self) -> float:
        """Bytes of states that a step reads from NVMe, and writes."""
        tiles = ((item.unit, tile) for item in self.units for tile, tier in item.tiles if tier is Tier.NVME)
        return sum(self._changed(align(tile.nbytes), unit) for unit, tile in tiles)

    @cached_property
    def _moved_grads(self) -> float:
        """Bytes of gradients that a pass writes to NVMe, and that are read of it."""
        spilled = (item.unit for item in self.units if item.grads is Tier.NVME)
        return sum(self._changed(unit.trainable_numel, unit) for unit in spilled) * self.formats.grads

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, each counted once, padding not counted. Of several ranks all have the same."""
        return sum(spec.whole_shape.numel() for item in self.units for spec in item.unit.parameters)

    @property
    def arena_bytes(self) -> int:
        """Bytes that are resident in host memory, and staging."""
        vacant = self.vacant_bytes.get(Tier.HOST, 0)
        return sum(self.resident_bytes.values()) + self.spare_host_bytes + self.staging.nbytes + vacant

    @property
    def host_bytes(self) -> int:
        """All host memory that the engine takes."""
        return self.arena_bytes + self.compute_bytes

    @property
    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of each kind in each tier, staging included."""
        on_device, in_ram, on_nvme = self.device.resident_bytes, self.resident_bytes, self.nvme_bytes
        kinds = {
            kind: {"device": on_device.get(kind, 0), "host": in_ram[kind], "nvme": on_nvme[kind]} for kind in in_ram
        }
        if self.vacant_bytes:
            kinds["vacant"] = {tier.value: nbytes for tier, nbytes in self.vacant_bytes.items()}
        if self.activation_bytes:
            kinds["activations"] = {"device": 0, "host": self.activation_bytes, "nvme": 0}
        return {
            **kinds,
            "staging": {
                "device": self.device.passing_bytes,
                "host": self.staging.nbytes + self.compute_bytes - self.activation_bytes,
                "nvme": 0,
            },
            "spare copies": {"host": self.spare_host_bytes, "nvme": self.spare_copy_bytes * (self.record_copies - 1)},
        }

    @property
    def model_state_bytes(self) -> int:
        """Weights, master, moments and gradients, wherever they are stored."""
        return sum(sum(self.memory[kind].values()) for kind in self.resident_bytes) + self.in_place_bytes

    def with_resident(self, resident: Sequence[UnitPlan], device: DevicePlan) -> Plan:
        """The plan with these units beside its own, which are resident in a device's memory."""
        units = sorted((*self.units, *resident), key=lambda item: item.unit.index)
        return replace(self, units=tuple(units), device=device)

    def with_use(self, routed: int, fetched: int, visited: int) -> Plan:
        """The plan for steps whose tokens are sent to the same share of experts: of elements, those that were used,
        those that were fetched for it, and those of all experts of the layers that were visited."""
        if not routed:
            return self
        numel = sum(item.unit.numel for item in self.units if item.unit.experts is not None)
        away = sum(item.unit.numel for item in self._streamed if item.unit.experts is not None)
        missed = min(fetched * numel / (routed * away), 1.0) if away else None
        return replace(self, routing=Routing(routed / visited, missed))

    def with_spares(self) -> Plan:
        """The plan with spare places for units in RAM, evenly spread, as many as the host's budget has room for."""
        room, chosen = self.host_budget_bytes - self.host_bytes, set()
        for item in sorted(self.units, key=lambda item: spread_rank(item.unit.index)):
            if item.updated_in_ram and (nbytes := item.spare_bytes(self.formats)) <= room:
                room -= nbytes
                chosen.add(item.unit.index)
        return replace(self, units=tuple(replace(item, has_spares=item.unit.index in chosen) for item in self.units))

    def grown(self, free_bytes: int) -> DevicePlan:
        """The device's part, with what a step has left free: units move there, and copies have the rest."""
        device = self.device
        if not device.computes:
            raise ValueError("the CPU computes: there is no device whose part could grow")
        states = [sum(tile.nbytes for tile, _ in item.tiles) for item in self.units]
        needs = DeviceNeeds(
            [item.unit for item in self.units], self.formats, states,
            [0] * len(self.units),  # their buffers stay where they are
            device.unsupported_reason, self.ranks, device.squares_bytes > 0, device.num_ahead,
        )  # fmt: skip
        room = device.total_bytes - device.updates_bytes + max(int(free_bytes * MARGIN), 0)
        return replace(plan_device(needs, room, 0), updates_bytes=device.updates_bytes)

    def with_device(self, device: DevicePlan) -> Plan:
        """The plan after units have moved to the device. What they took elsewhere is vacant."""
        units = tuple(item.on_device() if item.unit.index in device.resident else item for item in self.units)
        after = replace(self, units=units, device=device, vacant_bytes={})
        vacant = {
            Tier.HOST: self.arena_bytes - after.arena_bytes,
            Tier.NVME: sum(self.nvme_bytes.values()) - sum(after.nvme_bytes.values()),
        }
        return replace(after, vacant_bytes=vacant if any(vacant.values()) else {})

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# In words and numbers, for people.

_NAMES = {"nvme": "nvme MiB", "host": "host MiB", "device": "device MiB"}


def _lines(plan: Plan) -> Iterator[str]:
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
    parts = plan.staging.shown()
    ranks = plan.ranks
    compute_bytes = plan.compute_bytes - ranks.nbytes - plan.activation_bytes
    if compute_bytes:
        parts.append(f"{shown_bytes(compute_bytes)} for {'gradients as they come' if plan.formats.grads else 'copies'}")
    if plan.activation_bytes:
        parts.append(f"{shown_bytes(plan.activation_bytes)} for activations")
    if ranks.nbytes:
        what = "whole units and their gradients" if plan.formats.grads else "whole units"
        parts.append(f"{shown_bytes(ranks.nbytes)} for {what}, of which {ranks.num_ranks} ranks have shards")
    return ", ".join(parts)


def _reasons(plan: Plan) -> Iterator[str]:
    """Reasons why things are stored where they do."""
    on_host = [item for item in plan.units if item.unit.index not in plan.device.resident]
    training = bool(plan.formats.grads)
    if not plan.streams:
        if on_host:
            yield "all of it fits into host memory"
    elif plan.speculative:
        streamed = sum(1 for item in on_host if item.streamed)
        yield (
            f"{streamed} of {len(on_host)} units are stored on NVMe with weights and states, evenly spread, and are "
            "updated during backward"
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
            f"the weights of {in_ram} of {len(on_host)} units are stored in RAM, evenly spread"
            if in_ram
            else "no weights are stored in RAM"
        )
    spared = sum(item.has_spares for item in on_host)
    if spared:
        yield f"{spared} of {len(on_host)} units have spare places in RAM, and are updated during backward"
    if streamed_experts := _streamed_experts(plan):
        told = "" if plan.routing is EVERYWHERE else f" (a forward is sent to {plan.routing.touched:.1%} of them)"
        yield f"{streamed_experts} experts are stored on NVMe: those that a batch has no token for are not read{told}"
    if any(item.unit.reused for item in on_host):
        gradients = " and its gradients are stored" if training else " is stored"
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
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield (
            f"{shown_bytes(plan.in_place_bytes)} of frozen weights are read where they are, in {listed}: they take no "
            "room under nvme_path, and are never written"
        )
    if plan.nvme_bytes["grads"]:
        yield "gradients are spilled to NVMe: the budget is below what would keep them all in RAM"
    if plan.vacant_bytes:
        vacant_ram, vacant_nvme = (nbytes / _MIB for nbytes in plan.vacant_bytes.values())
        yield f"empty, of units that are on the device now: {vacant_ram:,.1f} MiB of RAM, {vacant_nvme:,.1f} on NVMe"


def _streamed_experts(plan: Plan) -> int:
    """Number of experts that are stored on NVMe."""
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
