"""CUDA as the device: torch's streams, events and caching allocator, and host memory that is registered as it is.

[Note: Why memory is ordered by the compute stream] torch lends freed memory to the next request on the same stream.
All memory of weights is allocated and freed on the stream that computes, so compute may go on using what is freed later
in its own order; a copy into new memory waits for an event that compute recorded after the allocation. Where a user
computes on several streams, the one under which memory was allocated waits for those that have used it.

[Note: Why a thread takes the GPU for a moment] A thread begins with GPU 0 as its current one. CUDA makes a context
there (about 0.5 GiB) when that thread asks whether an event is over, or makes GPU 0 current again, as
``torch.cuda.stream`` does at its end. With eight ranks on a machine seven of them would take that from the first one's
GPU. ``torch.cuda.device`` makes the right GPU current, and none where there is no context yet at its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from offload import kernels
from offload.device.allocator import prefer_expandable_segments
from offload.device.pinned import PinnedMemory, Runtime, runtime_of
from offload.device.programs import GpuPrograms, programs_of
from offload.device.protocol import Event, Shortages, Stream, Tensors
from offload.dtypes import kernel_dtype
from offload.errors import ConfigError, DeviceMemoryError, warn
from offload.option_values import missing_on
from offload.waiting import Deadline
from swapper import readable_bytes

_BEFORE_COMPUTE = -1
"""The priority of streams beside that of the model's operations: a tile's kernel does not queue behind their blocks."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10e-6, 500e-6
"""Between two looks at an event that a thread waits for."""


class _Event:
    def __init__(self, event: torch.cuda.Event, index: int, runtime: Runtime) -> None:
        self.event = event
        self._index, self._runtime = index, runtime

    def wait(self) -> None:
        deadline, pause_s = Deadline(lambda: "work on the GPU"), _FIRST_PAUSE_S
        with torch.cuda.device(self._index), self._runtime.beside_captures():
            while not self.event.query():  # ``synchronize`` has no deadline
                deadline.check()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.event.synchronize()  # at once; compute-sanitizer counts no query as the end of a wait

    def done(self) -> bool:
        with torch.cuda.device(self._index), self._runtime.beside_captures():
            return bool(self.event.query())

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Event)
        with torch.cuda.device(self._index):
            return float(earlier.event.elapsed_time(self.event)) / 1000


class _Stream:
    def __init__(self, stream: torch.cuda.Stream, index: int, programs: GpuPrograms, runtime: Runtime) -> None:
        self.stream = stream
        self._index = index
        self._programs, self._runtime = programs, runtime

    def record(self) -> _Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return _Event(event, self._index, self._runtime)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, what this thread asks of torch goes to the stream. See [Note: Why a thread takes the GPU for a
        moment]."""
        with torch.cuda.device(self._index), torch.cuda.stream(self.stream):
            yield

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        self.stream.wait_event(event.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        self._runtime.copy(target, source, self.stream)

    def kernel(self, name: str) -> kernels.Kernel:
        return self._programs.on(self.stream.cuda_stream).kernel(name)

    def sum_squares(self, source: torch.Tensor, ranges: torch.Tensor, lanes: torch.Tensor, sums: torch.Tensor) -> None:
        self._programs.on(self.stream.cuda_stream).sum_squares(
            kernel_dtype(source.dtype),
            source.data_ptr(),
            ranges.data_ptr(),
            len(ranges),
            lanes.data_ptr(),
            lanes.numel() // kernels.SQUARES_LANES,
            sums.data_ptr(),
        )


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def has_one_queue() -> bool:
    """The environment has the driver put all streams into one queue of the GPU."""
    return os.environ.get(_QUEUES) == "1"


class CudaDevice:
    """One GPU. Raises ``ConfigError`` if it is not there, or the device is of another kind."""

    backend = "nccl"

    def __init__(self, device: torch.device, local_index: int | None = None) -> None:
        """Of several processes on a machine each takes its own where the device has no number, and makes it torch's
        current one, unless its program has done that: a script that says "cuda" says it on all of them."""
        if device.type != "cuda":
            lacking = missing_on(device.type)
            raise ConfigError(f'device="{device}": the engine computes on "cpu" and "cuda" alone{lacking}')
        if not torch.cuda.is_available():
            raise ConfigError(f'device="{device}": torch.cuda.is_available() says no. Use device="cpu".')
        prefer_expandable_segments()
        if has_one_queue():
            warn(
                f"{_QUEUES}=1: copies wait behind kernels on the GPU, and weights and gradients cross the link while "
                "nothing is computed. Unset it, or give it 8 or more (Megatron sets it for orders that FSDP and this "
                "engine do not rely on)."
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if device.index is None and index == 0 and local_index is not None:
            index = local_index if local_index < torch.cuda.device_count() else 0
            torch.cuda.set_device(index)
        if index >= torch.cuda.device_count():
            raise ConfigError(f'device="cuda:{index}": there are {torch.cuda.device_count()} GPUs')
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._programs = programs_of(index)
        self._runtime = runtime_of(index)
        self._pinned = PinnedMemory(self._runtime)
        self._streams: list[_Stream] = []
        self.allocated_bytes = 0
        self._owners: dict[int, torch.cuda.Stream] = {}
        """By address: the stream under which memory was allocated, to whose pool it goes back."""
        self.to_device = self.new_stream()
        self.to_host = self.new_stream()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    @property
    def identity(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.name} {properties.uuid}"

    @property
    def compute(self) -> _Stream:
        return self._stream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> _Stream:
        self._streams.append(self._stream(torch.cuda.Stream(self.torch_device, _BEFORE_COMPUTE)))
        return self._streams[-1]

    def new_compute_stream(self) -> _Stream:
        self._streams.append(self._stream(torch.cuda.Stream(self.torch_device)))
        return self._streams[-1]

    def current(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, _Stream)
        return stream.current()

    def surroundings(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(self.current, self.compute)

    def collective(
        self, start: Callable[[], Any], block: Callable[[Any], None], *, reads: Tensors, writes: Tensors
    ) -> None:
        start().wait()  # the current stream waits, this thread does not

    def kernels_unsupported_reason(self) -> str | None:
        return self._programs.unsupported_reason()

    def memory_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + torch.cuda.memory_reserved(self.torch_device)

    def free_bytes(self) -> int:
        return self.memory_bytes() - torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.torch_device))

    def shortages(self) -> Shortages:
        counts = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        return Shortages(counts.get("num_alloc_retries", 0), counts.get("num_ooms", 0))

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        try:
            with self._runtime.beside_captures():
                storage.resize_(nbytes)
            self.allocated_bytes += nbytes
        except torch.OutOfMemoryError as error:
            free = readable_bytes(self.free_bytes())
            raise DeviceMemoryError(
                f"no room for {readable_bytes(nbytes)} of weights on {self.torch_device}, {free} are "
                "free, in pieces. The step was not taken. Lower device_memory, or make less activations (batch size, "
                "checkpointing)."
            ) from error
        if nbytes:
            self._owners[storage.data_ptr()] = torch.cuda.current_stream(self.torch_device)

    def used(self, storage: torch.UntypedStorage) -> None:
        owner, current = self._owners[storage.data_ptr()], torch.cuda.current_stream(self.torch_device)
        if owner != current:
            owner.wait_stream(current)

    def free(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        self.used(storage)
        del self._owners[storage.data_ptr()]
        self.allocated_bytes -= storage.nbytes()
        storage.resize_(0)

    def bring(self, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Event | None]:
        there = tensor.to(self.torch_device, dtype, non_blocking=True)
        if tensor.is_cpu and tensor.is_pinned():  # torch goes on before such a copy is over
            return there, self.compute.record()
        return there, None

    def pin(self, address: int, nbytes: int) -> None:
        self._pinned.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        for stream in self._streams:  # where this raises the memory stays registered: the GPU may still write to it
            stream.record().wait()
        self._pinned.unpin(address)

    def _stream(self, stream: torch.cuda.Stream) -> _Stream:
        return _Stream(stream, self._index, self._programs, self._runtime)
