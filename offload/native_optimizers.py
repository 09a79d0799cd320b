"""The optimizers with a native kernel, each declared once.

A new one is its rule in C++ and a line of ``OFFLOAD_RULES`` in ``kernels/src/rules.h``, its coefficients here, and a
line of ``NATIVE_OPTIMIZERS``. From these follow the kernels of every instruction set and of GPUs, the names that
``optimizer=`` and the command line take, the class of torch that it stands in for, how its states lie in tiles
(``optim/kernel_rule.py``), and which formats of moments it has.

All constants of a step are worked out in double and rounded to fp32 once; the kernels then work in fp32, in the order
of src/rules.h. Formats of weights and states, and the bytes that they cost, are in ``kernels/_update.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Coef(ABC):
    """The coefficients of one step of an optimizer."""

    lr: float
    weight_decay: float
    step: int
    """1 in the first step."""
    grad_scale: float = 1.0
    """Multiplies every element of the gradient first, once, in fp32: unscale times clip factor."""
    maximize: bool = False

    squares: ClassVar[frozenset[str]] = frozenset()
    """States that are never below zero: in 8 bits their codes have no sign (``state_signed`` in src/rules.h)."""
    asked_by: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """States that only some options ask for, each with the options that do."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step counts from 1, got {self.step}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "grad_scale" and not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite, got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name, 0.0) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @property
    @abstractmethod
    def kernel(self) -> str:
        """The name of the kernel in ``OFFLOAD_RULES``."""

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The names of the states that the kernel sweeps, in its order."""

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """The fields of the rule in src/rules.h."""
        return (-self.grad_scale if self.maximize else self.grad_scale, *self._others())

    @abstractmethod
    def _others(self) -> tuple[float, ...]:
        """The fields after the first one, the scale of gradients."""


@dataclass(frozen=True, kw_only=True)
class AdamCoef(Coef):
    """Of Adam or AdamW.

    Cost:    28 bytes of memory traffic per element in fp32 (read 16, write 12); see ``kernels/_update.py``.
    Source:  Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101; Reddi et al., arXiv:1904.09237.
    """

    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True
    """Weight decay as in AdamW; if not, as in Adam (added to the gradient)."""
    amsgrad: bool = False

    squares = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
    asked_by = MappingProxyType({"max_exp_avg_sq": {"amsgrad": True}})

    @cached_property
    def kernel(self) -> str:
        return ("adamw" if self.decoupled else "adam") + "_amsgrad" * self.amsgrad

    @cached_property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * self.amsgrad)

    def _others(self) -> tuple[float, ...]:
        return (
            1.0 - self.lr * self.weight_decay if self.decoupled else self.weight_decay,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            1.0 / math.sqrt(1.0 - self.beta2**self.step),
            self.eps,
            -self.lr / (1.0 - self.beta1**self.step),
        )


@dataclass(frozen=True, kw_only=True)
class AdagradCoef(Coef):
    """Of Adagrad. ``sum`` holds the sums of squared gradients: ``initial_accumulator_value`` before step 1.

    Cost:    20 bytes of memory traffic per element in fp32 (read 12, write 8).
    Source:  Duchi et al. 2011, JMLR 12; ``torch.optim.Adagrad``.
    """

    lr_decay: float
    eps: float
    kernel = "adagrad"
    states = ("sum",)
    squares = frozenset(states)

    def _others(self) -> tuple[float, ...]:
        return self.weight_decay, self.eps, -self.lr / (1.0 + (self.step - 1) * self.lr_decay)


@dataclass(frozen=True, kw_only=True)
class LionCoef(Coef):
    """Of Lion (decoupled weight decay). It has no bias correction: ``step`` only seeds the rounding of INT8.

    Cost:    20 bytes of memory traffic per element in fp32 (read 12, write 8).
    Source:  Chen et al., arXiv:2302.06675, Alg. 2.
    """

    beta1: float
    beta2: float
    kernel = "lion"
    states = ("exp_avg",)

    def _others(self) -> tuple[float, ...]:
        return 1.0 - self.lr * self.weight_decay, 1.0 - self.beta1, 1.0 - self.beta2, -self.lr


@dataclass(frozen=True, kw_only=True)
class SgdCoef(Coef):
    """Of SGD. Only one with momentum has a ``momentum_buffer``, which the first step does not dampen.

    Cost:    20 bytes of memory traffic per element in fp32 with momentum (read 12, write 8), 12 without.
    Source:  Sutskever et al. 2013; ``torch.optim.SGD``.
    """

    momentum: float
    dampening: float
    nesterov: bool = False

    asked_by = MappingProxyType({"momentum_buffer": {"momentum": 1.0}})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum and no dampening")

    @cached_property
    def kernel(self) -> str:
        with_momentum = "sgd_nesterov" if self.nesterov else "sgd_momentum"
        return "sgd" if self.momentum == 0 else with_momentum

    @cached_property
    def states(self) -> tuple[str, ...]:
        return () if self.momentum == 0 else ("momentum_buffer",)

    def _others(self) -> tuple[float, ...]:
        if self.momentum == 0:
            return self.weight_decay, -self.lr
        dampened = 1.0 if self.step == 1 else 1.0 - self.dampening
        return self.weight_decay, self.momentum, dampened, -self.lr


@dataclass(frozen=True)
class NativeOptimizer:
    """An optimizer as ``torch.optim`` names its options, and the coefficients of the kernel that does the same."""

    kind: type[Coef]
    defaults: Mapping[str, Any]
    torch_class: str
    """The name of the class in ``torch.optim`` that it stands in for; empty: there is none."""
    decoupled: bool = False
    """The field ``decoupled`` of ``AdamCoef``, for groups that do not say it."""

    def coefficients(self, group: Mapping[str, Any], step: int = 1, grad_scale: float = 1.0) -> Coef:
        """Return those of a step of the group's parameters. Raises ``ValueError`` or
        ``TypeError`` for options that cannot work."""
        names = {field.name for field in fields(self.kind)} & self.defaults.keys()
        options = {name: group[name] for name in names} | {"lr": float(group["lr"])}
        if "betas" in self.defaults:
            options["beta1"], options["beta2"] = map(float, group["betas"])
        if self.kind is AdamCoef:
            options["decoupled"] = group.get("decoupled_weight_decay", self.decoupled)
        return self.kind(step=step, grad_scale=grad_scale, **options)

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it has by default."""
        return self.coefficients(self.defaults).states

    def options_for(self, states: Iterable[str]) -> dict[str, Any]:
        """Return options with which the kernel has these states, as far as it can have them."""
        asked = (self.kind.asked_by.get(state, {}) for state in states)
        return {**self.defaults, **{name: value for options in asked for name, value in options.items()}}


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
_ADAGRAD = {
    "lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "maximize": False,
}  # fmt: skip
_LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
_SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

NATIVE_OPTIMIZERS: Mapping[str, NativeOptimizer] = MappingProxyType(
    {
        "adam": NativeOptimizer(AdamCoef, _ADAM, "Adam"),
        "adamw": NativeOptimizer(AdamCoef, {**_ADAM, "weight_decay": 0.01}, "AdamW", decoupled=True),
        "adagrad": NativeOptimizer(AdagradCoef, _ADAGRAD, "Adagrad"),
        "lion": NativeOptimizer(LionCoef, _LION, torch_class=""),
        "sgd": NativeOptimizer(SgdCoef, _SGD, "SGD"),
    }
)
"""By the names that ``optimizer=`` takes."""

MATRIX_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "muon": {
            **{"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5},
            **{"adjust_lr_fn": "match_rms_adamw", "betas": (0.9, 0.999), "eps": 1e-8},
        },
        "adam_mini": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "maximize": False},
    }
)
"""Options of those that look at whole parameters (``optim/matrix_rule.py``), by the names that ``optimizer=`` takes."""

SQUARES = frozenset(name for optimizer in NATIVE_OPTIMIZERS.values() for name in optimizer.kind.squares)
"""The squares of all of them: their states have these names in checkpoints and state dicts, too."""
