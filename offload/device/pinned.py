"""Host memory that is registered where it lies, so that a GPU copies from and to it by itself.

What cannot be registered is used as it is: CUDA then copies through a buffer of its own, and the call that asks for a
copy returns when the host memory is free again. Events say when a copy is over in either case, so no order changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from offload.device.driver import DriverError, context_of
from offload.errors import warn
from swapper import readable_bytes

_PORTABLE = 1
"""``hipHostRegisterPortable``."""


class Runtime(Protocol):
    """CUDA's or ROCm's own calls for host memory. Both raise ``DriverError``."""

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy of as many bytes, without gaps."""

    def beside_captures(self) -> AbstractContextManager[None]:
        """See [Note: Graphs that others capture] in ``offload.device.driver``."""


class _Hip:
    """The runtime of a torch that is built for ROCm, which has CUDA's names there."""

    def register(self, address: int, nbytes: int) -> None:
        self._check("hipHostRegister", torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        self._check("hipHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(stream.device_index), torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def beside_captures(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch has no way to hipThreadExchangeStreamCaptureMode

    def _check(self, name: str, code: object) -> None:
        status = int(code)  # type: ignore[call-overload]
        if status != 0:
            raise DriverError(f"{name} failed ({status})", status)


def runtime_of(index: int) -> Runtime:
    """The one of a GPU of torch."""
    return context_of(index) if torch.version.hip is None else _Hip()


class PinnedMemory:
    """Memory that was registered for one device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._addresses: set[int] = set()
        self._has_warned = False

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory. Warns, once, if that cannot be done: copies then block, and are slow."""
        try:
            self._runtime.register(address, nbytes)
            self._addresses.add(address)
        except DriverError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"{readable_bytes(nbytes)} of host memory could not be pinned: {error}. Training goes on with the "
                    "same bits, and with copies that block, at a fraction of the link's speed. Raise the limit of "
                    "locked memory (ulimit -l unlimited), or lower host_memory."
                )

    def unpin(self, address: int) -> None:
        """Undo ``pin``, whether or not it could be done. Nothing may be in flight."""
        if address in self._addresses:
            self._addresses.remove(address)
            self._runtime.unregister(address)
