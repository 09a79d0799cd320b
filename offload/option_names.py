"""The options of ``OffloadConfig`` as keyword arguments, for type checkers, editors and ``help``."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import torch

from offload.config import OffloadConfig
from offload.device.protocol import Device

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Fields of ``OffloadConfig``, which has their meaning and checks them. A test holds the two equal."""

    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    device: str | torch.device | Device
    device_memory: int | str
    host_memory: int | str
    nvme_capacity: int | str
    weights: str | os.PathLike[str] | None
    precision: Literal["auto", "bf16", "fp16", "fp32"]
    experts: str | Sequence[str]
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None
    lr: float | None
    betas: tuple[float, float] | None
    eps: float | None
    weight_decay: float | None
    optimizer_options: Mapping[str, Any]
    moments_dtype: Literal["fp32", "bf16", "int8"]
    master_dtype: Literal["fp32", "bf16"]
    activations: str | Mapping[str, str]
    activation_memory: int | str
    gradient_clipping: float
    gradient_accumulation_steps: int
    tile_bytes: int | str
    io_backend: Literal["auto", "io_uring", "threads", "portable"]
    durable: int
    keep_last: int
    keep_every: int
    run_dir: str | os.PathLike[str] | None
    mesh: Any
    shard: Literal["auto", "states", "gradients", "weights"]
    exchange_dtype: Literal["auto", "bf16", "int8"]
    rank_timeout: float
    prefetch: bool


def with_options(*but: str) -> Callable[[_Function], _Function]:
    """Show the options, with their defaults, in the signature of a function that takes all ``but`` these as
    ``**options``."""
    options = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default if one.default_factory is dataclasses.MISSING else one.default_factory(),
            annotation=one.type,
        )
        for one in dataclasses.fields(OffloadConfig)
        if one.name not in but
    ]

    def show(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return show
