"""State of the function that micro-batches run: what it reads and moves, beside the model.

A loop may hand something on from one micro-batch to the next: a hidden state, a memory bank, a running mean. Under way
together they would find what another one has left there, or has not left yet.

[Note: What a function only writes] ``losses.append(loss.item())`` and ``total += loss.item()`` come in the order of the
loop, and nothing depends on them. So what counts is what the function reads: the names and attributes in its source
that do not stand alone as the target of an assignment, or as the object of a method whose result nobody takes. Where
there is no source, or the file may have been edited since it was imported, all that it names is read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from offload.model.attributes import Known
from offload.model.containers import CONTAINERS, items_of, length_of
from offload.model.moving import BYTES_MAX
from offload.model.named import CALLED, is_of_library, is_of_others, names_of
from offload.model.own_writes import bytes_hash, has_bytes

_ITEMS_MAX = 1000
"""In a larger container no functions are searched."""
_LEVELS = 3
"""Of functions that call functions, and of objects in objects."""
_Get = Callable[[], Any]
_START = time.time()
"""A file that was written to later may hold another program than the one that runs."""


class Body:
    """What a function reads that micro-batches run, and what the generator of their items reads."""

    def __init__(self, function: Any, items: Any, own: Callable[[nn.Module], bool]) -> None:
        """``own`` modules are those of the engine's model, which others look at."""
        self._own = own
        self._read: list[tuple[str, _Get]] = []
        """Several functions may have one name for something of their own."""
        self._seen: set[int] = set()
        self._look_at(function, _LEVELS)
        if isinstance(items, GeneratorType) and items.gi_frame is not None:
            self._look_at_code(items.gi_code, items.gi_frame.f_globals, dict(_of_frame(items)), _LEVELS)
        elif isinstance(items, map):
            self._look_at(items.__reduce__()[1][0], _LEVELS)  # type: ignore[index]
        self._known = self._now()

    def changed(self) -> str | None:
        """The name of what was moved since this was asked; None if nothing was."""
        now = self._now()
        before, self._known = self._known, now
        pairs = zip(self._read, now, before, strict=True)
        return next((name for (name, _), known, other in pairs if not known.is_as(other)), None)

    def _now(self) -> list[Known]:
        return [self._mark(get()) for _, get in self._read]

    def _mark(self, value: Any) -> Known:
        known = Known()
        self._add(known, value, _LEVELS)
        return known

    def _add(self, known: Known, value: Any, levels: int) -> None:
        if isinstance(value, nn.Module):
            if not any(map(self._own, value.modules())):
                known.add_versions(value)
            return
        first = len(known.values)
        known.add(value)
        for item in known.values[first:]:
            if type(item) is torch.Tensor and item.nbytes <= BYTES_MAX and has_bytes(item):
                known.marks.append(bytes_hash(item))  # a write through ``.data`` shows there alone
        for item in known.values[first:] if levels else ():
            if _is_object(item):
                for each in list(vars(item).values()):
                    self._add(known, each, levels - 1)

    def _look_at(self, function: Any, levels: int) -> None:
        """Know what a function reads, and the functions that it names."""
        if isinstance(function, partial):
            for index, value in enumerate((*function.args, *function.keywords.values())):
                self._find(f"argument {index} of a partial", _constant(value), levels)
            function = function.func
        roots = {}
        if not isinstance(function, (FunctionType, MethodType)) and _is_object(function):
            function = getattr(function, "__call__", None)  # noqa: B004
        if isinstance(function, MethodType):
            first = next(iter(function.__func__.__code__.co_varnames), "self") if _has_code(function) else "self"
            roots[first] = _constant(function.__self__)
            function = function.__func__
        if not isinstance(function, FunctionType) or is_of_others(function) or is_of_library(function):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        roots |= {name: partial(_content, cell) for name, cell in cells}
        for index, value in enumerate(function.__defaults__ or ()):
            self._find(f"default {index}", _constant(value), levels)
        self._look_at_code(function.__code__, function.__globals__, roots, levels)

    def _look_at_code(self, code: CodeType, names: dict[str, Any], roots: dict[str, _Get], levels: int) -> None:
        if not levels or id(code) in self._seen:
            return
        self._seen.add(id(code))
        roots = {name: partial(names.get, name) for name in names_of(code)} | roots
        read = _words_of(code)
        for word in roots if read is None else read:
            root, _, attribute = word.partition(".")
            if root not in roots:
                continue
            owner = roots[root]()
            if attribute and _is_holder(owner):
                self._find(word, partial(_of_holder, roots[root], attribute), levels)
            elif attribute and _is_object(owner) and attribute in vars(owner):
                self._find(word, partial(_attribute, roots[root], attribute), levels)
            elif attribute and isinstance(method := getattr(type(owner), attribute, None), FunctionType):
                self._find_method(root, roots[root], method, levels)
            else:
                self._find(root, roots[root], levels)

    def _find_method(self, root: str, get: _Get, method: FunctionType, levels: int) -> None:
        """A method of an object that a variable has: it reads what it names of the object."""
        if _is_object(owner := get()):
            self._look_at(MethodType(method, owner), levels - 1)
        elif not isinstance(owner, nn.Module):
            self._find(root, get, levels)

    def _find(self, name: str, get: _Get, levels: int) -> None:
        value = get()
        if isinstance(value, CALLED):
            self._look_at(value, levels - 1)
        elif not isinstance(value, (type, ModuleType, BuiltinFunctionType)) and (
            not is_of_others(value) or _has_versions(value)
        ):
            self._read.append((name, get))
            if isinstance(value, CONTAINERS) and length_of(value) <= _ITEMS_MAX:
                for item in items_of(value):
                    if isinstance(item, CALLED):
                        self._look_at(item, levels - 1)


def _is_object(value: Any) -> bool:
    """An object of a class of the program's, with attributes."""
    is_fixed = isinstance(value, (type, ModuleType, FunctionType, MethodType, nn.Module, torch.Tensor))
    return not is_fixed and hasattr(value, "__dict__") and not is_of_others(value)


def _is_holder(value: Any) -> bool:
    """A class or a module of Python, of the program's."""
    return isinstance(value, (type, ModuleType)) and not is_of_library(value)


def _has_versions(value: Any) -> bool:
    return isinstance(value, (nn.Module, torch.Tensor))


def _has_code(function: MethodType) -> bool:
    return isinstance(function.__func__, FunctionType)


def _constant(value: Any) -> _Get:
    return lambda: value


def _of_holder(get: _Get, name: str) -> Any:
    return getattr(get(), name, None)


def _attribute(get: _Get, name: str) -> Any:
    return vars(get()).get(name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _of_frame(generator: GeneratorType[Any, Any, Any]) -> Iterator[tuple[str, _Get]]:
    for name in generator.gi_code.co_freevars:
        yield name, partial(_of_running, generator, name)


def _of_running(generator: GeneratorType[Any, Any, Any], name: str) -> Any:
    return None if generator.gi_frame is None else generator.gi_frame.f_locals.get(name)


@cache
def _words_of(code: CodeType) -> frozenset[str] | None:
    """Names that the code reads, and attributes of names; None if there is no source."""
    if _was_edited(code.co_filename):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    reads = _Reads()
    reads.visit(tree)
    return frozenset(reads.words)


def _was_edited(path: str) -> bool:
    try:
        return Path(path).stat().st_mtime > _START
    except OSError:  # a cell of a notebook
        return False


class _Reads(ast.NodeVisitor):
    """See [Note: What a function only writes]."""

    def __init__(self) -> None:
        self.words: set[str] = set()

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            self._visit_written(call.func.value)
            for each in (*call.args, *call.keywords):
                self.visit(each)
        else:
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._visit_written(node.target)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._visit_written(target)
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.words.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.words.add(f"{node.value.id}.{node.attr}")
        else:
            self.generic_visit(node)

    def _visit_written(self, target: ast.expr) -> None:
        """Of what is written to: what says where."""
        while isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
            if isinstance(target, ast.Subscript):
                self.visit(target.slice)
            target = target.value
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._visit_written(each)
        elif not isinstance(target, ast.Name):
            self.visit(target)
