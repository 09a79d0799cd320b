"""Copies of activations between where the model computes and host memory set aside for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.device.protocol import Device, Event
from offload.memory import tensor_at


@dataclass(frozen=True)
class Copying:
    """A copy under way: ``event`` is its end, until which ``tensors`` must live."""

    event: Event
    tensors: Sequence[torch.Tensor]


class Copies(Protocol):
    """Copies ranges of bytes of storages. ``bytes_of`` a storage are a flat tensor of ``uint8``."""

    @property
    def device(self) -> torch.device:
        """The device that activations are on."""

    def out(self, address: int, source: torch.Tensor) -> Copying | None:
        """Copy to host memory. None: it is done."""

    def back(self, target: torch.Tensor, address: int) -> Copying | None:
        """Copy from host memory into new memory, for the work that compute is given next. When it is done, the host
        memory may be used otherwise; None: at once."""


class HostCopies:
    """The CPU computes."""

    device = torch.device("cpu")

    def out(self, address: int, source: torch.Tensor) -> Copying | None:
        tensor_at(address, source.numel(), torch.uint8).copy_(source)
        return None

    def back(self, target: torch.Tensor, address: int) -> Copying | None:
        target.copy_(tensor_at(address, target.numel(), torch.uint8))
        return None


@dataclass(eq=False)
class DeviceCopies:
    """A device computes: copies go by its streams, beside compute."""

    on: Device

    @property
    def device(self) -> torch.device:
        return self.on.torch_device

    def out(self, address: int, source: torch.Tensor) -> Copying | None:
        stream, target = self.on.to_host, tensor_at(address, source.numel(), torch.uint8)
        stream.wait(self.on.compute.record())
        stream.copy(target, source)
        return Copying(stream.record(), (target, source))

    def back(self, target: torch.Tensor, address: int) -> Copying | None:
        stream, compute = self.on.to_device, self.on.compute
        source = tensor_at(address, target.numel(), torch.uint8)
        stream.wait(compute.record())  # the memory is new for work that comes after its allocation
        stream.copy(target, source)
        copying = Copying(stream.record(), (source,))
        compute.wait(copying.event)
        return copying


def bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """So many bytes of a storage, from this one on, as a flat tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (nbytes,))  # type: ignore[call-overload,no-any-return]
