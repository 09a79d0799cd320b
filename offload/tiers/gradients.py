"""One gradient store: the gradients of the coming step, where they rest, and what is known of each.

There is one way to add a gradient, whatever the tier: the first one is put where it rests, the next ones are added to
it, and where gradients with different scales meet they are rescaled. The arithmetic is that of ``UnitGradients``, by
the tier: a home in host memory, a buffer that is spilled to NVMe (``offload.tiers.spill``), or a device's memory.
Gradients from a device that rest on the host come by ``offload.tiers.transport``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload import kernels
from offload.dtypes import kernel_dtype
from offload.memory import tensor_at
from offload.tiers.home import UnitHomes
from offload.tiers.squares import Squares
from offload.units import ParameterSpec, UnitSpec


@dataclass
class Gradient:
    """What is known of a parameter's gradient for the coming step while its elements rest elsewhere."""

    sum_squares: float
    """Of the elements as they rest, before they are multiplied by ``scale``."""
    scale: float
    """What the elements are still to be multiplied by: loss scaling and clipping cost no pass over them."""
    first_asked: float = math.nan
    """The square of the norm when it was first asked for, which is before it was clipped."""
    came_with: float = math.nan
    """``scale`` as it was before anything was multiplied between backward and step."""
    own_squares: float = math.nan
    """Of this rank's elements, once ``sum_squares`` is of all ranks'."""

    def __post_init__(self) -> None:
        if math.isnan(self.came_with):
            self.came_with = self.scale

    def ask(self) -> float:
        """``norm_squared``, for a verdict or for clipping."""
        now = self.norm_squared
        if math.isnan(self.first_asked):
            self.first_asked = now
        return now

    @property
    def came_squared(self) -> float:
        """The square of its norm as it came."""
        return self.sum_squares * self.came_with * self.came_with

    @property
    def norm_squared(self) -> float:
        return self.sum_squares * self.scale * self.scale


MakeWhole = Callable[[Mapping[ParameterSpec, Gradient]], None]
"""Makes the sum of squares of each gradient that of the whole, of which ranks have parts. All of them call it."""


class Loan(Protocol):
    """The right to read a unit's gradients where they are, until it is ended. Any thread may end it."""

    address: int

    def end_loan(self) -> None: ...


class UnitGradients:
    """Where the gradients of one unit rest, flat, as its weights lie. One thread at a time calls all methods but
    ``lend`` and ``wait_until_spilled``."""

    is_on_device = False
    """The gradients stay on the device that makes them."""
    spills = False
    """The gradients leave host memory after the unit's backward, so that a later read costs a transfer."""

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        """Make the parameter's gradient a copy of this one. Like the next two, returns the sum of squares: NaN where it
        is found later."""
        raise NotImplementedError

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        """Add one to it."""
        raise NotImplementedError

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        """Multiply it by ``factor``, and add ``scale`` times another one."""
        raise NotImplementedError

    def sum_squares(self, spec: ParameterSpec) -> float:
        """Of the gradient that rests here; NaN where it is found later."""
        raise NotImplementedError

    def read(self, spec: ParameterSpec) -> torch.Tensor:
        """A copy, in host memory."""
        raise NotImplementedError

    def landing(self, spec: ParameterSpec) -> torch.Tensor | None:
        """Where a first gradient may be put from outside, flat; None if it must be brought here by ``put``."""
        return None

    def close(self) -> None:
        """The unit has all its gradients of this backward."""

    def forget(self) -> None:
        """The gradients belong to a step now, or are not wanted."""

    def leave(self) -> None:
        """The unit's gradients rest elsewhere from now on. There are none now."""

    def lend(self) -> Loan | None:
        """The gradients where they still lie, if an update that reads them there saves a transfer. Any thread."""
        return None

    def wait_until_spilled(self) -> None:
        """Block until a transfer can read them. Any thread."""

    def begin_squares(self) -> None:
        """Have sums of squares worked out that are found later."""


class HostGradients(UnitGradients):
    """Gradients that rest in host memory."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._at = address
        self._dtype = dtype
        self._kernel_dtype = kernel_dtype(dtype)

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        return self._bring(kernels.convert, spec, gradient)

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        return self._bring(kernels.accumulate, spec, gradient)

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        total = self._tensor(spec)
        total.mul_(factor).add_(gradient, alpha=scale)
        return self.sum_squares(spec)

    def read(self, spec: ParameterSpec) -> torch.Tensor:
        return self._tensor(spec).clone()

    def landing(self, spec: ParameterSpec) -> torch.Tensor | None:
        return self._tensor(spec).view(-1)

    def sum_squares(self, spec: ParameterSpec) -> float:
        if spec.numel == 0:
            return 0.0
        return kernels.sum_squares(self._address(spec), spec.numel, self._kernel_dtype)

    def _bring(self, bring: kernels.Bring, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        threads = torch.get_num_threads()
        source_dtype = kernel_dtype(gradient.dtype)
        return bring(spec.numel, self._address(spec), self._kernel_dtype, gradient.data_ptr(), source_dtype, threads)

    def _tensor(self, spec: ParameterSpec) -> torch.Tensor:
        return tensor_at(self._address(spec), spec.numel, self._dtype).view(spec.shape)

    def _address(self, spec: ParameterSpec) -> int:
        return self._at + spec.offset * self._dtype.itemsize


class DeviceGradients(UnitGradients):
    """Gradients that rest in a device's memory, added up in the order of compute; their squares are found later."""

    is_on_device = True

    def __init__(self, unit: UnitSpec, grads: torch.Tensor, squares: Squares | None) -> None:
        """``grads`` is flat, all of the unit's."""
        self.changed = False
        """Gradients have come since their squares were added up."""
        self._unit = unit
        self._grads = grads
        self._squares = squares

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self._tensor(spec).copy_(gradient)
        return self._later()

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self._tensor(spec).add_(gradient.to(self._grads.device))
        return self._later()

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        self._tensor(spec).mul_(factor).add_(gradient.to(self._grads.device), alpha=scale)
        return self._later()

    def sum_squares(self, spec: ParameterSpec) -> float:
        return math.nan

    def read(self, spec: ParameterSpec) -> torch.Tensor:
        return self._tensor(spec).cpu()

    def forget(self) -> None:
        self.changed = False

    def begin_squares(self) -> None:
        if self.changed and self._squares is not None:
            self._squares.begin(self._unit.trainable, self._grads)
        self.changed = False

    def _later(self) -> float:
        self.changed = True
        return math.nan

    def _tensor(self, spec: ParameterSpec) -> torch.Tensor:
        return self._grads[spec.offset : spec.offset + spec.numel].view(spec.shape)


class _OfUnit:
    def __init__(self, gradients: UnitGradients) -> None:
        self.gradients = gradients
        self.known: dict[ParameterSpec, Gradient] = {}
        self.is_open = False
        """Gradients of the present backward may still come."""


class GradientStore:
    """The gradients of all units. One thread at a time adds and reads; the update reads where they rest."""

    def __init__(self, gradients: Sequence[UnitGradients], make_whole: MakeWhole | None = None) -> None:
        """``gradients``: one for each unit, in order. Other ranks have other parts of
        them where ``make_whole`` is given."""
        self._make_whole = make_whole
        self._has_new = False
        """Something has come since squares were exchanged."""
        self._of = [_OfUnit(each) for each in gradients]
        self._closed: deque[UnitSpec] = deque()

    def of(self, unit: UnitSpec) -> dict[ParameterSpec, Gradient]:
        """The unit's gradients for the coming step: of each parameter that has one."""
        return self._of[unit.index].known

    def gradients_of(self, unit: UnitSpec) -> UnitGradients:
        """Where the unit's gradients rest."""
        return self._of[unit.index].gradients

    def move(self, unit: UnitSpec, gradients: UnitGradients) -> None:
        """The unit's gradients rest elsewhere from now on. There are none now."""
        self._of[unit.index] = _OfUnit(gradients)

    # What compute asks for.

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times ``gradient`` to what is there for the coming step. Reads ``gradient`` only.

        The scale is applied by the update, unless gradients with different ones meet.
        """
        self._of[unit.index].is_open = True
        self._add(unit, spec, gradient, scale)

    def landed(self, unit: UnitSpec, spec: ParameterSpec, scale: float, sum_squares: float) -> None:
        """The gradient, the first one of a step, has been put where ``gradients_of(unit).landing(spec)`` says."""
        self._has_new = True
        self._of[unit.index].known[spec] = Gradient(sum_squares, scale)

    def close(self, unit: UnitSpec) -> None:
        """The unit has all its gradients of this backward."""
        self.put_away(unit)
        self._closed.append(unit)

    def put_away(self, unit: UnitSpec) -> None:
        """All gradients of this backward are in their places: spilled ones go to the store."""
        of = self._of[unit.index]
        of.is_open = False
        of.gradients.close()

    def complete(self) -> Iterator[UnitSpec]:
        """The units that were closed, each once, as soon as their gradients are in host memory and their squares are
        known. One that more gradients are coming for is left out."""
        while self._closed:
            yield self._closed.popleft()

    def settle(self) -> None:
        """Return when all gradients that were taken are in their places, and their squares are known."""
        if self._make_whole is not None and self._has_new:
            self._has_new = False
            self._make_whole({spec: known for of in self._of for spec, known in of.known.items()})

    def forget(self, unit: UnitSpec) -> None:
        """The gradients belong to a step now, or are not wanted: the next one begins a new sum."""
        of = self._of[unit.index]
        of.known = {}
        of.gradients.forget()

    # What is asked from outside of a backward.

    def read(self, unit: UnitSpec, spec: ParameterSpec) -> torch.Tensor:
        """A copy of the gradient, which must be there, in host memory."""
        of = self._of[unit.index]
        gradient = of.gradients.read(spec) * of.known[spec].scale
        self._close_outside(of)
        return gradient

    def write(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor) -> None:
        """Put ``value``, which may be of any dtype and device, in the place of the gradient, if there was one."""
        of = self._of[unit.index]
        of.known.pop(spec, None)
        self._add(unit, spec, value.to("cpu", torch.float32), 1.0)
        self._close_outside(of)

    def copy_to(self, unit: UnitSpec, address: int, dtype: torch.dtype) -> None:
        """Copy the elements of the unit's gradients, as they rest, to host memory at ``address``."""
        of = self._of[unit.index]
        for spec in of.known:
            target = tensor_at(address + spec.offset * dtype.itemsize, spec.numel, dtype)
            target.copy_(of.gradients.read(spec).view(-1))
        self._close_outside(of)

    def restore(self, unit: UnitSpec, known: dict[ParameterSpec, Gradient], address: int, dtype: torch.dtype) -> None:
        """Take over gradients that ``copy_to`` gave, and what was known of them."""
        of = self._of[unit.index]
        of.known = {}
        for spec, gradient in known.items():
            rest = tensor_at(address + spec.offset * dtype.itemsize, spec.numel, dtype).view(spec.shape)
            of.gradients.put(spec, rest)
            of.known[spec] = gradient
        self._close_outside(of)

    def discard(self, unit: UnitSpec, spec: ParameterSpec) -> None:
        """The parameter has no gradient for the coming step."""
        self._of[unit.index].known.pop(spec, None)

    def multiply(self, units: Sequence[UnitSpec], factor: float) -> None:
        """Multiply all gradients of these units, when the update reads them."""
        for unit in units:
            for gradient in self.of(unit).values():
                gradient.scale *= factor

    def _add(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        self._has_new = True
        of, gradient = self._of[unit.index], plain(gradient)
        before = of.known.get(spec)
        if before is None:
            sum_squares = of.gradients.put(spec, gradient)
        elif before.scale == scale:
            sum_squares = of.gradients.add(spec, gradient)
        else:
            sum_squares, scale = of.gradients.rescale_and_add(spec, before.scale, gradient, scale), 1.0
        of.known[spec] = Gradient(sum_squares, scale)

    def _close_outside(self, of: _OfUnit) -> None:
        if not of.is_open:
            of.gradients.close()


def resident_gradients(
    unit: UnitSpec, homes: UnitHomes, dtype: torch.dtype, squares: Squares | None
) -> UnitGradients | None:
    """The gradients of a unit that have a home of their own; None if they are spilled, or there are none."""
    if homes.grads is not None and homes.grads.tensor is not None:
        return DeviceGradients(unit, homes.grads.tensor, squares)
    if homes.grads is not None and homes.grads.address is not None:
        return HostGradients(homes.grads.address, dtype)
    return None


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a kernel can read it."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.contiguous()
