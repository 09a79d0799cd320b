"""Hooks translate what PyTorch does into uses of units. They decide nothing.

[Note: When a unit's backward is over] Autograd runs nodes in the reverse order of their creation. When the gradient of
a call's output arrives, every node that was created after that call has run: units whose calls began later are done.
Units that are still open when the backward ends are closed then; where an exception ended it, before the next forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node

from offload.errors import ConfigError
from offload.model.handle import Handle
from offload.model.own_writes import OwnWrites
from offload.tiers.window import Window
from offload.torch_internals import (
    belongs_to_backward,
    graph_task,
    leaves_of,
    map_leaves,
    next_sequence_number,
    sequence_number,
    when_backward_ends,
)
from offload.units import ParameterSpec, UnitSpec
from swapper import OffloadError


class Schedule(Protocol):
    """What the hooks tell: a unit is needed, is no longer needed, got a gradient, has all its gradients; its forward
    has given one of its weights another value."""

    def begin_use(self, unit: UnitSpec) -> None: ...

    def end_use(self, unit: UnitSpec) -> None: ...

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor) -> None: ...

    def end_backward(self, unit: UnitSpec) -> None: ...

    def changed_in_use(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor) -> None: ...


class UnitInModel:
    """What stands in the model for one unit: its parameters, which are views of ``window``, and the calls under way."""

    __slots__ = (
        "__weakref__",
        "forward_depth",
        "forward_sequence",
        "forward_start",
        "in_backward",
        "own_writes",
        "parameters",
        "sites",
        "spec",
        "window",
    )

    def __init__(self, spec: UnitSpec, window: Window, parameters: Sequence[nn.Parameter]) -> None:
        self.spec = spec
        self.window = window
        self.parameters = parameters
        self.sites: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        """Where each parameter stands in the model: module, name, handle, parameter."""
        self.forward_depth = 0
        """Modules of this unit whose forward is running."""
        self.forward_start = 0
        """Serial number of the moment when the outermost of them began."""
        self.forward_sequence = 0
        """Autograd's number of the first node that it may have made."""
        self.in_backward = False
        self.own_writes = OwnWrites(parameters)


class NotScriptable(ConfigError, AttributeError):
    """A hook has no name. ``torch.jit.script`` is the one that cannot do without."""


class _Hook(partial[Any]):
    """A hook that belongs to its model: in a ``deepcopy`` of the module it does nothing."""

    @property
    def __name__(self) -> str:
        raise NotScriptable(
            "torch.jit.script cannot compile the engine's hooks. Script the model that engine.unwrap() gives, or one "
            "that is built anew and has loaded model.state_dict()."
        )

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    return None


_IN_PARTS = "an OffloadEngine brings weights in around each unit: compile its model without fullgraph=True"


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returned."""
    leaves = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _own(unit: UnitInModel, leaf: Any) -> Any:
    """A module may return its parameter, or a view of it: such an output must stay when the unit is released."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and unit.window.holds(leaf) else leaf


def _first_node(sequence: int, output: torch.Tensor) -> Node | None:
    """The node through which gradients of ``output`` reach those that the unit has made since ``sequence``.

    None for what a unit has merely passed through: its gradient tells nothing of the unit's backward. A view that the
    caller changes in place gets a new history, which goes through its base alone: the base's node is the one.
    """
    for tensor in (output._base, output):
        node = None if tensor is None else tensor.grad_fn
        if node is not None and sequence_number(node) >= sequence and not _is_older(node):
            return node
    return None


def _is_older(node: Node) -> bool:
    """The unit is being recomputed, and the node was made before. Each thread counts its nodes by itself, and autograd
    may recompute in another one than that which ran the forward: there the numbers tell nothing."""
    return graph_task() != -1 and belongs_to_backward(node)


def _take_gradient(
    hooks: weakref.ref[Hooks], unit: weakref.ref[UnitInModel], index: int, parameter: torch.Tensor
) -> None:
    """Weakly: the collector does not see into hooks of tensors."""
    taker, owner = hooks(), unit()
    if taker is not None and owner is not None:
        taker._post_accumulate(owner, owner.spec.parameters[index], parameter)


def _stands(parameter: nn.Parameter, spec: ParameterSpec) -> bool:
    """It is where the model has it, and still a handle: ``torch.utils.swap_tensors`` makes something else of it."""
    return isinstance(parameter, Handle) and all(
        module._parameters.get(name) is parameter for module, name in spec.owners
    )


class Hooks:
    """Puts a unit's parameters into the model around its forward and backward, and handles outside of them."""

    def __init__(
        self,
        units: Sequence[UnitInModel],
        handles: dict[ParameterSpec, nn.Parameter],
        parameters: dict[ParameterSpec, nn.Parameter],
        schedule: Schedule,
        outside_of_graphs: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        one_thread: bool = True,
    ) -> None:
        """``handles`` stand at the sites of a parameter or a piece, ``parameters`` where the model has it.

        ``outside_of_graphs`` keeps a function out of what ``torch.compile`` makes of a module. ``one_thread``: autograd
        runs backward in the thread that asks for it, as it does on the CPU.
        """
        self._units = units
        self._outside_of_graphs = outside_of_graphs
        self._schedule = schedule
        self._handles = handles
        self._parameters = parameters
        self._serial = 0
        self._one_thread = one_thread
        self._thread = 0
        """The one that has used units last."""
        self._num_forwards = 0
        """Units in forward."""
        self._open: list[tuple[UnitInModel, int, int]] = []
        """Units in backward: with the serial number at which the call began, and the graph task that opened it."""
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        """Graph tasks that have opened units, each with what it calls at its end. An exception ends one without a call:
        then nothing refers to that any more."""
        self._lost: set[ParameterSpec] = set()
        """Parameters that were said to be lost."""
        self._installed: list[Any] = []
        for unit in units:
            self._install(unit)

    def close_backward(self, task: int | None = None) -> None:
        """Close the units that graph task ``task`` opened; all of them if it is None (an exception ended it)."""
        self._tasks = {} if task is None else {key: end for key, end in self._tasks.items() if key != task}
        for entry in [entry for entry in self._open if task is None or entry[2] == task]:
            self._leave_backward(entry)

    def reset(self) -> None:
        """No forward and no backward is running: close the units that an exception or an interrupt has left open."""
        self.close_backward()
        for unit in self._units:
            if unit.forward_depth:
                unit.forward_depth = 0
                self._leave_forward(unit)
        self._num_forwards = 0

    def lost(self, model: nn.Module) -> Iterator[str]:
        """The names of trained parameters that stand nowhere in the model any more; each is named once."""
        suspects = [
            spec
            for spec, handle in self._parameters.items()
            if spec.trainable and spec not in self._lost and not _stands(handle, spec)
        ]
        present = {id(parameter) for parameter in model.parameters()} if suspects else set()
        for spec in suspects:
            if id(self._parameters[spec]) not in present or not isinstance(self._parameters[spec], Handle):
                self._lost.add(spec)
                yield spec.name

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._installed:
            hook.remove()
        self._installed.clear()

    def _install(self, unit: UnitInModel) -> None:
        before, after = self._outside_of_graphs(self._pre_forward), self._outside_of_graphs(self._post_forward)
        for module in unit.spec.modules:
            self._installed += [
                # Before all others: one that raises must not leave our hook after the forward without ours before it.
                module.register_forward_pre_hook(_Hook(before, unit), prepend=True),
                module.register_forward_hook(_Hook(after, unit), always_call=True),
            ]
        for index, (parameter, spec) in enumerate(zip(unit.parameters, unit.spec.parameters, strict=True)):
            handle = self._handles[spec]
            unit.sites += [(module, name, handle, parameter) for module, name in spec.sites]
            if not spec.trainable:
                continue
            hook = _Hook(_take_gradient, weakref.ref(self), weakref.ref(unit), index)
            if spec.piece is not None:
                spec.piece.on_gradient = hook
            for holder in (parameter, self._parameters[spec]):  # the handle's own method would do both
                self._installed.append(torch.Tensor.register_post_accumulate_grad_hook(holder, hook))

    # A parameter that was put in the place of the engine's stays there.

    def _show_parameters(self, unit: UnitInModel) -> None:
        for module, name, handle, parameter in unit.sites:
            if module._parameters.get(name) is handle:
                module._parameters[name] = parameter

    def _show_handles(self, unit: UnitInModel) -> None:
        for module, name, handle, parameter in unit.sites:
            if module._parameters.get(name) is parameter:
                module._parameters[name] = handle

    def _pre_forward(self, unit: UnitInModel, module: nn.Module, args: Any) -> None:
        if unit.forward_depth == 0:
            if not torch.compiler.is_compiling():
                if torch._C._is_tracing():
                    raise ConfigError(
                        "torch.jit.trace would keep the weights as they are now, in memory that others pass through. "
                        "Trace copy.deepcopy(model), or the model that engine.unwrap() gives."
                    )
                if self._open and graph_task() == -1:
                    self._close_failed()
                self._enter(forward=True)
            else:
                torch._dynamo.graph_break(msg=_IN_PARTS)  # dynamo's own error would not say it
            if not unit.in_backward:
                self._schedule.begin_use(unit.spec)
            self._serial += 1
            unit.forward_start = self._serial
            unit.forward_sequence = next_sequence_number()
            self._show_parameters(unit)
            if not torch.compiler.is_compiling():
                unit.own_writes.begin()
            self._num_forwards += 1
        unit.forward_depth += 1

    def _post_forward(self, unit: UnitInModel, module: nn.Module, args: Any, output: Any) -> Any:
        if unit.forward_depth == 0:
            return output  # the pre-hook of this call raised: there is nothing to undo
        unit.forward_depth -= 1
        if unit.forward_depth > 0:
            return output
        leaves = _tensors(output)
        if any(map(unit.window.holds, leaves)):
            output = map_leaves(lambda leaf: _own(unit, leaf), output)
            leaves = _tensors(output)
        if not torch.compiler.is_compiling():
            for index, value in unit.own_writes.end():
                self._schedule.changed_in_use(unit.spec, unit.spec.parameters[index], value)
        self._leave_forward(unit)
        if torch.is_grad_enabled():
            arrived = partial(self._pre_backward, unit, unit.forward_start, self._serial)
            for leaf in leaves:
                node = _first_node(unit.forward_sequence, leaf)
                if node is not None:
                    node.register_prehook(arrived)
        return output

    def _enter(self, *, forward: bool) -> None:
        """A thread begins to use a unit. Raises ``OffloadError`` while another one uses some."""
        thread = get_ident()
        if thread != self._thread:
            if self._num_forwards or (self._open and self._one_thread):
                raise OffloadError(
                    "two threads run the model at once, and the engine brings weights in for one: give each thread its "
                    "turn (a threading.Lock around forward and backward)"
                )
            if forward or self._one_thread:
                self._thread = thread

    def _leave_forward(self, unit: UnitInModel) -> None:
        self._serial += 1
        self._num_forwards -= 1
        self._show_handles(unit)
        if not unit.in_backward:
            self._schedule.end_use(unit.spec)

    def _pre_backward(self, unit: UnitInModel, start: int, end: int, gradients: Any) -> None:
        """A gradient has reached the output of the call that ran from serial number ``start`` to ``end``."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: weights leave when their backward is over, and a backward through the gradients "
                "(a gradient penalty, a Hessian) would not find them. Do that on a model that is not wrapped."
            )
        self._enter(forward=False)
        task = graph_task()
        if task not in self._tasks:
            close = partial(self.close_backward, task)
            self._tasks[task] = weakref.ref(close)
            when_backward_ends(close)
        for entry in [entry for entry in self._open if entry[1] > end]:
            self._leave_backward(entry)
        if not unit.in_backward:
            if unit.forward_depth == 0:
                self._schedule.begin_use(unit.spec)
            unit.in_backward = True
            self._open.append((unit, start, task))

    def _close_failed(self) -> None:
        """Close the units of backwards that an exception has ended."""
        for task in [task for task, end in self._tasks.items() if end() is None]:
            self.close_backward(task)

    def _leave_backward(self, entry: tuple[UnitInModel, int, int]) -> None:
        unit = entry[0]
        self._open.remove(entry)
        unit.in_backward = False
        if unit.forward_depth == 0:
            self._schedule.end_use(unit.spec)
        self._schedule.end_backward(unit.spec)

    def _post_accumulate(self, unit: UnitInModel, spec: ParameterSpec, parameter: torch.Tensor) -> None:
        if isinstance(parameter, Handle):
            whole = parameter.take_autograd_gradient(keep=spec.another_piece_follows)
            gradient = None if whole is None else spec.part_of(whole)
        else:
            gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._schedule.take_gradient(unit.spec, spec, gradient)
            if not unit.in_backward:
                self._schedule.end_backward(unit.spec)
