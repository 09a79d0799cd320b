"""Handles that look at what a parameter has: they keep it when the parameter is put over other memory."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from offload.model.handle_backing import Backing, Memory, View


class Onlooker(Protocol):
    """A handle on another one's value."""

    def value(self) -> torch.Tensor: ...

    def look_at(self, backing: Backing) -> None: ...


_onlookers: WeakKeyDictionary[Backing, WeakValueDictionary[int, Onlooker]] = WeakKeyDictionary()
"""Handles that look at what a parameter has (``parameter.data``, ``parameter.detach()``, views), by their ``id``."""


def add_onlooker(handle: Onlooker, backing: Backing) -> None:
    """The handle looks at what ``backing`` is of, or at a view of it."""
    _onlookers.setdefault(_seen(backing), WeakValueDictionary())[id(handle)] = handle


def forget_onlooker(handle: Onlooker, backing: Backing) -> None:
    """It looks at ``backing`` no longer, and ``torch.utils.swap_tensors`` takes none that has weak references."""
    onlookers = _onlookers.get(_seen(backing))
    if onlookers is not None:
        onlookers.pop(id(handle), None)


def leave_onlookers(backing: Backing) -> None:
    """A parameter will be over other memory: those who look at what it has keep that."""
    for handle in list(_onlookers.pop(backing, {}).values()):
        handle.look_at(Memory(handle.value()))


def _seen(backing: Backing) -> Backing:
    """What the views of it are of."""
    while isinstance(backing, View):
        backing = backing.base
    return backing
