"""Protocol of a device that the model computes on: memory, streams of work, and events in them.

There are two: ``offload.device.cuda`` for GPUs, and ``offload.testing.simulated``, which runs everything as late as it
may and reports what was not ordered. The schedule is written against this page, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload import kernels

Tensors = Sequence[torch.Tensor]


class Event(Protocol):
    """A point in the work of a stream."""

    def wait(self) -> None:
        """Block the calling thread until the stream has come to it. Raises ``WaitTimeout`` if it does not come."""

    def done(self) -> bool:
        """The stream has come to it."""

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two events of one stream, both of which it has come to."""


class Stream(Protocol):
    """Work that a device does in order, beside the work of other streams. All calls return at once."""

    def record(self) -> Event:
        """The point after all work that the stream was given so far."""

    def wait(self, event: Event) -> None:
        """Have what the stream is given from now on begin after ``event``."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``target``, both without gaps and of the same dtype and shape. They must live until it
        is done."""

    def kernel(self, name: str) -> kernels.Kernel:
        """The optimizer kernel of this name (``offload.kernels``), for device memory and in this stream's order."""

    def sum_squares(self, source: torch.Tensor, ranges: torch.Tensor, lanes: torch.Tensor, sums: torch.Tensor) -> None:
        """The sum of squares of each range of ``source``, with the bits of ``kernels.sum_squares``, to ``sums``.

        Shapes and dtypes are those of ``GpuKernels.sum_squares``; all are in device memory.
        """


@dataclass(frozen=True)
class Shortages:
    """Counts of requests for device memory, by anybody, that were not granted at once since the process began.

    ``emptied``: all memory that had been freed was given back to the driver first. ``failed``: there was no room.
    """

    emptied: int
    failed: int


class Processor(Protocol):
    """The processor that the model computes on: the CPU, or a device."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def identity(self) -> str | None:
        """Names the piece of hardware: two processes that compute on the same one say the same. None: the CPU, which
        they share."""

    @property
    def allocated_bytes(self) -> int:
        """Memory that the engine has allocated there: what a device's ``allocate`` has put under storages and ``free``
        has not taken back."""

    def free_bytes(self) -> int:
        """Memory that new tensors can take now."""

    def surroundings(self) -> Callable[[], AbstractContextManager[None]]:
        """Carry where this thread computes to others: one that enters a context so made computes there, too."""

    def bring(self, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Event | None]:
        """The tensor as ``dtype`` there, for the work that compute is given next. Its own memory may change after the
        event; None: at once."""


class Device(Processor, Protocol):
    """A device, its memory and its streams.

    ``compute`` is where the model's own operations go: the stream that is current where it is asked for. Memory is
    ordered by it: new memory is for work that comes after its allocation there, freed memory for the work that is next
    on the stream under which it was allocated.
    """

    @property
    def compute(self) -> Stream: ...

    @property
    def to_device(self) -> Stream: ...

    @property
    def to_host(self) -> Stream: ...

    def new_stream(self) -> Stream:
        """One more, beside those three, whose kernels go before those of compute."""

    def new_compute_stream(self) -> Stream:
        """One that torch's own operations can go to: see ``current``."""

    def current(self, stream: Stream) -> AbstractContextManager[None]:
        """Within, what this thread asks torch for goes to ``stream``, which ``compute`` is then."""

    @property
    def identity(self) -> str: ...

    @property
    def backend(self) -> str:
        """The backend of ``torch.distributed`` that moves this device's memory between ranks."""

    def collective(
        self, start: Callable[[], Any], block: Callable[[Any], None], *, reads: Tensors, writes: Tensors
    ) -> None:
        """A collective between devices, in the order of ``compute``: ``start`` begins it, and returns its work. Device
        memory that it ``reads`` and ``writes`` must live until it is done. ``block`` waits for work on this thread,
        which only a device does whose streams cannot."""

    def kernels_unsupported_reason(self) -> str | None:
        """Return the reason why streams cannot run kernels here; None if they can."""

    def memory_bytes(self) -> int:
        """Memory that tensors may take together, what they have now included."""

    def peak_bytes(self) -> int:
        """The most memory that was taken at a time by tensors, the engine's and the model's."""

    def shortages(self) -> Shortages:
        """Counts that grow when memory is short."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Put memory under an empty storage. Raises ``DeviceMemoryError`` if there is none."""

    def used(self, storage: torch.UntypedStorage) -> None:
        """The work that compute was given so far uses this memory, which may have been allocated under another stream:
        what gets the memory next comes after that work."""

    def free(self, storage: torch.UntypedStorage) -> None:
        """Empty a storage."""

    def pin(self, address: int, nbytes: int) -> None:
        """Let the device copy from and to this host memory by itself. If it cannot, warns: copies then block."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``, when nothing is in flight any more. Raises ``WaitTimeout`` if that does not come."""
