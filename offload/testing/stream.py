"""Streams and events of a simulated device: work in order, none of which is done before it must be."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from offload import kernels
from offload.device.protocol import Event
from offload.dtypes import kernel_dtype
from offload.testing.order import HOST, Clock, Order, join


class Owner(Protocol):
    """Device of streams, as they need it. ``lock`` guards all of it."""

    lock: threading.RLock
    order: Order
    link_speed: float
    queue_depth: int
    num_blocking_copies: int

    def progress(self) -> None:
        """Let some streams do some of their work."""

    def copies_by_itself(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Nothing but the device is needed for this copy."""


class SimulatedEvent:
    """A point in the work of a stream, and what is known to be over there."""

    def __init__(self, stream: SimulatedStream, position: int, clock: Clock) -> None:
        self.stream = stream
        self.position = position
        self.clock = clock
        self._seconds = stream.seconds

    def wait(self) -> None:
        device = self.stream.device
        with device.lock:
            self.stream.run_to(self.position)
            join(device.order.clocks[HOST], self.clock)

    def done(self) -> bool:
        device = self.stream.device
        with device.lock:
            device.progress()
            done = self.stream.num_done >= self.position
            if done:
                join(device.order.clocks[HOST], self.clock)
            return done

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, SimulatedEvent)
        return self._seconds - earlier._seconds


class SimulatedStream:
    """Work in order. One that ``computes`` is where torch works, which does all of it at once."""

    def __init__(self, device: Owner, name: str, *, computes: bool = False) -> None:
        self.device = device
        self.name = name
        self.computes = computes
        self.num_done = 0
        self.seconds = 0.0
        """Seconds that the copies which it was given take at the device's ``link_speed``. Nothing else takes time."""
        self.num_full = 0
        """Times that a thread had to wait because the queue was full."""
        self._work: deque[Callable[[], None]] = deque()
        device.order.clocks[name] = {}

    def record(self) -> SimulatedEvent:
        with self.device.lock:
            self.device.progress()
            clock = self.device.order.tick(self.name)
            return SimulatedEvent(self, self.num_done + len(self._work), dict(clock))

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self.device.lock:
            join(self.device.order.tick(self.name), event.clock)
            self._give(lambda: event.stream.run_to(event.position))
            self.device.progress()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            raise ValueError(f"copy of {source.dtype} {source.shape} to {target.dtype} {target.shape}")
        device = self.device
        with device.lock:
            self._access(source, writes=False)
            self._access(target, writes=True)
            self.seconds += source.nbytes / device.link_speed
            to, of = weakref.ref(target), weakref.ref(source)
            self._give(lambda: self._copy(to(), of()))
            if not device.copies_by_itself(target, source):
                device.num_blocking_copies += 1
                self.record().wait()
            device.progress()

    def kernel(self, name: str) -> kernels.Kernel:
        return partial(self._kernel, kernels.on_host(name))

    def sum_squares(self, source: torch.Tensor, ranges: torch.Tensor, lanes: torch.Tensor, sums: torch.Tensor) -> None:
        def work() -> None:
            for index, (start, numel, _) in enumerate(ranges.tolist()):
                address = source.data_ptr() + start * source.itemsize
                sums[index] = kernels.sum_squares(address, numel, kernel_dtype(source.dtype)) if numel else 0.0

        with self.device.lock:
            self._access(source, writes=False)
            self._access(ranges, writes=False)
            self._access(lanes, writes=True)
            self._access(sums, writes=True)
            self._give(work)
            self.device.progress()

    def run_to(self, position: int) -> None:
        """Do the work up to ``position``."""
        while self.num_done < position:
            work = self._work.popleft()
            self.num_done += 1
            work()

    def run_one(self) -> None:
        """Do one piece, if there is one."""
        if self._work:
            self.run_to(self.num_done + 1)

    def _give(self, work: Callable[[], None]) -> None:
        if len(self._work) >= self.device.queue_depth:
            self.num_full += 1
            self.run_one()
        self._work.append(work)
        if self.computes:
            self.run_to(self.num_done + len(self._work))

    def _access(self, tensor: torch.Tensor, *, writes: bool) -> None:
        if tensor.nbytes:
            self.device.order.tick(self.name)
            self.device.order.access(self.name, tensor.data_ptr(), tensor.nbytes, writes=writes)

    def _kernel(self, kernel: kernels.Kernel, sweep: kernels.Sweep) -> None:
        weight_bytes = {0: 4, 1: 2, 2: 4, 3: 2, 4: 2, 5: 2}[sweep.weight_format]
        state_bytes = kernels.Dtype(sweep.state_dtype).itemsize
        written = [(sweep.weight, weight_bytes), (sweep.rest, 2), (sweep.master, 4)]
        written += [(state, state_bytes) for state in sweep.states]
        with self.device.lock:
            order = self.device.order
            order.tick(self.name)
            grad_bytes = sweep.numel * kernels.Dtype(sweep.grad_dtype).itemsize
            order.access(self.name, sweep.grad, grad_bytes, writes=False)
            for address, width in written:
                if address:
                    order.access(self.name, address, sweep.numel * width, writes=True)
            self._give(partial(kernel, sweep))
            self.device.progress()

    def _copy(self, target: torch.Tensor | None, source: torch.Tensor | None) -> None:
        for tensor, name in ((source, "source"), (target, "target")):
            if tensor is None or tensor.untyped_storage().nbytes() < tensor.nbytes:
                self.device.order.violations.append(f"{self.name}: a copy's {name} was freed before it")
                return
        assert target is not None and source is not None
        with torch.no_grad():
            target.copy_(source)
