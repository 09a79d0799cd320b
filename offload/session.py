"""The session: one private object between the user's engine, the hooks and the optimizer on one side, and tiers and
updates on the other. It translates what the model does and what a step is into calls of theirs."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offload.access import BeforeChange, ExternalAccess, Layout, Levels, Zeroing
from offload.birth.birth import Birth
from offload.birth.loading import Loader
from offload.checkpoint.checkpoints import Checkpoints
from offload.checkpoint.optimizer_states import OptimizerStates
from offload.checkpoint.run_state import RunState, Training
from offload.checkpoint.safetensors.model_weights import GatheredModelWeights, ModelWeights
from offload.closing import Closers
from offload.config import OffloadConfig
from offload.device.protocol import Device
from offload.errors import BudgetError, ConfigError, DeviceMemoryError, warn
from offload.interrupts import held_back
from offload.memory import available_bytes, resident_bytes
from offload.model.handle import Handle
from offload.model.hooks import Hooks, UnitInModel
from offload.model.identity import give_back, ordinary
from offload.model.make import Handles, convert_statistics, give_ordinary_state_dicts, make_handles, move_to_device
from offload.model.parameter_metadata import ParameterMetadata
from offload.model.run_together import Habits, run_together
from offload.optim.choose import OptimizerChoice
from offload.optim.loss_scale import LossScale
from offload.optimizer import OffloadOptimizer, refuse_others
from offload.plan.plan import Drives, Plan
from offload.progress import Progress
from offload.ranks.ranks import Ranks
from offload.ranks.world import Peers, World
from offload.report.meter import Meter
from offload.report.report import LinkRates, Report
from offload.report.reporter import Reporter
from offload.run.watch import Watch
from offload.spooled import Spooled
from offload.tiers.make import make_tiers, store_bandwidths
from offload.torch_internals import graph_task, outside_of_graphs
from offload.units import ParameterSpec, UnitSpec
from offload.update.forecast import Forecast
from offload.update.make import Updates, make_updates
from offload.update.speculation_policy import SpeculationPolicy
from offload.update.step import UnitUpdate
from offload.update.verdict import Verdict
from offload.waiting import FATAL
from swapper import OffloadError
from swapper.errors import readable_bytes

_CLOSED = (
    "the engine is closed, and the weights went with it: call engine.unwrap() instead of close() to keep them in the "
    "model, or take them before (state_dict)"
)
_HALF_A_STEP = (
    "optimizer.step() was interrupted half-way: some weights may have taken the step and others not. Build the model "
    "and the engine again, and go on from a checkpoint"
)
_STILL_RUNNING = (
    "engine.together() was interrupted, and again while it waited for the end of a micro-batch: that may still run. "
    "Build the model and the engine again, and go on from a checkpoint"
)
_NOT_MADE = "the engine could not be made, and parameters that it had taken over are lost: build the model again"


class Session:
    """Model, engine and optimizer keep it alive: when none of them is referred to any more, it closes by itself."""

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        units: Sequence[UnitSpec],
        shards: Sequence[UnitSpec],
        plan: Plan,
        choice: OptimizerChoice | None,
        device: Device | None,
        birth: Birth,
        world: World,
        sharers: int,
        parts: Peers,
    ) -> None:
        """``shards`` are what this rank has of the ``units``: the units themselves, where there is one. ``plan`` and
        ``choice`` are theirs. ``sharers``: ranks that use the same drives. ``parts``: those that have other
        parts of ``DTensor``s."""
        self._sharers = sharers
        self._parts = parts
        self.config = config
        self.plan = plan
        self.failure = world.heartbeat.failure
        self.watch = Watch()
        self.meter = Meter()
        self.progress = Progress(LossScale() if config.precision == "fp16" else None)
        self.last_report: Report | None = None
        self.optimizer: OffloadOptimizer | None = None
        self._units = units
        self._device = device
        self._habits = Habits()
        self._step_scale = 1.0
        self._has_warned_of_empty_step = False
        self._has_warned_of_used_gradients = False
        self._model = weakref.ref(model)
        self._backward_has_begun = False
        """A gradient of the coming step has come."""
        self.holds_gradients = False
        """Ranks exchange no gradients now: see ``OffloadEngine.no_sync``."""
        self._closers = Closers()
        self._closers.callback(self.watch.close)
        self._closers.callback(parts.release)
        self._shards = shards
        self._ranks = Ranks(world, units, shards)
        try:
            self._build(model, choice, birth, self._closers)
        except BaseException as error:
            self._leave(error)
            self.failure.record(OffloadError(_NOT_MADE))  # handles may stand in the model already
            self._closers.close()
            raise
        self._closers.callback(partial(self._ranks.leave, None))  # first of all: others may still need this rank's part
        self.meter.restart()

    # What the engine asks.

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return torch.device("cpu") if self._device is None else self._device.torch_device

    @property
    def drives(self) -> Drives | None:
        """What the store is read and written by, and how fast; None if nothing was measured."""
        store = self._tiers.store
        return None if store is None or self.bandwidths is None else Drives(store.backend, self.bandwidths)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of ``loss``, which may be the last one of a step."""
        scale = self.progress.loss_scale.value if self.progress.loss_scale is not None else 1.0
        context = self._hooks.context
        context.gradient_scale = 1 / scale
        self.zeroing_is_done()
        try:
            (loss.float() * scale / self.config.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._hooks.close_backward()
            raise
        finally:
            context.gradient_scale = None
        self.failure.check()
        self.watch.saw_loss(loss, is_first=self.progress.num_backwards == 0)
        self.progress.num_backwards += 1

    def together(
        self, micro_batches: Iterable[Any], function: Callable[[Any], Any], num_at_once: int | None
    ) -> list[Any]:
        """See ``OffloadEngine.together``."""
        if self._ranks.size > 1:
            raise ConfigError("engine.together() is for one rank: run the micro-batches in a loop, or in one batch.")
        if self._device is not None:
            raise ConfigError(
                "engine.together() is for models that compute on the CPU: a device's backward runs in a thread of "
                "torch's, which cannot wait. Run the micro-batches in a loop, or in one batch."
            )
        model = self._model()
        if model is None:
            raise OffloadError("the model is gone: there is nothing to run")
        return run_together(model, self._hooks, function, iter(micro_batches), num_at_once, self._habits, self._spoiled)

    def _spoiled(self, *, is_over: bool) -> None:
        """Micro-batches have ended in the middle, some of them perhaps not yet."""
        if not is_over:
            self.failure.record(OffloadError(_STILL_RUNNING))
        elif self.optimizer is not None and not self.failure.is_known:
            self.drop_gradients()

    def step_is_due(self) -> bool:
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
        with self.failure:
            self._tiers.intake.settle()
        norm = self._verdict.norm()
        if math.isfinite(norm):
            self._verdict.scale(min(max_norm / (norm + 1e-6), 1.0))
        return norm

    def wait_for_updates(self) -> None:
        """Wait until the last step's update is done everywhere."""
        with self.failure:
            self._tiers.host.fence.wait_all()

    def synchronize(self) -> None:
        """See ``OffloadEngine.synchronize``."""
        self.wait_for_updates()
        with self.failure:
            self._ranks.barrier("synchronize()")

    def memory_bytes(self) -> tuple[int, int]:
        """Host and device memory that the engine takes now: by the kernel's count of its buffers, and as allocated."""
        arena, host = self._tiers.arena, self._tiers.host
        on_host = resident_bytes([(arena.address, arena.nbytes)]) if arena.nbytes else 0
        return on_host + host.added_bytes, 0 if self._device is None else self._device.allocated_bytes

    def unwrap(self) -> None:
        """Give the model ordinary parameters with the present values and gradients, and end it. Raises ``BudgetError``
        if memory has no room for them: nothing has changed then."""
        self.failure.check()
        model = self._model()
        if model is None:
            raise OffloadError("the model is gone: there is nothing to unwrap")
        self._check_room_for_all()
        values: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        sites: list[tuple[nn.Module, str, int]] = []
        for module in model.modules():
            for name, handle in module._parameters.items():
                if not isinstance(handle, Handle):
                    continue
                if id(handle) not in values:
                    values[id(handle)] = handle, ordinary(handle)
                sites.append((module, name, id(handle)))
        self._hooks.reset()
        self._hooks.remove()
        parameters = {key: give_back(handle, value) for key, (handle, value) in values.items()}
        for module, name, key in sites:
            module._parameters[name] = parameters[key]
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """End it, because of this ``error`` if of one: transfers in flight are waited for, memory and disk are given
        back. Safe to call twice."""
        try:
            if error is not None:  # the others learn of it before they would wait for this rank
                self._leave(error)
            self.checkpoints.finish()
        finally:
            self._leave(error)
            self.failure.record(OffloadError(_CLOSED))
            try:
                self._hooks.reset()
            finally:
                self._hooks.remove()
                self._closers.close()

    def _leave(self, error: BaseException | None) -> None:
        """This rank ends, and with an error all of them do."""
        self._ranks.leave(error)

    # What the hooks tell.

    def begin_use(self, unit: UnitSpec) -> None:
        """Compute needs the unit: wait for its weights and put them under its parameters."""
        self.failure.check()
        if self.checkpoints.is_due:
            self.checkpoints.pass_boundary()
        try:
            if self._speculative_of and graph_task() != -1:  # more gradients of the unit will come
                self._updates.speculative.invalidate(unit)
            self._uses.begin(unit, training=self._in_training())
        except FATAL as error:
            self.failure.raise_first(error)

    def end_use(self, unit: UnitSpec) -> None:
        """Compute is done with the unit for now."""
        try:
            self._uses.end(unit)
        except FATAL as error:
            self.failure.raise_first(error)

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor) -> None:
        """A gradient is complete: bring it to its home."""
        if self.optimizer is None:
            return
        self.failure.check()
        try:
            if self._speculative_of:
                self._updates.speculative.invalidate(unit)
            self._wait_for_update(unit)
            scale = self._hooks.context.gradient_scale
            self._take(unit, spec, gradient, 1.0 if scale is None else scale)
        except FATAL as error:
            self.failure.raise_first(error)
        if scale is None:
            self.progress.has_other_gradients = True
            if self._access.zeroing is Zeroing.DUE:
                self._access.zeroing = Zeroing.MISSED
        if not self._backward_has_begun:
            self._backward_has_begun = True
            self._reporter.backward_begins()
        self._policy.gradient_came(unit)
        self._policy.look()

    def end_backward(self, unit: UnitSpec) -> None:
        """The unit has all the gradients of this backward."""
        if self.optimizer is None:
            return
        try:
            self._close_gradients(unit)
        except FATAL as error:
            self.failure.raise_first(error)
        self._policy.look()

    def changed_in_use(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor) -> None:
        """A forward has given one of its own weights another value: it becomes the parameter's."""
        self._backings[spec].write(value)

    # What the optimizer asks.

    def trains(self, parameter: nn.Parameter) -> bool:
        """The parameter is one that the engine updates, or was before the engine took its value over."""
        replaced = self._replaced.get(id(parameter))
        if replaced is not None and replaced() is parameter:
            return True
        return parameter in self._specs and parameter.requires_grad

    def accept(self, parameter: nn.Parameter) -> None:
        """The parameter may join a parameter group. Raises ``ConfigError`` if the engine cannot train it."""
        specs = self._specs.get(parameter)
        if specs is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is not one that the engine holds. Give it an optimizer "
                "of its own, or put it into the model before the engine is made."
            )
        if not specs[0].trainable:
            raise ConfigError(
                f"parameter {specs[0].name} was not to be trained when the engine was made: it has no optimizer states."
            )
        if not self._verdict.groups_may_change:
            raise ConfigError("an optimizer without a kernel keeps the parameter groups that it was made with")

    def take_step(self, loss_scale: float | None = None) -> None:
        """Freeze the step, and start its update. An interrupt comes before, or when all of it is on its way."""
        with self.failure:
            self._prepare_step(loss_scale)
            with held_back():
                self._take_step(loss_scale)
        self.watch.step(self.last_report, self._optimizer.param_groups)

    def zeroing_is_done(self) -> None:
        """Nobody expects the gradients that the last step has used up to be there still."""
        self._access.zeroing = Zeroing.DONE

    def _prepare_step(self, loss_scale: float | None) -> None:
        if self.progress.loss_scale is not None and loss_scale is None and self.progress.has_other_gradients:
            raise ConfigError(
                'precision="fp16": small gradients of a loss that is not scaled come out as 0. Call '
                "engine.backward(loss), which scales it, or use torch.amp.GradScaler."
            )
        self.checkpoints.pass_boundary()
        self.checkpoints.generations.wait()
        self._hooks.reset()
        self._uses.reset()
        self._verdict.check(self._optimizer.param_groups)
        self._warn_of_lost_parameters()
        self._warn_of_used_gradients()
        self._tiers.intake.settle(f"step {self.progress.global_step + 1}")

    def _take_step(self, loss_scale: float | None) -> None:
        if loss_scale is not None and loss_scale != 1:
            self._verdict.scale(1 / loss_scale)
        norm, before_clipping = self._verdict.norm(), self._verdict.norm_before_clipping()
        self.watch.arrive()
        self.progress.begin_step()
        self._step_scale = 1.0 if loss_scale is None else loss_scale
        if self.progress.loss_scale is not None and loss_scale is None:
            self._step_scale = self.progress.loss_scale.value
            self.progress.loss_scale.update(math.isfinite(norm))
        if not math.isfinite(norm):
            error = self._verdict.non_finite(self.progress.global_step + 1)
            self.drop_gradients()
            if self.progress.loss_scale is None:
                raise error
            return
        factor = self._verdict.factor()
        if self.config.gradient_clipping:
            self._verdict.scale(min(self.config.gradient_clipping / (norm + 1e-6), 1.0))
        updates_wait = self._policy.step_taken(norm, factor)
        step = self._verdict.freeze(self._optimizer.param_groups)
        try:
            self._begin_updates(step, before_clipping, updates_wait=updates_wait)
        except BaseException as error:
            if not isinstance(error, FATAL):  # some units wait for updates that nobody will make
                self.failure.record(OffloadError(_HALF_A_STEP))
            raise
        if self._verdict.stepping:
            self._access.zeroing = Zeroing.DUE
        elif not self._has_warned_of_empty_step:
            self._has_warned_of_empty_step = True
            warn(
                "engine.optimizer.step(): no parameter has a gradient, and nothing changes. A step uses gradients up, "
                "as if zero_grad() came after it; the next backward brings new ones." + self._of_newcomers()
            )

    def _of_newcomers(self) -> str:
        """What to say of parameters that have a gradient and came into the model after the engine was made."""
        model = self._model()
        named = model.named_parameters() if model is not None else ()
        names = [name for name, parameter in named if not isinstance(parameter, Handle) and parameter.grad is not None]
        if not names:
            return ""
        return (
            f" {len(names)} parameters that came into the model later have one ({names[0]}, ...): add adapters before "
            "the engine is made, or give them an optimizer of their own."
        )

    def _warn_of_used_gradients(self) -> None:
        """Say once that the gradients of this step would have been added to those of the last one in PyTorch."""
        if self._access.zeroing is Zeroing.MISSED and not self._has_warned_of_used_gradients:
            self._has_warned_of_used_gradients = True
            warn(
                "engine.optimizer.step(): there was no zero_grad() since the last step, and nothing was added to its "
                "gradients: a step uses them up, as if zero_grad() came after it. To add up several backwards, step "
                "after the last of them. Else call zero_grad() before the backward, as for any optimizer."
            )

    def _begin_updates(self, step: Sequence[UnitUpdate], grad_norm: float, *, updates_wait: bool) -> None:
        """The step is certain: hand it to those who carry it out."""
        increment_version([p for spec in self._verdict.stepping for p in self._backings[spec].in_use])
        tiers, updates = self._tiers, self._updates
        tiers.level.outdate(self._verdict.stepping_units)
        on_host = step if updates.resident is None else updates.resident.update(step)
        tiers.host.begin_updates([update.unit for update in on_host])
        remaining = updates.speculative.confirm(on_host)
        for unit in self._verdict.stepping_units:
            tiers.intake.forget(unit)
        self._forget_what_was_expected()
        self.progress.global_step += 1
        self.checkpoints.step_taken()
        self.last_report = self._reporter.report(
            self.plan.memory, self.progress.global_step, grad_norm, self._step_scale, updates_wait=updates_wait
        )
        busy = self._reporter.disk_busy
        if busy is not None and not updates_wait:
            updates.speculative.balance(*busy)
        updates.updater.start(remaining)
        self._grow_into_device()
        tiers.level.end_step()

    def drop_gradients(self) -> None:
        """Forget the gradients that were gathered for the coming step."""
        self._hooks.refuse_others("zero_grad()")
        self.zeroing_is_done()
        self.progress.begin_step()
        self._forget_what_was_expected()
        with self.failure:
            self._tiers.intake.settle()
            self._updates.updater.drop_all()
            for unit in self._units:
                self._tiers.intake.forget(unit)

    def _forget_what_was_expected(self) -> None:
        """No gradient of the coming step is there."""
        self._backward_has_begun = False
        self._policy.forget()

    def _warn_of_lost_parameters(self) -> None:
        """Say once of each parameter that it was replaced behind the engine."""
        model = self._model()
        for name in self._hooks.lost(model) if model is not None else ():
            warn(
                f"parameter {name} is no longer in the model, and what was put in its place is not the engine's: it is "
                "not trained by engine.optimizer. Write into the parameter (parameter.data.copy_(value)) instead, or "
                "change the model before the engine is made."
            )
        replaced = self._hooks.replaced()
        if replaced:
            warn(
                f"{len(replaced)} quantised parameters ({replaced[0]}, ...) were replaced, as by a merge of adapters: "
                "what stands there is in memory beside the engine's budget, and checkpoints keep what stood there. "
                "Merge in the model that engine.unwrap() gives."
            )

    def load_checkpoint(self, path: str | os.PathLike[str] | None, tag: str | None) -> Any:
        """See ``OffloadEngine.load_checkpoint``."""
        client_state = self.checkpoints.load(path, tag)
        self.last_report = None
        return client_state

    def load_dcp(self, path: str | os.PathLike[str], *, states: bool) -> None:
        """See ``OffloadEngine.load_dcp``."""
        self.checkpoints.load_dcp(path, states=states)
        self.last_report = None

    def weights(self) -> ModelWeights:
        """All weights, to be read unit by unit, once the update is done. Raises ``ConfigError`` for a model of which
        each rank has a part."""
        if any(spec.distribution is not None for unit in self._units for spec in unit.parameters):
            raise ConfigError(
                "the model has DTensors, of which each rank has a part: save engine.state_dict() by "
                "torch.distributed.checkpoint, or the values of full_tensor()"
            )
        self.wait_for_updates()
        kind = ModelWeights if self._ranks.size == 1 else GatheredModelWeights
        return kind(self._shards, self._access, self._specs)

    # How it is made.

    def _build(self, model: nn.Module, choice: OptimizerChoice | None, birth: Birth, closers: Closers) -> None:
        metadata = ParameterMetadata(self._units)
        had_states = choice.states() if choice is not None else {}
        self._build_tiers(choice, closers)
        handles = make_handles(self._units, self._shards, self._tiers.parameters, self._access)
        of_shards = handles.of_shards(self._ranks)
        self._backings = {**handles.backings, **of_shards.backings}
        self._specs = of_shards.specs_by_parameter()
        self._take_over(model, birth, handles, closers)
        metadata.give(handles.of_model, {spec: backing.in_use[0] for spec, backing in handles.backings.items()})
        closers.callback(give_ordinary_state_dicts(self._units, self._access.spooled))
        training = None if choice is None else self._build_optimizer(model, choice, had_states, of_shards, closers)
        self._build_checkpoints(model, training, closers)
        self.bandwidths = store_bandwidths(self._tiers)
        link = None if self._tiers.on_device is None else self._tiers.on_device.link
        self._reporter = Reporter(
            self.meter,
            self._tiers.store,
            self.config.paths,
            self._copied_bytes,
            self._received_bytes,
            self._uses.busy_seconds,
            self.bandwidths,
            link or LinkRates(),
        )

    def _build_tiers(self, choice: OptimizerChoice | None, closers: Closers) -> None:
        """The tiers, the updates, and what reaches both from outside of a step."""
        config, plan = self.config, self.plan
        rule = choice.rule if choice is not None else None
        on_device = plan.device.unsupported_reason is None and rule is not None
        self._tiers = tiers = make_tiers(
            self._units,
            plan,
            config,
            self._device,
            self._ranks,
            self._parts,
            self.failure,
            self.meter,
            closers,
            sharers=self._sharers,
            squares_on_device=on_device,
            holds_gradients=lambda: self.holds_gradients,
        )
        # Asked for several times in each use of a unit.
        self._uses = tiers.uses
        self._wait_for_update = tiers.host.fence.wait if self._ranks.size == 1 else _nothing
        self._take, self._close_gradients = tiers.intake.take, tiers.intake.close
        self._speculative_of: Mapping[UnitSpec, object] = {}
        updates: Updates | None = None
        if rule is not None:
            num_backwards = config.gradient_accumulation_steps
            updates = self._updates = make_updates(
                plan, tiers, rule, self.failure, self.meter, closers, num_backwards=num_backwards
            )
            self._speculative_of = updates.speculative.of_unit
        self._access = ExternalAccess(
            Layout(plan.formats, config.dtype, rule),
            tiers.homes,
            Levels(tiers.host, tiers.level, tiers.whole),
            tiers.gradients,
            BeforeChange(
                agree=partial(self._ranks.barrier, "a change"),
                settle=tiers.intake.settle,
                invalidate=_nothing if updates is None else updates.updater.invalidate,
            ),
            self._ranks,
            self.torch_device,
            self.failure,
            Spooled(config.paths if any(plan.nvme_bytes.values()) else ()),
        )

    def _take_over(self, model: nn.Module, birth: Birth, handles: Handles, closers: Closers) -> None:
        """Values go to their homes, handles into the model, and hooks round its units."""
        config, tiers, units = self.config, self._tiers, self._units
        buffers = [slot.address for slot in tiers.slots], [lease.address for lease in tiers.tile_buffers]
        replaced = (spec.parameter for unit in units for spec in unit.parameters)
        self._replaced = {id(parameter): weakref.ref(parameter) for parameter in replaced if parameter.requires_grad}

        def value(spec: ParameterSpec) -> torch.Tensor:
            whole = birth.value(spec.whole or spec)
            return whole if spec.whole is None else spec.shard_of(self._ranks.broadcast(spec.name, whole))

        loader = Loader(tiers.homes, self._access.layout, value, *buffers)
        shown = zip(birth.shown(units), self._shards, strict=True)
        loader.load(shown, handles.at_sites, handles.of_model)
        birth.fill_rest()
        for name, buffer in model.named_buffers():
            first = self._ranks.broadcast(name, buffer)
            if first is not buffer:
                buffer.copy_(first)
        convert_statistics(model, config.dtype)
        if self._device is not None:
            closers.callback(move_to_device(model, self.torch_device))
        in_model = [
            UnitInModel(unit, window, parameters)
            for unit, window, parameters in zip(units, tiers.windows, tiers.parameters, strict=True)
        ]
        self._hooks = Hooks(
            in_model, handles.at_sites, handles.of_model, self, outside_of_graphs, one_thread=self._device is None
        )

    def _build_optimizer(
        self,
        model: nn.Module,
        choice: OptimizerChoice,
        had_states: Mapping[ParameterSpec, dict[str, Any]],
        handles: Handles,
        closers: Closers,
    ) -> Training:
        """``had_states``: what the optimizer that was given has of earlier steps."""
        gradients = self._tiers.gradients
        named_order = [spec for p in model.parameters() for spec in self._specs.get(p, ())]
        self._verdict = Verdict(self._shards, gradients, named_order, handles.of_model, choice.rule)
        states = OptimizerStates(
            choice.rule,
            self._shards,
            self._specs,
            self._backings,
            self._verdict,
            self._access,
            self.wait_for_updates,
        )
        for group, specs in choice.groups:
            group["params"] = list(dict.fromkeys(handles.of_model[spec] for spec in specs))
        groups = [group for group, _ in choice.groups]
        self.optimizer = optimizer = OffloadOptimizer(groups, self, states, self.progress, choice.source)
        self._policy = SpeculationPolicy(
            self._updates.speculative,
            self._updates.updater,
            Forecast(self.config.gradient_clipping) if self.plan.speculative else None,
            self._verdict,
            gradients,
            self._tiers.intake.complete,
            lambda: optimizer.param_groups,
            states_stored=self.plan.nvme_bytes["states"] > 0,
        )
        closers.callback(refuse_others(self.optimizer).remove)
        if had_states:
            states.replace_all({handles.of_model[spec]: of_spec for spec, of_spec in had_states.items()})
        return Training(self.optimizer, self._specs, choice.rule, self._verdict, gradients, self.drop_gradients)

    def _build_checkpoints(self, model: nn.Module, training: Training | None, closers: Closers) -> None:
        run = RunState(model, self._shards, self.progress, self.config.gradient_dtype, self.wait_for_updates, training)
        self.checkpoints = Checkpoints(
            run, self.config, self._shards, self._tiers, self._access, speculative=self.plan.speculative
        )
        generations = self.checkpoints.generations
        self._access.before.commit = generations.changing
        if self._ranks.size > 1 and self.config.durable:
            self._access.before.agree = generations.agree
        closers.callback(generations.stop)

    @property
    def _optimizer(self) -> OffloadOptimizer:
        if self.optimizer is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.optimizer

    def _check_room_for_all(self) -> None:
        """Raise ``BudgetError`` if the weights and the gradients that are there do not fit into memory."""
        numel = sum(spec.shape.numel() for unit in self._units for spec in unit.parameters)
        if self.optimizer is not None:
            numel += sum(s.whole_shape.numel() for unit in self._shards for s in self._tiers.gradients.of(unit))
        needed = numel * self.config.dtype.itemsize
        free = available_bytes() if self._device is None else self._device.free_bytes()
        if needed > free:
            raise BudgetError(
                f"the weights take {readable_bytes(needed)} as ordinary parameters, and {readable_bytes(free)} are "
                "free: the model stays the engine's.",
                needed,
            )

    def _in_training(self) -> bool:
        """The present use of a unit belongs to a step that will change it."""
        if self.optimizer is None:
            return False
        return torch.is_grad_enabled() or graph_task() != -1

    def _copied_bytes(self) -> tuple[int, int]:
        """Copied to the device and to the host, since the engine was made."""
        on_device = self._tiers.on_device
        if on_device is None:
            return 0, 0
        to_device, to_host = on_device.level.carrier.source.copied_bytes, on_device.transport.copied_bytes
        if self.optimizer is not None and self._updates.device_side is not None:
            more = self._updates.device_side.copied_bytes
            to_device, to_host = to_device + more[0], to_host + more[1]
        return to_device, to_host

    def _received_bytes(self) -> int:
        """Received from other ranks, since the engine was made."""
        return self._ranks.received_bytes

    def _grow_into_device(self) -> None:
        """After the first step it is known what activations take: units move into the rest, and copies of others."""
        on_device, plan = self._tiers.on_device, self.plan
        if on_device is None:
            return
        if self.progress.global_step > 1 or self.config.device_memory != "auto" or self.config.durable:
            return
        free_bytes = on_device.device.memory_bytes() - on_device.device.peak_bytes()
        grown = plan.grown(free_bytes)
        moving = [unit for unit in self._shards if unit.index in grown.resident - plan.device.resident]
        if any(self._tiers.gradients.of(unit) for unit in moving):  # which no parameter group has: they stay
            grown, moving = plan.device.grown(free_bytes), []
        if moving:
            self.wait_for_updates()
        with self.failure:
            try:
                on_device.growth.grow(moving, grown)
            except DeviceMemoryError:  # there is room, in pieces that are too small
                grown = plan.device.grown(free_bytes)
                on_device.growth.grow((), grown)
        if moving:
            self._updates.speculative.look_at_homes()
        self.plan = plan.with_device(grown)


def with_measured_memory(report: Report, memory: tuple[int, int]) -> Report:
    """The report with what the engine takes of host and device memory."""
    return replace(report, host_memory_bytes=memory[0], device_memory_bytes=memory[1])


def _nothing(unit: UnitSpec) -> None:
    return None
