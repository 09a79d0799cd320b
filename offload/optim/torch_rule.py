"""Any ``torch.optim.Optimizer``, run one parameter at a time over tiles that hold whole parameters.

A tile is ``[master of a | states of a | master of b | ...]``. Which states there are is seen in one step on a stand-in
of the same shape: tensors of more than one element rest in the tile, everything else (the number of steps) in RAM.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError
from offload.memory import tensor_at
from offload.optim.formats import Formats
from offload.optim.rule import Group, TileBytes, TilePart, options_of
from offload.units import GRAIN, ParameterSpec, Tile, UnitSpec
from swapper import OffloadError

_ALIGNMENT = 64


@dataclass(frozen=True)
class _State:
    """One state tensor of a parameter: where it lies in the tile."""

    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Record:
    """Content of a tile that belongs to one parameter."""

    spec: ParameterSpec
    master: int
    states: tuple[_State, ...]


@dataclass(frozen=True, eq=False)
class _Step:
    """One parameter's step: equal to no other, so that each is run by itself."""

    spec: ParameterSpec
    options: Group
    grad_scale: float


class TorchRule:
    """``optimizer`` as it was built, over parameters that it never saw together. See ``Rule``.

    Only its class and settings are used: its own parameters and states stay as they are. It sees fp32 masters and
    gradients, whatever the precision. Its temporaries, a few copies of one parameter, are outside of the budget.
    """

    repeatable = False
    uniform = False
    device_unsupported_reason = "the optimizer has no kernel"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[tuple[Group, Sequence[ParameterSpec]]],
        formats: Formats,
        grad_dtype: torch.dtype,
    ) -> None:
        self._optimizer = copy.copy(optimizer)
        self._name = type(optimizer).__name__
        self._formats = formats
        self._grad_dtype = grad_dtype
        self._groups = [options_of(group) for group, _ in groups]
        self._group_of = {spec: index for index, (_, specs) in enumerate(groups) for spec in specs}
        self._records: dict[Tile, dict[ParameterSpec, _Record]] = {}
        self._schemas: dict[tuple[torch.Size, int], dict[str, tuple[torch.Size, torch.dtype]]] = {}
        self._loose: dict[ParameterSpec, dict[str, Any]] = {}
        """Of each parameter that has taken a step: its states that lie in no tile."""

    def tiles_of(self, unit: UnitSpec, tile_bytes: int) -> tuple[Tile, ...]:
        tiles: list[Tile] = []
        records: dict[ParameterSpec, _Record] = {}
        start = end = 0

        def close(stop: int) -> None:
            tile = Tile(start, stop, end)
            tiles.append(tile)
            self._records[tile] = dict(records)

        for spec in unit.parameters:
            if not spec.trainable:
                continue
            record, after = self._lay_out(spec, end)
            if records and after > tile_bytes and spec.offset % GRAIN == 0:  # gradients of a tile are whole pages
                close(spec.offset)
                records.clear()
                start = spec.offset
                record, after = self._lay_out(spec, 0)
            records[spec] = record
            end = after
        if unit.trainable_numel:
            close(unit.trainable_numel)
        return tuple(tiles)

    @property
    def identity(self) -> dict[str, Any]:
        kind = type(self._optimizer)
        return {"optimizer": f"{kind.__module__}.{kind.__qualname__}", "moments": "fp32"}

    def tile_between(self, unit: UnitSpec, start: int, stop: int) -> Tile:
        records: dict[ParameterSpec, _Record] = {}
        end = 0
        for spec in unit.trainable:
            if start <= spec.offset < stop:
                records[spec], end = self._lay_out(spec, end)
        tile = Tile(start, stop, end)
        self._records[tile] = records
        return tile

    def parts(self, tile: Tile) -> Sequence[TilePart]:
        found = []
        for spec, record in self._records[tile].items():
            if self._formats.master:
                master = torch.float32 if self._formats.master == 4 else torch.uint16
                found.append(TilePart(spec.name, "", record.master, tuple(spec.shape), master))
            found += [TilePart(spec.name, s.name, s.offset, tuple(s.shape), s.dtype) for s in record.states]
        return found

    def begin(self, tile: Tile, address: int) -> None:
        tensor_at(address, tile.nbytes, torch.uint8).zero_()

    def master_offset(self, tile: Tile, element: int) -> int:
        record = next(
            record
            for spec, record in self._records[tile].items()
            if spec.offset <= element < spec.offset + max(spec.numel, 1)
        )
        return record.master + (element - record.spec.offset) * self._formats.master

    def freeze(self, spec: ParameterSpec, group: Group, step: int, grad_scale: float) -> Hashable:
        return _Step(spec, options_of(group), grad_scale)

    def apply(self, frozen: Hashable, tile: Tile, start: int, stop: int, at: TileBytes, native: kernels.Native) -> None:
        assert isinstance(frozen, _Step)
        spec = frozen.spec
        record = self._records[tile][spec]
        master = self._formats.get_master(spec.numel, at.weights, at.states + record.master)
        parameter = nn.Parameter(master.view(spec.shape))
        gradient = tensor_at(at.grads, spec.numel, self._grad_dtype).to(torch.float32, copy=True)
        parameter.grad = gradient.mul_(frozen.grad_scale).view(spec.shape)
        resting = self.states(tile, at.states, spec)
        before: dict[str, Any] = {}
        if spec in self._loose:
            before = {
                **self._loose[spec],
                **{state.name: resting[state.name].view(state.shape) for state in record.states},
            }
        after = self._run(parameter, frozen.options, before)
        self._keep(spec, record, resting, after)
        self._formats.put_master(parameter.detach().reshape(-1), at.weights, at.states + record.master)

    def states(self, tile: Tile, address: int, spec: ParameterSpec) -> dict[str, torch.Tensor]:
        record = self._records[tile].get(spec)
        if record is None:
            return {}
        return {
            state.name: tensor_at(address + state.offset, state.shape.numel(), state.dtype) for state in record.states
        }

    def put_states(self, tile: Tile, address: int, spec: ParameterSpec, states: Mapping[str, Any], first: int) -> None:
        for name, view in self.states(tile, address, spec).items():  # a tile has all of the parameter
            view.copy_(torch.as_tensor(states[name]).reshape(-1))

    def names(self, spec: ParameterSpec) -> tuple[str, ...]:
        return tuple(self._schema(spec))

    def shape(self, spec: ParameterSpec, name: str) -> torch.Size:
        return self._schema(spec)[name][0]

    def shapes_like(self, spec: ParameterSpec, states: Mapping[str, Any]) -> dict[str, torch.Size]:
        return {name: shape for name, (shape, _) in self._schema(spec).items()}

    def loose_states(self, spec: ParameterSpec, step: int) -> dict[str, Any]:
        return dict(self._loose.get(spec, {}))

    def set_loose_states(self, spec: ParameterSpec, states: dict[str, Any]) -> int:
        if states:
            self._loose[spec] = copy.deepcopy(states)
        else:  # as before the first step, which makes them all anew
            self._loose.pop(spec, None)
        return int(states.get("step", 1))

    def _lay_out(self, spec: ParameterSpec, offset: int) -> tuple[_Record, int]:
        """The parameter's record when it begins at ``offset`` of a tile, and where the record ends."""
        master = offset
        offset = _align(offset + spec.numel * self._formats.master)
        states = []
        for name, (shape, dtype) in self._schema(spec).items():
            states.append(_State(name, offset, shape, dtype))
            offset = _align(offset + shape.numel() * dtype.itemsize)
        return _Record(spec, master, tuple(states)), offset

    def _schema(self, spec: ParameterSpec) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The states of a parameter of this shape, seen in one step on a stand-in."""
        group = self._group_of.get(spec)
        if group is None or spec.numel == 0:  # in no group: it never takes a step
            return {}
        key = (spec.shape, group)
        if key not in self._schemas:
            stand_in = nn.Parameter(torch.zeros(spec.shape))
            stand_in.grad = torch.zeros(spec.shape)
            try:
                states = self._run(stand_in, self._groups[group], {})
            except Exception as error:
                raise ConfigError(
                    f"optimizer {self._name} cannot run one parameter at a time: a step on {spec.name} "
                    f"{tuple(spec.shape)} raised {type(error).__name__}: {error}"
                ) from error
            self._schemas[key] = {name: (v.shape, v.dtype) for name, v in states.items() if _rests_in_tile(v)}
        return self._schemas[key]

    def _run(self, parameter: nn.Parameter, options: Group, states: dict[str, Any]) -> dict[str, Any]:
        """One step of the optimizer on this parameter alone; its states afterwards."""
        optimizer = self._optimizer
        optimizer.param_groups = [{**options, "params": [parameter]}]
        optimizer.state = defaultdict(dict)
        if states:
            optimizer.state[parameter] = states
        try:
            optimizer.step()
            return dict(optimizer.state[parameter])
        finally:
            optimizer.param_groups, optimizer.state = [], defaultdict(dict)

    def _keep(
        self, spec: ParameterSpec, record: _Record, resting: dict[str, torch.Tensor], states: dict[str, Any]
    ) -> None:
        """Bring the states back to where they rest."""
        kept = {name: (value.shape, value.dtype) for name, value in states.items() if _rests_in_tile(value)}
        expected = {state.name: (state.shape, state.dtype) for state in record.states}
        if kept != expected:
            raise OffloadError(
                f"optimizer {self._name} changed its states of {spec.name}: room was reserved for "
                f"{_describe(expected)}, now there are {_describe(kept)}. States that come later cannot be kept."
            )
        for name, tensor in resting.items():
            if states[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(states[name].detach().reshape(-1))
        self._loose[spec] = {name: value for name, value in states.items() if name not in kept}


def _rests_in_tile(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _describe(states: dict[str, tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{name} {tuple(shape)} {dtype}" for name, (shape, dtype) in states.items()) or "none"


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
