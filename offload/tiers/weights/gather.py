"""Whole units in host memory, where ranks hold shards of them: gathered from all ranks, ahead of use.

Updates change shards, so a whole unit is good until its next update. One thread of each rank gathers (see
``offload.ranks.collectives``): it waits until the rank's own shard is in host memory and up to date, and gives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.memory import private_memory, tensor_at
from offload.ranks.collectives import Kind, Operation, Rounds
from offload.ranks.links import Links
from offload.ranks.world import Peers
from offload.report.meter import Meter
from offload.tiers.home import Transfer
from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.carrier import Carrier, HostBuffer
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.level import CacheLevel
from offload.tiers.weights.pin import Pin, Purpose
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import align

_LOOK_AHEAD = 64


@dataclass(eq=False)
class GatherCarrier(Carrier[HostBuffer]):
    """Brings whole units to places. A gather that is over has read all it reads."""

    units: Sequence[UnitSpec]
    shards: Sequence[UnitSpec]
    lower: HostLevel
    """Has this rank's ``shards``."""
    places: Sequence[HostBuffer]
    dtype: torch.dtype
    """Dtype of the weights."""
    collectives: Rounds

    def __post_init__(self) -> None:
        self.num_places: int = len(self.places)
        self.added_bytes = 0
        """Host memory of places beyond the plan."""
        self._free = list(self.places)
        self.collectives.register(Kind.WEIGHTS, self._gather)

    def waits_for(self, unit: UnitSpec) -> str:
        return "gather"

    def take_place(self, unit: UnitSpec) -> HostBuffer | None:
        fitting = [place for place in self._free if place.nbytes >= self._nbytes(unit)]
        if not fitting:
            return None
        smallest = min(fitting, key=lambda place: place.nbytes)  # where each unit has a place, that is its own
        self._free.remove(smallest)
        return smallest

    def add_place(self, unit: UnitSpec) -> HostBuffer:
        self.num_places += 1
        self.added_bytes += self._nbytes(unit)
        return HostBuffer(private_memory(self._nbytes(unit)))

    def free_place(self, unit: UnitSpec, place: HostBuffer) -> None:
        self._free.append(place)

    def fetch(self, unit: UnitSpec, place: HostBuffer) -> Transfer:
        return self.collectives.submit(Kind.WEIGHTS, unit.index, f"the weights of unit {unit.name}", place)

    def _nbytes(self, unit: UnitSpec) -> int:
        return align(unit.numel * self.dtype.itemsize)

    def _gather(self, index: int, wanting: Sequence[int], operation: Operation | None) -> None:
        """This rank's part of a gather: its own shard for those that want it, and theirs if it wants them."""
        peers = self.collectives.world.shards
        places = [place for place, rank in enumerate(peers.ranks) if rank in wanting]
        if not places:
            return
        unit, shard = self.units[index], self.shards[index]
        with self.lower.pin(shard) as pin:
            own = tensor_at(pin.place.address, shard.numel, self.dtype)
            into = None if operation is None else tensor_at(operation.own.address, unit.numel, self.dtype)
            for of_unit, of_shard in parts(unit, shard):
                target = None if into is None else into[of_unit]
                gather_part(self.collectives.links, peers, own[of_shard], target, places)


def parts(unit: UnitSpec, shard: UnitSpec) -> Iterator[tuple[slice, slice]]:
    """Parts of a unit that are divided among ranks each by itself, trained and frozen elements: where it lies in the
    unit, and a rank's part of it in its shard."""
    if shard.trainable_numel:
        yield slice(0, unit.trainable_numel), slice(0, shard.trainable_numel)
    if shard.numel > shard.trainable_numel:
        yield slice(unit.trainable_numel, unit.numel), slice(shard.trainable_numel, shard.numel)


def gather_part(
    links: Links, peers: Peers, own: torch.Tensor, into: torch.Tensor | None, places: Sequence[int]
) -> None:
    """A rank's transfers that bring what all ``peers`` have as ``own`` to those at these ``places`` among them. A rank
    that is none of them gives no ``into``."""
    if len(places) == peers.size and into is not None:
        links.all_gather(into, own, peers)
        return
    for place in places:
        links.gather(into if place == peers.own else None, own, peers, place)


class GatherLevel(CacheLevel[HostBuffer]):
    """The level of whole units. The training thread makes all calls."""

    def __init__(
        self, units: Sequence[UnitSpec], carrier: GatherCarrier, failure: Failure, meter: Meter, *, prefetch: bool
    ) -> None:
        cache = WeightCache(units, carrier, failure, meter, prefetch=prefetch, look_ahead=_LOOK_AHEAD)
        super().__init__(cache)
        self._width = carrier.dtype.itemsize

    def release(self, pin: Pin[HostBuffer]) -> None:
        with self.cache.monitor:
            self.cache.release(pin)
            if pin.purpose is Purpose.COMPUTE:
                self.cache.fetch_ahead(wrap=False)

    @contextlib.contextmanager
    def borrow(self, unit: UnitSpec, start: int, stop: int) -> Iterator[int]:
        """The address of the elements ``[start, stop)`` of a whole unit, to be read outside of the model's order."""
        with self.pin(unit, Purpose.LOOK) as pin:
            yield pin.place.address + start * self._width
