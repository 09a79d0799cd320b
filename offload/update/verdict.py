"""The verdict: what a step will do to every unit, frozen before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from offload.errors import ConfigError, NonFiniteGradient
from offload.optim.rule import Group, Rule, SteppingParameter, facts_of, refuse_twice
from offload.ranks.agreement import Facts, OfEach
from offload.tiers.gradients.store import Gradient, GradientStore
from offload.units import ALIGNMENT, ParameterSpec, UnitSpec
from offload.update.step import Segment, UnitUpdate

_first_asked: Callable[[Gradient], float] = attrgetter("first_asked")

_Common = dict[tuple[int, int, float], Hashable]
"""Steps that are frozen, by the ``id`` of the group, the step and the scale."""

_TakingPart = list[tuple[ParameterSpec, Group]]
"""Parameters of a unit that take part in a step, each with its group."""


@dataclass(eq=False)
class Verdict:
    """Looks at the gradients of the coming step, and freezes it. ``named_order`` is that of ``named_parameters``."""

    units: Sequence[UnitSpec]
    gradients: GradientStore
    named_order: Sequence[ParameterSpec]
    parameters: dict[ParameterSpec, nn.Parameter]
    rule: Rule

    def __post_init__(self) -> None:
        self.num_steps: dict[ParameterSpec, int] = {}
        """Steps that each parameter has taken; one without a gradient takes none."""
        self.stepping: Sequence[ParameterSpec] = ()
        """The parameters that took part in the last step."""
        self.stepping_units: Sequence[UnitSpec] = ()
        """Their units. One whose parameters have no element here (on this rank) has no update."""
        self._names = {id(parameter): spec.name for spec, parameter in self.parameters.items()}
        """Of the parameters that may be in groups, by ``id``."""
        self._trained = [spec for unit in self.units for spec in unit.trainable]
        self._trained_names = [spec.name for spec in self._trained]

    @property
    def groups_may_change(self) -> bool:
        """A parameter may come into a group after the engine was made."""
        return self.rule.uniform

    def check(self, param_groups: Sequence[Group]) -> None:
        """Raise ``ConfigError`` if parameters have come into the groups that the engine does not hold, or twice."""
        refuse_twice(param_groups, lambda parameter: self._names.get(id(parameter)))
        if not groups_by_parameter(param_groups).keys() <= self._names.keys():
            raise ConfigError(
                "engine.optimizer.param_groups has parameters that the engine does not hold. Give them an optimizer of "
                "their own, or put them into the model before the engine is made."
            )

    def facts(self, param_groups: Sequence[Group]) -> Facts:
        """Facts that the coming step follows from, beside the elements of gradients: ranks must agree on them."""
        groups = ((group, [self._names[id(parameter)] for parameter in group["params"]]) for group in param_groups)
        factors: dict[ParameterSpec, float] = {spec: gradient.scale for spec, gradient in self._present()}
        return {
            **facts_of(groups),
            "requires_grad": self._of_each(lambda spec: self.parameters[spec].requires_grad),
            "the number of steps": self._of_each(lambda spec: self.num_steps.get(spec, 0)),
            "the factor of the gradient": self._of_each(factors.get),
        }

    def _of_each(self, value: Callable[[ParameterSpec], Any]) -> OfEach:
        return OfEach(self._trained_names, list(map(value, self._trained)))

    def norm(self) -> float:
        """The norm of all gradients of the coming step; not finite if one of them is not."""
        return self._added_up(Gradient.ask)

    def norm_before_clipping(self) -> float:
        """The same, of each gradient as it was when its norm was first asked for."""
        return self._added_up(_first_asked)

    def factor(self) -> float:
        """Factor that the coming step's gradients were multiplied by since they came; of the first one, if they
        differ."""
        return next((gradient.scale / gradient.came_with for _, gradient in self._present() if gradient.came_with), 1.0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients of the coming step."""
        self.gradients.multiply(self.units, factor)

    def non_finite(self, step: int) -> NonFiniteGradient:
        """The error for gradients whose norm is not finite."""
        by_spec = {spec: gradient.norm_squared for spec, gradient in self._present()}
        names = (spec.name for spec in self.named_order if not math.isfinite(by_spec.get(spec, 0.0)))
        bad = next(names, "all parameters together")
        return NonFiniteGradient(
            f"step {step}: the gradient of {bad} is not finite. The step was not taken: weights and "
            "states are unchanged. Lower the learning rate, clip gradients, or look at this batch."
        )

    def freeze(self, param_groups: Sequence[Group]) -> list[UnitUpdate]:
        """Freeze what the step does to each unit that has gradients, with the groups' settings as they are now."""
        groups = groups_by_parameter(param_groups)
        common: _Common = {}
        updates, taking_part = [], []
        stepping: dict[ParameterSpec, SteppingParameter] = {}
        for unit in self.units:
            gradients = self.gradients.of(unit)
            if gradients and (found := self._taking_part(unit, gradients, groups)):
                taking_part.append((unit, found, gradients))
                for spec, group in found:
                    stepping[spec] = self.parameters[spec], group
        self.rule.begin_step(stepping)
        for unit, found, gradients in taking_part:
            update = self._update(unit, found, gradients, common)
            if update is not None:
                updates.append(update)
        for spec in stepping:
            self.num_steps[spec] = self.num_steps.get(spec, 0) + 1
        self.stepping, self.stepping_units = list(stepping), [unit for unit, _, _ in taking_part]
        return updates

    def freeze_unit(self, unit: UnitSpec, groups: dict[int, Group], factor: float) -> UnitUpdate | None:
        """Freeze what the coming step would do to the unit, if nothing happens but that gradients are multiplied by
        ``factor``; None if nothing, or if it is not to be.

        ``groups`` by ``id`` of their parameters.
        """
        gradients = self.gradients.of(unit).copy()  # other ranks may send more of them meanwhile
        if not all(math.isfinite(gradient.sum_squares) for gradient in gradients.values()):
            return None
        return self._update(unit, self._taking_part(unit, gradients, groups), gradients, {}, factor)

    def _update(
        self,
        unit: UnitSpec,
        taking_part: _TakingPart,
        gradients: Mapping[ParameterSpec, Gradient],
        common: _Common,
        factor: float = 1.0,
    ) -> UnitUpdate | None:
        segments: list[Segment] = []
        start = stop = -1
        last: Hashable = None
        for spec, group in taking_part:
            if not spec.numel:
                continue
            frozen = self._frozen(spec, group, common, gradients[spec].scale * factor)
            is_same = stop >= 0 and (last is frozen or last == frozen)
            if not is_same or spec.offset - stop >= ALIGNMENT:
                if stop >= 0:
                    segments.append(Segment(start, stop, last))
                start, last = spec.offset, frozen
            stop = spec.offset + spec.numel  # neighbours that take the same step are one segment
        if stop < 0:
            return None
        segments.append(Segment(start, stop, last))
        return UnitUpdate(unit, tuple(segments), tuple([gradients[spec] for spec, _ in taking_part]))

    def _taking_part(
        self, unit: UnitSpec, gradients: Mapping[ParameterSpec, Gradient], groups: dict[int, Group]
    ) -> _TakingPart:
        """The unit's parameters that have a gradient and a group."""
        found = []
        for spec in unit.parameters:
            if spec in gradients:
                group = groups.get(id(self.parameters[spec]))
                if group is not None:
                    found.append((spec, group))
        return found

    def _frozen(self, spec: ParameterSpec, group: Group, common: _Common, scale: float) -> Hashable:
        """The parameter's step. ``common`` holds those that others of the same moment may share."""
        step = self.num_steps.get(spec, 0) + 1
        if not self.rule.uniform:
            return self.rule.freeze(spec, group, step, scale)
        key = (id(group), step, scale)
        frozen = common.get(key)
        if frozen is None:
            frozen = common[key] = self.rule.freeze(spec, group, step, scale)
        return frozen

    def _present(self) -> list[tuple[ParameterSpec, Gradient]]:
        return self.gradients.of_all()

    def _added_up(self, norm_squared: Callable[[Gradient], float]) -> float:
        present, total = dict(self._present()), 0.0
        for spec in self.named_order:  # not ``sum``, whose last bits depend on the release of Python
            if spec in present:
                total += norm_squared(present[spec])
        return math.sqrt(total)


def groups_by_parameter(param_groups: Sequence[Group]) -> dict[int, Group]:
    """The group of each parameter, by its ``id``: tensors do not compare."""
    return {id(parameter): group for group in param_groups for parameter in group["params"]}
