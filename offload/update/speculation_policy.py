"""Policy of what is done of a step before its verdict: units are updated speculatively, or states are read that the
update begins with.

[Note: When a unit is looked at] When its gradients are complete in host memory and their squares are known. Where the
CPU computes, that is at the end of the unit's backward. From a device they come later: whenever the thread that runs
backward brings another gradient, it looks what has come, and waits for nothing. What is complete only when backward is
over is updated after the verdict: those are the units that forward begins with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from offload.optim.rule import Group
from offload.tiers.gradients.store import GradientStore
from offload.units import UnitSpec
from offload.update.forecast import Forecast
from offload.update.speculative import SpeculativeUpdates
from offload.update.updater import Updater
from offload.update.verdict import Verdict, groups_by_parameter


@dataclass(eq=False)
class SpeculationPolicy:
    """All calls come from the thread that computes."""

    speculative: SpeculativeUpdates
    updater: Updater
    forecast: Forecast | None
    """None where no unit can be updated speculatively."""
    verdict: Verdict
    gradients: GradientStore
    complete: Callable[[], Iterator[UnitSpec]]
    """See ``GradientStore.complete``."""
    param_groups: Callable[[], Sequence[Group]]
    _: KW_ONLY
    states_stored: bool
    """Some states rest on NVMe."""

    def __post_init__(self) -> None:
        self._groups: dict[int, Group] | None = None
        """By parameter, once a speculative update for the coming step has asked for them."""
        self._may_read_ahead = False
        """States rest on NVMe that the coming step's update begins with, and nobody has asked for them."""
        self.looks = self.forecast is not None or self.states_stored
        """Something may be done before the verdict: the calls within a backward are to be made."""

    def gradient_came(self, unit: UnitSpec) -> None:
        """A gradient of the unit is in its place, or on its way there."""
        if self.forecast is not None:
            self.speculative.gradient_arrived(unit)
        self.look()

    def look(self) -> None:
        """Begin what can be begun with the gradients that are complete since the last call. Never waits for one."""
        for unit in self.complete():
            unclipped = self._is_unclipped(unit)
            if self.speculative.is_held(unit):
                self._begin_update(unit, unclipped=unclipped)
            if self._may_read_ahead and not unclipped:
                self._may_read_ahead = False
                self.updater.read_ahead()

    def step_taken(self, norm: float, factor: float) -> bool:
        """The verdict is known. Gradients had this ``norm`` when they had been multiplied by ``factor``, which was
        before the engine clipped them. False if the step multiplies by what was expected."""
        forecast = self.forecast
        if forecast is None:
            return True
        for unit in self.complete():  # too late to begin with, and part of what the next step is compared with
            self._is_unclipped(unit)
        factor_now = self.verdict.factor()
        is_other = forecast.factor != factor_now
        if factor:
            forecast.step_taken(norm / factor, factor_now)
        return is_other

    def forget(self) -> None:
        """No gradient of the coming step is there."""
        self._groups = None
        self._may_read_ahead = self.states_stored
        if not self.looks:
            deque(self.complete(), maxlen=0)  # nobody else asks for them
        if self.forecast is not None:
            self.forecast.begin()

    def _is_unclipped(self, unit: UnitSpec) -> bool:
        """The step will multiply by what is expected, as far as can be said with this unit's gradients."""
        gradients = self.gradients.of(unit).copy().values()
        return self.forecast is not None and self.forecast.unclipped(unit.index, gradients)

    def _begin_update(self, unit: UnitSpec, *, unclipped: bool) -> None:
        """Update the unit now if the step will multiply its gradients by what is expected."""
        update = None
        if unclipped and self.forecast is not None:
            if self._groups is None:
                self._groups = groups_by_parameter(self.param_groups())
            update = self.verdict.freeze_unit(unit, self._groups, self.forecast.factor)
        self.updater.begin_speculative(unit, update)
