"""The session: one private object between the user's engine, the hooks and the optimizer on one side, and tiers and
updates on the other. It translates what the model does and what a step is into calls of theirs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offload.birth.birth import Birth
from offload.checkpoint.checkpoints import Checkpoints
from offload.checkpoint.model_weights import ModelWeights
from offload.closing import Closers
from offload.config import OffloadConfig
from offload.device.protocol import Device
from offload.errors import BudgetError, ConfigError, DeviceMemoryError, warn
from offload.interrupts import held_back
from offload.memory import available_bytes, resident_bytes
from offload.model.backing import Outside, Zeroing
from offload.model.belongings import Belongings
from offload.model.handle import Handle
from offload.model.hooks import Hooks, UnitInModel
from offload.model.identity import give_back, ordinary
from offload.model.make import convert_statistics, give_ordinary_state_dicts, make_handles, move_to_device
from offload.model.state_handle import StatesOfParameter
from offload.optim.choose import OptimizerChoice
from offload.optim.loss_scale import LossScale
from offload.optim.rule import Group, options_of
from offload.optimizer import OffloadOptimizer, refuse_others
from offload.plan.plan import Plan
from offload.report.meter import Meter
from offload.report.report import Report
from offload.report.reporter import Reporter
from offload.report.trace import Span
from offload.spooled import Spooled
from offload.tiers.loading import Loader
from offload.tiers.make import make_tiers, store_bandwidths
from offload.tiers.states import States
from offload.torch_internals import graph_task
from offload.units import ParameterSpec, UnitSpec
from offload.update.make import Updates, make_updates
from offload.update.step import UnitUpdate
from offload.update.verdict import Verdict, groups_by_parameter
from offload.waiting import FATAL, Failure
from swapper import OffloadError
from swapper.errors import readable_bytes

_MASTER = "master"
"""In a state dict of the optimizer: the fp32 master of a 16-bit weight, which the weight alone does not tell."""
_CLOSED = (
    "the engine is closed, and the weights went with it: call engine.unwrap() instead of close() to keep them in the "
    "model, or take them before (state_dict)"
)
_HALF_A_STEP = (
    "optimizer.step() was interrupted half-way: some weights may have taken the step and others not. Build the model "
    "and the engine again, and go on from a checkpoint"
)
_NOT_MADE = "the engine could not be made, and parameters that it had taken over are lost: build the model again"


class Session:
    """Model, engine and optimizer keep it alive: when none of them is referred to any more, it closes by itself."""

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        units: Sequence[UnitSpec],
        plan: Plan,
        choice: OptimizerChoice | None,
        device: Device | None,
        birth: Birth,
    ) -> None:
        self.config = config
        self.plan = plan
        self.failure = Failure()
        self.meter = Meter()
        self.global_step = 0
        self.last_report: Report | None = None
        self.num_backwards = 0
        """Those of ``backward`` since the last step."""
        self._is_in_backward = False
        """``backward`` runs: gradients that come otherwise are of a backward that the user called."""
        self._has_other_gradients = False
        """Such gradients have come since the last step."""
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self._units = units
        self._device = device
        self._gradient_scale = 1.0
        """What gradients of the present backward are still to be multiplied by."""
        self._step_scale = 1.0
        self._has_warned_of_empty_step = False
        self._has_warned_of_used_gradients = False
        self._model = weakref.ref(model)
        self._groups: dict[int, Group] = {}
        """By parameter, as they are in the present backward, if it may be the last one of the step."""
        self._uses: list[Span | None] = [None] * len(units)
        """The present use of each unit by compute."""
        self._closers = Closers()
        try:
            self._build(model, choice, birth, self._closers)
        except BaseException:
            self.failure.record(OffloadError(_NOT_MADE))  # handles may stand in the model already
            self._closers.close()
            raise
        self.meter.restart()

    # What the engine asks.

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return torch.device("cpu") if self._device is None else self._device.torch_device

    @property
    def compute_is_elsewhere(self) -> bool:
        """A device computes."""
        return self._device is not None

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of ``loss``, which may be the last one of a step."""
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        steps = self.config.gradient_accumulation_steps
        last = self.num_backwards + 1 >= steps
        self._gradient_scale = 1 / scale
        self._groups = groups_by_parameter(self._optimizer.param_groups) if last else {}
        self._updates.early.begin_backward(last=last)
        self._is_in_backward = True
        self.zeroing_is_done()
        try:
            (loss.float() * scale / steps).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._hooks.close_backward()
            raise
        finally:
            self._gradient_scale = 1.0
            self._is_in_backward = False
            self._updates.early.end_backward()
        self.failure.check()
        self.num_backwards += 1

    def step_is_due(self) -> bool:
        """``gradient_accumulation_steps`` backwards are done. Raises ``ConfigError`` if they were not ``backward``,
        which divides the loss."""
        steps = self.config.gradient_accumulation_steps
        if self._has_other_gradients and steps > 1:
            raise ConfigError(
                f"engine.step() with gradient_accumulation_steps={steps} counts calls of engine.backward(loss), which "
                "divides each loss, and there are gradients of loss.backward(). Call engine.backward(loss), or divide "
                "the loss yourself and call engine.optimizer.step() when it is time."
            )
        return self._has_other_gradients or self.num_backwards >= steps

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
            self._tiers.host.wait_for_updates()

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

    def close(self) -> None:
        """End it: transfers in flight are waited for, memory and disk are given back. Safe to call twice."""
        try:
            self.checkpoints.finish()
        finally:
            self.failure.record(OffloadError(_CLOSED))
            try:
                self._hooks.reset()
            finally:
                self._hooks.remove()
                self._closers.close()

    # What the hooks tell.

    def begin_use(self, unit: UnitSpec) -> None:
        """Compute needs the unit: wait for its weights and put them under its parameters."""
        self.failure.check()
        if self.checkpoints.is_due:
            self.checkpoints.pass_boundary()
        try:
            if self._early_of and graph_task() != -1:  # more gradients of the unit will come
                self._updates.early.invalidate(unit)
            self._begin_compute(unit, training=self._in_training())
        except FATAL as error:
            self.failure.raise_first(error)
        self._uses[unit.index] = self.meter.trace.begin("compute", unit.name)

    def end_use(self, unit: UnitSpec) -> None:
        """Compute is done with the unit for now."""
        use = self._uses[unit.index]
        if use is not None:
            self.meter.trace.end(use)
        try:
            self._end_compute(unit)
        except FATAL as error:
            self.failure.raise_first(error)

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor) -> None:
        """A gradient is complete: bring it to its home."""
        if self.optimizer is None:
            return
        self.failure.check()
        early = self._updates.early
        try:
            if self._early_of:
                early.invalidate(unit)
            self._wait_for_update(unit)
            self._take(unit, spec, gradient, self._gradient_scale)
        except FATAL as error:
            self.failure.raise_first(error)
        if not self._is_in_backward:
            self._has_other_gradients = True
            if self._outside.zeroing is Zeroing.DUE:
                self._outside.zeroing = Zeroing.MISSED
        elif early.is_expecting:
            early.gradient_arrived(unit)

    def end_backward(self, unit: UnitSpec) -> None:
        """The unit has all the gradients of this backward."""
        try:
            self._close_gradients(unit)
        except FATAL as error:
            self.failure.raise_first(error)
        if self._early_of and self._updates.early.is_held(unit):
            self._updates.updater.begin_early(unit, self._verdict.freeze_unit(unit, self._groups))

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

    def zeroing_is_done(self) -> None:
        """Nobody expects the gradients that the last step has used up to be there still."""
        self._outside.zeroing = Zeroing.DONE

    def _prepare_step(self, loss_scale: float | None) -> None:
        if self.loss_scale is not None and loss_scale is None and self._has_other_gradients:
            raise ConfigError(
                'precision="fp16": small gradients of a loss that is not scaled come out as 0. Call '
                "engine.backward(loss), which scales it, or use torch.amp.GradScaler."
            )
        self.checkpoints.pass_boundary()
        self.checkpoints.wait()
        self._hooks.reset()
        self._tiers.compute.reset()
        self._verdict.check(self._optimizer.param_groups)
        self._warn_of_lost_parameters()
        self._warn_of_used_gradients()
        self._tiers.intake.settle()

    def _take_step(self, loss_scale: float | None) -> None:
        if loss_scale is not None and loss_scale != 1:
            self._verdict.scale(1 / loss_scale)
        norm, before_clipping = self._verdict.norm(), self._verdict.norm_before_clipping()
        self.num_backwards, self._has_other_gradients = 0, False
        self._step_scale = 1.0 if loss_scale is None else loss_scale
        if self.loss_scale is not None and loss_scale is None:
            self._step_scale = self.loss_scale.value
            self.loss_scale.update(math.isfinite(norm))
        if not math.isfinite(norm):
            error = self._verdict.non_finite(self.global_step + 1)
            self.drop_gradients()
            if self.loss_scale is None:
                raise error
            return
        if self.config.gradient_clipping:
            self._verdict.scale(min(self.config.gradient_clipping / (norm + 1e-6), 1.0))
        step = self._verdict.freeze(self._optimizer.param_groups)
        try:
            self._begin_updates(step, before_clipping)
        except BaseException as error:
            if not isinstance(error, FATAL):  # some units wait for updates that nobody will make
                self.failure.record(OffloadError(_HALF_A_STEP))
            raise
        if step:
            self._outside.zeroing = Zeroing.DUE
        if not step and not self._has_warned_of_empty_step:
            self._has_warned_of_empty_step = True
            warn(
                "engine.optimizer.step(): no parameter has a gradient, and nothing changes. A step uses gradients up, "
                "as if zero_grad() came after it; the next backward brings new ones."
            )

    def _warn_of_used_gradients(self) -> None:
        """Say once that the gradients of this step would have been added to those of the last one in PyTorch."""
        if self._outside.zeroing is Zeroing.MISSED and not self._has_warned_of_used_gradients:
            self._has_warned_of_used_gradients = True
            warn(
                "engine.optimizer.step(): there was no zero_grad() since the last step, and nothing was added to its "
                "gradients: a step uses them up, as if zero_grad() came after it. To add up several backwards, step "
                "after the last of them. Else call zero_grad() before the backward, as for any optimizer."
            )

    def _begin_updates(self, step: Sequence[UnitUpdate], grad_norm: float) -> None:
        """The step is certain: hand it to those who carry it out."""
        increment_version([p for spec in self._verdict.stepping for p in self._backings[spec].in_use])
        tiers, updates = self._tiers, self._updates
        tiers.compute.outdate([update.unit for update in step])
        on_host = step if updates.resident is None else updates.resident.update(step)
        tiers.host.begin_updates([update.unit for update in on_host])
        remaining = updates.early.confirm(on_host)
        for update in step:
            tiers.intake.forget(update.unit)
        self.global_step += 1
        self.checkpoints.step_taken()
        self.last_report = self._reporter.report(self.plan.memory, self.global_step, grad_norm, self._step_scale)
        updates.updater.start(remaining)
        self._grow_into_device()
        tiers.compute.end_step()

    def drop_gradients(self) -> None:
        """Forget the gradients that were gathered for the coming step."""
        self.zeroing_is_done()
        with self.failure:
            self._tiers.intake.settle()
            self._updates.early.drop_all()
            for unit in self._units:
                self._tiers.intake.forget(unit)

    def optimizer_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Copies of all optimizer states, fp32 masters of 16-bit weights included, once the update is done."""
        self.wait_for_updates()
        steps, found = self._verdict.num_steps, {}
        for unit in self._units:
            with self.failure:
                of_unit = self._states.read({spec: steps[spec] for spec in unit.trainable if spec in steps})
            for spec, states in of_unit.items():
                if self._outside.formats.master:
                    states[_MASTER] = self._backings[spec].read_master()
                found[spec] = {name: self._kept(value) for name, value in states.items()}
        return {
            parameter: self._joined({spec: found[spec] for spec in specs})
            for parameter, specs in self._specs.items()
            if specs[0] in found
        }

    def _kept(self, value: Any) -> Any:
        return self._outside.spooled.keep(value) if isinstance(value, torch.Tensor) else value

    def _joined(self, states: dict[ParameterSpec, dict[str, Any]]) -> dict[str, Any]:
        """The states of one parameter, from those of its pieces in order."""
        whole = self._states.joined(states)
        if len(states) > 1:
            if _MASTER in whole:
                whole[_MASTER] = torch.cat([of_piece[_MASTER] for of_piece in states.values()])
            whole = {name: self._kept(value) for name, value in whole.items()}
        return whole

    def set_optimizer_states(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over optimizer states by parameter. The others have taken no step."""
        by_spec = self._by_spec(states)
        others = {spec for spec in self._verdict.num_steps if spec not in by_spec}
        with self.failure:
            self._outside.changing(self._units)
            num_steps = self._states.write(_without_masters(by_spec))
            self._states.reset(others)
            self._verdict.num_steps = num_steps
        for spec, values in by_spec.items():
            if _MASTER in values:
                self._backings[spec].write_master(values[_MASTER])

    def position(self) -> dict[str, Any]:
        """Where the run stands, for a state dict of the optimizer."""
        scale = self.loss_scale
        return {
            "global_step": self.global_step,
            "loss_scale": [] if scale is None else [scale.value, scale.num_good_steps],
        }

    def set_position(self, position: dict[str, Any]) -> None:
        """Take over what ``position`` gave."""
        self.global_step = int(position["global_step"])
        if position["loss_scale"] and self.loss_scale is not None:
            self.loss_scale.value, self.loss_scale.num_good_steps = position["loss_scale"]

    def parameters_with_states(self) -> list[nn.Parameter]:
        """Those that have taken a step."""
        return [parameter for parameter, specs in self._specs.items() if specs[0] in self._verdict.num_steps]

    def states_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The states of one parameter, as handles. None are there before its first step."""
        specs = self._specs[parameter]
        if specs[0] not in self._verdict.num_steps:
            return {}

        def read() -> dict[str, Any]:
            return self._read_states({spec: self._verdict.num_steps[spec] for spec in specs})[parameter]

        def write(some: dict[str, Any]) -> None:
            self.set_states_of(parameter, {**read(), **some})

        name = specs[0].piece.whole.name if specs[0].piece is not None else specs[0].name
        return StatesOfParameter(name, read, write)

    def set_states_of(self, parameter: nn.Parameter, states: dict[str, Any]) -> None:
        """Take over the states of one parameter."""
        with self.failure:
            self._outside.changing(self._units)
            by_spec = self._by_spec({parameter: states})
            self._verdict.num_steps.update(self._states.write(_without_masters(by_spec)))

    def _read_states(self, steps: dict[ParameterSpec, int]) -> dict[nn.Parameter, dict[str, Any]]:
        self.wait_for_updates()
        with self.failure:
            states = self._states.read(steps)
        return {
            parameter: self._states.joined({spec: states[spec] for spec in specs})
            for parameter, specs in self._specs.items()
            if specs[0] in states
        }

    def _by_spec(self, states: dict[nn.Parameter, dict[str, Any]]) -> dict[ParameterSpec, dict[str, Any]]:
        found: dict[ParameterSpec, dict[str, Any]] = {}
        for parameter, values in states.items():
            if not values:
                continue
            specs = self._specs[parameter]
            found.update(self._states.split(specs, values))
            if _MASTER in values:
                for spec in specs:
                    found[spec][_MASTER] = spec.part_of(values[_MASTER])
        return found

    def _warn_of_lost_parameters(self) -> None:
        """Say once of each parameter that it was replaced behind the engine."""
        model = self._model()
        for name in self._hooks.lost(model) if model is not None else ():
            warn(
                f"parameter {name} is no longer in the model, and what was put in its place is not the engine's: it is "
                "not trained by engine.optimizer. Write into the parameter (parameter.data.copy_(value)) instead, or "
                "change the model before the engine is made."
            )

    def weights(self) -> ModelWeights:
        """All weights, to be read unit by unit, once the update is done."""
        self.wait_for_updates()
        return ModelWeights(self._units, self._tiers.homes, self._outside, self._specs)

    # What checkpoints ask.

    def run_state(self) -> dict[str, Any]:
        """All that a continuation needs beside weights and states, and what belongs to the user's objects."""
        state: dict[str, Any] = {
            "step": self.global_step,
            "num_backwards": self.num_backwards,
            "has_other_gradients": self._has_other_gradients,
            "loss_scale": None if self.loss_scale is None else (self.loss_scale.value, self.loss_scale.num_good_steps),
            "gradient_dtype": self.config.gradient_dtype,
            "buffers": dict(self._persistent_buffers()),
            "groups": [],
            "states": {},
            "gradients": {},
        }
        if self.optimizer is None:
            return state
        rule = self._outside.rule
        if rule is not None and not rule.repeatable:
            self.wait_for_updates()  # which change what it keeps beside its tiles
        for group in self.optimizer.param_groups:
            names = [spec.name for parameter in group["params"] for spec in self._specs[parameter]]
            state["groups"].append({"options": options_of(group), "parameters": names})
        for spec, step in self._verdict.num_steps.items():
            state["states"][spec.name] = {"steps": step, **(rule.loose_states(spec, step) if rule is not None else {})}
        for unit in self._units:
            for spec, known in self._tiers.gradients.of(unit).items():
                state["gradients"][spec.name] = (known.sum_squares, known.scale, known.first_asked)
        return state

    def set_run_state(
        self, state: dict[str, Any], take_gradients: Callable[[dict[str, Sequence[float]]], None]
    ) -> None:
        """Take over what ``run_state`` gave, of a run with the same parameter groups."""
        self.global_step = state["step"]
        self.last_report = None
        if state["loss_scale"] is not None and self.loss_scale is not None:
            self.loss_scale.value, self.loss_scale.num_good_steps = state["loss_scale"]
        with torch.no_grad():
            for name, buffer in self._persistent_buffers():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        if self.optimizer is None or not state["groups"]:
            return
        for own, saved_group in zip(self.optimizer.param_groups, state["groups"], strict=True):
            own.update(saved_group["options"])
        rule, saved = self._outside.rule, state["states"]
        num_steps = {}
        for unit in self._units:
            for spec in unit.trainable:
                of_spec = dict(saved.get(spec.name, {}))
                steps = of_spec.pop("steps", 0)
                if rule is not None:
                    rule.set_loose_states(spec, of_spec)
                if steps:
                    num_steps[spec] = steps
        self._verdict.num_steps = num_steps
        self.drop_gradients()
        take_gradients(state["gradients"])
        self.num_backwards, self._has_other_gradients = state["num_backwards"], state["has_other_gradients"]

    def _persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that a state dict has, by their names there."""
        model = self._model()
        for prefix, module in model.named_modules() if model is not None else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    # How it is made.

    def _build(self, model: nn.Module, choice: OptimizerChoice | None, birth: Birth, closers: Closers) -> None:
        config, plan, device, units = self.config, self.plan, self._device, self._units
        belongings = Belongings(units)
        rule = choice.rule if choice is not None else None
        had_states = choice.states() if choice is not None else {}
        on_device = plan.device is not None and plan.device.obstacle is None and rule is not None
        self._tiers = tiers = make_tiers(
            plan, config, device, self.failure, self.meter, closers, squares_on_device=on_device
        )
        # Asked for several times in each use of a unit.
        self._begin_compute, self._end_compute = tiers.compute.begin, tiers.compute.end
        self._wait_for_update = tiers.host.wait_for_update
        self._take, self._close_gradients = tiers.intake.take, tiers.intake.close
        self._early_of: Mapping[UnitSpec, object] = {}
        updates: Updates | None = None
        if rule is not None:
            updates = self._updates = make_updates(plan, tiers, rule, self.failure, self.meter, closers)
            self._early_of = updates.early.of_unit
            self._states = States(rule, units, tiers.homes)
        outside = self._outside = Outside(
            tiers.homes,
            tiers.host,
            tiers.gradients,
            tiers.compute,
            rule,
            plan.formats,
            config.dtype,
            self.torch_device,
            self.failure,
            tiers.intake.settle,
            Spooled(config.paths if any(plan.nvme_bytes.values()) else ()),
            _nothing if updates is None else updates.early.invalidate,
        )
        handles = make_handles(units, tiers.parameters, outside)
        self._backings = handles.backings
        self._specs = handles.specs_by_parameter()
        buffers = [slot.address for slot in tiers.slots], [lease.address for lease in tiers.tile_buffers]
        replaced = (spec.parameter for unit in units for spec in unit.parameters)
        self._replaced = {id(parameter): weakref.ref(parameter) for parameter in replaced if parameter.requires_grad}
        loader = Loader(tiers.homes, rule, plan.formats, config.dtype, birth.value, *buffers)
        loader.load(birth.shown(units), handles.at_sites, handles.of_model)
        birth.fill_rest()
        convert_statistics(model, config.dtype)
        if device is not None:
            closers.callback(move_to_device(model, self.torch_device))
        # Dynamo would take a device's events for a part of the graph. On the CPU there are none, and importing it costs
        # 1.5 s and 70 MB here.
        outside_of_graphs = torch.compiler.disable if device is not None else _unchanged
        in_model = [
            UnitInModel(unit, window, parameters)
            for unit, window, parameters in zip(units, tiers.windows, tiers.parameters, strict=True)
        ]
        self._hooks = Hooks(
            in_model, handles.at_sites, handles.of_model, self, outside_of_graphs, one_thread=device is None
        )
        belongings.give(handles.of_model, {spec: backing.in_use[0] for spec, backing in handles.backings.items()})
        closers.callback(give_ordinary_state_dicts(units, outside.spooled))
        self.optimizer: OffloadOptimizer | None = None
        if choice is not None:
            named_order = [spec for p in model.parameters() for spec in self._specs.get(p, ())]
            self._verdict = Verdict(units, tiers.gradients, named_order, handles.of_model, choice.rule)
            for group, specs in choice.groups:
                group["params"] = list(dict.fromkeys(handles.of_model[spec] for spec in specs))
            self.optimizer = OffloadOptimizer([group for group, _ in choice.groups], self, choice.source)
            closers.callback(refuse_others(self.optimizer).remove)
            if had_states:
                self.set_optimizer_states({handles.of_model[spec]: states for spec, states in had_states.items()})
        self.bandwidths = store_bandwidths(tiers)
        link = None if tiers.on_device is None else tiers.on_device.link
        self.checkpoints = Checkpoints(
            self, config, units, tiers, outside, self.torch_device, self.failure, early=plan.early
        )
        if self.checkpoints.committer is not None:
            outside.before_change = self.checkpoints.committer.changing
            closers.callback(self.checkpoints.committer.stop)
        self._reporter = Reporter(
            self.meter,
            tiers.store,
            self._copied_bytes,
            tiers.compute.busy_seconds,
            self.bandwidths,
            link,
        )

    @property
    def _optimizer(self) -> OffloadOptimizer:
        if self.optimizer is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.optimizer

    def _check_room_for_all(self) -> None:
        """Raise ``BudgetError`` if the weights and the gradients that are there do not fit into memory."""
        numel = sum(spec.numel for unit in self._units for spec in unit.parameters)
        if self.optimizer is not None:
            numel += sum(spec.numel for unit in self._units for spec in self._tiers.gradients.of(unit))
        needed = numel * self.config.dtype.itemsize
        free = available_bytes() if self._device is None else self._device.memory_bytes()
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
        to_device, to_host = on_device.weights.copies.copied_bytes, on_device.transport.copied_bytes
        if self.optimizer is not None and self._updates.device_side is not None:
            more = self._updates.device_side.copied_bytes
            to_device, to_host = to_device + more[0], to_host + more[1]
        return to_device, to_host

    def _grow_into_device(self) -> None:
        """After the first step it is known what activations take: units move into the rest, and copies of others."""
        on_device, plan = self._tiers.on_device, self.plan
        if on_device is None or plan.device is None:
            return
        if self.global_step > 1 or self.config.device_memory != "auto" or self.config.durable:
            return
        free_bytes = on_device.device.memory_bytes() - on_device.device.peak_bytes()
        grown = plan.grown(free_bytes)
        moving = [unit for unit in self._units if unit.index in grown.resident - plan.device.resident]
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
        self.plan = plan.with_device(grown)


def _without_masters(states: dict[ParameterSpec, dict[str, Any]]) -> dict[ParameterSpec, dict[str, Any]]:
    return {spec: {name: value for name, value in of.items() if name != _MASTER} for spec, of in states.items()}


def with_measured_memory(report: Report, memory: tuple[int, int]) -> Report:
    """The report with what the engine takes of host and device memory."""
    return replace(report, host_memory_bytes=memory[0], device_memory_bytes=memory[1])


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _nothing(unit: UnitSpec) -> None:
    return None
