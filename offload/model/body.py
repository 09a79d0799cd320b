"""State of the function that micro-batches run: what it reads and moves, beside the model.

A loop may hand something on from one micro-batch to the next: a hidden state, a memory bank, a running mean. Under way
together they would find what another one has left there, or has not left yet. What counts is what the function reads:
see [Note: What a function only writes].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from offload.model.attributes import Known
from offload.model.containers import CONTAINERS, items_of, length_of
from offload.model.draws import generators_among
from offload.model.moving import BYTES_MAX, attributes_of, is_iterator
from offload.model.named import CALLED, is_of_library, is_of_others, names_of
from offload.model.own_writes import bytes_hash, has_bytes
from offload.model.reads import SUPER, Names, reads_of

_ITEMS_MAX = 1000
"""In a larger container no functions are searched."""
_LEVELS = 8
"""Of functions that call functions, of objects in objects, and of containers in containers."""
_MAX = 300
"""More functions, or objects in one that is read as a whole, are not looked at."""
_Get = Callable[[], Any]
_Key = tuple[int, int]


class Body:
    """What a function reads that micro-batches run, and what the generator of their items reads."""

    def __init__(self, function: Any, items: Any, own: Callable[[nn.Module], bool]) -> None:
        """``own`` modules are those of the engine's model, which others look at."""
        self._own = own
        self._read: list[tuple[str, _Get]] = []
        """Several functions may have one name for something of their own."""
        self._seen: set[_Key] = set()
        self._look_at(function, _LEVELS)
        if isinstance(items, GeneratorType) and items.gi_frame is not None:
            self._look_at_code(items.gi_code, items.gi_frame.f_globals, dict(_of_frame(items)), _LEVELS, _key_of(items))
        elif isinstance(items, map):
            self._look_at(items.__reduce__()[1][0], _LEVELS)  # type: ignore[index]
        elif isinstance(items, _BaseDataLoaderIter):
            for each in _called_by(items):
                self._look_at(each, _LEVELS)
        self._known = self._now()

    def changed(self) -> str | None:
        """The name of what was moved since this was asked; None if nothing was."""
        now = self._now()
        before, self._known = self._known, now
        pairs = zip(self._read, now, before, strict=True)
        return next((name for (name, _), known, other in pairs if not known.is_as(other)), None)

    def everything(self) -> Iterator[Any]:
        """All that it reads."""
        for known in self._known:
            yield from known.values

    def took(self) -> None:
        """A micro-batch is about to use the model. What it has taken from iterators came in the order of the loop."""
        for index, (_, get) in enumerate(self._read):
            if isinstance(value := get(), _ITERATORS) or is_iterator(value):
                self._known[index] = self._mark(value)

    def _now(self) -> list[Known]:
        return [self._mark(get()) for _, get in self._read]

    def _mark(self, value: Any) -> Known:
        known = Known()
        self._add(known, value, _LEVELS, set())
        return known

    def _add(self, known: Known, value: Any, levels: int, seen: set[int]) -> None:
        if isinstance(value, nn.Module):
            known.add_versions([module for module in value.modules() if not self._own(module)])
            return
        first = len(known.values)
        known.add(value, _LEVELS)
        items = known.values[first:]
        for item in items:
            if type(item) is nn.Parameter:  # one of the program's own: the engine's have handles
                known.marks.append(item._version)
            if type(item) in (torch.Tensor, nn.Parameter) and item.nbytes <= BYTES_MAX and has_bytes(item):
                known.marks.append(bytes_hash(item))  # a write through ``.data`` shows there alone
        for item in items if levels else ():
            if self._is_object(item) and id(item) not in seen and len(seen) < _MAX:
                seen.add(id(item))
                for each in attributes_of(item).values():
                    self._add(known, each, levels - 1, seen)

    def _look_at(self, function: Any, levels: int) -> None:
        """Know what a function reads, and the functions that it names."""
        if isinstance(function, partial):
            for index, value in enumerate((*function.args, *function.keywords.values())):
                self._find(f"argument {index} of a partial", _constant(value), levels)
            function = function.func
        if not isinstance(function, (FunctionType, MethodType)) and self._is_object(function):
            function = function.forward if isinstance(function, nn.Module) else getattr(function, "__call__", None)  # noqa: B004
        called = getattr(function, "__func__", function)
        if not isinstance(called, FunctionType) or is_of_others(called) or is_of_library(called):
            return
        for index, value in enumerate(called.__defaults__ or ()):
            self._find(f"default {index}", _constant(value), levels)
        self._look_at_code(called.__code__, called.__globals__, _roots_of(function), levels, _key_of(function))

    def _look_at_code(
        self, code: CodeType, names: dict[str, Any], roots: dict[str, _Get], levels: int, key: _Key
    ) -> None:
        if not levels or key in self._seen or len(self._seen) >= _MAX:
            return
        self._seen.add(key)
        roots = {name: partial(names.get, name) for name in names_of(code)} | roots
        reads = reads_of(code)
        for each in ((name,) for name in roots) if reads is None else reads.names:
            if each[0] in roots:
                name, get, method = self._follow(each, roots)
                if method is None:
                    self._find(name, get, levels)
                else:
                    self._look_at(method, levels - 1)
        for each in () if reads is None else reads.for_effect:
            if each[0] in roots:
                name, get, method = self._follow(each, roots)
                if method is not None and self._moves_others(method, set()):
                    self._look_at(method, levels - 1)
                elif method is None and generators_among([get()]):
                    self._find(name, get, levels)

    def _moves_others(self, method: MethodType, seen: set[_Key]) -> bool:
        """The method goes backward, or writes to tensors that are not its object's, or calls one that does."""
        called = method.__func__
        if _key_of(method) in seen or len(seen) >= _MAX:
            return False
        seen.add(_key_of(method))
        if (reads := reads_of(called.__code__)) is None or reads.moved - set(called.__code__.co_varnames[:1]):
            return True
        roots = _roots_of(method)
        named = [self._follow(each, roots)[2] for each in reads.names | reads.for_effect if each[0] in roots]
        return any(self._moves_others(each, seen) for each in named if each is not None)

    def _follow(self, names: Names, roots: dict[str, _Get]) -> tuple[str, _Get, MethodType | None]:
        """Go from a name to its attributes, as far as these are in objects, classes and modules of Python, of the
        program's: how far that is, how it is read, and the method that comes next."""
        name, get = names[0], roots[names[0]]
        for attribute in names[1:]:
            owner = get()
            if isinstance(owner, super) or self._is_object(owner):
                if not isinstance(owner, super) and attribute in attributes_of(owner):
                    name, get = f"{name}.{attribute}", partial(_attribute, get, attribute)
                    continue
                kind = owner if isinstance(owner, super) else type(owner)
                method = getattr(kind, attribute, None)
                if isinstance(method, FunctionType):
                    method = MethodType(method, owner)
                if isinstance(method, MethodType) and isinstance(method.__func__, FunctionType):
                    return name, get, None if is_of_library(method.__func__) else method
                break
            if not _is_holder(owner):
                break
            name, get = f"{name}.{attribute}", partial(_of_holder, get, attribute)
        return name, get, None

    def _find(self, name: str, get: _Get, levels: int) -> None:
        value = get()
        if isinstance(value, CALLED):
            self._look_at(value, levels - 1)
        elif not isinstance(value, (type, ModuleType, BuiltinFunctionType, super)) and (
            not is_of_others(value) or isinstance(value, _OF_TORCH)
        ):
            self._read.append((name, get))
            if isinstance(value, CONTAINERS) and length_of(value) <= _ITEMS_MAX:
                for item in items_of(value):
                    if isinstance(item, CALLED):
                        self._look_at(item, levels - 1)

    def _is_object(self, value: Any) -> bool:
        """An object of a class of the program's, with attributes."""
        if isinstance(value, (type, ModuleType, FunctionType, MethodType, torch.Tensor)) or is_of_others(value):
            return False
        if isinstance(value, nn.Module):
            return not self._own(value)
        return hasattr(value, "__dict__") or bool(attributes_of(value))


_ITERATORS = (GeneratorType, _BaseDataLoaderIter)
_OF_TORCH = (nn.Module, torch.Tensor, torch.Generator, _BaseDataLoaderIter)
"""What is looked at though its class is torch's."""


def _key_of(function: Any) -> _Key:
    """The same for a function, or a method of an object, wherever it is found."""
    return id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))


def _roots_of(function: Any) -> dict[str, _Get]:
    """What a function knows by name, beside globals."""
    called = getattr(function, "__func__", function)
    cells = dict(zip(called.__code__.co_freevars, called.__closure__ or (), strict=True))
    roots: dict[str, _Get] = {name: partial(_content, cell) for name, cell in cells.items()}
    if isinstance(function, MethodType):
        owner = function.__self__
        roots[next(iter(called.__code__.co_varnames), "self")] = _constant(owner)
        if "__class__" in cells:
            roots[SUPER] = lambda: super(_content(cells["__class__"]), owner)
    return roots


def _is_holder(value: Any) -> bool:
    """A class or a module of Python, of the program's."""
    return isinstance(value, (type, ModuleType)) and not is_of_library(value)


def _constant(value: Any) -> _Get:
    return lambda: value


def _of_holder(get: _Get, name: str) -> Any:
    return getattr(get(), name, None)


def _attribute(get: _Get, name: str) -> Any:
    return attributes_of(get()).get(name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _called_by(loader: Any) -> Iterator[Any]:
    """What gives a data loader's items in this process."""
    for owner, names in ((loader._dataset, ("__getitem__", "__iter__")), (loader._index_sampler, ("__iter__",))):
        samplers = owner, getattr(owner, "sampler", None)
        yield from (getattr(each, name) for each in samplers for name in names if hasattr(each, name))
    yield loader._collate_fn


def _of_frame(generator: GeneratorType[Any, Any, Any]) -> Iterator[tuple[str, _Get]]:
    """What a generator knows by name. Once it has ended, it is what it was."""
    code = generator.gi_code
    known: dict[str, Any] = {}

    def get(name: str) -> Any:
        if generator.gi_frame is not None:
            known.update(generator.gi_frame.f_locals)
        return known.get(name)

    for name in (*code.co_freevars, *code.co_varnames[: code.co_argcount]):
        yield name, partial(get, name)
