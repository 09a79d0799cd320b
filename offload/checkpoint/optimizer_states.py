"""Optimizer states by parameter, as state dicts have them and ``optimizer.state`` shows them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate, groupby
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.errors import ConfigError
from offload.model.backing import ParameterBacking
from offload.model.state_handle import StatesInEngine, StatesOfParameter
from offload.optim.rule import Rule
from offload.ranks.agreement import fact_of_all
from offload.units import ALIGNMENT, ParameterSpec, UnitSpec, local_tensor
from offload.update.verdict import Verdict

_MASTER = "master"
"""In a state dict: the fp32 master of a 16-bit weight, which the weight alone does not tell."""

States = dict[str, Any]
"""Those of a parameter, or of a piece of one, by name."""

P = ParamSpec("P")
R = TypeVar("R")


def _outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """Run calls outside of inference mode: no later step can change a tensor that was made in it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


@dataclass(frozen=True)
class OptimizerStates:
    """Reads and writes them when no update runs. A parameter of several pieces has the states of all, joined.

    ``units`` are this rank's shards, ``specs`` what it has of each parameter.
    """

    rule: Rule
    units: Sequence[UnitSpec]
    specs: Mapping[nn.Parameter, Sequence[ParameterSpec]]
    backings: Mapping[ParameterSpec, ParameterBacking]
    verdict: Verdict
    access: ExternalAccess
    wait_for_updates: Callable[[], None]
    _looked_at: dict[nn.Parameter, StatesInEngine] = field(default_factory=dict)
    """The way to the states of each parameter that was looked at."""

    @_outside_inference
    def of_all(self) -> dict[nn.Parameter, States]:
        """Copies of all states, fp32 masters of 16-bit weights and the user's own entries included."""
        self.wait_for_updates()
        found: dict[ParameterSpec, States] = {}
        for unit in self.units:
            for spec, states in self._read(unit, unit.trainable, copied=True).items():
                if self.access.layout.formats.master:
                    states[_MASTER] = self.backings[spec].read_master()
                found[spec] = {name: self._kept(value) for name, value in states.items()}
        return {
            parameter: self._joined({spec: found[spec] for spec in specs})
            for parameter, specs in self.specs.items()
            if specs[0] in found
        }

    @_outside_inference
    def replace_all(self, states: dict[nn.Parameter, States]) -> None:
        """Take over states by parameter. The others have taken no step."""
        for parameter in self._looked_at:
            self._leave(parameter)
        by_spec = self._by_spec(states)
        others = {spec for spec in self.verdict.num_steps if spec not in by_spec}
        with self.access.failure:
            self._agree(by_spec)
            self.access.changing(self.units)
            num_steps = self._write(by_spec, copied=True)
            self._reset(others)
            self.verdict.num_steps = num_steps
        for spec, values in by_spec.items():
            if _MASTER in values:
                self.backings[spec].write_master(values[_MASTER])

    def parameters(self) -> list[nn.Parameter]:
        """Those that have taken a step."""
        return [parameter for parameter, specs in self.specs.items() if specs[0] in self.verdict.num_steps]

    def of(self, parameter: nn.Parameter) -> States:
        """The states of one parameter, as handles. None are there before its first step."""
        if parameter not in self._looked_at:
            self._looked_at[parameter] = self._way_to(parameter)
        return StatesOfParameter(self._looked_at[parameter])

    def _way_to(self, parameter: nn.Parameter) -> StatesInEngine:
        specs = self.specs[parameter]
        name = specs[0].piece.whole.name if specs[0].piece is not None else specs[0].name

        @_outside_inference
        def read() -> States:
            if specs[0] not in self.verdict.num_steps:
                return {}
            self.wait_for_updates()
            found: dict[ParameterSpec, States] = {}
            for unit in self.units:
                found.update(self._read(unit, [spec for spec in specs if spec in unit.parameters]))
            return self._joined({spec: found[spec] for spec in specs})

        def write(states: States) -> None:
            if not states:
                self._forget(parameter)
            elif specs[0] not in self.verdict.num_steps:
                raise ConfigError(
                    f"parameter {name} has taken no step since its states were made anew, and has none to put "
                    f"{', '.join(states)} beside: give all of them, optimizer.state[parameter] = {{...}}"
                )
            else:
                self._replace(parameter, states)

        return StatesInEngine(name, lambda: self.rule.names(specs[0]), read, write)

    def replace(self, parameter: nn.Parameter, states: States) -> None:
        """Take over the states of one parameter. Who looked at those before keeps them."""
        self._leave(parameter)
        self._replace(parameter, states)

    @_outside_inference
    def _replace(self, parameter: nn.Parameter, states: States) -> None:
        by_spec = self._by_spec({parameter: states})
        with self.access.failure:
            self._agree(by_spec)
            self.access.changing(self.units)
            self.verdict.num_steps.update(self._write(by_spec))

    def _leave(self, parameter: nn.Parameter) -> None:
        if parameter in self._looked_at:
            self._looked_at[parameter].leave()

    def _agree(self, by_spec: Mapping[ParameterSpec, States]) -> None:
        """Ranks take over the same states, or all of them end with an error."""
        self.access.ranks.barrier(
            "a change of optimizer states",
            lambda: {"the new state": {spec.name: fact_of_all(states) for spec, states in by_spec.items()}},
        )

    def forget(self, parameter: nn.Parameter) -> None:
        """Make the states of one parameter what they are before its first step. Who looked at them keeps them."""
        self._leave(parameter)
        self._forget(parameter)

    @_outside_inference
    def _forget(self, parameter: nn.Parameter) -> None:
        present = {spec for spec in self.specs[parameter] if spec in self.verdict.num_steps}
        if not present:
            return
        with self.access.failure:
            self.access.changing(self.units)
            self._reset(present)
            for spec in present:
                del self.verdict.num_steps[spec]

    # Of parameters and pieces.

    def _read(
        self, unit: UnitSpec, specs: Sequence[ParameterSpec], *, copied: bool = False
    ) -> dict[ParameterSpec, States]:
        """Copies of the states of those that have taken a step. What lies in no tile is as it is, if not ``copied``."""
        steps = self.verdict.num_steps
        parts: dict[ParameterSpec, dict[str, list[torch.Tensor]]] = {spec: {} for spec in specs if spec in steps}
        with self.access.failure:
            with self.access.elements() as elements:
                for span in elements.spans(unit, parts) if parts else ():
                    for name, view in elements.states(span).items():
                        parts[span.spec].setdefault(name, []).append(view.clone())
            loose = {spec: self.rule.loose_states(spec, steps[spec]) for spec in parts}
            return {
                spec: {
                    **(copy.deepcopy(loose[spec]) if copied else loose[spec]),
                    **{name: self._whole(spec, name, of_spec.get(name, [])) for name in self.rule.names(spec)},
                }
                for spec, of_spec in parts.items()
            }

    def _write(self, by_spec: Mapping[ParameterSpec, States], *, copied: bool = False) -> dict[ParameterSpec, int]:
        """Take over states, moments in any format; the steps that each parameter has taken. What lies in no tile is
        taken as it is, if not ``copied``: who holds it may change it.

        Raises ``ValueError`` for one that is missing or has another size; nothing was changed then.
        """
        states: dict[ParameterSpec, States] = {}
        for spec, values in by_spec.items():
            states[spec] = {name: local_tensor(value) for name, value in values.items() if name != _MASTER}
            self._check(spec, states[spec])
        own = {spec: self._own_part(spec, values) for spec, values in states.items()}
        with self.access.elements_to_change() as elements:
            for unit in self.units:
                for span in elements.spans(unit, own):
                    if span.tile is not None:
                        address = elements.states_at(span.tile)
                        self.rule.put_states(span.tile.tile, address, span.spec, own[span.spec], span.spec.offset)
        steps = {}
        for spec, values in own.items():
            resting = {*self.rule.names(spec), *self.rule.shapes_like(spec, values)}
            loose = {name: value for name, value in values.items() if name not in resting}
            loose = copy.deepcopy(loose) if copied else loose
            steps[spec] = self.rule.set_loose_states(spec, loose, held=not copied)
        return steps

    def _reset(self, specs: set[ParameterSpec]) -> None:
        """Make the states of these parameters what they are before the first step."""
        with self.access.elements_to_change() as elements:
            for unit in self.units:
                for tile, spans in groupby(elements.spans(unit, specs), key=lambda span: span.tile):
                    if tile is None:
                        continue
                    new = torch.empty(tile.tile.nbytes, dtype=torch.uint8)
                    self.rule.begin(tile.tile, new.data_ptr())
                    for span in spans:
                        values = self.rule.states(tile.tile, new.data_ptr(), span.spec)
                        for name, view in elements.states(span).items():
                            view.copy_(values[name])
        for spec in specs:
            self.rule.forget_states(spec)

    def _whole(self, spec: ParameterSpec, name: str, views: list[torch.Tensor]) -> torch.Tensor:
        shape = self.rule.shape(spec, name)
        own = torch.cat(views).view(shape) if views else torch.empty(shape)
        per_element = self._is_per_element(spec, name)
        if spec.whole is not None:
            own = self.access.joined(f"state {name}", own.view(-1), spec)
            own = own.view(spec.whole_shape) if per_element else own
        return spec.beside(own) if per_element else own

    def _own_part(self, spec: ParameterSpec, states: States) -> States:
        """Return what this rank has of the states of a whole parameter: of its elements, or of its blocks of codes."""
        if spec.whole is None:
            return states
        parts = dict(states)
        for name, shape in self.rule.shapes_like(spec, states).items():
            start = spec.start if self._is_per_element(spec, name) else spec.start // ALIGNMENT
            parts[name] = torch.as_tensor(states[name]).reshape(-1)[start : start + shape.numel()]
        return parts

    def _is_per_element(self, spec: ParameterSpec, name: str) -> bool:
        whole = spec.whole or spec
        return self.rule.shape(whole, name) == whole.shape

    def _check(self, spec: ParameterSpec, states: States) -> None:
        for name, expected in self.rule.shapes_like(spec.whole or spec, states).items():
            value = states.get(name)
            if value is None or torch.as_tensor(value).numel() != expected.numel():
                found = "missing" if value is None else tuple(torch.as_tensor(value).shape)
                raise ValueError(f"optimizer state {name} of {spec.name}: expected {tuple(expected)}, {found}")

    # Pieces and wholes.

    def _joined(self, states: Mapping[ParameterSpec, States]) -> States:
        """The states of one parameter, from those of its pieces in order."""
        (first, whole), *others = states.items()
        if not others:
            return whole
        whole = dict(whole)
        for name in self.rule.names(first):
            flat = torch.cat([values[name].flatten() for values in states.values()])
            per_element = self._is_per_element(first, name)
            whole[name] = flat.view(first.piece.whole.shape) if per_element and first.piece is not None else flat
        if _MASTER in whole:
            whole[_MASTER] = torch.cat([of_piece[_MASTER] for of_piece in states.values()])
        resting = {*self.rule.names(first), _MASTER}
        return {name: self._kept(value) if name in resting else value for name, value in whole.items()}

    def _by_spec(self, states: Mapping[nn.Parameter, States]) -> dict[ParameterSpec, States]:
        """The other way round, for several parameters."""
        found: dict[ParameterSpec, States] = {}
        for parameter, values in states.items():
            specs = self.specs[parameter] if values else ()
            found.update((spec, dict(values)) for spec in specs)
            for name in self.rule.shapes_like(specs[0], values) if len(specs) > 1 else ():
                if name in values:
                    sizes = [self.rule.shape(spec.whole or spec, name).numel() for spec in specs]
                    cuts = list(accumulate(sizes[:-1]))
                    parts = torch.as_tensor(values[name]).flatten().tensor_split(cuts)
                    for spec, part in zip(specs, parts, strict=True):
                        found[spec][name] = part
            for spec in specs if _MASTER in values else ():
                found[spec][_MASTER] = (spec.whole or spec).part_of(values[_MASTER])
        return found

    def _kept(self, value: Any) -> Any:
        return self.access.spooled.keep(value) if type(value) is torch.Tensor else value
