"""``OffloadAccelerator``: an ``Accelerator`` whose trained model is stored in the engine:
docs/integrations/accelerate.md.

[Note: What save_state holds] ``Accelerator.save_state`` takes a state dict of every model before its hooks run, and one
of every optimizer after them. The engine's model and optimizer give none: the engine saves a checkpoint of its own into
the folder, and what Accelerate saves beside it (schedulers, samplers, random states, other models) stays Accelerate's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.utils import (  # type: ignore[import-untyped]
    DistributedType,
    DynamoBackend,
    convert_to_fp32,
    recursively_apply,
)
from torch import nn

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import ConfigError
from offload.integrations.clipping import clip_all
from swapper import OffloadError

_TRIED = "1.15.0"
"""The version of Accelerate that this was tried with."""

_ENGINE_FOLDER = "offload"
_ENGINE_TAG = "engine"

_WITHOUT_OTHERS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Ways of launching processes that no other engine is in."""

_SAID_ELSEWHERE = {
    "optimizer": "give the optimizer to prepare(model, optimizer)",
    **dict.fromkeys(("lr", "eps", "weight_decay"), "the optimizer has it"),
    **dict.fromkeys(("betas", "optimizer_options"), "the optimizer has them"),
    "device": "it is accelerator.device",
    "gradient_clipping": "call accelerator.clip_grad_norm_",
    "gradient_accumulation_steps": "write OffloadAccelerator(gradient_accumulation_steps=...)",
    "durable": "call accelerator.save_state",
    "keep_last": "write ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=...)",
    "keep_every": "write ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=...)",
}
"""Options of the engine that a script of Accelerate gives in another place."""


class OffloadAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` that hands the model which is prepared together with its optimizer to an ``OffloadEngine``.

    Everything else of a script stays: ``prepare``, ``backward``, ``accumulate``, ``clip_grad_norm_``, ``save_state``,
    ``load_state``. ``accelerator.engine`` is the engine.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, offload: OffloadConfig | Mapping[str, Any], **kwargs: Any) -> None:
        """``offload`` has the engine's options; the rest is Accelerate's own. Raises ``ConfigError`` for what the
        engine cannot do: fp16 and fp8, other engines, compiling of the whole model.

        Where a launcher has started several processes, the engine's ranks are Accelerate's: all train one model."""
        config = offload if isinstance(offload, OffloadConfig) else OffloadConfig(**offload)
        plain = OffloadConfig()
        for name, instead in _SAID_ELSEWHERE.items():
            if getattr(config, name) != getattr(plain, name):
                raise ConfigError(f"offload: leave {name} out, {instead}")
        super().__init__(*args, **kwargs)
        if not hasattr(self, "_models") or not hasattr(self, "_optimizers"):
            raise ImportError(f"accelerate {accelerate.__version__} keeps its models elsewhere: {_TRIED} was tried")
        self._refuse_others()
        if self.mixed_precision == "bf16":
            if config.precision not in ("auto", "bf16"):
                raise ConfigError(f'precision is {config.precision!r}, and mixed_precision "bf16": leave one out')
            config = dataclasses.replace(config, precision="bf16")
        self._config = config
        self._engine: OffloadEngine | None = None
        self._evaluated: list[OffloadEngine] = []
        self._own_optimizer: Any = None
        """The engine's optimizer, as Accelerate wraps it."""
        self._saved_elsewhere: dict[str, Any] | None = None
        """Stand-in for the model's state dict while ``save_state`` runs."""
        self._has_clipped = False

    @property
    def engine(self) -> OffloadEngine:
        """The engine of the trained model. Raises ``OffloadError`` before ``prepare(model, optimizer)``."""
        if self._engine is None:
            raise OffloadError("there is no engine yet: prepare(model, optimizer, ...) makes it")
        return self._engine

    # Preparing.

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As of any ``Accelerator``. The first model that comes with its optimizer is the engine's: the same object,
        transformed in place. Raises ``ConfigError`` for an optimizer whose model was prepared in a call before."""
        self._refuse_late_optimizers(args)
        pair = None if self._engine is not None else _pair(args)
        if pair is None:
            return super().prepare(*args, device_placement=device_placement)
        model, optimizer = pair
        engine = self._make(model, optimizer, self.gradient_accumulation_steps)
        own = self.prepare_optimizer(engine.optimizer, device_placement=False)
        model._is_accelerate_prepared = own._is_accelerate_prepared = True  # type: ignore[assignment]
        self._engine, self._own_optimizer = engine, own
        args = tuple(own if item is optimizer else item for item in args)
        prepared = super().prepare(*args, device_placement=device_placement)
        if not any(item is model for item in self._models) or not any(item is own for item in prepared):
            raise ImportError(
                f"accelerate {accelerate.__version__} has wrapped what was prepared already: {_TRIED} was tried"
            )
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """With ``evaluation_mode`` the model gets an engine of its own, without gradients and states, and
        ``save_state`` leaves it out."""
        if not evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        self._evaluated.append(self._make(model, None, 1))
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def free_memory(self, *objects: Any) -> Any:
        """As of any ``Accelerator``; engines are closed, and models have their weights again, if memory has room."""
        objects = super().free_memory(*objects)
        engines = [*self._evaluated, *([] if self._engine is None else [self._engine])]
        self._engine, self._own_optimizer, self._evaluated = None, None, []
        for engine in engines:
            engine.close()
        return objects

    def _make(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int) -> OffloadEngine:
        device = "cpu" if self.device.type == "cpu" else self.device  # Accelerate's may be "cpu:0"
        engine = OffloadEngine(
            model, self._config, optimizer=optimizer, device=device, gradient_accumulation_steps=steps
        )
        if self.mixed_precision == "bf16":
            model.register_forward_pre_hook(_give_bf16, with_kwargs=True)
            model.register_forward_hook(_take_fp32)
        return engine

    def _refuse_others(self) -> None:
        if self.distributed_type not in _WITHOUT_OTHERS:
            raise ConfigError(
                f"the engine trains without DeepSpeed, FSDP and the like, and this is {self.distributed_type}: start "
                "the script with python, torchrun or `accelerate launch --multi_gpu`, which serves the CPU, too"
            )
        if self.parallelism_config is not None:
            raise ConfigError("parallelism_config: all processes are the engine's ranks. Leave it out")
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigError(f'mixed_precision={self.mixed_precision!r}: write "bf16", or "no"')
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ConfigError("dynamo_backend: leave it out, and compile the model's blocks (block.compile())")

    def _refuse_late_optimizers(self, args: tuple[Any, ...]) -> None:
        prepared = {id(parameter) for model in self._models for parameter in model.parameters()}
        for item in args:
            if not isinstance(item, torch.optim.Optimizer) or item in self._optimizers:
                continue
            if any(id(parameter) in prepared for group in item.param_groups for parameter in group["params"]):
                raise ConfigError("the optimizer's model was prepared before it: prepare both in one call")

    # Training.

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As of any ``Accelerator``. Updates begin during backward as long as nothing has been clipped."""
        engine = self._engine
        if engine is None or kwargs or (self._has_clipped and engine.config.precision != "fp16"):
            super().backward(loss, **kwargs)
            return
        factor = engine.config.gradient_accumulation_steps / self.gradient_accumulation_steps
        engine.backward(loss if factor == 1 else loss * factor)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As of any ``Accelerator``. With the 2-norm no gradient is brought in."""
        self._has_clipped = True
        parameters = list(parameters)
        if self._engine is not None and norm_type == 2:
            norm = clip_all(self._engine, parameters, max_norm)
            if norm is not None:
                return norm
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As of any ``Accelerator``. Every gradient is brought in, one after the other."""
        self._has_clipped = True
        super().clip_grad_value_(parameters, clip_value)

    # Saving and loading.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """As of any ``Accelerator``: ordinary tensors, which lie on NVMe where the weights do."""
        if self._saved_elsewhere is not None and model is self.engine.module:
            return self._saved_elsewhere
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As of any ``Accelerator``; the engine's checkpoint is the folder ``offload`` there. See [Note: What
        save_state holds]."""
        if self._engine is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        self._engine.wait_for_checkpoint()
        self.wait_for_everyone()  # older ones may be removed now
        with self._without_its_parts(self.register_save_state_pre_hook(self._save_engine)):  # behind the script's own
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """As of any ``Accelerator``. A folder that was saved without the engine is read as it is, through memory."""
        if self._engine is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        with self._without_its_parts(self.register_load_state_pre_hook(self._load_engine)):
            super().load_state(input_dir, load_kwargs, **kwargs)

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """As of any ``Accelerator``; the engine's model is written a part at a time (``engine.save_model``)."""
        if self._engine is None or self.unwrap_model(model) is not self._engine.module or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        self._engine.save_model(save_directory, max_shard_bytes=max_shard_size)

    @contextlib.contextmanager
    def _without_its_parts(self, hook: Any) -> Iterator[None]:
        """Within, Accelerate asks the engine's model and optimizer for nothing, but calls ``hook``, which ends then."""
        optimizers, self._saved_elsewhere = self._optimizers, {}
        self._optimizers = [optimizer for optimizer in optimizers if optimizer is not self._own_optimizer]
        try:
            yield
        finally:
            hook.remove()
            self._optimizers, self._saved_elsewhere = optimizers, None

    def _save_engine(self, models: list[nn.Module], weights: list[Any], output_dir: Any) -> None:
        weights[:] = [state for state in weights if state is not self._saved_elsewhere]
        self.engine.save_checkpoint(Path(output_dir) / _ENGINE_FOLDER, _ENGINE_TAG)

    def _load_engine(self, models: list[nn.Module], input_dir: Any) -> None:
        folder = Path(input_dir) / _ENGINE_FOLDER
        if not folder.exists():
            self._optimizers.append(self._own_optimizer)
            return
        models[:] = [model for model in models if model is not self.engine.module]
        self.engine.load_checkpoint(folder, _ENGINE_TAG)


def _pair(args: tuple[Any, ...]) -> tuple[nn.Module, torch.optim.Optimizer] | None:
    """The first model whose optimizer is there, too, and that optimizer. Raises ``ConfigError`` for one with two."""
    for model in args:
        if not isinstance(model, nn.Module) or getattr(model, "_is_accelerate_prepared", False):
            continue
        own = {id(parameter) for parameter in model.parameters()}
        found = [
            item
            for item in args
            if isinstance(item, torch.optim.Optimizer)
            and any(id(parameter) in own for group in item.param_groups for parameter in group["params"])
        ]
        if len(found) > 1:
            raise ConfigError(
                f"{type(model).__name__} has {len(found)} optimizers, and the engine takes over one: give one, with a "
                "parameter group for each part of the model"
            )
        if found:
            return model, found[0]
    return None


def _give_bf16(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a forward: its floating-point inputs in the dtype of the weights."""
    return recursively_apply(torch.Tensor.bfloat16, (args, kwargs), test_type=_is_floating)


def _take_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    """After a forward: its 16-bit outputs in fp32, as Accelerate does with autocast."""
    return convert_to_fp32(output)


def _is_floating(data: Any) -> bool:
    return isinstance(data, torch.Tensor) and data.is_floating_point()
