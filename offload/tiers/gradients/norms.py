"""Sums of squares of gradients: worked out on the device that makes them, and added up over ranks.

On a device, gradients that are stored there are added up first, unit by unit, and their sums come in one copy a step;
one that leaves is looked at before it goes, and the sums of a unit follow its gradients. Over ranks, each has parts of
gradients: so norm, clipping and skipped steps are the same on all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

import aio_ext
from offload.device.protocol import Device, Event
from offload.errors import RankError
from offload.kernels import SQUARES_LANES
from offload.memory import tensor_at
from offload.plan.buffers import SquaresGroup, num_blocks, squares_groups, squares_parts, squares_rows
from offload.ranks.agreement import NO_FACTS, Place
from offload.ranks.ranks import Ranks
from offload.ranks.world import Peers
from offload.report.meter import Meter
from offload.tiers.gradients.store import Gradient
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure
from swapper import PAGE_BYTES, OffloadError, align

_SLICE = timedelta(seconds=0.2)


@dataclass(frozen=True)
class SentSums:
    """Sums on their way to the host. ``views`` of the memory on either side live as long as it does."""

    arrived: Event | None
    """None: nothing is on its way."""
    places: dict[ParameterSpec, int]
    views: tuple[torch.Tensor, torch.Tensor]

    def read(self) -> dict[ParameterSpec, float]:
        """The sums, once they have arrived. Any thread."""
        values = self.views[0].tolist()
        return {spec: values[place] for spec, place in self.places.items()}


_NOTHING_SENT = SentSums(None, {}, (torch.empty(0), torch.empty(0)))


class Squares:
    """Sums for all trainable parameters; these are worked out in host memory, where gradients are stored. All calls
    come from one thread at a time."""

    def move(self, resident: Collection[int]) -> None:
        """Other units are resident on the device from now on. Nothing is begun."""

    def begin(self, specs: SquaresGroup, gradients: torch.Tensor) -> Event | None:
        """Have the sums of these parameters worked out from flat ``gradients``, after what compute was given so far.
        The point where they have been read; None if it is for the host."""
        return None

    def forget(self, specs: Iterable[ParameterSpec]) -> None:
        """Forget what was begun for these: it holds no more, or is known."""

    def send(self, specs: Collection[ParameterSpec]) -> SentSums:
        """Have those of these parameters' sums that were begun brought to the host, all in one copy."""
        return _NOTHING_SENT

    def collect(self) -> dict[ParameterSpec, float]:
        """Wait for the sums that were begun and not sent, and return them. All that was sent has been read. They stay
        begun until they are forgotten."""
        return {}

    def close(self) -> None:
        """Free the device's memory, and what the host has for it."""


class DeviceSquares(Squares):
    """Sums that a device works out.

    Gradients may come on several streams, and all share the lanes: each sum is worked out after the one before it.
    """

    def __init__(self, device: Device, units: Sequence[UnitSpec], resident: Collection[int], meter: Meter) -> None:
        self._device = device
        self._units = units
        self._meter = meter
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        self._begun: set[ParameterSpec] = set()
        num_trainable = sum(len(unit.trainable) for unit in units)
        self._landing = aio_ext.Memory(max(align(8 * num_trainable), PAGE_BYTES))
        device.pin(self._landing.address, self._landing.nbytes)
        self._on_host = tensor_at(self._landing.address, num_trainable, torch.float64)
        self._lay_out(resident)

    def move(self, resident: Collection[int]) -> None:
        self._free()
        self._lay_out(resident)

    def _lay_out(self, resident: Collection[int]) -> None:
        device = self._device
        groups = squares_groups(self._units, resident)
        rows = [row for group in groups for row in squares_rows(group)]
        ranges_bytes, lanes_bytes, sums_bytes = squares_parts(groups)
        device.allocate(self._storage, ranges_bytes + lanes_bytes + sums_bytes)
        ranges = self._view(0, torch.int64, 3 * len(rows)).view(len(rows), 3)
        ranges.copy_(torch.tensor(rows, dtype=torch.int64).view(len(rows), 3))
        self._over = device.compute.record()
        """Everything that was given to do with this memory."""
        self._sums = self._view(ranges_bytes + lanes_bytes, torch.float64, len(rows))
        self._kernel_arguments: dict[SquaresGroup, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._places: dict[ParameterSpec, int] = {}
        for group in groups:
            start = len(self._places)
            self._places.update({spec: start + index for index, spec in enumerate(group)})
            stop = len(self._places)
            lanes = self._view(ranges_bytes, torch.float64, num_blocks(group) * SQUARES_LANES)
            self._kernel_arguments[group] = ranges[start:stop], lanes, self._sums[start:stop]

    def begin(self, specs: SquaresGroup, gradients: torch.Tensor) -> Event:
        compute = self._device.compute
        compute.wait(self._over)
        compute.sum_squares(gradients, *self._kernel_arguments[specs])
        self._over = compute.record()
        self._begun.update(specs)
        return self._over

    def forget(self, specs: Iterable[ParameterSpec]) -> None:
        self._begun.difference_update(specs)

    def send(self, specs: Collection[ParameterSpec]) -> SentSums:
        places = {spec: self._places[spec] for spec in specs if spec in self._begun}
        if not places:
            return _NOTHING_SENT
        start, stop = min(places.values()), max(places.values()) + 1
        self.forget(places)
        places = {spec: place - start for spec, place in places.items()}
        views = self._on_host[start:stop], self._sums[start:stop]
        return SentSums(self._bring_to_host(*views), places, views)

    def collect(self) -> dict[ParameterSpec, float]:
        if not self._begun:
            return {}
        views = self._on_host, self._sums  # all of them: these live on if an interrupt comes before the copy is over
        arrived = self._bring_to_host(*views)
        with self._meter.stall("norms"):
            arrived.wait()
        return SentSums(arrived, {spec: self._places[spec] for spec in self._begun}, views).read()

    def close(self) -> None:
        self._free()
        self._device.unpin(self._landing.address)
        self._landing.close()

    def _free(self) -> None:
        for event in (self._over, self._device.to_host.record()):
            self._device.compute.wait(event)
        self._device.free(self._storage)

    def _bring_to_host(self, on_host: torch.Tensor, sums: torch.Tensor) -> Event:
        stream = self._device.to_host
        stream.wait(self._over)
        stream.copy(on_host, sums)
        return stream.record()

    def _view(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return tensor.set_(self._storage, offset // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]


AddUp = Callable[[torch.Tensor, Place | None], torch.Tensor]
"""Adds up what ranks have of the sums of all trainable parameters. All of them call it, at the same place."""


class RankSquares:
    """Sums of squares of whole gradients, of which this rank has the ``shards``: added up by each ``over``."""

    def __init__(self, shards: Sequence[UnitSpec], over: Sequence[AddUp]) -> None:
        self._specs = [spec for shard in shards for spec in shard.trainable]
        self._over = over

    def make_whole(self, known: Iterable[Mapping[ParameterSpec, Gradient]], at: Place | None) -> None:
        """Make the sum of squares of each of these gradients that of all ranks, which call this together. Those that
        are ``at`` the same place agree on what is there, before anything stands on it."""
        gradients = {spec: gradient for of_unit in known for spec, gradient in of_unit.items()}
        sums = torch.zeros(len(self._specs), dtype=torch.float64)
        for index, spec in enumerate(self._specs):
            if spec in gradients:
                gradient = gradients[spec]
                if math.isnan(gradient.own_squares):
                    gradient.own_squares = gradient.sum_squares
                sums[index] = gradient.own_squares
        for add_up in self._over:
            sums = add_up(sums, at)
        for spec, total in zip(self._specs, sums.tolist(), strict=True):
            if spec in gradients:
                gradients[spec].sum_squares = total


def add_up_shards(ranks: Ranks, own: torch.Tensor, at: Place | None) -> torch.Tensor:
    """Over the ranks that hold the shards of one copy with this one. All ranks agree on what is said ``at`` a place."""
    name, facts = ("sums of squares", NO_FACTS) if at is None else (at.name, at.facts())
    of_ranks, total = ranks.collectives.all_gather(name, own, facts), torch.zeros_like(own)
    for rank in ranks.world.shards.ranks:
        total += of_ranks[rank]
    return total


class DistributedParts:
    """Sums over ranks that have other parts of ``DTensor``s. A parameter that they have as a whole counts once, as the
    first of them says."""

    def __init__(self, shards: Sequence[UnitSpec], parts: Peers, failure: Failure) -> None:
        self._is_in_parts = torch.tensor(
            [spec.distribution is not None and spec.distribution.is_sharded for s in shards for spec in s.trainable]
        )
        self._parts = parts
        self._failure = failure

    def add_up(self, own: torch.Tensor, at: Place | None) -> torch.Tensor:
        """See ``AddUp``. What ranks with other parts say may be different."""
        try:
            total, *others = self._gather(own)
        except BaseException as error:
            if not isinstance(error, OffloadError):
                self._failure.record(
                    OffloadError("a step was interrupted while ranks added up norms: start all of them again")
                )
            raise
        for other in others:
            total[self._is_in_parts] += other[self._is_in_parts]
        return total

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        of_ranks = [torch.empty_like(own) for _ in self._parts.ranks]
        work = distributed.all_gather(of_ranks, own, group=self._parts.group, async_op=True)
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not in this slice of time, or for a reason that is raised below
                work.wait(_SLICE)
            self._failure.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(f"a rank that has other parts of the model's DTensors is gone: {error}") from error
        return of_ranks
