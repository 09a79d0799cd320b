"""The same training with everything in memory: plain PyTorch forward and backward, gradients and states in ordinary
tensors, the update by the same kernels. What the engine computes must agree with it bit for bit.

``main`` runs it in a process of its own, so that its memory is not the training's.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from offload import kernels
from offload.native_optimizers import AdamCoef
from offload.train import process
from offload.train.digest import digests_of
from offload.train.settings import GRADIENT_CLIPPING, OPTIMIZER, STATE_BYTES, Settings

_KERNEL_DTYPE = {torch.float32: kernels.Dtype.F32, torch.bfloat16: kernels.Dtype.BF16}


class InMemoryAdamW(torch.optim.Optimizer):
    """AdamW by ``offload.kernels`` on ordinary tensors, with global-norm clipping. bf16 weights have an fp32 master,
    as weight and 16-bit ``rests``."""

    def __init__(self, parameters: Iterable[nn.Parameter], rests: dict[nn.Parameter, Tensor], **defaults: Any) -> None:
        super().__init__(parameters, defaults)
        self._rests = rests
        self._num_steps = 0
        for parameter in self._parameters():
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][name] = torch.zeros(parameter.shape, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter with its gradient, scaled so that the global norm is at most the bound."""
        grads = {parameter: _gradient(parameter) for parameter in self._parameters()}
        threads = torch.get_num_threads()
        native = kernels.OnHost(kernels.always(threads))
        squares = 0.0
        for grad in grads.values():  # one by one, as the engine adds them: ``sum`` compensates since Python 3.12
            squares += kernels.sum_squares(grad.data_ptr(), grad.numel(), _KERNEL_DTYPE[grad.dtype], threads)
        scale = min(GRADIENT_CLIPPING / (math.sqrt(squares) + 1e-6), 1.0)
        self._num_steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            coef = AdamCoef(
                lr=float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=self._num_steps,
                grad_scale=scale,
            )
            for parameter in group["params"]:
                rest = self._rests.get(parameter)
                kernels.update(
                    coef,
                    parameter.numel(),
                    grad=grads[parameter].data_ptr(),
                    grad_dtype=_KERNEL_DTYPE[parameter.dtype],
                    weight=parameter.data_ptr(),
                    weight_dtype=_KERNEL_DTYPE[parameter.dtype],
                    rest=0 if rest is None else rest.data_ptr(),
                    exp_avg=self.state[parameter]["exp_avg"].data_ptr(),
                    exp_avg_sq=self.state[parameter]["exp_avg_sq"].data_ptr(),
                    native=native,
                )

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def main() -> None:
    """Repeat the first steps of a run. Reads one JSON object from stdin; writes one to stdout for every step (its loss
    and seconds) and a last one: the digests of the weights, and the memory that activations took."""
    request = json.loads(sys.stdin.read())
    settings = Settings.from_json(request["settings"])
    torch.set_num_threads(request["num_threads"])
    batches = settings.batches()
    model = settings.empty_model()  # torch imports 80 MB when it is first asked for one
    rss_imports_bytes = process.rss_bytes()
    torch.manual_seed(settings.seed)
    _materialize(model)
    rests = _split_masters(model) if settings.precision == "bf16" else {}
    optimizer = InMemoryAdamW(model.parameters(), rests, lr=settings.lr, **OPTIMIZER)
    scheduler = settings.schedule(optimizer)
    for tokens, targets in islice(batches, request["steps"]):
        if os.getppid() != request["parent"]:
            sys.exit("the training has gone")
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        _answer({"loss": float(loss.item()).hex(), "seconds": time.perf_counter() - start})
    final = digests_of(model.named_parameters())
    # [Note: Activations] One more batch while the last gradients are still there: now all of the state is in memory
    # together with all activations, and what is not state is activations and working memory.
    model(*next(batches)).backward()
    numel = sum(parameter.numel() for parameter in model.parameters())
    state_bytes = numel * sum(STATE_BYTES[settings.precision].values())
    activation_bytes = process.peak_rss_bytes() - rss_imports_bytes - state_bytes
    _answer({"digests": final, "activation_bytes": activation_bytes})


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _materialize(model: nn.Module) -> None:
    """Give every module real parameters, initialised by its own ``reset_parameters``."""
    for module in model.modules():
        if module._parameters:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]


def _split_masters(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Replace every fp32 parameter by its bf16 weight; returns the other half of each master."""
    rests = {}
    for module in model.modules():
        for name, master in module._parameters.items():
            if master is None:
                continue
            weight = nn.Parameter(torch.empty(master.shape, dtype=torch.bfloat16))
            rest = torch.empty(master.shape, dtype=torch.uint16)
            kernels.split_master(master.numel(), master.data_ptr(), weight.data_ptr(), rest.data_ptr())
            module._parameters[name] = weight
            rests[weight] = rest
    return rests


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, laid out as the parameter is."""
    assert parameter.grad is not None
    return parameter.grad.contiguous()
