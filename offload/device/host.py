"""The CPU as what the model computes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from offload.device.protocol import Event
from offload.memory import available_bytes


class Cpu:
    """Computes on host memory, in the order in which it is asked. See ``Processor``."""

    torch_device = torch.device("cpu")
    identity: str | None = None
    allocated_bytes = 0

    def free_bytes(self) -> int:
        return available_bytes()

    def surroundings(self) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext

    def bring(self, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Event | None]:
        return tensor.to("cpu", dtype), None
