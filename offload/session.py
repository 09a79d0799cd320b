"""The session: what the engine's class asks of the parts that the assembly has tied together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from offload.assembly.parts import Assembly, Trained
from offload.checkpoint.safetensors.model_weights import ModelWeights
from offload.errors import BudgetError, ConfigError, warn
from offload.memory import resident_bytes
from offload.model.identity import OrdinaryParameters
from offload.model.under_way import touch
from offload.optimizer import OffloadOptimizer
from offload.plan.plan import Drives, Plan
from offload.report.report import ExpertUse, Report
from offload.tiers.activations.pool import ActivationPool
from swapper import OffloadError
from swapper.errors import readable_bytes

_GIVEN_BACK = "the engine is closed, and the model has its weights again: make a new engine to train on"
_GONE = (
    "the engine is closed, and the weights went with it: there was no room for them in memory, or nobody wanted them. "
    "Save them before (engine.save_model, engine.save_checkpoint)"
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
    def trained(self) -> Trained:
        """The parts that train. Raises ``ConfigError`` for an engine that does not."""
        if self.parts.trained is None:
            raise ConfigError("the engine was made with optimizer=None: it does not train")
        return self.parts.trained

    @property
    def torch_device(self) -> torch.device:
        """The device that the model computes on."""
        return self.parts.run.processor.torch_device

    @property
    def plan(self) -> Plan:
        """The plan as it is now."""
        return self.parts.growth.plan

    def plan_so_far(self) -> Plan:
        """The plan for steps whose tokens are sent to as many experts as of late, that use units in the order of the
        last one, and whose micro-batches run together if they did so last."""
        cache, passes = self.parts.tiers.host.cache, self.parts.together.passes
        plan = self.plan.with_use(*cache.experts.recent)
        if not plan.device.computes:  # which keeps units of its own
            plan = replace(plan, first_uses=tuple(cache.first_use(item.unit) for item in plan.units))
        return plan if passes is None else replace(plan, passes=passes)

    @property
    def last_report(self) -> Report | None:
        """Of the last step, if one was taken here."""
        return self.parts.reporter.last

    @property
    def drives(self) -> Drives | None:
        """Mover of the store's bytes and its rates; None if nothing was measured."""
        store = self.parts.tiers.store
        return None if store is None or self.bandwidths is None else Drives(store.backend, self.bandwidths)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of ``loss``, which may be the last one of a step."""
        self.trained.step.zeroing_is_done()
        hooks, progress = self.parts.hooks, self.progress
        scale = progress.loss_scale.value if progress.loss_scale is not None else 1.0
        context = hooks.context
        context.gradient_scale = 1 / scale
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

    def save_checkpoint(self, path: str | os.PathLike[str], tag: str | None, client_state: object) -> None:
        """See ``OffloadEngine.save_checkpoint``."""
        touch("saves a checkpoint")  # with the gradients of so many micro-batches
        self._store_writes()
        self.checkpoints.save(path, tag, client_state)

    def save_dcp(self, path: str | os.PathLike[str]) -> None:
        """See ``OffloadEngine.save_dcp``."""
        self._store_writes()
        self.checkpoints.save_dcp(path)

    def _store_writes(self) -> None:
        """Bring to where weights are stored what a program has written elsewhere: to resident blocks, and to tensors
        over memory that parameters had."""
        self.parts.resident.store()
        self.parts.aliases.take_all()

    def wait_for_updates(self) -> None:
        """Wait until the last step's update is done everywhere."""
        with self.failure:
            self.parts.tiers.host.fence.wait_all()

    def synchronize(self) -> None:
        """See ``OffloadEngine.synchronize``."""
        self.wait_for_updates()
        with self.failure:
            if self.parts.trained is not None:
                self.parts.trained.updates.updater.wait_for_step()
            self.parts.tiers.host.drain()
        with self.failure:
            self.parts.ranks.barrier("synchronize()")

    def expert_use(self) -> ExpertUse:
        """See ``OffloadEngine.expert_use``."""
        return self.parts.reporter.expert_use()

    @property
    def activation_pool(self) -> ActivationPool:
        """See ``OffloadEngine.activation_pool``."""
        if not self.parts.activations.pools:
            raise ConfigError(
                'no memory was set aside: give the engine activations="nvme" (or "host"), and activation_memory'
            )
        return self.parts.activations.pools[0]

    def memory_bytes(self) -> tuple[int, int]:
        """Host and device memory that the engine takes now: by the kernel's count of its buffers, and as allocated."""
        arena, host = self.parts.tiers.arena, self.parts.tiers.host
        arenas = [arena, *(pool.memory for pool in self.parts.activations.pools)]
        on_host = resident_bytes([(each.address, each.nbytes) for each in arenas if each.nbytes])
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
        self._store_writes()
        self.wait_for_updates()
        return self.parts.model_weights(run.shards, self.parts.access, self.parts.specs)

    def load_checkpoint(self, path: str | os.PathLike[str] | None, tag: str | None) -> Any:
        """See ``OffloadEngine.load_checkpoint``."""
        self._end_uses()
        client_state = self.checkpoints.load(path, tag)
        self.parts.aliases.refresh()
        self.parts.reporter.last = None
        return client_state

    def load_dcp(self, path: str | os.PathLike[str], *, states: bool) -> None:
        """See ``OffloadEngine.load_dcp``."""
        self._end_uses()
        self.checkpoints.load_dcp(path, states=states)
        self.parts.aliases.refresh()
        self.parts.reporter.last = None

    def _end_uses(self) -> None:
        """End what an exception has left in use, and what is resident."""
        self.parts.hooks.reset()
        self.parts.tiers.computing.uses.reset()

    def unwrap(self) -> None:
        """Give the model ordinary parameters with the present values and gradients, and end it. Raises ``BudgetError``
        if memory has no room for them: nothing has changed then."""
        self.failure.check()
        model = self.parts.model()
        if model is None:
            raise OffloadError("the model is gone: there is nothing to unwrap")
        needed, free = self._room_for_all()
        if needed > free:
            raise BudgetError(
                f"the weights take {readable_bytes(needed)} as ordinary parameters, and {readable_bytes(free)} are "
                "free: the model stays the engine's.",
                needed,
            )
        self._end_uses()
        self._store_writes()
        self._end(OrdinaryParameters(model), None)

    def close(self, error: BaseException | None = None, *, discard: bool = False) -> None:
        """End it, because of this ``error`` if of one: transfers in flight are waited for, memory and disk are given
        back. The model gets its weights again if memory has room for them, unless ``discard`` says that nobody wants
        them. Safe to call twice."""
        values, is_wanted = None, not discard
        if error is not None:
            self.parts.ranks.leave(error)  # the others learn of it before they would wait for this rank
            durable = bool(self.parts.run.config.durable)
            is_hasty = durable and isinstance(error, SystemExit)  # a signal: there is little time
            discard = discard or is_hasty or not self.parts.ranks.can_meet()
        try:
            if is_wanted and self.parts.ranks.can_meet() and not self.failure.is_known:
                with contextlib.suppress(*(() if error is None else (OffloadError,))):  # the error says more
                    self.parts.hooks.reset()  # what it has left in use
                    self._store_writes()
            if not discard and not self.failure.is_known:
                values = self._values_if_there_is_room(error)
        finally:
            self._end(values, error)

    def _end(self, values: OrdinaryParameters | None, error: BaseException | None) -> None:
        ranks, hooks = self.parts.ranks, self.parts.hooks
        try:
            self.checkpoints.finish(error)
        finally:
            ranks.leave(error)
            self.failure.record(OffloadError(_GONE if values is None else _GIVEN_BACK))
            self.parts.together.left.wait()
            try:
                hooks.reset()
            finally:
                hooks.remove()
                if values is not None:
                    values.install()
                self.parts.closers.close()

    def _values_if_there_is_room(self, error: BaseException | None) -> OrdinaryParameters | None:
        """None, with a warning if steps are lost by it: they are not in memory, and in no checkpoint."""
        model = self.parts.model()
        if model is None:
            return None
        needed, free = self._room_for_all()
        if self.parts.ranks.all("the end (close())", needed <= free):
            self.parts.access.to_be_zeroed.clear()  # nobody reads the gradients that go along
            try:
                return OrdinaryParameters(model)
            except Exception:  # the store's, or torch's of memory
                if error is None:
                    raise
                return None  # by the same error, most likely: that one says more
        lost = self.checkpoints.saved.num_lost
        if lost:
            warn(
                f"the weights take {readable_bytes(needed)}, and {readable_bytes(free)} are free: they go with the "
                f"engine, and {lost} steps since they were last saved. Call engine.save_checkpoint(dir), or "
                "engine.save_model(dir), before close(); close(discard=True) ends the engine without a word"
            )
        return None

    def _room_for_all(self) -> tuple[int, int]:
        """Bytes that the weights and the gradients that are there take as ordinary parameters, those of all ranks that
        share the memory, and the bytes that are free."""
        run, gradients = self.parts.run, self.parts.tiers.gradients
        numel = sum(spec.shape.numel() for unit in run.units for spec in unit.parameters)
        numel += sum(spec.whole_shape.numel() for unit in run.shards for spec in gradients.of(unit))
        sharers = len(self.parts.ranks.world.local_ranks) if self.torch_device.type == "cpu" else 1
        return sharers * numel * run.config.dtype.itemsize, run.processor.free_bytes()
