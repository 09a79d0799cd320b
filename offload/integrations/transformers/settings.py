"""Options of an engine that a trainer sets itself, and arguments of a trainer that an engine cannot follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments

from offload.config import OffloadConfig
from offload.errors import ConfigError, warn

_OF_THE_TRAINER = {
    "optimizer": "optim, or the trainer's optimizers= or optimizer_cls_and_kwargs=",
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "optimizer_options": "optim_args",
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "durable": "save_steps",
    "keep_last": "save_total_limit",
    "keep_every": "save_total_limit",
}
"""Options of an engine, and where a trainer has them."""


def engine_config(offload: OffloadConfig | Mapping[str, Any] | None) -> OffloadConfig:
    """The options of the engine, as the user gave them.

    Raises ``ConfigError`` for those that ``TrainingArguments`` decide. ``optimizer=None``, for an engine that
    evaluates and does not train, is the user's.
    """
    if offload is None:
        config = OffloadConfig()
    elif isinstance(offload, Mapping):
        config = OffloadConfig(**offload)
    else:
        config = OffloadConfig.of(offload, {})
    plain = OffloadConfig()
    for option, place in _OF_THE_TRAINER.items():
        value = getattr(config, option)
        if value != getattr(plain, option) and not (option == "optimizer" and value is None):
            raise ConfigError(f"offload: {option}={value!r} is the trainer's to set: give {place} there")
    if config.precision == "fp16":
        raise ConfigError(
            'offload: precision="fp16" scales the loss in engine.backward, which a trainer does not call. Take "bf16", '
            "or fp16=True of TrainingArguments, whose scaler the engine works with"
        )
    return config


def for_arguments(config: OffloadConfig, args: TrainingArguments, *, trains: bool) -> OffloadConfig:
    """``config`` with what the arguments say: where the model computes, and that gradients are added up."""
    changes: dict[str, Any] = {}
    if str(config.device) == "cpu" and args.device.type != "cpu":
        changes["device"] = args.device
    elif isinstance(config.device, (str, torch.device)) and torch.device(config.device).type != args.device.type:
        raise ConfigError(
            f"offload: device={str(config.device)!r}, and the trainer computes on {args.device}: leave device out, or "
            "set use_cpu of TrainingArguments"
        )
    if trains:
        changes["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    return dataclasses.replace(config, **changes)


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ``ConfigError`` for arguments that put something else in the engine's place. Warns of copies of weights
    beside ``host_memory``."""
    if args.deepspeed:
        raise ConfigError(
            "deepspeed: a trainer over an engine has no second one. Leave it out and give offload= what it says; "
            "scripts that call DeepSpeed themselves: import offload.compat.deepspeed"
        )
    if args.fsdp:
        raise ConfigError(f"fsdp={args.fsdp!r}: the engine holds the weights. Leave it out")
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ConfigError(f'{name}: the engine\'s weights keep their dtype. Leave it out, or train in "bf16"')
    if args.bf16 or args.fp16:
        name = "bf16" if args.bf16 else "fp16"
        warn(
            f"{name}=True computes with casts of fp32 weights, which autograd keeps beside host_memory. The engine's "
            'precision="bf16" needs none: give that in offload=, and leave ' + name + " out"
        )
