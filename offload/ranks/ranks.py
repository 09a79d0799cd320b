"""What an engine has of ranks: their world, and what they do together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

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

    def leave(self, error: BaseException | None) -> None:
        """This rank's engine ends: by this error, or the one that ends the program; else when all others end, too. Safe
        to call twice."""
        if self._has_left:
            return
        self._has_left = True
        error = error or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        try:
            if error is None and not self._failure.is_known:
                self.collectives.leave()
        finally:
            self.pulse.leave(error)
            self.collectives.stop()
