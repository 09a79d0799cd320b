"""A unit as it stands in the user's model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from offload.model.handle import Handle
from offload.model.identity import let_go
from offload.model.own_writes import OwnWrites
from offload.model.resting import resting_class
from offload.model.strays import Strays
from offload.tiers.window import Window
from offload.torch_internals import SavedTensorsHooks, autograd_gradient, itself, num_references
from offload.units import ParameterSpec, UnitSpec, innermost
from offload.unseen import own_work
from swapper import OffloadError

ORDINARY = (torch.Tensor, nn.Parameter)

_is_trained = attrgetter("requires_grad")


class Call:
    """An outermost call of a unit's modules, by a thread, in a ``HookContext``."""

    __slots__ = (
        "context",
        "end",
        "has_saved",
        "hooks",
        "num_references",
        "opened_by",
        "sequence",
        "start",
        "thread",
        "unit",
    )

    def __init__(self, unit: UnitInModel, context: object, thread: int, start: int, sequence: int) -> None:
        self.unit = unit
        self.context = context
        self.thread = thread
        self.start = start
        """Serial number of the moment when it began."""
        self.end = sys.maxsize
        """The same of its end, once it is over."""
        self.sequence = sequence
        """Autograd's number of the first node that it may have made."""
        self.opened_by: nn.Module | None = None
        """The module that torch calls; None where a compiler has its hooks, and in a second run."""
        self.hooks: tuple[SavedTensorsHooks, SavedTensorsHooks | None] | None = None
        """The hooks of saved tensors that were put in force with its beginning, and those below them."""
        self.has_saved = False
        """Autograd has saved a weight in it, and asks for that in a backward."""
        stays = unit.window.open_at and not unit.is_copy  # beyond the call
        self.num_references = 0 if stays else num_references(unit.parameters)
        """To the unit's parameters, from before it. Are there more at its end, somebody has kept one: hooks of saved
        tensors of the unit's own, it may be, which are asked for it in a backward as ours are not. Nobody needs to be
        where the weights stay."""

    def runs_in(self, context: object) -> bool:
        """It is the one under way in this context: a backward within it finds the weights in use."""
        return self is self.unit.call and self.end == sys.maxsize and self.context is context


def address_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's first element, or of that of the first ordinary one that it wraps; 0 if there is none
    to be seen."""
    try:
        inner = tensor if type(tensor) in ORDINARY else innermost(tensor)
        return inner.data_ptr() if type(inner) in ORDINARY else 0
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or what a collective still brings
        return 0


class SavesTensors(Protocol):
    """Hooks of saved tensors. See ``offload.model.saved_tensors``."""

    @property
    def are_in_force(self) -> bool:
        """They see what autograd saves in this thread now."""

    def above(self, name: str) -> AbstractContextManager[None]:
        """Within, the hooks on top, around the unit of this name, are below others of the engine's."""

    def begin(self, call: Call) -> None:
        """The call's forward begins in this thread."""

    def end(self, call: Call) -> None:
        """It is over, or was abandoned. Safe to call twice."""


CallsOfUnit: TypeAlias = tuple[int, Call | None, bool]
"""Knowledge of ``UnitInModel`` of the calls under way."""


class UnitInModel:
    """Part of the model that stands for one unit: its parameters, which are views of ``window``, and the calls under
    way, of the micro-batch that computes now."""

    __slots__ = (
        "__weakref__",
        "_classes",
        "_recurrent",
        "_shown",
        "_trained",
        "around",
        "begin_address",
        "call",
        "called",
        "end_address",
        "forward_depth",
        "has_gradients",
        "in_backward",
        "in_graph",
        "is_copy",
        "is_over",
        "nbytes",
        "num_holds",
        "num_users",
        "own_writes",
        "parameters",
        "reassigned",
        "recomputes",
        "saved_tensors",
        "sites",
        "spec",
        "strays",
        "watched",
        "window",
    )

    def __init__(
        self,
        spec: UnitSpec,
        window: Window,
        parameters: Sequence[nn.Parameter],
        has_gradients: Callable[[UnitSpec], bool] = lambda unit: False,
    ) -> None:
        """``has_gradients``: handles of the unit's parameters have some, which their forward may look at."""
        self.spec = spec
        self.saved_tensors: SavesTensors
        """The hooks of saved tensors of its calls."""
        self.around: tuple[Callable[..., Any], Callable[..., Any]]
        """The hooks before and after the forward of its modules."""
        self.has_gradients = has_gradients
        self._trained: list[bool] = []
        """Whether each parameter requires grad, while they stand at their sites."""
        self._shown: list[tuple[Handle, nn.Parameter, torch.Tensor]] = []
        """Gradients that parameters have from their handles now."""
        self.window = window
        self.parameters = parameters
        self._classes: list[tuple[nn.Parameter, type[nn.Parameter], type[nn.Parameter]]] = []
        """Of each parameter that the user's code can see: in use, and while it rests. Known from the first rest on."""
        self.sites: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        """Place of each parameter in the model: module, name, handle, parameter."""
        self._recurrent = [module for module in spec.modules if isinstance(module, nn.RNNBase)]
        self.forward_depth = 0
        """Modules of this unit whose forward is running."""
        self.call: Call | None = None
        """The outermost of them; None only before the first."""
        self.in_graph = False
        """A compiler traces what a graph will recompute. Nothing may be counted there: torch < 2.13 takes no graph that
        assigns to what is outside of it."""
        self.recomputes = False
        """Its forward may run a second time, in backward."""
        self.called: nn.Module | None = None
        """The module whose forward comes next, if it ``recomputes``."""
        self.nbytes = window.flat.nbytes
        self.begin_address = self.end_address = 0
        """The memory under its parameters while it is in forward."""
        self.in_backward = False
        self.num_holds = 0
        """Holds between calls. See ``Hooks.hold``."""
        self.num_users = 0
        """Micro-batches that use the unit now."""
        self.is_copy = False
        """The window shows a copy of the weights."""
        self.is_over = False
        """A backward of it is over, and the end of it has not been told."""
        self.reassigned: dict[ParameterSpec, int] = {}
        """Parameters that a forward has pointed to another tensor, and a serial number after that."""
        self.watched = [item for item in spec.parameters if item.packing is None]
        """Parameters that ``own_writes`` looks at, in order: no forward writes to quantised parameters."""
        of_spec = dict(zip(spec.parameters, parameters, strict=True))
        self.own_writes = OwnWrites([item.stored_of(of_spec[item]) for item in self.watched])
        names = [item.name for item in self.watched]
        self.strays = Strays(spec, window, self.own_writes, names)

    @own_work
    def holds(self, tensor: torch.Tensor) -> bool:
        """The tensor looks at the memory under its parameters, while it is in forward."""
        return self.begin_address <= address_of(tensor) < self.end_address

    @property
    def stays(self) -> bool:
        """Nothing uses it, and its weights are under its parameters all the same."""
        return self.num_users == 0 and self.window.open_at != 0

    def wake(self) -> None:
        """A use begins: its parameters are ordinary ones."""
        for parameter, kind, _ in self._classes:
            parameter.__class__ = kind

    def rest(self) -> None:
        """No use is left: who has kept one of its parameters has what the model has. With a piece of a weight the
        engine alone computes."""
        if not self._classes:
            seen = [p for p, spec in zip(self.parameters, self.spec.parameters, strict=True) if spec.piece is None]
            self._classes = [(parameter, type(parameter), resting_class(type(parameter))) for parameter in seen]
        for parameter, _, resting in self._classes:
            parameter.__class__ = resting

    def check_saved(self, call: Call, tensor: torch.Tensor) -> None:
        """Raise ``OffloadError`` if the tensor, saved in the call, looks at a parameter that has become another tensor
        since: a graph keeps the old one."""
        for spec, serial in self.reassigned.items():
            if serial > call.start and self.window.holds(tensor):
                first = innermost(tensor).storage_offset()
                if spec.offset <= first < spec.offset + spec.numel:
                    raise OffloadError(
                        f"{spec.name}: a forward has assigned to its .data once it was used, and this backward needs "
                        "the value before. There is one: assign before the use, or after the step."
                    )

    def save(self) -> CallsOfUnit:
        """Its calls, for ``restore``. None is under way from now on."""
        calls = self.forward_depth, self.call, self.in_backward
        self.forward_depth, self.in_backward = 0, False
        return calls

    def restore(self, calls: CallsOfUnit) -> None:
        """These calls are under way again."""
        self.forward_depth, self.call, self.in_backward = calls

    # A parameter that was put in the place of the engine's stays there.

    @property
    @own_work
    def num_weight_hooks(self) -> int:
        """The number of hooks on its parameters, wherever these are."""
        with itself():
            return sum(
                len(hooks)
                for parameter in self.parameters
                for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
                if hooks
            )

    def show_parameters(self) -> None:
        """The unit's parameters stand at their sites."""
        for module, name, handle, parameter in self.sites:
            if module._parameters.get(name) is handle:
                module._parameters[name] = parameter
        self._trained = list(map(_is_trained, self.parameters))
        if self.has_gradients(self.spec):
            self._show_gradients()

    def show_handles(self) -> None:
        """The handles stand there, unless somebody holds the unit."""
        if self.num_holds:
            return
        for recurrent in self._recurrent:
            let_go(recurrent)
        for module, name, handle, parameter in self.sites:
            if module._parameters.get(name) is parameter:
                module._parameters[name] = handle
        shown, self._shown = self._shown, []
        for owner, parameter, gradient in shown:
            now, parameter.grad = parameter.grad, None
            if now is not gradient:
                owner.grad = now
        trained, self._trained = self._trained, []
        if trained and trained != list(map(_is_trained, self.parameters)):
            self._show_toggled()

    def _show_toggled(self) -> None:
        """A forward has frozen or thawed parameters of its own: so are the handles, or it is refused."""
        for _, _, handle, parameter in self.sites:
            if parameter.requires_grad is not handle.requires_grad:
                is_trained, parameter.requires_grad = parameter.requires_grad, handle.requires_grad
                handle.requires_grad = is_trained

    def take_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Take what autograd has left there. None if a backward within the forward has added to the gradient that the
        parameter has from its handle: it is where it belongs."""
        with itself():  # the unit may rest
            gradient = parameter.grad
            if not self._shown or all(gradient is not shown for _, _, shown in self._shown):
                parameter.grad = None
                return gradient
        return None

    def _show_gradients(self) -> None:
        for _, _, handle, parameter in self.sites:
            if not isinstance(handle, Handle) or parameter.grad is not None:
                continue
            gradient = handle.gradient_so_far
            if gradient is not None:
                parameter.grad = gradient
                self._shown.append((handle, parameter, gradient))


def drop_autograd_gradients(units: Iterable[UnitInModel], handles: Iterable[nn.Parameter]) -> None:
    """Drop what autograd has left at parameters of units, which may rest, and at handles."""
    of_autograd = autograd_gradient.__get__
    with itself():
        left = [(unit, item) for unit in units for item in unit.parameters if of_autograd(item) is not None]
        of_handles = [handle for handle in handles if of_autograd(handle) is not None]
    for unit, parameter in left:
        unit.take_gradient(parameter)
    for handle in of_handles:
        if isinstance(handle, Handle):  # and nothing that a user has put in its place
            handle.take_autograd_gradient()


class UnitsWithStrays:
    """Units of which a tensor has outlived a use. See ``offload.model.strays``."""

    def __init__(self) -> None:
        self.units: dict[UnitInModel, None] = {}
        self._has_warned = False

    def drop(self) -> None:
        """Give back the copies that nobody looks at any more."""
        for unit in list(self.units):
            if unit.strays.are_left:
                unit.strays.drop()
            if not unit.strays.are_left:
                self.units.pop(unit, None)

    def check(self) -> None:
        """Raise ``OffloadError`` if what was left to them has been written to."""
        for unit in self.units:
            unit.strays.check()

    def warn_once(self) -> None:
        """Say what they cost, if somebody keeps them, in the first such step."""
        for unit in self.units:
            if not self._has_warned and unit.strays.are_kept():
                self._has_warned = True
                unit.strays.warn()
