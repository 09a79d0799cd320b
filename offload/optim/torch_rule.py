"""Any ``torch.optim.Optimizer``, run one parameter at a time over tiles that hold whole parameters.

Which states there are is seen in one step on a stand-in of the same shape: tensors of more than one element are stored
in the tile, everything else in RAM: numbers, lists of tensors, and what an optimizer makes after its first step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError, cannot_run_alone, warn
from offload.memory import tensor_at
from offload.optim.acquaintance import Place
from offload.optim.called_in import CalledIn
from offload.optim.formats import Formats
from offload.optim.rule import Group, SteppingParameter, TileBytes
from offload.optim.shared_state import SharedState, is_data, same
from offload.optim.trial import check_kinds, try_alone, without_draws
from offload.optim.twin import LAST, SIDE, Kind, Representatives, Twin, as_when_training, without_compiling
from offload.optim.whole_parameters import Record, Schema, WholeParameters
from offload.units import ParameterSpec, Tile, UnitSpec
from swapper import OffloadError

_KINDS_MAX = 3
"""Kinds of parameters of a group that a trial has."""


@dataclass(frozen=True, eq=False)
class _Step:
    """A step of the optimizer: its shared state before and after it, and what was on where it was called."""

    before: SharedState
    after: SharedState
    called_in: CalledIn


@dataclass(frozen=True, eq=False)
class _ParameterStep:
    """One parameter's part of a step: equal to no other, so that each is run by itself."""

    step: _Step
    spec: ParameterSpec
    group: int
    attributes: Mapping[str, Any]
    grad_scale: float


class TorchRule(WholeParameters):
    """The optimizer of the user's, over parameters that come in one after the other. See ``Rule`` and
    [Note: Once a step, parameter by parameter].

    Its own options and attributes go on once a step; its parameters and states stay as they are. It sees fp32 masters
    and gradients, whatever the precision. Its temporaries, a few copies of one parameter, are outside of the budget.
    """

    repeatable = False
    replayable = False
    is_one_kernel = False
    uniform = False
    device_unsupported_reason = "the optimizer has no kernel"
    temporary_bytes = 0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[tuple[Group, Sequence[ParameterSpec]]],
        formats: Formats,
        grad_dtype: torch.dtype,
    ) -> None:
        """Raises ``ConfigError`` for an optimizer that cannot run one parameter at a time, with the reason."""
        super().__init__(formats)
        self._optimizer = weakref.ref(optimizer)
        self._twin, ahead = Twin(optimizer), Twin(optimizer)
        self._name = self._twin.kind.__name__
        self._grad_dtype = grad_dtype
        self._group_of = {spec: index for index, (_, specs) in enumerate(groups) for spec in specs}
        self._parameters = _by_place(optimizer, groups)
        """All that the optimizer was made for."""
        self._place_of = {id(parameter): place for place, parameter in self._parameters.items()}
        self._place = {spec: self._place_of[id(spec.parameter)] for spec in self._group_of}
        """The same by what parameters are known as here: another may stand in the model later (``prune``)."""
        self._shared = as_when_training(self._twin, SharedState.of(optimizer, places=self._place_of))
        self._known = frozenset(self._shared.attributes)
        """Names of attributes that it had when the engine was made."""
        kinds = [_kinds(specs, optimizer.state, self._place_of) for _, specs in groups]
        try_alone(ahead, self._shared, kinds, [spec.parameter for _, specs in groups for spec in specs])
        if ahead.returned is not None:
            warn(
                f"the step of {self._name} returns {type(ahead.returned).__name__}: engine.optimizer.step() returns "
                "what a closure does, or None"
            )
        self._representatives = Representatives(
            ahead, [of_group[0] for of_group in kinds], [index for index, found in enumerate(kinds) if len(found) > 1]
        )
        self._first = [next((spec for spec in specs if spec.numel), None) for _, specs in groups]
        """Of each group the parameter that it was cut from."""
        self._step = _Step(self._shared, self._shared, CalledIn())
        self._usual = self._step.called_in.settings
        self._stepping: Mapping[ParameterSpec, SteppingParameter] = {}
        self._late: set[str] = set()
        """States that have come after the first step, and were warned of, and entries of the user's."""
        self._absent: dict[ParameterSpec, frozenset[str]] = {}
        """States for which there is room and that are not there, of parameters that have others."""
        self._schemas: dict[tuple[torch.Size, int | Place], list[tuple[Any, Schema]]] = {}
        """States of parameters of a shape in a group: by what else tells them apart."""
        self._schema_of: dict[ParameterSpec, Schema] = {}
        """Those of each parameter, as it was when the engine was made: room is reserved for these."""
        self._held: set[ParameterSpec] = set()
        """Those of whose loose states the program may hold some, and change them."""
        self._loose: dict[ParameterSpec, dict[str, Any]] = {}
        """Of each parameter that has taken a step: its states that lie in no tile."""

    def products(self, unit: UnitSpec) -> float:
        return 0.0

    @property
    def identity(self) -> dict[str, Any]:
        kind = self._twin.kind
        return {"optimizer": f"{kind.__module__}.{kind.__qualname__}", "moments": "fp32"}

    def begin_step(self, stepping: Mapping[ParameterSpec, SteppingParameter]) -> None:
        optimizer = self._its_owner()
        before = SharedState.of(optimizer, self._known, self._place_of)
        if len(before.groups) != len(self._representatives):
            raise ConfigError(
                f"optimizer {self._name} had {len(self._representatives)} parameter groups when the engine was made, "
                f"and has {len(before.groups)} now: an optimizer without a kernel keeps its groups. Give it all "
                "of them before the engine is made, with options that change later"
            )
        self._index = {id(group): index for index, group in enumerate(optimizer.param_groups)}
        indices = frozenset(self._index[id(group)] for _, group in stepping.values())
        after = self._representatives.step(before, indices)
        after.give(optimizer, before, self._parameters)
        self._step, self._stepping = _Step(before, after, CalledIn()), stepping

    @property
    def is_watched(self) -> bool:
        attributes = (value for parameter, _ in self._stepping.values() for value in _attributes_of(parameter).values())
        return (
            self._step.called_in.is_watched
            or self._step.called_in.settings != self._usual
            or not self._held.isdisjoint(self._stepping)
            or any(map(_can_change, attributes))
        )

    def check_options(self, spec: ParameterSpec, group: Group) -> None:
        """The optimizer looks at them itself, when it takes a step."""

    def freeze(self, spec: ParameterSpec, group: Group, step: int, grad_scale: float) -> Hashable:
        attributes = _attributes_of(self._stepping[spec][0])
        return _ParameterStep(self._step, spec, self._index[id(group)], attributes, grad_scale)

    def get_shared(self) -> dict[str, Any]:
        optimizer = self._its_owner()
        saved = self._known if self._shared.sizes is None else ()
        attributes = {name: value for name, value in vars(optimizer).items() if name in saved and is_data(value)}
        entries = {key: optimizer.state[key] for key in optimizer.state if isinstance(key, str)}
        absent = {spec.name: sorted(names) for spec, names in self._absent.items() if names}
        states = self._representatives.states
        return {"attributes": attributes, "entries": entries, "representatives": states, "absent": absent}

    def set_shared(self, shared: Mapping[str, Any]) -> None:
        optimizer = self._its_owner()
        if self._shared.sizes is None:  # else they go with what it knows of parameters: that is the program's to tell
            vars(optimizer).update(copy.deepcopy(shared["attributes"]))
        for key, value in shared["entries"].items():
            optimizer.state[key] = copy.deepcopy(value)
        self._absent = {spec: frozenset(shared["absent"].get(spec.name, ())) for spec in self._group_of}
        for index, states in enumerate(shared["representatives"]):
            self._representatives.set_states(index, states)

    def _its_owner(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(f"the {self._name} that the engine was given is gone")
        return optimizer

    def apply(self, frozen: Hashable, tile: Tile, start: int, stop: int, at: TileBytes, native: kernels.Native) -> None:
        assert isinstance(frozen, _ParameterStep)
        spec = frozen.spec
        record = self._records[tile][spec]
        master = self._formats.get_master(spec.numel, at.weights, at.states + record.master)
        parameter = nn.Parameter(master.view(spec.shape))
        vars(parameter).update(frozen.attributes)
        gradient = tensor_at(at.grads, spec.numel, self._grad_dtype).to(torch.float32, copy=True)
        parameter.grad = gradient.mul_(frozen.grad_scale).view(spec.shape)
        resting = self.states(tile, at.states, spec)
        states: dict[str, Any] = {}
        if spec in self._loose:
            states = {
                **self._loose[spec],
                **{
                    state.name: resting[state.name].view(state.shape)
                    for state in record.states
                    if state.name not in self._absent.get(spec, ())
                },
            }
        borrowed = {tensor.untyped_storage().data_ptr() for tensor in (parameter, parameter.grad, *resting.values())}
        place = frozen.group, self._place[spec][1]
        step = frozen.step
        shared, found = self._twin.run_alone(step.before, place, parameter, states, step.called_in.call)
        difference = step.after.of_group(frozen.group).difference(shared)
        if difference is not None:
            why = (
                f"its {difference} came out of the step of {spec.name} otherwise than out of that of a small parameter"
            )
            raise OffloadError(cannot_run_alone(self._name, why))
        self._keep(spec, record, resting, found, borrowed)
        self._formats.put_master(parameter.detach().reshape(-1), at.weights, at.states + record.master)

    def put_states(self, tile: Tile, address: int, spec: ParameterSpec, states: Mapping[str, Any], first: int) -> None:
        views = self.states(tile, address, spec)  # a tile has all of the parameter
        for name in views.keys() & states.keys():
            views[name].copy_(torch.as_tensor(states[name]).reshape(-1))
        self._absent[spec] = frozenset(views.keys() - states.keys())
        if spec in self._first:
            self._representatives.set_states(self._group_of[spec], states)

    def names(self, spec: ParameterSpec) -> tuple[str, ...]:
        return tuple(name for name in self._schema(spec) if name not in self._absent.get(spec, ()))

    def shapes_like(self, spec: ParameterSpec, states: Mapping[str, Any]) -> dict[str, torch.Size]:
        return {name: shape for name, (shape, _) in self._schema(spec).items() if name in states}

    def loose_states(self, spec: ParameterSpec, step: int) -> dict[str, Any]:
        return dict(self._loose.get(spec, {}))

    def set_loose_states(self, spec: ParameterSpec, states: dict[str, Any], *, held: bool = False) -> int:
        can_change = held and any(name != "step" and _can_change(value) for name, value in states.items())
        (self._held.add if can_change else self._held.discard)(spec)
        self._loose[spec] = {name: _ordinary(value) for name, value in states.items()}
        self._late |= {name for name, value in states.items() if _rests_in_tile(value)}  # the user's, or warned of
        return int(states.get("step", 1))

    def forget_states(self, spec: ParameterSpec) -> None:
        self._loose.pop(spec, None)
        self._held.discard(spec)
        self._absent.pop(spec, None)
        if spec in self._first:
            self._representatives.set_states(self._group_of[spec], {})

    def _schema(self, spec: ParameterSpec) -> Schema:
        if spec not in self._schema_of:
            self._schema_of[spec] = self._find_schema(spec)
        return self._schema_of[spec]

    def _find_schema(self, spec: ParameterSpec) -> Schema:
        """The states of a parameter of this kind, seen in one step on a stand-in."""
        group = self._group_of.get(spec)
        if group is None or spec.numel == 0:  # in no group: it never takes a step
            return {}
        attributes = _attributes_of(spec.parameter)
        # Fractions, such as factors of the learning rate, tell parameters apart that have the same states.
        kind = {name: value for name, value in attributes.items() if not isinstance(value, float)}
        place = group, self._place[spec][1]
        # What is known of one parameter by its place may tell it apart, too.
        found = self._schemas.setdefault((spec.shape, group if self._shared.sizes is None else place), [])
        for other, schema in found:
            if same(kind, other):
                return schema
        parameter = nn.Parameter(torch.zeros(spec.shape))
        vars(parameter).update(attributes)
        parameter.grad = torch.zeros(spec.shape)
        try:
            had = copy.deepcopy(dict(self._its_owner().state.get(spec.parameter, {})))
            with without_draws(self._name), without_compiling():  # small ones may draw nothing
                _, of_parameter = self._twin.run_alone(self._shared, place, parameter, had)
        except ConfigError:
            raise
        except Exception as error:
            why = f"a step on {spec.name} {tuple(spec.shape)} raised {type(error).__name__}: {error}"
            raise ConfigError(cannot_run_alone(self._name, why)) from error
        check_kinds(self._name, of_parameter)
        schema = {name: (v.shape, v.dtype) for name, v in of_parameter.items() if _rests_in_tile(v)}
        found.append((kind, schema))
        return schema

    def _keep(
        self,
        spec: ParameterSpec,
        record: Record,
        resting: dict[str, torch.Tensor],
        states: dict[str, Any],
        borrowed: set[int],
    ) -> None:
        """Bring the states back to where they are stored. ``borrowed`` is memory that will be another's."""
        names = [state.name for state in record.states]
        present = {name: states[name] for name in names if isinstance(states.get(name), torch.Tensor)}
        expected = {state.name: (state.shape, state.dtype) for state in record.states if state.name in present}
        kept = {name: (value.shape, value.dtype) for name, value in present.items()}
        if kept != expected:
            raise OffloadError(
                f"optimizer {self._name} changed its states of {spec.name}: room was reserved for "
                f"{_describe(expected)}, now there are {_describe(kept)}"
            )
        moved = {name: value for name, value in present.items() if value.data_ptr() != resting[name].data_ptr()}
        for name, value in _owned(moved, borrowed).items():
            resting[name].copy_(value.detach().reshape(-1))
        self._loose[spec] = _owned({name: value for name, value in states.items() if name not in kept}, borrowed)
        self._absent[spec] = frozenset(names) - present.keys()
        late = {name for name, value in self._loose[spec].items() if _rests_in_tile(value)} - self._late
        if late:
            self._late |= late
            warn(
                f"optimizer {self._name} has made the states {', '.join(sorted(late))} after its first step: they are "
                "stored in RAM, and host_memory does not count them"
            )


def _ordinary(value: Any) -> Any:
    """The same, or a copy of a tensor that steps cannot use: one that was made in inference mode cannot be changed, and
    a handle brings in what the update's thread would wait for."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor:
        return copy.deepcopy(value)
    return value.clone() if value.is_inference() else value


def _owned(value: Any, borrowed: set[int]) -> Any:
    """The same object, unless it holds tensors in borrowed memory, which are copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.untyped_storage().data_ptr() in borrowed else value
    if type(value) is dict:
        items = {key: _owned(item, borrowed) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        owned = [_owned(item, borrowed) for item in value]
        return type(value)(owned) if any(map(is_not, owned, value)) else value
    return value


def _by_place(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[Group, Sequence[ParameterSpec]]]
) -> dict[Place, nn.Parameter]:
    """The parameters of the optimizer, with those that are not trained. One that was made of a class has stand-ins."""
    found: dict[Place, nn.Parameter] = {}
    for number, (group, (_, specs)) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        own, trained = {id(p): p for p in group["params"]}, {id(spec.parameter): spec.parameter for spec in specs}
        of_model = own if not trained or own.keys() & trained else trained
        found |= {(number, index): parameter for index, parameter in enumerate(of_model.values())}
    return found


def _kinds(specs: Sequence[ParameterSpec], states: Mapping[Any, Any], place_of: Mapping[int, Place]) -> list[Kind]:
    """Parameters of a group for a trial: a few that differ when they are small, and two at least, if it has two."""
    found: list[Kind] = []
    seen: list[tuple[Any, ...]] = []
    for spec in specs:
        position = place_of[id(spec.parameter)][1]
        kind = Kind(spec.shape, _attributes_of(spec.parameter), dict(states.get(spec.parameter, {})), position)
        small = [min(length, SIDE) for length in spec.shape], kind.attributes
        if spec.numel and not any(same(small, other) for other in seen) and len(found) < _KINDS_MAX:
            found.append(kind)
            seen.append(small)
    if len(found) == 1 and len(specs) > 1:
        found.append(found[0]._replace(position=LAST))
    return found or [Kind(torch.Size([SIDE]))]


def _attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Attributes that the user has given it. Private ones are libraries', and the engine's."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_")}


def _rests_in_tile(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _can_change(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, dict, set))


def _describe(states: dict[str, tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{name} {tuple(shape)} {dtype}" for name, (shape, dtype) in states.items()) or "none"
