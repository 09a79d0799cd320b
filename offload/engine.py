"""``OffloadEngine``: a model whose weights, gradients and optimizer states rest wherever there is room."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offload.build import build
from offload.choose import Choice, choose, has_kernel
from offload.compute import DeviceCompute
from offload.config import OffloadConfig
from offload.errors import ConfigError, DeviceMemoryError
from offload.failure import Failure
from offload.handle import Handle
from offload.hooks import Hooks
from offload.loss_scale import LossScale
from offload.optimizer import OffloadOptimizer
from offload.plan import Plan
from offload.planning import check_backend, open_device, plan_for
from offload.report import Meter, Report
from offload.reporter import Reporter
from offload.rule import Group
from offload.unit import Unit
from offload.units import ParameterSpec, find_units
from offload.update import Updater
from offload.verdict import Verdict, groups_by_parameter
from swapper import OffloadError, StorageError


class OffloadEngine:
    """Trains ``model`` with its state on a device, in host RAM and on NVMe, as far as each goes.

    ``engine(*inputs)`` runs the model, ``engine.backward(loss)`` and ``engine.step()`` train it; so does PyTorch's own
    loop with ``engine.optimizer``. ``engine.module is model``, and any of its parameters can be read or written at any
    time. Options are the fields of ``OffloadConfig``.

    Everything is reserved here: raises ``ConfigError``, ``BudgetError`` (with ``needed_bytes``), ``StoreUnsafe``
    or ``StorageFull`` before the model is touched. Call ``close`` at the end, or use it in ``with``.
    """

    def __init__(self, model: nn.Module, config: OffloadConfig | None = None, **options: Any) -> None:
        self.config = OffloadConfig.of(config, options)
        self.module = model
        self.global_step = 0
        self._closed = contextlib.ExitStack()
        if any(isinstance(p, Handle) for p in model.parameters()):
            raise ConfigError("the model is wrapped already; close its engine first")
        check_backend(self.config.io_backend)
        specs = find_units(model, in_pieces=has_kernel(self.config.optimizer))
        if not specs:
            raise ConfigError("the model has no floating-point parameters: there is nothing to offload")
        choice = choose(self.config, specs)
        self._device = open_device(self.config.device)
        self._plan: Plan = plan_for(self.config, specs, choice, self._device)
        self._failure = Failure()
        self._meter = Meter()
        self._micro_step = 0
        self._loss_scale = LossScale() if self.config.precision == "fp16" else None
        self._backward_scale = 1.0
        self._step_scale = 1.0
        self._groups: dict[int, Group] | None = None
        """Of the step that the present backward is the last one of; None at any other time."""
        self._last_report: Report | None = None
        try:
            self._build(choice)
        except BaseException:
            self._closed.close()
            raise
        self._meter.restart()

    @property
    def plan(self) -> Plan:
        """Where everything rests, and what a step moves and takes. ``print`` it."""
        seconds = {}
        if self.bandwidths is not None:
            seconds["nvme"] = self.bandwidths.seconds(self._plan.step_read_bytes, self._plan.step_write_bytes)
        if self._last_report is not None:
            seconds["compute"] = self._last_report.compute_seconds
        return replace(self._plan, seconds=seconds)

    # What a training loop calls.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Floating-point inputs are cast to the weights' dtype."""
        self._failure.check()
        args, kwargs = torch.utils._pytree.tree_map(self._as_input, (args, kwargs))
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss`` (divided by ``gradient_accumulation_steps``) and bring them home."""
        self._failure.check()
        self._require_training()
        scale = self._loss_scale.value if self._loss_scale is not None else 1.0
        self._backward_scale = 1 / scale
        self._begin_speculating()
        try:
            (loss.float() * scale / self.config.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._hooks.close_backward()
            raise
        finally:
            self._backward_scale = 1.0
            self._groups = None
        self._failure.check()
        self._micro_step += 1

    def step(self) -> None:
        """Take an optimizer step with the gradients since the last one. Returns at once: the update runs behind.

        Does nothing until ``gradient_accumulation_steps`` calls of ``backward`` have been made. Raises
        ``NonFiniteGradient`` if a gradient is NaN or infinite: the gradients are dropped and nothing else has changed.
        With ``precision="fp16"`` that is part of training: the step is skipped and the loss scale halved.
        """
        optimizer = self._require_training()
        if self._micro_step >= self.config.gradient_accumulation_steps:
            optimizer.step()  # through the optimizer, so that schedulers see it

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; the norm before. Moves no bytes.

        As ``torch.nn.utils.clip_grad_norm_``. A norm that is not finite scales nothing; ``step`` says so.
        """
        self._require_training()
        self._failure.check()
        self._compute.settle()
        norm = self._verdict.norm()
        if math.isfinite(norm):
            self._verdict.scale(min(max_norm / (norm + 1e-6), 1.0))
        return torch.tensor(norm, device=self._torch_device)

    def synchronize(self) -> None:
        """Wait until the last step's update is done everywhere. Training never needs it."""
        with self._failure.guard():
            self._weights.wait_for_updates()

    def report(self) -> Report:
        """What the last step did. Raises ``OffloadError`` before the first one."""
        if self._last_report is None:
            raise OffloadError("no step has been taken yet: there is nothing to report")
        return self._last_report

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what the last step did, and when, to the file ``path``: a trace that ui.perfetto.dev opens.

        Tracks: the uses of units by compute, what the training thread waited for, updates, and each read and write.
        Raises ``OffloadError`` before the first step.
        """
        self.report()
        self._meter.trace.write(Path(path))

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with ordinary tensors: it holds the whole model in memory."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load weights into the model. Each master becomes exactly the weight; moments stay."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def close(self) -> None:
        """End the engine: what is in flight is waited for, memory and disk are given back. Safe to call twice.

        The model's parameters lose their values; take what you need before (``state_dict``).
        """
        self._failure.record(OffloadError("the engine is closed"))
        self._weights.wake()
        try:
            self._hooks.reset()
        finally:
            self._hooks.remove()
            self._closed.close()

    def __del__(self) -> None:
        if hasattr(self, "_hooks"):
            self.close()

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What the hooks tell.

    def begin_use(self, unit: Unit) -> None:
        """Compute needs the unit: wait for its weights and put them under its parameters."""
        try:
            if unit.speculation is not None:
                self._updater_of_training.drop(unit)
            self._compute.begin(unit, training=self._in_training())
        except StorageError as error:
            self._failure.raise_first(error)
        unit.use = self._meter.trace.begin("compute", unit.name)

    def end_use(self, unit: Unit) -> None:
        """Compute is done with the unit for now."""
        if unit.use is not None:
            self._meter.trace.end(unit.use)
        try:
            self._compute.end(unit)
        except StorageError as error:
            self._failure.raise_first(error)

    def take_gradient(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor) -> None:
        """A gradient is complete: bring it home."""
        if self.config.optimizer is None:
            return
        try:
            if unit.speculation is not None:
                self._updater_of_training.drop(unit)
            if unit.updating:
                self._weights.wait_for_update(unit)
            self._compute.take_gradient(unit, spec, gradient, self._backward_scale)
        except StorageError as error:
            self._failure.raise_first(error)
        unit.num_arrived += 1
        if self._groups is not None and unit.weights_shadow is not None:
            self._promise_early_update(unit)

    def end_backward(self, unit: Unit) -> None:
        """The unit has all the gradients of this backward."""
        try:
            self._compute.end_backward(unit)
        except StorageError as error:
            self._failure.raise_first(error)
        if unit.promised:
            self._begin_early_update(unit)

    # What the optimizer asks.

    def take_step(self) -> None:
        """Freeze the step, and start its update."""
        optimizer = self._require_training()
        self._failure.check()
        self._micro_step = 0
        self._hooks.reset()
        self._compute.settle()
        norm = self._verdict.norm()
        if self._loss_scale is not None:
            self._step_scale = self._loss_scale.value
            self._loss_scale.update(math.isfinite(norm))
        if not math.isfinite(norm):
            error = self._verdict.non_finite(self.global_step + 1)
            self.drop_gradients()
            if self._loss_scale is None:
                raise error
            return
        if self.config.gradient_clipping:
            self._verdict.scale(min(self.config.gradient_clipping / (norm + 1e-6), 1.0))
        updates = self._verdict.freeze(optimizer.param_groups)
        self._compute.outdate([update.unit for update in updates])
        on_host = self._compute.update(updates)
        self._weights.begin_updates([update.unit for update in on_host])
        remaining = self._updater_of_training.settle(on_host)
        for update in updates:
            self._compute.forget_gradients(update.unit)
        for unit in self._units:
            self._updater_of_training.drop(unit)  # one that takes no part in the step after all
        self.global_step += 1
        self._last_report = self._reporter.report(self._plan, self.global_step, norm, self._step_scale)
        self._updater_of_training.start(remaining)
        self._grow_into_device()
        self._compute.end_step()

    def drop_gradients(self) -> None:
        """Forget what was gathered for the coming step."""
        self._compute.settle()
        for unit in self._units:
            self._updater_of_training.drop(unit)
            self._compute.forget_gradients(unit)

    def optimizer_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Copies of all optimizer states, once the update is done."""
        self.synchronize()
        assert self._tiles is not None
        with self._failure.guard():
            states = self._tiles.read_states(self._units, self._verdict.num_steps)
        return {
            parameter: self._tiles.joined({spec: states[spec] for spec in specs})
            for parameter, specs in self._specs.items()
            if specs[0] in states
        }

    def set_optimizer_states(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over optimizer states by parameter."""
        self.synchronize()
        assert self._tiles is not None
        by_spec: dict[ParameterSpec, dict[str, Any]] = {}
        for parameter, values in states.items():
            if values:
                by_spec.update(self._tiles.split(self._specs[parameter], values))
        for unit in self._units:
            self._updater_of_training.drop(unit)
        with self._failure.guard():
            self._verdict.num_steps = self._tiles.write_states(self._units, by_spec)

    # How the device takes part.

    @property
    def _torch_device(self) -> torch.device:
        return torch.device("cpu") if self._device is None else self._device.torch_device

    def _as_input(self, item: Any) -> Any:
        """A tensor as the model wants it: on its device, and in the weights' dtype if it is floating-point."""
        if not isinstance(item, torch.Tensor):
            return item
        dtype = self.config.dtype if item.is_floating_point() else item.dtype
        return item.to(self._torch_device, dtype, non_blocking=self._device is not None)

    def _in_training(self) -> bool:
        """The present use of a unit belongs to a step that will change it."""
        if self.config.optimizer is None:
            return False
        return torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1

    def _grow_into_device(self) -> None:
        """After the first step it is known what activations take: units move to the rest, and copies of the others."""
        device, compute, plan = self._device, self._compute, self._plan
        if self.global_step > 1 or self.config.device_memory != "auto" or device is None or plan.device is None:
            return
        assert isinstance(compute, DeviceCompute) and self._tiles is not None
        free_bytes = device.memory_bytes() - device.peak_bytes()
        grown = plan.grown(free_bytes)
        moving = [unit for unit in self._units if unit.spec.index in grown.homes and not unit.on_device]
        if any(unit.gradients for unit in moving):  # which no parameter group has: they stay where they are
            grown, moving = plan.device.grown(free_bytes), []
        if moving:
            self.synchronize()
        with self._failure.guard():
            try:
                compute.grow(moving, self._weights, self._tiles, grown)
            except DeviceMemoryError:  # there is room, in pieces that are too small
                grown = plan.device.grown(free_bytes)
                compute.grow((), self._weights, self._tiles, grown)
        self._plan = plan.with_device(grown)

    # How updates begin during backward.

    def _begin_speculating(self) -> None:
        """The coming backward may be the last of the step: see [Note: Why an early update harms nothing]."""
        for unit in self._units:
            unit.num_expected = unit.num_arrived or len(unit.spec.trainable)
            unit.num_arrived = 0
        last = self._micro_step + 1 >= self.config.gradient_accumulation_steps
        self._groups = groups_by_parameter(self._require_training().param_groups) if last else None

    def _promise_early_update(self, unit: Unit) -> None:
        """All gradients of a unit have come while compute still holds its weights: its update may be next."""
        if unit.in_backward and not unit.promised and unit.num_arrived == unit.num_expected:
            unit.promised = self._updater_of_training.promise(unit)

    def _begin_early_update(self, unit: Unit) -> None:
        unit.promised = False
        update = None
        if self._groups is not None and all(math.isfinite(g.sum_squares) for g in unit.gradients.values()):
            update = self._verdict.freeze_unit(unit, self._groups)
        if update is not None:
            self._updater_of_training.speculate(update)
        else:
            self._updater_of_training.renounce(unit)

    def _build(self, choice: Choice | None) -> None:
        rule = choice.rule if choice is not None else None
        had_states = choice.states() if choice is not None else {}
        parts = build(
            self.module,
            self._plan,
            self.config,
            rule,
            self._device,
            self._failure,
            self._meter,
            self._closed,
        )
        self._store, self._units = parts.store, parts.units
        self._specs: dict[nn.Parameter, list[ParameterSpec]] = {}
        """The model's parameters, each with its spec, or those of its pieces in order."""
        for spec, parameter in parts.parameters.items():
            self._specs.setdefault(parameter, []).append(spec)
        self._weights, self._compute, self._updater = parts.weights, parts.compute, parts.updater
        self._tiles, self.bandwidths = parts.tiles, parts.bandwidths
        # Dynamo would take a device's events for a part of the graph. On the CPU there are none, and importing it costs
        # 1.5 s and 70 MB here.
        outside = torch.compiler.disable if self._device is not None else _unchanged
        self._hooks = Hooks(self._units, parts.handles, parts.parameters, self, outside)
        self._add_state_dict_hooks()
        self.optimizer: OffloadOptimizer | None = None
        if choice is not None:
            named_order = [spec for p in self.module.parameters() for spec in self._specs.get(p, ())]
            self._verdict = Verdict(self._units, named_order, parts.parameters, choice.rule)
            for group, specs in choice.groups:
                group["params"] = list(dict.fromkeys(parts.parameters[spec] for spec in specs))
            self.optimizer = OffloadOptimizer([group for group, _ in choice.groups], self, choice.source)
            if had_states:
                self.set_optimizer_states({parts.parameters[spec]: states for spec, states in had_states.items()})
        self._reporter = Reporter(self._meter, parts.store, parts.compute, parts.bandwidths, parts.link)

    def _add_state_dict_hooks(self) -> None:
        """State dicts hold ordinary tensors, so that whoever saves them needs to know nothing of handles."""

        def replace(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in module._parameters:
                value = state_dict.get(prefix + name)
                if isinstance(value, Handle):
                    state_dict[prefix + name] = value.value_on_host()

        for module in {site.module for unit in self._units for spec in unit.spec.parameters for site in spec.owners}:
            hook = module.register_state_dict_post_hook(replace)  # type: ignore[no-untyped-call]
            self._closed.callback(hook.remove)

    @property
    def _updater_of_training(self) -> Updater:
        assert self._updater is not None
        return self._updater

    def _require_training(self) -> OffloadOptimizer:
        if self.optimizer is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.optimizer


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
