"""The window: the memory under a unit's parameters. Real weights while the unit is in use, poison otherwise.

[Note: Why storages are swapped] Autograd saves views of a weight (``weight.t()``), not the parameter. They keep the
storage, so re-pointing ``parameter.data`` between forward and backward leaves them on the old memory and the input's
gradient is silently wrong. A window therefore keeps one storage for the unit's whole life and changes what is under it.
"""

from __future__ import annotations

from typing import Protocol

import torch

import aio_ext
from offload.device.protocol import Device
from offload.memory import tensor_at
from offload.torch_internals import can_swap_memory, keeps_version, swap_memory
from offload.units import local_tensor

POISON = 0x7FFF
"""NaN in bf16, fp16, fp32 and fp64, whatever the alignment."""


class Window(Protocol):
    """``flat`` is the tensor whose storage the window changes; ``close`` puts poison, or nothing, under it.
    ``holds`` tells whether a tensor looks into that storage, while the window is open.

    A new window is neither open nor closed: take views of ``flat``, then close it.
    """

    flat: torch.Tensor

    def holds(self, tensor: torch.Tensor) -> bool: ...

    def close(self) -> None: ...


class HostWindow(Window, Protocol):
    """Can be opened on host memory, where it is."""

    def open(self, address: int) -> None: ...


class _Holds:
    """Base of all kinds of window."""

    flat: torch.Tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        try:
            address = local_tensor(tensor).untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a sparse tensor, a handle, or what a collective still brings
            return False
        return address == self.flat.untyped_storage().data_ptr()


class SwapWindow(_Holds):
    """Exchanges the pointer of the storage: no copy, nothing freed, a stray read of a closed window gives NaN."""

    def __init__(self, numel: int, dtype: torch.dtype, poison: aio_ext.Pattern) -> None:
        self.flat = tensor_at(poison.address, numel, dtype)
        self._poison = poison  # mapped as long as anything may look at it
        self._storage = self.flat.untyped_storage()
        self._under = 0, self._storage
        """The address of the memory that was last under the window, or is now, and that memory: made once for a unit
        that is resident in RAM. One value: an interrupt may come at any line."""

    def open(self, address: int) -> None:
        self.close()  # an interrupt may have left it open
        if self._under[0] != address:
            self._under = address, tensor_at(address, self.flat.numel(), self.flat.dtype).untyped_storage()
        swap_memory(self._storage, self._under[1])

    def close(self) -> None:
        """Safe to call twice: the address says whether it is open."""
        if self.flat.data_ptr() != self._poison.address:
            swap_memory(self._storage, self._under[1])


class CopyWindow(_Holds):
    """Frees the storage by resizing and fills it again by copying: for a torch that cannot exchange pointers."""

    def __init__(self, numel: int, dtype: torch.dtype, poison: aio_ext.Pattern) -> None:
        self.flat = torch.empty(numel, dtype=dtype)
        self._nbytes = self.flat.untyped_storage().nbytes()

    def open(self, address: int) -> None:
        self.flat.untyped_storage().resize_(self._nbytes)
        with torch.no_grad(), keeps_version(self.flat):
            self.flat.copy_(tensor_at(address, self.flat.numel(), self.flat.dtype))

    def close(self) -> None:
        self.flat.untyped_storage().resize_(0)


class DeviceWindow(_Holds):
    """Memory on a device, from ``allocate`` to ``close``. ``target`` is the same memory, for copies that autograd must
    not count as changes."""

    def __init__(self, numel: int, dtype: torch.dtype, device: Device) -> None:
        self.numel = numel
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        self._device = device
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        self.allocate()
        self.flat = torch.empty(0, dtype=dtype, device=device.torch_device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload]
        self.target = torch.empty(0, dtype=dtype, device=device.torch_device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload]

    def allocate(self) -> None:
        self._device.allocate(self._storage, self.nbytes)

    def used(self) -> None:
        """Compute was given work on what is in the window, on the stream that is current now."""
        self._device.used(self._storage)

    def close(self) -> None:
        self._device.free(self._storage)


def window_class() -> type[SwapWindow] | type[CopyWindow]:
    """The best window that this torch supports."""
    return SwapWindow if can_swap_memory() else CopyWindow
