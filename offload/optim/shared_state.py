"""Shared state of an optimizer: all that its step reads and changes beside the states of its parameters.

That is the options of its groups (some count steps there), its attributes, and entries of ``state`` that belong to no
parameter. It is copied, given to a copy of the optimizer, and compared.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, cannot_run_alone
from offload.optim.acquaintance import IdOf, Owner, Place, known_as, modules_in, put_tokens
from offload.optim.rule import Group, options_of

ROUNDING = 1e-6
"""Numbers that are nearer to each other than this share of them are the same up to rounding."""

_DATA = (bool, int, float, complex, str, bytes, NoneType, torch.Tensor)
_CONTAINERS = (list, tuple, set, frozenset, dict)


_WAY = (
    "options of some of them belong into a group of their own. For a library that keeps states of some parameters in "
    'fewer bits, take optimizer="adamw" or another name, with moments_dtype="int8"'
)


class _Bare(torch.optim.Optimizer):
    """An optimizer with nothing of its own."""


@functools.cache
def of_torch() -> frozenset[str]:
    """Attributes that every optimizer has: parameters, states and hooks. The first optimizer of a process brings in
    torch's compiler, which takes a second: a forecast makes none."""
    return frozenset(vars(_Bare([torch.zeros(1)], {}))) - {"defaults"}


_OF_OTHERS = frozenset({"step", "grad_scale", "found_inf", "_opt_called", "_step_count", "_engine_side"})
"""Attributes that schedulers, scalers and the engine put on an optimizer: no step of it reads them."""


class _Memo(dict[int, Any]):
    """Memo of ``copy.deepcopy``: raises ``ConfigError`` where a copy would need one of the model's parameters."""

    def __init__(self, held: Iterable[int], known: Mapping[int, Any]) -> None:
        super().__init__(known)
        self._held = frozenset(held)

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._held:
            raise _HoldsParameter
        return super().get(key, default)

    def has_ids(self, value: Any) -> bool:
        """An ``id()`` of one of the optimizer's parameters is in ``value``, a copy, or in what was copied before it,
        where no token could take its place. A twin of the optimizer would find nothing under it."""
        parts = [part for made in ([value], *self.values()) for part in gc.get_referents(made)]
        while parts:
            part = parts.pop()
            if type(part) is int and part in self._held:
                return True
            if type(part) in (tuple, frozenset):  # a copy of one may be itself, which no memo has
                parts += part
        return False


class _HoldsParameter(Exception):
    pass


@dataclass(frozen=True, eq=False)
class SharedState:
    """Nobody changes one: it is copied where it is used."""

    groups: Sequence[Group]
    """Options of each group, without ``params``."""
    attributes: Mapping[str, Any]
    entries: Mapping[Any, Any]
    """Of ``optimizer.state``, under other keys than parameters."""
    sizes: Sequence[int] | None = None
    """Of an optimizer that knows single parameters: how many each group has. See [Note: Who a stand-in is]."""

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        known: frozenset[str] | None = None,
        places: Mapping[int, Place] = MappingProxyType({}),
    ) -> SharedState:
        """A copy of what the optimizer has now. Attributes are those in ``known``, and others that are plain data:
        libraries put objects of their own on an optimizer. ``places`` are those of parameters, by ``id()``, that it may
        know by more than its groups.

        Raises ``ConfigError`` for one that keeps parameters, or what cannot be copied, elsewhere than in
        ``group["params"]`` and ``state[parameter]``, and for one that knows others by ``id()``."""
        name = type(optimizer).__name__  # of the class that the user has given, also where it is the engine's
        own = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        memo = _Memo({*own, *places}, {id(optimizer): _OWNER})
        knows = False

        def copied(what: str, value: Any) -> Any:
            if isinstance(value, (torch.optim.Optimizer, nn.Module)):
                kind = "optimizer" if isinstance(value, torch.optim.Optimizer) else "module"
                raise ConfigError(
                    cannot_run_alone(name, f"it keeps another {kind}, a {type(value).__name__}, in its {what}")
                )
            nonlocal knows
            owners = {id(module): Owner.of(module, places) for module in modules_in(value)} if places else {}
            memo.update(owners)
            try:
                made = copy.deepcopy(value, memo)
            except _HoldsParameter:
                why = f"it keeps parameters, or states of them, in its {what}: {_WAY}"
                raise ConfigError(cannot_run_alone(name, why)) from None
            except Exception as error:  # a class of the user's may raise anything
                why = f"its {what} cannot be copied for a trial ({type(error).__name__}: {error})"
                raise ConfigError(cannot_run_alone(name, why)) from error
            knows = put_tokens([made, *memo.values()], places) or bool(owners) or knows
            if memo.has_ids(made):
                why = f"it knows parameters by their id() in its {what}: {_WAY}"
                raise ConfigError(cannot_run_alone(name, why))
            return made

        attributes = vars(optimizer)
        names = [name for name in attributes if name not in of_torch() | _OF_OTHERS]
        found = (
            [
                {option: copied(f"group option {option!r}", value) for option, value in _options(group).items()}
                for group in optimizer.param_groups
            ],
            {
                name: copied(f"attribute {name!r}", attributes[name])
                for name in names
                if known is None or name in known or is_data(attributes[name])
            },
            {
                key: copied(f"state[{key!r}]", optimizer.state[key])
                for key in optimizer.state
                if not isinstance(key, torch.Tensor)
            },
        )
        sizes = [0] * len(optimizer.param_groups)
        for group, index in places.values():
            sizes[group] = max(sizes[group], index + 1)
        return cls(*found, sizes if knows else None)

    def of_group(self, index: int) -> SharedState:
        """The same for an optimizer that has this group alone."""
        return SharedState([self.groups[index]], self.attributes, self.entries)

    def put(self, optimizer: torch.optim.Optimizer, params: Sequence[Sequence[nn.Parameter]]) -> None:
        """Give a copy to ``optimizer``, a copy of the user's, with these parameters in its groups and no states."""
        by_place = {(group, i): each for group, of_group in enumerate(params) for i, each in enumerate(of_group)}
        own = vars(optimizer)
        for name in own.keys() - of_torch():
            del own[name]
        groups, attributes, entries = copy.deepcopy(
            (self.groups, self.attributes, self.entries), {id(_OWNER): optimizer, **known_as(by_place)}
        )
        own.update(attributes)
        own["param_groups"] = [
            {**group, "params": list(of_group)} for group, of_group in zip(groups, params, strict=True)
        ]
        own["state"] = defaultdict(dict, entries)

    def give(
        self,
        optimizer: torch.optim.Optimizer,
        before: SharedState,
        parameters: Mapping[Place, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """Give what a step has made of ``before`` to the user's optimizer, with these parameters: what the step left
        alone stays the object that it is."""
        owner = {id(_OWNER): optimizer, **known_as(parameters)}
        for group, old, new in zip(optimizer.param_groups, before.groups, self.groups, strict=True):
            _update(group, old, new, owner)
        _update(vars(optimizer), before.attributes, self.attributes, owner)
        _update(optimizer.state, before.entries, self.entries, owner)

    def difference(self, other: SharedState) -> str | None:
        """The first part in which two are not the same up to rounding; None if there is none."""
        for index, (one, another) in enumerate(zip(self.groups, other.groups, strict=True)):
            for option in one.keys() | another.keys():
                if not same(one.get(option), another.get(option)):
                    return f"option {option!r} of group {index}"
        for what, mine, theirs in (
            ("attribute {!r}", self.attributes, other.attributes),
            ("state[{!r}]", self.entries, other.entries),
        ):
            for key in mine.keys() | theirs.keys():
                if not same(mine.get(key), theirs.get(key)):
                    return what.format(key)
        return None


class _Owner:
    """Stands for the optimizer itself in what it keeps: its own methods, for one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.get(id(self), self)


_OWNER = _Owner()


def same(one: Any, another: Any, relative: float = ROUNDING) -> bool:
    """Two values are the same, part by part: numbers up to this share of them."""
    if isinstance(one, torch.Tensor) or isinstance(another, torch.Tensor):
        return _same_tensors(one, another, relative)
    if type(one) is not type(another):
        return False
    if isinstance(one, float):
        return math.isclose(one, another, rel_tol=relative) or (math.isnan(one) and math.isnan(another))
    if isinstance(one, Mapping):
        return one.keys() == another.keys() and all(same(one[key], another[key], relative) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, (str, bytes)):
        pairs = zip(one, another, strict=False)
        return len(one) == len(another) and all(same(*pair, relative) for pair in pairs)
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), another.get_state())
    if hasattr(one, "__dict__"):  # its own comparison, if it has one, is not made for tensors
        return one is another or same(vars(one), vars(another), relative)
    equal = one == another
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _same_tensors(one: Any, another: Any, relative: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(another, torch.Tensor):
        return False
    if one.shape != another.shape or one.dtype != another.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, another)
    one, another = one.detach(), another.detach()
    largest = float(one.abs().nan_to_num(0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, another, rtol=relative, atol=0.1 * relative * largest, equal_nan=True)


def _options(group: Group) -> Group:
    """The options of a group. Names of parameters are one's own, and no option of all."""
    return {name: value for name, value in options_of(group).items() if name != "param_names"}


def is_data(value: Any) -> bool:
    """It is made of numbers, strings and tensors."""
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return all(map(is_data, value)) if type(value) in _CONTAINERS else isinstance(value, _DATA)


def _update(target: Any, old: Mapping[Any, Any], new: Mapping[Any, Any], owner: dict[int, Any]) -> None:
    for key in old.keys() - new.keys():
        del target[_own(key, owner)]
    for key, value in new.items():
        if key not in old or not same(old[key], value, 0.0):
            present = target.get(_own(key, owner))
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.shape == value.shape:
                present.copy_(value)  # schedulers, and the user, may hold the tensor
            elif key in old and _is_mapping(present, old[key], value):
                _update(present, old[key], value, owner)
            elif key in old and _is_mapping(*(getattr(each, "__dict__", None) for each in (present, old[key], value))):
                _update(vars(present), vars(old[key]), vars(value), owner)  # others, and the user, may hold the object
            else:
                target[_own(key, owner)] = copy.deepcopy(value, owner)


def _own(key: Any, owner: dict[int, Any]) -> Any:
    return copy.deepcopy(key, owner) if isinstance(key, IdOf) else key


def _is_mapping(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)
