"""Modes of torch, its settings and context variables that something ran in, for a second run or another thread.

Torch's checkpoint restores autocast, the default device and random generators alone, and a backward has other modes
than its forward: it is called outside of a ``with`` (one that chooses kernels of attention, for example), and a
``TorchFunctionMode`` around it steps aside for ``Tensor.backward``. In one that is called for some inputs
(``torch.autograd.grad``) no class of tensors is asked for its functions: torch has asked the inputs, for all of it.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch

from offload.settings import Settings
from offload.torch_internals import (
    TORCH_FUNCTIONS,
    dispatch_modes,
    function_modes,
    without_dispatch_mode,
    without_function_mode,
)

_KINDS = ((function_modes, without_function_mode), (dispatch_modes, without_dispatch_mode))
"""Of each kind of modes: those that are entered, and a context without the last one."""

_SMALLEST_NORMAL = sys.float_info.min

T = TypeVar("T")


class RanIn:
    """The modes, settings and variables of the thread that makes this."""

    def __init__(self, *, with_settings: bool = True) -> None:
        """All threads have the settings in common: a thread beside the program's must not put them."""
        self._settings = Settings() if with_settings else None
        self._flushes = _flushes()
        self._functions = TORCH_FUNCTIONS[0]()
        self._modes = [entered() for entered, _ in _KINDS]
        self._variables = contextvars.copy_context()

    @property
    def has_modes(self) -> bool:
        """Something sees each operation."""
        return any(self._modes)

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the same. Variables that it sets are as before afterwards."""
        return self._variables.copy().run(self._within, function)

    def _within(self, function: Callable[[], T]) -> T:
        with ExitStack() as stack:
            for then, (entered, without_last) in zip(self._modes, _KINDS, strict=True):
                modes = entered()
                if list(map(id, then)) != list(map(id, modes)):
                    for _ in modes:
                        stack.enter_context(without_last())
                    for mode in then:
                        stack.enter_context(mode)
            if self._settings is not None:
                stack.callback(Settings().put)
                self._settings.put()
            if self._flushes is not (now := _flushes()):
                stack.callback(torch.set_flush_denormal, now)
                torch.set_flush_denormal(self._flushes)
            if self._functions != (asked := TORCH_FUNCTIONS[0]()):
                stack.callback(TORCH_FUNCTIONS[1], asked)
                TORCH_FUNCTIONS[1](self._functions)
            return function()


def _flushes() -> bool:
    """This thread takes denormal numbers for zeros (``torch.set_flush_denormal``, which torch does not tell)."""
    return _SMALLEST_NORMAL / 2 == 0
