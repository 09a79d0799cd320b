"""Hooks of saved tensors: a weight that autograd has saved brings its unit in when a backward asks for it.

What autograd saves is the truth about what a backward will read, whatever the shape of a module's output. While a
unit's forward runs, these hooks are in force. A tensor in the memory of a unit that is in forward is noted with the
unit's call. All others are kept as torch keeps them, and a change of them in place is found as torch finds it.

[Note: Hooks below] Torch calls the innermost hooks alone. Where the user's own are in force around a unit's forward
(``save_on_cpu``, a checkpoint), ours hand on to them what they would have been given, weights too, and bring the unit
in before they are asked to give it back.

[Note: Backward without uses] The weights of a unit that is resident in RAM stay under its parameters between uses: see
[Note: Windows that stay open]. A node of torch's own reads there what it has saved, and writes nothing: no use begins.
The first such unit of a backward is reached as others are, and so is each one while some unit is in use in it. A
Function may do with a weight whatever it likes: it gets it within a use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointError

from offload.interrupts import held_back
from offload.model.hook_context import HookContext
from offload.model.unit_in_model import ORDINARY, Call, UnitInModel, address_of
from offload.torch_internals import (
    SavedTensorsHooks,
    backward_asks_its_inputs,
    current_node,
    graph_task,
    hooks_step_aside,
    num_function_modes,
    num_listening_modes,
    push_saved_tensors_hooks,
    take_out_saved_tensors_hooks,
    top_saved_tensors_hooks,
    unseen,
)
from offload.unseen import own_work
from swapper import OffloadError


class UsesOfUnits(Protocol):
    """The questions of these hooks to those of the model."""

    context: HookContext
    """The one that computes."""

    def needed(self, call: Call, *, may_stay: bool = False) -> bool:
        """Have the call's unit in use until the backward that this thread is in has no need of it. False: it is in
        none, and nothing was done. ``may_stay``: a node asks for a weight alone, which it finds where it is if it stays
        there."""

    def finds(self, unit: UnitInModel) -> bool:
        """The backward that this thread is in finds the unit's weights where they are, and needs no use of it."""

    def look(self, call: Call, get: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A copy of what ``get`` gives while the call's unit is in use."""


class SavedTensors:
    """The hooks of one engine, with none of the user's below them."""

    def __init__(self, uses: UsesOfUnits) -> None:
        hooks_step_aside()
        backward_asks_its_inputs()
        self.uses = uses
        self._hooks: SavedTensorsHooks = self.pack, self.unpack

    def begin(self, call: Call) -> None:
        """The call's forward begins in this thread."""
        below = top_saved_tensors_hooks()
        of_engine = None if below is None else self._of_engine(below)
        if of_engine is self or isinstance(of_engine, HooksAbove):
            return  # a call around this one has put them there
        if below is None or of_engine is not None:
            call.hooks = self._hooks, None
            push_saved_tensors_hooks(self._hooks)
        else:
            with held_back():  # what is below goes with them: see ``take_out_saved_tensors_hooks``
                call.hooks = HooksAbove(self.uses, below).pair(), below
                push_saved_tensors_hooks(call.hooks[0])

    def end(self, call: Call) -> None:
        """It is over, or was abandoned. Safe to call twice."""
        if call.hooks is None or call.thread != get_ident():
            return  # each thread has hooks of its own
        if call.hooks[1] is None:
            take_out_saved_tensors_hooks(*call.hooks)
            call.hooks = None
            return
        with held_back():
            take_out_saved_tensors_hooks(*call.hooks)
            call.hooks = None

    @contextmanager
    def above(self, name: str) -> Iterator[None]:
        """Within, those on top, of a checkpoint of the engine's own around the unit of this ``name``, are below ours,
        as in [Note: Hooks below]: what it keeps of a weight may be asked for when the use of the second run is over, by
        whatever is behind the outputs."""
        below = top_saved_tensors_hooks()
        assert below is not None
        pack, unpack = below
        hooks = HooksAbove(self.uses, (pack, GivenAgain(name, unpack))).pair()
        with _on_top(hooks, below):
            yield

    @property
    def are_in_force(self) -> bool:
        """They see what autograd saves in this thread now."""
        below = top_saved_tensors_hooks()
        return below is not None and self._of_engine(below) is self

    def _of_engine(self, hooks: SavedTensorsHooks) -> SavedTensors | HooksAbove | None:
        """Their owner, if it is of this engine: not of another one, whose model has called this one's."""
        owner = getattr(hooks[0], "__self__", None)
        return owner if isinstance(owner, (SavedTensors, HooksAbove)) and owner.uses is self.uses else None

    def pack(self, tensor: torch.Tensor) -> Any:
        """The tensor alone is one of others, at version 0: most are, and the collector has less to look at."""
        if num_listening_modes() or num_function_modes():  # as ``own_work``, without a call for each tensor
            with unseen():
                return self.pack(tensor)
        version, address = tensor._version, address_of(tensor)
        kept = tensor.detach() if type(tensor) in ORDINARY else _without_history(tensor)
        for unit in self.uses.context.in_forward:
            if unit.begin_address <= address < unit.end_address and unit.call is not None:
                unit.call.has_saved = True
                return kept, version, unit.call, unit.strays.saved
        return (kept, version) if version else kept

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed[0] if type(packed) is tuple else packed
        version = packed[1] if tensor is not packed else 0
        if tensor._version != version:
            raise changed_in_place(tensor, tensor.shape, version)
        if tensor is packed or len(packed) == 2:
            return tensor
        call: Call = packed[2]
        unit, uses = call.unit, self.uses
        if call.context is uses.context and not unit.reassigned:
            if unit.in_backward:
                return tensor  # its unit is in use for this backward, as ``needed`` would find
            if uses.finds(unit) and not isinstance(current_node(), BackwardCFunction):
                return tensor
        if not uses.needed(call, may_stay=True):
            tensor = uses.look(call, lambda: tensor)
        elif unit.reassigned:
            unit.check_saved(call, tensor)
        if packed[0]._version != version:  # by what was written to another tensor over the parameter's former memory
            raise changed_in_place(packed[0], tensor.shape, version)
        return tensor

    pack.steps_aside = unpack.steps_aside = True  # type: ignore[attr-defined]


@contextmanager
def versions_kept() -> Iterator[None]:
    """Within, the hooks on top, of a checkpoint that runs again, are given tensors that know at which version they were
    saved. Torch finds a later change of what it saves itself, and none of what hooks keep: see ``GivenAgain``."""
    below = top_saved_tensors_hooks()
    assert below is not None

    def pack(tensor: torch.Tensor) -> Any:
        return below[0](_with_version(tensor))

    pack.steps_aside = True  # type: ignore[attr-defined]
    with _on_top((pack, below[1]), below):
        yield


@own_work
def _with_version(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in ORDINARY:
        tensor = tensor.detach()
        tensor.saved_at = tensor._version  # type: ignore[attr-defined]
    return tensor


@contextmanager
def _on_top(hooks: SavedTensorsHooks, below: SavedTensorsHooks) -> Iterator[None]:
    """Within, ``hooks`` stand in the place of those ``below``."""
    with held_back():
        push_saved_tensors_hooks(hooks)
    try:
        yield
    finally:
        with held_back():
            take_out_saved_tensors_hooks(hooks, below)


class HooksAbove:
    """The hooks of one call, above some of the user's: see [Note: Hooks below]."""

    def __init__(self, uses: UsesOfUnits, below: SavedTensorsHooks) -> None:
        self.uses = uses
        self._pack_below, self._unpack_below = below

    def pair(self) -> SavedTensorsHooks:
        """The two functions. Nothing here refers to them: what a graph keeps goes with it, and waits for no
        collector."""
        return self.pack, self.unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        unit = unit_around(tensor, self.uses.context)
        if unit is None:
            return self._pack_below(tensor), None
        with unit.strays.kept_by_hooks():
            return self._pack_below(tensor), unit.call

    def unpack(self, packed: Any) -> torch.Tensor:
        below, call = packed
        if call is None:
            return self._unpack_below(below)
        if not self.uses.needed(call):
            return self.uses.look(call, lambda: self._unpack_below(below))
        tensor = self._unpack_below(below)
        if call.unit.reassigned:
            call.unit.check_saved(call, tensor)
        return tensor

    pack.steps_aside = unpack.steps_aside = True  # type: ignore[attr-defined]


class GivenAgain:
    """A checkpoint's unpacking, which gives each tensor once in a backward. A Function of the user's may ask for its
    tensors again (``ctx.saved_tensors`` in two places): they stay until another node asks for some."""

    def __init__(self, name: str, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._name = name
        self._unpack = unpack
        self._asked: tuple[int, int] | None = None
        """The Function that asked last, and the backward that it is in."""
        self._given: dict[int, torch.Tensor] = {}

    def __call__(self, packed: Any) -> torch.Tensor:
        node = current_node()
        if not isinstance(node, BackwardCFunction):
            self._asked, self._given = None, {}
            return self._first(packed)
        asked = id(node), graph_task()
        if asked != self._asked:
            self._asked, self._given = asked, {}
        if id(packed) not in self._given:
            self._given[id(packed)] = self._first(packed)
        return self._given[id(packed)]

    def _first(self, packed: Any) -> torch.Tensor:
        try:
            tensor = self._unpack(packed)
        except CheckpointError as error:
            raise OffloadError(
                f"unit {self._name}: the second run of its forward, for its backward, has saved other tensors than the "
                f'first one. Do not recompute it: activations={{"{self._name}": "keep", ...}}'
            ) from error
        version = getattr(tensor, "saved_at", tensor._version)
        if tensor._version != version:
            raise changed_in_place(tensor, tensor.shape, version)
        return tensor


def changed_in_place(tensor: torch.Tensor, shape: torch.Size, version: int) -> OffloadError:
    """Return the error for a saved tensor of this ``shape`` and ``version`` that was changed since. Torch's text comes
    first, for those who look for it; an error of the engine's, since it also keeps inputs that torch would not."""
    return OffloadError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {version} instead. Hint: "
        "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True). A unit that is recomputed needs its inputs, too: change a copy of "
        'them, or have the unit keep what it saves (activations={"its name": "keep", ...}).'
    )


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor of another class. It may be an output of the node that saves it, and its history is that node."""
    return tensor if tensor.is_leaf else tensor.detach()


@own_work
def unit_around(tensor: torch.Tensor, context: HookContext) -> UnitInModel | None:
    """Return the unit in forward in whose memory the tensor is."""
    address = address_of(tensor)
    for unit in context.in_forward:
        if unit.begin_address <= address < unit.end_address:
            return unit
    return None
