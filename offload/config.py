"""Every option of the engine: its unit, its default, and what is refused."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from offload.device.protocol import Device
from offload.errors import ConfigError

Bytes = int | Literal["auto"]

OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "sgd")
"""Those that have a native kernel, by the names that ``optimizer=`` takes."""

_SUFFIXES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SUFFIXES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(value: int | str, option: str) -> Bytes:
    """A number of bytes, from a number or a text such as ``"12GiB"``; ``"auto"`` stays. Raises ``ConfigError``."""
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _SUFFIXES:
            raise ConfigError(f'{option}: expected bytes such as 1073741824, "12GiB" or "auto", got {value!r}')
        value = int(float(match[1]) * _SUFFIXES[match[2].upper()])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ConfigError(f"{option}: expected a number of bytes from 0 to 2^63, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The settings of one engine, checked when built. Raises ``ConfigError`` naming the option and the value."""

    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
    """Directories on local SSDs for the swap store; extents are spread over several. Empty: nothing goes to NVMe."""
    device: str | torch.device | Device = "cpu"
    """Where the model computes: "cpu", "cuda", "cuda:1", or a ``Device`` of one's own (``offload.device.protocol``)."""
    device_memory: int | str = "auto"
    """Bytes of a GPU's memory that the engine may hold; activations are the model's. Beside what passes through, units
    rest there and are updated there, as many as fit. "auto": all of them if they take at most half of what is free;
    else none at first, and units and copies of weights get what the first step has left. On the CPU ``host_memory``
    bounds everything."""
    host_memory: int | str = "auto"
    """Bytes of host memory that the engine may hold, staging included. "auto": most of what is free now."""
    nvme_capacity: int | str = "auto"
    """Bytes of NVMe that the store may reserve. "auto": what is free on the paths."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """dtype of weights and gradients. The 16-bit ones keep an fp32 master; "fp16" scales the loss, dynamically."""
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = "adamw"
    """What updates the weights: "adam", "adamw", "adagrad", "lion" or "sgd"; a ``torch.optim.Optimizer`` class; or one
    that is built already over the model's parameters, whose groups, settings and states are taken over. None: no
    training, no gradients, no states."""
    lr: float | None = None
    """Learning rate; a scheduler on ``engine.optimizer`` changes it. None, here and below: the optimizer's default."""
    betas: tuple[float, float] | None = None
    """Decay of the first and second moment."""
    eps: float | None = None
    """Added to the denominator."""
    weight_decay: float | None = None
    """Weight decay, as the optimizer of this name in ``torch.optim`` has it."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the optimizer, by the names of ``torch.optim``: ``{"momentum": 0.9, "nesterov": True}``."""
    moments_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """How kernels keep the optimizer's states. "bf16" and "int8" (blocks of 256) save bytes and are inexact."""
    gradient_clipping: float = 0.0
    """Upper bound of the global gradient norm. 0: no clipping."""
    gradient_accumulation_steps: int = 1
    """``backward`` calls that make one step; each loss is divided by it. ``step`` does nothing until the last."""
    tile_bytes: int | str = "auto"
    """Bytes of optimizer state read, updated and written in one go. "auto": 8 MiB, less if memory is short."""
    io_backend: Literal["auto", "io_uring", "threads", "portable"] = "auto"
    """What moves bytes to and from NVMe. "auto": io_uring, else threads. "portable" needs no extension, and is slow."""
    prefetch: bool = True
    """Read weights before they are asked for. False: on demand only, to measure what prefetching gains."""

    def __post_init__(self) -> None:
        paths = [self.nvme_path] if isinstance(self.nvme_path, (str, os.PathLike)) else list(self.nvme_path)
        object.__setattr__(self, "nvme_path", tuple(Path(path) for path in paths))
        for name in ("device_memory", "host_memory", "nvme_capacity", "tile_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        self._check_device()
        self._check_choice("precision", ("bf16", "fp16", "fp32"))
        self._check_choice("moments_dtype", ("fp32", "bf16", "int8"))
        self._check_optimizer()
        self._check_choice("io_backend", ("auto", "io_uring", "threads", "portable"))
        for name in ("lr", "eps", "weight_decay"):
            if getattr(self, name) is not None:
                self._check_number(name, getattr(self, name), 0, None)
        self._check_number("gradient_clipping", self.gradient_clipping, 0, None)
        if self.betas is not None:
            if len(self.betas) != 2:
                raise ConfigError(f"betas: expected two numbers, got {self.betas!r}")
            for beta in self.betas:
                self._check_number("betas", beta, 0, 1)
        if not isinstance(self.gradient_accumulation_steps, int) or self.gradient_accumulation_steps < 1:
            raise ConfigError(f"gradient_accumulation_steps must be >= 1, got {self.gradient_accumulation_steps!r}")
        if self.tile_bytes != "auto" and int(self.tile_bytes) < 64 * 1024:
            raise ConfigError(f"tile_bytes must be at least 65536, got {self.tile_bytes}")

    @classmethod
    def of(cls, config: OffloadConfig | None, options: dict[str, Any]) -> OffloadConfig:
        """``config`` with ``options`` laid over it. An unknown option is an error that names the nearest known one."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}{hint}")
        return cls(**options) if config is None else dataclasses.replace(config, **options)

    @property
    def paths(self) -> tuple[Path, ...]:
        """``nvme_path`` as it is once checked."""
        return self.nvme_path  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights that the model computes with."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.precision]

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """The optimizer's options that were set, by their names in ``torch.optim``."""
        named = {name: getattr(self, name) for name in ("lr", "betas", "eps", "weight_decay")}
        return {**{name: value for name, value in named.items() if value is not None}, **self.optimizer_options}

    @property
    def gradient_dtype(self) -> torch.dtype:
        """dtype in which gradients rest: that of the weights, and fp32 when several are added up."""
        return self.dtype if self.gradient_accumulation_steps == 1 else torch.float32

    def _check_device(self) -> None:
        if isinstance(self.device, (str, torch.device)):
            try:
                kind = torch.device(self.device).type
            except RuntimeError as error:
                raise ConfigError(f"device: {error}") from None
            if kind not in ("cpu", "cuda"):
                raise ConfigError(f'device: expected "cpu" or "cuda", got {self.device!r}')

    def _check_optimizer(self) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, str):
            self._check_choice("optimizer", OPTIMIZERS)
        elif isinstance(optimizer, type):
            if not issubclass(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"optimizer: {optimizer.__name__} is not a torch.optim.Optimizer")
        elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: expected one of {', '.join(map(repr, OPTIMIZERS))}, a torch.optim.Optimizer (class or "
                f"built), or None; got {optimizer!r}"
            )

    def _check_choice(self, name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")

    def _check_number(self, name: str, value: object, low: float, high: float | None) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value < (float("inf") if high is None else high):  # type: ignore[operator]
            bound = f">= {low}" if high is None else f"from {low} to less than {high}"
            raise ConfigError(f"{name} must be a number {bound}, got {value!r}")
