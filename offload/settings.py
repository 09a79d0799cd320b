"""Settings of torch that all threads have in common, and that decide what an operation computes or by which kernel."""

from __future__ import annotations

import torch
from torch.backends import cuda

from offload.torch_internals import FP32_PRECISIONS, KERNEL_FLAGS, Setting


def _matmul_precision() -> str | None:
    """None: it was set by the newer names, and torch refuses to tell it by the old one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_matmul_precision, _set_matmul_precision),
    *FP32_PRECISIONS,  # after the old name, which sets some of them
    *KERNEL_FLAGS,
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)


class Settings:
    """What they are when this is made."""

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def put(self) -> None:
        """Make them so again."""
        for value, (get, put) in zip(self._values, _SETTINGS, strict=True):
            if get() != value:
                put(value)
