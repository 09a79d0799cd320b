"""What happens around a random program of ``device_schedules.py``: streams, threads, inputs, memory that runs out."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from offload import OffloadEngine
from offload.errors import DeviceMemoryError
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedStream
from offload.tiers.gradients.transport import GradientTransport
from offload.units import UnitSpec
from offload.waiting import Worker


class Around:
    """On the CPU: nothing."""

    def forward_and_backward(self, engine: OffloadEngine, tokens: torch.Tensor, step: int) -> float:
        """The loss."""
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        return loss.item()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """The model is evaluated within."""
        yield

    def change_weights(self) -> None:
        """Weights are about to change."""

    def before_step(self, engine: OffloadEngine) -> None:
        """All gradients of a step have been given to the engine."""


class AroundDevice(Around):
    """On a device, by chance: backward runs in another thread, evaluation and training under streams of their own,
    which wait for one another only where one changes weights; inputs come from one pinned buffer, which is filled again
    as soon as forward returns; in one step activations find too little memory, and what failed is run again; nobody is
    in a hurry: gradients have come to the host whenever the engine looks, and speculative updates end before the step.
    """

    def __init__(self, seed: int, device: SimulatedDevice, *, may_lack_memory: bool) -> None:
        rng = random.Random(seed + 8)
        self._device = device
        self._rng = rng
        self._in_thread = rng.random() < 0.6
        self._evaluates_beside = rng.random() < 0.5
        self._short_step = rng.choice((1, 2, None)) if may_lack_memory else None
        self._in_a_hurry = random.Random(seed + 11).random() < 0.5
        self._main = device.compute
        self._side = device.new_compute_stream()
        self._training = device.new_compute_stream() if rng.random() < 0.3 else self._main
        self._buffer = torch.empty(2, 8, dtype=torch.int64)
        self.num_failures = self.num_helpless = 0
        """Forwards and backwards that found too little memory, and those of them that did so again at once."""
        device.pin(self._buffer.data_ptr(), self._buffer.nbytes)

    def close(self) -> None:
        """The engine is closed."""
        self._device.unpin(self._buffer.data_ptr())

    def forward_and_backward(self, engine: OffloadEngine, tokens: torch.Tensor, step: int) -> float:
        with self._short_of_memory() if step == self._short_step else contextlib.nullcontext():
            try:
                return self._try(engine, tokens)
            except (torch.OutOfMemoryError, DeviceMemoryError):
                self.num_failures += 1
            try:
                engine.optimizer.zero_grad()
                return self._try(engine, tokens)
            except (torch.OutOfMemoryError, DeviceMemoryError):
                self.num_helpless += 1
        engine.optimizer.zero_grad()
        return self._try(engine, tokens)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        if not self._evaluates_beside or self._rng.random() < 0.5:
            yield
            return
        self._side.wait(self._main.record())  # which has changed weights
        with self._device.current(self._side):
            yield

    def change_weights(self) -> None:
        for stream in (self._side, self._training):
            self._main.wait(stream.record())

    @contextlib.contextmanager
    def _short_of_memory(self) -> Iterator[None]:
        """Others take most of the memory that is free."""
        pools = self._device.pools
        before = pools.capacity_bytes
        needed = self._device.activations.most_used_bytes
        pools.capacity_bytes = pools.taken_bytes + int(needed * self._rng.uniform(0.3, 1.2))
        try:
            yield
        finally:
            pools.capacity_bytes = before

    def before_step(self, engine: OffloadEngine) -> None:
        if not self._in_a_hurry:
            drain(engine._session.parts.trained.updates.updater._worker)

    def _try(self, engine: OffloadEngine, tokens: torch.Tensor) -> float:
        device, stream = self._device, self._training
        stream.wait(self._main.record())
        try:
            with device.current(stream), device.activations.counted(), self._patience():
                self._fill(tokens)
                logits = engine(self._buffer)
                self._fill(torch.zeros_like(tokens))
                loss = loss_of(logits, tokens)
                if self._in_thread:
                    run_in_thread(lambda: self._backward(engine, loss, stream))
                else:
                    engine.backward(loss)
        finally:
            self._main.wait(stream.record())  # zero_grad() may follow there
        return loss.item()

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Within, gradients have come to the host when somebody looks, unless there is a hurry."""
        complete = GradientTransport.complete

        def complete_later(transport: GradientTransport) -> Iterator[UnitSpec]:
            drain(transport._finisher)
            return complete(transport)

        with (
            contextlib.nullcontext()
            if self._in_a_hurry
            else mock.patch.object(GradientTransport, "complete", complete_later)
        ):
            yield

    def _backward(self, engine: OffloadEngine, loss: torch.Tensor, stream: SimulatedStream) -> None:
        with self._device.current(stream), self._device.activations.counted():
            engine.backward(loss)

    def _fill(self, tokens: torch.Tensor) -> None:
        self._device.host_access(self._buffer.data_ptr(), self._buffer.nbytes, writes=True)
        self._buffer.copy_(tokens)


def drain(worker: Worker) -> None:
    """Return when the thread has done all that was asked of it so far, or has ended."""
    worker.submit(lambda: None).wait(lambda: "the work of a thread")


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def run_in_thread(call: Callable[[], None]) -> None:
    """As autograd does it for a GPU: the calling thread waits. Raises what ``call`` raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
