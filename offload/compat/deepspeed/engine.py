"""The object that ``initialize`` returns: an ``OffloadEngine`` under the names that DeepSpeed's engine has."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.compat.deepspeed.process import local_rank, num_ranks, rank
from offload.compat.deepspeed.translation import Translation
from offload.engine import OffloadEngine
from offload.errors import ConfigError, NonFiniteGradient, warn
from swapper import OffloadError, StoreMissing


@dataclass
class _Position:
    """Counts that are kept beside the engine, as checkpoints save them."""

    micro_steps: int = 0
    skipped_steps: int = 0
    tag: str = ""
    """Of the checkpoint that it is saved in."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class DeepSpeedEngine:
    """Trains as a script of DeepSpeed expects it: ``loss = engine(batch)``, ``engine.backward(loss)``,
    ``engine.step()`` for every micro-batch. ``engine.engine`` is the ``OffloadEngine``. What is not here is the
    module's.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        translation: Translation,
        lr_scheduler: Any,
        built: torch.optim.Optimizer | None = None,
    ) -> None:
        """``built``: the script's optimizer, which the engine has taken over."""
        self.engine = engine
        self._stepped = engine.optimizer if built is None else built  # a scheduler on ``built`` sees its steps
        self.module: nn.Module = engine.module
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.local_rank, self.global_rank = local_rank(), rank()
        self.world_size = self.dp_world_size = num_ranks()
        self._translation = translation
        self._position = _Position()
        self._boundary: bool | None = None
        """Answer that ``set_gradient_accumulation_boundary`` was given."""
        self._step_applied = False
        engine.register_for_checkpointing(self._position, *([] if lr_scheduler is None else [lr_scheduler]))

    # Training.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.engine(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute the gradients of ``loss``, divided by ``gradient_accumulation_steps`` (not with
        ``scale_wrt_gas=False``), and return it as it was divided."""
        if retain_graph:
            raise ConfigError(
                "backward(retain_graph=True): the engine's backward uses the graph up. Add the losses, and call "
                "backward once"
            )
        steps = self.gradient_accumulation_steps()
        with contextlib.nullcontext() if self.is_gradient_accumulation_boundary() else self.no_sync():
            self.engine.backward(loss if scale_wrt_gas else loss * steps)
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary of gradient accumulation: clip, update, step the scheduler with ``lr_kwargs``. Else nothing.

        A step with a gradient that is not finite is left out, as in DeepSpeed, with fp16 and bf16; the scheduler stays
        then, too.
        """
        at_boundary = self.is_gradient_accumulation_boundary()
        self._position.micro_steps += 1
        self._step_applied = False
        if not at_boundary:
            return
        self._step_applied = self._take_step()
        if not self._step_applied:
            self._position.skipped_steps += 1
            return
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._print_step()

    def _take_step(self) -> bool:
        """Take the step; False if it was left out. Not ``engine.step``: who sets the boundary himself may come to it
        after any number of backwards."""
        optimizer, before = self._stepped, self.global_steps
        if optimizer is None:
            raise ConfigError("step(): there is no optimizer. Name one in the configuration, or give one to initialize")
        try:
            optimizer.step()
        except NonFiniteGradient as error:
            if not self._translation.skips_non_finite:
                raise
            warn(f"the step is left out: {' '.join(str(error).split())}")
        return self.global_steps > before

    def _print_step(self) -> None:
        every = self._translation.steps_per_print
        if self.global_rank != 0 or not every or self.global_steps % every:
            return
        report = self.engine.report()
        line = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, norm={report.grad_norm}"
        if self._translation.prints_times:
            waits = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.stall_seconds.items())
            line += f", {report.seconds:.3f} s ({report.bound_by} bounds it), waits: {waits} s"
        print(line, flush=True)

    def is_gradient_accumulation_boundary(self) -> bool:
        """The coming ``step`` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self._position.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say yourself, from now on, whether ``step`` updates the weights."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """The last ``step`` has updated the weights."""
        return self._step_applied

    def zero_grad(self) -> None:
        """Drop gradients that no step has used."""
        if self.engine.optimizer is not None:
            self.engine.optimizer.zero_grad()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's mode."""
        return self.train(False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within, ranks exchange no gradients, if they hold those of the whole model (stages 0 and 1)."""
        return self.engine.no_sync()

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Does nothing: gradients are exchanged when they are complete."""

    # What is asked of it.

    @property
    def optimizer(self) -> Any:
        """The optimizer that ``initialize`` has returned."""
        return self.engine.optimizer

    @property
    def device(self) -> torch.device:
        """Device that the model computes on."""
        device = self.engine.config.device
        return torch.device(device if isinstance(device, (str, torch.device)) else device.torch_device)

    @property
    def config(self) -> dict[str, Any]:
        """The ``ds_config``, as it was read."""
        return self._translation.config

    @property
    def global_steps(self) -> int:
        """Optimizer steps done. Those that were left out do not count; they are ``skipped_steps``."""
        return self.engine.global_step

    @property
    def micro_steps(self) -> int:
        """Calls of ``step``."""
        return self._position.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out since a gradient was not finite."""
        return self._position.skipped_steps

    @property
    def global_samples(self) -> int:
        """Samples that steps were taken with."""
        return self.global_steps * self.train_batch_size()

    def gradient_accumulation_steps(self) -> int:
        return self._translation.batch.steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._translation.batch.micro

    def train_batch_size(self) -> int:
        return self._translation.batch.train

    def get_batch_info(self) -> tuple[int, int, int]:
        """``train_batch_size``, ``train_micro_batch_size_per_gpu`` and ``gradient_accumulation_steps``."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        return self.engine.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """Stage that the configuration names."""
        return self._translation.stage

    def zero_optimization(self) -> bool:
        return self._translation.stage > 0

    def fp16_enabled(self) -> bool:
        return self.engine.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.engine.config.precision == "bf16"

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; None before the first one."""
        try:
            return self.engine.report().grad_norm
        except OffloadError:
            return None

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The betas, or the momentum, of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    # Files.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that a continuation needs as ``save_dir/tag``, the scheduler too; ``tag`` is "global_stepN" unless
        it is given. See ``OffloadEngine.save_checkpoint``."""
        if not save_latest or exclude_frozen_parameters:
            what = "exclude_frozen_parameters=True" if exclude_frozen_parameters else "save_latest=False"
            raise ConfigError(f"save_checkpoint({what}): a checkpoint is whole, and becomes the latest. Leave it out")
        self._position.tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.engine.save_checkpoint(save_dir, self._position.tag, client_state or {})
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint: the latest, or the one with this tag. Returns its path and ``client_state``; without
        ``tag``, ``(None, {})`` with a warning if there is none. See ``OffloadEngine.load_checkpoint``."""
        if load_module_only or not load_optimizer_states or not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: all of a checkpoint is loaded. For the weights alone write them with `offload export "
                "CHECKPOINT DIR`, and load those before initialize"
            )
        scheduler = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        try:
            client_state = self.engine.load_checkpoint(load_dir, None if tag is None else str(tag))
        except StoreMissing:
            if tag is not None:
                raise
            warn(f"load_checkpoint: there is no checkpoint in {load_dir}, and nothing was loaded")
            return None, {}
        if scheduler is not None and not load_lr_scheduler_states:
            self.lr_scheduler.load_state_dict(scheduler)
        return str(Path(load_dir) / self._position.tag), client_state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights, in the dtype that they have, into ``save_dir``: as ``torch.save`` does, or for a
        name that ends in ``.safetensors`` as ``OffloadEngine.save_model`` does, with its names. All ranks call it; one
        writes."""
        if exclude_frozen_parameters:
            raise ConfigError("save_16bit_model(exclude_frozen_parameters=True): a model is saved whole. Leave it out")
        folder = Path(save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if save_filename.endswith(".safetensors"):
            self.engine.save_model(folder)
            return True
        if self.global_rank != 0:  # its engine gives what the writer wants
            return True
        partial = folder / f".{save_filename}.partial"
        try:
            torch.save(self.engine.state_dict(), partial)
            partial.replace(folder / save_filename)
        finally:
            partial.unlink(missing_ok=True)
        return True

    save_fp16_model = save_16bit_model

    # The rest.

    def destroy(self) -> None:
        """End the engine: see ``OffloadEngine.close``."""
        self.engine.close()

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or not hasattr(module, name):
            raise AttributeError(f"neither the engine nor the module {type(module).__name__} has {name!r}")
        return getattr(module, name)
