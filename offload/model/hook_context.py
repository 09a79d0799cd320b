"""The calls of units that one micro-batch has under way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch

from offload.model.under_way import touch
from offload.model.unit_in_model import Call, CallsOfUnit, UnitInModel
from offload.torch_internals import graph_task, when_backward_ends
from swapper import OffloadError


class HookContext:
    """One micro-batch's way through the model. Ordinarily there is one context, and all calls are in it.

    Where several micro-batches are on their way together (``offload.model.interleave``), each has a context of its own,
    and one of them computes at a time. What the units know of calls is of that one; ``save`` and ``restore`` exchange
    it."""

    def __init__(self, index: int = 0, num_calls: int = 0) -> None:
        self.index = index
        """Its place among those that are on their way together."""
        self.num_calls = num_calls
        """Calls of units that it has begun so far."""
        self.thread = 0
        """The one that has used units last."""
        self.entering: set[int] = set()
        """Threads that are about to use a unit: see ``enter``."""
        self.in_forward: list[UnitInModel] = []
        """Units in forward."""
        self.open: list[tuple[UnitInModel, int, int]] = []
        """Units in backward: with the serial number at which the call began, and the graph task that opened it."""
        self.outside: UnitInModel | None = None
        """The unit that got the last gradient, if that came outside of its backward: the next one may be its, too."""
        self.tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        """Graph tasks that have opened units or left one ``outside``, each with what it calls at its end. An exception
        ends one without a call: then nothing refers to that any more."""
        self.finds_in: int | None = None
        """The graph task under way that was seen to find weights that stay: see [Note: Backward without uses]."""
        self.gradient_scale: float | None = None
        """Factor that gradients of the engine's own backward, if it is under way, are still to be multiplied by."""
        self._saved: list[tuple[UnitInModel, CallsOfUnit]] = []

    def await_end(self, close: Callable[[int], None]) -> int:
        """The graph task that this thread is in, whose end calls ``close`` with it."""
        task = graph_task()
        if task not in self.tasks:
            at_end = partial(close, task)
            self.tasks[task] = weakref.ref(at_end)
            when_backward_ends(at_end)
        return task

    def come_to(self, call: Call, *, goes_on: bool) -> list[tuple[UnitInModel, int, int]]:
        """A backward has come to the call: those that began later are over. What they have left open; if it ``goes_on``
        with this call, without the unit of it."""
        left = []
        for entry in tuple(self.open):
            if entry[1] > call.end and goes_on and entry[0] is call.unit:
                self.open.remove(entry)
            elif entry[1] > call.end:
                left.append(entry)
        return left

    def end(self, task: int | None) -> list[tuple[UnitInModel, int, int]]:
        """The task is over, or all are if it is None: what it has left open."""
        self.tasks = {} if task is None else {key: end for key, end in self.tasks.items() if key != task}
        return [entry for entry in self.open if task is None or entry[2] == task]

    def failed(self) -> list[int]:
        """Graph tasks of backwards that an exception has ended."""
        return [task for task, end in self.tasks.items() if end() is None]

    @property
    def order(self) -> tuple[int, int]:
        """Grows with what a backward comes to sooner: see [Note: The order of backward]."""
        return self.num_calls, -self.index

    def enter(self, *, forward: bool, together: bool, one_thread: bool) -> None:
        """Another thread begins to use a unit. Raises ``OffloadError`` while one uses some. ``together``: micro-batches
        of this model are under way.

        A thread is among those ``entering`` before it looks whose turn it is, and until what it uses is in a list. So
        of two that begin at the same moment one at least sees the other."""
        if forward and not together and torch.is_grad_enabled():
            touch("trains another engine's model")
        before, own = self.thread, threading.get_ident()
        if forward or one_thread:
            self.thread = own
        goes_on = bool(self.open or self.entering - {own} or any(end() is not None for end in self.tasks.values()))
        if self.in_forward or together or (goes_on and one_thread):
            self.thread = before
            raise two_threads()

    def save(self, *, following: HookContext) -> None:
        """Another context computes now: its units' parameters stand in the model, and not this one's."""
        active = dict.fromkeys([*self.in_forward, *(entry[0] for entry in self.open)])
        self._saved = [(unit, unit.save()) for unit in active]
        for unit in self.in_forward:
            if unit not in following.in_forward:
                unit.show_handles()
        for unit in following.in_forward:
            if unit not in self.in_forward:
                unit.show_parameters()

    def restore(self) -> None:
        """This context computes from now on."""
        for unit, calls in self._saved:
            unit.restore(calls)
        self._saved = []


def two_threads() -> OffloadError:
    """One comes to a unit that another one uses."""
    return OffloadError(
        "two threads run the model at once, and the engine brings weights in for one: give each thread its turn "
        "(a threading.Lock around forward and backward)"
    )
