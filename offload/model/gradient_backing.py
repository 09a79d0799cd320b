"""The backing of ``parameter.grad``: one gradient, wherever it is stored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.interrupts import undisturbed
from offload.memory import available_bytes
from offload.model.gradient_handle import is_power_of_two
from offload.model.under_way import touch
from offload.tiers.gradients.own import can_be_own
from offload.tiers.gradients.store import Gradient
from offload.units import ParameterSpec, UnitSpec, WeightInPieces
from swapper import OffloadError

_LARGEST = 2.0**24
"""Factors up to it, and down to its reciprocal, are put off together: a gradient of 1e-31 stays a normal number."""


class PlainGradientBacking:
    """Backs the handle of one gradient, ``parameter.grad``: of all that has the ``origin``."""

    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, unit: UnitSpec, spec: ParameterSpec, access: ExternalAccess, origin: object) -> None:
        self.name = f"the gradient of {spec.name}"
        self.spec = spec
        self.origin = origin
        self._unit = unit
        self._access = access
        self._own: torch.Tensor | None = None
        """The gradient, once it is here and nowhere else."""

    @property
    def is_kept(self) -> bool:
        """The gradient can be read: no step has used it, or it is stored in memory."""
        return self._own is not None or self._access.gradients.is_kept(self._unit, self.spec)

    def with_address(self) -> None:
        """It has none, as long as it is the engine's."""

    @undisturbed
    def take_out(self) -> None:
        """Take the gradient into memory of its own, if there is room: another one will be stored in its place."""
        if self._access.gradients.find(self._unit, self.spec) is None:
            return
        if self.spec.numel * self._access.layout.dtype.itemsize < available_bytes():
            with contextlib.suppress(OffloadError):  # a step has used it, and it is not in memory
                self._own = self.read().to(self._access.device)

    @undisturbed
    def own_tensor(self) -> torch.Tensor:
        """The gradient as a tensor that parameters can have in common, of which this one is one as long as it has the
        gradient."""
        if self._own is None:
            value = self.read().to(self._access.device)
            if self.spec.whole is not None or not can_be_own(value, self._access.device):
                return value
            self._own = value
            self._access.gradients.discard(self._unit, self.spec)
            self._access.own_gradients.adopt(self._unit, self.spec, value)
        return self._own

    @undisturbed
    def read(self) -> torch.Tensor:
        if self._own is not None:
            return self._own.clone()
        with self._access.failure:
            self._known()
            own = self._access.gradients.read(self._unit, self.spec)
            value = self._access.joined("the gradient", own, self.spec).view(self.spec.whole_shape)
        return self.spec.beside(value.to(self._access.layout.dtype))

    @undisturbed
    def write(self, value: torch.Tensor) -> None:
        if self._own is not None:
            self._own.copy_(value)
            return
        self._access.to_be_zeroed.discard(self.spec)  # zeros, it may be
        self._known()
        self._access.write_gradient(self._unit, self.spec, value)

    @undisturbed
    def begin_anew(self, value: torch.Tensor) -> bool:
        """Take what a backward adds to a gradient that a step has used: it is the first of a new sum, as elsewhere.
        False: no step has used it."""
        access = self._access
        if self._own is not None or self.spec in access.gradients.of(self._unit):
            return False
        access.write_gradient(self._unit, self.spec, value)
        return True

    # What clip_grad_norm_ and zero_grad ask of each gradient, without bringing it in.

    @undisturbed
    def zero(self) -> None:
        """Make it zeros."""
        if self._own is not None:
            self._own.zero_()
            return
        self._access.to_be_zeroed.discard(self.spec)
        self._known()
        with self._access.failure:
            self._access.changing([self._unit])
            self._access.gradients.zero(self._unit, self.spec)

    @undisturbed
    def norm(self) -> float:
        """Its 2-norm, from the sum that was added up while it came."""
        return float(self._known().ask() ** 0.5) if self._own is None else float(self._own.norm())

    @undisturbed
    def is_finite(self) -> bool:
        """No element is infinite or NaN."""
        return math.isfinite(self._known().norm_squared if self._own is None else float(self._own.norm()))

    def puts_off(self, factor: float) -> bool:
        """``multiply`` gives the bits of a product here and now. It would not where two factors become one that is
        rounded, which those of a loss scale may, or where what lies between two products has no normal number."""
        if self._own is not None:
            return True
        known = self._known()
        if known.scale == known.came_with:
            return True
        before = known.scale / known.came_with
        is_exact = is_power_of_two(before) or is_power_of_two(factor)
        return is_exact and all(1 / _LARGEST <= abs(each) <= _LARGEST for each in (before, factor, before * factor))

    @undisturbed
    def multiply(self, factor: float) -> None:
        """Multiply it, when the update reads it. A speculative update with another factor does not pass the verdict."""
        if self._own is None:
            self._known().scale *= factor
        else:
            self._own.mul_(factor)

    def _known(self) -> Gradient:
        """Return what is known of the gradient. Raises ``OffloadError`` if it is there no more."""
        touch("looks at gradients")
        self._access.before.settle()
        found = self._access.gradients.find(self._unit, self.spec)
        if found is None or found.origin is not self.origin:
            raise OffloadError(
                f"{self.name} is gone: a step has used it, or it was dropped. Take a copy before: "
                "parameter.grad.detach().clone()"
            )
        if self.spec in self._access.gradients.of(self._unit):  # and not the one that a step has used
            self._access.using_gradients(self.name, [self.spec])
        return found


class PiecewiseGradientBacking:
    """The same for a weight in pieces. ``pieces`` are the backings of its pieces' gradients, in order."""

    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, whole: WeightInPieces, pieces: Sequence[PlainGradientBacking]) -> None:
        self.name = f"the gradient of {whole.name}"
        self.spec = whole
        self.origin = tuple(piece.origin for piece in pieces)
        self._pieces = pieces

    @property
    def is_kept(self) -> bool:
        return all(piece.is_kept for piece in self._pieces)

    def with_address(self) -> None:
        """As of ``PlainGradientBacking``."""

    def own_tensor(self) -> torch.Tensor:
        """A copy: pieces have gradients of their own."""
        return self.read()

    def read(self) -> torch.Tensor:
        return torch.cat([piece.read() for piece in self._pieces])

    def write(self, value: torch.Tensor) -> None:
        for piece, part in zip(self._pieces, self.spec.split(value), strict=True):
            piece.write(part)

    def begin_anew(self, value: torch.Tensor) -> bool:
        """No forward sees it, and so no backward adds to it."""
        return False

    def zero(self) -> None:
        for piece in self._pieces:
            piece.zero()

    def norm(self) -> float:
        return float(sum(piece.norm() ** 2 for piece in self._pieces) ** 0.5)

    def is_finite(self) -> bool:
        return all(piece.is_finite() for piece in self._pieces)

    def puts_off(self, factor: float) -> bool:
        return all(piece.puts_off(factor) for piece in self._pieces)

    def multiply(self, factor: float) -> None:
        for piece in self._pieces:
            piece.multiply(factor)
