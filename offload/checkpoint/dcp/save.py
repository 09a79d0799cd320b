"""Weights and optimizer states as a ``torch.distributed.checkpoint``: of a running engine, by any number of ranks, and
of a checkpoint, by one process without a process group.

An engine's has the names and the layout of ``torch.distributed.checkpoint.state_dict.get_state_dict``. A rank has a
range of a parameter's flat elements, or some of its tiles have: it writes these. Memory: as ``Elements``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.access import ExternalAccess
from offload.checkpoint.dcp.names import GROUPS, STATES, TreePath, fqn, names_of, place_of, refuse_others
from offload.checkpoint.dcp.writer import Planner, write
from offload.checkpoint.model_state import get_model_state
from offload.checkpoint.native.saved_weights import SavedWeights
from offload.checkpoint.run_state import RunState
from offload.checkpoint.tensors import Entry, Tensors, as_dtype
from offload.ranks.ranks import Ranks
from offload.units import ParameterSpec, UnitSpec


def save(path: Path, run: RunState, units: Sequence[UnitSpec], access: ExternalAccess) -> None:
    """Write weights, optimizer states and parameter groups to the directory ``path``; see ``writer.write`` for errors.
    What is trained is written in fp32, from the masters; what is frozen in the dtype of the weights. A tied weight
    takes its bytes once, and has all of its names.

    The last step's update must be over, and no other may begin meanwhile.
    """
    refuse_others(units)
    names, of_model, optimizer = names_of(run.model), get_model_state(run.model), run.of_optimizer()
    layout, ranks = access.layout, access.ranks
    places = {spec: place_of(spec) for unit in units for spec in unit.parameters}
    saved = {place.name for place in places.values()} | of_model["buffers"].keys()
    tied: dict[TreePath, TreePath] = {
        ("model", other): ("model", names[name][0]) for name in saved for other in names[name][1:]
    }
    places = {spec: place._replace(name=names[place.name][0]) for spec, place in places.items()}
    values: dict[TreePath, Any] = {}
    if ranks.rank == 0:
        in_model = {fqn(name): value for name, value in {**of_model["buffers"], **of_model["extra"]}.items()}
        name_of = {spec.name: place.name for spec, place in places.items()}
        values = _values(in_model, name_of, optimizer["states"], optimizer["groups"])

    def dtype_of(spec: ParameterSpec) -> torch.dtype:
        return torch.float32 if spec.trainable and layout.rule is not None else layout.dtype

    with access.elements() as elements:
        portions = Tensors(elements, units, places).portions(dtype_of, optimizer["states"])
        write(path, Planner(portions, values, tied), ranks)


def export(weights: SavedWeights, path: str | os.PathLike[str], dtype: str | None, *, states: bool) -> list[Entry]:
    """Write the weights of a checkpoint, and with ``states`` those of the optimizer; which tensors these are.

    Raises ``ConfigError`` for states that nothing but the optimizer's class can read, and for a directory with other
    things in it.
    """
    if states:
        weights.check_states()
    of_weights = as_dtype(dtype or weights.description.precision)
    name_of = {spec.name: place.name for spec, place in weights.tensors.places.items()}
    run = weights.run if states else {}
    of_states, groups = run.get("states", {}), run.get("groups", [])
    values = _values(weights.buffers, name_of, of_states, groups)
    planner = Planner(weights.tensors.portions(lambda spec: of_weights, of_states), values, {})
    write(Path(path).expanduser(), planner, Ranks.single())
    return list(planner.entries.values())


def _values(
    in_model: Mapping[str, Any],
    name_of: Mapping[str, str],
    states: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[TreePath, Any]:
    """Values that lie in no unit: buffers, extra states, steps, parameter groups. ``name_of``: parameters, by their
    specs' names."""
    values: dict[TreePath, Any] = {("model", name): value for name, value in in_model.items()}
    for spec, loose in states.items():
        for name in loose.keys() - {"steps"}:
            path = (*STATES, name_of[spec], name)
            values[path] = loose[name]
    if groups:
        values[GROUPS] = [
            {**group["options"], "params": list(dict.fromkeys(name_of[spec] for spec in group["parameters"]))}
            for group in groups
        ]
    return values
