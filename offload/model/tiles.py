"""The largest tensors of long sequences in tiles of rows: logits, and what is in the middle of an MLP.

Both run within one call of their module, so that its weights come in once for all tiles, and each tile is run again in
backward: what is alive is one tile's. They need no engine.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from offload.errors import ConfigError

ROWS = 2048
"""Rows of a tile, where nobody says how many."""


def cross_entropy_in_tiles(
    head: nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows: int = ROWS,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """Cross entropy of ``head(hidden)`` in fp32, without all logits at a time; equal to rounding.

    ``hidden`` has the shape (..., width), ``targets`` the same without the last. Logits of so many ``rows`` are alive
    at a time, in forward and in backward, which computes them once more. Raises ``ConfigError`` if the head is no
    ``nn.Linear``, or shapes do not fit.
    """
    if type(head) is not nn.Linear:
        raise ConfigError(f"cross_entropy_in_tiles: expected an nn.Linear as the head, got {type(head).__name__}")
    if hidden.shape[:-1] != targets.shape:
        raise ConfigError(
            f"cross_entropy_in_tiles: hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not fit: "
            "targets have the shape of hidden without the last dimension"
        )
    _check(rows)

    def loss_of(
        own: dict[str, Any], names: list[str], tile: torch.Tensor, target: torch.Tensor, *parameters: Any
    ) -> torch.Tensor:
        logits = linear(tile, **own, **dict(zip(names, parameters, strict=True))).float()
        return cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

    def forward(own: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        parameters = {"weight": own.weight, "bias": own.bias}
        ordinary = {name: value for name, value in parameters.items() if type(value) is nn.Parameter}
        others = {name: value for name, value in parameters.items() if name not in ordinary}  # in pieces, or none
        one = partial(loss_of, others, list(ordinary))
        tiles = zip(hidden.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
        return torch.stack([_again(one, tile, target, *ordinary.values()) for tile, target in tiles]).sum()

    before = vars(head).get("forward")
    head.forward = types.MethodType(forward, head)  # type: ignore[method-assign]
    try:
        total: torch.Tensor = head(hidden)
    finally:
        del head.forward
        if before is not None:
            head.forward = before  # type: ignore[method-assign]
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def in_tiles(module: nn.Module, *, rows: int = ROWS) -> Callable[[], None]:
    """Have a module that treats each row by itself, such as an MLP, run on tiles of ``rows``; equal to rounding.

    It takes one tensor of the shape (..., width) and gives one with as many rows. Each tile is run again in backward.
    Call this before the engine is made. Returns what undoes it.
    """
    _check(rows)
    own: Callable[..., Any] = module.forward
    names = [name for name, _ in module.named_parameters()]
    had = "forward" in vars(module)

    def run(tile: torch.Tensor, *parameters: torch.Tensor) -> Any:
        module.forward = own
        try:
            return functional_call(module, dict(zip(names, parameters, strict=True)), (tile,))
        finally:
            module.forward = tiled

    def tiled(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        if len(flat) <= rows:
            return own(x)  # type: ignore[no-any-return]
        parameters = [parameter for _, parameter in module.named_parameters()]
        outputs = [_again(run, tile, *parameters) for tile in flat.split(rows)]
        whole: torch.Tensor = torch.cat(outputs).unflatten(0, x.shape[:-1])
        return whole

    def undo() -> None:
        if had:
            module.forward = own
        else:
            del module.forward

    module.forward = tiled
    return undo


def _check(rows: int) -> None:
    if rows < 1:
        raise ConfigError(f"rows: expected a positive number, got {rows}")


_again = partial(checkpoint, use_reentrant=False)
