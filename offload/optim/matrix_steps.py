"""Steps of optimizers that look at a parameter as a whole: Muon, LAMB and Adam-mini, over the memory of a tile."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload import kernels
from offload.dtypes import kernel_dtype
from offload.memory import tensor_at
from offload.native_optimizers import MATRIX_DEFAULTS, NATIVE_OPTIMIZERS, AdamCoef, Coef
from offload.optim.formats import Formats
from offload.optim.kernel_rule import DTYPES
from offload.optim.moments import copy_moments, read_moments
from offload.optim.rule import Group, TileBytes

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Of ``torch.optim.Muon``: the quintic with the steepest slope at zero."""

ADJUSTMENTS = ("original", "match_rms_adamw")
"""Factors of Muon's learning rate, by the shape of the matrix, as ``torch.optim.Muon`` names them."""


@dataclass(frozen=True)
class Arrays:
    """One parameter in a step: its shape, its ``states``, flat, by name, and where its master, weight and gradient
    are."""

    shape: torch.Size
    states: Mapping[str, torch.Tensor]
    master: int
    at: TileBytes
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of weight and gradient."""
    moments: str
    formats: Formats
    native: kernels.Native

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def gradient(self, scale: float) -> torch.Tensor:
        """A copy in fp32, multiplied, in the parameter's shape."""
        stored = tensor_at(self.at.grads, self.numel, self.dtypes[1])
        return stored.to(torch.float32, copy=True).mul_(scale).view(self.shape)

    def get_state(self, name: str) -> torch.Tensor:
        """A state in fp32, in the parameter's shape: its memory, or else a copy."""
        return read_moments(name, self.states, 0, self.numel).float().view(self.shape)

    def put_state(self, name: str, value: torch.Tensor, step: int) -> None:
        """Write fp32 numbers as a state, as this step makes it. They may be what is there."""
        state = self.states[name]
        if state.dtype == torch.bfloat16:
            value = value.contiguous()
            kernels.round_randomly(self.numel, state.data_ptr(), value.data_ptr(), step=step)
        else:
            copy_moments(name, self.states, 0, {name: value}, 0, self.numel)

    def get_master(self) -> torch.Tensor:
        """The master, in the parameter's shape: its memory, or else a copy."""
        return self.formats.get_master(self.numel, self.at.weights, self.master).view(self.shape)

    def put_master(self, value: torch.Tensor, step: int) -> None:
        """Write fp32 numbers as weight and master, as this step makes them. They may be what is there."""
        self.formats.put_master(value.reshape(-1), self.at.weights, self.master, step)

    def sweep(self, coef: Coef, **weight: Any) -> None:
        """Run a kernel over gradient, states, and ``weight``, the parameter's own if nothing else is given."""
        addresses: dict[str, Any] = {name: state.data_ptr() for name, state in self.states.items()}
        kernels.update(
            coef,
            self.numel,
            grad=self.at.grads,
            grad_dtype=kernel_dtype(self.dtypes[1]),
            moments_dtype=DTYPES[self.moments],
            native=self.native,
            **(weight or self._own_weight()),
            **addresses,
        )

    def _own_weight(self) -> dict[str, Any]:
        found = {"weight": self.at.weights, "weight_dtype": kernel_dtype(self.dtypes[0])}
        kinds = {2: {"rest": self.master}, 4: {"master": self.master}}
        return {**found, **kinds.get(self.formats.master, {})}


class Step(ABC):
    """One parameter's step: all that it depends on beside the arrays."""

    @abstractmethod
    def apply(self, arrays: Arrays) -> None:
        """Take it."""


class Algorithm(ABC):
    """One of the algorithms of an optimizer that treats its parameters in several ways."""

    states: tuple[str, ...]
    takes_elements = False
    """A step takes elements one by one: a parameter may be cut."""

    @abstractmethod
    def step(self, group: Group, step: int, grad_scale: float) -> Step:
        """The step that a group's options give. Raises ``ConfigError``, ``KeyError``, ``TypeError`` or
        ``ValueError``."""

    @abstractmethod
    def temporary_bytes(self, shape: torch.Size, moments: str) -> int:
        """Host memory that a step takes for itself."""

    def shape_of(self, state: str, shape: torch.Size) -> torch.Size:
        """Shape of a state: that of the parameter, or a smaller one of numbers in fp32."""
        return shape

    def products(self, shape: torch.Size) -> float:
        """FLOP of products of matrices in a step, with the options' defaults."""
        return 0.0


@dataclass(frozen=True)
class _Elements(Step):
    """A step that takes elements one by one."""

    coef: Coef

    def apply(self, arrays: Arrays) -> None:
        arrays.sweep(self.coef)


class AdamW(Algorithm):
    """AdamW for the parameters that Muon does not take."""

    states = ("exp_avg", "exp_avg_sq")
    takes_elements = True

    def step(self, group: Group, step: int, grad_scale: float) -> Step:
        return _Elements(
            NATIVE_OPTIMIZERS["adamw"].coefficients({"amsgrad": False, "maximize": False, **group}, step, grad_scale)
        )

    def temporary_bytes(self, shape: torch.Size, moments: str) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class _MuonStep(Step):
    """In the order of ``torch.optim.Muon``, whose bits it has: what differs by a rounding before Newton-Schulz in bf16
    differs by a hundredth behind it."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    num_iterations: int
    polynomial: tuple[float, ...]
    eps: float
    adjustment: str | None
    grad_scale: float
    step: int

    def apply(self, arrays: Arrays) -> None:
        matrix = orthogonalised(self._direction(arrays).bfloat16(), self.num_iterations, self.polynomial, self.eps)
        master = arrays.get_master()
        master.mul_(1 - self.lr * self.weight_decay)
        master.add_(matrix, alpha=-self.lr * _adjustment(self.adjustment, arrays.shape))
        arrays.put_master(master, self.step)

    def _direction(self, arrays: Arrays) -> torch.Tensor:
        gradient = arrays.gradient(self.grad_scale)
        average = arrays.get_state("momentum_buffer")
        average.lerp_(gradient, 1 - self.momentum)
        arrays.put_state("momentum_buffer", average, self.step)
        return gradient.lerp_(average, self.momentum) if self.nesterov else average


class Muon(Algorithm):
    """Momentum, orthogonalised. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; ``torch.optim.Muon``."""

    states = ("momentum_buffer",)

    def step(self, group: Group, step: int, grad_scale: float) -> Step:
        polynomial = tuple(map(float, group.get("ns_coefficients", _NEWTON_SCHULZ)))
        momentum, num_iterations, adjustment = float(group["momentum"]), int(group["ns_steps"]), group["adjust_lr_fn"]
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if len(polynomial) != 3:
            raise ValueError(f"ns_coefficients are three numbers, got {len(polynomial)}")
        if not 1 <= num_iterations < 100:
            raise ValueError(f"ns_steps must be in [1, 100), got {num_iterations}")
        if adjustment not in (None, *ADJUSTMENTS):
            raise ValueError(f"adjust_lr_fn must be one of {', '.join(ADJUSTMENTS)}, got {adjustment!r}")
        return _MuonStep(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=momentum,
            nesterov=bool(group["nesterov"]),
            num_iterations=num_iterations,
            polynomial=polynomial,
            eps=float(group["eps"]),
            adjustment=adjustment,
            grad_scale=grad_scale,
            step=step,
        )

    def temporary_bytes(self, shape: torch.Size, moments: str) -> int:
        before = 6 if moments == "fp32" else 10
        return max(before * shape.numel(), 4 * shape.numel() + 4 * min(shape) ** 2)

    def products(self, shape: torch.Size) -> float:
        less, more = sorted(shape)
        return float(MATRIX_DEFAULTS["muon"]["ns_steps"] * 2 * less**2 * (2 * more + less))


@dataclass(frozen=True, kw_only=True)
class _LambCoef(AdamCoef):
    """Of AdamW's kernel, which makes the direction of a copy of the weight."""

    def _others(self) -> tuple[float, ...]:
        _, *moments, _ = super()._others()
        return (self.weight_decay, *moments, 1.0 / (1.0 - self.beta1**self.step))


@dataclass(frozen=True)
class _LambStep(Step):
    coef: _LambCoef

    def apply(self, arrays: Arrays) -> None:
        direction = torch.empty(arrays.numel)
        arrays.formats.copy_master(direction, arrays.at.weights, arrays.master)
        length = _norm(direction)
        arrays.sweep(self.coef, weight=direction.data_ptr(), weight_dtype=kernels.Dtype.F32)
        moved = _norm(direction)
        ratio = length / moved if length > 0 and moved > 0 else 1.0
        master = arrays.get_master().view(-1)
        master.add_(direction, alpha=-self.coef.lr * ratio)
        arrays.put_master(master, self.coef.step)


class Lamb(Algorithm):
    """Adam's step with decay, as long as the parameter is. Source: You et al., arXiv:1904.00962, Alg. 2."""

    states = ("exp_avg", "exp_avg_sq")

    def step(self, group: Group, step: int, grad_scale: float) -> Step:
        beta1, beta2 = map(float, group["betas"])
        coef = _LambCoef(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
            step=step,
            grad_scale=grad_scale,
        )
        return _LambStep(coef)

    def temporary_bytes(self, shape: torch.Size, moments: str) -> int:
        return 8 * shape.numel()


@dataclass(frozen=True)
class _AdamMiniStep(Step):
    coef: AdamCoef

    def apply(self, arrays: Arrays) -> None:
        coef, squares = self.coef, arrays.states["exp_avg_sq"]
        gradient = arrays.gradient(coef.grad_scale)
        average = arrays.get_state("exp_avg")
        average.lerp_(gradient, 1 - coef.beta1)
        arrays.put_state("exp_avg", average, coef.step)
        rows = gradient.view(len(squares), -1)
        squares.lerp_(_mean_squares(rows), 1 - coef.beta2)
        roots = (squares / (1 - coef.beta2**coef.step)).sqrt_().add_(coef.eps)
        torch.div(average.view_as(rows), roots[:, None], out=rows)
        master = arrays.get_master()
        master.mul_(1 - coef.lr * coef.weight_decay)
        master.add_(gradient, alpha=-coef.lr / (1 - coef.beta1**coef.step))
        arrays.put_master(master, coef.step)


class AdamMini(Algorithm):
    """AdamW with one second moment for each row of a matrix, and for all else one a parameter.

    Source: Zhang et al., arXiv:2406.16793, Alg. 1 and 3. Rows divide queries and keys more finely than heads, which
    only the model knows of.
    """

    states = ("exp_avg", "exp_avg_sq")

    def step(self, group: Group, step: int, grad_scale: float) -> Step:
        beta1, beta2 = map(float, group["betas"])
        coef = AdamCoef(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            step=step,
            grad_scale=grad_scale,
        )
        return _AdamMiniStep(coef)

    def temporary_bytes(self, shape: torch.Size, moments: str) -> int:
        return (8 if moments == "fp32" else 12) * shape.numel()

    def shape_of(self, state: str, shape: torch.Size) -> torch.Size:
        of_rows = torch.Size([shape[:-1].numel() if len(shape) in (2, 3) else 1])
        return of_rows if state == "exp_avg_sq" else shape


def _mean_squares(rows: torch.Tensor) -> torch.Tensor:
    """Of each row, in an order that does not depend on the number of threads."""
    if len(rows) == 1:
        return torch.tensor([kernels.sum_squares(rows.data_ptr(), rows.numel(), kernels.Dtype.F32) / rows.numel()])
    means: torch.Tensor = torch.linalg.vector_norm(rows, dim=1).square_().div_(rows.shape[1])
    return means


def orthogonalised(
    matrix: torch.Tensor, num_iterations: int = 5, polynomial: Sequence[float] = _NEWTON_SCHULZ, eps: float = 1e-7
) -> torch.Tensor:
    """The matrix with its singular values near to 1, in its dtype, by products alone. Overwrites ``matrix``.

    Cost: ``num_iterations`` times three products, of ``2 * rows * columns * min(rows, columns)`` FLOP or less.
    """
    a, b, c = polynomial
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(num_iterations):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if is_tall else x


def _adjustment(name: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def _norm(values: torch.Tensor) -> float:
    return math.sqrt(kernels.sum_squares(values.data_ptr(), values.numel(), kernels.Dtype.F32))
