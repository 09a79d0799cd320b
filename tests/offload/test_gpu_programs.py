"""From the engine to the launch of a GPU's kernels, without a GPU: a device and a driver that run them on the host."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_emulator import Emulator
from tiny import Tiny, train

from offload import OffloadEngine, kernels
from offload.device import programs as gpu_programs
from offload.device.programs import GpuPrograms
from offload.dtypes import kernel_dtype
from offload.errors import OffloadError
from offload.kernels.gpu import GpuKernels, Program
from offload.kernels.nvrtc import CompilerMissing
from offload.testing.simulated import SimulatedDevice, _Stream


class Driver:
    """What ``GpuPrograms`` calls of libcuda. A handle is an index into a list; ``result`` is what calls give back."""

    def __init__(self, emulator: Emulator) -> None:
        self.result = 0
        self.launches: list[str] = []
        self._emulator = emulator
        self._handles: list[Any] = [None]

    def cuModuleLoadData(self, module: Any, binary: bytes) -> int:
        return self._give(module, binary)

    def cuModuleGetFunction(self, function: Any, module: ctypes.c_void_p, name: bytes) -> int:
        return self._give(function, (self._handles[module.value or 0], name.decode()))

    def cuLaunchKernel(self, function: ctypes.c_void_p, *rest: Any) -> int:
        binary, name = self._handles[function.value or 0]
        num_blocks, _, _, num_threads, _, _, shared_bytes, stream, arguments, extra = rest
        assert rest[1:3] == rest[4:6] == (1, 1) and shared_bytes == 0 and stream.value == 77 and extra is None
        self.launches.append(name)
        self._emulator.call(Program(*binary.decode().split(";")), name, num_blocks, num_threads, arguments)
        return self.result

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"planted"
        return 0

    def _give(self, handle: Any, value: Any) -> int:
        self._handles.append(value)
        handle._obj.value = len(self._handles) - 1
        return self.result


class Stream:
    cuda_stream = 77

    def synchronize(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    """A driver in the place of CUDA's, and a compiler whose binaries are the names of what they are compiled for."""

    def compiled(version: str, architecture: str, definitions: tuple[str, ...]) -> bytes:
        assert (version, architecture) == ("12.8", "sm_90")
        return ";".join(text.split("=")[1].removeprefix("offload::") for text in definitions).encode()

    @contextlib.contextmanager
    def current(device: Any) -> Iterator[None]:
        yield

    found, load = Driver(Emulator(tmp_path)), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found if name == "libcuda.so.1" else load(name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(gpu_programs, "compile_kernels", compiled)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return found


def test_the_engine_trains_by_the_kernels_text_for_gpus(
    make_model: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = GpuKernels(Emulator(tmp_path))

    def sum_squares(stream: Any, source: Any, ranges: Any, lanes: Any, sums: Any) -> None:
        tensors = (source, ranges, lanes, sums)
        of_source, of_ranges, of_lanes, of_sums = (tensor.data_ptr() for tensor in tensors)
        num_blocks = lanes.numel() // kernels.SQUARES_LANES
        gpu.sum_squares(kernel_dtype(source.dtype), of_source, of_ranges, len(ranges), of_lanes, num_blocks, of_sums)

    with OffloadEngine(make_model(), gradient_clipping=0.1) as engine:
        expected, weights = train(engine)
    monkeypatch.setattr(_Stream, "kernel", lambda stream, name: gpu.kernel(name))
    monkeypatch.setattr(_Stream, "sum_squares", sum_squares)
    with OffloadEngine(make_model(), gradient_clipping=0.1, device=SimulatedDevice()) as engine:
        assert len(engine.plan.device.resident) == 7
        losses, found = train(engine)
    assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())


def test_programs_are_compiled_once_and_launched_with_their_arguments(driver: Driver) -> None:
    programs = GpuPrograms(torch.device("cuda", 0))
    assert programs.obstacle() is None
    weight, expected, grad = torch.ones(1000), torch.ones(1000), torch.randn(1000)
    coef = kernels.SgdCoef(0.1, 0.0, 0.0, 0.01, 1)
    for native, target in ((programs.on(Stream()).kernel, weight), (kernels.on_host, expected)):  # type: ignore[arg-type]
        for _ in range(2):
            kernels.sgd(
                coef,
                1000,
                grad=grad.data_ptr(),
                grad_dtype=kernels.Dtype.F32,
                weight=target.data_ptr(),
                weight_dtype=kernels.Dtype.F32,
                native=native,
            )
    assert torch.equal(weight, expected) and driver.launches == ["update", "update"]
    assert len(driver._handles) == 3  # one program, one function


def test_what_the_driver_says_is_told(driver: Driver) -> None:
    driver.result = 719
    assert GpuPrograms(torch.device("cuda", 0)).obstacle() == "cuModuleLoadData failed on cuda:0: planted (719)"
    driver.result = 0
    programs = GpuPrograms(torch.device("cuda", 0))
    kernel = programs.on(Stream()).kernel("sgd")  # type: ignore[arg-type]
    kernel([1.0, 0.0, 0.0], 0, 0, 0, 0, 0, 0, 0, [0, 0, 0], [0, 0, 0], 0, 0, 1)  # no elements: nothing is launched
    assert driver.launches == []
    driver.result = 700
    weight = torch.ones(4)
    with pytest.raises(OffloadError, match="planted"):
        kernel([1.0, 0.0, 0.0], 4, weight.data_ptr(), 0, 0, 0, weight.data_ptr(), 0, [0, 0, 0], [0, 0, 0], 0, 0, 1)


def test_a_missing_compiler_or_driver_is_an_obstacle(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> bytes:
        raise CompilerMissing("libnvrtc.so.12 is not installed")

    with monkeypatch.context() as patch:
        patch.setattr(gpu_programs, "compile_kernels", missing)
        assert GpuPrograms(torch.device("cuda", 0)).obstacle() == "libnvrtc.so.12 is not installed"
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert GpuPrograms(torch.device("cuda", 0)).obstacle() == "this torch is built without CUDA"
