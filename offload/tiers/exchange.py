"""Gradients that ranks exchange: each sends every other one its part, and adds up its own shard of all of them.

The sum is taken in the order of the ranks, in fp32, and divided by their number: the same bits wherever shards rest. It
goes to the shard's place like a gradient that was made here. All of that happens where gradients are made: in host
memory, or on a device, where it stands in a stream and no thread waits for it. Where there are replicas, each adds up
what the ranks of its copy have, and then all add up their sums: every replica gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from offload.device.protocol import Event
from offload.errors import warn
from offload.ranks.collectives import Kind, Operation, Rounds
from offload.ranks.links import Links
from offload.report.meter import Meter
from offload.tiers.gradients import GradientStore, plain
from offload.tiers.host_weights import HostWeights
from offload.tiers.transport import GradientTransport
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure, Monitor
from swapper import align


class Gradients:
    """Memory for the gradients of one whole unit, as this rank has made them; ``scale`` is what they are still to be
    multiplied by."""

    def __init__(self, memory: torch.Tensor, owner: object) -> None:
        """``memory`` is flat, of bytes, and lives as long as its ``owner``."""
        self.memory = memory
        self.flat = memory
        """The same, as elements of the dtype in which they are added up."""
        self.scale = 1.0
        self.present: set[ParameterSpec] = set()
        self.made: Event | None = None
        self.sent: Event | None = None
        self._owner = owner

    def of(self, spec: ParameterSpec) -> torch.Tensor:
        """Those of one parameter, flat."""
        return self.flat[spec.offset : spec.offset + spec.numel]


class GradientExchange:
    """Takes gradients from one thread at a time; see ``GradientStore`` for what the methods promise."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        shards: Sequence[UnitSpec],
        store: GradientStore | GradientTransport,
        host: HostWeights,
        buffers: Sequence[Gradients],
        make_buffer: Callable[[int], Gradients],
        landing: torch.Tensor,
        make_sum: Callable[[int], torch.Tensor],
        dtype: torch.dtype,
        held_dtype: torch.dtype,
        links: Links,
        collectives: Rounds,
        failure: Failure,
        meter: Meter,
        *,
        holds: Callable[[], bool],
    ) -> None:
        """``store`` has this rank's ``shards``, whose weights ``host`` has. ``buffers`` hold the gradients of any unit,
        and ``landing``, flat bytes, those that come: memory where compute makes them, over which ``links`` go.
        ``make_buffer`` makes one more, of so many bytes. ``make_sum`` gives zeros of fp32 for one shard's sums.
        ``holds``: what is made now waits for gradients of a later backward, and is added up as ``held_dtype``; else it
        goes as it was made, as ``dtype``."""
        self.added_bytes = 0
        """Of buffers beyond the plan."""
        self._units = units
        self._shards = shards
        self._store = store
        self._host = host
        self._make_buffer = make_buffer
        self._landing = landing
        self._make_sum = make_sum
        self._dtype = dtype
        self._held_dtype = held_dtype
        self._links = links
        self._collectives = collectives
        self._failure = failure
        self._meter = meter
        self._holds = holds
        self._open: dict[int, Gradients] = {}
        """By unit: gradients that were not sent."""
        self._num_sent = 0
        self._free = list(buffers)
        self._changed = Monitor(failure)
        """Guards the two above. After the caches in the order of locks."""
        self._used_up: Event | None = links.mark()
        """The last step's update has been given what it reads of gradients on a device."""
        self.unsettled = False
        """Something may have come since sums of squares were exchanged."""
        collectives.register(Kind.GRADIENTS, self._carry_out)

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times ``gradient``, of a whole parameter, to what is to be sent."""
        self.unsettled = True
        own = self._open.get(unit.index)
        if own is None:
            own = self._open[unit.index] = self._take_buffer(unit)
            own.scale, own.present = scale, set()
        elements, gradient = own.of(spec), plain(gradient).view(-1)
        if own.scale != scale:
            gradient = gradient * (scale / own.scale)
        if spec in own.present:
            elements.add_(gradient)
        else:
            elements.copy_(gradient)
            own.present.add(spec)

    def close(self, unit: UnitSpec) -> None:
        """The unit has all its gradients of this backward."""
        if unit.index in self._open and not self._holds():
            self._send(unit)

    def complete(self) -> Iterator[UnitSpec]:
        """The shards whose gradients have come. Never waits."""
        return self._store.complete()

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
                self._collectives.all_gather(where or "the end of backward", torch.empty(0))
                self._links.after(self._links.point())
            self._store.settle()
        self._failure.check()

    def forget(self, unit: UnitSpec) -> None:
        """The unit's gradients are wanted no more."""
        own = self._open.pop(unit.index, None)
        if own is not None:
            with self._changed:
                self._free.append(own)
        self._used_up = self._links.mark()
        self._store.forget(self._shards[unit.index])

    def _take_buffer(self, unit: UnitSpec) -> Gradients:
        dtype = self._held_dtype if self._holds() else self._dtype
        own = self._take_memory(unit, align(unit.trainable_numel * dtype.itemsize))
        own.flat = own.memory[: unit.trainable_numel * dtype.itemsize].view(dtype)
        self._links.after(own.sent)
        return own

    def _take_memory(self, unit: UnitSpec, nbytes: int) -> Gradients:
        with self._changed:
            if not self._fitting(nbytes) and not self._num_sent:
                warn(
                    f"unit {unit.name} has gradients while {len(self._open)} others wait for theirs: the engine took "
                    "memory for the gradients of one more unit than was planned"
                )
                self.added_bytes += nbytes
                return self._make_buffer(nbytes)
            with self._meter.stall("gradients"):
                self._changed.wait_until(
                    lambda: bool(self._fitting(nbytes)), lambda: f"memory for gradients of {unit.name}"
                )
            own = min(self._fitting(nbytes), key=lambda own: own.memory.nbytes)  # where each unit has one, its own
            self._free.remove(own)
            return own

    def _fitting(self, nbytes: int) -> list[Gradients]:
        return [own for own in self._free if own.memory.nbytes >= nbytes]

    def _send(self, unit: UnitSpec) -> None:
        own = self._open.pop(unit.index)
        own.made = self._links.mark()
        with self._changed:
            self._num_sent += 1
        self._collectives.submit(Kind.GRADIENTS, unit.index, f"the gradients of unit {unit.name}", own)

    # On the thread of collectives.

    def _carry_out(self, index: int, wanting: Sequence[int], operation: Operation | None) -> None:
        unit, shard = self._units[index], self._shards[index]
        own: Gradients | None = None if operation is None else operation.own
        scales, is_held = self._tell(unit, own)
        with self._links.turn(self._used_up, None if own is None else own.made):
            parts = self._scatter(unit, own, scales, is_held)
            if own is not None:
                own.sent = self._links.mark()
                with self._changed:
                    self._num_sent -= 1
                    self._free.append(own)
                    self._changed.notify_all()
            self._host.wait_for_update(shard)  # which reads the gradients of the last step
            for spec, total, scale in self._add_up(unit, shard, parts, scales):
                self._store.take(shard, spec, total, scale)
            self._store.close(shard)

    def _tell(self, unit: UnitSpec, own: Gradients | None) -> tuple[list[list[float]], list[bool]]:
        """Of each rank and parameter: the scale of its gradient, NaN if it has none. Of each rank: its gradients are of
        ``held_dtype``."""
        told = torch.full((len(unit.parameters) + 1,), math.nan, dtype=torch.float64)
        told[-1] = own is not None and own.flat.dtype == self._held_dtype
        for position, spec in enumerate(unit.parameters):
            if own is not None and spec in own.present:
                told[position] = own.scale
        rows = self._collectives.all_gather_rows(told)
        return rows[:, :-1].tolist(), rows[:, -1].bool().tolist()

    def _scatter(
        self, unit: UnitSpec, own: Gradients | None, scales: Sequence[Sequence[float]], is_held: Sequence[bool]
    ) -> list[torch.Tensor]:
        """This rank's part of what each rank of its copy has; empty for one that has nothing."""
        peers = self._collectives.world.shards
        numel = unit.trainable_numel // peers.size
        dtypes = [self._held_dtype if is_held[rank] else self._dtype for rank in peers.ranks]
        sizes = [
            0 if all(map(math.isnan, scales[rank])) else numel * dtype.itemsize
            for rank, dtype in zip(peers.ranks, dtypes, strict=True)
        ]
        landing = self._landing[: sum(sizes)]
        if landing.nbytes:
            self._links.scatter_parts(landing, self._landing[:0] if own is None else own.flat, peers, sizes)
        return [part.view(dtype) for part, dtype in zip(landing.split(sizes), dtypes, strict=True)]

    def _add_up(
        self,
        unit: UnitSpec,
        shard: UnitSpec,
        parts: Sequence[torch.Tensor],
        scales: Sequence[Sequence[float]],
    ) -> list[tuple[ParameterSpec, torch.Tensor, float]]:
        """The mean of what all ranks have of each parameter, and the scale that is common to it. Those that have
        nothing count as zero; what nobody has is left out. ``parts`` are what the ranks of this copy have."""
        world, found = self._collectives.world, []
        flat = self._make_sum(shard.trainable_numel)
        for position, (whole, spec) in enumerate(zip(unit.parameters, shard.parameters, strict=True)):
            of_ranks = [of_rank[position] for of_rank in scales]
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
        parts = self._landing[: flat.nbytes].view(flat.dtype)  # what had come there is added up
        self._links.scatter_parts(parts, flat, replicas, [flat.nbytes // replicas.size] * replicas.size)
        total, *others = parts.view(replicas.size, -1)
        for other in others:
            total.add_(other)
        self._links.all_gather(flat, total, replicas)
