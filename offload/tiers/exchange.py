"""Gradients that ranks exchange: each sends every other one its part, and adds up its own shard of all of them.

The sum is taken in the order of the ranks, in fp32, and divided by their number: the same bits wherever shards rest. It
goes to the shard's place like a gradient that was made here. Where there are replicas, each adds up what the ranks of
its copy have, and then all add up their sums: every replica gets the same bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

import aio_ext
from offload.errors import warn
from offload.memory import tensor_at
from offload.ranks.collectives import Collectives, Kind, Operation
from offload.report.meter import Meter
from offload.tiers.gradients import GradientStore, plain
from offload.tiers.host_weights import HostWeights
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure, Monitor
from swapper import Lease, align


class Gradients:
    """Memory for the gradients of one whole unit, as this rank has made them; ``scale`` is what they are still to be
    multiplied by."""

    def __init__(self, memory: Lease | aio_ext.Memory) -> None:
        self.address: int = memory.address
        self.nbytes: int = memory.nbytes
        self.scale = 1.0
        self.present: set[ParameterSpec] = set()
        self._memory = memory


class GradientExchange:
    """Takes gradients from one thread at a time; see ``GradientStore`` for what the methods promise."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        shards: Sequence[UnitSpec],
        store: GradientStore,
        host: HostWeights,
        buffers: Sequence[Gradients],
        landing: Lease,
        dtype: torch.dtype,
        collectives: Collectives,
        failure: Failure,
        meter: Meter,
        *,
        is_last: Callable[[], bool],
    ) -> None:
        """``store`` has this rank's ``shards``, whose weights ``host`` has. ``buffers`` and ``landing`` hold the
        gradients of any unit, of ``dtype``. ``is_last``: no more backward comes before the step, as far as is known."""
        self.added_bytes = 0
        """Host memory of buffers beyond the plan."""
        self._units = units
        self._shards = shards
        self._store = store
        self._host = host
        self._landing = landing
        self._dtype = dtype
        self._collectives = collectives
        self._failure = failure
        self._meter = meter
        self._is_last = is_last
        self._open: dict[int, Gradients] = {}
        """By unit: gradients that were not sent."""
        self._num_sent = 0
        self._free = list(buffers)
        self._changed = Monitor(failure)
        """Guards the two above. After the caches in the order of locks."""
        self._arrived: deque[UnitSpec] = deque()
        self.unsettled = False
        """Something may have come since sums of squares were exchanged."""
        collectives.register(Kind.EXCHANGE, self._carry_out)

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times ``gradient``, of a whole parameter, to what is to be sent."""
        self.unsettled = True
        own = self._open.get(unit.index)
        if own is None:
            own = self._open[unit.index] = self._take_buffer(unit)
            own.scale, own.present = scale, set()
        elements, gradient = self._elements(own, spec), plain(gradient).view(-1)
        if own.scale != scale:
            gradient = gradient * (scale / own.scale)
        if spec in own.present:
            elements.add_(gradient)
        else:
            elements.copy_(gradient)
            own.present.add(spec)

    def close(self, unit: UnitSpec) -> None:
        """The unit has all its gradients of this backward."""
        if unit.index in self._open and self._is_last():
            self._send(unit)

    def complete(self) -> Iterator[UnitSpec]:
        """The shards whose gradients have come. Never waits."""
        while self._arrived:
            yield self._arrived.popleft()

    def settle(self, where: str | None = None) -> None:
        """Wait until all gradients of all ranks are in their places, and the sums of squares are those of all ranks.

        Ranks that have made gradients since the last time meet for that. ``where``, a place of the program: all meet.
        """
        with self._meter.stall("gradients"):
            if self.unsettled or where is not None:
                self.unsettled = False
                for unit in self._units:
                    if unit.index in self._open:
                        self._send(unit)
                self._collectives.meet(where or "the end of backward", torch.empty(0))
            self._store.settle()
        self._failure.check()

    def forget(self, unit: UnitSpec) -> None:
        """The unit's gradients are wanted no more."""
        own = self._open.pop(unit.index, None)
        if own is not None:
            with self._changed:
                self._free.append(own)
        self._store.forget(self._shards[unit.index])

    def _take_buffer(self, unit: UnitSpec) -> Gradients:
        with self._changed:
            nbytes = align(unit.trainable_numel * self._dtype.itemsize)
            if not self._fitting(nbytes) and not self._num_sent:
                warn(
                    f"unit {unit.name} has gradients while {len(self._open)} others wait for theirs: the engine took "
                    "memory for the gradients of one more unit than was planned"
                )
                self.added_bytes += nbytes
                return Gradients(aio_ext.Memory(nbytes))
            with self._meter.stall("gradients"):
                self._changed.wait_until(
                    lambda: bool(self._fitting(nbytes)), lambda: f"memory for gradients of {unit.name}"
                )
            smallest = min(
                self._fitting(nbytes), key=lambda own: own.nbytes
            )  # where each unit has one, that is its own
            self._free.remove(smallest)
            return smallest

    def _fitting(self, nbytes: int) -> list[Gradients]:
        return [own for own in self._free if own.nbytes >= nbytes]

    def _send(self, unit: UnitSpec) -> None:
        own = self._open.pop(unit.index)
        with self._changed:
            self._num_sent += 1
        self._collectives.submit(Kind.EXCHANGE, unit.index, f"the gradients of unit {unit.name}", own)

    def _elements(self, own: Gradients, spec: ParameterSpec) -> torch.Tensor:
        return tensor_at(own.address + spec.offset * self._dtype.itemsize, spec.numel, self._dtype)

    # On the thread of collectives.

    def _carry_out(self, index: int, wanting: Sequence[int], operation: Operation | None) -> None:
        unit, shard, peers = self._units[index], self._shards[index], self._collectives.world.shards
        own: Gradients | None = None if operation is None else operation.own
        scales = self._gather_scales(unit, own)
        landing = tensor_at(self._landing.address, unit.trainable_numel, self._dtype)
        if own is None:
            sent = torch.zeros(unit.trainable_numel, dtype=self._dtype)
        else:
            sent = tensor_at(own.address, unit.trainable_numel, self._dtype)
        if peers.size > 1:
            self._collectives.scatter_parts(landing, sent, peers)
        else:
            landing.copy_(sent)
        if own is not None:
            with self._changed:
                self._num_sent -= 1
                self._free.append(own)
                self._changed.notify_all()
        self._host.wait_for_update(shard)  # which reads the gradients of the last step
        for spec, total, scale in self._add_up(unit, shard, landing.view(peers.size, -1), scales):
            self._store.take(shard, spec, total, scale)
        self._store.close(shard)
        for done in self._store.complete():
            self._arrived.append(done)

    def _gather_scales(self, unit: UnitSpec, own: Gradients | None) -> torch.Tensor:
        """Of each rank and parameter: the scale of its gradient, NaN if it has none."""
        scales = torch.full((len(unit.parameters),), math.nan, dtype=torch.float64)
        for position, spec in enumerate(unit.parameters):
            if own is not None and spec in own.present:
                scales[position] = own.scale
        into = torch.empty((self._collectives.world.size, len(scales)), dtype=torch.float64)
        self._collectives.all_gather(into.view(-1), scales)
        return into

    def _add_up(
        self, unit: UnitSpec, shard: UnitSpec, parts: torch.Tensor, scales: torch.Tensor
    ) -> list[tuple[ParameterSpec, torch.Tensor, float]]:
        """The mean of what all ranks have of each parameter, and the scale that is common to it. Those that have
        nothing count as zero; what nobody has is left out. ``parts`` are what the ranks of this copy have."""
        world, found = self._collectives.world, []
        flat = torch.zeros(shard.trainable_numel)
        for position, (whole, spec) in enumerate(zip(unit.parameters, shard.parameters, strict=True)):
            of_ranks = scales[:, position].tolist()
            having = [scale for scale in of_ranks if not math.isnan(scale)]
            if not whole.trainable or not having:
                continue
            elements = slice(spec.offset, spec.offset + spec.numel)
            for part, rank in zip(parts, world.shards.ranks, strict=True):
                if not math.isnan(of_ranks[rank]):
                    flat[elements].add_(part[elements], alpha=of_ranks[rank] / having[0] if having[0] else 1.0)
            found.append((spec, flat[elements].view(spec.shape), having[0]))
        self._add_replicas(flat)
        flat.div_(world.size)
        return found

    def _add_replicas(self, flat: torch.Tensor) -> None:
        """Make it the sum of all replicas' ones: each adds up a part, and gives it to the others."""
        replicas = self._collectives.world.replicas
        if replicas.size == 1:
            return
        parts = tensor_at(self._landing.address, flat.numel(), torch.float32)
        self._collectives.scatter_parts(parts, flat, replicas)
        total, *others = parts.view(replicas.size, -1)
        for other in others:
            total.add_(other)
        self._collectives.all_gather(flat, total, replicas)
