"""Variables that functions name: those of their closures, their globals, and the objects that they are bound to.

A forward, and hooks on modules, may count or keep something there. A variable is read and set by two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from operator import setitem
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

Variable: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]

MISSING = object()
"""A variable that has no value."""
_FIXED = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)
_OTHERS = {"offload", "swapper", "aio_ext", "torch", "logging"}
"""Packages whose functions and objects are not searched."""


def variables_of(function: Any) -> Iterator[Variable]:
    """Those that a function names, and what it is bound to. Functions of torch's and the engine's have none."""
    if isinstance(function, partial):
        for value in (*function.args, *function.keywords.values()):
            yield _constant(value)
        function = function.func
    if isinstance(function, MethodType):
        yield _constant(function.__self__)
        function = function.__func__
    if not isinstance(function, FunctionType) or is_of_others(function):
        return
    for value in function.__defaults__ or ():
        yield _constant(value)
    for cell in function.__closure__ or ():
        yield partial(_content, cell), partial(setattr, cell, "cell_contents")
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield partial(function.__globals__.get, name, MISSING), partial(setitem, function.__globals__, name)


@cache
def functions_of(kind: type[nn.Module]) -> tuple[FunctionType, ...]:
    """The functions of a module's class and those that it is derived from, but for torch's."""
    return tuple(
        function
        for cls in kind.__mro__
        for function in vars(cls).values()
        if isinstance(function, FunctionType) and not is_of_others(function)
    )


def outside_of(modules: Sequence[nn.Module]) -> list[Variable]:
    """Variables of the functions of their classes, of forwards that stand in them, and of hooks on their forwards."""
    hooks = (each for module in modules for each in (module._forward_pre_hooks, module._forward_hooks) if each)
    forwards = (vars(module)["forward"] for module in modules if "forward" in vars(module))
    functions = chain(
        *(functions_of(kind) for kind in dict.fromkeys(map(type, modules))),
        (getattr(forward, "__wrapped__", forward) for forward in forwards),
        *(each.values() for each in hooks),
    )
    return [variable for variable in chain(*map(variables_of, functions)) if may_change(variable[0]())]


def is_of_others(item: Any) -> bool:
    """The function or the object's class is torch's or the engine's."""
    module = item.__module__ if isinstance(item, FunctionType) else type(item).__module__
    return str(module).split(".")[0] in _OTHERS


def may_change(value: Any) -> bool:
    """A value that a variable is looked at for."""
    return value is not MISSING and not isinstance(value, _FIXED) and not is_of_others(value)


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """Names of globals, in functions within it, too."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for each in inner for name in _names(each))]))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def _constant(value: Any) -> Variable:
    return lambda: value, lambda other: None
