"""CUDA's driver: what is done in the context of one GPU that torch has no call for.

[Note: Why the context is pushed] The driver works in the context that is bound to the calling thread. A thread that has
not used CUDA yet has none, and torch binds none to it where the GPU is the "current" one already. So each call here
takes the context that torch works in too (the GPU's primary one), binds it, and gives the thread back what it had.

[Note: Graphs that others capture] While one thread captures a CUDA graph in CUDA's default mode, "global", calls of any
other thread are refused that might wait for the GPU, and make the capture void: to ask whether an event is over, to
take device memory, to register host memory, to load a program. A thread whose mode is "thread local" is concerned by
its own captures alone. So such calls are made within ``beside_captures``: what the engine's threads do for one model
does not end the capture of another that computes beside it.

Host memory is registered here and not through torch: an error of the runtime that nobody fetches is raised by the next
launch, whoever makes it, and torch has no call that fetches it. The driver keeps no such error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch

from swapper import OffloadError

_PORTABLE = 1
"""``CU_MEMHOSTREGISTER_PORTABLE``: pinned for every GPU, in whichever context it was done."""

_CAPTURE_THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""Attributes of a GPU."""


class DriverError(OffloadError):
    """The driver, or the GPU, has refused a call. ``status`` is its number; 0 where there is no driver."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@cache
def installed() -> ctypes.CDLL:
    """The driver's library. Raises ``DriverError``."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"there is no CUDA driver: {error}") from error


class Context:
    """The primary context of one GPU. All calls may come from any thread; all raise ``DriverError``."""

    def __init__(self, index: int, library: Callable[[], ctypes.CDLL] = installed) -> None:
        self._index = index
        self._library = library
        self._lock = Lock()
        """Guards ``_handle``. Nothing is waited for while it is held, but the making of the context."""
        self._handle: ctypes.c_void_p | None = None

    def capability(self) -> tuple[int, int]:
        """Such as ``(9, 0)``: what programs are compiled for."""
        device = self._device()
        found = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            number = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
            found.append(number.value)
        return found[0], found[1]

    def load(self, binary: bytes) -> ctypes.c_void_p:
        """A program in the GPU's memory, where it stays as long as the process."""
        module = ctypes.c_void_p()
        with self._bound(), self.beside_captures():
            self._call("cuModuleLoadData", ctypes.byref(module), binary)
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """One of the kernels in a program."""
        function = ctypes.c_void_p()
        with self._bound():
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def launch(
        self, function: ctypes.c_void_p, num_blocks: int, num_threads: int, stream: int, arguments: Sequence[Any]
    ) -> None:
        """Queue a kernel on a stream, of which ``stream`` is CUDA's handle. ``arguments`` are objects of ctypes."""
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        grid, block = (num_blocks, 1, 1), (num_threads, 1, 1)
        with self._bound():
            self._call("cuLaunchKernel", function, *grid, *block, 0, ctypes.c_void_p(stream), addresses, None)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy on a stream, of as many bytes without gaps, between host memory and the GPU or within it."""
        nbytes = ctypes.c_size_t(target.nbytes)
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (target, source))
        with self._bound():
            self._call("cuMemcpyAsync", *addresses, nbytes, ctypes.c_void_p(stream.cuda_stream))

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that GPUs copy from and to it by themselves."""
        with self._bound(), self.beside_captures():
            self._call(
                "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
            )

    def unregister(self, address: int) -> None:
        """Undo ``register``. Nothing may be in flight."""
        with self._bound(), self.beside_captures():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Within, a graph that another thread captures refuses no call of this one. See [Note: Graphs that others
        capture]."""
        self._retained()  # before anything else is asked of the driver
        mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """See [Note: Why the context is pushed]."""
        self._call("cuCtxPushCurrent_v2", self._retained())
        try:
            yield
        finally:
            self._library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))  # what it says is not about this call

    def _retained(self) -> ctypes.c_void_p:
        with self._lock:
            if self._handle is None:
                handle = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self._device())
                self._handle = handle  # kept as long as the process, as torch keeps it
            return self._handle

    def _device(self) -> ctypes.c_int:
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), self._index)
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        library = self._library()
        status = getattr(library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            library.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise DriverError(f"{name} failed on cuda:{self._index}: {said} ({status})", status)


@cache
def context_of(index: int) -> Context:
    """The context of a GPU, shared by all engines."""
    return Context(index)
