"""Gradients that are tensors of the user's own: he has made them ``parameter.grad``, and may go on changing them.

They stay what he has, as in PyTorch: a backward adds to them, and so they may be views of a flat bucket. Before a step,
and before norms are asked for, what is in them is brought to where gradients are stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Set

import torch

from offload.ranks.agreement import Place
from offload.tiers.gradients.sink import GradientSink
from offload.tiers.gradients.store import plain
from offload.units import ParameterSpec, UnitSpec

HELD_BYTES_MAX = 256 << 20
"""Bytes of such tensors that are held beside the budget. Of what is more, the oldest are held by the user alone."""


class _Own:
    """One tensor. ``held`` keeps it alive; one whose memory others have takes none of its own by that."""

    def __init__(self, unit: UnitSpec, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.nbytes = 0 if _shares_memory(tensor) else tensor.nbytes
        self.held: torch.Tensor | None = tensor
        self._tensor = weakref.ref(tensor)

    def tensor(self) -> torch.Tensor | None:
        return self._tensor()


class OwnGradients:
    """First of the sinks. ``write`` brings a gradient to where all are stored, and is to be set before the first."""

    def __init__(self, sink: GradientSink) -> None:
        self.write: Callable[[UnitSpec, ParameterSpec, torch.Tensor], None]
        self._sink = sink
        self.of_spec: dict[ParameterSpec, _Own] = {}
        """In the order in which they became gradients."""

    def of(self, spec: ParameterSpec) -> torch.Tensor | None:
        """The tensor that is the parameter's gradient, if it is the user's."""
        own = self.of_spec.get(spec)
        return None if own is None else own.tensor()

    def has_any(self, unit: UnitSpec) -> bool:
        """Tensors of the user's are gradients of the unit's parameters."""
        return any(spec in self.of_spec for spec in unit.parameters)

    def adopt(self, unit: UnitSpec, spec: ParameterSpec, tensor: torch.Tensor) -> None:
        """The parameter's gradient is this tensor from now on, as long as anybody holds it."""
        self.drop(spec)
        self.of_spec[spec] = _Own(unit, tensor)
        excess = sum(own.nbytes for own in self.of_spec.values() if own.held is not None) - HELD_BYTES_MAX
        for other, own in self.of_spec.items() if excess > 0 else ():
            if own.held is not None and own.nbytes:
                self.write(own.unit, other, own.held)
                own.held = None
                excess -= own.nbytes
                if excess <= 0:
                    break

    def drop(self, spec: ParameterSpec) -> None:
        """It is not any more."""
        self.of_spec.pop(spec, None)

    def multiply(self, factor: float) -> None:
        """Multiply them all, in place."""
        tensors = {id(tensor): tensor for own in self.of_spec.values() if (tensor := own.tensor()) is not None}
        for tensor in tensors.values():
            tensor.mul_(factor)

    # The sink: see ``GradientSink``.

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        own = self.of_spec.get(spec) if self.of_spec else None
        tensor = None if own is None else own.tensor()
        if tensor is not None:
            with torch.no_grad():
                tensor.add_(plain(gradient), alpha=scale)
        if own is None or own.held is None:  # the user may let go of it: then what is stored is the gradient
            self._sink.take(unit, spec, gradient, scale)

    def end_part(self, unit: UnitSpec) -> None:
        self._sink.end_part(unit)

    def close(self, unit: UnitSpec) -> None:
        self._sink.close(unit)

    def complete(self) -> Iterator[UnitSpec]:
        return self._sink.complete()

    def settle(self, at: Place | None = None) -> None:
        for spec, own in list(self.of_spec.items()):
            tensor = own.tensor()
            if tensor is not None:
                self.write(own.unit, spec, tensor)
            else:
                self.drop(spec)
        self._sink.settle(at)

    def restored(self) -> None:
        self.of_spec.clear()
        self._sink.restored()

    def use_up(self, unit: UnitSpec, specs: Set[ParameterSpec]) -> None:
        """They stay: in PyTorch a step leaves gradients as they are."""
        self._sink.use_up(unit, specs)

    def forget(self, unit: UnitSpec) -> None:
        for spec in unit.parameters if self.of_spec else ():
            self.drop(spec)
        self._sink.forget(unit)


def can_be_own(tensor: torch.Tensor, device: torch.device) -> bool:
    """A backward can add to the tensor in place."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.device == device and not tensor.requires_grad and not tensor.is_inference()


def _shares_memory(tensor: torch.Tensor) -> bool:
    return tensor._is_view() or tensor.untyped_storage().nbytes() > tensor.nbytes  # type: ignore[no-untyped-call]
