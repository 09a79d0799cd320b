"""State of the function that micro-batches run: what it reads and moves, beside the model.

A loop may hand something on from one micro-batch to the next: a hidden state, a memory bank, a running mean. Under way
together they would find what another one has left there, or has not left yet. What counts is what the function reads:
see [Note: What a function only writes].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from queue import SimpleQueue
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.quasirandom import SobolEngine
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from offload.model.attributes import Known
from offload.model.containers import CONTAINERS, items_of, length_of
from offload.model.draws import generators_among
from offload.model.moving import BYTES_MAX, attributes_of, is_iterator, within
from offload.model.named import CALLED, FUNCTIONS, is_of_library, is_of_others, names_of
from offload.model.own_writes import bytes_hash, has_bytes
from offload.model.reads import ITEM, SUPER, Names, reads_of

_ITEMS_MAX = 1000
"""In a larger container no functions are searched."""
_LEVELS = 8
"""Of functions that call functions, of objects in objects, and of containers in containers."""
_MAX = 300
"""More functions, or objects in one that is read as a whole, are not looked at."""
_Get = Callable[[], Any]
_Key = tuple[int, int]
_Followed = tuple[str, _Get, MethodType | None]


class Body:
    """What a function reads that micro-batches run, and what the generator of their items reads."""

    def __init__(self, function: Any, items: Any, own: Callable[[nn.Module], bool], hooks: Iterable[Any] = ()) -> None:
        """``own`` modules are those of the engine's model, which others look at. ``hooks`` are called in backward."""
        self._own = own
        self._read: list[tuple[str, _Get]] = []
        """Several functions may have one name for something of their own."""
        self._seen: set[_Key] = set()
        self._reads_gradients = False
        """Of parameters that are not the engine's: a loop adds to them, which matters to nobody else."""
        for each in (function, *hooks):
            self._look_at(each, _LEVELS)
        self._look_at_iterator(items, _LEVELS)
        self._known = self._now()

    def changed(self) -> str | None:
        """The name of what was moved since this was asked; None if nothing was."""
        now = self._now()
        before, self._known = self._known, now
        pairs = zip(self._read, now, before, strict=True)
        return next((name for (name, _), known, other in pairs if not known.is_as(other)), None)

    def of_threads(self) -> str | None:
        """The name of what it reads that is another thing for another thread, or keeps that waiting; None: nothing."""
        return next((name for name, get in self._read if isinstance(get(), _OF_THREADS)), None)

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
            others = [module for module in value.modules() if not self._own(module)]
            known.add_versions(others)
            for each in (each for module in others for each in module._parameters.values()):
                self._add_gradient(known, each)
            return
        first = len(known.values)
        known.add(value, _LEVELS)
        items = known.values[first:]
        for item in items:
            if type(item) is nn.Parameter:  # one of the program's own: the engine's have handles
                known.marks.append(item._version)
                self._add_gradient(known, item)
            if isinstance(item, CONTAINERS) and length_of(item) > _ITEMS_MAX:
                known.values += items_of(item)
            if type(item) in (torch.Tensor, nn.Parameter) and item.nbytes <= BYTES_MAX and has_bytes(item):
                known.marks.append(bytes_hash(item))  # a write through ``.data`` shows there alone
        for item in items if levels else ():
            if self._is_object(item) and id(item) not in seen and len(seen) < _MAX:
                seen.add(id(item))
                for each in attributes_of(item).values():
                    self._add(known, each, levels - 1, seen)

    def _add_gradient(self, known: Known, value: Any) -> None:
        if self._reads_gradients and type(value) is nn.Parameter:
            known.values.append(value.grad)
            known.marks.append(None if value.grad is None else value.grad._version)

    def _look_at_iterator(self, items: Any, levels: int) -> None:
        """Know what gives the items of an iterator, or of a data loader."""
        if not levels:
            return
        if isinstance(items, GeneratorType) and items.gi_frame is not None:
            self._look_at_code(items.gi_code, items.gi_frame.f_globals, dict(_of_frame(items)), levels, _key_of(items))
        elif isinstance(items, (DataLoader, _BaseDataLoaderIter)):
            for each in _called_by(items):
                self._look_at(each, levels)
        elif is_iterator(items):
            for each in within(items):
                self._look_at(each, levels) if isinstance(each, CALLED) else self._look_at_iterator(each, levels - 1)
        elif self._is_object(items) and hasattr(type(items), "__next__"):
            self._look_at(type(items).__next__.__get__(items), levels)

    def _look_at_class(self, kind: type, owner: Any, levels: int) -> None:
        """Know what functions of a class read, which belongs to the program; with an ``owner`` those that Python calls
        for it."""
        for name, value in ((n, v) for cls in kind.__mro__ if not is_of_library(cls) for n, v in vars(cls).items()):
            function = getattr(value, "fget", getattr(value, "__func__", value))
            is_called = owner is None or (name.startswith("__") and name != "__init__") or isinstance(value, property)
            if is_called and isinstance(function, FunctionType):
                self._look_at(function if owner is None else MethodType(function, owner), levels - 1)

    def _look_at(self, function: Any, levels: int) -> None:
        """Know what a function reads, and the functions that it names."""
        if isinstance(function, partial):
            for index, value in enumerate((*function.args, *function.keywords.values())):
                self._find(f"argument {index} of a partial", _constant(value), levels)
            function = function.func
        if not isinstance(function, (FunctionType, MethodType)) and self._is_object(function):
            function = function.forward if isinstance(function, nn.Module) else getattr(function, "__call__", None)  # noqa: B004
        called = getattr(function, "__func__", function)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, type) and is_of_library(called) and not is_of_library(owner):  # ``Function.apply``
            self._look_at_class(owner, None, levels)
        if not isinstance(called, FunctionType) or is_of_others(called) or is_of_library(called):
            return
        for index, value in enumerate((*(called.__defaults__ or ()), *(called.__kwdefaults__ or {}).values())):
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
        self._reads_gradients |= reads is None or reads.gradients
        for each in ((name,) for name in roots) if reads is None else reads.names:
            if each[0] in roots:
                name, get, method = self._follow(each, roots)
                if method is None:
                    self._find(name, get, levels)
                else:
                    self._look_at(method, levels - 1)
        for each in () if reads is None else reads.for_effect:
            for name, get, method in self._each(each, roots):
                called = get() if method is None else method
                if isinstance(called, FUNCTIONS) and self._moves_others(called, set()):
                    self._look_at(called, levels - 1)
                elif isinstance(called, _OF_THREADS) or generators_among([called]):
                    self._find(name, get, levels)

    def _moves_others(self, function: Any, seen: set[_Key]) -> bool:
        """The function goes backward, or writes to tensors that are not its object's, or calls one that does."""
        called = getattr(function, "__func__", function)
        if _key_of(function) in seen or len(seen) >= _MAX or not isinstance(called, FunctionType):
            return False
        seen.add(_key_of(function))
        if is_of_library(called) or is_of_others(called):
            return False
        of_object = called.__code__.co_varnames[:1] if called is not function else ()
        if (reads := reads_of(called.__code__)) is None or reads.moved - set(of_object):
            return True
        roots = _globals_of(called) | _roots_of(function)
        found = chain(*(self._each(each, roots) for each in reads.names | reads.for_effect))
        return any(self._moves_others(get() if method is None else method, seen) for _, get, method in found)

    def _each(self, names: Names, roots: dict[str, _Get]) -> Iterator[_Followed]:
        """See ``_follow``, from each of the items of a container among the names."""
        if names[0] not in roots:
            return
        if ITEM not in names[1:]:
            yield self._follow(names, roots)
            return
        place = names.index(ITEM, 1)
        container = self._follow(names[:place], roots)[1]()
        if isinstance(container, CONTAINERS) and length_of(container) <= _ITEMS_MAX:
            for item in items_of(container):
                yield from self._each((ITEM, *names[place + 1 :]), {ITEM: _constant(item)})

    def _follow(self, names: Names, roots: dict[str, _Get]) -> _Followed:
        """Go from a name to its attributes, as far as these are in objects, classes and modules of Python, of the
        program's: how far that is, how it is read, and the method that comes next."""
        name, get = names[0], roots[names[0]]
        for attribute in names[1:]:
            owner = get()
            if isinstance(owner, _OF_THREADS):
                break
            if isinstance(owner, super) or self._is_object(owner):
                if not isinstance(owner, super) and attribute in attributes_of(owner):
                    name, get = f"{name}.{attribute}", partial(_attribute, get, attribute)
                    continue
                kind = owner if isinstance(owner, super) else type(owner)
                method = getattr(kind, attribute, None)
                method = getattr(method, "fget" if isinstance(method, property) else "func", method)
                if isinstance(method, FunctionType):
                    method = MethodType(method, owner)
                if isinstance(method, MethodType) and isinstance(method.__func__, FunctionType):
                    return name, get, None if is_of_library(method.__func__) else method
                if not isinstance(owner, super) and hasattr(kind, attribute) and not hasattr(method, "__get__"):
                    name, get = f"{name}.{attribute}", partial(_attribute, get, attribute)
                    continue
                break
            if not _is_holder(owner, attribute):
                break
            name, get = f"{name}.{attribute}", partial(_of_holder, get, attribute)
        return name, get, None

    def _find(self, name: str, get: _Get, levels: int) -> None:
        value = get()
        if isinstance(value, CALLED):
            self._look_at(value, levels - 1)
        elif isinstance(getattr(value, "__wrapped__", None), CALLED):  # of ``functools.cache``
            self._look_at(value.__wrapped__, levels - 1)
        elif isinstance(value, type):
            if not is_of_library(value):
                self._look_at_class(value, None, levels)
        elif not isinstance(value, (ModuleType, BuiltinFunctionType, super)) and (
            not is_of_others(value) or isinstance(value, _OF_TORCH)
        ):
            self._read.append((name, get))
            self._look_at_iterator(value, levels)
            if self._is_object(value):
                self._look_at_class(type(value), value, levels)
            if isinstance(value, CONTAINERS) and length_of(value) <= _ITEMS_MAX:
                for item in items_of(value):
                    if isinstance(item, CALLED):
                        self._look_at(item, levels - 1)

    def _is_object(self, value: Any) -> bool:
        """An object of a class of the program's, with attributes."""
        if isinstance(value, (type, ModuleType, FunctionType, MethodType, torch.Tensor)):
            return False
        if is_of_others(value) and not isinstance(value, _MOVING_OF_TORCH):
            return False
        if isinstance(value, nn.Module):
            return not self._own(value)
        return hasattr(value, "__dict__") or bool(attributes_of(value))


_ITERATORS = (GeneratorType, _BaseDataLoaderIter)
_MOVING_OF_TORCH = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, SobolEngine)
"""Objects of torch's whose attributes are looked at."""
_OF_TORCH = (nn.Module, torch.Tensor, torch.Generator, DataLoader, _BaseDataLoaderIter, *_MOVING_OF_TORCH)
"""What is looked at though its class is torch's."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Semaphore, threading.Condition, threading.Barrier)
_OF_THREADS = (threading.local, SimpleQueue, *_LOCKS)
"""One micro-batch would wait for ever for what another one holds, which waits for its turn."""


def _key_of(function: Any) -> _Key:
    """The same for a function, or a method of an object, wherever it is found."""
    return id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))


def _globals_of(function: FunctionType) -> dict[str, _Get]:
    return {name: partial(function.__globals__.get, name) for name in names_of(function.__code__)}


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


def _is_holder(value: Any, attribute: str) -> bool:
    """A class or a module of Python, of the program's, or a function or a tensor that the program has given an
    attribute."""
    if isinstance(value, (FunctionType, torch.Tensor)):
        return attribute in vars(value)
    return isinstance(value, (type, ModuleType)) and not is_of_library(value)


def _constant(value: Any) -> _Get:
    return lambda: value


def _of_holder(get: _Get, name: str) -> Any:
    return getattr(get(), name, None)


def _attribute(get: _Get, name: str) -> Any:
    """Of the object, or else of its class."""
    value = get()
    return attributes_of(value).get(name, getattr(type(value), name, None))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _called_by(loader: Any) -> Iterator[Any]:
    """What gives a data loader's items in this process."""
    is_loader = isinstance(loader, DataLoader)
    dataset, collate = (loader.dataset, loader.collate_fn) if is_loader else (loader._dataset, loader._collate_fn)
    sampler = loader._index_sampler
    for owner, names in ((dataset, ("__getitem__", "__iter__")), (sampler, ("__iter__",))):
        samplers = owner, getattr(owner, "sampler", None)
        yield from (getattr(each, name) for each in samplers for name in names if hasattr(each, name))
    yield collate


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
