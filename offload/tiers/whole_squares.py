"""Sums of squares of whole gradients, where each rank has a part of them: so norm, clipping and skipped steps are the
same on all ranks.

Ranks have parts of two kinds: shards of units, and the parts of parameters that are ``DTensor``. A parameter that ranks
of the latter kind have as a whole counts once, as the first of them says.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import distributed

from offload.errors import RankError
from offload.ranks.ranks import Ranks
from offload.ranks.world import Peers
from offload.tiers.gradients import Gradient
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure

_SLICE = timedelta(seconds=0.2)


class WholeSquares:
    """``shards`` are this rank's. ``ranks`` have the other shards, ``parts`` the other parts of ``DTensor``s."""

    def __init__(self, shards: Sequence[UnitSpec], ranks: Ranks, parts: Peers, failure: Failure) -> None:
        self._specs = [spec for shard in shards for spec in shard.trainable]
        self._is_in_parts = torch.tensor(
            [spec.distribution is not None and spec.distribution.is_sharded for spec in self._specs]
        )
        self._ranks = ranks
        self._parts = parts
        self._failure = failure

    def exchange(self, known: Mapping[ParameterSpec, Gradient]) -> None:
        """Make the sum of squares of each of these gradients that of all ranks, which call this together."""
        sums = torch.zeros(len(self._specs), dtype=torch.float64)
        for index, spec in enumerate(self._specs):
            if spec in known:
                gradient = known[spec]
                if math.isnan(gradient.own_squares):
                    gradient.own_squares = gradient.sum_squares
                sums[index] = gradient.own_squares
        sums = self._over_parts(self._over_shards(sums))
        for spec, total in zip(self._specs, sums.tolist(), strict=True):
            if spec in known:
                known[spec].sum_squares = total

    def _over_shards(self, own: torch.Tensor) -> torch.Tensor:
        of_ranks, total = self._ranks.collectives.all_gather("sums of squares", own), torch.zeros_like(own)
        for rank in self._ranks.world.shards.ranks:
            total += of_ranks[rank]
        return total

    def _over_parts(self, own: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        if parts.size == 1:
            return own
        of_ranks = [torch.empty_like(own) for _ in parts.ranks]
        work = distributed.all_gather(of_ranks, own, group=parts.group, async_op=True)
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not in this slice of time, or for a reason that is raised below
                work.wait(_SLICE)
            self._failure.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(f"a rank that has other parts of the model's DTensors is gone: {error}") from error
        total, *others = of_ranks
        for other in others:
            total[self._is_in_parts] += other[self._is_in_parts]
        return total
