"""Gradients that ranks exchange: a reduce-scatter over the ranks that hold the shards of one copy of the model, then
an all-reduce of what each has over its replicas.

Each rank sends every other one its part, and adds up its own shard of all of them: in the order of the ranks, in fp32,
divided by their number, so with the same bits wherever shards are stored. Where there are replicas, they add up their
sums in the same way, each a part of them, which they gather: every replica gets the same bits. The result goes to the
shard's place like a gradient that was made here. All of that happens where gradients are made: in host memory, or on a
device, where it stands in a stream and no thread waits for it.

The gradients of one unit are a bucket. A bucket is open while gradients are added to it, sent until the thread of
collectives has scattered it, and free else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from offload.device.protocol import Event
from offload.errors import warn
from offload.interrupts import held_back
from offload.ranks.agreement import Place
from offload.ranks.collectives import Kind, Operation, Rounds
from offload.ranks.links import Links, all_reduce
from offload.report.meter import Meter
from offload.tiers.fence import UpdateFence
from offload.tiers.gradients.sink import GradientDtypes, GradientSink
from offload.tiers.gradients.store import plain
from offload.tiers.gradients.wire import Wire
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure, Monitor
from swapper import align


class Bucket:
    """Memory for the gradients of one whole unit, as this rank has made them."""

    def __init__(self, memory: torch.Tensor, owner: object) -> None:
        """``memory`` is flat, of bytes, and lives as long as its ``owner``."""
        self.nbytes = memory.nbytes
        self.sent: Event | None = None
        """The point where the last ones have been scattered."""
        self._memory = memory
        self._owner = owner
        self.open(torch.uint8, 0, 1.0)

    def open(self, dtype: torch.dtype, numel: int, scale: float) -> None:
        """It is for other gradients from now on: ``numel`` elements, still to be multiplied by ``scale``."""
        self.flat = self._memory[: numel * dtype.itemsize].view(dtype)
        self.dtype = dtype
        """Of the gradients; those that are sent may be in another format."""
        self.scale = scale
        self.present: set[ParameterSpec] = set()
        self.made: Event | None = None
        self.is_part = False
        """This rank will give more of the same unit soon."""

    def of(self, spec: ParameterSpec) -> torch.Tensor:
        """Those of one parameter, flat."""
        return self.flat[spec.offset : spec.offset + spec.numel]

    def add(self, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        """Add ``scale`` times a flat gradient."""
        elements = self.of(spec)
        if self.scale != scale:
            gradient = gradient * (scale / self.scale)
        if spec in self.present:
            elements.add_(gradient)
        else:
            elements.copy_(gradient)
            self.present.add(spec)


@dataclass(frozen=True)
class ExchangeMemory:
    """Memory where compute makes gradients."""

    buckets: Sequence[Bucket]
    """Those that were planned."""
    make_bucket: Callable[[int], Bucket]
    """Makes one more, of so many bytes."""
    landing: torch.Tensor
    """Flat bytes for what other ranks send of one unit."""
    make_sum: Callable[[int], torch.Tensor]
    """Zeros of fp32 for one shard's sums."""


@dataclass(eq=False)
class GradientExchange:
    """Takes gradients of whole parameters; the sink after it gets those of shards."""

    units: Sequence[UnitSpec]
    shards: Sequence[UnitSpec]
    """Of each unit, this rank's."""
    sink: GradientSink
    """Takes the shards' gradients."""
    fence: UpdateFence
    """Of the shards' updates."""
    memory: ExchangeMemory
    dtypes: GradientDtypes
    """Dtypes of gradients: what is held is added up as ``kept``; else they are as they were ``made``."""
    wire: Wire
    """Format in which they are sent."""
    holds: Callable[[], bool]
    """Tell whether what is made now waits for gradients of a later backward."""
    links: Links
    """Between the ranks' memories."""
    collectives: Rounds
    failure: Failure
    meter: Meter

    def __post_init__(self) -> None:
        self._buckets = list(self.memory.buckets)
        self._open: dict[int, Bucket] = {}
        """By unit: those that were not sent. All but these and the next ones are free."""
        self._sent: set[Bucket] = set()
        self._scattered = Monitor(self.failure)
        """For a bucket to leave those that were sent. After the caches in the order of locks."""
        self._used_up: Event | None = self.links.mark()
        """The last step's update has been given what it reads of gradients on a device."""
        self._unsettled = False
        """Something may have come since sums of squares were exchanged."""
        self._num_sent = [0] * len(self.units)
        """Buckets of each unit that were sent; the next one is of those that were added up and handed on."""
        self._num_added_up = [0] * len(self.units)
        self.collectives.register(Kind.GRADIENTS, self._carry_out)

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        self._unsettled = True
        bucket = self._open.get(unit.index)
        if bucket is None:
            dtype = self.dtypes.kept if self.holds() else self.dtypes.made
            bucket = self._free_bucket(unit, align(unit.trainable_numel * dtype.itemsize))
            bucket.open(dtype, unit.trainable_numel, scale)
            self.links.after(bucket.sent)
            self._open[unit.index] = bucket
        bucket.add(spec, plain(gradient).view(-1), scale)

    def end_part(self, unit: UnitSpec) -> None:
        """Ranks exchange those of each micro-batch, as in a loop: added up by each rank first, they would be other
        sums."""
        self._send_if_due(unit, is_part=True)

    def close(self, unit: UnitSpec) -> None:
        self._send_if_due(unit, is_part=False)

    def complete(self) -> Iterator[UnitSpec]:
        """Shards, not units. Of those that other ranks send more of, nobody here knows."""
        for shard in self.sink.complete():
            index = shard.index
            if index not in self._open and self._num_sent[index] == self._num_added_up[index]:
                yield shard

    def settle(self, at: Place | None = None) -> None:
        """Ranks that have made gradients since the last time meet for that."""
        with self.meter.stall("gradients"):
            if self._unsettled or at is not None:
                for unit in self.units:
                    if unit.index in self._open:
                        self._send(unit)
                self.collectives.all_gather("the end of backward" if at is None else at.name, torch.empty(0))
                self.links.after(self.links.point())
                self._unsettled = False
            self.sink.settle(at)
        self.failure.check()

    def restored(self) -> None:
        self._unsettled = True
        self.sink.restored()

    def use_up(self, unit: UnitSpec, specs: Set[ParameterSpec]) -> None:
        """``specs`` are those of the rank's shards."""
        self._drop(unit)
        self.sink.use_up(self.shards[unit.index], specs)

    def forget(self, unit: UnitSpec) -> None:
        self._drop(unit)
        self.sink.forget(self.shards[unit.index])

    def _drop(self, unit: UnitSpec) -> None:
        self._open.pop(unit.index, None)
        self._used_up = self.links.mark()

    def _free_bucket(self, unit: UnitSpec, nbytes: int) -> Bucket:
        def find() -> Bucket | None:
            taken = {*self._open.values(), *self._sent}
            free = [bucket for bucket in self._buckets if bucket.nbytes >= nbytes and bucket not in taken]
            return min(free, key=lambda bucket: bucket.nbytes, default=None)  # where each unit has one, its own

        def comes() -> bool:
            return any(bucket.nbytes >= nbytes for bucket in self._sent)

        with self._scattered:
            if find() is None and comes():
                with self.meter.stall("gradients"), self.collectives.needed():
                    self._scattered.wait_until(
                        lambda: find() is not None or not comes(), lambda: f"memory for gradients of {unit.name}"
                    )
            bucket = find()
            if bucket is None:
                warn(
                    f"unit {unit.name} has gradients while {len(self._open)} others wait for theirs: the engine took "
                    "memory for the gradients of one more unit than was planned"
                )
                bucket = self.memory.make_bucket(nbytes)
                self._buckets.append(bucket)
            return bucket

    def _send_if_due(self, unit: UnitSpec, *, is_part: bool) -> None:
        if unit.index in self._open and not self.holds():
            self._send(unit, is_part=is_part)

    def _send(self, unit: UnitSpec, *, is_part: bool = False) -> None:
        with held_back():  # a bucket that is half sent could neither be kept nor be sent again
            bucket = self._open[unit.index]
            present = [slice(spec.offset, spec.offset + spec.numel) for spec in bucket.present]
            bucket.flat = self.wire.pack(bucket.flat, self.collectives.world.shards.size, present)
            bucket.is_part = is_part
            bucket.made = self.links.mark()
            self._sent.add(bucket)
            del self._open[unit.index]
            self._num_sent[unit.index] += 1
            self.collectives.submit(Kind.GRADIENTS, unit.index, f"the gradients of unit {unit.name}", bucket)

    # On the thread of collectives.

    def _carry_out(self, index: int, wanting: Sequence[int], operation: Operation | None) -> None:
        unit, shard = self.units[index], self.shards[index]
        bucket: Bucket | None = None if operation is None else operation.own
        scales, is_held = self._tell(unit, bucket)
        with self.links.turn(self._used_up, None if bucket is None else bucket.made):
            parts = self._scatter(unit, bucket, scales, is_held)
            if bucket is not None:
                bucket.sent = self.links.mark()
                with self._scattered:
                    self._sent.discard(bucket)
                    self._scattered.notify_all()
            self.fence.wait(shard)  # which reads the gradients of the last step
            for spec, total, scale in self._reduce(unit, shard, parts, scales, is_held):
                self.sink.take(shard, spec, total, scale)
            self._num_added_up[index] += bucket is not None
            if bucket is not None and bucket.is_part:
                self.sink.end_part(shard)
            else:
                self.sink.close(shard)

    def _tell(self, unit: UnitSpec, bucket: Bucket | None) -> tuple[list[list[float]], list[bool]]:
        """Of each rank and parameter: the scale of its gradient, NaN if it has none. Of each rank: its gradients were
        held, and are as they are kept."""
        told = torch.full((len(unit.parameters) + 1,), math.nan, dtype=torch.float64)
        told[-1] = bucket is not None and bucket.dtype == self.dtypes.kept
        for position, spec in enumerate(unit.parameters):
            if bucket is not None and spec in bucket.present:
                told[position] = bucket.scale
        rows = self.collectives.all_gather_rows(told)
        return rows[:, :-1].tolist(), rows[:, -1].bool().tolist()

    def _scatter(
        self, unit: UnitSpec, bucket: Bucket | None, scales: Sequence[Sequence[float]], is_held: Sequence[bool]
    ) -> list[torch.Tensor]:
        """This rank's part of what each rank of its copy has; empty for one that has nothing."""
        peers = self.collectives.world.shards
        numel = unit.trainable_numel // peers.size
        sizes = [
            0 if all(map(math.isnan, scales[rank])) else self.wire.nbytes(numel, self.dtypes.of(is_held[rank]))
            for rank in peers.ranks
        ]
        landing = self.memory.landing[: sum(sizes)]
        own = bucket.flat if bucket is not None and bucket.present else landing[:0]  # as all ranks were told
        if landing.nbytes:
            self.links.scatter_parts(landing, own, peers, sizes)
        return list(landing.split(sizes))

    def _reduce(
        self,
        unit: UnitSpec,
        shard: UnitSpec,
        parts: Sequence[torch.Tensor],
        scales: Sequence[Sequence[float]],
        is_held: Sequence[bool],
    ) -> list[tuple[ParameterSpec, torch.Tensor, float]]:
        """The mean of what all ranks have of each parameter, and the scale that is common to it. Those that have
        nothing count as zero; what nobody has is left out. ``parts`` are what the ranks of this copy have."""
        world, found = self.collectives.world, []
        flat = self.memory.make_sum(shard.trainable_numel)
        for position, (whole, spec) in enumerate(zip(unit.parameters, shard.parameters, strict=True)):
            of_ranks = [of_rank[position] for of_rank in scales]
            having = [scale for scale in of_ranks if not math.isnan(scale)]
            if not whole.trainable or not having:
                continue
            total = flat[spec.offset : spec.offset + spec.numel]
            for part, rank in zip(parts, world.shards.ranks, strict=True):
                if not math.isnan(of_ranks[rank]):
                    factor = of_ranks[rank] / having[0] if having[0] else 1.0
                    self.wire.add(total, part, self.dtypes.of(is_held[rank]), spec.offset, factor)
            found.append((spec, total.view(spec.shape), having[0]))
        all_reduce(self.links, flat, self.memory.landing, world.replicas)  # what had come there is added up
        flat.div_(world.size)
        return found
