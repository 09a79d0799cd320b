"""The largest tensors of long sequences in tiles: logits, what is in the middle of an MLP, and what is in an attention.

All run within one call of their module, so that its weights come in once for all tiles, and each tile is run again in
backward: what is alive is one tile's. They need no engine.

[Note: An attention in tiles] Heads do not see each other. So a group of them is a smaller attention: some rows of the
weights of queries, keys and values, and as many columns of the output's; the sum over the groups is the whole (tensor
parallelism divides an attention so among devices; here its parts come one after the other). Of the length of the
sequence and the full width are the input and the sum alone.

[Note: One gradient] What many tiles use gets as many gradients, and autograd keeps several of them before it adds them
up. Each is as long as the sequence, or all of them together are. Here every use adds its own to one tensor at once
(``_Use``), which is the gradient of what is used when all have done so (``_Used``).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from offload.errors import ConfigError
from offload.torch_internals import graph_task, put_together, taken_apart

ROWS = 2048
"""Rows of a tile, where nobody says how many."""

_PLAIN = (torch.Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device)


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
    _check("rows", rows)

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
        tiles = zip(_split(hidden.flatten(0, -2), rows), targets.flatten().split(rows), strict=True)
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


class _Gradient:
    """The gradient of a tensor that tiles use: see [Note: One gradient]. It refers to no tensor of a forward: each use
    is given the tensor, so that what a graph keeps is what hooks of saved tensors have seen."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        self._value: torch.Tensor | None = None
        self._task = -1
        """The backward that adds to it: what another one has left, which has failed, is none of its."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, _Gradient]:
        """A tensor for all uses to look at, and what sums up."""
        gradient = cls(tensor.shape)
        token: torch.Tensor = _Used.apply(tensor, gradient)  # type: ignore[no-untyped-call]
        return token, gradient

    def add(self, rows: slice, gradient: torch.Tensor) -> None:
        task = graph_task()
        if self._value is None or self._task != task:
            self._task, self._value = task, gradient.new_zeros(self._shape)
        self._value[rows] += gradient

    def take(self) -> torch.Tensor | None:
        value, self._value = self._value, None
        return value


class _Used(torch.autograd.Function):
    """Its backward comes after those of all uses."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: _Gradient) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.gradient.take(), None


class _Use(torch.autograd.Function):
    """These rows of a tensor."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, tensor: torch.Tensor, gradient: _Gradient, rows: slice) -> torch.Tensor:
        ctx.place = gradient, rows
        return tensor[rows]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total, rows = ctx.place
        total.add(rows, gradient)
        return gradient.new_zeros(()), None, None, None


class _Added(torch.autograd.Function):
    """A sum in the memory of its first part, which nobody else looks at."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(total)
        return total.add_(part)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient


def _split(tensor: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Tiles of so many rows."""
    token, gradient = _Gradient.of(tensor)
    starts = range(0, len(tensor), rows)
    return [_Use.apply(token, tensor.detach(), gradient, slice(start, start + rows)) for start in starts]  # type: ignore[no-untyped-call]


class _Tiled:
    """A module whose forward another one stands for, which runs it in tiles."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._had = "forward" in vars(module)
        self.own: Callable[..., Any] = module.forward
        self.names = [name for name, _ in module.named_parameters()]

    def begin(self, forward: Callable[..., Any]) -> Callable[[], None]:
        """Have ``forward`` stand there. Returns what undoes it."""
        self._forward = self._module.forward = forward
        return self._end

    def _end(self) -> None:
        if self._had:
            self._module.forward = self.own
        else:
            del self._module.forward

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._module.named_parameters()]

    def run(self, parameters: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """The module's own forward with these parameters."""
        self._module.forward = self.own
        try:
            return functional_call(self._module, dict(zip(self.names, parameters, strict=True)), args, kwargs)
        finally:
            self._module.forward = self._forward


def in_tiles(module: nn.Module, *, rows: int = ROWS) -> Callable[[], None]:
    """Have a module that treats each row by itself, such as an MLP, run on tiles of ``rows``; equal to rounding.

    It takes one tensor of the shape (..., width) and gives one with as many rows. Each tile is run again in backward.
    Call this before the engine is made. Returns what undoes it.
    """
    _check("rows", rows)
    tiled = _Tiled(module)

    def run(tile: torch.Tensor, *parameters: torch.Tensor) -> Any:
        return tiled.run(parameters, tile)

    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        if len(flat) <= rows:
            return tiled.own(x)  # type: ignore[no-any-return]
        parameters = tiled.parameters()
        outputs = [_again(run, tile, *parameters) for tile in _split(flat, rows)]
        whole: torch.Tensor = torch.cat(outputs).unflatten(0, x.shape[:-1])
        return whole

    return tiled.begin(forward)


def attention_in_tiles(
    module: nn.Module,
    *,
    tiles: int,
    inputs: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    outputs: Sequence[str] = ("o_proj",),
) -> Callable[[], None]:
    """Have an attention run on its heads in so many ``tiles``, one after the other; equal to rounding.

    ``inputs`` are the names of its linear layers whose rows the heads divide among themselves, ``outputs`` of those
    whose columns they do. The module must find the number of its heads by the shapes of these, as those of
    ``transformers`` do, and gives a tensor, or a tuple of one and ``None``. Each tile is run again in backward; where
    there is none, the module runs whole. Call this before the engine is made. Returns what undoes it. Raises
    ``ConfigError`` if layers are not there or cannot be divided; in a forward, if arguments are such that runs would
    see each other through them (a cache). See [Note: An attention in tiles].
    """
    _check("tiles", tiles)
    divided = {f"{name}.{kind}": 0 for name in inputs for kind in ("weight", "bias")}
    divided |= {f"{name}.weight": 1 for name in outputs}
    for name in (*inputs, *outputs):
        _check_division(module, name, divided[f"{name}.weight"], tiles)
    once = [f"{name}.bias" for name in outputs]
    tiled = _Tiled(module)

    def part(name: str, parameter: torch.Tensor, tile: int) -> torch.Tensor:
        if name in divided:
            return parameter.chunk(tiles, divided[name])[tile]
        return torch.zeros_like(parameter) if tile and name in once else parameter

    def run(tile: int, structure: Any, gradient: _Gradient, token: torch.Tensor, place: int, *values: Any) -> Any:
        parameters, leaves = values[: len(tiled.names)], values[len(tiled.names) :]
        hidden = leaves[place]

        def use(layer: nn.Module, given: tuple[Any, ...]) -> Any:
            return _Use.apply(token, hidden.detach(), gradient, slice(None)) if given[0] is hidden else None  # type: ignore[no-untyped-call]

        args, kwargs = put_together(list(leaves), structure)
        parts = [part(name, value, tile) for name, value in zip(tiled.names, parameters, strict=True)]
        with ExitStack() as hooks:
            for name in inputs:
                hooks.callback(module.get_submodule(name).register_forward_pre_hook(use).remove)
            return tiled.run(parts, *args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return tiled.own(*args, **kwargs)
        leaves, structure = taken_apart((args, kwargs))
        _check_plain(leaves)
        place = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        token, gradient = _Gradient.of(leaves[place])

        def of_tile(tile: int) -> Any:
            return _again(run, tile, structure, gradient, token, place, *tiled.parameters(), *leaves)

        found = of_tile(0)
        total, *others = found if isinstance(found, tuple) else (found,)
        if any(other is not None for other in others):
            raise ConfigError(
                f"attention_in_tiles: {type(module).__name__} gives more than one tensor (scores?), and no sum "
                'over heads is the others\'. Have it give one alone (attn_implementation="sdpa")'
            )
        is_tuple, found = isinstance(found, tuple), None
        total = total.clone()
        for tile in range(1, tiles):  # each is as long as the sequence: nobody has one while the next is computed
            total = _Added.apply(total, _only(of_tile(tile)))  # type: ignore[no-untyped-call]
        return (total, *others) if is_tuple else total

    return tiled.begin(forward)


def _only(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _check(name: str, number: int) -> None:
    if number < 1:
        raise ConfigError(f"{name}: expected a positive number, got {number}")


def _check_division(module: nn.Module, name: str, dim: int, tiles: int) -> None:
    """Raise ``ConfigError`` if so many groups of heads cannot divide the linear layer of this name."""
    layer = getattr(module, name, None)
    if not isinstance(layer, nn.Linear):
        there = ", ".join(name for name, child in module.named_children() if isinstance(child, nn.Linear))
        raise ConfigError(
            f"attention_in_tiles: {type(module).__name__} has no linear layer {name!r}. Those that it has: {there}. "
            "Give their names as inputs= and outputs="
        )
    heads = layer.weight.shape[dim] // getattr(module, "head_dim", 1)
    if heads % tiles:
        raise ConfigError(
            f"attention_in_tiles: tiles={tiles} do not divide the {heads} heads of {name}. Take a divisor of {heads}"
        )


def _check_plain(leaves: Sequence[Any]) -> None:
    """Raise ``ConfigError`` for arguments through which one run may see what another one did."""
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            raise ConfigError(
                f"attention_in_tiles: the attention is given a {type(leaf).__name__}, which each tile would change for "
                "the next one. Leave it out in training (a cache: use_cache=False)"
            )


_again = partial(checkpoint, use_reentrant=False)
