"""Optimizer states as they are seen from outside of the update: read and written by parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from offload.optim.rule import Rule
from offload.tiers.home import UnitHomes
from offload.units import ALIGNMENT, ParameterSpec, UnitSpec, local_tensor

Joined = Callable[[str, torch.Tensor, ParameterSpec], torch.Tensor]
"""All ranks' parts of something of a parameter, in order and flat: of that one, where there is one rank."""


class States:
    """Brings tiles into host memory for a moment. The unit's update must be over, and stay so meanwhile."""

    def __init__(self, rule: Rule, units: Sequence[UnitSpec], homes: Sequence[UnitHomes], joined: Joined) -> None:
        """``units`` are this rank's shards, where there are several ranks: ``joined`` puts together what all have."""
        self._rule = rule
        self._units = units
        self._homes = homes
        self._joined = joined

    def read(self, steps: dict[ParameterSpec, int]) -> dict[ParameterSpec, dict[str, Any]]:
        """Copies of the states of every parameter in ``steps``."""
        parts: dict[ParameterSpec, dict[str, list[torch.Tensor]]] = {spec: {} for spec in steps}
        for unit in self._units:
            wanted = [spec for spec in unit.parameters if spec in steps]
            for tile in self._homes[unit.index].tiles if wanted else ():
                with tile.states.borrow(change=False) as address:
                    for spec in wanted:
                        for name, view in self._rule.states(tile.tile, address, spec).items():
                            parts[spec].setdefault(name, []).append(view.clone())
        return {
            spec: {
                **self._rule.loose_states(spec, steps[spec]),
                **{name: self._whole(spec, name, states.get(name, [])) for name in self._rule.names(spec)},
            }
            for spec, states in parts.items()
        }

    def write(self, states: dict[ParameterSpec, dict[str, Any]]) -> dict[ParameterSpec, int]:
        """Take over ``states``, as ``read`` gave them, moments in any format; the steps that each parameter has taken.

        Raises ``ValueError`` for one that is missing or has another size; nothing was changed then.
        """
        states = {spec: _local(values) for spec, values in states.items()}
        for unit in self._units:
            self._check(unit, states)
        states = {spec: self._own_part(spec, values) for spec, values in states.items()}
        for unit in self._units:
            wanted = [spec for spec in unit.parameters if spec in states]
            for tile in self._homes[unit.index].tiles if wanted else ():
                with tile.states.borrow(change=True) as address:
                    for spec in wanted:
                        self._rule.put_states(tile.tile, address, spec, states[spec], spec.offset)
        steps = {}
        for spec, values in states.items():
            resting = {*self._rule.names(spec), *self._rule.shapes_like(spec, values)}
            loose = {name: value for name, value in values.items() if name not in resting}
            steps[spec] = self._rule.set_loose_states(spec, loose)
        return steps

    def reset(self, specs: set[ParameterSpec]) -> None:
        """Make the states of these parameters what they are before the first step."""
        for unit in self._units:
            wanted = [spec for spec in unit.parameters if spec in specs]
            for tile in self._homes[unit.index].tiles if wanted else ():
                fresh = torch.empty(tile.tile.nbytes, dtype=torch.uint8)
                self._rule.begin(tile.tile, fresh.data_ptr())
                with tile.states.borrow(change=True) as address:
                    for spec in wanted:
                        values = self._rule.states(tile.tile, fresh.data_ptr(), spec)
                        for name, view in self._rule.states(tile.tile, address, spec).items():
                            view.copy_(values[name])
            for spec in wanted:
                self._rule.set_loose_states(spec, {})

    def joined(self, states: dict[ParameterSpec, dict[str, Any]]) -> dict[str, Any]:
        """The states of one parameter, from those of its pieces in order."""
        (first, values), *others = states.items()
        if not others:
            return values
        whole = dict(values)
        for name in self._rule.names(first):
            flat = torch.cat([values[name].flatten() for values in states.values()])
            per_element = self._is_per_element(first, name)
            whole[name] = flat.view(first.piece.whole.shape) if per_element and first.piece is not None else flat
        return whole

    def split(self, specs: Sequence[ParameterSpec], states: dict[str, Any]) -> dict[ParameterSpec, dict[str, Any]]:
        """The other way round."""
        parts = {spec: dict(states) for spec in specs}
        for name in self._rule.shapes_like(specs[0], states) if len(specs) > 1 else ():
            if name in states:
                sizes = [self._rule.shape(spec.whole or spec, name).numel() for spec in specs]
                flat = torch.as_tensor(states[name]).flatten()
                cuts = list(accumulate(sizes[:-1]))
                for part, piece in zip(parts.values(), flat.tensor_split(cuts), strict=True):
                    part[name] = piece
        return parts

    def _whole(self, spec: ParameterSpec, name: str, views: list[torch.Tensor]) -> torch.Tensor:
        shape = self._rule.shape(spec, name)
        own = torch.cat(views).view(shape) if views else torch.empty(shape)
        per_element = self._is_per_element(spec, name)
        if spec.whole is not None:
            own = self._joined(f"state {name}", own.view(-1), spec)
            own = own.view(spec.whole_shape) if per_element else own
        return spec.in_model(own) if per_element else own

    def _own_part(self, spec: ParameterSpec, states: dict[str, Any]) -> dict[str, Any]:
        """What this rank has of the states of a whole parameter: of its elements, or of its blocks of codes."""
        if spec.whole is None:
            return states
        parts = dict(states)
        for name, shape in self._rule.shapes_like(spec, states).items():
            start = spec.start if self._is_per_element(spec, name) else spec.start // ALIGNMENT
            parts[name] = torch.as_tensor(states[name]).reshape(-1)[start : start + shape.numel()]
        return parts

    def _is_per_element(self, spec: ParameterSpec, name: str) -> bool:
        whole = spec.whole or spec
        return self._rule.shape(whole, name) == whole.shape

    def _check(self, unit: UnitSpec, states: dict[ParameterSpec, dict[str, Any]]) -> None:
        for spec in unit.parameters:
            whole = spec.whole or spec
            for name, expected in self._rule.shapes_like(whole, states[spec]).items() if spec in states else ():
                value = states[spec].get(name)
                if value is None or torch.as_tensor(value).numel() != expected.numel():
                    found = "missing" if value is None else tuple(torch.as_tensor(value).shape)
                    raise ValueError(f"optimizer state {name} of {spec.name}: expected {tuple(expected)}, {found}")


def _local(states: dict[str, Any]) -> dict[str, Any]:
    """The states with what this rank has of those that are ``DTensor``."""
    return {name: local_tensor(value) for name, value in states.items()}
