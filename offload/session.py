"""The session: one private object between the user's engine, the hooks and the optimizer on one side, and tiers and
updates on the other. It translates what the model does and what a step is into calls of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.closing import Closers
from offload.config import OffloadConfig
from offload.device.protocol import Device
from offload.errors import ConfigError, DeviceMemoryError
from offload.memory import resident_bytes
from offload.model.backing import Outside
from offload.model.hooks import Hooks, UnitInModel
from offload.model.make import give_ordinary_state_dicts, make_handles, move_to_device
from offload.optim.choose import OptimizerChoice
from offload.optim.loss_scale import LossScale
from offload.optim.rule import Group
from offload.optimizer import OffloadOptimizer
from offload.plan.plan import Plan
from offload.report.meter import Meter
from offload.report.report import Report
from offload.report.reporter import Reporter
from offload.report.trace import Span
from offload.tiers.loading import Loader
from offload.tiers.make import make_tiers, store_bandwidths
from offload.tiers.states import States
from offload.torch_internals import graph_task
from offload.units import ParameterSpec, UnitSpec
from offload.update.make import Updates, make_updates
from offload.update.verdict import Verdict, groups_by_parameter
from offload.waiting import FATAL, Failure
from swapper import OffloadError

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
    ) -> None:
        self.config = config
        self.plan = plan
        self.failure = Failure()
        self.meter = Meter()
        self.global_step = 0
        self.last_report: Report | None = None
        self.num_backwards = 0
        """Since the last step."""
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self._units = units
        self._device = device
        self._gradient_scale = 1.0
        """What gradients of the present backward are still to be multiplied by."""
        self._step_scale = 1.0
        self._groups: dict[int, Group] = {}
        """By parameter, as they are in the present backward, if it may be the last one of the step."""
        self._uses: list[Span | None] = [None] * len(units)
        """The present use of each unit by compute."""
        self._closers = Closers()
        try:
            self._build(model, choice, self._closers)
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
        try:
            (loss.float() * scale / steps).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._hooks.close_backward()
            raise
        finally:
            self._gradient_scale = 1.0
            self._updates.early.end_backward()
        self.failure.check()
        self.num_backwards += 1

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

    def close(self) -> None:
        """End it: transfers in flight are waited for, memory and disk are given back. Safe to call twice."""
        self.failure.record(OffloadError("the engine is closed"))
        try:
            self._hooks.reset()
        finally:
            self._hooks.remove()
            self._closers.close()

    # What the hooks tell.

    def begin_use(self, unit: UnitSpec) -> None:
        """Compute needs the unit: wait for its weights and put them under its parameters."""
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
        early = self._updates.early
        try:
            if self._early_of:
                early.invalidate(unit)
            self._wait_for_update(unit)
            self._take(unit, spec, gradient, self._gradient_scale)
        except FATAL as error:
            self.failure.raise_first(error)
        if early.is_expecting:
            early.gradient_arrived(unit)

    def end_backward(self, unit: UnitSpec) -> None:
        """The unit has all the gradients of this backward."""
        try:
            self._close_gradients(unit)
        except FATAL as error:
            self.failure.raise_first(error)
        if self._early_of and self._updates.early.is_held(unit):
            self._updates.updater.begin_early(unit, self._verdict.freeze_unit(unit, self._groups))

    # What the optimizer asks.

    def take_step(self) -> None:
        """Freeze the step, and start its update."""
        with self.failure:
            self._take_step()

    def _take_step(self) -> None:
        self.num_backwards = 0
        self._hooks.reset()
        self._tiers.intake.settle()
        norm = self._verdict.norm()
        if self.loss_scale is not None:
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
        tiers, updates = self._tiers, self._updates
        tiers.compute.outdate([update.unit for update in step])
        on_host = step if updates.resident is None else updates.resident.update(step)
        tiers.host.begin_updates([update.unit for update in on_host])
        remaining = updates.early.confirm(on_host)
        for update in step:
            tiers.intake.forget(update.unit)
        self.global_step += 1
        self.last_report = self._reporter.report(self.plan.memory, self.global_step, norm, self._step_scale)
        updates.updater.start(remaining)
        self._grow_into_device()
        tiers.compute.end_step()

    def drop_gradients(self) -> None:
        """Forget the gradients that were gathered for the coming step."""
        with self.failure:
            self._tiers.intake.settle()
            self._updates.early.drop_all()
            for unit in self._units:
                self._tiers.intake.forget(unit)

    def optimizer_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Copies of all optimizer states, once the update is done."""
        self.wait_for_updates()
        with self.failure:
            states = self._states.read(self._verdict.num_steps)
        return {
            parameter: self._states.joined({spec: states[spec] for spec in specs})
            for parameter, specs in self._specs.items()
            if specs[0] in states
        }

    def set_optimizer_states(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over optimizer states by parameter."""
        by_spec: dict[ParameterSpec, dict[str, Any]] = {}
        for parameter, values in states.items():
            if values:
                by_spec.update(self._states.split(self._specs[parameter], values))
        with self.failure:
            self._outside.changing(self._units)
            self._verdict.num_steps = self._states.write(by_spec)

    # How it is made.

    def _build(self, model: nn.Module, choice: OptimizerChoice | None, closers: Closers) -> None:
        config, plan, device, units = self.config, self.plan, self._device, self._units
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
            _nothing if updates is None else updates.early.invalidate,
        )
        handles = make_handles(units, outside)
        self._specs = handles.specs_by_parameter()
        buffers = [slot.address for slot in tiers.slots], [lease.address for lease in tiers.tile_buffers]
        loader = Loader(tiers.homes, rule, plan.formats, config.dtype, *buffers)
        loader.load(model, units, handles.at_sites, handles.of_model)
        if device is not None:
            closers.callback(move_to_device(model, self.torch_device))
        # Dynamo would take a device's events for a part of the graph. On the CPU there are none, and importing it costs
        # 1.5 s and 70 MB here.
        outside_of_graphs = torch.compiler.disable if device is not None else _unchanged
        in_model = [
            UnitInModel(unit, window, parameters)
            for unit, window, parameters in zip(units, tiers.windows, tiers.parameters, strict=True)
        ]
        self._hooks = Hooks(in_model, handles.at_sites, handles.of_model, self, outside_of_graphs)
        closers.callback(give_ordinary_state_dicts(units))
        self.optimizer: OffloadOptimizer | None = None
        if choice is not None:
            named_order = [spec for p in model.parameters() for spec in self._specs.get(p, ())]
            self._verdict = Verdict(units, tiers.gradients, named_order, handles.of_model, choice.rule)
            for group, specs in choice.groups:
                group["params"] = list(dict.fromkeys(handles.of_model[spec] for spec in specs))
            self.optimizer = OffloadOptimizer([group for group, _ in choice.groups], self, choice.source)
            if had_states:
                self.set_optimizer_states({handles.of_model[spec]: states for spec, states in had_states.items()})
        self.bandwidths = store_bandwidths(tiers)
        link = None if tiers.on_device is None else tiers.on_device.link
        self._reporter = Reporter(
            self.meter, tiers.store, self._copied_bytes, tiers.compute.busy_seconds, self.bandwidths, link
        )

    @property
    def _optimizer(self) -> OffloadOptimizer:
        if self.optimizer is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.optimizer

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
        if self.global_step > 1 or self.config.device_memory != "auto":
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


def with_measured_memory(report: Report, memory: tuple[int, int]) -> Report:
    """The report with what the engine takes of host and device memory."""
    return replace(report, host_memory_bytes=memory[0], device_memory_bytes=memory[1])


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _nothing(unit: UnitSpec) -> None:
    return None
