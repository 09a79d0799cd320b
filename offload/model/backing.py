"""Reading and changing parameters and gradients from outside of the model's own order: what handles are backed by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from offload.access import Elements, ExternalAccess, Zeroing, source_of
from offload.memory import tensor_at
from offload.model.distributed_handle import DistributedGradientHandle
from offload.model.gradient_handle import GradientBacking, GradientHandle
from offload.model.handle import value_of
from offload.tiers.gradients.store import Gradient
from offload.units import ParameterSpec, UnitSpec, WeightInPieces
from swapper import OffloadError


class ParameterBacking:
    """Backs the handle of one parameter, or of one piece of a large one. ``in_use`` is the one in the unit's window."""

    def __init__(self, unit: UnitSpec, spec: ParameterSpec, access: ExternalAccess, in_use: nn.Parameter) -> None:
        self.name = spec.name
        self.trainable = spec.trainable
        self.in_use = (in_use,)
        self._unit = unit
        self._spec = spec
        self._access = access
        self._gradient_handle: GradientHandle | None = None

    def read(self) -> torch.Tensor:
        """A copy of the value, once the last step's update has reached it."""
        shape = self._spec.whole_shape
        with self._access.failure, self._access.whole_weights(self._unit, self._spec) as address:
            value = tensor_at(address, shape.numel(), self._access.layout.dtype).view(shape).clone()
        return self._spec.in_model(value)

    def write(self, value: torch.Tensor) -> None:
        """Set the value. The fp32 master becomes exactly this, unless it is rounded to this already; moments stay as
        they are."""
        layout, spec = self._access.layout, self._spec
        own = spec.shard_of(value.detach()).reshape(-1).to("cpu", layout.dtype)
        self._access.agree(spec.name, value)
        with self._access.failure, self._access.elements_to_change() as elements:
            address = elements.weights(self._unit) + spec.offset * layout.formats.weights
            if not layout.formats.master or not torch.equal(tensor_at(address, spec.numel, layout.dtype), own):
                self._write(elements, own)

    def read_master(self) -> torch.Tensor:
        """A copy of the fp32 master."""
        access, spec = self._access, self._spec
        value = torch.empty(spec.numel)
        with access.failure:
            with access.elements() as elements:
                for span in elements.spans(self._unit, [spec]):
                    elements.read(span, span.first, value[span.first : span.first + span.numel])
            value = access.joined("the master", value, spec)
        return spec.in_model(value.view(spec.whole_shape))

    def write_master(self, value: torch.Tensor) -> None:
        """Set the fp32 master, and the weight to what it is rounded to."""
        own = self._spec.shard_of(value.detach()).to("cpu", torch.float32).reshape(-1)
        self._access.agree(f"the master of {self._spec.name}", value)
        with self._access.failure, self._access.elements_to_change() as elements:
            self._write(elements, own)

    def _write(self, elements: Elements, value: torch.Tensor) -> None:
        """Make all of the parameter that this rank has this value."""
        with torch.no_grad():
            for span in elements.spans(self._unit, [self._spec]):
                elements.write(span, source_of(value))

    @property
    def gradient(self) -> torch.Tensor | None:
        """A handle on the gradient for the coming step, or None if there is none."""
        backing = self.gradient_backing()
        if backing is None:
            return None
        if self._gradient_handle is None:
            self._gradient_handle = self.gradient_handle(backing, self._spec.model_shape)
        return self._gradient_handle

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        access, unit, spec = self._access, self._unit, self._spec
        if isinstance(value, GradientHandle) and value.is_of(spec):
            return
        access.zeroing = Zeroing.DONE
        with access.failure:
            if value is None:
                access.dropping(unit)
                access.gradients.discard(unit, spec)
            else:
                access.agree(f"the gradient of {spec.name}", value_of(value))
                access.changing([unit])
                access.gradients.write(unit, spec, spec.shard_of(value_of(value).detach()))

    def gradient_backing(self) -> PlainGradientBacking | None:
        """Return what a handle on the gradient needs, if there is a gradient."""
        self._access.before.settle()
        if self._spec in self._access.gradients.of(self._unit):
            return PlainGradientBacking(self._unit, self._spec, self._access)
        if self._access.zeroing is Zeroing.DUE:
            self._access.zeroing = Zeroing.DONE
        return None

    def gradient_handle(self, backing: GradientBacking, shape: torch.Size) -> GradientHandle:
        """A handle on a gradient of this parameter, or of the whole that it is a piece of."""
        meta = torch.empty(shape, dtype=self._access.layout.dtype, device="meta")
        kind = GradientHandle if self._spec.distribution is None else DistributedGradientHandle
        return kind(backing, meta, self._access.device)


class PiecewiseBacking:
    """Backs the handle of a weight in pieces. ``pieces`` are the backings of its pieces, in order."""

    def __init__(self, whole: WeightInPieces, pieces: Sequence[ParameterBacking]) -> None:
        self.name = whole.name
        self.whole = whole
        self.trainable = pieces[0].trainable
        self.in_use = tuple(parameter for piece in pieces for parameter in piece.in_use)
        self._pieces = pieces

    def read(self) -> torch.Tensor:
        """A copy of the whole value."""
        return torch.cat([piece.read() for piece in self._pieces])

    def write(self, value: torch.Tensor) -> None:
        """As ``ParameterBacking.write``."""
        for piece, part in zip(self._pieces, self.whole.split(value), strict=True):
            piece.write(part)

    @property
    def gradient(self) -> torch.Tensor | None:
        """A handle on the gradient, or None if one of the pieces has none."""
        parts = [part for piece in self._pieces if (part := piece.gradient_backing()) is not None]
        if len(parts) < len(self._pieces):
            return None
        return self._pieces[0].gradient_handle(PiecewiseGradientBacking(self.whole, parts), self.whole.shape)

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        if isinstance(value, GradientHandle) and value.is_of(self.whole):
            return
        parts = [None] * len(self._pieces) if value is None else self.whole.split(value_of(value).detach())
        for piece, part in zip(self._pieces, parts, strict=True):
            piece.gradient = part


class PlainGradientBacking:
    """Backs the handle of one gradient, ``parameter.grad``."""

    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, unit: UnitSpec, spec: ParameterSpec, access: ExternalAccess) -> None:
        self.name = f"the gradient of {spec.name}"
        self.spec = spec
        self._unit = unit
        self._access = access

    def read(self) -> torch.Tensor:
        with self._access.failure:
            self._known()
            own = self._access.gradients.read(self._unit, self.spec)
            value = self._access.joined("the gradient", own, self.spec).view(self.spec.whole_shape)
        return self.spec.in_model(value.to(self._access.layout.dtype))

    def write(self, value: torch.Tensor) -> None:
        self._access.zeroing = Zeroing.DONE  # zeros, it may be
        with self._access.failure:
            self._access.agree(self.name, value)
            self._access.changing([self._unit])
            self._access.gradients.write(self._unit, self.spec, self.spec.shard_of(value))

    # What clip_grad_norm_ asks of each gradient, without bringing it in.

    def norm(self) -> float:
        """Its 2-norm, from the sum that was added up while it came."""
        return float(self._known().ask() ** 0.5)

    def is_finite(self) -> bool:
        """No element is infinite or NaN."""
        return math.isfinite(self._known().norm_squared)

    def multiply(self, factor: float) -> None:
        """Multiply it, when the update reads it. A speculative update with another factor does not pass the verdict."""
        self._known().scale *= factor

    def _known(self) -> Gradient:
        """Return what is known of the gradient. Raises ``OffloadError`` if there is none any more."""
        self._access.before.settle()
        found = self._access.gradients.of(self._unit).get(self.spec)
        if found is None:
            raise OffloadError(
                f"{self.name} is gone: a step has used it, or it was dropped. Take a copy before: "
                "parameter.grad.detach().clone()"
            )
        return found


class PiecewiseGradientBacking:
    """The same for a weight in pieces. ``pieces`` are the backings of its pieces' gradients, in order."""

    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, whole: WeightInPieces, pieces: Sequence[PlainGradientBacking]) -> None:
        self.name = f"the gradient of {whole.name}"
        self.spec = whole
        self._pieces = pieces

    def read(self) -> torch.Tensor:
        return torch.cat([piece.read() for piece in self._pieces])

    def write(self, value: torch.Tensor) -> None:
        for piece, part in zip(self._pieces, self.spec.split(value), strict=True):
            piece.write(part)

    def norm(self) -> float:
        return float(sum(piece.norm() ** 2 for piece in self._pieces) ** 0.5)

    def is_finite(self) -> bool:
        return all(piece.is_finite() for piece in self._pieces)

    def multiply(self, factor: float) -> None:
        for piece in self._pieces:
            piece.multiply(factor)
