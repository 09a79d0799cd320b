"""Programs of the kernels, loaded into one GPU by CUDA's driver, and launched on torch's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from offload.kernels.gpu import GpuKernels, Program
from offload.kernels.nvrtc import CompilerMissing, compile_kernels
from swapper import OffloadError

_FIRST_PROGRAM = Program("Sgd", "f32", "f32", "f32")


class GpuPrograms:
    """Compiles what is launched when it is launched first; ``obstacle`` tries whether that works."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: ctypes.CDLL | None = None
        self._functions: dict[tuple[Program, str], ctypes.c_void_p] = {}
        self._modules: dict[Program, ctypes.c_void_p] = {}

    def obstacle(self) -> str | None:
        """Why there can be no kernels on this GPU; None if there can."""
        try:
            self._module(_FIRST_PROGRAM)
        except (CompilerMissing, OSError, OffloadError) as error:
            return str(error)
        return None

    def on(self, stream: torch.cuda.Stream) -> GpuKernels:
        """The kernels, in the order of a stream."""
        return GpuKernels(partial(self._launch, stream))

    def _launch(
        self,
        stream: torch.cuda.Stream,
        program: Program,
        function: str,
        num_blocks: int,
        num_threads: int,
        arguments: Sequence[Any],
    ) -> None:
        with torch.cuda.device(self._device):  # the driver launches in the context that is current in this thread
            addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
            grid, block = (num_blocks, 1, 1), (num_threads, 1, 1)
            handle = ctypes.c_void_p(stream.cuda_stream)
            self._call("cuLaunchKernel", self._function(program, function), *grid, *block, 0, handle, addresses, None)

    def _function(self, program: Program, name: str) -> ctypes.c_void_p:
        found = self._functions.get((program, name))
        if found is None:
            module, found = self._module(program), ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
            self._functions[program, name] = found
        return found

    def _module(self, program: Program) -> ctypes.c_void_p:
        """The program in the GPU's memory, where it stays as long as the process."""
        if program not in self._modules:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream(self._device).synchronize()  # CUDA's context is there, and this thread's
                major, minor = torch.cuda.get_device_capability(self._device)
                version = torch.version.cuda
                if version is None:
                    raise CompilerMissing("this torch is built without CUDA")
                binary = compile_kernels(version, f"sm_{major}{minor}", program.definitions())
                module = ctypes.c_void_p()
                self._call("cuModuleLoadData", ctypes.byref(module), binary)
                self._modules[program] = module
        return self._modules[program]

    def _call(self, name: str, *arguments: Any) -> None:
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise OffloadError(f"{name} failed on {self._device}: {said} ({status})")


@cache
def programs_of(device: torch.device) -> GpuPrograms:
    """The programs of a GPU, shared by all engines: each is compiled once."""
    return GpuPrograms(device)
