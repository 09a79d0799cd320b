"""A running engine saved as a ``torch.distributed.checkpoint``, with names and layout of
``torch.distributed.checkpoint.state_dict.get_state_dict``, by any number of ranks.

A rank has a range of a parameter's flat elements, or some of its tiles have: it writes these, a few MiB at a time.
Memory: the weights of one unit and one tile where they are not resident, and a few MiB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.access import ExternalAccess
from offload.checkpoint.distributed_names import (
    GROUPS,
    STATES,
    common_elements,
    fqn,
    names_of,
    place_of,
    refuse_others,
    state_names,
    state_shape,
)
from offload.checkpoint.distributed_writer import Elements, Planner, TreePath, write
from offload.checkpoint.model_state import get_model_state
from offload.checkpoint.run_state import RunState
from offload.checkpoint.safetensors_writer import Entry
from offload.memory import tensor_at
from offload.optim.moments import read_moments, scale_name
from offload.ranks.ranks import Ranks
from offload.tiers.home import TileHomes, UnitHomes
from offload.units import ParameterSpec, UnitSpec


def save(
    path: Path,
    run: RunState,
    units: Sequence[UnitSpec],
    homes: Sequence[UnitHomes],
    access: ExternalAccess,
    ranks: Ranks,
) -> None:
    """Write weights, optimizer states and parameter groups to the directory ``path``; see ``distributed_writer.write``
    for errors. What is trained is written in fp32, from the masters; what is frozen in the dtype of the weights. A tied
    weight takes its bytes once, and has all of its names.

    The last step's update must be over, and no other may begin meanwhile.
    """
    refuse_others(units)
    names, of_model, optimizer = names_of(run.model), get_model_state(run.model), run.of_optimizer()
    saved = {place_of(spec).name for unit in units for spec in unit.parameters} | of_model["buffers"].keys()
    tied: dict[TreePath, TreePath] = {
        ("model", other): ("model", names[name][0]) for name in saved for other in names[name][1:]
    }
    values = _values(units, of_model, optimizer, names) if ranks.rank == 0 else {}
    with contextlib.closing(_OwnElements(units, homes, access)) as own:
        write(path, Planner(own.elements(names, optimizer["states"]), values, tied), ranks)


def _values(
    units: Sequence[UnitSpec],
    of_model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    names: Mapping[str, list[str]],
) -> dict[TreePath, Any]:
    """What lies in no unit: buffers, extra states, steps, parameter groups."""
    values: dict[TreePath, Any] = {
        ("model", fqn(name)): value for name, value in {**of_model["buffers"], **of_model["extra"]}.items()
    }
    name_of = {spec.name: names[place_of(spec).name][0] for unit in units for spec in unit.parameters}
    for name, states in optimizer["states"].items():
        for key in states.keys() - {"steps"}:
            path = (*STATES, name_of[name], key)
            values[path] = states[key]
    if optimizer["groups"]:
        values[GROUPS] = [
            {**group["options"], "params": list(dict.fromkeys(name_of[name] for name in group["parameters"]))}
            for group in optimizer["groups"]
        ]
    return values


class _OwnElements:
    """What this process has of weights and states. They are read where they rest, or where they were last brought to:
    the weights of one unit, and one tile."""

    def __init__(self, units: Sequence[UnitSpec], homes: Sequence[UnitHomes], access: ExternalAccess) -> None:
        self._units = units
        self._homes = homes
        self._access = access
        self._formats = access.layout.formats
        self._rule = access.layout.rule
        self._borrowed: dict[str, tuple[object, int, contextlib.ExitStack]] = {}
        """By kind: what was borrowed last, its address, and what gives it back."""

    def close(self) -> None:
        for _, _, held in self._borrowed.values():
            held.close()
        self._borrowed.clear()

    def elements(self, names: Mapping[str, list[str]], states: Mapping[str, Any]) -> Iterator[Elements]:
        """All of it, unit by unit and tile by tile. ``states`` has the names of specs that have taken a step."""
        for unit in self._units:
            for spec in unit.parameters:
                if not (spec.numel and spec.trainable and self._rule is not None):
                    yield self._weights(names, unit, spec, None, range(spec.offset, spec.offset + spec.numel))
            for homes in self._homes[unit.index].tiles:
                for spec in unit.trainable:
                    common = common_elements(spec, homes.tile)
                    if common:
                        yield self._weights(names, unit, spec, homes, common)
                    if common and spec.name in states:
                        yield from self._states(names, unit, spec, homes, common)

    def _weights(
        self, names: Mapping[str, list[str]], unit: UnitSpec, spec: ParameterSpec, homes: TileHomes | None, own: range
    ) -> Elements:
        place = place_of(spec)
        name, first = names[place.name][0], place.first + own.start - spec.offset
        dtype = self._access.layout.dtype if homes is None else torch.float32
        read = partial(self._read_weights, unit, homes, own.start - first)
        return Elements(("model", name), Entry(name, dtype, tuple(place.shape)), first, first + len(own), read)

    def _states(
        self, names: Mapping[str, list[str]], unit: UnitSpec, spec: ParameterSpec, homes: TileHomes, own: range
    ) -> Iterator[Elements]:
        rule, place = self._rule, place_of(spec)
        assert rule is not None
        dtypes = {part.state: part.dtype for part in rule.parts(homes.tile) if part.parameter == spec.name}
        of_moments = torch.bfloat16 if rule.identity["moments"] == "bf16" else torch.float32
        for name in state_names(rule, spec):
            shape = state_shape(rule, spec, name)
            first, numel = place.first + own.start - spec.offset, len(own)
            if shape != place.shape:  # the tile has all of it
                first, numel = 0, shape.numel()
            path = (*STATES, names[place.name][0], name)
            read = partial(self._read_state, spec, homes, name, first)
            yield Elements(path, Entry(name, dtypes.get(name, of_moments), tuple(shape)), first, first + numel, read)

    def _read_weights(
        self, unit: UnitSpec, homes: TileHomes | None, shift: int, first: int, target: torch.Tensor
    ) -> None:
        """``shift``: from an element of the parameter to that of the unit."""
        start, formats = first + shift, self._formats
        weights = self._borrow("weights", unit, self._access.weights(unit)) + start * formats.weights
        if homes is None:
            target.copy_(tensor_at(weights, target.numel(), self._access.layout.dtype))
            return
        master = 0
        if formats.master:
            assert self._rule is not None
            master = self._tile(homes) + self._rule.master_offset(homes.tile, start)
        formats.copy_master(target, weights, master)

    def _read_state(
        self, spec: ParameterSpec, homes: TileHomes, name: str, origin: int, first: int, target: torch.Tensor
    ) -> None:
        """``origin``: the first element of the state that the tile has."""
        assert self._rule is not None
        states = self._rule.states(homes.tile, self._tile(homes), spec)
        start, stop = first - origin, first - origin + target.numel()
        in_codes = scale_name(name) in states
        target.copy_(read_moments(name, states, start, stop) if in_codes else states[name][start:stop])

    def _tile(self, homes: TileHomes) -> int:
        return self._borrow("tile", homes, homes.states.borrow(change=False))

    def _borrow(self, kind: str, what: object, lender: contextlib.AbstractContextManager[int]) -> int:
        known = self._borrowed.get(kind)
        if known is not None and known[0] is what:
            return known[1]
        if known is not None:
            del self._borrowed[kind]
            known[2].close()
        with self._access.failure, contextlib.ExitStack() as held:
            address = held.enter_context(lender)
            self._borrowed[kind] = what, address, held.pop_all()
        return address
