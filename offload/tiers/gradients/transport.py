"""Gradients on their way from the device to their home in host memory.

Each is copied on a stream of its own as soon as autograd has made it; the device's memory is freed when the copy is
over. A thread waits for copies, one after the other, and finishes the work in host memory: adding up, where
micro-batches are, and then the sum of squares, which else the device works out, and which follows the unit's last
gradient. ``complete`` says which units have all of it. Gradients of units that are resident on the device stay there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from offload.device.protocol import Device, Event
from offload.interrupts import held_back
from offload.memory import tensor_at
from offload.ranks.agreement import Place
from offload.report.meter import Meter
from offload.report.trace import Span
from offload.tiers.gradients.norms import Squares
from offload.tiers.gradients.sink import GradientDtypes
from offload.tiers.gradients.store import GradientStore
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure, Job, Monitor, Worker
from swapper import Lease


@dataclass
class _Travelling:
    """A gradient on its way. ``elements`` are the device's, until they have come ``into`` host memory."""

    unit: UnitSpec
    spec: ParameterSpec
    scale: float
    elements: torch.Tensor | None
    into: torch.Tensor
    landing: Lease | None
    """The memory that it lands in, from where it is added to its home; None if it lands there."""
    squared: bool
    """Its sum of squares follows."""
    span: Span


@dataclass(eq=False)
class GradientTransport:
    """Takes gradients from one thread at a time; at most ``max_bytes`` of them (or one) are on their way."""

    units: Sequence[UnitSpec]
    device: Device
    store: GradientStore
    landings: Sequence[Lease]
    """Buffers in host memory, each for the largest gradient as it is made."""
    dtypes: GradientDtypes
    max_bytes: int
    squares: Squares
    failure: Failure
    meter: Meter

    def __post_init__(self) -> None:
        self.copied_bytes = 0
        """Device to host, since the engine was made."""
        self._landings = list(self.landings)
        self._bytes_under_way = 0
        self._changed = Monitor(self.failure)
        """Guards the two above. After the caches in the order of locks."""
        self._begun: set[ParameterSpec] = set()
        """Parameters of which a gradient for the coming step is here or on its way."""
        self._num_taken = [0] * len(self.units)
        """Gradients of each unit that were ever taken, or forgotten."""
        self._closed: deque[tuple[UnitSpec, int]] = deque()
        """Units whose gradients are in their places, each with that number as it was when it was closed."""
        self._last: Job | None = None
        self._finisher = Worker("offload-to-host")

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """The gradient must not change any more."""
        resting = self.store.gradients_of(unit)
        if resting.is_on_device:
            self.store.take(unit, spec, gradient.to(self.dtypes.made), scale)
            return
        self._num_taken[unit.index] += 1
        if spec.numel == 0:  # a rank's shard has nothing of this parameter
            nothing = torch.empty(spec.shape, dtype=self.dtypes.made)
            with held_back():
                self._then(lambda: self.store.take(unit, spec, nothing, scale))
            return
        gradient = gradient.detach()
        gradient = (gradient.to_dense() if gradient.is_sparse else gradient).to(self.dtypes.made)
        target = None
        is_first = spec not in self._begun and spec not in self.store.of(unit)  # a user may have set one
        if is_first and self.dtypes.kept.itemsize <= self.dtypes.made.itemsize:
            target = resting.landing(spec)
        if target is not None:
            gradient = gradient.to(self.dtypes.kept)
        gradient = gradient.contiguous().view(-1)
        self._wait_for_room(gradient.nbytes, land=target is None)
        with held_back():  # from here on it is on its way, and counted
            try:
                self._send(unit, spec, scale, gradient, target)
            except BaseException as error:  # its room is never given back: nothing may wait for it
                self.failure.record(error)
                raise

    def end_part(self, unit: UnitSpec) -> None:
        self.store.end_part(unit)

    def close(self, unit: UnitSpec) -> None:
        if self.store.gradients_of(unit).is_on_device:
            self.store.put_away(unit)
            return
        num_taken = self._num_taken[unit.index]
        with held_back():
            sums = self.squares.send(unit.trainable)

            def put_away() -> None:
                self._know(unit, sums.read())
                self.store.put_away(unit)
                self._closed.append((unit, num_taken))

            self._then(put_away, sums.arrived)

    def complete(self) -> Iterator[UnitSpec]:
        while self._closed:
            unit, num_taken = self._closed.popleft()
            if num_taken == self._num_taken[unit.index]:
                yield unit

    def settle(self, at: Place | None = None) -> None:
        for unit in self.units:
            self.store.gradients_of(unit).begin_squares()
        last = self._last
        if last is not None:
            with self.meter.stall("gradients"):
                last.wait(lambda: "the last gradient from the device")
        self.failure.check()
        sums = self.squares.collect()
        for unit in self.units if sums else ():
            self._know(unit, sums)
        self.squares.forget(sums)
        self.store.settle(at)

    def restored(self) -> None:
        self.store.restored()

    def use_up(self, unit: UnitSpec, specs: Set[ParameterSpec]) -> None:
        self._num_taken[unit.index] += 1
        self._begun.difference_update(specs)
        self.store.use_up(unit, specs)

    def forget(self, unit: UnitSpec) -> None:
        self._num_taken[unit.index] += 1
        self._begun.difference_update(unit.parameters)
        self.store.forget(unit)

    def stop(self) -> None:
        """Wait for what is on its way."""
        self._finisher.finish()

    def _know(self, unit: UnitSpec, sums: Mapping[ParameterSpec, float]) -> None:
        for spec, gradient in self.store.of(unit).items():
            gradient.sum_squares = sums.get(spec, gradient.sum_squares)

    def _wait_for_room(self, nbytes: int, *, land: bool) -> None:
        """Return when this much more may be on its way, and there is a landing if it needs one: it stays so."""

        def has_room() -> bool:
            fits = not self._bytes_under_way or self._bytes_under_way + nbytes <= self.max_bytes
            return fits and not (land and not self._landings)

        with self.meter.stall("gradients"), self._changed:
            self._changed.wait_until(has_room, lambda: "a gradient from the device")

    def _send(
        self, unit: UnitSpec, spec: ParameterSpec, scale: float, gradient: torch.Tensor, target: torch.Tensor | None
    ) -> None:
        """Have the flat ``gradient`` copied to its place, the ``target``, or to a landing if there is none."""
        made, landing = None, None
        with self._changed:
            self._bytes_under_way += gradient.nbytes
            if target is None:
                landing = self._landings.pop()
        if landing is None:
            made = self.squares.begin((spec,), gradient)
        else:
            self.squares.forget((spec,))
            target = tensor_at(landing.address, gradient.numel(), gradient.dtype)
        assert target is not None
        self._begun.add(spec)
        span = self.meter.trace.begin("to host", f"gradient of {spec.name}", gradient.nbytes)
        stream = self.device.to_host
        stream.wait(made or self.device.compute.record())
        stream.copy(target, gradient)
        one = _Travelling(unit, spec, scale, gradient, target, landing, made is not None, span)
        self.copied_bytes += gradient.nbytes
        self._then(lambda: self._land(one), stream.record(), one)

    def _land(self, one: _Travelling) -> None:
        unit, spec = one.unit, one.spec
        if one.landing is None:
            sum_squares = math.nan if one.squared else self.store.gradients_of(unit).sum_squares(spec)
            self.store.landed(unit, spec, one.scale, sum_squares)
            return
        self.store.take(unit, spec, one.into.view(spec.shape), one.scale)
        with self._changed:
            self._landings.append(one.landing)
            self._changed.notify_all()

    def _then(
        self, job: Callable[[], None], arrived: Event | None = None, travelling: _Travelling | None = None
    ) -> None:
        """Have ``job`` done after those before it, once what it needs has ``arrived``, which may be a gradient. After a
        failure none is done."""

        def run() -> None:
            try:
                if arrived is not None:
                    arrived.wait()
                if travelling is not None and travelling.elements is not None:
                    self.meter.trace.end(travelling.span)
                    nbytes, travelling.elements = travelling.elements.nbytes, None
                    with self._changed:
                        self._bytes_under_way -= nbytes
                        self._changed.notify_all()
                self.failure.check()
                job()
            except BaseException as error:
                self.failure.record(error)

        self._last = self._finisher.submit(run)
