"""Trial of an optimizer on small tensors, before training: does it work parameter by parameter?

Its own step over all of them is compared with steps over one at a time (see [Note: Once a step, parameter by
parameter]): in both orders of parameters, for several steps, with small and large gradients, with a change of the
options in between, and with some gradients missing.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offload.errors import ConfigError, cannot_run_alone
from offload.optim.shared_state import SharedState, same
from offload.optim.twin import TOGETHER, Kind, Representatives, States, Twin, copied, cut, stand_in, without_compiling
from offload.torch_internals import leaves_of

_GRADIENTS = (1e-4, 1.0, 1e3)
"""Size of the gradients in each step."""

_CONTRAST = 8
"""A parameter's gradients are so many times as large as those of the one before it, or as small as those of the
first: what depends on all of them together depends on which there are."""


def try_alone(
    twin: Twin, shared: SharedState, groups: Sequence[Sequence[Kind]], of_model: Collection[nn.Parameter]
) -> None:
    """Raise ``ConfigError`` with the reason if the optimizer cannot run one parameter at a time. ``groups`` has
    parameters of each group, a few of each kind; ``of_model`` are those that a step must not know of. Random generators
    are afterwards what they were."""
    name = twin.kind.__name__
    for backwards in (False, True) if shared.sizes is None else (False,):  # or each has its place
        with without_draws(name), without_compiling(), _WithoutModel(name, of_model):
            try:
                whole = _Run(twin, groups, backwards=backwards).whole(shared)
            except ConfigError:
                raise
            except Exception as error:  # a class of the user's may raise anything
                raise ConfigError(cannot_run_alone(name, f"a step without a closure raised {_said(error)}")) from error
            check_kinds(name, whole[-1].states)
        with without_draws(name), without_compiling(), _WithoutModel(name, of_model):
            try:
                alone = _Run(twin, groups, backwards=backwards).alone(shared)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    cannot_run_alone(name, f"over all parameters a step works, and over one it raised {_said(error)}")
                ) from error
        for number, (expected, found) in enumerate(zip(whole, alone, strict=True), 1):
            reason = found.reason or expected.difference(found)
            if reason is not None:
                raise ConfigError(cannot_run_alone(name, f"in step {number} of a trial {reason}"))


def check_kinds(name: str, states: Any) -> None:
    """Raise ``ConfigError`` if states of the optimizer of this name are no ordinary tensors."""
    for value in leaves_of(states):
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
            raise ConfigError(
                f"optimizer {name} keeps states in {type(value).__name__}, tensors of a kind that has no place in the "
                'engine\'s tiles. Moments in 8 bits are optimizer="adamw" with moments_dtype="int8"'
            )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _WithoutModel(TorchFunctionMode):
    """Raises ``ConfigError`` where a step touches a parameter of the model: it is given others."""

    def __init__(self, name: str, of_model: Collection[nn.Parameter]) -> None:
        super().__init__()
        self._name, self._of_model = name, {id(parameter) for parameter in of_model}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(leaf) in self._of_model for leaf in leaves_of((args, kwargs or {}))):
            why = "its step looks at a parameter of the model beside those in its groups, which are others then"
            raise ConfigError(cannot_run_alone(self._name, why))
        return func(*args, **kwargs or {})


class _Moment:
    """Everything after a step."""

    def __init__(
        self,
        shared: SharedState,
        params: Sequence[nn.Parameter],
        states: Mapping[nn.Parameter, States],
        reason: str | None = None,
    ) -> None:
        self.shared = shared
        self.values = [parameter.detach().clone() for parameter in params]
        self.states = [copied(states.get(parameter, {})) for parameter in params]
        self.reason = reason

    def difference(self, alone: _Moment) -> str | None:
        """Name what steps over one parameter at a time have made otherwise."""
        shared = self.shared.difference(alone.shared)
        if shared is not None:
            return f"{shared} depended on what parameters there were beside one, or on their gradients"
        if not all(map(same, self.values, alone.values)) or not all(map(same, self.states, alone.states)):
            return TOGETHER
        return None


class _Run:
    """The same parameters and gradients each time."""

    def __init__(self, twin: Twin, groups: Sequence[Sequence[Kind]], *, backwards: bool) -> None:
        self._twin = twin
        self._groups = [
            [stand_in(kind, 100 * index + number) for number, kind in enumerate(kinds)]
            for index, kinds in enumerate(groups)
        ]
        kinds = (kind for of_group in groups for kind in of_group)
        stand_ins = (parameter for group in self._groups for parameter in group)
        self._states = {p: cut(kind.states) for p, kind in zip(stand_ins, kinds, strict=True) if kind.states}
        self._representatives = Representatives(twin, [kinds[0] for kinds in groups])
        self._generator = torch.Generator().manual_seed(7)
        self._attributes = {p: dict(vars(p)) for group in self._groups for p in group}
        self._all = [parameter for group in self._groups for parameter in group]
        by_position = [
            [(kind.position, parameter) for kind, parameter in zip(kinds, own, strict=True)]
            for kinds, own in zip(groups, self._groups, strict=True)
        ]
        self._order = [dict(own[::-1] if backwards else own) for own in by_position]

    def whole(self, shared: SharedState) -> list[_Moment]:
        """Steps over all parameters."""
        moments: list[_Moment] = []
        states: dict[nn.Parameter, States] = copied(self._states)
        for before in self._steps(shared, moments):
            without = [parameter for parameter in self._all if parameter.grad is None]
            left = _Moment(before, without, states)
            after, states = self._twin.run(before, self._order, states)
            _refuse_aliases(self._twin.kind.__name__, states)
            if left.difference(_Moment(before, without, states)) is not None:
                why = (
                    "its step changes parameters, or their states, that have no gradient, and the engine's comes to "
                    "those that have one: let it pass over the others, if parameter.grad is None: continue"
                )
                raise ConfigError(cannot_run_alone(self._twin.kind.__name__, why))
            moments.append(_Moment(after, self._all, states))
        return moments

    def alone(self, shared: SharedState) -> list[_Moment]:
        """Steps over one parameter at a time."""
        moments: list[_Moment] = []
        states: dict[nn.Parameter, States] = copied(self._states)
        for before in self._steps(shared, moments):
            stepping = frozenset(
                index for index, group in enumerate(self._groups) if any(p.grad is not None for p in group)
            )
            after, reason = self._representatives.step(before, stepping), None
            for index, group in enumerate(self._order):
                for place, parameter in group.items():
                    if parameter.grad is None:
                        continue
                    of_one = states.get(parameter, {})
                    found, of_one = self._twin.run_alone(before, (index, place), parameter, of_one)
                    states.update({parameter: of_one} if of_one else {})
                    difference = after.of_group(index).difference(found)
                    if difference is not None:
                        reason = f"{difference} depended on the parameter that it was run with"
                    if not same(vars(parameter), self._attributes[parameter]):
                        reason = "it kept something in an attribute of a parameter"
            moments.append(_Moment(after, self._all, states, reason))
        return moments

    def _steps(self, shared: SharedState, moments: Sequence[_Moment]) -> Iterator[SharedState]:
        """The shared state before each step, once the gradients are there."""
        for number, size in enumerate(_GRADIENTS):
            shared = moments[-1].shared if moments else shared
            for index, parameter in enumerate(self._all):
                size_of_one = size * _CONTRAST ** (index % 4)
                gradient = torch.randn(parameter.shape, generator=self._generator) * size_of_one
                missing = number == len(_GRADIENTS) - 1 and index % 2 == 1
                parameter.grad = None if missing else gradient
            if number == 1:
                shared = _halved(shared)
            yield shared


def _refuse_aliases(name: str, states: Mapping[nn.Parameter, States]) -> None:
    """Raise ``ConfigError`` if a state is its parameter itself, which the next step changes."""
    for parameter, of_parameter in states.items():
        for key, value in of_parameter.items():
            tensors = [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]
            if any(tensor.untyped_storage().data_ptr() == parameter.data_ptr() for tensor in tensors):
                why = (
                    f"state {key!r} is the parameter itself, and changes with it: keep a clone there, "
                    "parameter.detach().clone()"
                )
                raise ConfigError(cannot_run_alone(name, why))


def _halved(shared: SharedState) -> SharedState:
    """The same with learning rates of half the size, as after a step of a scheduler."""
    groups = [
        {**group, "lr": group["lr"] * 0.5} if isinstance(group.get("lr"), (float, torch.Tensor)) else group
        for group in shared.groups
    ]
    return replace(shared, groups=groups)


def _generators() -> tuple[Any, ...]:
    """The states of the random generators that a step may draw from."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state(legacy=False))


@contextmanager
def without_draws(name: str) -> Iterator[None]:
    """Raise ``ConfigError`` at the end if a step of the optimizer of this name has drawn random numbers. Generators are
    afterwards what they were."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    before = _generators()
    try:
        yield
        if _generators() != before:
            why = (
                "its step draws random numbers, in the order of all parameters, and the engine takes it beside the "
                "next forward, which may draw from the same generator"
            )
            raise ConfigError(cannot_run_alone(name, why))
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
