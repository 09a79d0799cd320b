"""Variables that functions name: those of their closures, their globals, and the objects that they are bound to.

A forward, and hooks on modules, may count or keep something there. A variable is read and set by two functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dis import get_instructions
from functools import cache, partial
from itertools import chain
from operator import setitem
from threading import Thread
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from offload.torch_internals import HOOKS_OF_ALL_FORWARDS

Variable: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]

MISSING = object()
"""A variable that has no value."""
FUNCTIONS = (FunctionType, MethodType)
CALLED = (*FUNCTIONS, partial)
_FIXED = (nn.Parameter, type, ModuleType, *FUNCTIONS, BuiltinFunctionType, property, classmethod, staticmethod)
_LEVELS = 3
"""Of functions that name functions."""
_FUNCTIONS_MAX = 300
_OTHERS = {"offload", "swapper", "aio_ext", "torch", "logging", "tqdm"}
"""Packages whose functions and objects are not searched."""
_LIBRARIES = _OTHERS | sys.stdlib_module_names | {"numpy"}
_OF_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}


def variables_of(function: Any) -> Iterator[Variable]:
    """Those that a function names, and what it is bound to and keeps. Functions of torch's and the engine's have
    none."""
    if isinstance(function, partial):
        for value in (*function.args, *function.keywords.values()):
            yield _constant(value)
        function = function.func
    if isinstance(function, MethodType):
        yield _constant(function.__self__)
        function = function.__func__
    if not isinstance(function, FunctionType) or is_of_others(function):
        return
    for value in (vars(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield _constant(value)
    for cell in function.__closure__ or ():
        yield partial(_content, cell), partial(setattr, cell, "cell_contents")
    for name in names_of(function.__code__):
        yield partial(function.__globals__.get, name, MISSING), partial(setitem, function.__globals__, name)
        yield from _through(function.__globals__.get(name), function.__code__)


def _through(module: Any, code: CodeType, levels: int = 3) -> Iterator[Variable]:
    """Variables of a module of Python's that code names, as ``module.variable``. Of a library's: functions of the
    program's, which it has put there."""
    if not isinstance(module, ModuleType) or not levels:
        return
    for name in _attributes_in(code) & vars(module).keys():
        value = vars(module)[name]
        is_put_there = isinstance(value, CALLED) and not is_of_library(value)
        if is_put_there or not is_of_library(module):
            yield partial(vars(module).get, name, MISSING), partial(setattr, module, name)
        yield from _through(value, code, levels - 1)


def variables_from(functions: Iterable[Any]) -> list[Variable]:
    """Those of the functions, and of functions and classes that these name, and so on."""
    found: list[Variable] = []
    seen: set[int] = set()
    level = list(functions)
    for _ in range(_LEVELS):
        named = []
        for function in level:
            if id(function) in seen or len(seen) > _FUNCTIONS_MAX:
                continue
            seen.add(id(function))
            for variable in variables_of(function):
                value = variable[0]()
                if isinstance(value, CALLED):
                    named.append(value)
                elif isinstance(value, type) and id(value) not in seen:
                    seen.add(id(value))
                    found += (attributes := _attributes_of(value))
                    named += _functions_among(attributes)
                else:
                    found.append(variable)
        level = [each for each in named if not is_of_library(each)]
    return found


def variables_of_call(called: Any, of_kinds: dict[type, tuple[Variable, ...]]) -> Sequence[Variable]:
    """Those of a function, or of the class of an object that can be called, but for libraries'; see ``outside_of``."""
    if isinstance(called, CALLED):
        return () if is_of_library(called) else variables_from([called])
    kind = type(called)
    if kind not in of_kinds:
        of_kinds[kind] = () if is_of_library(kind) else _variables_of_kind(kind)
    return of_kinds[kind]


def _variables_of_kind(kind: type) -> tuple[Variable, ...]:
    """Those of the functions of a module's class and of the classes that it is derived from, and attributes of these
    classes; but for torch's."""
    attributes = _attributes_of(kind)
    forwards = [vars(cls)["__call__"] for cls in kind.__mro__ if isinstance(vars(cls).get("__call__"), FunctionType)]
    return (*variables_from([*_functions_among(attributes), *forwards]), *attributes)


def _attributes_of(kind: type) -> list[Variable]:
    """Those of a class and of the classes that it is derived from, but for libraries'."""
    return [
        (partial(vars(cls).get, name, MISSING), partial(setattr, cls, name))
        for cls in kind.__mro__
        if not is_of_library(cls)
        for name in vars(cls)
        if not name.startswith("__")
    ]


def _functions_among(variables: Iterable[Variable]) -> list[FunctionType]:
    """Methods, those of the class as well."""
    values = (getattr(value, "__func__", value) for value in (get() for get, _ in variables))
    return [value for value in values if isinstance(value, FunctionType)]


def outside_of(modules: Sequence[nn.Module], of_kinds: dict[type, tuple[Variable, ...]]) -> list[Variable]:
    """Variables of the functions of their classes, of forwards and functions that stand in them, and of hooks on their
    forwards and on those of all modules; and the attributes of their classes. Those of classes are kept in
    ``of_kinds``, the caller's own, since they have what closures hold."""
    own_hooks = (each for module in modules for each in (module._forward_pre_hooks, module._forward_hooks) if each)
    hooks = (*HOOKS_OF_ALL_FORWARDS, *own_hooks)
    forwards = (vars(module)["forward"] for module in modules if "forward" in vars(module))
    standing = (value for module in modules for value in vars(module).values() if isinstance(value, CALLED))
    functions = chain(
        (getattr(forward, "__wrapped__", forward) for forward in forwards),
        standing,
        *(each.values() for each in hooks),
    )
    kinds = dict.fromkeys(map(type, modules))
    of_kinds.update({kind: _variables_of_kind(kind) for kind in kinds if kind not in of_kinds})
    every = chain(*(of_kinds[kind] for kind in kinds), variables_from(functions))
    return [variable for variable in every if may_change(variable[0]())]


def is_of_others(item: Any) -> bool:
    """The function or the object's class is torch's or the engine's, or it is a thread, which changes by itself."""
    if isinstance(item, Thread):
        return True
    module = item.__module__ if isinstance(item, FunctionType) else type(item).__module__
    return str(module).split(".")[0] in _OTHERS


def may_change(value: Any) -> bool:
    """A value that a variable is looked at for."""
    if isinstance(value, (nn.Module, torch.Generator)) or type(value) is torch.Tensor:
        return True
    return value is not MISSING and not isinstance(value, _FIXED) and not is_of_others(value)


@cache
def names_of(code: CodeType) -> tuple[str, ...]:
    """Names of globals, in functions within it, too."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    own = [each.argval for each in get_instructions(code) if each.opname in _OF_GLOBALS]
    return tuple(dict.fromkeys([*own, *(name for each in inner for name in names_of(each))]))


@cache
def _attributes_in(code: CodeType) -> frozenset[str]:
    """Names of attributes, in functions within it, too."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_attributes_in, inner))


def is_of_library(item: Any) -> bool:
    """The function, the class or Python's module is the standard library's, torch's or the engine's."""
    while isinstance(item, partial):
        item = item.func
    name = item.__name__ if isinstance(item, ModuleType) else item.__module__
    return str(name).split(".")[0] in _LIBRARIES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def _constant(value: Any) -> Variable:
    return lambda: value, lambda other: None
