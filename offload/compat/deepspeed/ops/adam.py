"""DeepSpeed's names of Adam, with its defaults: each is torch's own class, which the engine takes over."""

from __future__ import annotations

from typing import Any

import torch

from offload.errors import ConfigError


def DeepSpeedCPUAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.AdamW``, or ``Adam`` with ``adamw_mode=False``. States stay fp32 in any case."""
    if not bias_correction:
        raise ConfigError("DeepSpeedCPUAdam(bias_correction=False): Adam here corrects the bias. Leave it out")
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.AdamW``, or ``Adam`` with ``adam_w_mode=False``."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
