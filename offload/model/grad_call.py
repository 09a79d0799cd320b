"""``torch.autograd.grad`` and ``backward(inputs=...)`` for parameters that rest in an engine.

Graphs know the ordinary parameters that stood in the handles' place, and handles themselves only where an operation
outside of a unit has used them. A call that names handles is made with all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

InGraphs = Callable[[Any], list[Any]]
"""The tensors that stand for one of the ``inputs`` in graphs."""


def grad(
    in_graphs: InGraphs,
    outputs: Any,
    inputs: Sequence[Any],
    grad_outputs: Any = None,
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """As ``torch.autograd.grad``. The gradients are ordinary tensors, all of them in memory."""
    groups = [in_graphs(item) for item in inputs]
    flat = [leaf for group in groups for leaf in group]
    hooked = {id(item): leaves for item in inputs if (leaves := getattr(item, "_leaves", None)) is not None}
    with ExitStack() as joining:
        for leaves in hooked.values():
            joining.enter_context(leaves.joined_outside())
        found = iter(torch.autograd.grad(outputs, flat, grad_outputs, allow_unused=True, **options))
    gradients = []
    for item, group in zip(inputs, groups, strict=True):
        parts = [part for part in (next(found) for _ in group) if part is not None]
        gradient = sum(parts[1:], parts[0]) if parts else None
        if gradient is not None and id(item) in hooked:
            gradient = hooked[id(item)].hooked(gradient)
        if gradient is None and materialize_grads:
            gradient = torch.zeros(item.shape, dtype=item.dtype, device=item.device)
        if gradient is None and not allow_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        gradients.append(gradient)
    return tuple(gradients)


def backward(
    in_graphs: InGraphs, tensors: Any, *, inputs: torch.Tensor | Sequence[Any] | None = None, **options: Any
) -> None:
    """As ``torch.autograd.backward`` with ``inputs``: these parameters get gradients, and no others."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    flat = None if inputs is None else [leaf for item in inputs for leaf in in_graphs(item)]
    torch.autograd.backward(tensors, inputs=flat, **options)


CALLS: Mapping[Any, Callable[..., Any]] = {torch.autograd.grad: grad, torch.autograd.backward: backward}
"""Calls in place of functions of torch, with ``in_graphs`` before its arguments."""
