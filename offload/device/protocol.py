"""What the engine asks of a device that the model computes on: memory, streams of work, and events in them.

There are two: ``offload.device.cuda`` for GPUs, and ``offload.testing.simulated``, which runs everything as late as it
may and reports what was not ordered. The schedule is written against this page, once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from offload import kernels


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
        """What the stream is given from now on begins after ``event``."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``target``, of the same dtype and shape. Both must live until it is done."""

    def kernel(self, name: str) -> kernels.Kernel:
        """The optimizer kernel of this name (``offload.kernels``), for device memory and in this stream's order."""

    def sum_squares(self, source: torch.Tensor, ranges: torch.Tensor, lanes: torch.Tensor, sums: torch.Tensor) -> None:
        """The sum of squares of each range of ``source``, with the bits of ``kernels.sum_squares``, to ``sums``.

        Shapes and dtypes are those of ``GpuKernels.sum_squares``; all are in device memory.
        """


class Device(Protocol):
    """A device, its memory and its streams.

    ``compute`` is where the model's own operations go: the stream that is current where it is asked for. Memory is
    ordered by it: new memory is for work that comes after its allocation there, freed memory for the work that is next.
    """

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def compute(self) -> Stream: ...

    @property
    def to_device(self) -> Stream: ...

    @property
    def to_host(self) -> Stream: ...

    def new_stream(self) -> Stream:
        """One more, beside those three."""

    def obstacle_to_kernels(self) -> str | None:
        """Why streams cannot run kernels here; None if they can."""

    def memory_bytes(self) -> int:
        """Memory that tensors may take together, what they have now included."""

    def peak_bytes(self) -> int:
        """The most memory that was taken at a time by tensors, the engine's and the model's."""

    @property
    def allocated_bytes(self) -> int:
        """What ``allocate`` has put under storages and ``free`` has not taken back."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Put memory under an empty storage. Raises ``DeviceMemoryError`` if there is none."""

    def free(self, storage: torch.UntypedStorage) -> None:
        """Empty a storage."""

    def pin(self, address: int, nbytes: int) -> None:
        """Let the device copy from and to this host memory by itself. Raises ``OffloadError`` if it cannot."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``, when nothing is in flight any more."""
