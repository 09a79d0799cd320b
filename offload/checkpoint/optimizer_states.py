"""Optimizer states by parameter, as state dicts have them and ``optimizer.state`` shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.model.backing import ExternalAccess, ParameterBacking
from offload.model.state_handle import StatesOfParameter
from offload.tiers.states import States
from offload.units import ParameterSpec, UnitSpec
from offload.update.verdict import Verdict
from offload.waiting import Failure

_MASTER = "master"
"""In a state dict: the fp32 master of a 16-bit weight, which the weight alone does not tell."""


class OptimizerStates:
    """Reads and writes them when no update runs. A parameter of several pieces has the states of all, joined."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        specs: Mapping[nn.Parameter, Sequence[ParameterSpec]],
        backings: Mapping[ParameterSpec, ParameterBacking],
        states: States,
        verdict: Verdict,
        access: ExternalAccess,
        wait_for_updates: Callable[[], None],
        failure: Failure,
    ) -> None:
        self._units = units
        self._specs = specs
        self._backings = backings
        self._states = states
        self._verdict = verdict
        self._access = access
        self._wait_for_updates = wait_for_updates
        self._failure = failure

    def of_all(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Copies of all states, fp32 masters of 16-bit weights included."""
        self._wait_for_updates()
        steps, found = self._verdict.num_steps, {}
        for unit in self._units:
            with self._failure:
                of_unit = self._states.read({spec: steps[spec] for spec in unit.trainable if spec in steps})
            for spec, states in of_unit.items():
                if self._access.formats.master:
                    states[_MASTER] = self._backings[spec].read_master()
                found[spec] = {name: self._kept(value) for name, value in states.items()}
        return {
            parameter: self._joined({spec: found[spec] for spec in specs})
            for parameter, specs in self._specs.items()
            if specs[0] in found
        }

    def replace_all(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over states by parameter. The others have taken no step."""
        by_spec = self._by_spec(states)
        others = {spec for spec in self._verdict.num_steps if spec not in by_spec}
        with self._failure:
            self._access.changing(self._units)
            num_steps = self._states.write(_without_masters(by_spec))
            self._states.reset(others)
            self._verdict.num_steps = num_steps
        for spec, values in by_spec.items():
            if _MASTER in values:
                self._backings[spec].write_master(values[_MASTER])

    def parameters(self) -> list[nn.Parameter]:
        """Those that have taken a step."""
        return [parameter for parameter, specs in self._specs.items() if specs[0] in self._verdict.num_steps]

    def of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The states of one parameter, as handles. None are there before its first step."""
        specs = self._specs[parameter]
        if specs[0] not in self._verdict.num_steps:
            return {}

        def read() -> dict[str, Any]:
            self._wait_for_updates()
            with self._failure:
                states = self._states.read({spec: self._verdict.num_steps[spec] for spec in specs})
            return self._states.joined(states)

        def write(some: dict[str, Any]) -> None:
            self.replace(parameter, {**read(), **some})

        name = specs[0].piece.whole.name if specs[0].piece is not None else specs[0].name
        return StatesOfParameter(name, read, write)

    def replace(self, parameter: nn.Parameter, states: dict[str, Any]) -> None:
        """Take over the states of one parameter."""
        with self._failure:
            self._access.changing(self._units)
            by_spec = self._by_spec({parameter: states})
            self._verdict.num_steps.update(self._states.write(_without_masters(by_spec)))

    def _kept(self, value: Any) -> Any:
        return self._access.spooled.keep(value) if type(value) is torch.Tensor else value

    def _joined(self, states: dict[ParameterSpec, dict[str, Any]]) -> dict[str, Any]:
        """The states of one parameter, from those of its pieces in order."""
        whole = self._states.joined(states)
        if len(states) > 1:
            if _MASTER in whole:
                whole[_MASTER] = torch.cat([of_piece[_MASTER] for of_piece in states.values()])
            whole = {name: self._kept(value) for name, value in whole.items()}
        return whole

    def _by_spec(self, states: dict[nn.Parameter, dict[str, Any]]) -> dict[ParameterSpec, dict[str, Any]]:
        found: dict[ParameterSpec, dict[str, Any]] = {}
        for parameter, values in states.items():
            if not values:
                continue
            specs = self._specs[parameter]
            found.update(self._states.split(specs, values))
            if _MASTER in values:
                for spec in specs:
                    found[spec][_MASTER] = (spec.whole or spec).part_of(values[_MASTER])
        return found


def _without_masters(states: dict[ParameterSpec, dict[str, Any]]) -> dict[ParameterSpec, dict[str, Any]]:
    return {spec: {name: value for name, value in of.items() if name != _MASTER} for spec, of in states.items()}
