"""What the source of a function reads: names, and attributes of names, such as ``self.meter.mean``.

[Note: What a function only writes] ``losses.append(loss.item())`` and ``total += loss.item()`` come in the order of the
loop, and nothing depends on them. So what counts is what the function reads: the names and attributes in its source
that do not stand alone as the target of an assignment, or as the object of a method whose result nobody takes. What
such a method reads counts if it goes backward or writes to a tensor that is not its object's:
``balancer.backward(loss)``. Where there is no source, or the file may have been edited since it was imported, all that
it names is read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType

Names = tuple[str, ...]
"""A name, and attributes behind it."""
SUPER = "super()"
"""It stands in the place of a name."""
ITEM = "[]"
"""It stands in the place of an attribute, in the names of a method whose result nobody takes: any item."""
_START = time.time()
"""A file that was written to later may hold another program than the one that runs."""


@dataclass(frozen=True)
class Reads:
    """What a function's source reads."""

    names: frozenset[Names]
    for_effect: frozenset[Names]
    """Methods whose result nobody takes."""
    moved: frozenset[str]
    """Names of what goes backward, or is written to by a method whose name says so (``x.mul_(2)``); "" for what has
    none."""

    @property
    def gradients(self) -> bool:
        """It names gradients of parameters."""
        parts = (part for names in self.names | self.for_effect for part in names)
        return any(part in ("grad", "zero_grad") or part.startswith("clip_grad") for part in parts)


@cache
def reads_of(code: CodeType) -> Reads | None:
    """None if there is no source."""
    if _was_edited(code.co_filename):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    visitor = _Visitor()
    visitor.visit(tree)
    return Reads(frozenset(visitor.names), frozenset(visitor.for_effect), frozenset(visitor.moved))


def _was_edited(path: str) -> bool:
    try:
        return Path(path).stat().st_mtime > _START
    except OSError:  # a cell of a notebook
        return False


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[Names] = set()
        self.for_effect: set[Names] = set()
        self.moved: set[str] = set()

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            self._look_at_call(call.func)
            if (names := _names_of(call.func, with_items=True)) is not None:
                self.for_effect.add(names)
            self._visit_written(call.func.value)
            for each in (*call.args, *call.keywords):
                self.visit(each)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._look_at_call(node.func)
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
            self.names.add((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (names := _names_of(node)) is not None:
            self.names.add(names)
        else:
            self.generic_visit(node)

    def _look_at_call(self, called: ast.expr) -> None:
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name == "backward":
            of = called.value if isinstance(called, ast.Attribute) else None
            self.moved.add(of.id if isinstance(of, ast.Name) else "")
        elif name.endswith("_") and not name.endswith("__"):
            self.moved.add(_first_name(called))

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


def _names_of(node: ast.expr, *, with_items: bool = False) -> Names | None:
    """None where an attribute is none of a name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute) or (with_items and isinstance(node, ast.Subscript)):
        attributes.insert(0, node.attr if isinstance(node, ast.Attribute) else ITEM)
        node = node.value
    if isinstance(node, ast.Name):
        return node.id, *attributes
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return (SUPER, *attributes) if is_super else None


def _first_name(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
