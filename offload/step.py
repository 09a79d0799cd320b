"""The optimizer's step: prepared, judged, and handed over to those who carry it out."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from torch import nn
from torch.autograd.graph import increment_version

from offload.access import ExternalAccess
from offload.checkpoint.checkpoints import Checkpoints
from offload.config import OffloadConfig
from offload.cores import CoreBudget
from offload.errors import ConfigError
from offload.growth import FixedPlan
from offload.interrupts import held_back
from offload.model.activation_choice import FixedActivations
from offload.model.backing import ParameterBacking, PiecewiseBacking
from offload.model.hooks import Hooks
from offload.model.under_way import touch
from offload.optim.rule import Group
from offload.passes import TrainingPasses
from offload.progress import Progress
from offload.ranks.agreement import Facts, Place
from offload.report.reporter import Reporter
from offload.run.watch import Watch
from offload.step_warnings import StepWarnings
from offload.tiers.gradients.sink import GradientSink
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.level import Level
from offload.units import ParameterSpec, UnitSpec
from offload.update.device_side import NoResidentUpdates, ResidentUpdates
from offload.update.step import UnitUpdate
from offload.update.updater import Updater
from offload.update.verdict import Verdict
from offload.uses import Uses
from offload.waiting import FATAL, Failure, handing_over
from swapper import OffloadError

_HALF_A_STEP = (
    "optimizer.step() was interrupted half-way: some weights may have taken the step and others not. Build the model "
    "and the engine again, and go on from a checkpoint"
)


@dataclass(eq=False)
class Step:
    """The training thread makes all calls: those of ``OffloadOptimizer`` and of the engine."""

    config: OffloadConfig
    progress: Progress
    units: Sequence[UnitSpec]
    """The units as compute sees them: whole ones, not shards."""
    hooks: Hooks
    uses: Uses
    passes: TrainingPasses
    level: Level
    """The top level: compute takes its pins there."""
    host: HostLevel
    sink: GradientSink
    updater: Updater
    cores: CoreBudget
    resident: ResidentUpdates | NoResidentUpdates
    verdict: Verdict
    access: ExternalAccess
    checkpoints: Checkpoints
    warnings: StepWarnings
    reporter: Reporter
    watch: Watch
    growth: FixedPlan
    activations: FixedActivations
    failure: Failure
    specs: Mapping[nn.Parameter, Sequence[ParameterSpec]]
    """Of each parameter of the model: its spec, or those of its pieces in order."""
    backings: Mapping[ParameterSpec, ParameterBacking]
    wholes: Sequence[PiecewiseBacking]
    """Of weights in pieces."""
    replaced: Mapping[int, weakref.ref[nn.Parameter]]
    """Parameters, by ``id``, whose values the engine has taken over and whose objects it could not."""
    param_groups: Callable[[], Sequence[Group]]
    """The optimizer's."""

    def __post_init__(self) -> None:
        self._scale = 1.0
        """Loss scale of the last step."""

    # What the optimizer asks.

    def trains(self, parameter: nn.Parameter) -> bool:
        """The parameter is one that the engine updates, or was before the engine took its value over."""
        replaced = self.replaced.get(id(parameter))
        if replaced is not None and replaced() is parameter:
            return True
        return parameter in self.specs and parameter.requires_grad

    def accept(self, parameter: nn.Parameter) -> None:
        """The parameter may join a parameter group. Raises ``ConfigError`` if the engine cannot train it."""
        specs = self.specs.get(parameter)
        if specs is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is not one that the engine holds. Give it an optimizer "
                "of its own, or put it into the model before the engine is made."
            )
        if not specs[0].trainable:
            raise ConfigError(
                f"parameter {specs[0].name} was not to be trained when the engine was made: it has no optimizer states."
            )
        if not self.verdict.groups_may_change:
            raise ConfigError(
                "an optimizer without a kernel has room for the states of the parameter groups that it had when the "
                "engine was made. Give it all of them then: those whose time is later with lr=0, or frozen by "
                "requires_grad_(False) once the engine is made."
            )

    def take_step(self, loss_scale: float | None = None) -> None:
        """Freeze the step, and start its update. An interrupt comes before, or when all of it is on its way."""
        self.checkpoints.generations.raise_missed()
        self.passes.aliases.take_all()
        with self.failure, self.access.ranks.changing_weights():
            self._prepare(loss_scale)
            with held_back():
                self._judge(loss_scale)
            with self.checkpoints.before_boundary():
                self.hooks.refresh()
        self.passes.aliases.refresh()
        self.watch.step(self.reporter.last, self.param_groups())

    def skip_step(self) -> None:
        """The program's own loss scaler has found gradients that are not finite."""
        self.checkpoints.step_skipped()

    def zero_grad(self, parameters: Collection[nn.Parameter]) -> None:
        """Forget the gradients of these parameters. Those of others, if there are some, stay."""
        wanted = {spec for parameter in parameters for spec in self.specs.get(parameter, ())}
        gradients = self.access.gradients
        if wanted.issuperset([spec for spec, _ in gradients.of_all()]):
            self.drop_gradients()
            return
        self._end_interrupted()
        for spec in wanted:
            self.backings[spec].drop_gradient()

    def drop_gradients(self) -> None:
        """Forget all gradients. Who holds one keeps it."""
        self._end_interrupted()
        self.access.to_be_zeroed.clear()
        self.progress.begin_step()
        self.passes.forget_gradients()
        with self.failure:
            self.access.before.settle()
            for backing in self.backings.values():
                if backing.asked_for is not None:
                    backing.leave_gradient()
            self.updater.drop_all()
            for unit in self.units:
                self.sink.forget(unit)

    def zeroing_is_done(self) -> None:
        """Nobody expects the gradients that the last step has used up to be there still."""
        self.access.to_be_zeroed.clear()
        self.access.gradients.forget_used()

    def forget_used(self) -> None:
        """Forget the gradients that the step has used, as if ``zero_grad()`` of the optimizer came after it."""
        self.zeroing_is_done()
        for spec in self.verdict.stepping:
            self.access.own_gradients.drop(spec)

    def _end_interrupted(self) -> None:
        """End the calls that an interrupt has left."""
        self.hooks.refuse_others("zero_grad()")
        if self.hooks.end_interrupted():
            self.uses.reset()

    # What the engine asks.

    def is_due(self) -> bool:
        """``gradient_accumulation_steps`` backwards are done. Raises ``ConfigError`` if they were not ``backward``,
        which divides the loss."""
        steps = self.config.gradient_accumulation_steps
        if self.progress.has_other_gradients and steps > 1:
            raise ConfigError(
                f"engine.step() with gradient_accumulation_steps={steps} counts calls of engine.backward(loss), which "
                "divides each loss, and there are gradients of loss.backward(). Call engine.backward(loss), or divide "
                "the loss yourself and call engine.optimizer.step() when it is time."
            )
        return self.progress.has_other_gradients or self.progress.num_backwards >= steps

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most ``max_norm``; the norm before."""
        touch("looks at gradients")
        with self.failure:
            self.sink.settle()
        norm = self.verdict.norm()
        if math.isfinite(norm):
            factor = min(max_norm / (norm + 1e-6), 1.0)
            self.verdict.scale(factor)
            self.access.own_gradients.multiply(factor)
        return norm

    # The stages of a step.

    def _prepare(self, loss_scale: float | None) -> None:
        """Wait until nothing is under way that the step does not expect."""
        if self.progress.loss_scale is not None and loss_scale is None and self.progress.has_other_gradients:
            raise ConfigError(
                'precision="fp16": small gradients of a loss that is not scaled come out as 0. Call '
                "engine.backward(loss), which scales it, or use torch.amp.GradScaler."
            )
        self.checkpoints.pass_boundary()
        self.checkpoints.generations.wait()
        self.hooks.reset()
        self.uses.reset()
        self.verdict.check(self.param_groups())
        self.warnings.before_step()
        place = Place(f"step {self.progress.global_step + 1}", partial(self._facts, loss_scale))
        self.sink.settle(place)
        completed = [
            whole for whole in self.wholes if whole.complete_gradient()
        ]  # the same on all ranks, which have met
        if completed:
            self.sink.settle(place)

    def _facts(self, loss_scale: float | None) -> Facts:
        own = self.progress.loss_scale
        scales = {"the loss scale of GradScaler": loss_scale, "the loss scale": None if own is None else own.value}
        return {**self.verdict.facts(self.param_groups()), **scales}

    def _judge(self, loss_scale: float | None) -> None:
        """Look whether all gradients are finite, freeze what the step multiplies by, and hand it over."""
        progress, verdict = self.progress, self.verdict
        if loss_scale is not None and loss_scale != 1:
            verdict.scale(1 / loss_scale)
        norm, before_clipping = verdict.norm(), verdict.norm_before_clipping()
        self.watch.arrive()
        progress.begin_step()
        self._scale = 1.0 if loss_scale is None else loss_scale
        if progress.loss_scale is not None and loss_scale is None:
            self._scale = progress.loss_scale.value
            progress.loss_scale.update(math.isfinite(norm))
        if not math.isfinite(norm):
            error = verdict.non_finite(progress.global_step + 1)
            self.drop_gradients()
            if progress.loss_scale is None:
                raise error
            self.checkpoints.step_skipped()
            return
        factor = verdict.factor()
        if self.config.gradient_clipping:
            verdict.scale(min(self.config.gradient_clipping / (norm + 1e-6), 1.0))
        updates_wait = self.passes.policy.step_taken(norm, factor)
        step = verdict.freeze(self.param_groups())
        try:
            self._hand_over(step, before_clipping, updates_wait=updates_wait)
        except BaseException as error:
            if not isinstance(error, FATAL):  # some units wait for updates that nobody will make
                self.failure.record(OffloadError(_HALF_A_STEP))
            raise
        if verdict.stepping:
            self.access.to_be_zeroed.update(verdict.stepping)
            self.access.to_be_zeroed.difference_update(self.access.own_gradients.of_spec)  # which stay, as in PyTorch
        else:
            self.warnings.empty_step()

    def _hand_over(self, step: Sequence[UnitUpdate], grad_norm: float, *, updates_wait: bool) -> None:
        """The step is certain: give it to those who carry it out."""
        verdict, speculative = self.verdict, self.updater.speculative
        in_use = [parameter for spec in verdict.stepping for parameter in self.backings[spec].in_use]
        increment_version([*map(verdict.parameters.__getitem__, verdict.stepping), *in_use])
        self.level.outdate(verdict.stepping_units)
        on_host = self.resident.update(step)
        with handing_over():
            self.host.begin_updates([update.unit for update in on_host])
            remaining = self.host.by_first_use(speculative.confirm(on_host), attrgetter("unit"))
            stepping = frozenset(verdict.stepping)
            for unit in verdict.stepping_units:
                self.sink.use_up(unit, stepping)
            self.passes.forget_gradients()
            self.progress.global_step += 1
            self.checkpoints.step_taken(step)
            report = self.reporter.report(
                self.growth.plan.memory, self.progress.global_step, grad_norm, self._scale, updates_wait=updates_wait
            )
            self.cores.end_step(self.reporter.working_seconds)
            busy = self.reporter.disk_busy
            if busy is not None and not updates_wait:
                speculative.balance(*busy)
            self.updater.start(remaining)
        if verdict.rule.is_watched:
            self.updater.wait_for_step()
        self.activations.step_taken(report)
        self.growth.step_taken()
        self.level.end_step()
