"""Gradients on their way from the device to their home in host memory.

Each is copied on a stream of its own as soon as autograd has made it; the device's memory is let go when the copy is
over. A thread waits for copies, one after the other, and does what is left to do in host memory: adding up, where
micro-batches are, and then the sum of squares, which else the device works out. ``settle`` waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from offload.device import Device, Event
from offload.device_squares import Squares
from offload.failure import Failure
from offload.gradients import Gradients
from offload.memory import tensor_at
from offload.report import Meter
from offload.residency import WAIT_TIMEOUT_S
from offload.trace import Span
from offload.unit import Unit
from offload.units import ParameterSpec
from swapper import Lease, OffloadError

NUM_LANDINGS = 2
"""Buffers in host memory for gradients that cannot go home at once: one is added up while the next one comes."""


class DeviceGradients:
    """Takes gradients from one thread at a time; at most ``max_bytes`` of them (or one) are on their way."""

    def __init__(
        self,
        device: Device,
        gradients: Gradients,
        landings: Sequence[Lease],
        dtype: torch.dtype,
        max_bytes: int,
        squares: Squares | None,
        failure: Failure,
        meter: Meter,
    ) -> None:
        """``landings`` are buffers in host memory, each for the largest gradient, of ``dtype`` as autograd makes it.

        Without ``squares`` all sums are worked out in host memory.
        """
        self.copied_bytes = 0
        """Device to host, since the engine was made."""
        self._device = device
        self._gradients = gradients
        self._dtype = dtype
        self.max_bytes = max_bytes
        """Device memory that gradients on their way may take."""
        self._squares = squares
        self._failure = failure
        self._meter = meter
        self._landings = list(landings)
        self._bytes_under_way = 0
        self._changed = threading.Condition()
        """Guards the two above."""
        self._begun: set[ParameterSpec] = set()
        """Parameters of which a gradient for the coming step is here or on its way."""
        self._last: Future[None] | None = None
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="offload-to-host")

    def take(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        """Send a complete gradient home. It must not change any more."""
        gradient = gradient.detach()
        gradient = (gradient.to_dense() if gradient.is_sparse else gradient).to(self._dtype).contiguous().view(-1)
        home = None if spec in self._begun else self._gradients.home(unit, spec, gradient.dtype)
        self._begun.add(spec)
        squared = self._squares is not None and home is not None
        if self._squares is not None:
            if home is None:
                self._squares.forget(spec)
            else:
                self._squares.begin(unit, (spec,), gradient)
        landing = self._take_room(gradient.nbytes, land=home is None)
        try:
            target = home if landing is None else tensor_at(landing.address, gradient.numel(), gradient.dtype)
            assert target is not None
            span = self._meter.trace.begin("to host", f"gradient of {spec.name}", gradient.nbytes)
            stream = self._device.to_host
            stream.wait(self._device.compute.record())
            stream.copy(target, gradient)
            arrived = stream.record()
            self.copied_bytes += gradient.nbytes
            self._then(lambda: self._land(unit, spec, scale, target, landing, squared), arrived, span, gradient)
        except BaseException as error:  # its room is never given back: nobody may wait for it
            self._failure.record(error)
            raise

    def close(self, unit: Unit) -> None:
        """The unit has all its gradients of this backward."""
        self._then(lambda: self._gradients.close(unit))

    def settle(self) -> None:
        """Wait until every gradient that was taken is home."""
        last, self._last = self._last, None
        if last is not None:
            with self._meter.stall("gradients"):
                last.result()
        self._failure.check()

    def forget(self, unit: Unit) -> None:
        """The unit's gradients are wanted no more."""
        self._begun.difference_update(unit.spec.parameters)

    def stop(self) -> None:
        """Wait for what is on its way."""
        self._finisher.shutdown(wait=True)

    def _take_room(self, nbytes: int, *, land: bool) -> Lease | None:
        """Wait until this much more may be on its way; the buffer for it, if it is to ``land`` in one."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        with self._meter.stall("gradients"), self._changed:
            while (self._bytes_under_way and self._bytes_under_way + nbytes > self.max_bytes) or (
                land and not self._landings
            ):
                self._failure.check()
                if time.monotonic() > deadline:
                    raise OffloadError(f"no gradient came from the device in {WAIT_TIMEOUT_S:.0f} s")
                self._changed.wait(1.0)
            self._bytes_under_way += nbytes
            return self._landings.pop() if land else None

    def _land(
        self,
        unit: Unit,
        spec: ParameterSpec,
        scale: float,
        target: torch.Tensor,
        landing: Lease | None,
        squared: bool,
    ) -> None:
        if landing is None:
            self._gradients.arrived(unit, spec, scale, squared=squared)
            return
        self._gradients.add(unit, spec, target.view(spec.shape), scale)
        with self._changed:
            self._landings.append(landing)
            self._changed.notify_all()

    def _then(
        self,
        job: Callable[[], None],
        arrived: Event | None = None,
        span: Span | None = None,
        gradient: torch.Tensor | None = None,
    ) -> None:
        """Have ``job`` done after those before it, once ``gradient`` has arrived. After a failure none is done."""

        def run() -> None:
            nonlocal gradient
            try:
                if arrived is not None and span is not None and gradient is not None:
                    arrived.wait()
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
