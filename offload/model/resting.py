"""Resting parameters: what an ordinary parameter is while its unit is not in use.

A forward sees ordinary parameters over the window. Somebody may keep such an object beyond the use: the forward itself,
the frames of an exception, what ``torch.compile`` has made of a module. Once the use is over its class is another one,
and whatever is done with it is done with what stands in the model for the parameter: its handle. So nobody has to
know who has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import GetSetDescriptorType
from typing import Any, Protocol

import torch
from torch import nn

from offload.torch_internals import map_leaves
from swapper import OffloadError


class InModel(Protocol):
    """Backing that knows where the model has its parameter."""

    name: str

    @property
    def in_model(self) -> nn.Parameter | None: ...


class Resting:
    """Base of the classes of parameters that rest."""

    _backing: InModel

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(_in_model, args), map_leaves(_in_model, kwargs or {})
        return _of_class(func, args[0] if args else None)(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(_in_model(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_in_model(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _in_model(self).__reduce_ex__(protocol)


@cache
def resting_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of class ``kind`` while it rests."""
    return type(kind.__name__, (Resting, kind), {})


def _in_model(item: Any) -> Any:
    if not isinstance(item, Resting):
        return item
    found = item._backing.in_model
    if found is None or isinstance(found, Resting):
        raise OffloadError(f"parameter {item._backing.name}: the model has another one in its place by now")
    return found


def _of_class(func: Any, item: Any) -> Callable[..., Any]:
    """Return what ``func`` of ``torch.Tensor`` is in the item's own class."""
    descriptor = getattr(func, "__self__", None)
    if isinstance(descriptor, GetSetDescriptorType):
        name = descriptor.__name__
        return (lambda item: getattr(item, name)) if func.__name__ == "__get__" else _setter(name)
    name = getattr(func, "__name__", "")
    is_method = isinstance(item, torch.Tensor) and getattr(torch.Tensor, name, None) is func
    return getattr(type(item), name) if is_method else func  # type: ignore[no-any-return]


def _setter(name: str) -> Callable[..., None]:
    return lambda item, *value: setattr(item, name, *value) if value else delattr(item, name)
