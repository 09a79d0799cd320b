"""Ranks of an engine: their world, and what they do together. One rank is a world of one.

[Note: What differs between one rank and many] The chains. ``OnHost.connect`` and ``OnDevice.connect``
(``assembly/compute.py``) put a ``GatherLevel``, or a ``RanksSource`` below a ``DeviceLevel``, between weights and
compute, and a ``GradientExchange`` between compute and gradients. Plan, homes and updates work on shards as on units.
The rest of ``assembly/`` adds up squares of shards (``tiers.py``), and gives compute a fence that is open and sources
of whole weights and a ``Publication`` of commits (``assemble.py``), and each rank a folder and options that all agree
on (``run_plan.py``). Nothing else asks whether there are several: it is given these objects, ``World.part_name``, or
``Ranks``, which is a ``OneRank`` in a world of one. Where the number itself is the matter, units are cut for it
(``units/find.py``, ``units/shard.py``) and budgets counted (``plans_of_ranks``).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.device.protocol import Device
from offload.ranks.agreement import Facts
from offload.ranks.collectives import LocalCollectives, Rounds
from offload.ranks.links import DeviceLinks
from offload.ranks.world import World, packed, unpacked
from offload.units import ParameterSpec, UnitSpec
from swapper import Arena


class Ranks:
    """One rank of a world. ``shards`` are this rank's, of each unit: the units themselves, in a world of one."""

    def __init__(self, world: World, units: Sequence[UnitSpec], shards: Sequence[UnitSpec]) -> None:
        self.world = world
        self.collectives = self._make_collectives()
        self.shards = shards
        self.shard_of: dict[ParameterSpec, ParameterSpec] = {
            whole: shard
            for unit, own in zip(units, shards, strict=True)
            for whole, shard in zip(unit.parameters, own.parameters, strict=True)
        }
        """By parameter, this rank's part of it."""
        self._device_links: list[DeviceLinks] = []
        self._has_left = False
        self._is_quiet = True
        """No transfer is under way any more in this rank's memory."""

    @classmethod
    def of(cls, world: World, units: Sequence[UnitSpec], shards: Sequence[UnitSpec]) -> Ranks:
        """Those of this ``world``."""
        return (cls if world.size > 1 else OneRank)(world, units, shards)

    @classmethod
    def single(cls) -> Ranks:
        """One rank, of nothing."""
        return cls.of(World.single(), (), ())

    def _make_collectives(self) -> LocalCollectives | Rounds:
        return Rounds(self.world)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def connect(self, device: Device) -> DeviceLinks:
        """Connect the devices of all ranks, which call this together."""
        links = DeviceLinks(self.world, device)
        self._device_links.append(links)
        return links

    @property
    def received_bytes(self) -> int:
        """Received from other ranks, since the engine was made."""
        return self.collectives.received_bytes + sum(links.received_bytes for links in self._device_links)

    @contextlib.contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Within, this rank's weights change, after what all ranks have come to first."""
        self.collectives.suspend()
        try:
            yield
        finally:
            self.collectives.resume()

    def barrier(self, where: str, facts: Callable[[], Facts] = dict) -> None:
        """Wait until all ranks are at this place of the program. Raises ``RankError`` if one is at another, or has
        other ``facts``, which a world of one does not ask for."""
        self.collectives.all_gather(where, torch.empty(0), facts())

    def all_gather_object(self, where: str, own: Any) -> list[Any]:
        """Gather what every rank gives at this place of the program, in order: see ``packed``."""
        return unpacked(self.collectives.all_gather_parts(where, packed(own)))

    def all(self, where: str, condition: bool) -> bool:
        """The condition holds on all ranks."""
        return all(self.all_gather_object(where, condition))

    def join(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The flat tensors of those ranks that hold the shards of one copy with this one, one after the other."""
        return self.collectives.join(name, own)

    def broadcast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The first rank's value, which differs from this one's where ranks have drawn other random numbers: itself, or
        a copy in host memory."""
        own = value.detach().cpu().contiguous()
        digest = zlib.crc32(own.view(-1).view(torch.uint8).numpy().data) if own.numel() else 0
        digests = self.collectives.all_gather(f"the value of {name}", torch.tensor([digest]))
        if all(int(other) == digest for other in digests):
            return value
        own = own.clone()
        self.collectives.broadcast(f"the value of {name}", own)
        return own

    def can_meet(self) -> bool:
        """Tell whether this rank can still come to a place of the program at which all ranks meet."""
        return not self._has_left and program_error() is None

    def close_memory(self, memory: Arena) -> None:
        """Give memory back that transfers may have been under way in. This rank has left."""
        if self._is_quiet:
            memory.close()
            return
        for kept in (memory, self.collectives):  # gloo's thread would end the process if this memory, or theirs, went
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def leave(self, error: BaseException | None) -> None:
        """This rank's engine ends: by this error, or the one that ends the program; else when all others end, too. Safe
        to call twice."""
        if self._has_left:
            return
        self._has_left = True
        error = error or program_error()
        try:
            if error is None and not self.world.heartbeat.failure.is_known:
                self.collectives.leave()
        finally:
            self.world.leave(error)
            self._is_quiet = self.collectives.stop()
            for links in self._device_links:
                links.close()


class OneRank(Ranks):
    """The rank of a world of one: it meets nobody, and needs nobody."""

    def _make_collectives(self) -> LocalCollectives:
        return LocalCollectives()

    def barrier(self, where: str, facts: Callable[[], Facts] = dict) -> None:
        return

    def all_gather_object(self, where: str, own: Any) -> list[Any]:
        return [own]

    def broadcast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value

    def can_meet(self) -> bool:
        return True


def program_error() -> BaseException | None:
    """The exception that has ended the program, if one has."""
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found
