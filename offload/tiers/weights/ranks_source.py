"""Fills windows on a device where ranks hold shards of units: each rank brings its shard over its own link, and the
devices gather the rest from each other, into the window.

The thread of collectives does it (``offload.ranks.collectives``), and waits for nothing on the device: a shard's copy
and the gather after it stand in streams. Shards land in two places by turns, so that one comes while the one before it
is gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offload.device.protocol import Device, Event
from offload.ranks.collectives import Kind, Operation, Rounds
from offload.ranks.links import DeviceLinks
from offload.report.meter import Meter
from offload.tiers.home import Transfer, UnitHomes
from offload.tiers.weights.device import Copy
from offload.tiers.weights.gather import gather_part, parts
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.host_source import Finisher, copy_from_host
from offload.tiers.window import DeviceWindow
from offload.units import UnitSpec
from offload.waiting import Failure


class _Landing:
    """Device memory for any shard. ``over``: what was last given to do with it is done."""

    def __init__(self, window: DeviceWindow, over: Event) -> None:
        self.window = window
        self.over = over


@dataclass(eq=False)
class RanksSource:
    """See the module's docstring."""

    units: Sequence[UnitSpec]
    shards: Sequence[UnitSpec]
    homes: Sequence[UnitHomes]
    """Those of this rank's ``shards``."""
    lower: HostLevel
    """The way of what is stored in host memory or below."""
    landings: Sequence[DeviceWindow]
    """Open windows, each of which holds any shard."""
    device: Device
    links: DeviceLinks
    collectives: Rounds
    failure: Failure
    meter: Meter

    def __post_init__(self) -> None:
        self.copied_bytes = 0
        self._landings = deque(_Landing(window, self.device.compute.record()) for window in self.landings)
        self._peers = self.collectives.world.shards
        self._finisher = Finisher(self.failure, self.meter)
        self._updated: Event = self.device.compute.record()
        """Shards that are resident on the device have the weights of the last step."""
        self.collectives.register(Kind.WEIGHTS, self._gather)

    def start(self, unit: UnitSpec, place: Copy) -> Transfer:
        return self.collectives.submit(Kind.WEIGHTS, unit.index, f"the weights of unit {unit.name}", place)

    def waits_for(self, unit: UnitSpec) -> str:
        return "gather"

    def settle(self) -> None:
        self._finisher.settle()
        self.links.after(self.links.point())  # gathers read shards that are resident on the device

    def end_step(self) -> None:
        self._updated = self.device.compute.record()

    def close(self) -> None:
        self._finisher.close()
        self.links.after(self.links.point())  # compute frees the memory

    # On the thread of collectives.

    def _gather(self, index: int, wanting: Sequence[int], operation: Operation | None) -> None:
        """This rank's part of a gather: its own shard for those that want it, and theirs if it wants them."""
        places = [place for place, rank in enumerate(self._peers.ranks) if rank in wanting]
        if not places:
            return
        unit, shard = self.units[index], self.shards[index]
        place: Copy | None = None if operation is None else operation.own
        own, landing = self.homes[index].weights.tensor, None
        if own is None:
            landing = self._land(shard)
            own = landing.window.target
        allocated = None if place is None else place.allocated
        with self.links.turn(self._updated if landing is None else landing.over, allocated):
            for of_unit, of_shard in parts(unit, shard):
                into = None if place is None else place.window.target[of_unit]
                gather_part(self.links, self._peers, own[of_shard], into, places)
        if landing is not None:
            landing.over = self.links.point()
        if place is not None:
            place.arrived = self.links.point()

    def _land(self, shard: UnitSpec) -> _Landing:
        """Start the shard's copy to the device; it is there when that is ``over``."""
        landing = self._landings[0]
        self._landings.rotate(-1)
        target = landing.window.target[: shard.numel]
        landing.over = copy_from_host(self.device, self.lower, shard, target, landing.over, self._finisher)
        self.copied_bytes += target.nbytes
        return landing
