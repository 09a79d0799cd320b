"""``initialize``: from what a script of DeepSpeed gives to an engine, its optimizer, a data loader and a scheduler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from offload.compat.deepspeed.engine import DeepSpeedEngine
from offload.compat.deepspeed.process import join_ranks, num_ranks, rank
from offload.compat.deepspeed.reading import given
from offload.compat.deepspeed.table import table_of
from offload.compat.deepspeed.translation import Translation, translate
from offload.engine import OffloadEngine
from offload.errors import ConfigError

_printed: set[str] = set()
"""Tables that this process has printed."""

Parts = tuple[DeepSpeedEngine, Any, Any, Any]
"""The engine, its optimizer, the data loader and the scheduler, or None in the places of the last three."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Parts:
    """The engine over ``model``, its optimizer, a loader over ``training_data`` and the scheduler.

    ``config`` is a ``ds_config``: a dict, a path or JSON text, or ``args.deepspeed_config``. ``optimizer`` and
    ``lr_scheduler``, which may be functions of the parameters and of the optimizer, go before those of the file. Prints
    what becomes of each key to stderr, once. All ranks call it together.

    Raises ``ConfigError`` for a configuration that cannot be, before anything is allocated, and what ``OffloadEngine``
    raises.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize: model= is needed, a torch.nn.Module, got {type(model).__name__}")
    if mpu is not None or mesh_param is not None:
        raise ConfigError(
            "initialize: each rank computes with the whole model, on data of its own: leave mpu and mesh_param out"
        )
    join_ranks()
    chosen = given(args, config, config_params)
    own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    translation = translate(chosen, args, own)
    if optimizer is not None:
        translation = translation.replaced("optimizer")
    if lr_scheduler is not None:
        translation = translation.replaced("scheduler")
    if translation.scheduler is not None:
        translation.scheduler.check_complete()
    own = _built(optimizer, model, model_parameters)
    options = _options(translation, model, own, model_parameters)
    _print_once(translation)
    try:
        engine = OffloadEngine(model, **options)
    except ConfigError as error:
        error.args = (translation.in_keys(str(error.args[0])), *error.args[1:])
        raise
    try:
        scheduler = _scheduler(translation, engine, lr_scheduler)
        wrapped = DeepSpeedEngine(engine, translation, scheduler, own)
        if training_data is not None:
            wrapped.training_dataloader = _loader(training_data, translation, collate_fn, wrapped.device)
    except BaseException:
        engine.close()
        raise
    return wrapped, engine.optimizer, wrapped.training_dataloader, scheduler


def _options(
    translation: Translation, model: nn.Module, own: torch.optim.Optimizer | None, model_parameters: Any
) -> dict[str, Any]:
    """The options of the engine."""
    options: dict[str, Any] = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    part = translation.optimizer
    if own is not None:
        options["optimizer"] = own
    elif part is None:
        options["optimizer"] = None
    elif (groups := _groups(model, model_parameters)) is not None:
        options["optimizer"] = part.build(groups)
    else:
        options |= part.options()
    return {**options, **translation.engine_options}


def _groups(model: nn.Module, model_parameters: Any) -> list[Any] | None:
    """Parameters or groups, if they say more than that all of the model is trained."""
    if model_parameters is None:
        return None
    found = [model_parameters] if isinstance(model_parameters, torch.Tensor) else list(model_parameters)
    if any(isinstance(item, dict) for item in found):
        return found
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return found if {id(parameter) for parameter in found if parameter.requires_grad} != trained else None


def _built(optimizer: Any, model: nn.Module, model_parameters: Any) -> torch.optim.Optimizer | None:
    """The optimizer that was given, or what the function that was given makes of the parameters."""
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters() if model_parameters is None else model_parameters))
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"initialize: optimizer is a {type(optimizer).__name__}, and no torch.optim.Optimizer")
    return optimizer


def _scheduler(translation: Translation, engine: OffloadEngine, lr_scheduler: Any) -> Any:
    """The scheduler that was given, or is named in the file."""
    if lr_scheduler is not None:
        built = hasattr(lr_scheduler, "step")
        return lr_scheduler if built else lr_scheduler(engine.optimizer)
    if translation.scheduler is None or engine.optimizer is None:
        return None
    return translation.scheduler.make(engine.optimizer)


def _loader(
    data: Any, translation: Translation, collate_fn: Callable[..., Any] | None, device: torch.device
) -> DataLoader[Any]:
    """Batches of ``train_micro_batch_size_per_gpu`` samples, shuffled where that can be. Each rank has its part of the
    dataset; an ``IterableDataset`` is asked by each for its own."""
    if not isinstance(data, Dataset) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise ConfigError(f"initialize: training_data is a {type(data).__name__}, and no dataset of torch")
    can_be_shuffled = not isinstance(data, IterableDataset)
    sampler: DistributedSampler[Any] | None = DistributedSampler(data) if can_be_shuffled and num_ranks() > 1 else None
    return DataLoader(
        data,
        batch_size=translation.batch.micro,
        shuffle=True if can_be_shuffled and sampler is None else None,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=translation.drop_last,
        pin_memory=device.type == "cuda",
    )


def _print_once(translation: Translation) -> None:
    table = table_of(translation.rows)
    if rank() == 0 and table not in _printed:
        _printed.add(table)
        print(f"What becomes of the DeepSpeed configuration (docs/deepspeed.md):\n{table}", file=sys.stderr, flush=True)
