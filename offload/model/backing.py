"""Reading and changing parameters and gradients from outside of the model's own order: what handles are backed by."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.elements import Elements, source_of
from offload.interrupts import undisturbed
from offload.memory import available_bytes, tensor_at
from offload.model.aliases import Alias, Aliases
from offload.model.distributed_handle import DistributedGradientHandle
from offload.model.gradient_backing import PiecewiseGradientBacking, PlainGradientBacking
from offload.model.gradient_handle import GradientBacking, GradientHandle
from offload.model.handle import value_of
from offload.model.under_way import change
from offload.tiers.gradients.own import can_be_own
from offload.units import ParameterSpec, Piece, UnitSpec, WeightInPieces
from offload.units.wrapped import Wrapping


class ParameterBacking:
    """Backs the handle of one parameter, or of one piece of a large one. ``in_use`` is the one in the unit's window."""

    def __init__(
        self,
        unit: UnitSpec,
        spec: ParameterSpec,
        access: ExternalAccess,
        in_use: nn.Parameter,
        aliases: Aliases,
    ) -> None:
        self.name = spec.name
        self.trainable = spec.trainable
        self.in_use = (in_use,)
        self._unit = unit
        self._spec = spec
        self._access = access
        self._aliases = aliases
        self.asked_for: PlainGradientBacking | None = None
        """Of the gradient that was asked for last."""
        self._gradient_handle: GradientHandle | None = None

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # a parameter that is saved in its unit's forward is an ordinary one

    def knows(self, name: str) -> bool:
        """What the model sees around the stored tensor has the attribute or method."""
        return isinstance(outer := self._spec.outer, Wrapping) and outer.knows(name)

    @property
    def in_model(self) -> nn.Parameter | None:
        """The tensor that stands in the model for the parameter now."""
        module, name = self._spec.owners[0]
        return module._parameters.get(name)

    @undisturbed
    def read(self) -> torch.Tensor:
        """A copy of the value, once the last step's update has reached it."""
        self._aliases.take(self._unit.index)
        return self.read_weight()

    @undisturbed
    def read_weight(self) -> torch.Tensor:
        """The same, with no regard to aliases."""
        shape = self._spec.whole_shape
        with self._access.failure, self._access.whole_weights(self._unit, self._spec) as address:
            value = tensor_at(address, shape.numel(), self._access.layout.dtype).view(shape).clone()
        return self._spec.in_model(value)

    def write(self, value: torch.Tensor) -> None:
        """Set the value. The fp32 master becomes exactly this, unless it is rounded to this already; moments stay as
        they are."""
        write_together([(self, value)])

    def change(self, elements: Elements, value: torch.Tensor) -> None:
        """The same, of elements that are being changed."""
        layout, spec = self._access.layout, self._spec
        own = spec.shard_of(value.detach()).reshape(-1).to("cpu", layout.dtype)
        address = elements.weights(self._unit) + spec.offset * layout.formats.weights
        if not layout.formats.master or not torch.equal(tensor_at(address, spec.numel, layout.dtype), own):
            self._write(elements, own)

    def newest_alias(self) -> torch.Tensor | None:
        """Memory that is the same as the value already, if somebody has some."""
        return self._aliases.newest(self._unit.index, self)

    def follow(self, alias: Alias) -> bool:
        """The value was taken from there, and the two are to be the same from now on. False where they cannot be."""
        fits = alias.fits(self._access.layout.dtype, self._access.device)
        if fits:
            self._aliases.follow(self._unit.index, self, alias)
        return fits

    def with_address(self) -> torch.Tensor | None:
        """The value in memory that stays the same as it, whoever looks there. None where the two cannot be."""
        known = self.known_with_address()
        if known is None and self.can_have_address():
            value = self.read()
            self.follow(Alias(value))
            known = self.known_with_address()
        return known

    def known_with_address(self) -> torch.Tensor | None:
        """The same, if there is such memory."""
        return self._aliases.with_address(self._unit.index, self)

    def can_have_address(self) -> bool:
        """It is an ordinary tensor with which the CPU computes, all of it is in this process, and there is room."""
        spec, access = self._spec, self._access
        is_plain = spec.outer is None and spec.packing is None
        is_here = access.device.type == "cpu" and access.ranks.size == 1
        return is_plain and is_here and available_bytes() > 2 * spec.numel * access.layout.dtype.itemsize

    @undisturbed
    def point_to(self, memory: Alias | None, value: torch.Tensor) -> None:
        """``parameter.data`` was made a tensor of this value, over this memory; None: over none of the user's own."""
        change("writes to weights")
        self._aliases.forget(self._unit.index, self)
        self.write(value)
        if memory is not None and memory.fits(self._access.layout.dtype, self._access.device):
            self._aliases.assigned(self._unit.index, self, memory)

    @undisturbed
    def read_master(self) -> torch.Tensor:
        """A copy of the fp32 master."""
        access, spec = self._access, self._spec
        value = torch.empty(spec.numel)
        with access.failure:
            with access.elements() as elements:
                for span in elements.spans(self._unit, [spec]):
                    elements.read(span, span.first, value[span.first : span.first + span.numel])
            value = access.joined("the master", value, spec)
        return spec.beside(value.view(spec.whole_shape))

    @undisturbed
    def write_master(self, value: torch.Tensor) -> None:
        """Set the fp32 master, and the weight to what it is rounded to."""
        change("writes to weights")
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
        """The gradient: the user's own tensor, or a handle; None if there is none."""
        return self._shown_gradient(wait=True)

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        access, unit, spec = self._access, self._unit, self._spec
        if isinstance(value, GradientHandle) and value.is_of(self.gradient_backing()):
            return
        if isinstance(value, GradientHandle):
            value = value.own_tensor()
        if value is not None and value is access.own_gradients.of(spec):
            return
        content = None if value is None else value_of(value).detach()
        self.drop_gradient()
        if value is not None and spec.whole is None and can_be_own(value, access.device):
            access.own_gradients.adopt(unit, spec, value)
        elif content is not None:
            self.write_gradient(content)

    @property
    def gradient_so_far(self) -> torch.Tensor | None:
        """The same, of what is known without a wait."""
        return self._shown_gradient(wait=False)

    def _shown_gradient(self, *, wait: bool) -> torch.Tensor | None:
        own = self._access.own_gradients.of(self._spec)
        if own is not None:
            return own
        backing = self.gradient_backing(wait=wait)
        if backing is None:
            return None
        if self._gradient_handle is None:
            self._gradient_handle = self.gradient_handle(backing, self._spec.model_shape)
        return self._gradient_handle

    @undisturbed
    def write_gradient(self, value: torch.Tensor) -> None:
        """Make this the gradient, where there is none."""
        self._access.write_gradient(self._unit, self._spec, value)

    def settle(self) -> None:
        """Wait until all gradients are where they are stored."""
        self._access.before.settle()

    @property
    def has_gradient(self) -> bool:
        """One for the coming step has come to where it is stored."""
        return self._spec in self._access.gradients.of(self._unit)

    @undisturbed
    def zero_gradient(self) -> None:
        """The gradient for the coming step is zeros."""
        access, unit = self._access, self._unit
        with access.failure:
            access.dropping(unit)
            access.levels.host.fence.wait(unit)
            access.gradients.zero(unit, self._spec)

    @undisturbed
    def drop_gradient(self) -> None:
        """There is no gradient. Who holds the one that there was keeps it."""
        access, unit, spec = self._access, self._unit, self._spec
        self.leave_gradient()
        access.to_be_zeroed.discard(spec)
        access.own_gradients.drop(spec)
        with access.failure:
            access.dropping(unit)
            access.gradients.discard(unit, spec)

    def leave_gradient(self) -> None:
        """The gradient is about to go. Who holds it gets it in memory of his own, if there is room."""
        of_gradient = None if self.asked_for is None else weakref.ref(self.asked_for)
        self._gradient_handle = self.asked_for = None
        held = None if of_gradient is None else of_gradient()
        if held is not None and self._spec.whole is None:
            held.take_out()

    @undisturbed
    def gradient_backing(self, *, wait: bool = True) -> PlainGradientBacking | None:
        """Return what a handle on the gradient needs, if there is a gradient. Who does not ``wait`` sees what has come
        so far."""
        if wait:
            self._access.before.settle()
        found = self._access.gradients.find(self._unit, self._spec)
        before = self.asked_for
        if before is not None and (found is None or before.origin is not found.origin):
            self._gradient_handle = self.asked_for = None
        if found is None:
            if wait:  # not the engine itself, which shows a forward what there is
                self._access.to_be_zeroed.clear()
        elif self.asked_for is None:
            self.asked_for = PlainGradientBacking(self._unit, self._spec, self._access, found.origin)
        return self.asked_for

    def gradient_handle(self, backing: GradientBacking, shape: torch.Size) -> GradientHandle:
        """A handle on a gradient of this parameter, or of the whole that it is a piece of."""
        meta = torch.empty(shape, dtype=self._access.layout.dtype, device="meta")
        kind = GradientHandle if self._spec.distribution is None else DistributedGradientHandle
        return kind(backing, meta, self._access.device)


@undisturbed
def write_together(changes: Sequence[tuple[ParameterBacking, torch.Tensor]]) -> None:
    """Set the values of several parameters of one engine, each as by its own ``write``. Their units are stored once."""
    change("writes to weights")
    access = changes[0][0]._access
    for backing, value in changes:
        access.agree(backing.name, value)
    with access.failure, access.elements_to_change() as elements:
        for backing, value in changes:
            backing.change(elements, value)
    for backing, value in changes:
        backing._aliases.bring(backing._unit.index, backing, value)


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
        """A handle on the gradient, or None if no piece has one."""
        self._pieces[0].settle()
        self.complete_gradient()
        backing = self._gradient_backing()
        return None if backing is None else self._pieces[0].gradient_handle(backing, self.whole.shape)

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        if isinstance(value, GradientHandle) and value.is_of(self._gradient_backing()):
            return
        parts = None if value is None else self.whole.split(value_of(value).detach().clone())
        for piece in self._pieces:
            piece.drop_gradient()
        for piece, part in zip(self._pieces, () if parts is None else parts, strict=parts is not None):
            piece.write_gradient(part)

    def point_to(self, memory: Alias | None, value: torch.Tensor) -> None:
        """As ``ParameterBacking.point_to``."""
        for piece, part in zip(self._pieces, self.whole.split(value), strict=True):
            piece.point_to(None if memory is None else Alias(part), part)

    def with_address(self) -> torch.Tensor | None:
        """As of ``ParameterBacking``: the pieces lie one behind the other."""
        parts = [piece.known_with_address() for piece in self._pieces]
        if not _are_one(parts):
            if not all(piece.can_have_address() for piece in self._pieces):
                return None
            value = self.read()
            for piece, part in zip(self._pieces, self.whole.split(value), strict=True):
                piece.follow(Alias(part))
            parts = [piece.known_with_address() for piece in self._pieces]
        first = parts[0]
        assert first is not None
        return first.as_strided(self.whole.shape, torch.empty(self.whole.shape, device="meta").stride())

    def complete_gradient(self) -> bool:
        """A gradient of some pieces is one of the whole: it is zeros for the others, such as experts that no token was
        sent to. Gradients on their way do not count. Returns whether there were others."""
        without = [piece for piece in self._pieces if not piece.has_gradient]
        if len(without) in (0, len(self._pieces)):
            return False
        for piece in without:
            piece.zero_gradient()
        return True

    def piece(self, piece: Piece) -> ParameterBacking:
        """The backing of this piece."""
        return self._pieces[piece.index]

    @property
    def gradient_so_far(self) -> None:
        """No forward sees the gradient of the whole: pieces have their own."""
        return None

    def _gradient_backing(self) -> PiecewiseGradientBacking | None:
        parts = [part for piece in self._pieces if (part := piece.gradient_backing()) is not None]
        return PiecewiseGradientBacking(self.whole, parts) if len(parts) == len(self._pieces) else None


def _are_one(parts: Sequence[torch.Tensor | None]) -> bool:
    """Each begins where the one before ends."""
    there = [part for part in parts if part is not None]
    ends = [part.data_ptr() + part.nbytes for part in there]
    return len(there) == len(parts) and all(end == part.data_ptr() for end, part in zip(ends, there[1:], strict=False))
