"""Twin of the user's optimizer: it has its class, options and attributes, and runs over whatever parameters it gets.

[Note: Once a step, parameter by parameter] What a step makes of a parameter depends on that parameter, its gradient and
its states, and on the optimizer's shared state as it was before the step; the shared state after it depends on the
shared state before it. So every parameter is run from a copy of the shared state before the step, and the optimizer
itself goes on once a step, by a step over one small *representative* of each group. Whether an optimizer is like that
is tried before anything is trained (``trial.py``), every step of a parameter is compared with its representative's, and
each step over the representatives with steps over some of them alone.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError, cannot_run_alone
from offload.optim.acquaintance import Place
from offload.optim.shared_state import SharedState, same
from offload.waiting import within_step_of

States = dict[str, Any]

LAST = -1
"""Index of a parameter behind all others of its group: nothing is known of it."""

SIDE = 4
"""Elements that a representative has along each dimension, at most."""


_SMALL = 1e-3
"""Size of a representative's gradient."""

TOGETHER = (
    "what it made of a parameter depended on the others: on their number or order, or on a quantity of all gradients, "
    "such as their norm (an option like max_grad_norm asks for it: turn it off there, and use the engine's "
    "gradient_clipping)"
)


class Kind(NamedTuple):
    """A parameter, as far as a small one can stand for it. ``states`` are those that it has already."""

    shape: torch.Size
    attributes: Mapping[str, Any] = MappingProxyType({})
    states: Mapping[str, Any] = MappingProxyType({})
    position: int = 0
    """Index in its group."""


class Twin:
    """Runs steps of an optimizer without its hooks, in one thread at a time. The optimizer itself is never touched."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = type(optimizer)
        self._optimizer = self.kind.__new__(self.kind)
        bare = torch.optim.Optimizer.__new__(_Plain)
        _Plain.__init__(bare)
        vars(self._optimizer).update(vars(bare))
        step: Any = self.kind.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self.returned: Any = None
        """The result of the last step."""
        self._placeholders: defaultdict[Place, nn.Parameter] = defaultdict(lambda: nn.Parameter(torch.empty(0)))

    def begin(self, shared: SharedState, params: Sequence[Mapping[int, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer in this shared state, with these parameters in its groups, by index, and no states."""
        sizes = shared.sizes or [0] * len(params)
        lists = [self._filled(group, *each) for group, each in enumerate(zip(params, sizes, strict=True))]
        shared.put(self._optimizer, lists)
        return self._optimizer

    def _filled(self, group: int, params: Mapping[int, nn.Parameter], size: int) -> list[nn.Parameter]:
        """The list of a group. What has no place in it comes last."""
        places = [params[index] if index in params else self._placeholders[group, index] for index in range(size)]
        return places + [parameter for index, parameter in params.items() if not 0 <= index < size]

    def shared(self, before: SharedState) -> SharedState:
        """The optimizer's shared state now, which was ``before``."""
        groups = self._optimizer.param_groups if before.sizes is not None else ()
        places = {id(p): (group, index) for group, own in enumerate(groups) for index, p in enumerate(own["params"])}
        return replace(SharedState.of(self._optimizer, places=places), sizes=before.sizes)

    def run(
        self,
        shared: SharedState,
        params: Sequence[Mapping[int, nn.Parameter]],
        states: Mapping[nn.Parameter, States],
        call: Callable[[Callable[[], Any]], Any] = lambda step: step(),
    ) -> tuple[SharedState, dict[nn.Parameter, States]]:
        """Take a step over these, of each group by index, by ``call``: the shared state and the states afterwards.
        Parameters and states change in place, or not."""
        optimizer = self.begin(shared, params)
        optimizer.state.update({parameter: of_parameter for parameter, of_parameter in states.items() if of_parameter})
        try:
            with within_step_of(self.kind.__name__):
                self.returned = call(lambda: self._step(optimizer))
            after = self.shared(shared)
            return after, {key: dict(value) for key, value in optimizer.state.items() if isinstance(key, nn.Parameter)}
        finally:
            optimizer.param_groups = []
            optimizer.state.clear()

    def run_alone(
        self,
        shared: SharedState,
        place: Place,
        parameter: nn.Parameter,
        states: States,
        call: Callable[[Callable[[], Any]], Any] = lambda step: step(),
    ) -> tuple[SharedState, States]:
        """Take a step over one parameter: the shared state of its group, and its states, afterwards."""
        group, index = place
        if shared.sizes is None:
            after, found = self.run(shared.of_group(group), [{index: parameter}], {parameter: states}, call)
        else:
            params = [{index: parameter} if each == group else {} for each in range(len(shared.groups))]
            after, found = self.run(shared, params, {parameter: states}, call)
            after = after.of_group(group)
        return after, found.get(parameter, {})


def as_when_training(twin: Twin, shared: SharedState) -> SharedState:
    """The shared state once training has begun: schedule-free optimizers want a call of ``train()`` before a step."""
    optimizer = twin.begin(shared, [{} for _ in shared.groups])
    begin = getattr(optimizer, "train", None)
    if callable(begin):
        begin()
    return twin.shared(shared)


def without_compiling() -> AbstractContextManager[None]:
    """Run compiled functions eagerly within the block, in which a step is only tried: compiling takes minutes."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return,no-untyped-call]


class _Plain(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})


class Representatives:
    """A small parameter of each group, which takes a step whenever one of the group's parameters does.

    It is cut from the first of them, with its attributes; its states are of the same shapes as if they were cut, too.
    A group with others has a companion beside it, in the same states and with another gradient: what a step over all
    of them makes of it must be what a step over it alone does, as long as training goes on.
    """

    def __init__(self, twin: Twin, of_groups: Sequence[Kind], with_companion: Collection[int] = ()) -> None:
        """``with_companion`` are groups, by index."""
        self._twin = twin
        self._parameters = [stand_in(kind, seed) for seed, kind in enumerate(of_groups)]
        self._positions = [kind.position for kind in of_groups]
        self._companions = {index: stand_in(of_groups[index], ~index % 1000) for index in with_companion}
        self._values = {each: each.detach().clone() for each in (*self._parameters, *self._companions.values())}
        self.states: list[States] = [cut(kind.states) for kind in of_groups]

    def __len__(self) -> int:
        return len(self._parameters)

    def step(self, shared: SharedState, stepping: frozenset[int]) -> SharedState:
        """The shared state after a step in which these groups have gradients. Raises ``ConfigError`` if the step
        needs several parameters at once. Whatever it raises, nothing has changed then."""
        companions = {index: self._companions[index] for index in stepping & self._companions.keys()}
        alone = {index: self._step_alone(shared, index) for index in companions}
        for index, parameter in enumerate(self._parameters):
            self._begin(parameter, _SMALL if index in stepping else None)
        for parameter in companions.values():
            self._begin(parameter, -_SMALL / 8)
        states = {parameter: dict(of_group) for parameter, of_group in zip(self._parameters, self.states, strict=True)}
        states |= {parameter: copied(self.states[index]) for index, parameter in companions.items()}
        together = [
            {self._positions[index]: parameter, **({LAST: companions[index]} if index in companions else {})}
            for index, parameter in enumerate(self._parameters)
        ]
        after, states = self._twin.run(shared, together, states)
        for index, parameter in companions.items():
            if not same(alone[index], (parameter.detach(), states.get(parameter, {}))):
                raise ConfigError(cannot_run_alone(self._twin.kind.__name__, TOGETHER))
        self.states = [states.get(parameter, {}) for parameter in self._parameters]
        return after

    def _step_alone(self, shared: SharedState, index: int) -> tuple[torch.Tensor, States]:
        """Value and states of a companion after a step that it takes by itself."""
        parameter = self._companions[index]
        self._begin(parameter, -_SMALL / 8)
        _, states = self._twin.run_alone(shared, (index, LAST), parameter, copied(self.states[index]))
        return parameter.detach().clone(), states

    def _begin(self, parameter: nn.Parameter, size: float | None) -> None:
        """The value of before the step, and a gradient."""
        value = self._values[parameter]
        parameter.data = value.clone()
        parameter.grad = None if size is None else value * size + size

    def set_states(self, group: int, states: Mapping[str, Any]) -> None:
        """Cut the states of the group's representative out of those of a parameter."""
        self.states[group] = cut(states)


def stand_in(kind: Kind, seed: int) -> nn.Parameter:
    """A small parameter in place of one of this kind, with random values of its own and the same attributes."""
    small = [min(length, SIDE) for length in kind.shape]
    generator = torch.Generator().manual_seed(seed + 1)
    parameter = nn.Parameter(torch.randn(small, generator=generator))
    vars(parameter).update(kind.attributes)
    return parameter


def cut(value: Any) -> Any:
    """A copy of a state, each dimension as short as ``stand_in`` makes it."""
    if isinstance(value, torch.Tensor):
        return value.detach()[tuple(slice(SIDE) for _ in value.shape)].clone()
    if isinstance(value, Mapping):
        return {key: cut(item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque(map(cut, value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(map(cut, value))
    return value


def copied(value: Any) -> Any:
    """A copy of states that a step may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque(map(copied, value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return copy.deepcopy(value)  # an object of the optimizer's own: Shampoo's preconditioners hold tensors
