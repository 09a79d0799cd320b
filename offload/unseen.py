"""The engine's own work, which modes of the program's do not see.

A ``TorchFunctionMode`` or ``TorchDispatchMode`` counts operations, changes their numbers or expects the same ones
again (a checkpoint's policy). What it is shown are those of the program, as without the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from offload.torch_internals import num_function_modes, num_listening_modes, unseen

P = ParamSpec("P")
R = TypeVar("R")


def own_work(function: Callable[P, R]) -> Callable[P, R]:
    """Have no mode see what a call does. It calls nothing of the program's."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not num_listening_modes() and not num_function_modes():
            return function(*args, **kwargs)
        with unseen():
            return function(*args, **kwargs)

    return call
