"""Every option of the engine: its unit, its default, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload import foreign, option_values
from offload.device.protocol import Device
from offload.errors import ConfigError, warn
from offload.native_optimizers import MATRIX_DEFAULTS, NATIVE_OPTIMIZERS
from offload.quantised.linear_4bit import is_in_4bit
from offload.units.experts import EXPERTS

OPTIMIZERS = (*NATIVE_OPTIMIZERS, *MATRIX_DEFAULTS)
"""The engine's own, by the names that ``optimizer=`` takes."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PRECISIONS: dict[torch.dtype, Literal["bf16", "fp16", "fp32"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}

LEAST_TILE_BYTES = 64 << 10

ACTIVATIONS = ("keep", "recompute", "host", "nvme", "auto")
"""Values of the option, from the fastest to the one that takes the least memory, and the choice by a step."""

_MOST_ACCUMULATION_STEPS = 1 << 20
"""Bytes of a step are counted in 64 bits."""

_LEAST_ACTIVATION_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The settings of one engine, checked when built. Raises ``ConfigError`` naming the option and the value."""

    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
    """Directories on local SSDs for the swap store; extents are spread over several. "~" is your home. Empty: nothing
    goes to NVMe."""
    device: str | torch.device | Device = "cpu"
    """Device that the model computes on: "cpu", "cuda", "cuda:1", or a ``Device`` of one's own
    (``offload.device.protocol``). Has run on one NVIDIA GPU, not on several."""
    device_memory: int | str = "auto"
    """Bytes of a GPU's memory that the engine may hold; activations are the model's. Beside what passes through, units
    are stored there and are updated there, as many as fit. "auto": all of them if they take at most half of what is
    free; else none at first, and units and copies of weights get what the first step has left. On the CPU
    ``host_memory`` bounds everything."""
    host_memory: int | str = "auto"
    """Bytes of host memory that the engine may hold, staging included. "auto": most of what is free now."""
    nvme_capacity: int | str = "auto"
    """Bytes of NVMe that the store may reserve. "auto": what is free on the paths."""
    weights: str | os.PathLike[str] | None = None
    """The model's weights are read from here: a safetensors or GGUF file, an index of several, or a directory with
    safetensors as Hugging Face names them. They are cast to the dtypes that the model has. None: the model has them, or
    its initialisers make those that are on the meta device."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of weights and gradients. The 16-bit ones keep an fp32 master; "fp16" scales the loss, dynamically. "auto":
    the dtype that the model has, or most of it; not float64."""
    experts: str | Sequence[str] = EXPERTS
    """Modules whose experts are brought in one by one, by the last part of their names or the end of their classes':
    such with parameters of three dimensions, whose code takes one row of them for an expert, or an ``nn.ModuleList`` or
    ``nn.ModuleDict`` of experts.
    Classes of ``transformers`` that take an experts implementation need no name."""
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = "adamw"
    """Optimizer that updates the weights: "adam", "adamw", "adagrad", "lion" or "sgd", and "muon", "lamb" or
    "adam_mini", which look at whole parameters; a ``torch.optim.Optimizer`` class; or one that is built already over
    the model's parameters, whose groups, settings and states are taken over.
    None: no training, no gradients, no states."""
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
    """Format in which kernels keep the optimizer's states. "bf16" and "int8" (blocks of 256) save bytes and are
    inexact; both are rounded at random, so that their mean is exact."""
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the numbers that the optimizer updates, with ``precision="bf16"``. "bf16": the weights themselves, with
    no rest of an fp32 master beside them, rounded at random: 2 bytes a parameter less, and inexact."""
    activations: str | Mapping[str, str] = "keep"
    """Treatment of the activations that backward needs. "keep": they stay. "recompute": of each block its inputs
    stay, and backward runs it again. "host": these inputs go to host memory, and so does what is saved outside of
    blocks. "nvme": what does not fit there goes on to NVMe. "auto": the first step is one of "nvme" ("recompute"
    without ``nvme_path``); then each block keeps, recomputes or goes there, as its bytes and times have shown. For some
    units alone: a dict of patterns of unit names, such as ``{"model.layers.*": "nvme"}``; the first that matches
    counts, and units without one keep."""
    activation_memory: int | str = 64 << 20
    """Bytes of ``host_memory`` set aside for activations of "host", all of which must fit, and "nvme", where they are
    the buffer; of each rank."""
    gradient_clipping: float = 0.0
    """Upper bound of the global gradient norm. 0: no clipping."""
    gradient_accumulation_steps: int = 1
    """``backward`` calls that make one step; each loss is divided by it. ``step`` does nothing until the last."""
    tile_bytes: int | str = "auto"
    """Bytes of optimizer state read, updated and written in one go. "auto": 8 MiB, less if memory is short, and 64 MiB
    where a device computes and nothing goes to NVMe."""
    io_backend: Literal["auto", "io_uring", "threads", "portable"] = "auto"
    """Backend that moves bytes to and from NVMe. "auto": io_uring, else threads. "portable" needs no extension, and is
    slow."""
    durable: int = 0
    """Commit every so many steps under ``nvme_path``: after any end of the process ``load_checkpoint()`` goes on from
    there. 0: what is on NVMe is gone with the process, and checkpoints are saved by ``save_checkpoint`` alone."""
    keep_last: int = 0
    """Checkpoints of this run that ``save_checkpoint`` leaves in its directory, those saved last. 0: all of them."""
    keep_every: int = 0
    """Of the older ones, those whose step is a multiple of this stay, too."""
    run_dir: str | os.PathLike[str] | None = None
    """A directory that gets the record of the run, step by step; ``offload report`` makes a page of it. A run that goes
    on from a checkpoint goes on there, too. None: no record."""
    mesh: Any = None
    """A ``torch.distributed.device_mesh.DeviceMesh`` whose ranks train one model together: each holds an equal part of
    every unit. Of two dimensions the last one shards, and the first one replicates. None: all processes of
    ``torch.distributed``, if it is initialised or a launcher such as torchrun has started several. ``host_memory`` and
    ``nvme_capacity`` are a machine's: its ranks share them."""
    shard: Literal["auto", "states", "gradients", "weights"] = "auto"
    """Parts of the state that are divided among ranks, as by ZeRO 1, 2 and 3: optimizer states; gradients, too;
    weights, too. The first ones move the fewest bytes, the last one takes the least memory. "auto": the first one that
    needs no NVMe, else the last."""
    exchange_dtype: Literal["auto", "bf16", "int8"] = "auto"
    """Format in which ranks send each other gradients. "auto": as they are made or added up, which is exact. "bf16":
    those in fp32 are rounded, for half of the bytes. "int8": integers with a scale for each 256, rounded at random so
    that their mean is exact: 1.02 bytes each."""
    rank_timeout: float = 60.0
    """Seconds without a sign of life after which a rank counts as gone, and all end with one error. A rank that
    computes for longer gives signs of life."""
    prefetch: bool = True
    """Read weights before they are asked for. False: on demand only, to measure what prefetching gains."""

    def __new__(cls, *positional: object, **options: object) -> OffloadConfig:
        """Refuses unknown options in words; the dataclass itself would raise ``TypeError``."""
        if positional:
            raise ConfigError(
                f"options have names: OffloadConfig(nvme_path=...), got {option_values.shown(positional[0])}"
            )
        foreign.check_names(options, cls._names())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check("nvme_path", option_values.as_paths)
        self._check("device", option_values.as_device)
        for name in ("device_memory", "host_memory", "nvme_capacity", "tile_bytes"):
            self._check(name, option_values.parse_bytes)
        if self.tile_bytes != "auto" and int(self.tile_bytes) < LEAST_TILE_BYTES:
            option_values.refuse("tile_bytes", f"at least {LEAST_TILE_BYTES} bytes", self.tile_bytes)
        if self.weights is not None:
            self._check("weights", option_values.as_path)
        self._check("precision", option_values.as_choice, ("auto", *_DTYPES))
        self._check_optimizer()
        for name in ("lr", "eps", "weight_decay"):
            if getattr(self, name) is not None:
                self._check(name, option_values.as_number)
        if self.betas is not None:
            self._check("betas", option_values.as_betas)
        self._check("optimizer_options", option_values.as_options)
        for name in ("lr", "betas", "eps", "weight_decay"):
            if getattr(self, name) is not None and name in self.optimizer_options:
                raise ConfigError(f"{name} is given twice, also in optimizer_options: leave one out")
        self._check("moments_dtype", option_values.as_choice, ("fp32", "bf16", "int8"))
        self._check("master_dtype", option_values.as_choice, ("fp32", "bf16"))
        self._check("activations", option_values.as_choices, ACTIVATIONS)
        self._check("activation_memory", option_values.parse_bytes)
        if self.activation_memory == "auto" or int(self.activation_memory) < _LEAST_ACTIVATION_BYTES:
            expected = f"at least {_LEAST_ACTIVATION_BYTES} bytes"
            option_values.refuse("activation_memory", expected, self.activation_memory)
        self._check("gradient_clipping", option_values.as_number)
        self._check("gradient_accumulation_steps", option_values.as_count, 1, _MOST_ACCUMULATION_STEPS)
        self._check("io_backend", option_values.as_choice, ("auto", "io_uring", "threads", "portable"))
        for name in ("durable", "keep_last", "keep_every"):
            self._check(name, option_values.as_count, 0)
        if self.run_dir is not None:
            self._check("run_dir", option_values.as_path)
        if self.mesh is not None and not (hasattr(self.mesh, "mesh") and hasattr(self.mesh, "get_coordinate")):
            option_values.refuse("mesh", "a torch.distributed.device_mesh.DeviceMesh, or None", self.mesh)
        self._check("shard", option_values.as_choice, ("auto", "states", "gradients", "weights"))
        self._check("exchange_dtype", option_values.as_choice, ("auto", "bf16", "int8"))
        self._check("rank_timeout", option_values.as_number)
        if self.rank_timeout < 1:
            option_values.refuse("rank_timeout", "at least 1 second", self.rank_timeout)
        self._check("experts", option_values.as_names)
        self._check("prefetch", option_values.as_flag)
        self._check_together()

    @classmethod
    def of(cls, config: OffloadConfig | None, options: Mapping[str, Any]) -> OffloadConfig:
        """``config`` with ``options`` laid over it.

        Raises ``ConfigError`` for an option that there is not, and for a ``config`` that is something else; it says
        what to write instead.
        """
        if config is None:
            return cls(**options)
        if not isinstance(config, OffloadConfig):
            foreign.refuse_config(config)
        foreign.check_names(options, cls._names())
        return dataclasses.replace(config, **options)

    def of_model(self, model: nn.Module) -> OffloadConfig:
        """The same with ``precision="auto"`` resolved: the dtype of most of the model's floating-point numbers.

        Warns, once, of parameters that get another dtype than they have (those on the meta device have no values yet),
        and of a budget that bounds nothing.
        Raises ``ConfigError`` if "auto" finds a dtype in which nothing is trained, or a parameter has no shape yet.
        """
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            if is_lazy(parameter):
                raise ConfigError(f"parameter {name} has no shape yet: run a batch through the lazy model first")
        parameters = [each for each in named.values() if each.is_floating_point() and not is_in_4bit(each)]
        numel: Counter[torch.dtype] = Counter()
        for parameter in parameters:
            numel[parameter.dtype] += parameter.numel()
        config = self
        if self.precision == "auto":
            wide = next((name for name, parameter in named.items() if parameter.dtype == torch.float64), None)
            if wide is not None:
                raise ConfigError(
                    f'precision: "auto" takes the dtype that the model has, and parameter {wide} is torch.float64, in '
                    'which nothing is trained: precision="fp32" makes it torch.float32'
                )
            most = max(numel, key=lambda dtype: numel[dtype], default=torch.float32)
            if most not in _PRECISIONS:
                raise ConfigError(
                    f'precision: "auto" finds {most}, in which nothing is trained; choose "bf16" or "fp32"'
                )
            config = dataclasses.replace(self, precision=_PRECISIONS[most])
        others: Counter[torch.dtype] = Counter()
        for parameter in parameters:
            if parameter.dtype != config.dtype and not parameter.is_meta:
                others[parameter.dtype] += parameter.numel()
        if others:
            warn(config._conversions(others, only=len(numel) == 1))
        if self.device_memory != "auto" and str(self.device) == "cpu":
            warn("device_memory: the model computes on the CPU, and host_memory bounds everything there")
        return config

    def converted_dtypes(self, model: nn.Module) -> set[torch.dtype]:
        """The dtypes that floating-point parameters of the model have, and are converted from."""
        floating = [each for each in model.parameters() if each.is_floating_point() and not is_in_4bit(each)]
        return {each.dtype for each in floating} - {self.dtype}

    @property
    def paths(self) -> tuple[Path, ...]:
        """``nvme_path`` as it is once checked."""
        return self.nvme_path  # type: ignore[return-value]

    @property
    def activation_bytes(self) -> int:
        """Host memory for activations; 0 if none go there."""
        leaving = {"host", "nvme", *(("auto",) if self.nvme_path else ())}
        return 0 if leaving.isdisjoint(self._activation_modes) else int(self.activation_memory)

    @property
    def _activation_modes(self) -> Collection[str]:
        return (self.activations,) if isinstance(self.activations, str) else self.activations.values()

    @property
    def weights_path(self) -> Path | None:
        """``weights`` as it is once checked."""
        return self.weights  # type: ignore[return-value]

    @property
    def expert_names(self) -> tuple[str, ...]:
        """``experts`` as it is once checked."""
        return self.experts  # type: ignore[return-value]

    @property
    def run_path(self) -> Path | None:
        """``run_dir`` as it is once checked."""
        return self.run_dir  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights that the model computes with. Not to be asked for before ``of_model``."""
        if self.precision == "auto":
            raise RuntimeError("precision is still 'auto': only of_model() knows the dtype")
        return _DTYPES[self.precision]

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """The optimizer's options that were set, by their names in ``torch.optim``."""
        named = {name: getattr(self, name) for name in ("lr", "betas", "eps", "weight_decay")}
        return {**{name: value for name, value in named.items() if value is not None}, **self.optimizer_options}

    @property
    def gradient_dtype(self) -> torch.dtype:
        """dtype in which gradients are stored: that of the weights, and fp32 when several are added up."""
        return self.dtype if self.gradient_accumulation_steps == 1 else torch.float32

    def _conversions(self, others: Mapping[torch.dtype, int], *, only: bool) -> str:
        """Text on what becomes of parameters of other dtypes. ``only``: the model has no more than one."""
        found = ", ".join(f"{numel:,} parameters are {dtype}" for dtype, numel in others.items())
        master = "" if self.precision == "fp32" else " (what is trained keeps an fp32 master)"
        keeper = torch.float32 if torch.float32 in others else next(iter(others)) if only else None
        name = next((name for name, dtype in _DTYPES.items() if dtype == keeper), None)
        way_out = "" if name is None else f"; precision={name!r} keeps them"
        return f"precision={self.precision!r}: {found}, and become {self.dtype}{master}{way_out}"

    @classmethod
    def _names(cls) -> list[str]:
        return [item.name for item in dataclasses.fields(cls)]

    def _check(self, name: str, check: Callable[..., object], *more: object) -> None:
        """Keep what ``check`` makes of the option."""
        object.__setattr__(self, name, check(name, getattr(self, name), *more))

    def _check_together(self) -> None:
        """Raise ``ConfigError`` for options that have no effect with the others."""
        if self.optimizer is None and self.optimizer_settings:
            given = ", ".join(self.optimizer_settings)
            raise ConfigError(
                f"{given}: nothing is trained with optimizer=None. Name an optimizer, or leave {given} out"
            )
        if not self.nvme_path and self.nvme_capacity not in ("auto", 0):
            raise ConfigError(
                "nvme_capacity: nothing goes to NVMe without nvme_path. Give it, or leave nvme_capacity out"
            )
        if "nvme" in self._activation_modes and not self.nvme_path:
            raise ConfigError('activations="nvme" needs a place: give nvme_path, or take "host"')
        if self.master_dtype == "bf16" and self.precision not in ("auto", "bf16"):
            raise ConfigError(
                f'master_dtype="bf16" is of weights in bf16, and precision is {self.precision!r}: take precision="bf16"'
            )
        if self.durable and not self.nvme_path:
            raise ConfigError("durable: steps are committed under nvme_path. Give it, or leave durable out")

    def _check_optimizer(self) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, str):
            name = foreign.torch_name(optimizer)
            if optimizer not in OPTIMIZERS and name is not None and name.lower() not in OPTIMIZERS:
                option_values.refuse("optimizer", option_values.one_of(OPTIMIZERS), optimizer, f"torch.optim.{name}")
            self._check("optimizer", option_values.as_choice, OPTIMIZERS)
        elif isinstance(optimizer, type):
            if not issubclass(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"optimizer: {optimizer.__name__} is not a torch.optim.Optimizer")
        elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            expected = f"{option_values.one_of(OPTIMIZERS)}, a torch.optim.Optimizer (class or built), or None"
            option_values.refuse("optimizer", expected, optimizer)
