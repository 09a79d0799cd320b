"""Signals that come in the middle of what must be done whole.

A handler of Python may raise: Ctrl-C does (``KeyboardInterrupt``), and so do time limits by ``signal.alarm``. Python
calls it between any two lines of the main thread.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Those that programs give handlers that raise. Ctrl-C first: it is the first to be held back and the last let go."""


@contextmanager
def held_back() -> Iterator[None]:
    """Handle at the end what comes within, as if it had come there: what is within is done whole, or not begun.

    In other threads than the main one nothing needs to be held back: Python handles no signals there. May be nested.
    The calls are those that ``signal`` wraps: enums cost five times as much, a dozen times for each use of a unit.
    """
    handlers: dict[int, _Handler] = {}
    came: dict[int, FrameType | None] = {}
    try:
        for number in _SIGNALS if current_thread() is main_thread() else ():
            handler = _signal.getsignal(number)
            if callable(handler):  # not SIG_DFL, SIG_IGN or what C has put there
                handlers[number] = handler
                _signal.signal(number, came.__setitem__)
        yield
    finally:
        try:
            _put_back(list(handlers.items()))
        finally:
            _handle([(handlers[number], number, frame) for number, frame in came.items()])


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """Have handlers of the program's own run before or after a call, and not in it: one that looks into the model (to
    save it, to log) would find the engine in the middle of its work. Ctrl-C, whose handler looks at nothing, comes at
    once unless there are such handlers."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or all(map(of_python, handlers())):
            return function(*args, **kwargs)
        with held_back():
            return function(*args, **kwargs)

    return call


of_python = (signal.default_int_handler, int(signal.SIG_DFL), int(signal.SIG_IGN), None).__contains__
"""A handler looks at nothing."""
handlers = partial(map, _signal.getsignal, _SIGNALS)
"""The handlers of signals that are held back. Neither is a function of Python: each use of a unit asks four times."""


def _put_back(handlers: list[tuple[int, _Handler]]) -> None:
    """The last one first. One that is put back may be called at once, and raise, while others are still to come."""
    try:
        while handlers:
            _signal.signal(*handlers[-1])  # which handles signals before it changes anything
            handlers.pop()
    finally:
        if handlers:
            _put_back(handlers)


def _handle(came: Sequence[tuple[_Handler, int, FrameType | None]]) -> None:
    """Call all handlers, even if one raises."""
    if came:
        handler, number, frame = came[0]
        try:
            handler(number, frame)
        finally:
            _handle(came[1:])
