"""From a ``ds_config`` to options of the engine: what it means here, without a model and without memory for one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload import OffloadConfig
from offload.compat.deepspeed import batch as batches
from offload.compat.deepspeed.batch import Batch
from offload.compat.deepspeed.checking import Row, check
from offload.compat.deepspeed.keys import TOP, Effect
from offload.compat.deepspeed.kinds import AUTO
from offload.compat.deepspeed.optimizers import OptimizerPart, optimizer_part
from offload.compat.deepspeed.process import num_ranks
from offload.compat.deepspeed.reading import read
from offload.compat.deepspeed.schedulers import SchedulerPart, scheduler_part
from offload.compat.deepspeed.sources import Sources
from offload.errors import ConfigError

_CLIPPING = 1.0
"""Norm that DeepSpeed clips to where nothing is said."""

_SHARDS = ("states", "states", "gradients", "weights")
"""By stage: what ranks hold parts of."""

_IN_BF16 = {"bf16_optimizer_states": "moments_dtype", "bf16_master_weights_and_grads": "master_dtype"}
"""Options that are "bf16" by a key of the block of bf16."""


@dataclass(frozen=True)
class Translation:
    """Meaning of a ``ds_config`` here."""

    config: dict[str, Any]
    """As it was read."""
    engine_options: dict[str, Any]
    """Options of ``OffloadConfig`` that are not about the optimizer."""
    optimizer: OptimizerPart | None
    """The one that the file names."""
    scheduler: SchedulerPart | None
    batch: Batch
    stage: int
    skips_non_finite: bool
    """A step with a gradient that is not finite is left out, and no error."""
    steps_per_print: float
    """So often a line is printed; 0: never."""
    prints_times: bool
    drop_last: bool
    rows: tuple[Row, ...]

    @property
    def options(self) -> dict[str, Any]:
        """All options of ``OffloadConfig``: ``OffloadEngine(model, **translation.options)``."""
        own = self.optimizer.options() if self.optimizer is not None else {}
        return {**own, **self.engine_options}

    def in_keys(self, message: str) -> str:
        """An error of the engine about its options, with the keys of the file that they are here."""
        found = {
            row.key: None
            for name in self.engine_options
            for row in self.rows
            if row.effect is Effect.HONOURED and _names(name, message) and _names(name, row.says)
        }
        return f"{message} (in the ds_config: {', '.join(found)})" if found else message

    def replaced(self, section: str) -> Translation:
        """The same where the script gives what the file has in ``section``: "optimizer" or "scheduler"."""
        says = f"the {section} that initialize was given is used"
        idle = [
            dataclasses.replace(row, effect=Effect.IDLE, says=says) if row.key.startswith(f"{section}.") else row
            for row in self.rows
        ]
        gone: dict[str, Any] = {section: None}
        return dataclasses.replace(self, rows=tuple(idle), **gone)


def _names(option: str, text: str) -> bool:
    return re.search(rf"\b{option}\b", text) is not None


def translate(config: object, args: object = None, optimizer: torch.optim.Optimizer | None = None) -> Translation:
    """Translate ``config``, a dict, JSON text or path. ``args`` (arguments of a script, or of ``transformers``)
    and ``optimizer`` say what "auto" is.

    Raises ``ConfigError``, in one line, for the first thing that is wrong.
    """
    read_config = read(config)
    sources = Sources(args, optimizer)
    zero = read_config.get("zero_optimization")
    if isinstance(zero, bool):  # the oldest files
        read_config["zero_optimization"] = {"stage": int(zero)}
    checked = check(read_config, TOP)
    given = checked.values
    batch = _batch(given, sources)
    bf16 = given.get("bf16") or given.get("bfloat16") or {}
    options = {
        **_precision(given.get("fp16", {}), bf16, sources),
        **_zero(given.get("zero_optimization", {})),
        **_exchange(given),
        "gradient_clipping": _clipping(given, sources),
        "gradient_accumulation_steps": batch.steps,
    }
    own = optimizer_part(given.get("optimizer", {}), sources)
    scheduler = scheduler_part(given.get("scheduler", {}), sources)
    options |= given.get("offload_engine", {})
    rows = [*checked.rows, *(own.rows if own else ()), *(scheduler.rows if scheduler else ())]
    translation = Translation(
        config=read_config,
        engine_options=options,
        optimizer=own,
        scheduler=scheduler,
        batch=batch,
        stage=given.get("zero_optimization", {}).get("stage", 0),
        skips_non_finite=options["precision"] == "bf16" and bf16.get("check_grad_overflow", True) is not False,
        steps_per_print=given.get("steps_per_print", 0),
        prints_times=given.get("wall_clock_breakdown") is True,
        drop_last=given.get("dataloader_drop_last") is True,
        rows=tuple(_filled(row, sources.resolved) for row in rows),
    )
    OffloadConfig(**translation.options)  # raises ConfigError
    return translation


def _batch(given: Mapping[str, Any], sources: Sources) -> Batch:
    numbers = {name: given.get(name) for name in (batches.TRAIN, batches.MICRO, batches.STEPS)}
    for name in (batches.MICRO, batches.STEPS):
        if numbers[name] == AUTO:
            numbers[name] = sources.count(name) or AUTO
    batch = batches.resolve(numbers, num_ranks())
    sources.resolved |= {batches.TRAIN: batch.train, batches.MICRO: batch.micro, batches.STEPS: batch.steps}
    return batch


def _precision(fp16: Mapping[str, Any], bf16: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    on = []
    for name, block in (("fp16", fp16), ("bf16", bf16)):
        enabled = block.get("enabled", False)
        if enabled == AUTO:
            enabled = sources.resolved[f"{name}.enabled"] = sources.flag(name) or False
        if enabled:
            on.append(name)
    if len(on) == 2:
        raise ConfigError("fp16.enabled and bf16.enabled are both true: turn one off")
    options: dict[str, Any] = {"precision": on[0] if on else "auto"}
    for key, option in _IN_BF16.items():
        if on == ["bf16"] and bf16.get(key) is True:
            options[option] = "bf16"
    return options


def _zero(zero: Mapping[str, Any]) -> dict[str, Any]:
    """``shard``, if there is a stage, and ``nvme_path``, where anything is to go to NVMe."""
    options: dict[str, Any] = {"shard": _SHARDS[zero["stage"]]} if "stage" in zero else {}
    paths: list[str] = []
    for name in ("offload_param", "offload_optimizer"):
        block = zero.get(name, {})
        if block.get("device") != "nvme":
            continue
        if not block.get("nvme_path"):
            raise ConfigError(
                f'zero_optimization.{name}.device is "nvme" and there is no nvme_path: write the directory of a local '
                "SSD beside it"
            )
        paths += [path for path in block["nvme_path"] if path not in paths]
    return {**options, "nvme_path": paths} if paths else options


def _exchange(given: Mapping[str, Any]) -> dict[str, Any]:
    """``exchange_dtype``, where gradients are to be sent in fewer bytes: the fewest that the file asks for."""
    if given.get("zero_optimization", {}).get("zero_quantized_gradients") is True:
        return {"exchange_dtype": "int8"}
    return {"exchange_dtype": "bf16"} if given.get("communication_data_type") == "bf16" else {}


def _clipping(given: Mapping[str, Any], sources: Sources) -> float:
    clipping = given.get("gradient_clipping", _CLIPPING)
    if clipping == AUTO:
        found = sources.number("gradient_clipping")
        clipping = sources.resolved["gradient_clipping"] = _CLIPPING if found is None else found
    return float(clipping)


def _filled(row: Row, resolved: Mapping[str, Any]) -> Row:
    """The row, with what "auto" has become."""
    if row.given != repr(AUTO) or row.effect is Effect.IDLE:
        return row
    return dataclasses.replace(row, given=f"auto -> {resolved.get(row.key, 'the default')}")
