"""Passes of the model, forward and backward: what its hooks tell becomes uses of units and gradients on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.access import ExternalAccess
from offload.checkpoint.checkpoints import Checkpoints
from offload.closing import Closers
from offload.model.aliases import Alias, Aliases
from offload.model.backing import ParameterBacking, write_together
from offload.model.under_way import tell_first_run
from offload.progress import Progress
from offload.report.reporter import Reporter
from offload.tiers.fence import UpdateFence
from offload.tiers.gradients.sink import GradientSink
from offload.torch_internals import graph_task
from offload.units import ParameterSpec, UnitSpec
from offload.update.speculation_policy import SpeculationPolicy
from offload.update.speculative import SpeculativeUpdates
from offload.uses import Uses
from offload.waiting import FATAL, Failure, of_thread


@dataclass(eq=False)
class Passes:
    """Those of a model that is not trained. See ``offload.model.listeners.Listener``."""

    uses: Uses
    backings: Mapping[ParameterSpec, ParameterBacking]
    aliases: Aliases
    checkpoints: Checkpoints
    failure: Failure
    closers: Closers
    """Made when neither model nor engine nor optimizer, all of which refer to this, is referred to any more."""

    def __post_init__(self) -> None:
        self.aliased = self.aliases.of_unit

    def begin_use(self, unit: UnitSpec) -> bool:
        if self.failure.first is not None:
            self.failure.check()
        if self.checkpoints.is_due and torch.is_grad_enabled():
            self._pass_boundary()
        try:
            if self.aliases.of_unit:
                self.aliases.take(unit.index)
            return self._begin(unit)
        except FATAL as error:
            self.failure.raise_first(error)

    def announce(self, experts: Sequence[UnitSpec]) -> None:
        """The model will use these experts of one layer next, in this order."""
        with self.failure:
            self.uses.announce(experts)

    def end_use(self, unit: UnitSpec) -> None:
        try:
            self.uses.end(unit)
        except FATAL as error:
            self.failure.raise_first(error)
        if self.aliases.of_unit:
            self.aliases.check(unit.index)

    def begin_passing(self) -> None:
        self.failure.check()
        if self.checkpoints.is_due:
            self._pass_boundary()
        self.uses.begin_passing()

    def passed(self, unit: UnitSpec) -> None:
        self.uses.passed(unit)

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float | None) -> None:
        """Nobody needs it."""

    def end_backward(self, unit: UnitSpec) -> None:
        """Nobody waits for it."""

    def end_part(self, unit: UnitSpec) -> None:
        """Nor for this."""

    def changed_in_use(self, unit: UnitSpec, changes: Sequence[tuple[ParameterSpec, torch.Tensor]]) -> None:
        if changes:
            write_together([(self.backings[spec], value) for spec, value in changes])

    def moved_in_use(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor, memory: Alias) -> None:
        self.backings[spec].point_to(memory, value)

    def _pass_boundary(self) -> None:
        self.aliases.take_all()  # what was written to them after the step belongs to it
        self.checkpoints.pass_boundary()

    def _begin(self, unit: UnitSpec) -> bool:
        return self.uses.begin(unit, training=False)


@dataclass(eq=False)
class TrainingPasses(Passes):
    """Those of a model that is trained."""

    sink: GradientSink
    """The first of the chain that brings gradients to their homes."""
    fence: UpdateFence
    """Of the updates that read the gradients which compute would write over."""
    speculative: SpeculativeUpdates
    policy: SpeculationPolicy
    progress: Progress
    access: ExternalAccess
    reporter: Reporter

    def __post_init__(self) -> None:
        super().__post_init__()
        self._backward_has_begun = False
        """A gradient of the coming step has come."""

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float | None) -> None:
        if self.failure.first is not None:
            self.failure.check()
        tell_first_run("goes backward")
        try:
            if self.speculative.of_unit:
                self.speculative.invalidate(unit)
            if unit.index in self.fence.pending or of_thread.stepping:
                self.fence.wait(unit)
            self.sink.take(unit, spec, gradient, 1.0 if scale is None else scale)
        except FATAL as error:
            self.failure.raise_first(error)
        if scale is None:
            self.progress.has_other_gradients = True
        if not self._backward_has_begun:
            self._backward_has_begun = True
            self.reporter.backward_begins()
        if self.policy.looks:
            self.policy.gradient_came(unit)

    def end_backward(self, unit: UnitSpec) -> None:
        try:
            self.sink.close(unit)
        except FATAL as error:
            self.failure.raise_first(error)
        if self.policy.looks:
            self.policy.look()

    def end_part(self, unit: UnitSpec) -> None:
        try:
            self.sink.end_part(unit)
        except FATAL as error:
            self.failure.raise_first(error)

    def forget_gradients(self) -> None:
        """No gradient of the coming step is there."""
        self._backward_has_begun = False
        self.policy.forget()

    def _begin(self, unit: UnitSpec) -> bool:
        in_backward = graph_task() != -1
        if in_backward and self.speculative.of_unit:  # more gradients of the unit will come
            self.speculative.invalidate(unit)
        return self.uses.begin(unit, training=in_backward or torch.is_grad_enabled())
