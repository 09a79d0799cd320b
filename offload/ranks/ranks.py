"""What an engine has of ranks: their world, and what they do together."""

from __future__ import annotations

import ctypes
import pickle
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from offload.device.protocol import Device
from offload.ranks.collectives import Collectives
from offload.ranks.links import DeviceLinks
from offload.ranks.world import World
from offload.units import ParameterSpec, UnitSpec
from swapper import Arena


class Ranks:
    """One rank of several. ``shards`` are this rank's, of each unit; ``shard_of`` finds a parameter's."""

    def __init__(
        self,
        world: World,
        units: Sequence[UnitSpec],
        shards: Sequence[UnitSpec],
    ) -> None:
        self.world = world
        self.collectives = Collectives(world)
        self.shards = shards
        self.shard_of: dict[ParameterSpec, ParameterSpec] = {
            whole: shard
            for unit, own in zip(units, shards, strict=True)
            for whole, shard in zip(unit.parameters, own.parameters, strict=True)
        }
        self._device_links: DeviceLinks | None = None
        self._has_left = False

    def connect(self, device: Device) -> DeviceLinks:
        """Connect the devices of all ranks, which call this together."""
        self._device_links = DeviceLinks(self.world, device)
        return self._device_links

    @property
    def received_bytes(self) -> int:
        """Received from other ranks, since the engine was made."""
        between_devices = 0 if self._device_links is None else self._device_links.received_bytes
        return self.collectives.links.received_bytes + between_devices

    def barrier(self, where: str) -> None:
        """Wait until all ranks are at this place of the program. Raises ``RankError`` if one is at another."""
        self.collectives.meet(where, torch.empty(0))

    def exchange(self, where: str, own: Any) -> list[Any]:
        """What every rank gives at this place of the program, any object, in order."""
        content = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        return [pickle.loads(part.numpy().tobytes()) for part in self.collectives.meet_parts(where, content)]

    def broadcast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The first rank's value, which differs from this one's where ranks have drawn other random numbers: itself, or
        a copy in host memory."""
        own = value.detach().cpu().contiguous()
        digest = zlib.crc32(own.view(-1).view(torch.uint8).numpy().data) if own.numel() else 0
        digests = self.collectives.meet(f"the value of {name}", torch.tensor([digest]))
        if all(int(other) == digest for other in digests):
            return value
        own = own.clone()
        self.collectives.broadcast(f"the value of {name}", own)
        return own

    def close_memory(self, memory: Arena) -> None:
        """Give memory back that transfers may have been under way in. This rank has left."""
        if self.collectives.links.end():
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
            self.collectives.stop()
            if self._device_links is not None:
                self._device_links.close()


def program_error() -> BaseException | None:
    """The exception that has ended the program, if one has."""
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found
