"""What the items of micro-batches have in common: a document whose hidden state each chunk of it moves, for example.

An item's own content is its micro-batch's. What another item has, too, hands something on once it is changed. Items
come one at a time, so each is compared with those before it when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from offload.model.attributes import Known
from offload.model.containers import CONTAINERS, items_of, length_of
from offload.model.moving import ARRAYS, PLAIN, attributes_of
from offload.model.named import is_of_others

_LEVELS = 8
"""Of objects and containers in each other."""
_MAX = 3000
"""More of what an item has is not looked at."""


class SharedItems:
    """Knows what items had when their micro-batches began."""

    def __init__(self, own: Callable[[nn.Module], bool]) -> None:
        """``own`` modules are looked at by others."""
        self._own = own
        self._known: dict[int, tuple[Any, Known]] = {}
        """By the ``id`` of what an item has, which lives as long as the micro-batches run."""

    def is_changed_for(self, item: Any) -> bool:
        """A new item has something that an earlier one has, too, and that was changed since."""
        found = False
        for value in self._parts(item):
            now = _known(value)
            before = self._known.setdefault(id(value), (value, now))[1]
            found |= not now.is_as(before)
        return found

    def _parts(self, item: Any) -> Iterator[Any]:
        """The item, and what it consists of that may move."""
        level, seen = [item], set[int]()
        for _ in range(_LEVELS):
            inner: list[Any] = []
            for value in level:
                if id(value) in seen or len(seen) > _MAX or not self._may_move(value):
                    continue
                seen.add(id(value))
                yield value
                inner += _content(value)
            level = inner

    def _may_move(self, value: Any) -> bool:
        if isinstance(value, (torch.Tensor, *CONTAINERS, *ARRAYS)):
            return True
        if type(value) in PLAIN or isinstance(value, type) or is_of_others(value):
            return False
        if isinstance(value, nn.Module):
            return not self._own(value)
        return bool(attributes_of(value))


def _content(value: Any) -> list[Any]:
    if isinstance(value, CONTAINERS):
        return items_of(value) if length_of(value) <= _MAX else []
    return [] if isinstance(value, (torch.Tensor, *ARRAYS)) else [*attributes_of(value).values()]


def _known(value: Any) -> Known:
    known = Known()
    known.add(value, 0)
    known.values += _content(value)
    return known
