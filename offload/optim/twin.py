"""Twin of the user's optimizer: it has its class, options and attributes, and runs over whatever parameters it gets.

[Note: Once a step, parameter by parameter] What a step makes of a parameter depends on that parameter, its gradient and
its states, and on the optimizer's shared state as it was before the step; the shared state after it depends on the
shared state before it. So every parameter is run from a copy of the shared state before the step, and the optimizer
itself goes on once a step, by a step over one small *representative* of each group. Whether an optimizer is like that
is tried before anything is trained (``trial.py``), and every step of a parameter is compared with its representative's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.optim.shared_state import SharedState

States = dict[str, Any]

SIDE = 4
"""Elements that a representative has along each dimension, at most."""


class Kind(NamedTuple):
    """A parameter, as far as a small one can stand for it. ``states`` are those that it has already."""

    shape: torch.Size
    attributes: Mapping[str, Any] = MappingProxyType({})
    states: Mapping[str, Any] = MappingProxyType({})


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

    def begin(self, shared: SharedState, params: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer in this shared state, with these parameters in its groups and no states."""
        shared.put(self._optimizer, params)
        return self._optimizer

    def run(
        self,
        shared: SharedState,
        params: Sequence[Sequence[nn.Parameter]],
        states: Mapping[nn.Parameter, States],
    ) -> tuple[SharedState, dict[nn.Parameter, States]]:
        """Take a step: the shared state and the states afterwards. Parameters and states change in place, or not."""
        optimizer = self.begin(shared, params)
        optimizer.state.update({parameter: of_parameter for parameter, of_parameter in states.items() if of_parameter})
        try:
            self._step(optimizer)
            after = SharedState.of(optimizer)
            return after, {key: dict(value) for key, value in optimizer.state.items() if isinstance(key, nn.Parameter)}
        finally:
            optimizer.param_groups = []
            optimizer.state.clear()


def as_when_training(twin: Twin, shared: SharedState) -> SharedState:
    """The shared state once training has begun: schedule-free optimizers want a call of ``train()`` before a step."""
    optimizer = twin.begin(shared, [[] for _ in shared.groups])
    begin = getattr(optimizer, "train", None)
    if callable(begin):
        begin()
    return SharedState.of(optimizer)


def without_compiling() -> AbstractContextManager[None]:
    """Run compiled functions eagerly within the block, in which a step is only tried: compiling takes minutes."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return,no-untyped-call]


class _Plain(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})


class Representatives:
    """A small parameter of each group, which takes a step whenever one of the group's parameters does.

    It is cut from the first of them, with its attributes; its states are of the same shapes as if they were cut, too.
    """

    def __init__(self, twin: Twin, of_groups: Sequence[Kind]) -> None:
        self._twin = twin
        self._parameters = [stand_in(kind, seed) for seed, kind in enumerate(of_groups)]
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        self.states: list[States] = [cut(kind.states) for kind in of_groups]

    def __len__(self) -> int:
        return len(self._parameters)

    def step(self, shared: SharedState, stepping: frozenset[int]) -> SharedState:
        """The shared state after a step in which these groups have gradients. Whatever the user's ``step`` raises,
        nothing has changed then."""
        for index, (parameter, value) in enumerate(zip(self._parameters, self._values, strict=True)):
            with torch.no_grad():
                parameter.copy_(value)
            parameter.grad = value * 1e-3 + 1e-3 if index in stepping else None
        states = {parameter: dict(of_group) for parameter, of_group in zip(self._parameters, self.states, strict=True)}
        after, states = self._twin.run(shared, [[parameter] for parameter in self._parameters], states)
        self.states = [states.get(parameter, {}) for parameter in self._parameters]
        return after

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
    if isinstance(value, (list, tuple)):
        return type(value)(map(cut, value))
    return value
