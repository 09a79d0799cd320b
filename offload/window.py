"""The window: what lies under a unit's parameters. Real weights while the unit is in use, poison otherwise.

[Note: Why storages are swapped] Autograd saves views of a weight (``weight.t()``), not the parameter. They keep the
storage, so re-pointing ``parameter.data`` between forward and backward leaves them on the old memory and the input's
gradient is silently wrong. A window therefore keeps one storage for the unit's whole life and changes what is under it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import aio_ext
from offload.device import Device
from offload.handle import Handle
from offload.memory import tensor_at

POISON = 0x7FFF
"""NaN in bf16, fp16, fp32 and fp64, whatever the alignment."""


class Window(Protocol):
    """``flat`` is the tensor whose storage the window changes; ``close`` puts poison, or nothing, under it.
    ``holds`` tells tensors that look into that storage.

    A new window is neither open nor closed: take views of ``flat``, then close it.
    """

    flat: torch.Tensor

    def holds(self, tensor: torch.Tensor) -> bool: ...

    def close(self) -> None: ...


class HostWindow(Window, Protocol):
    """Can be opened on host memory, where it is."""

    def open(self, address: int) -> None: ...


class _Holds:
    """What both kinds of window know."""

    flat: torch.Tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        own = self.flat.untyped_storage()
        return (
            tensor.layout is torch.strided
            and not isinstance(tensor, Handle)
            and tensor.untyped_storage()._cdata == own._cdata
        )


class SwapWindow(_Holds):
    """Exchanges the pointer of the storage: no copy, nothing freed, a stray read of a closed window gives NaN."""

    def __init__(self, numel: int, dtype: torch.dtype, poison: aio_ext.Pattern) -> None:
        self.flat = tensor_at(poison.address, numel, dtype)
        self._poison = poison  # mapped as long as anything may look at it
        self._storage = self.flat.untyped_storage()
        self._under: torch.UntypedStorage | None = None
        """What the window last looked out on, or does now: made once for a unit that is at home in RAM."""
        self._address = 0
        self._is_open = False

    def open(self, address: int) -> None:
        if self._under is None or self._address != address:
            self._under = tensor_at(address, self.flat.numel(), self.flat.dtype).untyped_storage()
            self._address = address
        self._storage._swap_data_ptr_(self._under)  # type: ignore[attr-defined]
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._storage._swap_data_ptr_(self._under)  # type: ignore[attr-defined]
            self._is_open = False


class CopyWindow(_Holds):
    """Frees the storage by resizing and fills it again by copying: for a torch that cannot exchange pointers."""

    def __init__(self, numel: int, dtype: torch.dtype, poison: aio_ext.Pattern) -> None:
        self.flat = torch.empty(numel, dtype=dtype)
        self._nbytes = self.flat.untyped_storage().nbytes()

    def open(self, address: int) -> None:
        self.flat.untyped_storage().resize_(self._nbytes)
        with torch.no_grad(), _unsafe_preserve_version_counter(self.flat):
            self.flat.copy_(tensor_at(address, self.flat.numel(), self.flat.dtype))

    def close(self) -> None:
        self.flat.untyped_storage().resize_(0)


class DeviceWindow(_Holds):
    """Memory on a device, from ``allocate`` to ``close``. ``target`` is the same memory, for copies that autograd must
    not count as changes."""

    def __init__(self, numel: int, dtype: torch.dtype, device: Device) -> None:
        self.numel = numel
        self.dtype = dtype
        self._device = device
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        self.allocate()
        self.flat = torch.empty(0, dtype=dtype, device=device.torch_device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload]
        self.target = torch.empty(0, dtype=dtype, device=device.torch_device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload]

    def allocate(self) -> None:
        self._device.allocate(self._storage, self.numel * self.dtype.itemsize)

    def close(self) -> None:
        self._device.free(self._storage)


def window_class() -> type[SwapWindow] | type[CopyWindow]:
    """The best window that this torch supports: ``_swap_data_ptr_`` is private, so it is tried before it is trusted."""
    try:
        left, right = torch.zeros(4), torch.ones(4)
        view = left.view(2, 2).t()
        left.untyped_storage()._swap_data_ptr_(right.untyped_storage())  # type: ignore[attr-defined]
        works = bool((view == 1).all()) and bool((right == 0).all())
    except (AttributeError, RuntimeError):
        works = False
    return SwapWindow if works else CopyWindow
