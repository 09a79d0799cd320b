"""A device in host memory that runs everything as late as it may, and reports what was not ordered.

Streams do nothing until a thread waits for them, or chance (``seed``) lets them do a piece: every order that events
allow can come about, without threads and without clocks. Fresh memory is NaN: a use before its copy shows.
Beside that, each access is checked against those before it (``order``): two of which one writes must be ordered by
events, whatever order they happened to come in. Memory goes back to a pool of the stream under which it was allocated
(``pools``), and activations take some of it (``activations``). For tests of the schedule; training on it is correct and
slow.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from offload.device.protocol import Event, Shortages, Stream, Tensors
from offload.errors import DeviceMemoryError
from offload.testing.activations import Activations
from offload.testing.order import HOST, Clock, Order, join
from offload.testing.pools import Pools
from offload.testing.stream import SimulatedStream
from swapper import readable_bytes


class SimulatedDevice:
    """See the module's docstring. ``violations`` says what was not ordered; a correct schedule leaves it empty."""

    backend = "gloo"

    def __init__(
        self,
        seed: int = 0,
        eagerness: float = 0.3,
        memory_bytes: int = 1 << 40,
        unsupported_reason: str | None = None,
        link_speed: float = 1.0,
        queue_depth: int = 64,
    ) -> None:
        """``eagerness`` is how likely a call lets some stream do a piece of work before it is waited for.

        ``unsupported_reason`` is what it says hinders it to run kernels. ``link_speed`` is how many bytes per second
        its events say that copies make; at one a second no update is worth sending there. ``queue_depth`` is how many
        pieces of work a stream holds: the thread that gives it one more waits until one is done.
        """
        self.torch_device = torch.device("cpu")
        self.identity = f"simulated device {id(self)} of process {os.getpid()}"
        self.link_speed = link_speed
        self.queue_depth = queue_depth
        self.lock = threading.RLock()
        self.order = Order()
        self.pools = Pools(memory_bytes)
        self.allocated_bytes = 0
        self.most_allocated_bytes = 0
        self.num_blocking_copies = 0
        """Copies of host memory that is not pinned: the thread that asks for one waits until it is over."""
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self._unsupported_reason = unsupported_reason
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._owners: dict[int, tuple[SimulatedStream, int]] = {}
        """By address: the stream under which memory was allocated, and its bytes."""
        self._streams: list[SimulatedStream] = []
        """Those whose work can wait."""
        self._first = SimulatedStream(self, "compute", computes=True)
        self._current = threading.local()
        self._num_compute = 1
        self.to_device = self._add_stream("to_device")
        self.to_host = self._add_stream("to_host")
        self.activations = Activations(self.pools, self.lock, lambda: self.compute.name, self._owns)

    @property
    def violations(self) -> list[str]:
        return self.order.violations

    @property
    def compute(self) -> SimulatedStream:
        """The one that is current in this thread."""
        return getattr(self._current, "stream", self._first)

    def new_stream(self) -> SimulatedStream:
        return self._add_stream(f"stream {len(self._streams)}")

    def new_compute_stream(self) -> SimulatedStream:
        self._num_compute += 1
        return SimulatedStream(self, f"compute {self._num_compute}", computes=True)

    @contextlib.contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, SimulatedStream)
        before = self.compute
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def surroundings(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return partial(self.current, self.compute)

    def collective(
        self, start: Callable[[], Any], block: Callable[[Any], None], *, reads: Tensors, writes: Tensors
    ) -> None:
        """One that waited in a queue would keep other ranks from theirs: it is carried out at once."""
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.compute_access(tensor, writes=is_written)
        block(start())

    def kernels_unsupported_reason(self) -> str | None:
        return self._unsupported_reason

    def memory_bytes(self) -> int:
        return self.pools.capacity_bytes

    def free_bytes(self) -> int:
        return self.pools.free_bytes

    def peak_bytes(self) -> int:
        return self.pools.most_reserved_bytes

    def shortages(self) -> Shortages:
        return self.pools.shortages

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self.lock:
            stream = self.compute
            if not self.pools.take(stream.name, nbytes):
                raise DeviceMemoryError(
                    f"no room for {readable_bytes(nbytes)} of weights, {readable_bytes(self.free_bytes())} are free"
                )
            storage.resize_(nbytes)
            storage.fill_(0xFF)  # type: ignore[attr-defined]
            self.allocated_bytes += nbytes
            self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
            self.order.tick(stream.name)
            self.order.access(stream.name, storage.data_ptr(), nbytes, writes=True)
            if nbytes:
                self._owners[storage.data_ptr()] = stream, nbytes

    def used(self, storage: torch.UntypedStorage) -> None:
        with self.lock:
            stream, _ = self._owners[storage.data_ptr()]
            if stream is not self.compute:
                stream.wait(self.compute.record())

    def free(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        with self.lock:
            self.used(storage)
            start, nbytes = storage.data_ptr(), storage.nbytes()
            stream, _ = self._owners.pop(start)
            found = len(self.violations)
            self.order.tick(stream.name)
            self.order.access(stream.name, start, nbytes, writes=True)  # it may be lent to that stream's next work now
            if len(self.violations) > found:  # it may still be in use: the report is enough, a crash would hide it
                self._run_all()
            self.order.forget(start, nbytes)
            self.allocated_bytes -= nbytes
            self.pools.give(stream.name, nbytes)
            storage.resize_(0)

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        with self.lock:
            self._run_all()
            del self.pinned[address]

    def bring(self, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Event | None]:
        with self.lock:
            stream = self.compute
            if tensor.nbytes:
                self.order.tick(stream.name)
                self.order.access(stream.name, tensor.data_ptr(), tensor.nbytes, writes=False)
            here = tensor.to(dtype, copy=True)
            if self._is_pinned(tensor):
                return here, stream.record()
            stream.record().wait()
            return here, None

    # For tests.

    def host_access(self, address: int, nbytes: int, *, writes: bool, by: str = HOST) -> None:
        """The host, or a disk on its behalf, reads or writes this memory now; or a thread named ``by``, to which it has
        given work, does so from now on."""
        with self.lock:
            self.order.tick(by)
            self.order.access(by, address, nbytes, writes=writes)

    def given(self, name: str) -> Clock:
        """The work that a thread of this name was given so far."""
        with self.lock:
            return dict(self.order.clocks.get(name, {}))

    def host_waited(self, given: Clock) -> None:
        """The host has waited for work that it had ``given``."""
        with self.lock:
            join(self.order.tick(HOST), given)

    def compute_access(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """An operation of torch reads or writes ``tensor`` now."""
        if not tensor.nbytes:
            return
        with self.lock:
            stream = self.compute.name
            self.order.tick(stream)
            self.order.access(stream, tensor.data_ptr(), tensor.nbytes, writes=writes)

    def progress(self) -> None:
        """Let chance decide whether some stream does a piece of its work now."""
        while self._random.random() < self._eagerness:
            self._random.choice(self._streams).run_one()

    def copies_by_itself(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Nothing but the device is needed for this copy: its end in host memory, if there is one, is pinned. The other
        end may be memory of torch's."""
        ends = target, source
        return any(map(self._is_pinned, ends)) or all(self._owns(end.data_ptr()) for end in ends)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(address <= start and stop <= address + nbytes for address, nbytes in self.pinned.items())

    def _owns(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, (_, nbytes) in self._owners.items())

    def _run_all(self) -> None:
        for stream in self._streams:
            stream.record().wait()

    def _add_stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(self, name)
        self._streams.append(stream)
        return stream
