"""The optimizers of ``bench_step.py`` in plain PyTorch, with everything in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

OPTIONS = {"lr": 1e-4, "weight_decay": 0.01}


class Lamb(Optimizer):
    """LAMB with bias correction, each operation over all parameters at once. Source: You et al., arXiv:1904.00962,
    Alg. 2."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._num_steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._num_steps += 1
        for group in self.param_groups:
            weights = group["params"]
            states = [self.state[weight] for weight in weights]
            for weight, state in zip(weights, states, strict=True):
                if not state:
                    state |= {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            gradients = [weight.grad for weight in weights]
            averages, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
            torch._foreach_lerp_(averages, gradients, 0.1)
            torch._foreach_mul_(squares, 0.999)
            torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
            roots = torch._foreach_div(squares, 1 - 0.999**self._num_steps)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, 1e-6)
            moves = torch._foreach_div(averages, 1 - 0.9**self._num_steps)
            torch._foreach_div_(moves, roots)
            torch._foreach_add_(moves, weights, alpha=group["weight_decay"])
            lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(moves), strict=True)
            ratios = [float(length / moved) if length > 0 and moved > 0 else 1.0 for length, moved in lengths]
            torch._foreach_mul_(moves, [-group["lr"] * ratio for ratio in ratios])
            torch._foreach_add_(weights, moves)


def optimizers(name: str, model: nn.Module, weights: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Those that together train ``weights``, which stand for the parameters of ``model`` in their order."""
    if name == "adamw":
        return [torch.optim.AdamW(weights, fused=True, **OPTIONS)]
    if name == "lamb":
        return [Lamb(weights, **OPTIONS)]
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    tables |= {id(parameter) for path, parameter in model.named_parameters() if path.startswith("head.")}
    matrices, others = [], []
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        (matrices if parameter.ndim == 2 and id(parameter) not in tables else others).append(weight)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **OPTIONS)
    return [muon, torch.optim.AdamW(others, fused=True, **OPTIONS)]
