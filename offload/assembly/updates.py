"""Makes what updates: the pipeline, its thread, and the parts that run on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from offload.assembly.run_plan import RunPlan
from offload.assembly.tiers import Tiers
from offload.closing import Closers
from offload.cores import CoreBudget
from offload.device.protocol import Device
from offload.optim.rule import Rule
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.tiers.weights.shadow import SpareWeights
from offload.units import UnitSpec, num_nested
from offload.update.device_side import DeviceSide, NoResidentUpdates, ResidentUpdates, tile_buffers
from offload.update.host_side import HostSide
from offload.update.pipeline import Pipeline
from offload.update.speculative import SpeculativeUpdates
from offload.update.updater import Updater
from offload.waiting import Failure


@dataclass(frozen=True)
class Updates:
    """Everything that takes part in an optimizer step."""

    speculative: SpeculativeUpdates
    updater: Updater
    resident: ResidentUpdates | NoResidentUpdates
    """Updates of units that are resident on a device."""
    device_side: DeviceSide
    """Updates, on a device, of tiles that rest on the host."""
    host_side: HostSide
    """Updates by the CPU."""
    cores: CoreBudget
    """Of these."""


def make_updates(run: RunPlan, tiers: Tiers, rule: Rule, failure: Failure, meter: Meter, closers: Closers) -> Updates:
    """Tie them together. What must be undone goes into ``closers``, also when this raises."""
    plan = run.plan
    units = [item.unit for item in plan.units]
    streamed = {item.unit.index for item in plan.units if item.streamed}
    device_side = DeviceSide(rule, plan.formats, meter, LinkRates())
    resident: ResidentUpdates | NoResidentUpdates = NoResidentUpdates()
    max_held = len(tiers.slots) - num_nested(units) - 1  # the last one is for the unit that compute fetches ahead
    holds_slots = True
    for moving in tiers.computing.moving:
        device, holds_slots = cast(Device, run.processor), False
        resident = ResidentUpdates(device, rule, plan.formats, tiers.homes)
        if moving.link.is_there and plan.device.updates_bytes:
            buffers = tile_buffers(device, plan.device.updates_bytes)
            device_side = DeviceSide(rule, plan.formats, meter, moving.link, buffers)
            closers.callback(device_side.close)
    cores = _core_budget(run, tiers, meter)
    in_ram = SpareWeights(tiers.host.cache, tiers.homes, cores.copy)

    def has_two_places(unit: UnitSpec) -> bool:
        homes = tiers.homes[unit.index]
        stored = plan.speculative and unit.index in streamed and homes.weights.tensor is None
        return stored or homes.have_spares

    speculative = SpeculativeUpdates(
        units,
        has_two_places,
        max_held if holds_slots else None,
        tiers.homes,
        lambda unit: in_ram if tiers.homes[unit.index].have_spares else tiers.host.shadows,
        tiers.gradients,
        failure,
        num_backwards=run.config.gradient_accumulation_steps,
    )
    ahead = tiers.computing.moving is not None
    host_side = HostSide(rule, plan.formats, meter, cores.lend, device_side.cpu_took, ahead=ahead)
    pipeline = Pipeline(tiers.tile_buffers, rule, plan.formats, host_side, device_side, cores.copy)
    updater = Updater(pipeline, speculative, tiers.homes, tiers.host, tiers.gradients, device_side, failure)
    closers.callback(updater.stop)
    return Updates(speculative, updater, resident, device_side, host_side, cores)


def _core_budget(run: RunPlan, tiers: Tiers, meter: Meter) -> CoreBudget:
    """Cores that compute keeps busy until a step has been measured: one that drives a device, else all of torch's
    threads. Among ranks it is the thread of collectives that waits for an update, in compute's stead."""
    others = 1 if tiers.computing.moving else torch.get_num_threads()
    return CoreBudget(run.cores, others, lambda: meter.num_waits > 0 or tiers.host.fence.is_waited_for)


def copied_bytes(tiers: Tiers, updates: Updates | None) -> Callable[[], tuple[int, int]]:
    """Bytes copied to a device and to the host, since the engine was made."""

    def copied() -> tuple[int, int]:
        to_device, to_host = (0, 0) if updates is None else updates.device_side.copied_bytes
        for moving in tiers.computing.moving:
            to_device += moving.level.carrier.source.copied_bytes
            to_host += moving.transport.copied_bytes
        return to_device, to_host

    return copied
