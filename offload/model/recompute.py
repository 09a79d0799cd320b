"""Recomputing: a module's inputs are kept in the place of all that its forward saves, and a backward runs it again.

Torch's own checkpoint does it (``use_reentrant=False``): it keeps the inputs as saved tensors, so that hooks may take
them further, and restores torch's random generators, autocast and the default device. Here is what it leaves out: the
generators of Python and numpy, modes and context variables (``RanIn``), and what a forward finds in its modules
(statistics, counters, attributes, generators), on weights and in objects among its arguments (a cache), whoever changes
that afterwards: a second run finds it as the first one did, and leaves it as it was. Weights and arguments that a
forward writes to cannot be had again, nor those, or buffers, that somebody changes in place before the second run. What
reaches others (a backward, hooks, a write to another unit's weights) cannot be done twice. A backward of a forward's
own energy reaches nobody: within the first run it runs what came before it again, and finds that as it was.

[Note: Graphs that recompute] The graph of a compiled block keeps its inputs, and its backward makes the rest. Where the
compiler cannot take a forward so, the call runs as if it were not compiled: the compiler does not cut within a ``try``,
and leaves the function that has one to Python.

A shallow copy of the module (``copy.copy``, a replica) has the same attributes, and this one among them. It runs its
own class's forward, as it is.

[Note: Who recomputes] The outermost call of the unit's own module does. A module without children does not, which would
save nothing, and neither does one around other units. Where the user's own hooks are in force (a checkpoint,
``save_on_cpu``), they decide; so what is recomputed anyway is not recomputed twice.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.model.forward_costs import Unmeasured
from offload.model.forward_state import State, changed_since, not_to_be_run_again
from offload.model.named import Variable
from offload.model.own_writes import version_of
from offload.model.saved_tensors import versions_kept
from offload.model.scripted import stopped_in_script
from offload.model.under_way import in_first_run
from offload.model.unit_in_model import UnitInModel
from offload.ran_in import RanIn
from offload.torch_internals import graph_task, put_together, taken_apart, top_hooks_step_aside, transforms
from offload.unseen import own_work

Weights: TypeAlias = tuple[list[int], list[int]]
"""A ``mark`` of a unit's weights."""


class RecomputedForward:
    """Stands in a module in the place of its ``forward``."""

    def __init__(self, module: nn.Module, unit: UnitInModel) -> None:
        self._module = weakref.ref(module)
        self._own: Callable[..., Any] | None = vars(module).get("forward")
        self.unit = unit
        self.is_on = True
        """False: the module's own forward runs once, and what it saves is kept."""
        self.costs = Unmeasured()
        self.of_kinds: dict[type, tuple[Variable, ...]] = {}
        """Variables of the classes of its modules, and of objects: see ``State``."""
        unit.recomputes = unit.own_writes.always_looks = True
        module.forward = self

    def remove(self) -> None:
        """Have the module's own ``forward`` stand there again."""
        self.unit.recomputes = self.unit.own_writes.always_looks = False
        module = self._module()
        if module is None or vars(module).get("forward") is not self:
            return
        if self._own is None:
            del module.forward
        else:
            module.forward = self._own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._own_of(self._module())

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self._own_of(memo.get(id(self._module())))

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return self.forward(*args, **kwargs)
            self.unit.in_graph = True
            try:  # see [Note: Graphs that recompute]
                return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
            finally:
                self.unit.in_graph = False
        called, self.unit.called = self.unit.called, None
        if called is not None and called is not self.module and vars(called).get("forward") is self:
            return self._own_of(called)(*args, **kwargs)
        forward = self.__wrapped__
        if not self._is_outermost() or transforms() is not None:  # whose tensors no second run would find
            return forward(*args, **kwargs)
        leaves, structure = taken_apart((args, kwargs))
        places = _places_of_tensors(leaves)
        tensors = [leaves[first] for first, *_ in places]
        if not _any_trained([*tensors, *self.unit.parameters]):
            return forward(*args, **kwargs)
        for place in chain(*places):
            leaves[place] = None
        runs = _Runs(self, forward, (args, kwargs), leaves, structure, places)
        return checkpoint(runs, *tensors, use_reentrant=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        module = self.module
        return type(module).forward(module, *args, **kwargs) if self._own is None else self._own(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The one in which it stands."""
        module = self._module()
        assert module is not None
        return module

    def again(self, run: Callable[[], object], found: Weights) -> None:
        """A second run, in backward: the unit's parameters stand in the model meanwhile. Raises ``OffloadError`` if
        the first one has ``found`` others."""
        module = self.module
        before, after = self.unit.around
        output = None
        before(module, ())
        if self.unit.call is not None:
            self.unit.call.opened_by = None  # torch does not call the module here, and its forward may
        try:
            for mark, now in zip(found, self.unit.own_writes.mark, strict=True):
                for spec, one, other in zip(self.unit.watched, mark, now, strict=False):
                    if one != other:
                        raise changed_since(self.unit.spec.name, spec.name)
            with stopped_in_script():
                output = run()
        finally:  # it ends by an exception as soon as all is there
            after(module, (), output)
            self.costs.again()

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Within, the forward runs and will run again. Raises ``ConfigError`` if it does what is not to be done
        twice."""
        before = self.unit.num_weight_hooks
        with in_first_run(self._refuse_twice):
            yield
        if self.unit.num_weight_hooks != before:
            self._refuse_twice("adds hooks to its weights")

    def _refuse_twice(self, what: str) -> None:
        raise not_to_be_run_again(self.unit.spec.name, f"{what}, which a second run would do again")

    @own_work
    def weights(self) -> Weights:
        """A first run is over: what it has found. Raises ``ConfigError`` if it has written to the unit's weights."""
        if self.unit.own_writes.is_written():
            raise not_to_be_run_again(
                self.unit.spec.name, "writes to its weights, which a second run would not find as they were"
            )
        return self.unit.own_writes.mark

    def _is_outermost(self) -> bool:
        """See [Note: Who recomputes]."""
        unit = self.unit
        return (
            unit.forward_depth == 1
            and torch.is_grad_enabled()
            and graph_task() == -1
            and unit.saved_tensors.are_in_force
        )

    def _own_of(self, module: nn.Module | None) -> Callable[..., Any]:
        if self._own is not None:
            return self._own
        assert module is not None
        return types.MethodType(type(module).forward, module)


@own_work
def _places_of_tensors(leaves: Sequence[Any]) -> list[list[int]]:
    """Where each tensor is among them."""
    places: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if type(leaf) in (torch.Tensor, nn.Parameter) and not leaf.is_inference():  # which no graph keeps
            places.setdefault(id(leaf), []).append(place)
    return [*places.values()]


@own_work
def _any_trained(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


class _Runs:
    """The runs of one call: the first one, and those in backward."""

    def __init__(
        self,
        of: RecomputedForward,
        forward: Callable[..., Any],
        given: tuple[Any, Any],
        leaves: list[Any],
        structure: Any,
        places: Sequence[Sequence[int]],
    ) -> None:
        """The first run has the arguments that are ``given``: its caller sees what it puts into a list of them.
        ``leaves`` of them, but for the tensors, each of which is at some ``places``: what is the same object in the
        first run is so in the second one (``nn.MultiheadAttention`` asks)."""
        self._of = of
        self._forward = forward
        self._given: tuple[Any, Any] | None = given
        self._leaves = leaves
        self._structure = structure
        self._places = places
        self._state: State | None = None
        """The state that the first run began with, once it is over."""
        self._begun: State | None = None
        """The same while it goes on."""
        self._weights: Weights = ([], [])
        """The weights that it has found."""
        self._ran_in = RanIn()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        is_first, given, self._given = self._given is not None, self._given, None

        def forward() -> Any:
            args, kwargs = self._again(tensors) if given is None else given
            return self._forward(*args, **kwargs)

        versions = [version_of(tensor) for tensor in tensors]
        output = self._run(tensors, forward)
        if is_first and versions != [version_of(tensor) for tensor in tensors]:
            raise not_to_be_run_again(
                self._of.unit.spec.name, "writes to its arguments, which a second run would not find as they were"
            )
        return output

    def _run(self, tensors: Sequence[torch.Tensor], forward: Callable[[], Any]) -> Any:
        top_hooks_step_aside()
        if self._state is not None:
            with versions_kept():
                self._of.again(lambda: self._as_first(forward), self._weights)
            return None
        if self._begun is not None:  # a backward within the first run has come to what that has saved
            with self._of.unit.saved_tensors.above(self._of.unit.spec.name), self._begun.so_far().before():
                self._ran_in.run(forward)
            return None
        self._begun = state = State(self._of.module, self._leaves, self._of.unit.spec.name, self._of.of_kinds, tensors)
        try:
            with (
                self._of.unit.saved_tensors.above(self._of.unit.spec.name),
                self._of.costs.first([*self._leaves, *tensors]),
                self._of.first_run(),
            ):
                output = forward()
        finally:
            self._begun = None
            state.compare()
            self._state = state
        self._weights = self._of.weights()
        return output

    def _as_first(self, forward: Callable[[], Any]) -> None:
        """Run it in the state and the modes of the first run. The unit is in use by then: that state has its ordinary
        parameters, and not its handles."""
        assert self._state is not None
        with self._state.before():
            self._ran_in.run(forward)

    def _again(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The arguments as the first run found them, in containers of their own."""
        leaves = list(self._leaves)
        for places, tensor in zip(self._places, tensors, strict=True):
            for place in places:
                leaves[place] = tensor
        return put_together(leaves, self._structure)


def recomputed_modules(units: Sequence[UnitInModel]) -> dict[UnitInModel, nn.Module]:
    """Of each unit that can be recomputed, its module. See [Note: Who recomputes]."""
    of_unit: dict[nn.Module, set[UnitInModel]] = {}
    for unit in units:
        wholes = (site for spec in unit.spec.parameters for site in spec.owners)
        for module in (*unit.spec.modules, *(site.module for site in wholes)):
            of_unit.setdefault(module, set()).add(unit)
    found = {}
    for unit in units:
        if not unit.spec.modules:  # a piece
            continue
        module = unit.spec.modules[0]
        others = any(of_unit.get(inside, {unit}) != {unit} for inside in module.modules())
        if not others and any(True for _ in module.children()):
            found[unit] = module
    return found
