"""Containers of Python's own, as they are looked at from outside.

A class that is derived from one may do more than to look (one of ``transformers`` makes modules), or refuse to be
looked at (a pair that is a tuple without a length): the methods are those of the built-in class.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

CHANGING: tuple[type, ...] = (OrderedDict, dict, list, set, deque)
"""Classes of containers that may be changed in place."""
CONTAINERS: tuple[type, ...] = (*CHANGING, tuple)


def kind_of(container: Any) -> Any:
    """The built-in class that a container is of, or derived from."""
    if type(container) in CONTAINERS:
        return type(container)
    return next(kind for kind in CONTAINERS if isinstance(container, kind))


def length_of(container: Any) -> int:
    return int(kind_of(container).__len__(container))


def items_of(container: Any) -> list[Any]:
    """Its items, and the values of a mapping."""
    kind = kind_of(container)
    return [*dict.values(container)] if issubclass(kind, dict) else [*kind.__iter__(container)]


def content_of(container: Any) -> Any:
    """A copy: a ``dict``, a ``set`` or a list."""
    kind = kind_of(container)
    if issubclass(kind, dict):
        return dict(dict.items(container))
    return set.copy(container) if kind is set else items_of(container)
