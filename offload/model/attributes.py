"""Tells whether a forward has changed what modules know: attributes, hooks, buffers, parameters that are not the
engine's.

A module may keep something of a forward in an attribute and read it later (an auxiliary loss, a hidden state), or be
called with other parameters (``torch.func.functional_call``). Micro-batches that are under way together would find what
another one has left there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

from torch import nn

from offload.model.unit_in_model import UnitInModel

_CONTAINERS = {list, dict, set, deque, OrderedDict}
_DERIVED = {"_flat_weights", "_flat_weight_refs"}
"""Attributes that recurrent modules make of their parameters anew in each forward, which find other ones there than
before."""

_Known = tuple[list[Any], list[int]]


class Attributes:
    """Compares modules with what they were when they were looked at last: by identity, containers by length, and
    parameters by what is to be trained. Hooks on weights of the engine are counted.

    Between two uses of units, only modules of the units around may have changed, and those that are in none.
    """

    def __init__(self, model: nn.Module, units: Sequence[UnitInModel]) -> None:
        self._of_engine = {id(item) for unit in units for site in unit.sites for item in site[2:]}
        of_unit = {module: unit for unit in units for module in unit.spec.modules}
        self._around: list[nn.Module] = []
        self._inside: dict[UnitInModel, list[nn.Module]] = {unit: [] for unit in units}
        self._num_hooks = {unit: unit.num_weight_hooks for unit in units}
        seen: set[nn.Module] = set()
        self._sort(model, None, of_unit, seen)
        self._known = {module: self._of(module) for module in seen}

    def changed(self, units: Iterable[UnitInModel]) -> str | None:
        """The class of a module that was changed, of those in ``units`` and those in none; None if there is none."""
        found, units = None, list(units)
        for unit in units:
            if (num_hooks := unit.num_weight_hooks) != self._num_hooks[unit]:
                self._num_hooks[unit] = num_hooks
                found = type(unit.spec.modules[0]).__name__
        for module in self._candidates(units):
            known, now = self._known[module], self._of(module)
            if len(known[0]) != len(now[0]) or known[1] != now[1] or not all(map(is_, known[0], now[0])):
                self._known[module] = now
                found = type(module).__name__
        return found

    def _candidates(self, units: Iterable[UnitInModel]) -> Iterator[nn.Module]:
        yield from self._around
        for unit in units:
            yield from self._inside[unit]

    def _sort(
        self, module: nn.Module, unit: UnitInModel | None, of_unit: dict[nn.Module, UnitInModel], seen: set[nn.Module]
    ) -> bool:
        """Find the place of a module, which lies in ``unit``, and of those in it; whether another unit is among
        them."""
        if module in seen:
            return False
        seen.add(module)
        own = of_unit.get(module, unit)
        holds_others = [self._sort(child, own, of_unit, seen) for child in module.children()]
        if own is None or any(holds_others):
            self._around.append(module)
        else:
            self._inside[own].append(module)
        return any(holds_others) or own is not unit

    def _of(self, module: nn.Module) -> _Known:
        """Attributes of the module. The engine's parameters and their handles take each other's place: they are left
        out."""
        values = [value for name, value in module.__dict__.items() if name not in _DERIVED]
        lengths = [len(value) for value in values if type(value) in _CONTAINERS]
        lengths += [value.requires_grad for value in module._parameters.values() if value is not None]
        values += module._buffers.values()
        values += [value for value in module._parameters.values() if id(value) not in self._of_engine]
        return values, lengths
