"""What an engine has of ranks: their world, and what they do together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from offload.ranks.collectives import Collectives
from offload.ranks.pulse import Pulse
from offload.ranks.world import World
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure


class Ranks:
    """One rank of several. ``shards`` are this rank's, of each unit; ``shard_of`` finds a parameter's."""

    def __init__(
        self,
        world: World,
        units: Sequence[UnitSpec],
        shards: Sequence[UnitSpec],
        timeout_s: float,
        failure: Failure,
    ) -> None:
        self.world = world
        self.pulse = Pulse(world, timeout_s, failure)
        self.collectives = Collectives(world, self.pulse, failure)
        self.shards = shards
        self.shard_of: dict[ParameterSpec, ParameterSpec] = {
            whole: shard
            for unit, own in zip(units, shards, strict=True)
            for whole, shard in zip(unit.parameters, own.parameters, strict=True)
        }
        self._failure = failure
        self._has_left = False

    def agree(self, where: str) -> None:
        """Wait until all ranks are at this place of the program. Raises ``RankError`` if one is at another."""
        self.collectives.meet(where, torch.empty(0))

    def exchange(self, where: str, own: Any) -> list[Any]:
        """What every rank gives at this place of the program, any object, in order."""
        content = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        return [pickle.loads(part.numpy().tobytes()) for part in self.collectives.meet_parts(where, content)]

    def of_first_replica(self, own: torch.Tensor) -> torch.Tensor:
        """What the first of those ranks has that hold the same shard, and all of them call this with; none of them uses
        its collectives meanwhile. Each may have made the model of other random numbers."""
        replicas = self.world.replicas
        if replicas.size == 1 or own.numel() == 0:
            return own
        first = own.detach().cpu().clone(memory_format=torch.contiguous_format)
        distributed.broadcast(first, replicas.members[0], replicas.group)
        return first

    def leave(self, error: BaseException | None) -> None:
        """This rank's engine ends: by this error, or the one that ends the program; else when all others end, too. Safe
        to call twice."""
        if self._has_left:
            return
        self._has_left = True
        error = error or program_error()
        try:
            if error is None and not self._failure.is_known:
                self.collectives.leave()
        finally:
            self.pulse.leave(error)
            self.collectives.stop()


def program_error() -> BaseException | None:
    """The exception that has ended the program, if one has."""
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found
