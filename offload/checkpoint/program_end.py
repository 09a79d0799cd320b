"""The end of a program that has not closed its engines, and the line that it ends with after Ctrl-C.

[Note: One line after Ctrl-C] The line says what is kept, and how to go on. Python would show a traceback with it, of
dozens of frames through the model, torch and the engine. It is left out for the interrupt that such a line is said of,
unless Python is in its development mode (``python -X dev``), or somebody else has a hook for exceptions. The hook of
``exceptiongroup``, which many packages bring to Python 3.10, formats tracebacks alone: it gets all other exceptions.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from offload.ranks.ranks import program_error


class Ending(Protocol):
    """What a program's end is told to."""

    @property
    def num_steps(self) -> int:
        """Steps that were taken."""
        ...

    def finish(self, error: BaseException | None) -> None:
        """The end, because of this error if of one."""


_open: weakref.WeakSet[Ending] = weakref.WeakSet()
_TOLD = "_offload_told"
"""Attribute of an interrupt that a line was said of."""
_show_other = sys.__excepthook__
"""The hook for exceptions that there was before."""


def watch(ending: Ending) -> None:
    """Have the end of the program, if it comes first, told to ``ending``."""
    global _show_other
    _open.add(ending)
    hook = sys.excepthook
    if hook is sys.__excepthook__ or getattr(hook, "__module__", None) == "exceptiongroup._formatting":
        _show_other, sys.excepthook = hook, _show


def leave(ending: Ending, error: BaseException | None, line: str) -> None:
    """The end of ``ending``, because of this ``error`` if of one. After Ctrl-C the line is printed, if there is one."""
    if ending in _open and isinstance(error, KeyboardInterrupt) and ending.num_steps:
        setattr(error, _TOLD, True)
        if line:
            print(f"offload: interrupted after step {ending.num_steps}: {line}", file=sys.stderr, flush=True)
    _open.discard(ending)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """See [Note: One line after Ctrl-C]."""
    will_be_told = isinstance(error, KeyboardInterrupt) and any(ending.num_steps for ending in _open)
    if not (will_be_told or hasattr(error, _TOLD)) or sys.flags.dev_mode:
        _show_other(kind, error, trace)


def _finish_all() -> None:
    for ending in list(_open):
        with contextlib.suppress(Exception):  # an engine that has failed has nothing to commit
            ending.finish(program_error())


os.register_at_fork(after_in_child=_open.clear)  # they are the parent's
atexit.register(_finish_all)  # before the calls of ``offload.closing``, which was imported first
