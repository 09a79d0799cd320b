"""A unit as it stands in the user's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from offload.model.handle import Handle
from offload.model.own_writes import OwnWrites
from offload.tiers.window import Window
from offload.units import UnitSpec, local_tensor

CallsOfUnit: TypeAlias = tuple[int, int, int, bool]
"""Knowledge of ``UnitInModel`` of the calls under way."""


class UnitInModel:
    """Part of the model that stands for one unit: its parameters, which are views of ``window``, and the calls under
    way, of the micro-batch that computes now."""

    __slots__ = (
        "__weakref__",
        "_shown",
        "forward_depth",
        "forward_sequence",
        "forward_start",
        "has_gradients",
        "in_backward",
        "is_over",
        "num_users",
        "own_writes",
        "parameters",
        "sites",
        "spec",
        "watched",
        "window",
    )

    def __init__(
        self,
        spec: UnitSpec,
        window: Window,
        parameters: Sequence[nn.Parameter],
        has_gradients: Callable[[UnitSpec], bool] = lambda unit: False,
    ) -> None:
        """``has_gradients``: handles of the unit's parameters have some, which their forward may look at."""
        self.spec = spec
        self.has_gradients = has_gradients
        self._shown: list[tuple[Handle, nn.Parameter, torch.Tensor]] = []
        """Gradients that parameters have from their handles now."""
        self.window = window
        self.parameters = parameters
        self.sites: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        """Place of each parameter in the model: module, name, handle, parameter."""
        self.forward_depth = 0
        """Modules of this unit whose forward is running."""
        self.forward_start = 0
        """Serial number of the moment when the outermost of them began."""
        self.forward_sequence = 0
        """Autograd's number of the first node that it may have made."""
        self.in_backward = False
        self.num_users = 0
        """Micro-batches that use the unit now."""
        self.is_over = False
        """A backward of it is over, and the end of it has not been told."""
        self.watched = [item for item in spec.parameters if item.packing is None]
        """Parameters that ``own_writes`` looks at, in order: no forward writes to quantised parameters."""
        of_spec = dict(zip(spec.parameters, parameters, strict=True))
        self.own_writes = OwnWrites([local_tensor(of_spec[item]) for item in self.watched])

    def save(self) -> CallsOfUnit:
        """Its calls, for ``restore``. None is under way from now on."""
        calls = self.forward_depth, self.forward_start, self.forward_sequence, self.in_backward
        self.forward_depth, self.in_backward = 0, False
        return calls

    def restore(self, calls: CallsOfUnit) -> None:
        """These calls are under way again."""
        self.forward_depth, self.forward_start, self.forward_sequence, self.in_backward = calls

    # A parameter that was put in the place of the engine's stays there.

    def show_parameters(self) -> None:
        """The unit's parameters stand at their sites."""
        for module, name, handle, parameter in self.sites:
            if module._parameters.get(name) is handle:
                module._parameters[name] = parameter
        if self.has_gradients(self.spec):
            self._show_gradients()

    def show_handles(self) -> None:
        """The handles stand there."""
        for module, name, handle, parameter in self.sites:
            if module._parameters.get(name) is parameter:
                module._parameters[name] = handle
        shown, self._shown = self._shown, []
        for owner, parameter, gradient in shown:
            now, parameter.grad = parameter.grad, None
            if now is not gradient:
                owner.grad = now

    def take_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Take what autograd has left there. None if a backward within the forward has added to the gradient that the
        parameter has from its handle: it is where it belongs."""
        gradient = parameter.grad
        if any(gradient is shown for _, _, shown in self._shown):
            return None
        parameter.grad = None
        return gradient

    def _show_gradients(self) -> None:
        for _, _, handle, parameter in self.sites:
            if not isinstance(handle, Handle) or parameter.grad is not None:
                continue
            gradient = handle.gradient_so_far
            if gradient is not None:
                parameter.grad = gradient
                self._shown.append((handle, parameter, gradient))
