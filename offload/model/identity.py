"""Identity of objects: the parameters that a user has kept become the handles, and ordinary ones again at the end.

An optimizer, a list for ``clip_grad_norm_`` or an average of the weights that was made before the engine holds the
model's parameters as objects. They stay what the model has: each exchanges its content with that of its handle.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from offload.errors import ConfigError
from offload.model.gradient_handle import GradientHandle
from offload.model.handle import Handle
from offload.torch_internals import exchange_tensors, itself, no_dispatch
from offload.units import Site


def take_over(parameter: nn.Parameter, handle: nn.Parameter, sites: Collection[Site]) -> nn.Parameter:
    """Make ``parameter`` what ``handle`` is. Returns the object that is the handle now, without hooks.

    Its value stands at ``sites`` as another object, until it is stored. A backward through a graph of before raises
    ``ConfigError`` from now on.
    """
    for module, _ in sites:
        if isinstance(module, nn.RNNBase):
            let_go(module)
    if parameter.requires_grad and not parameter.is_inference():  # only graphs that are there keep this node
        get_gradient_edge(parameter).node.register_prehook(_refuse_old_graph)
    if not _exchange(parameter, handle):
        return handle
    _set_hooks(parameter, (None, None))
    for module, name in sites:
        module._parameters[name] = handle
    return parameter


def ordinary(handle: Handle) -> nn.Parameter:
    """An ordinary parameter with the present value, gradient and attributes of the handle."""
    parameter = handle.ordinary()
    vars(parameter).update(handle.attributes())
    gradient = handle.grad
    if isinstance(gradient, GradientHandle) and not gradient.is_kept:
        gradient = None  # a step has used it
    parameter.grad = None if gradient is None else gradient.detach().clone()
    return parameter  # type: ignore[return-value]


def give_back(handle: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """Make ``handle`` what ``parameter`` is. Returns the object that is the parameter now, with the handle's hooks."""
    leaves = handle._leaves  # type: ignore[attr-defined]
    if leaves is not None:
        leaves.end()
    hooks = _hooks(handle)
    found = handle if _exchange(handle, parameter) else parameter
    _set_hooks(found, hooks)
    return found


class OrdinaryParameters:
    """The parameters of a model as they would be without an engine: a copy of all values and gradients in memory."""

    def __init__(self, model: nn.Module) -> None:
        self._values: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._sites: list[tuple[nn.Module, str, int]] = []
        for module in model.modules():
            for name, handle in module._parameters.items():
                if isinstance(handle, Handle):
                    if id(handle) not in self._values:
                        self._values[id(handle)] = handle, ordinary(handle)
                    self._sites.append((module, name, id(handle)))

    def install(self) -> None:
        """Have them in the model in place of the handles. Nothing is in use, and no hook of the engine is left."""
        found = {key: give_back(handle, value) for key, (handle, value) in self._values.items()}
        for module, name, key in self._sites:
            module._parameters[name] = found[key]


def let_go(module: nn.RNNBase) -> None:
    """A recurrent module lists its weights, and looks at them weakly: where one is another now, it makes a new list."""
    module._flat_weights = [None] * len(module._flat_weights_names)
    module._flat_weight_refs = [_gone] * len(module._flat_weights_names)  # type: ignore[list-item]


def _gone() -> None:
    return None


def _exchange(left: nn.Parameter, right: nn.Parameter) -> bool:
    """Each becomes the other, apart from hooks; weak references are to the objects, which stay. False if nothing has
    changed: something else than Python looks at one of them, such as a graph, or one is of a class with slots."""
    try:
        _exchange_classes(left, right)
    except TypeError:
        return False
    try:
        if _is_looked_at(left) or _is_looked_at(right):
            raise RuntimeError("a graph, or another owner in C++")
        exchange_tensors(left, right)
    except RuntimeError:  # or a weak reference in C++
        _exchange_classes(left, right)
        return False
    left.__dict__, right.__dict__ = right.__dict__, left.__dict__
    return True


def _exchange_classes(left: nn.Parameter, right: nn.Parameter) -> None:
    left.__class__, right.__class__ = right.__class__, left.__class__


def _is_looked_at(parameter: nn.Parameter) -> bool:
    """Somebody has it in C++ who is not the node that accumulates its gradient."""
    count = parameter._use_count()  # type: ignore[attr-defined]
    if count == 2 and parameter.requires_grad and not parameter.is_inference():
        with itself(), no_dispatch():  # a handle of another class than its own, while the two are exchanged
            node = get_gradient_edge(parameter).node
        is_of_node = parameter._use_count() == 2  # type: ignore[attr-defined]  # else there was none before
        if is_of_node:
            node.register_prehook(_refuse_old_graph)
        return not is_of_node
    return bool(count > 1)


def _hooks(parameter: nn.Parameter) -> tuple[Any, Any]:
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def _set_hooks(parameter: nn.Parameter, hooks: tuple[Any, Any]) -> None:
    """Torch keeps them in two places, and exchanges one."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def _refuse_old_graph(gradients: Any) -> None:
    raise ConfigError(
        "this backward goes through a graph that was made before the engine was, or before its end: the gradients "
        "would not reach the model. Run the forward again."
    )
