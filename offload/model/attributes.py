"""Tells whether a forward has changed what modules know: attributes, hooks, buffers, parameters that are not the
engine's.

A module may keep something of a forward in an attribute and read it later (an auxiliary loss, a hidden state), write to
a tensor that it has (a queue, a codebook, running statistics), count in an object that modules share, in a global or in
a closure, or be called with other parameters (``torch.func.functional_call``). Micro-batches that are under way
together would find what another one has left there.

[Note: Buffers of torch's own modules] Running statistics are read and written by the module's forward alone. So they
come in the order of a loop where each micro-batch uses the unit once, and in another one where it uses it again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import nn

from offload.model.containers import CONTAINERS, items_of, length_of
from offload.model.moving import PLAIN, mark_of, slots_of
from offload.model.named import CALLED, MISSING, Variable, is_of_others, may_change, outside_of, variables_of_call
from offload.model.own_writes import bytes_hash, has_bytes, version_of
from offload.model.recompute import RecomputedForward
from offload.model.unit_in_model import UnitInModel

_DERIVED = {"_flat_weights", "_flat_weight_refs"}
"""Attributes that recurrent modules make of their parameters anew in each forward, which find other ones there than
before."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Names of what each module has."""
_OTHERS = (torch.Tensor, type, ModuleType, RecomputedForward)
"""Types of values whose attributes are not searched."""
_FUNCTION = "function or hook of a module"
_ITEMS_MAX = 1000
"""Of a larger container the length alone is compared, and no more objects are searched."""
_LEVELS = 3
"""Of containers in containers, and of objects in objects."""
_VALUES_MAX = 20_000
"""Of a module or an object: what comes behind them is compared by identity alone."""


@dataclass
class Known:
    """What a module or an object has."""

    values: list[Any] = field(default_factory=list)
    """Compared by identity."""
    marks: list[Any] = field(default_factory=list)
    """Lengths, versions, places of what moves, and which parameters are to be trained."""

    def add(self, value: Any, levels: int = _LEVELS) -> None:
        self.values.append(value)
        if type(value) in PLAIN or len(self.values) > _VALUES_MAX:
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.marks.append(version_of(value))
        elif isinstance(value, CONTAINERS):
            self.marks.append(length_of(value))
            if levels and self.marks[-1] <= _ITEMS_MAX:
                for item in items_of(value):
                    self.add(item, levels - 1)
        elif (mark := mark_of(value)) is not None:
            self.marks.append(mark)

    def add_versions(self, modules: Iterable[nn.Module]) -> None:
        """What modules outside of the model have: attributes, and versions of buffers and parameters."""
        for each in modules:
            for name, value in vars(each).items():
                if name not in _OF_MODULES:
                    self.add(value)
            parameters = [parameter for parameter in each._parameters.values() if parameter is not None]
            tensors = [*_buffers(each), *parameters]
            self.values += tensors
            self.marks += [each.training, *map(version_of, tensors)]

    def is_as(self, other: Known) -> bool:
        return (
            self.marks == other.marks
            and len(self.values) == len(other.values)
            and all(map(is_, self.values, other.values))
        )


class Attributes:
    """Compares modules, and objects among their attributes, with what they were when they were looked at last.
    Hooks on weights of the engine are counted.

    Between two uses of units, only modules of the units around may have changed, those that are in none, objects, and
    variables outside of modules.
    """

    def __init__(self, model: nn.Module, units: Sequence[UnitInModel]) -> None:
        self._of_engine = {id(item) for unit in units for site in unit.sites for item in site[2:]}
        of_unit = {module: unit for unit in units for module in unit.spec.modules}
        self._around: list[nn.Module] = []
        self._inside: dict[UnitInModel, list[nn.Module]] = {unit: [] for unit in units}
        self._num_hooks = {unit: unit.num_weight_hooks for unit in units}
        seen: set[nn.Module] = set()
        self._sort(model, None, of_unit, seen)
        self._statistics = {
            module: list(map(version_of, _buffers(module))) for unit in units for module in self._own_of_torch(unit)
        }
        """Of each module of torch's own in a unit: see [Note: Buffers of torch's own modules]."""
        self._known = {module: self._of(module) for module in seen}
        self._objects: dict[int, tuple[Any, Sequence[Variable], Known]] = {}
        """Objects and functions by their ``id``, each with the variables that a call of it finds."""
        self._of_kinds: dict[type, tuple[Variable, ...]] = {}
        """See ``outside_of``."""
        self.of_threads = False
        """Somebody keeps something for each thread by itself."""
        for known in list(self._known.values()):
            self._find_objects(known.values, _LEVELS)
        self._variables = outside_of(list(seen), self._of_kinds)
        self._outside = self._of_outside()
        self._find_objects(self._outside.values, _LEVELS)

    def changed(self, units: Iterable[UnitInModel] | None = None) -> str | None:
        """The class of a module or an object that was changed, of those in ``units`` and those in none, or who else
        has changed a variable outside of modules; None if there is none. Without ``units`` all are looked at."""
        found, units = None, list(self._inside if units is None else units)
        for unit in units:
            if (num_hooks := unit.num_weight_hooks) != self._num_hooks[unit]:
                self._num_hooks[unit] = num_hooks
                found = type(unit.spec.modules[0]).__name__
        for module in self._candidates(units):
            now = self._of(module)
            if not now.is_as(self._known[module]):
                self._known[module] = now
                self._find_objects(now.values, _LEVELS)
                found = type(module).__name__
        for key, (item, variables, known) in list(self._objects.items()):
            now = _of_object(item, variables)
            if not now.is_as(known):
                self._objects[key] = item, variables, now
                self._find_objects(now.values, _LEVELS)
                found = type(item).__name__
        now = self._of_outside()
        if not now.is_as(self._outside):
            self._outside = now
            self._find_objects(now.values, _LEVELS)
            found = found or _FUNCTION
        return found

    def backward_hooks(self) -> Iterator[Any]:
        """Hooks of modules that are called in backward."""
        for module in self._known:
            yield from (*module._backward_pre_hooks.values(), *module._backward_hooks.values())

    def has(self, module: nn.Module) -> bool:
        """The module is looked at."""
        return module in self._known

    def statistics_changed(self, unit: UnitInModel) -> bool:
        """A module of torch's own in the unit has written to its buffers since this was asked."""
        found = False
        for module in self._own_of_torch(unit):
            now = list(map(version_of, _buffers(module)))
            found |= now != self._statistics[module]
            self._statistics[module] = now
        return found

    def hashes(self) -> dict[int, int]:
        """Hashes of the bytes of all tensors that modules and objects have, but for statistics, by the tensors' ids. A
        write through ``.data`` shows there alone."""
        tensors = {
            id(value): value for known in self._holders() for value in known.values if isinstance(value, torch.Tensor)
        }
        statistics = {id(buffer) for module in self._statistics for buffer in _buffers(module)}
        return {
            key: bytes_hash(tensor) for key, tensor in tensors.items() if key not in statistics and has_bytes(tensor)
        }

    def everything(self) -> Iterator[Any]:
        """All that modules and objects have, and what functions find outside of them."""
        for known in self._holders():
            yield from known.values

    def _holders(self) -> Iterator[Known]:
        return chain(self._known.values(), (known for *_, known in self._objects.values()), [self._outside])

    def _candidates(self, units: Iterable[UnitInModel]) -> Iterator[nn.Module]:
        yield from self._around
        for unit in units:
            yield from self._inside[unit]

    def _own_of_torch(self, unit: UnitInModel) -> Iterator[nn.Module]:
        return filter(_is_of_torch, self._inside[unit])

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

    def _of(self, module: nn.Module) -> Known:
        """Attributes of the module. The engine's parameters and their handles take each other's place: they are left
        out."""
        known = Known()
        for name, value in module.__dict__.items():
            if name in _OF_MODULES:
                known.values.append(value)
                if isinstance(value, CONTAINERS):
                    known.marks.append(length_of(value))
            elif name not in _DERIVED:
                known.add(value)
        for name in slots_of(type(module)):
            known.add(getattr(module, name, MISSING))
        buffers = _buffers(module)
        known.values += buffers
        if module not in self._statistics:
            known.marks += map(version_of, buffers)
        for parameter in module._parameters.values():
            if parameter is not None:
                known.marks.append(parameter.requires_grad)
                if id(parameter) not in self._of_engine:
                    known.values.append(parameter)
        return known

    def _of_outside(self) -> Known:
        """What functions and hooks of modules find outside of them."""
        return _of_variables(self._variables, Known())

    def _find_module(self, module: nn.Module) -> None:
        """A module that is not in the model."""
        if module not in self._known and len(self._known) < _ITEMS_MAX + len(self._of_engine):
            self._around.append(module)
            self._known[module] = known = self._of(module)
            self._find_objects(known.values, _LEVELS)

    def _of_call(self, value: Any) -> Sequence[Variable]:
        """Variables that a call of it finds, if it can be called."""
        if not callable(value):
            return ()
        return [variable for variable in variables_of_call(value, self._of_kinds) if may_change(variable[0]())]

    def _find_objects(self, values: Iterable[Any], levels: int) -> None:
        for value in values:
            if isinstance(value, threading.local):
                self.of_threads = True
            if isinstance(value, nn.Module):
                self._find_module(value)
                continue
            if type(value) in PLAIN or isinstance(value, _OTHERS) or id(value) in self._objects:
                continue
            variables = self._of_call(value)
            is_object = hasattr(value, "__dict__") or slots_of(type(value))
            if not variables and (isinstance(value, CALLED) or is_of_others(value) or not is_object):
                continue
            if len(self._objects) < _ITEMS_MAX:
                known = _of_object(value, variables)
                self._objects[id(value)] = value, variables, known
                if levels:
                    self._find_objects(known.values, levels - 1)


def _of_object(item: Any, variables: Sequence[Variable]) -> Known:
    known = Known()
    for value in list(getattr(item, "__dict__", {}).values()):
        known.add(value)
    for name in slots_of(type(item)):
        known.add(getattr(item, name, MISSING))
    return _of_variables(variables, known)


def _of_variables(variables: Iterable[Variable], known: Known) -> Known:
    for get, _ in variables:
        known.add(get())
    return known


def _buffers(module: nn.Module) -> Collection[torch.Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def _is_of_torch(module: nn.Module) -> bool:
    """Its forward is torch's, and nobody else's reads its buffers."""
    return type(module).forward.__module__.split(".")[0] == "torch"
