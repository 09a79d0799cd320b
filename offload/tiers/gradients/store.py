"""The gradient store: sum of squares and scale of each gradient of the coming step, whose elements are stored
elsewhere.

There is one way to add a gradient, whatever the tier: the first one is put where it is stored, the next ones are added
to it, and where gradients with different scales meet they are rescaled. The arithmetic is that of ``UnitGradients``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from offload.memory import tensor_at
from offload.ranks.agreement import Place
from offload.tiers.gradients.unit import Loan, UnitGradients
from offload.units import ParameterSpec, UnitSpec
from swapper import OffloadError


@dataclass(slots=True, init=False)
class Gradient:
    """A parameter's gradient for the coming step, without its elements."""

    sum_squares: float
    """Of the elements as they are stored, before they are multiplied by ``scale``."""
    scale: float
    """Factor that the elements are still to be multiplied by: loss scaling and clipping cost no pass over them."""
    first_asked: float
    """The square of the norm when it was first asked for, which is before it was clipped."""
    came_with: float
    """``scale`` as it was before anything was multiplied between backward and step."""
    own_squares: float
    """Of this rank's elements, once ``sum_squares`` is of all ranks'."""
    origin: object = field(compare=False, repr=False)
    """Mark that it shares with what it was before others were added to it. One in its place has another."""

    def __init__(
        self,
        sum_squares: float,
        scale: float,
        first_asked: float = math.nan,
        came_with: float = math.nan,
        own_squares: float = math.nan,
        origin: object = None,
    ) -> None:
        """It comes with this scale if nothing else is said, and is another one than all before without an
        ``origin``."""
        self.sum_squares = sum_squares
        self.scale = scale
        self.first_asked = first_asked
        self.own_squares = own_squares
        self.came_with = scale if came_with != came_with else came_with
        self.origin = object() if origin is None else origin

    def ask(self) -> float:
        """``norm_squared``, for a verdict or for clipping."""
        now = self.sum_squares * self.scale * self.scale
        if self.first_asked != self.first_asked:  # it is NaN
            self.first_asked = now
        return now

    @property
    def came_squared(self) -> float:
        """The square of its norm as it came."""
        return self.sum_squares * self.came_with * self.came_with

    @property
    def norm_squared(self) -> float:
        return self.sum_squares * self.scale * self.scale


class _HalfAdded(Gradient):
    """Stands for a gradient while another one is added to it. Where an interrupt leaves it there, nobody knows what
    rests: neither step nor reader gets it."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__(math.nan, math.nan, came_with=0.0)

    @property  # type: ignore[override]
    def scale(self) -> float:
        raise OffloadError(
            f"a backward was interrupted while gradients of {self._name} were added up: call zero_grad(), and run the "
            "backwards of the step again"
        )

    @scale.setter
    def scale(self, value: float) -> None:
        if not math.isnan(value):
            raise AssertionError("a gradient that is half added has no scale")


MakeWhole = Callable[[Iterable[Mapping[ParameterSpec, Gradient]], Place | None], None]
"""Makes the sum of squares of each gradient that of the whole, of which ranks have parts. All of them call it,
and agree on what they say of this place of the program."""


def of_one_rank(known: Iterable[Mapping[ParameterSpec, Gradient]], at: Place | None) -> None:
    """``MakeWhole`` where one rank has all: sums of squares are whole."""


class _OfUnit:
    def __init__(self, gradients: UnitGradients) -> None:
        self.gradients = gradients
        self.known: dict[ParameterSpec, Gradient] = {}
        self.used: dict[ParameterSpec, Gradient] = {}
        """Gradients that the last step has used, until others come. See ``UnitGradients.keeps_used``."""
        self.zeroed: set[ParameterSpec] = set()
        """Those known to be zeros, which are not in their places so far."""
        self.is_open = False
        """Gradients of the present backward may still come."""


class GradientStore:
    """The last sink: the gradients of all units. The update reads them where they are stored."""

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        make_whole: MakeWhole = of_one_rank,
        spilled_by_ranks: Collection[int] = (),
    ) -> None:
        """``gradients``: one for each unit, in order. ``spilled_by_ranks``: the units of which a rank, it may be
        another one, spills its part."""
        self._make_whole = make_whole
        self._spilled_by_ranks = spilled_by_ranks
        self._num_changes = 0
        self._num_whole = 0
        """Changes that the sums of squares of all ranks are after."""
        self._of = [_OfUnit(each) for each in gradients]
        self._closed: deque[UnitSpec] = deque()

    def of(self, unit: UnitSpec) -> dict[ParameterSpec, Gradient]:
        """The unit's gradients for the coming step: of each parameter that has one."""
        return self._of[unit.index].known

    def of_all(self) -> list[tuple[ParameterSpec, Gradient]]:
        """The same of all units, in order."""
        return [item for of in self._of for item in of.known.items()]

    def lend(self, units: Iterable[UnitSpec]) -> list[Loan | None]:
        """The gradients of these units where they still lie: see ``UnitGradients.lend``."""
        places = [self._of[unit.index].gradients for unit in units]
        return [place.lend() if place.spills else None for place in places]

    def find(self, unit: UnitSpec, spec: ParameterSpec) -> Gradient | None:
        """Return what is known of the parameter's gradient for the coming step, else of that of the last one."""
        of = self._of[unit.index]
        return of.known.get(spec) or of.used.get(spec)

    def has_any(self, unit: UnitSpec) -> bool:
        """There are gradients of the unit, for the coming step or of the last one."""
        of = self._of[unit.index]
        return bool(of.known or of.used)

    def gradients_of(self, unit: UnitSpec) -> UnitGradients:
        """Home of the unit's gradients."""
        return self._of[unit.index].gradients

    def move(self, unit: UnitSpec, gradients: UnitGradients) -> None:
        """The unit's gradients are stored elsewhere from now on. There are none now."""
        self._of[unit.index] = _OfUnit(gradients)

    # The sink: see ``GradientSink``.

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """The scale is applied by the update, unless gradients with different ones meet."""
        of = self._of[unit.index]
        of.is_open = True
        if spec in of.known or of.zeroed:
            self._add(of, spec, gradient, scale)
            return
        self._num_changes += 1
        of.used.pop(spec, None)
        of.known[spec] = Gradient(of.gradients.put(spec, plain(gradient)), scale)

    def landed(self, unit: UnitSpec, spec: ParameterSpec, scale: float, sum_squares: float) -> None:
        """The gradient, the first one of a step, has been put where ``gradients_of(unit).landing(spec)`` says."""
        self._num_changes += 1
        of = self._of[unit.index]
        of.used.pop(spec, None)
        of.known[spec] = Gradient(sum_squares, scale)

    def end_part(self, unit: UnitSpec) -> None:
        """They stay where they are added up."""

    def close(self, unit: UnitSpec) -> None:
        self.put_away(unit)
        self._closed.append(unit)

    def put_away(self, unit: UnitSpec) -> None:
        """All gradients of this backward are in their places: spilled ones go to the store."""
        of = self._of[unit.index]
        of.is_open = False
        if of.zeroed:
            self._put_zeros(of)
        of.gradients.close()

    def complete(self) -> Iterator[UnitSpec]:
        while self._closed:
            unit = self._closed.popleft()
            if not self._of[unit.index].is_open:
                yield unit

    def settle(self, at: Place | None = None) -> None:
        for of in self._of if at is not None else ():
            if of.zeroed:
                self._put_zeros(of)
                self._close_outside(of)
        seen = self._num_changes
        if seen != self._num_whole or at is not None:
            self._make_whole((of.known for of in self._of), at)
            self._num_whole = seen

    def restored(self) -> None:
        self._num_changes += 1

    def use_up(self, unit: UnitSpec, specs: Set[ParameterSpec]) -> None:
        of = self._of[unit.index]
        is_all = of.known.keys() <= specs
        if is_all:
            of.used, of.known = of.known, {}
        else:
            of.used = {spec: gradient for spec, gradient in of.known.items() if spec in specs}
            of.known = {spec: gradient for spec, gradient in of.known.items() if spec not in specs}
        of.is_open = False
        of.gradients.use_up(all_of_them=is_all)

    def forget_used(self) -> None:
        """Nobody asks for the gradients of the last step any more."""
        for of in self._of:
            if of.used:
                of.used = {}

    def forget(self, unit: UnitSpec) -> None:
        of = self._of[unit.index]
        of.known = {}
        of.used = {}
        of.zeroed.clear()
        of.is_open = False
        of.gradients.forget()

    # What is asked from outside of a backward.

    def is_kept(self, unit: UnitSpec, spec: ParameterSpec) -> bool:
        """The gradient, which must be there, can be read: no step has used it, or what has it keeps it. Ranks begin to
        spill others at different times: what one of them spills is not kept."""
        of = self._of[unit.index]
        return spec in of.known or (of.gradients.keeps_used and unit.index not in self._spilled_by_ranks)

    def read(self, unit: UnitSpec, spec: ParameterSpec) -> torch.Tensor:
        """A copy of the gradient, which must be there, in host memory. Raises ``OffloadError`` for one that a step has
        used, and whose place others have taken since."""
        of = self._of[unit.index]
        known = of.known.get(spec)
        if spec in of.zeroed:
            return torch.zeros(spec.shape, dtype=torch.float32) * (1.0 if known is None else known.scale)
        if not self.is_kept(unit, spec):
            raise OffloadError(
                f"the gradient of {spec.name} was used by the last step, and is stored on NVMe, where its place "
                "goes to others: its norm is known still. Take a copy before the step: parameter.grad.detach().clone()"
            )
        gradient = of.gradients.read(spec) * (known or of.used[spec]).scale
        self._close_outside(of)
        return gradient

    def write(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor) -> None:
        """Make the gradient ``value``, which may be of any dtype and device. If there is one, it is that still."""
        of, before = self._of[unit.index], self.find(unit, spec)
        if spec in of.used and of.gradients.keeps_used:
            of.gradients.use_up(all_of_them=False)  # the others' places are theirs still
        of.known.pop(spec, None)
        of.zeroed.discard(spec)
        self._add(of, spec, value.to("cpu", torch.float32), 1.0)
        if before is not None:
            of.known[spec].origin = before.origin
        self._close_outside(of)

    def zero(self, unit: UnitSpec, spec: ParameterSpec) -> None:
        """Make the gradient zeros, also where there is none. Moves no bytes if another one is added next."""
        of, before = self._of[unit.index], self.find(unit, spec)
        self._num_changes += 1
        of.used.pop(spec, None)
        of.zeroed.add(spec)
        of.known[spec] = Gradient(0.0, 1.0, origin=object() if before is None else before.origin)

    def copy_to(self, unit: UnitSpec, address: int, dtype: torch.dtype) -> None:
        """Copy the elements of the unit's gradients, as they are stored, to host memory at ``address``."""
        of = self._of[unit.index]
        self._put_zeros(of)
        for spec in of.known:
            target = tensor_at(address + spec.offset * dtype.itemsize, spec.numel, dtype)
            target.copy_(of.gradients.read(spec).view(-1))
        self._close_outside(of)

    def restore(self, unit: UnitSpec, known: dict[ParameterSpec, Gradient], address: int, dtype: torch.dtype) -> None:
        """Take over gradients that ``copy_to`` gave, and what was known of them."""
        of = self._of[unit.index]
        of.known, of.used = {}, {}
        of.zeroed.clear()
        for spec, gradient in known.items():
            rest = tensor_at(address + spec.offset * dtype.itemsize, spec.numel, dtype).view(spec.shape)
            of.gradients.put(spec, rest)
            of.known[spec] = gradient
        self._close_outside(of)

    def discard(self, unit: UnitSpec, spec: ParameterSpec) -> None:
        """The parameter has no gradient."""
        of = self._of[unit.index]
        of.known.pop(spec, None)
        of.used.pop(spec, None)
        of.zeroed.discard(spec)

    def multiply(self, units: Sequence[UnitSpec], factor: float) -> None:
        """Multiply all gradients of these units, when the update reads them."""
        for unit in units:
            for gradient in self.of(unit).values():
                gradient.scale *= factor

    def _add(self, of: _OfUnit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        self._num_changes += 1
        gradient = plain(gradient)
        of.used.pop(spec, None)
        before = of.known.get(spec)
        origin = None if before is None else before.origin
        if before is None or spec in of.zeroed:
            of.zeroed.discard(spec)
            sum_squares = of.gradients.put(spec, gradient)
        else:
            is_alike = before.scale == scale
            of.known[spec] = _HalfAdded(spec.name)
            if is_alike:
                sum_squares = of.gradients.add(spec, gradient)
            else:
                sum_squares, scale = of.gradients.rescale_and_add(spec, before.scale, gradient, scale), 1.0
        of.known[spec] = Gradient(sum_squares, scale, origin=origin)

    def _put_zeros(self, of: _OfUnit) -> None:
        for spec in of.zeroed:
            of.gradients.put(spec, torch.zeros(spec.shape))
        of.zeroed.clear()

    def _close_outside(self, of: _OfUnit) -> None:
        if not of.is_open:
            of.gradients.close()


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a kernel can read it."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.contiguous()
