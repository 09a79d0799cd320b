"""The arithmetic of gradients that are stored in a device's memory."""

from __future__ import annotations

import math

import torch

from offload.tiers.gradients.norms import Squares
from offload.tiers.gradients.unit import UnitGradients
from offload.units import ParameterSpec, UnitSpec


class DeviceGradients(UnitGradients):
    """Gradients that are stored in a device's memory, added up in compute's order; their squares are found later."""

    is_on_device = True

    def __init__(self, unit: UnitSpec, grads: torch.Tensor, squares: Squares) -> None:
        """``grads`` is flat, all of the unit's."""
        self.changed = False
        """Gradients have come since their squares were added up."""
        self._unit = unit
        self._grads = grads
        self._squares = squares

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self.changed = True
        self._tensor(spec).copy_(gradient)
        return math.nan

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self.changed = True
        self._tensor(spec).add_(gradient.to(self._grads.device))
        return math.nan

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        self.changed = True
        self._tensor(spec).mul_(factor).add_(gradient.to(self._grads.device), alpha=scale)
        return math.nan

    def sum_squares(self, spec: ParameterSpec) -> float:
        return math.nan

    def read(self, spec: ParameterSpec) -> torch.Tensor:
        return self._tensor(spec).cpu()

    def forget(self) -> None:
        self.changed = False

    def begin_squares(self) -> None:
        if self.changed:
            self._squares.begin(self._unit.trainable, self._grads)
        self.changed = False

    def _tensor(self, spec: ParameterSpec) -> torch.Tensor:
        return self._grads[spec.offset : spec.offset + spec.numel].view(spec.shape)
