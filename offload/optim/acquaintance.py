"""What an optimizer knows of single parameters beside its groups: by ``id()``, by place, and by modules that have them.

[Note: Who a stand-in is] ``bitsandbytes`` keeps options of single parameters in an object beside the optimizer: in
tables by ``id(parameter)`` and by place, ``(index of the group, index in it)``, and in a list of modules and names. A
copy of such an optimizer that runs one parameter must find there what the optimizer would. So a shared state has tokens
in place of ids and of modules. They become ids of stand-ins where a twin gets the state, and a twin that knows
parameters has all of them in its groups: one that takes no part in a step is a placeholder without a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Place = tuple[int, int]
"""Index of a group, and of a parameter in it."""

_CONTAINERS = (list, tuple, set, frozenset, deque)
_OPAQUE = (torch.Tensor, torch.optim.Optimizer, type, FunctionType, MethodType, ModuleType)


class _Parameters:
    """Key, by its ``id()``, of the parameters by place in the memo of a copy that tokens become real in."""


_PARAMETERS = _Parameters()


def known_as(parameters: Mapping[Place, nn.Parameter]) -> dict[int, Any]:
    """Part of a memo of ``copy.deepcopy``: what tokens stand for are these parameters."""
    return {id(_PARAMETERS): parameters}


@dataclass(frozen=True)
class IdOf:
    """Token for the ``id()`` of the parameter at a place."""

    place: Place

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Any:
        parameters = memo.get(id(_PARAMETERS))
        return self if parameters is None else id(parameters[self.place])


class Owner:
    """Token for a module: it has stand-ins for those of its parameters that are the optimizer's, under their names.

    Which these are is seen as it is made: while a module computes, it may have other parameters.
    """

    __slots__ = ("_module", "_parameters", "_places")

    def __init__(
        self, module: nn.Module, places: Mapping[str, Place], parameters: Mapping[Place, nn.Parameter] | None = None
    ) -> None:
        self._module, self._places, self._parameters = module, places, parameters

    @classmethod
    def of(cls, module: nn.Module, places: Mapping[int, Place]) -> Owner:
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        return cls(module, {name: places[id(parameter)] for name, parameter in named if id(parameter) in places})

    def __getattr__(self, name: str) -> Any:
        if name in self._places and self._parameters is not None:
            return self._parameters[self._places[name]]
        found = getattr(self._module, name)
        if isinstance(found, torch.Tensor):
            return found
        raise AttributeError(f"a step finds parameters alone in a module that the optimizer keeps, and no {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and other._module is self._module

    def __hash__(self) -> int:
        return hash(self._module)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Owner:
        return Owner(self._module, self._places, memo.get(id(_PARAMETERS)))


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules that are items of containers somewhere in ``value``."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        part = rest.pop()
        if id(part) in seen or isinstance(part, (nn.Module, *_OPAQUE)):
            continue
        seen.add(id(part))
        items: list[Any] = []
        if isinstance(part, Mapping):
            items = [*part.keys(), *part.values()]
        elif isinstance(part, _CONTAINERS):
            items = [*part]
        yield from (item for item in items if isinstance(item, nn.Module))
        rest += items
        rest += getattr(part, "__dict__", {}).values()


def put_tokens(copies: Iterable[Any], places: Mapping[int, Place]) -> bool:
    """Put a token in the place of each id in ``copies``, as key or value of a mapping, item of a list or a set. Return
    whether parameters are known there, by their ids or by their places."""
    with_options, known = {*places.values()}, False
    for part in copies:
        inner = part if isinstance(part, (dict, list, set)) else getattr(part, "__dict__", None)
        if not isinstance(inner, (dict, list, set)) or isinstance(part, _OPAQUE):
            continue
        items = [*inner, *inner.values()] if isinstance(inner, dict) else inner
        if any(type(item) is int and item in places for item in items):
            _replace(inner, places)
            known = True
        known |= isinstance(inner, dict) and any(type(key) is tuple and key in with_options for key in inner)
    return known


def _replace(container: Any, places: Mapping[int, Place]) -> None:
    def token(item: Any) -> Any:
        return IdOf(places[item]) if type(item) is int and item in places else item

    if isinstance(container, dict):
        items: list[Any] = [(token(key), token(value)) for key, value in container.items()]
    else:
        items = [token(item) for item in container]
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(items)
