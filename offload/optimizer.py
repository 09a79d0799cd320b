"""The optimizer that users and schedulers see: parameter groups over handles; the states are the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError
from swapper import OffloadError


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW with the options of ``torch.optim.AdamW``. ``step`` is the engine's ``step``."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        take_step: Callable[[], None],
        drop_gradients: Callable[[], None],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._take_step = take_step
        self._drop_gradients = drop_gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the step. A closure is refused: it would run the model again in the middle of it."""
        if closure is not None:
            raise ConfigError("optimizer.step(closure) is not supported: compute the loss, then call step()")
        self._take_step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        self._drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the moments rest in the engine, and a state dict without them would lose them silently."""
        raise OffloadError(
            "optimizer.state_dict() is not supported yet: the moments rest in the engine. engine.state_dict() saves "
            "the weights; a run that continues from them begins with new moments."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, like ``state_dict``."""
        raise OffloadError("optimizer.load_state_dict() is not supported yet: the moments rest in the engine")

    def coefficients(self, group: dict[str, Any], step: int, grad_scale: float) -> kernels.AdamCoef:
        """What the kernel needs for a parameter of ``group`` that takes its ``step``-th step."""
        beta1, beta2 = group["betas"]
        return kernels.AdamCoef(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            grad_scale=grad_scale,
        )
