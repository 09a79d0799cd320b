"""The state that a forward finds beside weights and inputs: what a second run of it must find as the first one did.

[Note: Outside of modules] Functions of the modules' classes, forward hooks, functions that stand in attributes, in
containers or among the arguments, and modes of torch (``TorchFunctionMode``, ``TorchDispatchMode``) may count or keep
something in variables of closures, globals and Python's modules, in attributes of classes, in modules elsewhere, and in
objects that they are bound to. These are as before in a second run, too. What others do to them between the runs is
their own affair.

[Note: What moves in place] An iterator gives what comes next, and is the same object. Where the first run may move one,
a copy from before it stands in its place in the second run; a file is set back; an array gets its bytes back. A
generator cannot be had again, nor an iterator in a tuple. A second run moves what stands there, too, and a graph that
is retained has several: each of them has a copy of its own.
"""

from __future__ import annotations

import copy
import gc
import io
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.containers import CHANGING, CONTAINERS, content_of, items_of, kind_of, length_of
from offload.model.draws import Generators
from offload.model.moving import PLAIN, bytes_of, copied, is_iterator, mark_of, place_of, slots_of
from offload.model.named import (
    CALLED,
    MISSING,
    Variable,
    is_of_others,
    may_change,
    outside_of,
    variables_from,
    variables_of_call,
)
from offload.model.own_writes import bytes_hash, has_bytes, version_of
from offload.torch_internals import dispatch_modes, function_modes
from offload.unseen import own_work
from swapper import OffloadError

_DERIVED = ("_flat_weights", "_flat_weight_refs")
_OF_MODULES = frozenset(vars(nn.Module()))
"""Names of what each module has."""
_OTHERS = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
"""Types of values whose attributes are not searched."""
_LEVELS = 3
"""Of objects in objects."""
_OBJECTS_MAX = 10_000
_MODULES_MAX = 100
"""Modules in a module that is elsewhere."""
_OUTSIDE_MAX = 1000
"""Items of a container outside of modules: a larger one is not copied before each forward."""
_COPIED_BYTES = 1 << 20
"""Statistics of a module take less: a larger tensor of a module is not copied before each forward."""


class State:
    """The state that a forward may change beside tensors: attributes of modules and weights, buffers, objects among its
    arguments (a cache), variables and objects outside (see [Note: Outside of modules]), and random generators."""

    def __init__(
        self,
        module: nn.Module,
        arguments: list[Any],
        name: str,
        of_kinds: dict[type, tuple[Variable, ...]] | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """``of_kinds`` is where what was found of classes is kept for the next state of the module. ``arguments`` are
        what a second run is called with: while it goes on, an iterator among them is another one. ``tensors`` are
        arguments, too."""
        self._name = name
        self._of_kinds = {} if of_kinds is None else of_kinds
        self._generators = Generators()
        self._known: dict[int, tuple[Any, Any]] = {}
        """Containers, each with a copy, by their ``id``."""
        self._copies: dict[int, Any] = {}
        """What stands for something that a run moves, by its ``id``: see [Note: What moves in place]."""
        self._tensors: list[tuple[Any, Any, torch.Tensor, int, torch.Tensor | None]] = []
        """Those in containers: the container, the key, the tensor, its version, and a copy if there is one."""
        self._tensors_outside: list[tuple[Variable, torch.Tensor, int, torch.Tensor | None]] = []
        """The same of those that are variables themselves."""
        self._unchanged: list[tuple[str, torch.Tensor, tuple[int, int | None]]] = []
        """Their names and marks."""
        self._variables: list[tuple[Variable, Any]] = []
        """Those outside of modules, slots of objects, and places in files, each with its value."""
        self._called: set[Any] = set()
        """Those that were looked into, and classes of objects that can be called."""
        self._movers: set[int] = set()
        """Iterators that a copy can take the place of, by their ``id``."""
        self._outside: set[int] = set()
        """Containers outside of modules, and of objects in objects, by their ``id``."""
        self._arrays: list[tuple[memoryview, bytes]] = []
        self._generator_marks: list[tuple[str, Any, Any]] = []
        self._look(module, arguments, tensors, [*function_modes(), *dispatch_modes()])

    @own_work
    def _look(
        self, module: nn.Module, arguments: list[Any], tensors: Sequence[torch.Tensor], modes: Iterable[Any]
    ) -> None:
        modules = list(module.modules())
        for each in modules:
            self._know(vars(each), copied=True)
            for key, value in vars(each).items():
                if key in _OF_MODULES:
                    if isinstance(value, CHANGING):  # buffers are in one of them
                        self._know(value, copied=True)
                elif type(value).__module__.split(".")[0] != "offload":
                    self._look_into(value, num_levels=_LEVELS, copied=True)
            self._know_slots(each, _LEVELS + 1, copied=True, items_max=_OBJECTS_MAX)
            for parameter in each.parameters(recurse=False):
                self._known[id(vars(parameter))] = vars(parameter), content_of(vars(parameter))
        for place, argument in enumerate(arguments):
            if is_iterator(argument):
                self._know_variable((partial(arguments.__getitem__, place), partial(arguments.__setitem__, place)))
            self._look_into(argument, num_levels=_OBJECTS_MAX)
        for tensor in tensors:
            self._look_into(tensor, num_levels=_OBJECTS_MAX)
        self._look_outside(outside_of(modules, self._of_kinds))
        called = ("__torch_function__", "__torch_dispatch__")
        of_modes = [getattr(mode, name) for mode in modes for name in called if hasattr(mode, name)]
        self._look_outside(variables_from(of_modes))

    def so_far(self) -> State:
        """What it would be if the first run, which goes on, were over. Raises ``ConfigError``."""
        now = copy.copy(self)
        now._known, now._unchanged, now._variables = dict(self._known), [*self._unchanged], [*self._variables]
        now._generators = copy.copy(self._generators)
        now.compare()
        return now

    @own_work
    def compare(self) -> None:
        """The first run is over. Raises ``ConfigError``."""
        for container, key, tensor, version, values in self._tensors:
            name = key if isinstance(key, str) else f"element {key!r} of a {type(container).__name__}"
            before = self._as_it_was(name, tensor, version, values)
            if before is not tensor:
                self._known[id(container)][1][key] = self._copy(before)
            elif id(container) not in self._outside:
                self._unchanged.append((name, tensor, _mark(tensor)))
        self._tensors = []
        for variable, tensor, version, values in self._tensors_outside:
            before = self._as_it_was("a tensor outside of modules", tensor, version, values)
            self._variables.append((variable, before if before is tensor else self._copy(before)))
        self._tensors_outside = []
        for name, generator, mark in self._generator_marks:
            if mark_of(generator) != mark:
                raise not_to_be_run_again(self._name, f"goes on in a generator ({name}), which cannot be set back")
        self._generator_marks = []
        self._arrays = [(memory, before) for memory, before in self._arrays if memory != before]
        self._generators.compare()
        self._variables = [(variable, before) for variable, before in self._variables if variable[0]() is not before]
        for key in self._outside:  # what the first run left as it was is not this one's to put back
            if not _differ(*self._known[key]):
                del self._known[key]

    @contextmanager
    def before(self) -> Iterator[None]:
        """Within, all is as it was before the first run; then it is again as it is now. Raises ``OffloadError``."""
        for name, tensor, mark in self._unchanged:
            if _mark(tensor) != mark:
                raise changed_since(self._name, name)
        changed = [(container, before) for container, before in self._known.values() if _differ(container, before)]
        now = [(container, content_of(container)) for container, _ in changed]
        variables = [(put, before, get()) for (get, put), before in self._variables]
        arrays = [(memory, before, memory.tobytes()) for memory, before in self._arrays]
        try:
            for container, before in changed:
                _restore(container, self._with_copies(before))
            for put, before, _ in variables:
                put(self._again(before))
            for memory, before_bytes, _ in arrays:
                memory[:] = before_bytes
            with self._generators.rewound():
                yield
        finally:
            for container, after in now:
                _restore(container, after)
            for put, _, after in variables:
                put(after)
            for memory, _, after_bytes in arrays:
                memory[:] = after_bytes

    def _copy(self, made: Any) -> Any:
        self._copies[id(made)] = made
        return made

    @own_work
    def _again(self, value: Any) -> Any:
        """Itself; of what is such a copy, one for a run."""
        if id(value) not in self._copies:
            return value
        return value.clone() if isinstance(value, torch.Tensor) else copied(value)

    def _with_copies(self, content: Any) -> Any:
        if isinstance(content, dict):
            return {key: self._again(value) for key, value in content.items()}
        return [*map(self._again, content)]

    def _as_it_was(self, name: str, tensor: torch.Tensor, version: int, values: torch.Tensor | None) -> torch.Tensor:
        """The tensor, or the copy of it if it has been written to since. Raises ``ConfigError``."""
        is_written = version_of(tensor) != version
        if values is None and is_written:
            raise not_to_be_run_again(
                self._name, f"changes {name} in place, a tensor that is not copied for a second run"
            )
        if values is not None and (is_written or not torch.equal(values, tensor)):
            return values  # kernels change statistics behind the version
        return tensor

    def _look_outside(self, variables: Iterable[Variable]) -> None:
        """Know what functions find outside of modules."""
        inside = set(self._known)
        for variable in variables:
            if not may_change(value := variable[0]()):
                continue
            self._know_variable(variable)
            self._look_into(value, num_levels=_LEVELS, copied=True, items_max=_OUTSIDE_MAX)
        self._outside |= set(self._known) - inside

    def _look_into_call(self, called: Any) -> None:
        """What a call of it finds outside of modules: of a function, or of an object by its class."""
        key = called if isinstance(called, CALLED) else type(called)
        if key in self._called:
            return
        self._called.add(key)
        self._look_outside(variables_of_call(called, self._of_kinds))

    def _know_variable(self, variable: Variable) -> None:
        value = variable[0]()
        if _is_ordinary(value):
            self._tensors_outside.append((variable, value, version_of(value), _small_copy(value)))
            return
        again = copied(value) if is_iterator(value) else None
        if again is not None:
            self._movers.add(id(value))
        self._variables.append((variable, value if again is None else self._copy(again)))

    def _know(self, container: Any, *, copied: bool) -> None:
        """``copied``: as it was, with small tensors in it. Others are watched."""
        if id(container) in self._known:
            return
        self._known[id(container)] = container, content_of(container)
        if isinstance(container, (dict, list)):
            for key, value in dict.items(container) if isinstance(container, dict) else enumerate(items_of(container)):
                if _is_ordinary(value):
                    values = _small_copy(value) if copied else None
                    self._tensors.append((container, key, value, version_of(value), values))
                elif is_iterator(value):
                    self._know_iterator(container, key, value)

    def _know_iterator(self, container: Any, key: Any, iterator: Any) -> None:
        again = copied(iterator)
        if again is None:
            self._generator_marks.append((str(key), iterator, mark_of(iterator)))
        else:
            self._movers.add(id(iterator))
            self._known[id(container)][1][key] = self._copy(again)

    def _look_into(self, value: Any, num_levels: int, *, copied: bool = False, items_max: int = _OBJECTS_MAX) -> None:
        """Know the containers in it, and attributes of objects: of objects in objects, too, for so many levels."""
        if type(value) in PLAIN:
            return
        self._generators.look_at(value)
        if isinstance(value, nn.Module):
            self._know_module(value)
            return
        is_object = not isinstance(value, CONTAINERS)
        if is_object and callable(value) and not isinstance(value, type):
            self._look_into_call(value)
        if is_object and (not num_levels or isinstance(value, _OTHERS) or self._know_moving(value)):
            return
        is_deep = is_object and num_levels < _LEVELS
        if is_deep and is_of_others(value):
            return
        content = getattr(value, "__dict__", None) if is_object else value
        if is_object:
            self._know_slots(value, num_levels, copied=copied, items_max=items_max)
        if content is None or length_of(content) > items_max:
            return
        if not isinstance(content, tuple):
            if id(content) in self._known or len(self._known) > _OBJECTS_MAX:
                return
            self._know(content, copied=copied)
            if is_deep:
                self._outside.add(id(content))
        for item in items_of(content):
            self._look_into(item, num_levels - is_object, copied=copied, items_max=items_max)

    def _know_slots(self, value: Any, num_levels: int, *, copied: bool, items_max: int) -> None:
        """Slots of an object, and of what stands in them."""
        for slot in slots_of(type(value)):
            variable = partial(getattr, value, slot, MISSING), partial(_put_slot, value, slot)
            self._know_variable(variable)
            self._look_into(variable[0](), num_levels - 1, copied=copied, items_max=items_max)

    def _know_module(self, module: nn.Module) -> None:
        """A module elsewhere: attributes and buffers, of those in it as well, and what their functions find. Of a large
        one, such as the model around, its own alone."""
        modules = list(islice(module.modules(), _MODULES_MAX + 1))
        if len(modules) > _MODULES_MAX:
            modules = [module]
        modules = [each for each in modules if id(vars(each)) not in self._known]
        for each in modules:
            for content in (vars(each), each._buffers):
                if id(content) not in self._known:
                    self._know(content, copied=True)
                    self._outside.add(id(content))
        self._look_outside(outside_of(modules, self._of_kinds))

    def _know_moving(self, value: Any) -> bool:
        """It is an array, a file, a generator or a view of a mapping, and is known now."""
        memory = bytes_of(value)
        if memory is not None:
            self._arrays.append((memory, memory.tobytes()))
        elif isinstance(value, io.IOBase):
            if (variable := place_of(value)) is not None:
                self._variables.append((variable, variable[0]()))
        elif isinstance(value, types.GeneratorType):
            self._generator_marks.append((value.__name__, value, mark_of(value)))
        elif isinstance(value, types.MappingProxyType):
            for content in gc.get_referents(value):
                self._look_into(content, _LEVELS, copied=True, items_max=_OUTSIDE_MAX)
        elif not is_iterator(value):
            return False
        elif id(value) not in self._movers:
            self._generator_marks.append((type(value).__name__, value, mark_of(value)))
        return True


def _put_slot(item: Any, name: str, value: Any) -> None:
    """Set a slot, of a frozen class as well."""
    if value is MISSING:
        object.__delattr__(item, name)
    else:
        object.__setattr__(item, name, value)


def _small_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach().clone() if tensor.nbytes <= _COPIED_BYTES else None


def _is_ordinary(value: Any) -> bool:
    """A tensor with bytes of its own, no weight."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.layout is torch.strided


@own_work
def _mark(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Equal at two moments if nothing was written between them. A write through ``.data`` shows in the bytes alone, and
    those of a small tensor are looked at."""
    is_small = tensor.nbytes <= _COPIED_BYTES and has_bytes(tensor)
    return version_of(tensor), bytes_hash(tensor) if is_small else None


def not_to_be_run_again(name: str, reason: str) -> ConfigError:
    return ConfigError(f'unit {name}: its forward {reason}. Do not recompute it: activations={{"{name}": "keep", ...}}')


def changed_since(name: str, what: str) -> OffloadError:
    return OffloadError(
        f"unit {name}: {what} was changed after a forward had begun and before its backward, which runs that forward "
        "again and would find something else. Change it after the backward, or do not recompute: "
        f'activations={{"{name}": "keep", ...}}'
    )


def _differ(container: Any, before: Any) -> bool:
    if length_of(container) != len(before):
        return True
    if isinstance(container, dict):
        return any(
            dict.get(container, key, MISSING) is not value for key, value in before.items() if key not in _DERIVED
        )
    return (
        set.__ne__(container, before) if isinstance(container, set) else not all(map(is_, items_of(container), before))
    )


def _restore(container: Any, content: Any) -> None:
    kind = kind_of(container)
    if issubclass(kind, dict):
        for key in [*dict.keys(container)]:
            if key not in content:
                kind.__delitem__(container, key)
        for key, value in content.items():
            kind.__setitem__(container, key, value)
        return
    kind.clear(container)
    getattr(kind, "update" if kind is set else "extend")(container, content)
