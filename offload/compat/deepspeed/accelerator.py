"""``get_accelerator()``: where the model computes, as scripts ask for it."""

from __future__ import annotations

import torch


class Accelerator:
    """The GPU, or the CPU where there is none."""

    @property
    def _name(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """A name for ``tensor.to``: "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The same, of the device in use."""
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def set_device(self, device_index: int) -> None:
        """Use this GPU; nothing on the CPU."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return max(1, torch.cuda.device_count())

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        """Backend of ``torch.distributed`` for one process."""
        return "gloo"


def get_accelerator() -> Accelerator:
    """The accelerator of this machine."""
    return Accelerator()
