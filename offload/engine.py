"""``OffloadEngine``: a model whose weights, gradients and optimizer states rest wherever there is room."""

from __future__ import annotations

import contextlib
import math
from types import TracebackType
from typing import Any

import torch
from torch import nn

import aio_ext
from offload import bandwidth
from offload.config import OffloadConfig
from offload.dtypes import kernel_dtype
from offload.errors import ConfigError, NonFiniteGradient
from offload.failure import Failure
from offload.gradients import Gradients
from offload.handle import Handle, make_handle
from offload.hooks import Hooks
from offload.layout import Formats
from offload.load import Loader
from offload.memory import available_bytes
from offload.optimizer import OffloadAdamW
from offload.plan import Plan, Tier, make_plan
from offload.report import Bandwidths, Meter, Report
from offload.residency import Weights
from offload.states import ParameterLink
from offload.unit import GradientBuffer, Residency, Slot, StateTile, Unit
from offload.units import ALIGNMENT, ParameterSpec, UnitSpec, find_units
from offload.update import Segment, UnitUpdate, Updater
from offload.window import POISON, CopyWindow, window_class
from swapper import Arena, Lease, OffloadError, Store

_AUTO_SHARE = 0.8
"""Of what is free, "auto" takes this much: activations, the loader and others need room too."""


class OffloadEngine:
    """Trains ``model`` with its state on host RAM and NVMe.

    ``engine(*inputs)`` runs the model, ``engine.backward(loss)`` and ``engine.step()`` train it; ``engine.module is
    model``, and any of its parameters can be read or written at any time. Options are the fields of ``OffloadConfig``.

    Everything is reserved here: raises ``ConfigError``, ``BudgetError`` (with ``needed_bytes``), ``StoreUnsafe``,
    ``StoreLocked`` or ``StorageFull`` before the model is touched. Call ``close`` at the end, or use it in ``with``.
    """

    def __init__(self, model: nn.Module, config: OffloadConfig | None = None, **options: Any) -> None:
        self.config = OffloadConfig.of(config, options)
        self.module = model
        self.global_step = 0
        self._closed = contextlib.ExitStack()
        if any(isinstance(p, Handle) for p in model.parameters()):
            raise ConfigError("the model is wrapped already; close its engine first")
        _check_backend(self.config.io_backend)
        specs = find_units(model)
        if not specs:
            raise ConfigError("the model has no floating-point parameters: there is nothing to offload")
        formats = Formats.of(self.config)
        self.plan: Plan = self._make_plan(specs, formats)
        self._formats = formats
        self._failure = Failure()
        self._meter = Meter()
        self._micro_step = 0
        self._num_steps: dict[ParameterSpec, int] = {}
        self._last_report: Report | None = None
        self._grad_norm: float | None = None
        try:
            self._build()
        except BaseException:
            self._closed.close()
            raise
        self._meter.restart()

    # What a training loop calls.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Floating-point inputs are cast to the weights' dtype."""
        self._failure.check()
        cast = lambda item: (  # noqa: E731
            item.to(self.config.dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item
        )
        args, kwargs = torch.utils._pytree.tree_map(cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss`` (divided by ``gradient_accumulation_steps``) and bring them home."""
        self._failure.check()
        self._require_training()
        try:
            (loss / self.config.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._hooks.close_backward()
            raise
        self._failure.check()
        self._micro_step += 1

    def step(self) -> None:
        """Take an optimizer step with the gradients since the last one. Returns at once: the update runs behind.

        Does nothing until ``gradient_accumulation_steps`` calls of ``backward`` have been made. Raises
        ``NonFiniteGradient`` if a gradient is NaN or infinite: the gradients are dropped and nothing else has changed.
        """
        optimizer = self._require_training()
        if self._micro_step >= self.config.gradient_accumulation_steps:
            optimizer.step()  # through the optimizer, so that schedulers see it

    def synchronize(self) -> None:
        """Wait until the last step's update is done everywhere. Training never needs it."""
        with self._failure.guard():
            self._weights.wait_for_updates()

    def report(self) -> Report:
        """What the last step did. Raises ``OffloadError`` before the first one."""
        if self._last_report is None:
            raise OffloadError("no step has been taken yet: there is nothing to report")
        return self._last_report

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
        self._hooks.reset()
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
        with self._failure.guard():
            unit.window.open(self._weights.acquire(unit))

    def end_use(self, unit: Unit) -> None:
        """Compute is done with the unit for now."""
        unit.window.close()
        self._weights.release(unit)

    def take_gradient(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor) -> None:
        """A gradient is complete: bring it home."""
        if self.config.optimizer is None:
            return
        with self._failure.guard():
            self._weights.wait_for_update(unit)
            self._gradients.add(unit, spec, gradient)

    def end_backward(self, unit: Unit) -> None:
        """The unit has all the gradients of this backward."""
        self._gradients.close(unit)

    # How it is built.

    def _make_plan(self, specs: list[UnitSpec], formats: Formats) -> Plan:
        config = self.config
        host = config.host_memory
        host_bytes = int(available_bytes() * _AUTO_SHARE) if host == "auto" else int(host)
        nvme = config.nvme_capacity
        nvme_bytes = (1 << 62 if nvme == "auto" else int(nvme)) if config.paths else 0
        tile_bytes = None if config.tile_bytes == "auto" else int(config.tile_bytes)
        return make_plan(specs, formats, host_bytes, nvme_bytes, tile_bytes, copies=window_class() is CopyWindow)

    def _build(self) -> None:
        plan, config, formats = self.plan, self.config, self._formats
        training = config.optimizer is not None
        extent_sizes = []
        for item in plan.units:
            if item.weights is Tier.NVME:
                extent_sizes.append(item.unit.numel * formats.weights)
            if item.grads is Tier.NVME:
                extent_sizes.append(item.unit.trainable_numel * formats.grads)
            extent_sizes += [tile.numel * formats.states for tile, tier in item.tiles if tier is Tier.NVME]
        self._store: Store | None = None
        if extent_sizes:
            self._store = Store(config.paths, extent_sizes, backend=config.io_backend)
        arena = Arena(plan.arena_bytes)
        self._closed.callback(arena.close)
        if self._store is not None:
            self._closed.callback(self._store.close)
            self._store.register(arena)
        largest = max(item.unit.numel for item in plan.units) * config.dtype.itemsize
        self._units = self._make_units(arena, aio_ext.Pattern(largest, POISON))
        slots = [Slot(arena.lease(plan.slot_bytes)) for _ in range(plan.staging.num_slots)]
        grad_buffers = [
            GradientBuffer(arena.lease(plan.grad_buffer_bytes)) for _ in range(plan.staging.num_grad_buffers)
        ]
        tile_buffers = [arena.lease(plan.tile_buffer_bytes) for _ in range(plan.staging.num_tile_buffers)]

        self._weights = Weights(self._units, slots, self._store, self._failure, self._meter, config.prefetch)
        self._closed.callback(self._weights.drain)
        self._handles = handles = self._make_handles()
        by_name = {spec.name: spec for spec in handles}
        self._named_order = [by_name[name] for name, _ in self.module.named_parameters() if name in by_name]
        Loader(self._store, formats, slots, tile_buffers).load(self.module, self._units, handles)
        self.bandwidths = self._measure(slots, tile_buffers)
        self._gradients = Gradients(grad_buffers, self._store, config.gradient_dtype, self._meter)
        self._closed.callback(self._gradients.drain)
        self._hooks = Hooks(self._units, handles, self)
        self._add_state_dict_hooks()
        if training:
            self._updater = Updater(
                tile_buffers,
                self._store,
                formats,
                self._weights,
                self._gradients,
                self._failure,
                self._meter,
                grad_dtype=kernel_dtype(config.gradient_dtype),
            )
            self._closed.callback(self._updater.stop)
        self.optimizer = self._make_optimizer(handles) if training else None
        self._moved = self._moved_bytes()

    def _make_units(self, arena: Arena, poison: aio_ext.Pattern) -> list[Unit]:
        """Each unit with its window, its homes in RAM and its extents in the store."""
        make_window = window_class()
        extents = iter(self._store.extents if self._store is not None else ())
        units = []
        for item in self.plan.units:
            spec = item.unit
            window = make_window(spec.numel, self.config.dtype, poison)
            parameters = [
                nn.Parameter(window.flat[p.offset : p.offset + p.numel].view(p.shape), requires_grad=p.trainable)
                for p in spec.parameters
            ]
            window.close()
            unit = Unit(item, window, parameters)
            if item.weights is Tier.HOST:
                unit.weights_home = arena.lease(spec.numel * self._formats.weights)
                unit.residency = Residency.RESIDENT
            else:
                unit.weights_extent = next(extents)
            if item.grads is Tier.HOST:
                unit.grads_home = arena.lease(spec.trainable_numel * self._formats.grads)
            else:
                unit.grads_extent = next(extents)
            for tile, tier in item.tiles:
                home = arena.lease(tile.numel * self._formats.states) if tier is Tier.HOST else None
                unit.tiles.append(StateTile(tile.start, tile.stop, home, None if home else next(extents)))
            units.append(unit)
        return units

    def _make_handles(self) -> dict[ParameterSpec, nn.Parameter]:
        return {
            spec: make_handle(
                ParameterLink(unit, spec, self._weights, self._store, self._formats, self._failure),
                spec.shape,
                self.config.dtype,
                torch.device("cpu"),
                spec.trainable,
            )
            for unit in self._units
            for spec in unit.spec.parameters
        }

    def _make_optimizer(self, handles: dict[ParameterSpec, nn.Parameter]) -> OffloadAdamW:
        config = self.config
        return OffloadAdamW(
            [handle for spec, handle in handles.items() if spec.trainable],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            take_step=self._take_step,
            drop_gradients=self._drop_gradients,
        )

    def _add_state_dict_hooks(self) -> None:
        """State dicts hold ordinary tensors, so that whoever saves them needs to know nothing of handles."""

        def replace(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in module._parameters:
                value = state_dict.get(prefix + name)
                if isinstance(value, Handle):
                    state_dict[prefix + name] = value.value()

        for module in {module for unit in self._units for module in unit.spec.modules}:
            hook = module.register_state_dict_post_hook(replace)  # type: ignore[no-untyped-call]
            self._closed.callback(hook.remove)

    def _measure(self, slots: list[Slot], tile_buffers: list[Lease]) -> Bandwidths | None:
        """The store's bandwidth, on what is most of its bytes."""
        tiles = [tile.extent for unit in self._units for tile in unit.tiles if tile.extent is not None]
        weights = [unit.weights_extent for unit in self._units if unit.weights_extent is not None]
        for extents, buffers in ((tiles, tile_buffers), (weights, [slot.lease for slot in slots])):
            if extents and len(buffers) > 1:
                assert self._store is not None
                return bandwidth.measure(self._store, extents, buffers)
        return None

    # How a step is frozen.

    def _take_step(self) -> None:
        self._failure.check()
        self._micro_step = 0
        self._hooks.reset()
        norm = self._global_norm()
        clipping = self.config.gradient_clipping
        clip_factor = min(clipping / (norm + 1e-6), 1.0) if clipping else 1.0
        updates = self._freeze_updates(clip_factor)
        for update in updates:
            self._gradients.forget(update.unit)
        self._grad_norm = norm
        self.global_step += 1
        self._last_report = self._make_report()
        self._weights.begin_updates([update.unit for update in updates])
        self._updater.start(updates)

    def _global_norm(self) -> float:
        """The norm of all gradients of the coming step. Raises ``NonFiniteGradient`` and drops them if it has none."""
        by_spec = {spec: value for unit in self._units for spec, value in unit.sum_squares.items()}
        total = sum(by_spec[spec] for spec in self._named_order if spec in by_spec)
        if math.isfinite(total):
            return math.sqrt(total)
        bad = next(spec.name for spec in self._named_order if spec in by_spec and not math.isfinite(by_spec[spec]))
        self._drop_gradients()
        raise NonFiniteGradient(
            f"step {self.global_step + 1}: the gradient of {bad} is not finite. The step was not taken: weights and "
            "states are unchanged. Lower the learning rate, clip gradients, or look at this batch."
        )

    def _freeze_updates(self, grad_scale: float) -> list[UnitUpdate]:
        """What the step does to each unit that has gradients, with the groups' settings as they are now."""
        assert self.optimizer is not None
        groups = {id(handle): group for group in self.optimizer.param_groups for handle in group["params"]}
        updates = []
        for unit in self._units:
            segments = self._segments(unit, groups, grad_scale)
            if segments:
                updates.append(UnitUpdate(unit, tuple(segments)))
        return updates

    def _segments(self, unit: Unit, groups: dict[int, dict[str, Any]], grad_scale: float) -> list[Segment]:
        """The unit's parameters that have a gradient and a group; neighbours that take the same step are one."""
        assert self.optimizer is not None
        segments: list[Segment] = []
        for spec in unit.spec.parameters:
            group = groups.get(id(self._handles[spec]))
            if spec not in unit.sum_squares or spec.numel == 0 or group is None:
                continue
            self._num_steps[spec] = self._num_steps.get(spec, 0) + 1
            coef = self.optimizer.coefficients(group, self._num_steps[spec], grad_scale)
            last = segments[-1] if segments else None
            if last is not None and last.coef == coef and spec.offset - last.stop < ALIGNMENT:
                segments[-1] = Segment(last.start, spec.offset + spec.numel, coef)
            else:
                segments.append(Segment(spec.offset, spec.offset + spec.numel, coef))
        return segments

    def _drop_gradients(self) -> None:
        for unit in self._units:
            self._gradients.forget(unit)

    def _require_training(self) -> OffloadAdamW:
        if self.optimizer is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.optimizer

    # What a step is reported as.

    def _make_report(self) -> Report:
        seconds, stalls, update_seconds = self._meter.restart()
        read_bytes, write_bytes = self._moved_bytes()
        moved, self._moved = (read_bytes - self._moved[0], write_bytes - self._moved[1]), (read_bytes, write_bytes)
        compute_seconds = max(seconds - sum(stalls.values()), 0.0)
        nvme_seconds = self.bandwidths.seconds(*moved) if self.bandwidths is not None else 0.0
        return Report(
            step=self.global_step,
            seconds=seconds,
            bound_seconds=max(compute_seconds, nvme_seconds),
            bound_by="compute" if compute_seconds >= nvme_seconds else "nvme",
            compute_seconds=compute_seconds,
            nvme_seconds=nvme_seconds,
            update_seconds=update_seconds,
            stall_seconds=stalls,
            nvme_read_bytes=moved[0],
            nvme_write_bytes=moved[1],
            host_memory_bytes=self.plan.host_bytes,
            memory=self.plan.memory,
            io_backend=None if self._store is None else self._store.backend,
            grad_norm=self._grad_norm,
        )

    def _moved_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to NVMe since the engine was made."""
        if self._store is None:
            return 0, 0
        statistics = self._store.statistics()
        return statistics.read.bytes, statistics.write.bytes


def _check_backend(name: str) -> None:
    """The slow portable backend is taken when it is asked for, never silently. Raises ``ConfigError``."""
    missing = aio_ext.unavailable_backends()
    if name == "auto" and "threads" in missing:
        name = "threads"
    if name in missing:
        raise ConfigError(f"io_backend {name!r} does not work here: {missing[name]}")
