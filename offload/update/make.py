"""Makes what updates: the pipeline, its thread, and the parts that run on a device."""

from __future__ import annotations

from dataclasses import dataclass

from offload.closing import Closers
from offload.optim.rule import Rule
from offload.plan.plan import Plan
from offload.report.meter import Meter
from offload.tiers.make import Tiers
from offload.units import num_nested
from offload.update.device_side import DeviceSide, ResidentUpdates
from offload.update.pipeline import Pipeline
from offload.update.speculative import SpeculativeUpdates
from offload.update.updater import Updater
from offload.waiting import Failure


@dataclass(frozen=True)
class Updates:
    """Everything that takes part in an optimizer step."""

    speculative: SpeculativeUpdates
    updater: Updater
    resident: ResidentUpdates | None
    """Updates of units that are resident on a device."""
    device_side: DeviceSide | None
    """Updates, on a device, of tiles that rest on the host."""


def make_updates(
    plan: Plan, tiers: Tiers, rule: Rule, failure: Failure, meter: Meter, closers: Closers, *, num_backwards: int
) -> Updates:
    """Tie them together. What must be undone goes into ``closers``, also when this raises. ``num_backwards`` are
    expected before the first step."""
    units = [item.unit for item in plan.units]
    streamed = {item.unit.index for item in plan.units if item.streamed}
    device_side, resident = None, None
    if tiers.on_device is not None:
        device, link = tiers.on_device.device, tiers.on_device.link
        resident = ResidentUpdates(device, rule, plan.formats, tiers.homes)
        if link is not None and plan.device.updates_bytes:
            device_side = DeviceSide(device, rule, plan.formats, plan.device.updates_bytes, link, meter)
            closers.callback(device_side.close)
    max_held = None
    if tiers.on_device is None:
        max_held = len(tiers.slots) - num_nested(units) - 1  # the last one is for the unit that compute fetches ahead
    speculative = SpeculativeUpdates(
        units,
        lambda unit: plan.speculative and unit.index in streamed and tiers.homes[unit.index].weights.tensor is None,
        max_held,
        tiers.homes,
        tiers.host.shadows,
        tiers.gradients,
        failure,
        num_backwards=num_backwards,
    )
    pipeline = Pipeline(tiers.tile_buffers, rule, plan.formats, meter, device_side)
    updater = Updater(pipeline, speculative, tiers.homes, tiers.host, tiers.gradients, device_side, failure)
    closers.callback(updater.stop)
    return Updates(speculative, updater, resident, device_side)
