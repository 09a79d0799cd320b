"""A device in host memory that runs everything as late as it may, and reports what was not ordered.

Streams do nothing until a thread waits for them, or chance (``seed``) lets them do a piece: every order that events
allow can come about, without threads and without clocks. Fresh memory is NaN: a use before its copy shows.
Beside that, each access is checked against those before it, by vector clocks: two of which one writes must be ordered
by events, whatever order they happened to come in. For tests of the schedule; training on it is correct and slow.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offload import kernels
from offload.device.protocol import Event
from offload.dtypes import kernel_dtype
from offload.errors import DeviceMemoryError
from swapper import readable_bytes

Clock = dict[str, int]
"""How much of each actor's work is known to be over."""


class _Event:
    def __init__(self, stream: _Stream, position: int, clock: Clock) -> None:
        self._stream = stream
        self._seconds = stream.seconds
        self.position = position
        self.clock = clock

    def wait(self) -> None:
        device = self._stream.device
        with device.lock:
            self._stream.run_to(self.position)
            _join(device.clocks["host"], self.clock)

    def done(self) -> bool:
        device = self._stream.device
        with device.lock:
            device.progress()
            done = self._stream.num_done >= self.position
            if done:
                _join(device.clocks["host"], self.clock)
            return done

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Event)
        return self._seconds - earlier._seconds


class _Stream:
    """Work in order, none of which is done before it must be. That of ``compute`` is done by torch, at once."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.num_done = 0
        self.seconds = 0.0
        """What the copies that it was given take at the device's ``link_speed``. Nothing else takes time."""
        self._work: deque[Callable[[], None]] = deque()
        device.clocks[name] = {}

    def record(self) -> _Event:
        with self.device.lock:
            self.device.progress()
            clock = self._tick()
            return _Event(self, self.num_done + len(self._work), dict(clock))

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        with self.device.lock:
            _join(self._tick(), event.clock)
            self._give(lambda: event._stream.run_to(event.position))
            self.device.progress()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            raise ValueError(f"copy of {source.dtype} {source.shape} to {target.dtype} {target.shape}")
        with self.device.lock:
            clock = self._tick()
            self.device.access(self.name, clock, source.data_ptr(), source.nbytes, writes=False)
            self.device.access(self.name, clock, target.data_ptr(), target.nbytes, writes=True)
            self.seconds += source.nbytes / self.device.link_speed
            to, of = weakref.ref(target), weakref.ref(source)
            self._give(lambda: self._copy(to(), of()))
            self.device.progress()

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
        self._work.append(work)
        if self.name == "compute":
            self.run_to(self.num_done + len(self._work))

    def _access(self, tensor: torch.Tensor, *, writes: bool) -> None:
        if tensor.nbytes:
            self.device.access(self.name, self._tick(), tensor.data_ptr(), tensor.nbytes, writes=writes)

    def _kernel(
        self,
        kernel: kernels.Kernel,
        constants: Any,
        numel: int,
        grad: int,
        grad_dtype: int,
        weight: int,
        rest: int,
        master: int,
        weight_format: int,
        states: Any,
        scales: Any,
        state_dtype: int,
        seed: int,
        num_threads: int,
    ) -> None:
        def work() -> None:
            kernel(
                constants,
                numel,
                grad,
                grad_dtype,
                weight,
                rest,
                master,
                weight_format,
                states,
                scales,
                state_dtype,
                seed,
                num_threads,
            )

        weight_bytes = {0: 4, 1: 2, 2: 4, 3: 2, 4: 2}[weight_format]
        state_bytes = kernels.Dtype(state_dtype).itemsize
        written = [(weight, weight_bytes), (rest, 2), (master, 4), *((state, state_bytes) for state in states)]
        with self.device.lock:
            clock, access = self._tick(), self.device.access
            access(self.name, clock, grad, numel * kernels.Dtype(grad_dtype).itemsize, writes=False)
            for address, width in written:
                if address:
                    access(self.name, clock, address, numel * width, writes=True)
            self._give(work)
            self.device.progress()

    def _copy(self, target: torch.Tensor | None, source: torch.Tensor | None) -> None:
        for tensor, name in ((source, "source"), (target, "target")):
            if tensor is None or tensor.untyped_storage().nbytes() < tensor.nbytes:
                self.device.report(f"{self.name}: a copy's {name} was freed before it")
                return
        assert target is not None and source is not None
        with torch.no_grad():
            target.copy_(source)

    def _tick(self) -> Clock:
        """A new moment of this stream, after everything that the host has done so far."""
        clock = self.device.clocks[self.name]
        _join(clock, self.device.clocks["host"])
        clock[self.name] = clock.get(self.name, 0) + 1
        return clock


@dataclass
class _Access:
    """What was last done to the bytes ``[start, stop)``: by whom, and when by his clock."""

    start: int
    stop: int
    write: tuple[str, int] | None = None
    reads: Clock = field(default_factory=dict)


class SimulatedDevice:
    """See the module's docstring. ``violations`` says what was not ordered; a correct schedule leaves it empty."""

    def __init__(
        self,
        seed: int = 0,
        eagerness: float = 0.3,
        memory_bytes: int = 1 << 40,
        obstacle: str | None = None,
        link_speed: float = 1.0,
    ) -> None:
        """``eagerness`` is how likely a call lets some stream do a piece of work before it is waited for.

        ``obstacle`` is what it says hinders it to run kernels. ``link_speed`` is how many bytes per second its events
        say that copies make; at one a second no update is worth sending there.
        """
        self.torch_device = torch.device("cpu")
        self.link_speed = link_speed
        self.lock = threading.RLock()
        self.clocks: dict[str, Clock] = {"host": {}}
        self.violations: list[str] = []
        self.allocated_bytes = 0
        self.most_allocated_bytes = 0
        self.pinned: dict[int, int] = {}
        self._memory_bytes = memory_bytes
        self._obstacle = obstacle
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._accesses: list[_Access] = []
        self.compute = _Stream(self, "compute")
        self._streams: list[_Stream] = []
        """Those whose work can wait."""
        self.to_device = self._add_stream("to_device")
        self.to_host = self._add_stream("to_host")

    def new_stream(self) -> _Stream:
        return self._add_stream(f"stream {len(self._streams)}")

    def obstacle_to_kernels(self) -> str | None:
        return self._obstacle

    def memory_bytes(self) -> int:
        return self._memory_bytes

    def peak_bytes(self) -> int:
        return self.most_allocated_bytes

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self.lock:
            free = self._memory_bytes - self.allocated_bytes
            if nbytes > free:
                raise DeviceMemoryError(
                    f"no room for {readable_bytes(nbytes)} of weights, {readable_bytes(free)} are free"
                )
            storage.resize_(nbytes)
            storage.fill_(0xFF)  # type: ignore[attr-defined]
            self.allocated_bytes += nbytes
            self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
            self.access("compute", self.compute._tick(), storage.data_ptr(), nbytes, writes=True)

    def free(self, storage: torch.UntypedStorage) -> None:
        with self.lock:
            start, nbytes = storage.data_ptr(), storage.nbytes()
            found = len(self.violations)
            self.access("compute", self.compute._tick(), start, nbytes, writes=True)
            if len(self.violations) > found:  # it may still be in use: the report is enough, a crash would hide it
                self._run_all()
            self._accesses = [item for item in self._accesses if not (start <= item.start < start + nbytes)]
            self.allocated_bytes -= nbytes
            storage.resize_(0)

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        with self.lock:
            self._run_all()
            del self.pinned[address]

    # For tests.

    def host_access(self, address: int, nbytes: int, *, writes: bool) -> None:
        """The host, or a disk on its behalf, reads or writes this memory now."""
        with self.lock:
            clock = self.clocks["host"]
            clock["host"] = clock.get("host", 0) + 1
            self.access("host", clock, address, nbytes, writes=writes)

    def compute_access(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """An operation of the model reads or writes ``tensor`` now."""
        with self.lock:
            self.access("compute", self.compute._tick(), tensor.data_ptr(), tensor.nbytes, writes=writes)

    def report(self, violation: str) -> None:
        self.violations.append(violation)

    def progress(self) -> None:
        """Let chance decide whether some stream does a piece of its work now."""
        while self._random.random() < self._eagerness:
            self._random.choice(self._streams).run_one()

    def access(self, actor: str, clock: Clock, address: int, nbytes: int, *, writes: bool) -> None:
        """Check one access against those of the same bytes before it, and remember it."""
        stop = address + nbytes
        rest: list[_Access] = []
        for item in self._accesses:
            if item.stop <= address or stop <= item.start:
                rest.append(item)
                continue
            self._check(item, actor, clock, writes)
            if item.start < address:
                rest.append(_Access(item.start, address, item.write, dict(item.reads)))
            if stop < item.stop:
                rest.append(_Access(stop, item.stop, item.write, dict(item.reads)))
            if not writes:
                now = {**item.reads, actor: clock.get(actor, 0)}
                rest.append(_Access(max(item.start, address), min(item.stop, stop), item.write, now))
        if writes:
            rest.append(_Access(address, stop, (actor, clock.get(actor, 0))))
        else:
            rest += [_Access(a, b, None, {actor: clock.get(actor, 0)}) for a, b in self._gaps(rest, address, stop)]
        self._accesses = rest

    def _run_all(self) -> None:
        for stream in self._streams:
            stream.record().wait()

    def _add_stream(self, name: str) -> _Stream:
        stream = _Stream(self, name)
        self._streams.append(stream)
        return stream

    def _check(self, item: _Access, actor: str, clock: Clock, writes: bool) -> None:
        what = "writes" if writes else "reads"
        where = f"[{item.start:#x}, {item.stop:#x})"
        if item.write is not None and item.write[1] > clock.get(item.write[0], 0):
            self.report(f"{actor} {what} {where}, which {item.write[0]} may still write")
        for reader, moment in item.reads.items() if writes else ():
            if moment > clock.get(reader, 0):
                self.report(f"{actor} writes {where}, which {reader} may still read")

    def _gaps(self, items: list[_Access], start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``[start, stop)`` that no item covers."""
        gaps = []
        for item in sorted(items, key=lambda item: item.start):
            if item.stop <= start or stop <= item.start:
                continue
            if start < item.start:
                gaps.append((start, item.start))
            start = max(start, item.stop)
        return [*gaps, (start, stop)] if start < stop else gaps


def _join(clock: Clock, other: Clock) -> None:
    for actor, moment in other.items():
        clock[actor] = max(clock.get(actor, 0), moment)
