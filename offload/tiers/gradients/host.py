"""The arithmetic of gradients that are stored in host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload import kernels
from offload.dtypes import KERNEL_DTYPES, kernel_dtype
from offload.memory import tensor_at
from offload.tiers.gradients.unit import UnitGradients
from offload.units import ParameterSpec


def _nothing() -> None:
    return None


class HostGradients(UnitGradients):
    """Gradients that are stored in host memory."""

    def __init__(self, address: int, dtype: torch.dtype, before_change: Callable[[], None] = _nothing) -> None:
        """``before_change`` is called before bytes change, in the thread that changes them."""
        self._before_change = before_change
        self._at = address
        self._dtype = dtype
        self._itemsize = dtype.itemsize
        self._kernel_dtype = kernel_dtype(dtype)

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        return self._bring(kernels.convert, spec, gradient)

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        return self._bring(kernels.accumulate, spec, gradient)

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        self._before_change()
        total = self._tensor(spec)
        total.mul_(factor).add_(gradient, alpha=scale)
        return self.sum_squares(spec)

    def read(self, spec: ParameterSpec) -> torch.Tensor:
        return self._tensor(spec).clone()

    def landing(self, spec: ParameterSpec) -> torch.Tensor | None:
        self._before_change()
        return self._tensor(spec).view(-1)

    def sum_squares(self, spec: ParameterSpec) -> float:
        if spec.numel == 0:
            return 0.0
        threads = torch.get_num_threads()
        return kernels.sum_squares(self._address(spec), spec.numel, self._kernel_dtype, threads)

    def _bring(self, bring: kernels.Bring, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self._before_change()
        address, source, threads = self._address(spec), gradient.data_ptr(), torch.get_num_threads()
        return bring(spec.numel, address, self._kernel_dtype, source, KERNEL_DTYPES[gradient.dtype], threads)

    def _tensor(self, spec: ParameterSpec) -> torch.Tensor:
        return tensor_at(self._address(spec), spec.numel, self._dtype).view(spec.shape)

    def _address(self, spec: ParameterSpec) -> int:
        return self._at + spec.offset * self._itemsize
