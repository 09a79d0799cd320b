"""Hooks translate what PyTorch does into uses of units. They decide nothing.

[Note: When a unit's backward is over] Autograd runs nodes in the reverse order of their creation. When the gradient of
a call's output arrives, or a node of the call asks for a weight, every node that was created after that call has run:
units whose calls began later are done. Units that are still open when the backward ends are closed then; where an
exception ended it, before the next forward. One that it does not use is done when another one's gradient comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from offload.errors import ConfigError
from offload.interrupts import undisturbed
from offload.model.habits import TOGETHER
from offload.model.handle import Handle
from offload.model.hook_context import HookContext, two_threads
from offload.model.installed_hooks import HookOfModel, InstalledHooks
from offload.model.listeners import Interleaving, Listener, pass_on
from offload.model.outputs import first_node, own_copy, tensors_in
from offload.model.own_writes import Writes
from offload.model.saved_tensors import SavedTensors
from offload.model.standing import Standing
from offload.model.unit_in_model import Call, UnitInModel, UnitsWithStrays, drop_autograd_gradients
from offload.torch_internals import (
    current_node,
    graph_task,
    in_module_call,
    map_leaves,
    next_sequence_number,
    num_calls_of,
    num_function_modes,
    num_listening_modes,
    num_references,
    unseen,
)
from offload.units import ParameterSpec
from offload.unseen import own_work
from swapper import OffloadError

_IN_PARTS = "an OffloadEngine brings weights in around each unit: compile its model without fullgraph=True"


class Hooks:
    """Puts a unit's parameters into the model around its forward and backward, and handles outside of them."""

    def __init__(
        self,
        units: Sequence[UnitInModel],
        parameters: dict[ParameterSpec, nn.Parameter],
        listener: Listener,
        outside_of_graphs: Callable[[Callable[..., Any], str], Callable[..., Any]],
        *,
        one_thread: bool = True,
    ) -> None:
        """``parameters`` are the handles that stand where the model has a parameter.

        ``outside_of_graphs`` keeps a function out of what ``torch.compile`` makes of a module, and has a reason to say
        where that is not possible. ``one_thread``: autograd runs backward in the thread that asks for it, as it does on
        the CPU.
        """
        self.units = units
        self._begin_forward = outside_of_graphs(self._enter_forward, _IN_PARTS)
        self._end_forward = outside_of_graphs(self._finish_forward, _IN_PARTS)
        self._begin_backward = outside_of_graphs(self._reach, _IN_PARTS)
        self._listener = listener
        self._parameters = parameters
        self._serial = 0
        self._one_thread = one_thread
        self.context = HookContext()
        """The one that computes."""
        self._turns: Interleaving | None = None
        self._kept: list[UnitInModel] = []
        """Units that the last context has left, and that another one will use next, or in a backward itself."""
        self.standing = Standing(parameters)
        self._in_use: dict[UnitInModel, None] = {}
        """Units from before a use of them begins until after it has ended: those that an interrupt may leave."""
        self._with_strays = UnitsWithStrays()
        self.installed = InstalledHooks()
        saved_tensors = SavedTensors(self)
        for unit in units:
            unit.saved_tensors = saved_tensors
            unit.around = HookOfModel(self._pre_forward, unit), HookOfModel(self._post_forward, unit)
            self.installed.in_model(unit, parameters, self)

    @undisturbed
    @own_work
    def close_backward(self, task: int | None = None) -> None:
        """Close the units that graph task ``task`` opened; all of them if it is None (an exception ended it)."""
        for entry in self.context.end(task):
            self._leave_backward(entry)
        self._end_outside()
        self.context.finds_in = None

    def reset(self) -> None:
        """No forward and no backward is running: close the units that an exception or an interrupt has left open."""
        self.refuse_others("a step, a load, or the engine's end,")
        left_open = list(self._in_use)
        self.end_calls()
        for unit in list(self._in_use):  # an interrupt may have come between a use and what is known of it
            unit.num_users, unit.num_holds, unit.in_backward = 0, 0, False
            unit.own_writes.put_back()
            unit.show_handles()
            unit.rest()
            if unit.is_over:
                self._end_backward(unit)
            self._in_use.pop(unit, None)
        self._with_strays.drop()
        self._with_strays.check()
        for unit in left_open:
            unit.strays.excuse()

    def refresh(self) -> None:
        """Weights have changed: bring copies that were left to others up to date."""
        self._with_strays.warn_once()
        for unit in list(self._with_strays.units):
            self._begin_use(unit)
            self._end_use(unit)

    def end_calls(self) -> None:
        """Close what the context that computes has left open."""
        self.close_backward()
        for unit in list(self._in_use):
            if unit.forward_depth or unit in self.context.in_forward:
                self._end_left(unit)
            while unit.num_holds:
                self.let_go(unit)

    # Several micro-batches on their way together.

    def check_idle(self) -> None:
        """Raise ``OffloadError`` if the model runs, or micro-batches are under way."""
        if self._turns is not None:
            raise OffloadError(f"{TOGETHER} within a micro-batch of another one: give it all of them at once")
        self._enter(forward=True)
        if self.context.open and graph_task() == -1:
            for task in self.context.failed():
                self.close_backward(task)
        if self.context.in_forward or self.context.open or any(unit.num_holds for unit in self.units):
            raise OffloadError(f"{TOGETHER} within a forward or backward of the model: call it in the training loop")

    def begin_turns(self, turns: Interleaving) -> HookContext:
        """``turns`` says from now on which context computes. The one that does now."""
        self._turns = turns
        return self.context

    def runs_alone(self) -> bool:
        """Other micro-batches will run together with one like this, which runs alone."""
        return self._turns is not None and self._turns.first_is_alone

    def end_turns(self, context: HookContext) -> None:
        """All are over: ``context``, in which the caller's own calls are, goes on."""
        self._turns, self._kept = None, []
        self.switch(context)

    def switch(self, context: HookContext) -> None:
        """Go on with the calls of another context."""
        before = self.context
        if context is not before:
            before.save(following=context)
            context.restore()
            self.context = context

    def keep(self, wanted: UnitInModel | None) -> None:
        """Of the units that were left for others only ``wanted`` will be used next: release the rest."""
        kept, self._kept = self._kept, [unit for unit in self._kept if unit is wanted]
        for unit in kept:
            if unit is not wanted:
                self._release(unit)

    def refuse_others(self, what: str) -> None:
        """``what`` concerns all micro-batches. Raises ``OffloadError`` if it comes in one, with others under way."""
        if self._turns is not None:
            self._turns.refuse_others(what)

    def end_interrupted(self) -> bool:
        """End the calls, and drop the gradients on their way, that an interrupt has left. False: a forward or a
        backward runs, and nothing was done."""
        if self._turns is not None or graph_task() != -1 or in_module_call():
            return False
        self.reset()
        drop_autograd_gradients(self.units, self._parameters.values())
        return True

    def remove(self) -> None:
        """Take the hooks out of the model."""
        self.installed.remove()

    # Of the two hooks the compiler takes what only counts into a graph, and leaves the rest outside.

    def _pre_forward(self, unit: UnitInModel, module: nn.Module, args: Any) -> None:
        if unit.forward_depth and self._was_left(unit, module):
            self._end_left(unit)
        if unit.forward_depth == 0:
            self._begin_forward(unit, None if torch.compiler.is_compiling() else module)
        elif self._is_of_another_thread(unit):
            raise two_threads()
        elif not unit.in_graph:
            unit.forward_depth += 1
        if unit.recomputes and not unit.in_graph and not torch.compiler.is_compiling():
            unit.called = module

    def _post_forward(self, unit: UnitInModel, module: nn.Module, args: Any, output: Any) -> Any:
        if unit.in_graph:
            return output
        if unit.forward_depth == 1:
            return self._end_forward(unit, output)
        if unit.forward_depth and not self._is_of_another_thread(unit):  # else the pre-hook of this call raised
            unit.forward_depth -= 1
        return output

    def _is_of_another_thread(self, unit: UnitInModel) -> bool:
        """The call under way is."""
        call = unit.call
        return not torch.compiler.is_compiling() and call is not None and call.thread != get_ident()

    def _was_left(self, unit: UnitInModel, module: nn.Module) -> bool:
        """The call under way is over: an interrupt has ended it, after which torch calls no hook. One that begins as
        that one did, and not within it, tells."""
        call = unit.call
        if torch.compiler.is_compiling() or call is None or call.opened_by is not module:
            return False
        return call.thread == get_ident() and num_calls_of(module) < 2

    def _end_left(self, unit: UnitInModel) -> None:
        unit.forward_depth = 0
        self._leave_forward(unit)

    def _enter_forward(self, unit: UnitInModel, module: nn.Module | None) -> None:
        """The outermost call of the unit's modules begins, that of ``module`` if torch makes it."""
        if num_listening_modes() or num_function_modes():  # as ``own_work``, without a call for each unit
            with unseen():
                self._enter_forward(unit, module)
            return
        context, is_eager = self.context, not torch.compiler.is_compiling()
        if is_eager:
            if torch._C._is_tracing():
                raise ConfigError(
                    "torch.jit.trace would keep the weights as they are now, in memory that others pass through. "
                    "Trace copy.deepcopy(model), or the model that engine.unwrap() gives."
                )
            if context.open and graph_task() == -1:
                for task in self.context.failed():
                    self.close_backward(task)
        thread = get_ident()
        context.entering.add(thread)
        try:
            if is_eager and thread != context.thread:
                self._enter(forward=True)
            if unit in context.in_forward:  # an interrupt came between its call's end, or beginning, and the count
                self._end_left(unit)
            if not unit.in_backward:
                self._begin_use(unit)
            self._serial += 1
            unit.call = call = Call(unit, context, thread, self._serial, next_sequence_number())
            call.opened_by = module
            context.in_forward.append(unit)
        finally:
            context.entering.discard(thread)
        context.num_calls += 1
        unit.show_parameters()
        unit.begin_address = unit.window.flat.data_ptr()
        unit.end_address = unit.begin_address + unit.nbytes
        if is_eager:
            unit.saved_tensors.begin(call)
        unit.forward_depth = 0 if unit.in_graph else 1

    def _finish_forward(self, unit: UnitInModel, output: Any) -> Any:
        """It is over. Returns its output, without views of the weights."""
        if unit.call is None or unit.call.thread != get_ident():
            return output  # another thread's goes on: the pre-hook of this one raised
        unit.forward_depth = 0
        leaves = tensors_in(output)
        if any(map(unit.holds, leaves)):
            output = map_leaves(lambda leaf: own_copy(unit, leaf), output)
            leaves = tensors_in(output)
        call = self._leave_forward(unit)
        is_watched = not (call.has_saved or unit.stays) or self._turns is not None
        if is_watched or (not unit.stays and num_references(unit.parameters) > call.num_references):
            self._watch(call, leaves)  # else a node that asks for a weight is early enough
        return output

    @own_work
    def _watch(self, call: Call, leaves: Sequence[torch.Tensor]) -> None:
        """Have the backward tell when it comes to the call."""
        nodes = [node for leaf in leaves if (node := first_node(call.sequence, leaf)) is not None]
        for node in nodes:
            node.register_prehook(lambda gradients: self._begin_backward(call))
        if nodes and self._turns is not None:
            self._turns.left(call.unit, call.start)

    def _enter(self, *, forward: bool) -> None:
        if get_ident() != self.context.thread:
            self.context.enter(forward=forward, together=self._turns is not None, one_thread=self._one_thread)

    def _begin_use(self, unit: UnitInModel) -> None:
        if self._turns is not None:
            self._turns.arrive(unit, backward=graph_task() != -1)
        self._in_use[unit] = None
        if unit in self._kept:
            self._kept.remove(unit)
        elif unit.num_users == 0:
            if self._with_strays.units:
                self._with_strays.drop()
            if unit.strays.looks_before:
                unit.strays.begin_use()
            unit.wake()
            unit.is_copy = self._listener.begin_use(unit.spec)
        if unit.num_users == 0:
            unit.own_writes.begin(is_copy=unit.is_copy)
        unit.num_users += 1

    def _end_use(self, unit: UnitInModel) -> None:
        unit.num_users -= 1
        try:
            is_over = unit.num_users == 0 or self._turns is not None  # others would use what one has changed
            if is_over and (writes := unit.own_writes.end()):
                self.store(unit, writes)
        finally:
            if unit.num_users > 0:
                if self._turns is not None:
                    unit.own_writes.begin(is_copy=unit.is_copy)
            elif self._turns is not None and (graph_task() != -1 or self._turns.is_awaited(unit)):
                self._kept.append(unit)
            else:
                self._release(unit)

    def store(self, unit: UnitInModel, writes: Writes) -> None:
        if self._turns is not None:
            self._turns.changed(unit)
        pass_on(unit, writes, self._listener, self._serial)

    def _release(self, unit: UnitInModel) -> None:
        unit.strays.end_use(is_recomputed=not unit.is_over and graph_task() != -1)
        if unit.strays.are_left:
            self._with_strays.units[unit] = None
        try:
            self._listener.end_use(unit.spec)
        finally:
            unit.rest()
        if unit.is_over:
            self._end_backward(unit)
        self._in_use.pop(unit, None)

    def _end_backward(self, unit: UnitInModel) -> None:
        unit.is_over = False
        self._listener.end_backward(unit.spec)

    @own_work
    def _leave_forward(self, unit: UnitInModel) -> Call:
        call = unit.call
        assert call is not None
        unit.saved_tensors.end(call)
        self._serial = call.end = self._serial + 1
        try:
            unit.show_handles()
            if not unit.in_backward:
                self._end_use(unit)
        finally:
            if unit in self.context.in_forward:
                self.context.in_forward.remove(unit)
        return call

    def needed(self, call: Call, *, may_stay: bool = False) -> bool:
        """See ``UsesOfUnits``."""
        context = self.context
        if not (call.unit.in_backward and call.context is context) and not call.runs_in(context):
            if graph_task() == -1:
                return False
            self._begin_backward(call, may_stay)
        return True

    def finds(self, unit: UnitInModel) -> bool:
        """See ``UsesOfUnits``."""
        context = self.context
        if context.finds_in != graph_task() or context.open or self._listener.aliased:
            return False
        return unit.num_users == 0 and unit.window.open_at != 0

    def look(self, call: Call, get: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Look at what a node has saved. See ``UsesOfUnits``."""
        self.hold(call.unit)
        try:
            return get().clone()
        finally:
            self.let_go(call.unit)

    @undisturbed
    @own_work
    def hold(self, unit: UnitInModel) -> None:
        """Have the unit in use between calls, too, until ``let_go``, or until what ends all uses."""
        self._enter(forward=True)
        self._begin_use(unit)
        unit.num_holds += 1
        unit.show_parameters()

    @undisturbed
    @own_work
    def let_go(self, unit: UnitInModel) -> None:
        """End the last hold of the unit, if there is one."""
        if unit.num_holds:
            unit.num_holds -= 1
            if not unit.forward_depth:
                unit.show_handles()
            self._end_use(unit)

    @own_work
    def _reach(self, call: Call, may_stay: bool = False) -> None:
        """The backward that this thread is in has come to the call. ``may_stay``: see ``needed``."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True (as in torch.func.grad): weights leave when their backward is over, and a backward "
                "through the gradients (a penalty, a Hessian) would not find them. Use a model that is not wrapped."
            )
        unit, context, thread = call.unit, self.context, get_ident()
        context.entering.add(thread)
        try:
            if thread != context.thread:
                self._enter(forward=False)
            self._come_to(call, unit, context, may_stay=may_stay)
        finally:
            context.entering.discard(thread)
        if self._turns is not None:
            self._turns.opened(unit, call.start)

    def _come_to(self, call: Call, unit: UnitInModel, context: HookContext, *, may_stay: bool) -> None:
        if call.context is not context:
            raise OffloadError(
                f"{TOGETHER}: a backward reaches a forward that ran in another micro-batch, or outside of the call. "
                "Call the backward within the function whose forward it belongs to"
            )
        task = context.await_end(self.close_backward)
        for entry in context.come_to(call, goes_on=self._turns is None):  # else it waits for its turn at each call
            self._leave_backward(entry)
        if may_stay and self._stays(unit) and not isinstance(current_node(), BackwardCFunction):
            context.finds_in = task
            self._listener.begin_passing()
            return
        if not any(entry[0] is unit for entry in context.open):
            if not unit.in_backward and unit.forward_depth == 0:
                self._begin_use(unit)
            unit.in_backward = True
            context.open.append((unit, call.start, task))

    def _stays(self, unit: UnitInModel) -> bool:
        """A use of it would change nothing now."""
        return self._turns is None and unit.stays and not self._listener.aliased

    def _leave_backward(self, entry: tuple[UnitInModel, int, int]) -> None:
        unit = entry[0]
        self.context.open.remove(entry)
        unit.in_backward, unit.is_over = False, True
        if unit.forward_depth == 0:
            self._end_use(unit)
        else:
            self._end_backward(unit)

    def take_gradient(self, unit: UnitInModel, spec: ParameterSpec, parameter: torch.Tensor) -> None:
        """See ``TakesGradients``."""
        context, finds = self.context, self.finds(unit)
        if isinstance(parameter, Handle):
            whole = parameter.take_autograd_gradient(keep=spec.another_piece_follows)
            gradient = None if whole is None else spec.part_of(whole)
        else:
            gradient = unit.take_gradient(parameter)
            if gradient is not None and spec.outer is not None:
                gradient = spec.outer.part_of(gradient)
            call = None if finds or unit.in_backward else unit.call
            if call is not None and call.has_saved and call.context is context:
                self._reach(call, True)  # no weight was needed so far, and one will be
        if gradient is not None:
            if context.outside is not unit:
                self._end_outside()
            if self._turns is not None and self._turns.gradient(unit, spec, in_its_place=unit.in_backward):
                self._listener.end_part(unit.spec)
            self._listener.take_gradient(unit.spec, spec, gradient, context.gradient_scale)
            if not unit.in_backward:
                if not finds:
                    context.await_end(self.close_backward)
                context.outside = unit

    def _end_outside(self) -> None:
        """The unit that got gradients outside of its backward gets no more of them now."""
        if (unit := self.context.outside) is not None:
            self.context.outside = None
            if unit.stays and self.context.finds_in is not None:
                self._listener.passed(unit.spec)
            self._listener.end_backward(unit.spec)
