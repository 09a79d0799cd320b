"""The session: what the engine's class asks of the parts that the assembly has tied together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload.access import Zeroing
from offload.assembly.assemble import Assembly
from offload.checkpoint.safetensors.model_weights import ModelWeights
from offload.errors import BudgetError, ConfigError
from offload.memory import resident_bytes
from offload.model.handle import Handle
from offload.model.identity import give_back, ordinary
from offload.optimizer import OffloadOptimizer
from offload.plan.plan import Drives, Plan
from offload.report.report import Report
from offload.step import Step
from swapper import OffloadError
from swapper.errors import readable_bytes

_CLOSED = (
    "the engine is closed, and the weights went with it: call engine.unwrap() instead of close() to keep them in the "
    "model, or take them before (state_dict)"
)


class Session:
    """Model, engine and optimizer keep its parts alive: when none of them is referred to any more, they are closed."""

    def __init__(self, parts: Assembly) -> None:
        self.parts = parts
        self.failure = parts.failure
        self.watch = parts.watch
        self.meter = parts.meter
        self.progress = parts.progress
        self.holding = parts.holding
        self.checkpoints = parts.checkpoints
        self.bandwidths = parts.bandwidths

    @property
    def optimizer(self) -> OffloadOptimizer | None:
        """None: nothing is trained."""
        return None if self.parts.trained is None else self.parts.trained.optimizer

    @property
    def step(self) -> Step:
        """Raises ``ConfigError`` for an engine that does not train."""
        if self.parts.trained is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.parts.trained.step

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return self.parts.run.processor.torch_device

    @property
    def plan(self) -> Plan:
        """What rests where now."""
        return self.parts.growth.plan

    @property
    def last_report(self) -> Report | None:
        """Of the last step, if one was taken here."""
        return self.parts.reporter.last

    @property
    def drives(self) -> Drives | None:
        """What the store is read and written by, and how fast; None if nothing was measured."""
        store = self.parts.tiers.store
        return None if store is None or self.bandwidths is None else Drives(store.backend, self.bandwidths)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of ``loss``, which may be the last one of a step."""
        hooks, progress = self.parts.hooks, self.progress
        scale = progress.loss_scale.value if progress.loss_scale is not None else 1.0
        context = hooks.context
        context.gradient_scale = 1 / scale
        self.zeroing_is_done()
        try:
            steps = self.parts.run.config.gradient_accumulation_steps
            (loss.float() * scale / steps).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            hooks.close_backward()
            raise
        finally:
            context.gradient_scale = None
        self.failure.check()
        self.watch.saw_loss(loss, is_first=progress.num_backwards == 0)
        progress.num_backwards += 1

    def together(
        self, micro_batches: Iterable[Any], function: Callable[[Any], Any], num_at_once: int | None
    ) -> list[Any]:
        """See ``OffloadEngine.together``."""
        return self.parts.together.run(micro_batches, function, num_at_once)

    def zeroing_is_done(self) -> None:
        """Nobody expects the gradients that the last step has used up to be there still."""
        self.parts.access.zeroing = Zeroing.DONE
        self.parts.access.gradients.forget_used()

    def wait_for_updates(self) -> None:
        """Wait until the last step's update is done everywhere."""
        with self.failure:
            self.parts.tiers.host.fence.wait_all()

    def synchronize(self) -> None:
        """See ``OffloadEngine.synchronize``."""
        self.wait_for_updates()
        with self.failure:
            self.parts.ranks.barrier("synchronize()")

    def memory_bytes(self) -> tuple[int, int]:
        """Host and device memory that the engine takes now: by the kernel's count of its buffers, and as allocated."""
        arena, host = self.parts.tiers.arena, self.parts.tiers.host
        on_host = resident_bytes([(arena.address, arena.nbytes)]) if arena.nbytes else 0
        return on_host + host.added_bytes, self.parts.run.processor.allocated_bytes

    def weights(self) -> ModelWeights:
        """All weights, to be read unit by unit, once the update is done. Raises ``ConfigError`` for a model of which
        each rank has a part."""
        run = self.parts.run
        if any(spec.distribution is not None for unit in run.units for spec in unit.parameters):
            raise ConfigError(
                "the model has DTensors, of which each rank has a part: save engine.state_dict() by "
                "torch.distributed.checkpoint, or the values of full_tensor()"
            )
        self.wait_for_updates()
        return self.parts.model_weights(run.shards, self.parts.access, self.parts.specs)

    def load_checkpoint(self, path: str | os.PathLike[str] | None, tag: str | None) -> Any:
        """See ``OffloadEngine.load_checkpoint``."""
        client_state = self.checkpoints.load(path, tag)
        self.parts.reporter.last = None
        return client_state

    def load_dcp(self, path: str | os.PathLike[str], *, states: bool) -> None:
        """See ``OffloadEngine.load_dcp``."""
        self.checkpoints.load_dcp(path, states=states)
        self.parts.reporter.last = None

    def unwrap(self) -> None:
        """Give the model ordinary parameters with the present values and gradients, and end it. Raises ``BudgetError``
        if memory has no room for them: nothing has changed then."""
        self.failure.check()
        model, hooks = self.parts.model(), self.parts.hooks
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
        hooks.reset()
        hooks.remove()
        parameters = {key: give_back(handle, value) for key, (handle, value) in values.items()}
        for module, name, key in sites:
            module._parameters[name] = parameters[key]
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """End it, because of this ``error`` if of one: transfers in flight are waited for, memory and disk are given
        back. Safe to call twice."""
        ranks, hooks = self.parts.ranks, self.parts.hooks
        try:
            if error is not None:  # the others learn of it before they would wait for this rank
                ranks.leave(error)
            self.checkpoints.finish()
        finally:
            ranks.leave(error)
            self.failure.record(OffloadError(_CLOSED))
            try:
                hooks.reset()
            finally:
                hooks.remove()
                self.parts.closers.close()

    def _check_room_for_all(self) -> None:
        """Raise ``BudgetError`` if the weights and the gradients that are there do not fit into memory."""
        run, gradients = self.parts.run, self.parts.tiers.gradients
        numel = sum(spec.shape.numel() for unit in run.units for spec in unit.parameters)
        numel += sum(spec.whole_shape.numel() for unit in run.shards for spec in gradients.of(unit))
        needed, free = numel * run.config.dtype.itemsize, run.processor.free_bytes()
        if needed > free:
            raise BudgetError(
                f"the weights take {readable_bytes(needed)} as ordinary parameters, and {readable_bytes(free)} are "
                "free: the model stays the engine's.",
                needed,
            )
