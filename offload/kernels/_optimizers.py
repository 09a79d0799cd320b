"""The optimizers: coefficients named as in ``torch.optim``, turned into the constants of one step, and one call each.

All constants of a step are worked out in double and rounded to fp32 once; the kernels then work in fp32, in the order
of src/rules.h. What the functions have in common:

``native`` says who runs the kernel: the CPU, at once, or a GPU, whose memory all addresses are then of (``gpu.py``).

The fp32 master weight is kept in one of three ways:

- ``weight_dtype=F32`` alone: the weight is its own master.
- ``weight_dtype=BF16`` and ``rest``, a uint16 array: split master, see ``split_master``.
- ``master``, an fp32 array: ``weight``, of any dtype, is only written, with the new master rounded to it.

States are F32, BF16 (rounded to nearest, even) or INT8 (codes; pass the address of the scales, fp32, one for each
``CODE_BLOCK`` elements from the start of the call, as ``<state>_scale``). INT8 is inexact, and rounds at random, by
what a block holds and the step: the same bits everywhere, for any tiles whose sizes are multiples of ``CODE_BLOCK``.
All states, scales included, are zero before step 1.

Bytes of memory traffic per element (read + write), gradients in BF16:

=========================  ===========  ==========  ==========
weight                     F32 moments  BF16        INT8
=========================  ===========  ==========  ==========
F32                        26           18          14
split, BF16 + rest         26           18          14
master, BF16 weight out    28           20          16
=========================  ===========  ==========  ==========

for Adam; an F32 gradient adds 2, a second state less takes off 8, 4 or 2. (INT8: and 1/16 for two scales.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ._native import Dtype
from ._update import Native, State, on_host, update


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")


def _check_beta(**betas: float) -> None:
    for name, beta in betas.items():
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be in [0, 1), got {beta}")


def _signed(grad_scale: float, maximize: bool) -> float:
    return -grad_scale if maximize else grad_scale


@dataclass(frozen=True)
class AdamCoef:
    """The coefficients of one Adam or AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """1 in the first step."""
    grad_scale: float = 1.0
    """Multiplies every element of the gradient first, once, in fp32: unscale times clip factor."""
    decoupled: bool = True
    """Weight decay as in AdamW; if not, as in Adam (added to the gradient)."""
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_beta(beta1=self.beta1, beta2=self.beta2)

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """The fields of ``Adam`` in src/rules.h."""
        return (
            _signed(self.grad_scale, self.maximize),
            1.0 - self.lr * self.weight_decay if self.decoupled else self.weight_decay,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            1.0 / math.sqrt(1.0 - self.beta2**self.step),
            self.eps,
            -self.lr / (1.0 - self.beta1**self.step),
        )


def adam(
    coef: AdamCoef,
    numel: int,
    *,
    grad: int,
    grad_dtype: Dtype,
    weight: int,
    weight_dtype: Dtype,
    exp_avg: int,
    exp_avg_sq: int,
    rest: int = 0,
    master: int = 0,
    max_exp_avg_sq: int = 0,
    exp_avg_scale: int = 0,
    exp_avg_sq_scale: int = 0,
    max_exp_avg_sq_scale: int = 0,
    moments_dtype: Dtype = Dtype.F32,
    num_threads: int = 1,
    native: Native = on_host,
) -> None:
    """Advance ``numel`` weights by one Adam or AdamW step, in place, in one pass.

    Shapes:  every array has ``numel`` elements; for the formats see the top of this file. ``max_exp_avg_sq``, if given,
             makes it amsgrad.
    Effects: writes all arrays but ``grad``. Allocates nothing.
    Cost:    28 bytes of memory traffic per element in fp32 (read 16, write 12); others at the top of this file.
    Raises:  ``ValueError`` for an impossible address, count or combination. Nothing has been written in that case.
    Source:  Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101; Reddi et al., arXiv:1904.09237.
    """
    states = [State("exp_avg", exp_avg, exp_avg_scale), State("exp_avg_sq", exp_avg_sq, exp_avg_sq_scale)]
    name = "adamw" if coef.decoupled else "adam"
    if max_exp_avg_sq:
        states.append(State("max_exp_avg_sq", max_exp_avg_sq, max_exp_avg_sq_scale))
        name += "_amsgrad"
    update(
        native(name),
        coef.constants,
        coef.step,
        numel,
        grad=grad,
        grad_dtype=grad_dtype,
        weight=weight,
        weight_dtype=weight_dtype,
        rest=rest,
        master=master,
        states=states,
        state_dtype=moments_dtype,
        num_threads=num_threads,
    )


@dataclass(frozen=True)
class AdagradCoef:
    """The coefficients of one Adagrad step."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    """1 in the first step."""
    grad_scale: float = 1.0
    """Multiplies every element of the gradient first, once, in fp32: unscale times clip factor."""
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_step(self.step)

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """The fields of ``Adagrad`` in src/rules.h."""
        return (
            _signed(self.grad_scale, self.maximize),
            self.weight_decay,
            self.eps,
            -self.lr / (1.0 + (self.step - 1) * self.lr_decay),
        )


def adagrad(
    coef: AdagradCoef,
    numel: int,
    *,
    grad: int,
    grad_dtype: Dtype,
    weight: int,
    weight_dtype: Dtype,
    sum: int,
    rest: int = 0,
    master: int = 0,
    sum_scale: int = 0,
    moments_dtype: Dtype = Dtype.F32,
    num_threads: int = 1,
    native: Native = on_host,
) -> None:
    """Advance ``numel`` weights by one Adagrad step, in place, in one pass.

    ``sum`` holds the sums of squared gradients: ``initial_accumulator_value`` before step 1. The rest as for ``adam``.

    Cost:    20 bytes of memory traffic per element in fp32 (read 12, write 8).
    Source:  Duchi et al. 2011, JMLR 12; ``torch.optim.Adagrad``.
    """
    update(
        native("adagrad"),
        coef.constants,
        coef.step,
        numel,
        grad=grad,
        grad_dtype=grad_dtype,
        weight=weight,
        weight_dtype=weight_dtype,
        rest=rest,
        master=master,
        states=[State("sum", sum, sum_scale)],
        state_dtype=moments_dtype,
        num_threads=num_threads,
    )


@dataclass(frozen=True)
class LionCoef:
    """The coefficients of one Lion step."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    step: int
    """1 in the first step. Lion has no bias correction: it only seeds the rounding of INT8."""
    grad_scale: float = 1.0
    """Multiplies every element of the gradient first, once, in fp32: unscale times clip factor."""
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_beta(beta1=self.beta1, beta2=self.beta2)

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """The fields of ``Lion`` in src/rules.h."""
        return (
            _signed(self.grad_scale, self.maximize),
            1.0 - self.lr * self.weight_decay,
            1.0 - self.beta1,
            1.0 - self.beta2,
            -self.lr,
        )


def lion(
    coef: LionCoef,
    numel: int,
    *,
    grad: int,
    grad_dtype: Dtype,
    weight: int,
    weight_dtype: Dtype,
    exp_avg: int,
    rest: int = 0,
    master: int = 0,
    exp_avg_scale: int = 0,
    moments_dtype: Dtype = Dtype.F32,
    num_threads: int = 1,
    native: Native = on_host,
) -> None:
    """Advance ``numel`` weights by one Lion step (decoupled weight decay), in place, in one pass. As for ``adam``.

    Cost:    20 bytes of memory traffic per element in fp32 (read 12, write 8).
    Source:  Chen et al., arXiv:2302.06675, Alg. 2.
    """
    update(
        native("lion"),
        coef.constants,
        coef.step,
        numel,
        grad=grad,
        grad_dtype=grad_dtype,
        weight=weight,
        weight_dtype=weight_dtype,
        rest=rest,
        master=master,
        states=[State("exp_avg", exp_avg, exp_avg_scale)],
        state_dtype=moments_dtype,
        num_threads=num_threads,
    )


@dataclass(frozen=True)
class SgdCoef:
    """The coefficients of one SGD step."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    step: int
    """1 in the first step, which is not dampened."""
    nesterov: bool = False
    grad_scale: float = 1.0
    """Multiplies every element of the gradient first, once, in fp32: unscale times clip factor."""
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_step(self.step)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum and no dampening")

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """The fields of ``Sgd`` (without momentum) or ``SgdMomentum`` in src/rules.h."""
        first = (_signed(self.grad_scale, self.maximize), self.weight_decay)
        if self.momentum == 0:
            return (*first, -self.lr)
        return (*first, self.momentum, 1.0 if self.step == 1 else 1.0 - self.dampening, -self.lr)


def sgd(
    coef: SgdCoef,
    numel: int,
    *,
    grad: int,
    grad_dtype: Dtype,
    weight: int,
    weight_dtype: Dtype,
    momentum_buffer: int = 0,
    rest: int = 0,
    master: int = 0,
    momentum_buffer_scale: int = 0,
    moments_dtype: Dtype = Dtype.F32,
    num_threads: int = 1,
    native: Native = on_host,
) -> None:
    """Advance ``numel`` weights by one SGD step, in place, in one pass. As for ``adam``.

    ``momentum_buffer`` is needed if and only if the momentum is not zero; it is zero before step 1.

    Cost:    20 bytes of memory traffic per element in fp32 with momentum (read 12, write 8), 12 without.
    Source:  Sutskever et al. 2013; ``torch.optim.SGD``.
    """
    states = [State("momentum_buffer", momentum_buffer, momentum_buffer_scale)] if coef.momentum != 0 else []
    with_momentum = "sgd_nesterov" if coef.nesterov else "sgd_momentum"
    update(
        native(with_momentum if states else "sgd"),
        coef.constants,
        coef.step,
        numel,
        grad=grad,
        grad_dtype=grad_dtype,
        weight=weight,
        weight_dtype=weight_dtype,
        rest=rest,
        master=master,
        states=states,
        state_dtype=moments_dtype,
        num_threads=num_threads,
    )
