"""The kernels follow ``torch.optim`` within a few units in the last place per step, over 1,000 steps."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from offload.kernels import Dtype, update
from offload.native_optimizers import AdagradCoef, AdamCoef, LionCoef, SgdCoef

NUMEL = 1003
STEPS = 1000
ULPS_MAX = 4.0
LR = 1e-3
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum")


@functools.cache
def gradient(step: int) -> torch.Tensor:
    """Gradients over eight orders of magnitude, other signs and sizes in every step."""
    generator = torch.Generator().manual_seed(step)
    size = torch.logspace(-7, 1, NUMEL) * (1.1 + math.sin(step))
    return torch.randn(NUMEL, generator=generator) * size


def ulps(ours: torch.Tensor, theirs: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest difference, in units in the last place of ``scale``."""
    unit = torch.nextafter(scale, torch.full_like(scale, math.inf)) - scale
    return float(((ours - theirs).abs() / unit).max())


def follow(optimizer_class: Any, options: dict[str, Any], state_names: list[str], step_ours: Any) -> None:
    """Before each step give the kernel torch's weight and states; after it, compare what both have written.

    Errors are in units of the largest of the numbers that were added up, since where these cancel their sum has fewer
    digits of its own: for a weight the old one and lr times the terms of the direction, for a state the old one and the
    gradient.
    """
    theirs = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    optimizer = optimizer_class([theirs], **options)
    for step in range(1, STEPS + 1):
        weight, grad = theirs.detach().clone(), gradient(step)
        state = optimizer.state[theirs]
        states = {name: state[name].clone() if name in state else torch.zeros(NUMEL) for name in state_names}
        before, states_before = weight.clone(), {name: value.clone() for name, value in states.items()}
        theirs.grad = grad.clone()
        optimizer.step()
        step_ours(
            step,
            grad=grad.data_ptr(),
            grad_dtype=Dtype.F32,
            weight=weight.data_ptr(),
            weight_dtype=Dtype.F32,
            **{name: value.data_ptr() for name, value in states.items()},
        )
        direction = (
            grad.abs() + sum(states_before.values(), torch.zeros(NUMEL)).abs()
            if optimizer_class is torch.optim.SGD
            else 1.0
        )
        scale = torch.maximum(before.abs(), torch.ones(NUMEL) * LR * direction)
        assert ulps(weight, theirs.detach(), scale) <= ULPS_MAX, f"weight, step {step}"
        for name, ours in states.items():
            input_size = grad.abs() + abs(options.get("weight_decay", 0)) * before.abs()
            input_size = input_size**2 if name in SQUARES else input_size
            scale = torch.maximum(states_before[name].abs(), input_size)
            assert ulps(ours, state[name], scale) <= ULPS_MAX, f"{name}, step {step}"
        assert not torch.equal(weight, before)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("maximize", "amsgrad", "fused"), [(False, False, False), (False, False, True), (True, True, False)]
)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
def test_adam(optimizer_class: Any, maximize: bool, amsgrad: bool, fused: bool) -> None:
    def step_ours(step: int, **arrays: Any) -> None:
        decoupled = optimizer_class is torch.optim.AdamW
        coef = AdamCoef(
            lr=LR, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step, decoupled=decoupled, amsgrad=amsgrad,
            maximize=maximize,
        )  # fmt: skip
        update(coef, NUMEL, **arrays)

    options = {"lr": LR, "weight_decay": 0.1, "amsgrad": amsgrad, "maximize": maximize, "fused": fused}
    follow(optimizer_class, options, ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad, step_ours)


@pytest.mark.parametrize("maximize", [False, True])
def test_adagrad(maximize: bool) -> None:
    def step_ours(step: int, **arrays: Any) -> None:
        coef = AdagradCoef(lr=LR, lr_decay=0.01, eps=1e-10, weight_decay=0.1, step=step, maximize=maximize)
        update(coef, NUMEL, **arrays)

    follow(
        torch.optim.Adagrad, {"lr": LR, "lr_decay": 0.01, "weight_decay": 0.1, "maximize": maximize}, ["sum"], step_ours
    )


@pytest.mark.each_value
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0, 0, False), (0.9, 0.3, False), (0.9, 0, True)])
def test_sgd(momentum: float, dampening: float, nesterov: bool, maximize: bool) -> None:
    def step_ours(step: int, **arrays: Any) -> None:
        coef = SgdCoef(**options, step=step)
        update(coef, NUMEL, **arrays)

    options = {"lr": LR, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": 0.1}
    options["maximize"] = maximize
    follow(torch.optim.SGD, options, ["momentum_buffer"] * (momentum > 0), step_ours)


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675, written down in torch."""

    def __init__(self, params: Any, lr: float, beta1: float, beta2: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        param = group["params"][0]
        exp_avg = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        direction = torch.sign(torch.lerp(exp_avg, param.grad, 1 - group["beta1"]))
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        exp_avg.lerp_(param.grad, 1 - group["beta2"])


def test_lion() -> None:
    def step_ours(step: int, **arrays: Any) -> None:
        update(LionCoef(lr=LR, beta1=0.9, beta2=0.99, weight_decay=0.1, step=step), NUMEL, **arrays)

    follow(PaperLion, {"lr": LR, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}, ["exp_avg"], step_ours)
