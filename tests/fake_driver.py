"""CUDA's driver and torch's face of it, without a GPU: what the CUDA classes run on where there is none.

``FakeDriver`` is a library with the driver's entry points (``fake_driver.cpp``): it wants a bound context in each
thread, live handles and memory that was lent, and runs kernels by the emulator. ``FakeCuda`` stands in for what
``CudaDevice`` asks of ``torch.cuda``; its work is done at once.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from gpu_emulator import Emulator

from offload import kernels
from offload.device import cuda
from offload.device import programs as gpu_programs
from offload.device.cuda import CudaDevice
from offload.device.driver import Context
from offload.device.programs import GpuPrograms
from offload.kernels.gpu import Program, _Arrays

ILLEGAL_ADDRESS, MISALIGNED = 700, 716
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_RANGE_BYTES = 24
_OnLaunch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p),
)


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = Path(__file__).with_suffix(".cpp")
    with TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        subprocess.run([compiler, "-std=c++20", "-O1", "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found.fake_stream.restype = ctypes.c_void_p
    found.fake_num_registered.restype = found.fake_num_bound.restype = ctypes.c_size_t
    return found


def image_of(program: Program) -> bytes:
    """What the fake compiler makes: the driver looks for the magic number, and for names."""
    fields = (program.rule, program.grad, program.weight_format, program.state)
    return b"\x7fELF;" + ";".join((*fields, "update square_lanes square_ranges")).encode()


def compiled(version: str, architecture: str, definitions: tuple[str, ...]) -> bytes:
    """In the place of ``compile_kernels``."""
    assert (version, architecture) == ("12.8", "sm_90")
    return image_of(Program(*(text.split("=")[1].removeprefix("offload::rules::") for text in definitions)))


class FakeDriver:
    """A driver with ``num_devices`` GPUs. ``launches`` are the kernels that have run, with their GPUs."""

    def __init__(self, num_devices: int = 1) -> None:
        self.library = _library()
        self.launches: list[tuple[int, str]] = []
        self.threads: set[str] = set()
        """The names of those that have launched."""
        self._emulator = Emulator()
        self._lent: dict[int, tuple[int, int]] = {}
        self._on_launch = _OnLaunch(self._launched)
        self.library.fake_begin(num_devices, self._on_launch)

    def context(self, index: int = 0) -> Context:
        return Context(index, lambda: self.library)

    def stream(self, index: int = 0) -> int:
        """A new stream's handle."""
        return int(self.library.fake_stream(index))

    def plant(self, name: str, status: int) -> None:
        """A call gives back ``status`` from now on; 0: no longer."""
        self.library.fake_plant(name.encode(), status)

    def count(self, name: str) -> int:
        """How often a function was called."""
        return int(self.library.fake_count(name.encode()))

    def capture(self, is_captured: bool) -> None:
        """Another thread captures a graph, in the mode "global", or does no more."""
        self.library.fake_capture(int(is_captured))

    def refuses_to_wait(self) -> bool:
        """A call of this thread that might wait for the GPU would make a capture void."""
        return bool(self.library.fake_waits())

    @property
    def capture_mode(self) -> int:
        """Of this thread; 0: CUDA's default."""
        return int(self.library.fake_capture_mode())

    @property
    def num_registered(self) -> int:
        """Pieces of host memory that are pinned."""
        return int(self.library.fake_num_registered())

    @property
    def num_bound(self) -> int:
        """Contexts on the stack of the calling thread."""
        return int(self.library.fake_num_bound())

    def lend(self, index: int, address: int, nbytes: int) -> None:
        """This is memory of a GPU from now on."""
        self._lent[address] = (index, nbytes)

    def take_back(self, address: int) -> None:
        del self._lent[address]

    def _launched(
        self, index: int, function: bytes, image: int, nbytes: int, num_blocks: int, num_threads: int, addresses: int
    ) -> int:
        program = Program(*ctypes.string_at(image, nbytes).decode().split(";")[1:5])
        name, arguments = function.decode(), ctypes.cast(addresses, ctypes.POINTER(ctypes.c_void_p))
        used = _used(program, name, arguments, num_blocks)
        if any(address % align for address, _, align in used):
            return MISALIGNED
        if not all(self._is_lent(index, address, length) for address, length, _ in used if length is not None):
            return ILLEGAL_ADDRESS
        self.launches.append((index, name))
        self.threads.add(threading.current_thread().name)
        self._emulator.call(program, name, num_blocks, num_threads, ctypes.c_void_p(addresses))
        return 0

    def _is_lent(self, index: int, address: int, nbytes: int) -> bool:
        return any(
            of == index and start <= address and address + nbytes <= start + length
            for start, (of, length) in self._lent.items()
        )


def _used(program: Program, name: str, arguments: Any, num_blocks: int) -> list[tuple[int, int | None, int]]:
    """Address, length and alignment of all that a launch reads and writes. No length: it may be autograd's memory."""

    def number(index: int) -> int:
        return ctypes.c_size_t.from_address(arguments[index]).value

    grad_bytes = _ITEM_BYTES[program.grad]
    if name == "update":
        arrays, numel = _Arrays.from_address(arguments[1]), number(2)
        widths = [(arrays.grad, grad_bytes), (arrays.rest, 2), (arrays.master, 4)]
        widths.append((arrays.weight, 4 if program.weight_format in ("f32", "out_f32") else 2))
        widths += [(state, _ITEM_BYTES[program.state]) for state in arrays.states]
        return [(address, numel * width, width) for address, width in widths if address]
    if name == "square_lanes":
        source, ranges, num_ranges, num_squares, lanes = map(number, range(5))
        rows = (ctypes.c_int64 * (3 * num_ranges)).from_address(ranges)
        found = [(source + start * grad_bytes, None, grad_bytes) for start in rows[::3]]
        return [*found, (lanes, 8 * num_squares * kernels.SQUARES_LANES, 8), (ranges, _RANGE_BYTES * num_ranges, 8)]
    ranges, _, sums = map(number, range(3))
    return [(ranges, _RANGE_BYTES * num_blocks, 8), (sums, 8 * num_blocks, 8)]


class _Event:
    def __init__(self, face: FakeCuda) -> None:
        self._face = face
        self._stream: _Stream | None = None

    def record(self, stream: _Stream) -> None:
        self._stream = stream

    def query(self) -> bool:
        self._face._make_context()
        if self._face._driver.refuses_to_wait():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self._stream is None or not self._stream.hangs

    def synchronize(self) -> None:
        assert self.query(), "the thread blocks without a deadline"

    def elapsed_time(self, later: _Event) -> float:
        return 1.0


class _Stream:
    def __init__(self, handle: int, priority: int, index: int) -> None:
        self.cuda_stream = handle
        self.index = self.device_index = index
        self.priority = priority
        self.hangs = False
        """Its work does not end."""

    def wait_event(self, event: _Event) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass


@dataclass
class _Runtime:
    """CUDA's runtime, which cannot register host memory, and keeps the error."""

    face: FakeCuda

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.face.last_error = 2
        return 2


class FakeCuda:
    """What ``CudaDevice`` asks of ``torch.cuda``."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self, driver: FakeDriver, num_devices: int) -> None:
        self.streams: list[_Stream] = []
        self.computes_on = 0
        """The GPU that stands behind host memory: see ``FakeCudaDevice``."""
        self.last_error = 0
        """The runtime's: the next call that works on the GPU raises it, whoever has made it."""
        self._driver = driver
        self._num_devices = num_devices
        self._default = _Stream(0, 0, 0)
        self._thread = threading.local()
        self.contexts: set[int] = set()
        """GPUs on which a thread has made a context by a call of the runtime."""

    def Event(self, enable_timing: bool = False) -> _Event:
        return _Event(self)

    def _make_context(self) -> None:
        """What every call of the runtime does that needs a context: on the GPU that is the thread's current one."""
        self.contexts.add(self.current_device())

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._num_devices

    def current_device(self) -> int:
        return getattr(self._thread, "index", 0)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """At the end nothing is made current where there is no context, but in this thread's books."""
        before = self.current_device()
        self._thread.index = index
        self._make_context()
        try:
            yield
        finally:
            self._thread.index = before

    def current_stream(self, device: Any) -> _Stream:
        return self._default

    def Stream(self, device: torch.device, priority: int = 0) -> _Stream:
        index = self.computes_on if device.index is None else device.index
        self.streams.append(_Stream(self._driver.stream(index), priority, index))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        status, self.last_error = self.last_error, 0
        if status:
            raise RuntimeError(f"CUDA error {status}")
        before = self.current_device()
        self._make_current(stream.index)
        try:
            yield
        finally:
            self._make_current(before)

    def _make_current(self, index: int) -> None:
        """As ``cudaSetDevice`` does since CUDA 12."""
        if index != self.current_device():
            self._thread.index = index
            self._make_context()

    def cudart(self) -> _Runtime:
        return _Runtime(self)

    def reset_peak_memory_stats(self, device: Any) -> None:
        pass

    def memory_reserved(self, device: Any) -> int:
        return 0

    memory_allocated = max_memory_reserved = memory_reserved

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def memory_stats_as_nested_dict(self, device: Any) -> dict[str, int]:
        return {}


class FakeCudaDevice(CudaDevice):
    """The CUDA device over host memory, all of which that it allocates is lent to the driver."""

    def __init__(self, driver: FakeDriver, index: int) -> None:
        super().__init__(torch.device("cuda", index))
        self.torch_device = torch.device("cpu")
        self._driver = driver
        self._index = index

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().allocate(storage, nbytes)
        self._driver.lend(self._index, storage.data_ptr(), nbytes)

    def free(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self._driver.take_back(storage.data_ptr())
        super().free(storage)


class Stand:
    """A driver, torch's face of it, and the CUDA classes over both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int = 1) -> None:
        self.driver = FakeDriver(num_devices)
        self.cuda = FakeCuda(self.driver, num_devices)
        contexts = [self.driver.context(index) for index in range(num_devices)]
        programs = [GpuPrograms(context, "12.8") for context in contexts]
        for name in vars(FakeCuda):
            if not name.startswith("_"):
                monkeypatch.setattr(torch.cuda, name, getattr(self.cuda, name))
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        monkeypatch.setattr(cuda, "runtime_of", contexts.__getitem__)
        monkeypatch.setattr(cuda, "programs_of", programs.__getitem__)
        monkeypatch.setattr(gpu_programs, "compile_kernels", compiled)

    def device(self, index: int = 0) -> FakeCudaDevice:
        self.cuda.computes_on = index
        return FakeCudaDevice(self.driver, index)
