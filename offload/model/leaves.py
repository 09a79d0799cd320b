"""Leaves of one parameter in graphs, seen as one by the hooks on it.

Inside of its unit's forward a parameter is an ordinary one; an operation outside has used the handle. To autograd
these are two leaves, each of which gets a part of the gradient. Hooks are called with the whole: of two parts that come
in one backward the first waits for the other, and zeros go in its place.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from offload.torch_internals import belongs_to_backward, graph_task, itself


class Removers:
    """Takes several hooks out again."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hooks
        self._then: Callable[[], Any] = NoneType

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._then()

    def then(self, call: Callable[[], Any]) -> None:
        """Make this call when they are out."""
        self._then = call

    def __enter__(self) -> Removers:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Leaves:
    """Hooks on one parameter. ``leaves`` are known weakly: the collector does not see into hooks of tensors."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        self._task = -1
        """The backward that the rest is of."""
        self._come: list[int] = []
        """Leaves whose gradients have come in it."""
        self._part: torch.Tensor | None = None
        """Gradient that waits for that of another leaf."""
        self._hooks: dict[int, Callable[[torch.Tensor], Any]] = {}
        """Those that see the gradient before it is accumulated."""
        self._is_joined_outside = False
        for index, leaf in enumerate(leaves):
            with itself():
                torch.Tensor.register_hook(leaf, partial(self._take, index))

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Removers:
        """Call ``hook`` with the whole gradient, before it is accumulated."""

        def call(index: int, gradient: torch.Tensor) -> Any:
            return None if self._is_joined_outside or self._waits(index) else hook(gradient)

        removers = self._register(torch.Tensor.register_hook, call)
        self._hooks[id(removers)] = hook
        removers.then(partial(self._hooks.pop, id(removers), None))
        return removers

    def register_post_hook(self, hook: Callable[[torch.Tensor], None]) -> Removers:
        """Call ``hook`` with the first leaf when the whole gradient is accumulated."""

        def call(index: int, leaf: torch.Tensor) -> Any:
            first = self._leaves[0]() if self._leaves else leaf
            return None if first is None or self._waits(index) else hook(first)  # torch refuses what is not None

        return self._register(torch.Tensor.register_post_accumulate_grad_hook, call)

    @contextmanager
    def joined_outside(self) -> Iterator[None]:
        """Within, somebody else gets the gradient of each leaf (``torch.autograd.grad``): hooks are not called."""
        self._is_joined_outside = True
        try:
            yield
        finally:
            self._is_joined_outside = False

    def hooked(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what hooks make of the whole gradient."""
        for hook in list(self._hooks.values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # a parameter that is saved in its unit's forward is an ordinary one

    def end(self) -> None:
        """The hooks are those of an ordinary parameter from now on."""
        self._leaves.clear()

    def _register(self, register: Callable[..., Any], call: Callable[..., Any]) -> Removers:
        alive = [(index, leaf) for index, of_leaf in enumerate(self._leaves) if (leaf := of_leaf()) is not None]
        with itself():
            return Removers([register(leaf, partial(call, index)) for index, leaf in alive])

    def _take(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a leaf has come, before all hooks of others."""
        if self._is_joined_outside:
            return None
        if self._task != graph_task():
            self._task, self._come, self._part = graph_task(), [], None
        self._come.append(index)
        part = gradient if self._part is None else self._part + gradient
        self._part = None
        if self._waits(index):
            self._part = part
            return torch.zeros_like(gradient)
        return part

    def _waits(self, index: int) -> bool:
        """More of this backward's gradient comes to another leaf."""
        if self._come[-1:] != [index]:
            return False
        others = (leaf() for other, leaf in enumerate(self._leaves) if other not in self._come)
        return any(belongs_to_backward(_node(leaf)) for leaf in others if leaf is not None and leaf.requires_grad)


def _node(leaf: torch.Tensor) -> Node:
    """The node that accumulates the leaf's gradient."""
    with itself():
        return get_gradient_edge(leaf).node


def flatten(items: Any) -> list[Any]:
    """Return what is in these lists and tuples, however deep."""
    return [each for item in items for each in (flatten(item) if isinstance(item, (list, tuple)) else [item])]
