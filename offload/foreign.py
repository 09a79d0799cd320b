"""Names that other libraries have for our options, and messages for their users."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from offload.errors import ConfigError
from offload.option_values import shown

_HINTS_MAX = 3
"""Of so many unknown options an error speaks; a longer one would not be read."""

_HERE_IT_IS = {
    "gradient_clipping": (
        "gradient_clipping", "max_grad_norm", "grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip_val",
    ),
    "lr": ("learning_rate", "learning_rates"),
    "betas=(0.9, 0.999)": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "eps": ("adam_epsilon", "epsilon"),
    "weight_decay": ("wd", "decay"),
    "optimizer": ("optim", "opt", "optimizer_class"),
    "optimizer, lr, betas, eps, weight_decay": ("optimizer",),
    "optimizer_options": ("optim_args", "optimizer_args", "optimizer_kwargs", "optimizer_params"),
    "optimizer=torch.optim.AdamW(groups), built over the model's parameters": (
        "params", "parameters", "model_parameters", "param_groups",
    ),
    "a scheduler of torch on engine.optimizer": (
        "scheduler", "lr_scheduler", "lr_scheduler_type", "warmup_steps", "warmup_ratio",
    ),
    'precision ("auto", "bf16", "fp16" or "fp32")': (
        "dtype", "torch_dtype", "data_types", "mixed_precision", "amp", "use_amp", "autocast", "torch_autocast",
    ),
    'precision="fp16"': ("fp16", "half"),
    'precision="bf16"': ("bf16", "bfloat16"),
    'precision="fp16", which scales the loss by itself': ("loss_scale", "grad_scaler", "scaler"),
    'activations="recompute", or "host" or "nvme" to keep the inputs there': (
        "activation_checkpointing", "gradient_checkpointing", "checkpointing", "recompute", "activation_offloading",
        "cpu_checkpointing",
    ),
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "gradient_accumulation",
        "grad_accum_steps",
    ),
    "nvme_path": (
        "nvme", "nvme_dir", "swap_dir", "swap_path", "offload_dir", "offload_folder", "offload_path", "path", "disk",
    ),
    "nvme_path and host_memory, which say where things rest": (
        "stage", "zero_stage", "zero_optimization", "offload", "offload_optimizer", "offload_param", "offload_params",
        "offload_to_cpu", "offload_state_dict", "cpu_offload", "device_map",
    ),
    "host_memory": ("cpu_memory", "max_cpu_memory", "max_in_cpu", "ram"),
    "device_memory": ("gpu_memory", "max_gpu_memory", "vram"),
    "host_memory and device_memory": ("max_memory",),
    "io_backend": ("backend", "aio"),
}  # fmt: skip
"""By what we call it. Some names are ours, too: there they are the keys of another library's file."""

_LEAVE_IT_OUT = {
    "the batches that you give say it": (
        "batch_size", "train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
    ),
    "your data loader says it": ("num_workers", "pin_memory", "prefetch_factor", "drop_last"),
    "how far to read ahead follows from host_memory (prefetch=False turns it off)": (
        "prefetch_distance", "prefetch_depth", "prefetch_count", "prefetch_size", "num_prefetch",
    ),
    "torchrun says it, which starts the processes": (
        "world_size", "local_rank", "rank", "num_gpus", "num_processes", "num_nodes", "distributed",
    ),
    "torch's parallelize_module divides the model, and mesh names the ranks that feed different data": (
        "tensor_parallel", "tp_size",
    ),
    "`offload bench` measures it": (
        "queue_depth", "block_size", "thread_count", "num_threads", "buffer_count", "buffer_size",
    ),
    "engine.report() says it": ("steps_per_print", "wall_clock_breakdown", "logging_steps", "verbose"),
}  # fmt: skip
"""By the reason."""

_OURS = {name: ours for ours, names in _HERE_IT_IS.items() for name in names}
_REASONS = {name: reason for reason, names in _LEAVE_IT_OUT.items() for name in names}

_DEEPSPEED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "zero_allow_untested_optimizer", "fp16",
    "bf16", "steps_per_print", "wall_clock_breakdown", "aio",
}  # fmt: skip
"""A dict that has one of these is a configuration of DeepSpeed."""


def check_names(options: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise ``ConfigError`` if some options are not ``known``; it says what each is called here."""
    unknown = [name for name in options if name not in known]
    if unknown:
        hints = [f"unknown option {shown(name)}{_hint(name, options, known)}" for name in unknown[:_HINTS_MAX]]
        more = [f"and {len(unknown) - _HINTS_MAX} more"] if len(unknown) > _HINTS_MAX else []
        raise ConfigError("; ".join(hints + more))


def refuse_config(config: object) -> NoReturn:
    """Raise ``ConfigError`` for what was given in the place of an ``OffloadConfig``; it says what to write instead."""
    if isinstance(config, Mapping):
        what = "config: expected an OffloadConfig, got a dict"
        if _DEEPSPEED.isdisjoint(config):
            raise ConfigError(f"{what}: write OffloadEngine(model, **options)")
        advice = f"Write OffloadEngine(model, ...): {_translation(config)}."
        raise ConfigError(f"{what} that looks like DeepSpeed's", advice=advice)
    instead = "options have names, OffloadEngine(model, nvme_path=..., host_memory=...)"
    is_path = isinstance(config, (str, os.PathLike))
    if is_path and str(config).endswith((".json", ".yaml", ".yml", ".toml")):
        instead = f"no files are read, and {instead}"
    elif isinstance(config, torch.device) or (is_path and re.fullmatch(r"cpu|cuda(:\d+)?", str(config))):
        instead = f"write OffloadEngine(model, device={str(config)!r})"
    elif is_path:
        instead = f"write OffloadEngine(model, nvme_path={shown(str(config))})"
    elif isinstance(config, (list, tuple)) and config:
        instead = f"write OffloadEngine(model, nvme_path={shown(config)})"
    elif issubclass(config if isinstance(config, type) else type(config), torch.optim.Optimizer):
        instead = "write OffloadEngine(model, optimizer=...)"
    raise ConfigError(f"config: expected an OffloadConfig, got {shown(config)}: {instead}")


def torch_name(optimizer: str) -> str | None:
    """The class of torch that is meant, whatever the case of its letters."""
    return next((name for name in _torch_optimizers() if name.lower() == optimizer.lower()), None)


def _torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)}


def _hint(name: str, options: Mapping[str, object], known: Sequence[str]) -> str:
    given = options.get("optimizer")
    theirs = name.lower()
    if theirs in _OURS:
        return f": here it is {_OURS[theirs]}"
    if theirs in _REASONS:
        return f": leave it out, {_REASONS[theirs]}"
    for kind in (*_torch_optimizers().values(), *([given] if isinstance(given, type) else [])):
        if name in inspect.signature(kind).parameters:
            return f": write optimizer_options={{{name!r}: {shown(options[name])}}}"
    theirs = theirs.replace("-", "_")
    near = difflib.get_close_matches(theirs, known, 1) or [ours for ours in known if f"_{ours}_" in f"_{theirs}_"]
    return f", did you mean {near[0]!r}?" if near else f", known are: {', '.join(known)}"


def _translation(config: Mapping[object, object]) -> str:
    """Advice on what to write instead of each part of DeepSpeed's configuration that is turned on, in one line."""
    keys = [str(key) for key, part in config.items() if not _is_off(part)]
    others = [key for key in keys if key not in _OURS]
    translated = [f"{key} -> {_OURS[key]}" for key in keys if key in _OURS]
    return "; ".join([*translated, *([f"leave out {', '.join(others)}"] if others else [])])


def _is_off(part: object) -> bool:
    return part is False or (isinstance(part, Mapping) and part.get("enabled") is False)
