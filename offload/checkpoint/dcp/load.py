"""A ``torch.distributed.checkpoint`` taken over by a running engine of any number of ranks, whoever has written it.

Each rank reads what it has, a few MiB at a time. Memory: as ``Elements``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from offload.access import ExternalAccess
from offload.checkpoint.dcp.names import (
    GROUPS,
    STATES,
    TreePath,
    fqn,
    key_of,
    names_of,
    place_of,
    refuse_others,
    state_names,
    state_shape,
)
from offload.checkpoint.dcp.reader import DistributedReader, nested
from offload.checkpoint.model_state import get_model_state
from offload.checkpoint.run_state import RunState
from offload.elements import first_states
from offload.errors import WeightsError
from offload.optim.rule import Rule
from offload.units import ParameterSpec, UnitSpec


@dataclass
class DistributedLoading:
    """Brings a checkpoint in the directory ``path`` to the homes of an engine: ``open`` it, which changes nothing, and
    ``copy``. Close it at the end. With a ``rule`` also the states of the optimizer, and its parameter groups."""

    path: Path
    run: RunState
    units: Sequence[UnitSpec]
    access: ExternalAccess
    rule: Rule | None
    state: dict[str, Any] = field(default_factory=dict)
    """For ``RunState.set``."""
    _root: TreePath | None = ()
    """Path of "model" and "optimizer" are in the tree; None if the weights are at its root, beside "optimizer"."""
    _keys: dict[str, str] = field(default_factory=dict)
    """Of the weights, by the model's names."""
    _state_keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of the states of those parameters that have some."""
    _reader: DistributedReader | None = None

    def open(self) -> None:
        """Compare the checkpoint with the engine, and read what lies in no unit. Raises ``WeightsError`` for one that
        is not whole, or does not fit."""
        refuse_others(self.units)
        self._reader = reader = DistributedReader(self.path)
        names = names_of(self.run.model)
        self.state = {
            **{"step": self.run.progress.global_step, "loss_scale": None, "groups": [], "states": {}},
            **{"gradients": {}, "num_backwards": 0, "has_other_gradients": False},
            **self._fit_model(reader, names),
        }
        if self.rule is not None:
            self.state.update(self._fit_optimizer(reader, self.rule, names))

    def copy(self) -> None:
        """Replace the weights, and with a ``rule`` the states, of all units. What was there is lost, also if this
        raises."""
        reader, rule, access = self._reader, self.rule, self.access
        assert reader is not None
        new = access.elements_to_change() if rule is None else access.new_elements(first_states(access.layout))
        with new as elements:
            for unit in self.units:
                for span in elements.spans(unit):
                    place = place_of(span.spec)
                    elements.write(span, partial(self._read, reader, self._keys[place.name], place.first))
                    keys = self._state_keys.get(place.name, {})
                    if rule is None or span.tile is None or not keys:
                        continue
                    for name in state_names(rule, span.spec):
                        per_element = state_shape(rule, span.spec, name) == place.shape
                        origin = place.first + span.first if per_element else 0
                        elements.write_state(span, name, partial(self._read, reader, keys[name], origin))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _read(self, reader: DistributedReader, key: str, origin: int, first: int, target: torch.Tensor) -> None:
        reader.read(key, origin + first, target)

    # What fits.

    def _fit_model(self, reader: DistributedReader, names: Mapping[str, list[str]]) -> dict[str, Any]:
        """Find the weights; buffers and extra states by the model's names."""
        shapes = {place_of(spec).name: place_of(spec).shape for unit in self.units for spec in unit.parameters}
        self._root = _root(reader, names)
        prefix = "" if self._root is None else key_of((*self._root, "model", ""))
        found = {
            name: next((prefix + other for other in names[name] if prefix + other in reader), None) for name in shapes
        }
        of_model = get_model_state(self.run.model)
        buffers = {name: prefix + fqn(name) for name in of_model["buffers"]}
        missing = [name for name, key in found.items() if key is None]
        missing += [name for name, key in buffers.items() if key not in reader]
        if missing:
            raise self._misfit(f"{_listed(missing)} not there")
        branch = () if self._root is None else (*self._root, "model")
        extra = {name: (*branch, fqn(name)) for name in of_model["extra"]}
        expected = {*map(key_of, extra.values()), *buffers.values()}
        expected |= {prefix + other for known in names.values() for other in known}
        others = [
            key
            for key, path in reader.paths.items()
            if branch and path[: len(branch)] == branch and key_of(path[: len(branch) + 1]) not in expected
        ]
        if others:
            raise self._misfit(f"{_listed(others)} there and not in the model")
        self._keys = {name: key for name, key in found.items() if key is not None}
        for name, key in self._keys.items():
            self._check(reader, key, shapes[name], floating=True)
        for name, key in buffers.items():
            self._check(reader, key, of_model["buffers"][name].shape, floating=False)
        values = {name: nested(reader, *path) for name, path in extra.items()}
        return {
            "buffers": {name: reader.value(key) for name, key in buffers.items()},
            "extra": {name: value for name, value in values.items() if value is not None},
        }

    def _fit_optimizer(self, reader: DistributedReader, rule: Rule, names: Mapping[str, list[str]]) -> dict[str, Any]:
        """Find the states; ``groups``, ``states`` and ``step`` for ``RunState.set``."""
        root = self._root or ()
        if not any(path[: len(root) + 1] == (*root, "optimizer") for path in reader.paths.values()):
            raise WeightsError(
                f"{self.path} has no optimizer states: load_dcp(dir, states=False) takes the weights, and leaves the "
                "optimizer as it is. Nothing has changed"
            )
        there: dict[str, dict[str, str]] = {}
        prefix = key_of((*root, *STATES, ""))
        for key in reader.paths:
            if key.startswith(prefix):
                name, _, state = key.removeprefix(prefix).rpartition(".")
                there.setdefault(name, {})[state] = key
        specs = [spec for unit in self.units for spec in unit.trainable if place_of(spec).shape.numel()]
        loose: dict[str, dict[str, Any]] = {}
        states: dict[str, dict[str, Any]] = {}
        for spec in specs:
            name = place_of(spec).name
            keys = next((there[other] for other in names[name] if other in there), None)
            if keys is None:  # it has taken no step
                continue
            if name not in loose:
                loose[name] = self._fit_states(reader, rule, spec, keys)
                self._state_keys[name] = keys
            states[spec.name] = {"steps": int(loose[name].get("step", 1)), **loose[name]}
        step = max((of_spec["steps"] for of_spec in states.values()), default=0)
        return {"groups": self._fit_groups(reader, names), "states": states, "step": step}

    def _fit_states(
        self, reader: DistributedReader, rule: Rule, spec: ParameterSpec, keys: Mapping[str, str]
    ) -> dict[str, Any]:
        """Compare the states of one parameter; those of them that lie in no tile."""
        expected = {name: state_shape(rule, spec, name) for name in state_names(rule, spec)}
        for name, shape in expected.items():
            if name not in keys:
                raise self._misfit(f"the optimizer here has a state {name}, and {place_of(spec).name} has none there")
            self._check(reader, keys[name], shape, floating=False)
        for name, key in keys.items():
            if name not in expected and key in reader.tensors and reader.tensors[key].size.numel() > 1:
                raise self._misfit(f"{key} is there, and the optimizer here has no state {name}")
        return {name: reader.value(key) for name, key in keys.items() if name not in expected}

    def _fit_groups(self, reader: DistributedReader, names: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        """The options of each parameter group of the engine."""
        there = nested(reader, *(self._root or ()), *GROUPS)
        whole = {spec.name: place_of(spec).name for unit in self.units for spec in unit.parameters}
        found = []
        for own in self.run.of_optimizer()["groups"]:
            parameters = [names[name] for name in dict.fromkeys(whole[spec] for spec in own["parameters"])]
            if there is not None:
                options = self._options_of_group(there, parameters)
            else:
                options = self._options_of_parameter(reader, parameters)
            found.append({"options": options})
        return found

    def _options_of_group(
        self, there: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """``parameters``: the names of each parameter of one group."""
        for group in there:
            if all(any(name in group["params"] for name in known) for known in parameters):
                return {name: value for name, value in group.items() if name != "params"}
        raise self._misfit(
            f"no parameter group there has the {len(parameters)} parameters ({parameters[0][0]}, ...) of one here. "
            "Groups name parameters as get_state_dict of torch.distributed.checkpoint.state_dict does"
        )

    def _options_of_parameter(self, reader: DistributedReader, parameters: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The same where each parameter has options (``flatten_optimizer_state_dict=True``)."""
        for name in chain.from_iterable(parameters):
            prefix = key_of((*(self._root or ()), *GROUPS, name, ""))
            keys = {key.removeprefix(prefix): key for key in reader.paths if key.startswith(prefix)}
            options = {option: reader.value(key) for option, key in keys.items() if "." not in option}
            if options:
                return options
        raise self._misfit(f"there are no options for the {len(parameters)} parameters of one parameter group")

    def _check(self, reader: DistributedReader, key: str, shape: torch.Size, *, floating: bool) -> None:
        entry = reader.tensors.get(key)
        if entry is None or entry.size != shape:
            said = "no tensor" if entry is None else f"of shape {tuple(entry.size)}"
            raise self._misfit(f"{key} is {said} there, and {tuple(shape)} here")
        if floating and not entry.properties.dtype.is_floating_point:
            raise self._misfit(f"{key} is {entry.properties.dtype} there, and a weight here")

    def _misfit(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path} is the checkpoint of another model or run: {what}. Nothing has changed")


def _root(reader: DistributedReader, names: Mapping[str, list[str]]) -> TreePath | None:
    """See ``DistributedLoading._root``: the root of all, unless the weights tell of another place."""
    known = {name for several in names.values() for name in several}
    for path in reader.paths.values():
        if len(path) > 1 and path[-2] == "model" and path[-1] in known:
            return path[:-2]
    return None if any((name,) in reader.paths.values() for name in known) else ()


def _listed(names: Sequence[str]) -> str:
    """Some of the names, and how many there are."""
    some = ", ".join(names[:3])
    return f"{some} is" if len(names) == 1 else f"{len(names)} ({some}{', ...' if len(names) > 3 else ''}) are"
