"""Gradients on their way from the device to their home in host memory.

Each is copied on a stream of its own as soon as autograd has made it; the device's memory is freed when the copy is
over. A thread waits for copies, one after the other, and finishes the work in host memory: adding up, where
micro-batches are, and then the sum of squares, which else the device works out, and which follows the unit's last
gradient. ``complete`` says which units have all of it, and waits for nothing; ``settle`` waits. Gradients of units that
are resident on the device do not travel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from offload.device.protocol import Device, Event
from offload.memory import tensor_at
from offload.report.meter import Meter
from offload.report.trace import Span
from offload.tiers.gradients import GradientStore
from offload.tiers.squares import Squares
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure, Job, Monitor, Worker
from swapper import Lease


class GradientTransport:
    """Takes gradients from one thread at a time; at most ``max_bytes`` of them (or one) are on their way."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        device: Device,
        store: GradientStore,
        landings: Sequence[Lease],
        dtype: torch.dtype,
        home_dtype: torch.dtype,
        max_bytes: int,
        squares: Squares | None,
        failure: Failure,
        meter: Meter,
    ) -> None:
        """``landings`` are buffers in host memory, each for the largest gradient, of ``dtype`` as it is made;
        gradients rest as ``home_dtype``. Without ``squares`` all sums are worked out in host memory.
        """
        self.max_bytes = max_bytes
        self.copied_bytes = 0
        """Device to host, since the engine was made."""
        self._units = units
        self._device = device
        self._store = store
        self._dtype = dtype
        self._home_dtype = home_dtype
        self._squares = squares
        self._failure = failure
        self._meter = meter
        self._landings = list(landings)
        self._bytes_under_way = 0
        self._changed = Monitor(failure)
        """Guards the two above. After the caches in the order of locks."""
        self._begun: set[ParameterSpec] = set()
        """Parameters of which a gradient for the coming step is here or on its way."""
        self._num_taken = [0] * len(units)
        """Gradients of each unit that were ever taken, or forgotten."""
        self._closed: deque[tuple[UnitSpec, int]] = deque()
        """Units whose gradients are in their places, each with that number as it was when it was closed."""
        self._last: Job | None = None
        self._finisher = Worker("offload-to-host")

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Send a complete gradient to its home. It must not change any more."""
        resting = self._store.gradients_of(unit)
        if resting.is_on_device:
            self._store.take(unit, spec, gradient.to(self._dtype), scale)
            return
        self._num_taken[unit.index] += 1
        if spec.numel == 0:  # a rank's shard has nothing of this parameter
            nothing = torch.empty(spec.shape, dtype=self._dtype)
            self._then(lambda: self._store.take(unit, spec, nothing, scale))
            return
        gradient = gradient.detach()
        gradient = (gradient.to_dense() if gradient.is_sparse else gradient).to(self._dtype)
        target = None
        is_first = spec not in self._begun and spec not in self._store.of(unit)  # a user may have set one
        if is_first and self._home_dtype.itemsize <= self._dtype.itemsize:
            target = resting.landing(spec)
        if target is not None:
            gradient = gradient.to(self._home_dtype)
        gradient = gradient.contiguous().view(-1)
        self._begun.add(spec)
        squared = self._squares is not None and target is not None
        if self._squares is not None:
            if target is None:
                self._squares.forget(spec)
            else:
                self._squares.begin((spec,), gradient)
        landing = self._take_room(gradient.nbytes, land=target is None)
        try:
            into = target if landing is None else tensor_at(landing.address, gradient.numel(), gradient.dtype)
            if into is None:
                raise RuntimeError(f"the gradient of {spec.name} has nowhere to go")
            span = self._meter.trace.begin("to host", f"gradient of {spec.name}", gradient.nbytes)
            stream = self._device.to_host
            stream.wait(self._device.compute.record())
            stream.copy(into, gradient)
            arrived = stream.record()
            self.copied_bytes += gradient.nbytes
            self._then(lambda: self._land(unit, spec, scale, into, landing, squared), arrived, gradient, span)
        except BaseException as error:  # its room is never given back: nothing may wait for it
            self._failure.record(error)
            raise

    def close(self, unit: UnitSpec) -> None:
        """The unit has all its gradients of this backward."""
        if self._store.gradients_of(unit).is_on_device:
            self._store.put_away(unit)
            return
        sums = None if self._squares is None else self._squares.send(unit.trainable)
        num_taken = self._num_taken[unit.index]

        def put_away() -> None:
            if sums is not None:
                self._know(unit, sums.read())
            self._store.put_away(unit)
            self._closed.append((unit, num_taken))

        self._then(put_away, None if sums is None else sums.arrived)

    def complete(self) -> Iterator[UnitSpec]:
        """See ``GradientStore.complete``. Never waits."""
        while self._closed:
            unit, num_taken = self._closed.popleft()
            if num_taken == self._num_taken[unit.index]:
                yield unit

    def settle(self) -> None:
        """Wait until every gradient that was taken is in its place, and its squares are known."""
        if self._squares is not None:
            for unit in self._units:
                self._store.gradients_of(unit).begin_squares()
        last, self._last = self._last, None
        if last is not None:
            with self._meter.stall("gradients"):
                last.wait(lambda: "the last gradient from the device")
        self._failure.check()
        sums = {} if self._squares is None else self._squares.collect()
        for unit in self._units if sums else ():
            self._know(unit, sums)
        self._store.settle()

    def forget(self, unit: UnitSpec) -> None:
        """The unit's gradients are wanted no more."""
        self._num_taken[unit.index] += 1
        self._begun.difference_update(unit.parameters)
        self._store.forget(unit)

    def stop(self) -> None:
        """Wait for what is on its way."""
        self._finisher.finish()

    def _know(self, unit: UnitSpec, sums: Mapping[ParameterSpec, float]) -> None:
        for spec, gradient in self._store.of(unit).items():
            gradient.sum_squares = sums.get(spec, gradient.sum_squares)

    def _take_room(self, nbytes: int, *, land: bool) -> Lease | None:
        """Wait until this much more may be on its way; the buffer for it, if it is to ``land`` in one."""

        def has_room() -> bool:
            fits = not self._bytes_under_way or self._bytes_under_way + nbytes <= self.max_bytes
            return fits and not (land and not self._landings)

        with self._meter.stall("gradients"), self._changed:
            self._changed.wait_until(has_room, lambda: "a gradient from the device")
            self._bytes_under_way += nbytes
            return self._landings.pop() if land else None

    def _land(
        self,
        unit: UnitSpec,
        spec: ParameterSpec,
        scale: float,
        target: torch.Tensor,
        landing: Lease | None,
        squared: bool,
    ) -> None:
        if landing is None:
            sum_squares = math.nan if squared else self._store.gradients_of(unit).sum_squares(spec)
            self._store.landed(unit, spec, scale, sum_squares)
            return
        self._store.take(unit, spec, target.view(spec.shape), scale)
        with self._changed:
            self._landings.append(landing)
            self._changed.notify_all()

    def _then(
        self,
        job: Callable[[], None],
        arrived: Event | None = None,
        gradient: torch.Tensor | None = None,
        span: Span | None = None,
    ) -> None:
        """Have ``job`` done after those before it, once what it needs has ``arrived``, which may be a ``gradient``.
        After a failure none is done."""

        def run() -> None:
            nonlocal gradient
            try:
                if arrived is not None:
                    arrived.wait()
                if gradient is not None and span is not None:
                    self._meter.trace.end(span)
                    nbytes, gradient = gradient.nbytes, None
                    with self._changed:
                        self._bytes_under_way -= nbytes
                        self._changed.notify_all()
                self._failure.check()
                job()
            except BaseException as error:
                self._failure.record(error)

        self._last = self._finisher.submit(run)
