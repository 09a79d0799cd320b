"""Programs of the kernels, loaded into one GPU, and launched on torch's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from offload.device.driver import Context, DriverError, context_of
from offload.kernels.gpu import GpuKernels, Program
from offload.kernels.nvrtc import CompilerMissing, compile_kernels

_FIRST_PROGRAM = Program("sgd", "f32", "f32", "f32")


class GpuPrograms:
    """Compiles what is launched when it is launched first; ``unsupported_reason`` tries whether that works."""

    def __init__(self, context: Context, cuda_version: str | None) -> None:
        """``cuda_version`` is that of torch, such as ``12.8``; None: torch is built without CUDA."""
        self._context = context
        self._cuda_version = cuda_version
        self._function = cache(self._load_function)
        self._module = cache(self._load_module)

    def unsupported_reason(self) -> str | None:
        """Return the reason why there can be no kernels on this GPU; None if there can."""
        try:
            self._module(_FIRST_PROGRAM)
        except (CompilerMissing, DriverError) as error:
            return str(error.args[0])
        return None

    def on(self, stream: int) -> GpuKernels:
        """The kernels, in the order of a stream, of which ``stream`` is CUDA's handle."""
        return GpuKernels(partial(self._launch, stream))

    def _launch(
        self,
        stream: int,
        program: Program,
        function: str,
        num_blocks: int,
        num_threads: int,
        arguments: Sequence[Any],
    ) -> None:
        self._context.launch(self._function(program, function), num_blocks, num_threads, stream, arguments)

    def _load_function(self, program: Program, name: str) -> ctypes.c_void_p:
        return self._context.function(self._module(program), name)

    def _load_module(self, program: Program) -> ctypes.c_void_p:
        if self._cuda_version is None:
            raise CompilerMissing("this torch is built without CUDA, and ROCm's compiler (hipRTC) is not used")
        major, minor = self._context.capability()
        binary = compile_kernels(self._cuda_version, f"sm_{major}{minor}", program.definitions())
        return self._context.load(binary)


@cache
def programs_of(index: int) -> GpuPrograms:
    """The programs of a GPU, shared by all engines: each is compiled once."""
    return GpuPrograms(context_of(index), torch.version.cuda)
