"""The window: the memory under a unit's parameters. Real weights while the unit is in use, poison otherwise.

[Note: Why storages are swapped] Autograd saves views of a weight (``weight.t()``), not the parameter. They keep the
storage, so re-pointing ``parameter.data`` between forward and backward leaves them on the old memory and the input's
gradient is silently wrong. A window therefore keeps one storage for the unit's whole life and changes what is under it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

import aio_ext
from offload.device.protocol import Device
from offload.interrupts import held_back
from offload.memory import copy_memory, tensor_at
from offload.torch_internals import can_swap_memory, keeps_version, swap_memory
from offload.units import innermost

POISON = 0x7FFF
"""NaN in bf16, fp16, fp32 and fp64, whatever the alignment."""


class Window(Protocol):
    """``flat`` is the tensor whose storage the window changes; ``close`` puts poison, or nothing, under it.
    ``open_at``: the address in host memory that it is open on; 0 also where a use must look.
    ``holds`` tells whether a tensor looks into that storage, while the window is open.
    ``keep``, while it is open: what is in it can be read on when it is closed; in host memory at the same address.
    ``has_copy``: that is a copy of the weights, as it was left. ``drop_copy``: nobody reads it any more.

    A new window is neither open nor closed: take views of ``flat``, then close it.

    [Note: What is kept keeps its address] Tensors over a window are not all that may outlive a use. An array or a
    capsule that was made of one refers to its storage, and looks at the address that was under it then. So where
    somebody has something still, the very memory stays under the window, and the weights move on. A device's memory has
    no room for that: tensors over it get a copy, and what knows an address alone is good within the use.
    """

    flat: torch.Tensor
    open_at: int

    def holds(self, tensor: torch.Tensor) -> bool: ...

    def keep(self, keeps: bool) -> None: ...

    def has_copy(self) -> bool: ...

    def drop_copy(self) -> None: ...

    def close(self) -> None: ...


class HostWindow(Window, Protocol):
    """Can be opened on host memory, where it is.

    ``copies``: it shows a copy of that memory, and what is written to it goes with the use.
    ``keeps``: see ``keep``. ``leave`` tells the open window that what it keeps will be no other unit's memory, until
    the window makes the call that is ``left`` with it, and whether the weights are in other memory from now on.
    """

    @property
    def copies(self) -> bool: ...

    keeps: bool
    left: Callable[[], object] | None

    def open(self, address: int) -> None: ...

    def leave(self, take_back: Callable[[], object], *, is_copy: bool) -> None: ...


class _Holds:
    """Base of all kinds of window."""

    flat: torch.Tensor
    open_at = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        try:
            address = innermost(tensor).untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a sparse tensor, a handle, or what a collective still brings
            return False
        return address == self.flat.untyped_storage().data_ptr()


class SwapWindow(_Holds):
    """Exchanges the pointer of the storage: no copy, nothing freed, a stray read of a closed window gives NaN."""

    copies = False

    def __init__(self, numel: int, dtype: torch.dtype, poison: aio_ext.Pattern) -> None:
        self.flat = tensor_at(poison.address, numel, dtype)
        self._poison_address: int = poison.address
        self._poison = poison  # mapped as long as anything may look at it
        self._storage = self.flat.untyped_storage()
        self.open_at = 0  # also where an interrupt has come
        self._under = self._nothing = 0, self._storage
        """The address of the memory that was last under the window, or is now, and that memory: made once for a unit
        that is resident in RAM. One value: an interrupt may come at any line."""
        self.keeps = False
        self.left: Callable[[], object] | None = None
        self._has_copy = False

    def keep(self, keeps: bool) -> None:
        self.keeps = keeps

    def has_copy(self) -> bool:
        return self._has_copy

    def drop_copy(self) -> None:
        self.close()

    def leave(self, take_back: Callable[[], object], *, is_copy: bool) -> None:
        """The storage has a part in the memory: who looks at it may outlive the engine."""
        address, flat = self._under[0], self.flat
        part = aio_ext.share(address, flat.nbytes)
        kept = tensor_at(address, flat.numel(), flat.dtype, part).untyped_storage()
        self.open_at = 0
        with held_back():
            swap_memory(self._storage, self._under[1])
            self._under = address, kept
            swap_memory(self._storage, kept)
            self.left, self._has_copy = take_back, is_copy

    def open(self, address: int) -> None:
        if self.open_at == address:  # as it was left by who knows that nothing else comes to that memory
            return
        if self.left is not None:
            self._bring(address)
            return
        if self.flat.data_ptr() != self._poison_address:  # it is open on other memory, or an interrupt has left it
            self.close()
        if self._under[0] != address:
            self._under = address, tensor_at(address, self.flat.numel(), self.flat.dtype).untyped_storage()
        swap_memory(self._storage, self._under[1])
        self.open_at = address

    def close(self) -> None:
        """Safe to call twice: the address says whether it is open."""
        self.open_at = 0
        if self.keeps or self.flat.data_ptr() == self._poison_address:
            return
        if self.left is None:
            swap_memory(self._storage, self._under[1])
        else:
            self._give_back(self.left)

    def _give_back(self, take_back: Callable[[], object]) -> None:
        """Nobody looks any more at what was left."""
        with held_back():
            swap_memory(self._storage, self._under[1])
            self._under = self._nothing
            self.left, self._has_copy = None, False
            take_back()

    def _bring(self, address: int) -> None:
        """Fill what is under the window, unless these are the weights themselves."""
        if self._under[0] != address:
            copy_memory(self._under[0], address, self.flat.nbytes)


class CopyWindow(_Holds):
    """Frees the storage by resizing and fills it again by copying: for a torch that cannot exchange pointers."""

    copies = True
    left: Callable[[], object] | None = None
    """Its memory is its own: it has nothing to leave."""

    def __init__(self, numel: int, dtype: torch.dtype, poison: aio_ext.Pattern) -> None:
        self.flat = torch.empty(numel, dtype=dtype)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self.keeps = False

    def keep(self, keeps: bool) -> None:
        self.keeps = keeps

    def has_copy(self) -> bool:
        return self.flat.untyped_storage().nbytes() > 0

    def drop_copy(self) -> None:
        storage = self.flat.untyped_storage()
        if storage.resizable():  # else an array of numpy looks at it, and torch would not let it go
            storage.resize_(0)

    def open(self, address: int) -> None:
        if not self.has_copy():
            self.flat.untyped_storage().resize_(self._nbytes)
        with torch.no_grad(), keeps_version(self.flat):
            self.flat.copy_(tensor_at(address, self.flat.numel(), self.flat.dtype))

    def close(self) -> None:
        if not self.keeps:
            self.drop_copy()

    def leave(self, take_back: Callable[[], object], *, is_copy: bool) -> None:
        raise RuntimeError("a window that copies has left nothing")


class DeviceWindow(_Holds):
    """Memory on a device, from ``allocate`` to ``close``. ``target`` is the same memory, for copies that autograd must
    not count as changes."""

    def __init__(self, numel: int, dtype: torch.dtype, device: Device) -> None:
        self.numel = numel
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        self._device = device
        self._keeps = False
        self._has_copy = False
        """Memory of its own is under the closed window."""
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        self.allocate()
        self.flat = torch.empty(0, dtype=dtype, device=device.torch_device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload]
        self.target = torch.empty(0, dtype=dtype, device=device.torch_device).set_(self._storage, 0, (numel,))  # type: ignore[call-overload]

    def keep(self, keeps: bool) -> None:
        self._keeps = keeps

    def has_copy(self) -> bool:
        return False  # it may have been filled anew before it was left, ahead of a use

    def drop_copy(self) -> None:
        if self._has_copy:
            self._has_copy = False
            self._storage.resize_(0)

    def allocate(self) -> None:
        self.drop_copy()
        self._device.allocate(self._storage, self.nbytes)

    def used(self) -> None:
        """Compute was given work on what is in the window, on the stream that is current now."""
        self._device.used(self._storage)

    def close(self) -> None:
        if self._has_copy:
            return
        copy = self.target.clone() if self._keeps else None
        self._device.free(self._storage)
        if copy is not None:
            self._has_copy = True
            self._storage.resize_(self.nbytes)
            self.target.copy_(copy)


def window_class() -> type[SwapWindow] | type[CopyWindow]:
    """The best window that this torch supports."""
    return SwapWindow if can_swap_memory() else CopyWindow
