"""Content of a checkpoint, as facts for programs and as text for people."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import aio_ext
from offload.checkpoint.hugging_face import CONFIG
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.opened import Opened, open_checkpoint, whole_checkpoints
from offload.optim.formats import master_bytes
from swapper import OffloadError, StorageError, StoreMissing

Facts = dict[str, Any]

_DEPTH_MAX = 32
"""Mappings in one another that are looked into."""

_NAMES_MAX = 8
"""Of longer mappings, people are shown so many names."""


def inspect(path: Path, *, verify: bool, check: Callable[[], None]) -> Facts:
    """The facts of one checkpoint. ``verify``: all of it was read, and ``damage`` says what is wrong.

    Raises what ``open_checkpoint`` raises.
    """
    with open_checkpoint(path, to_read=verify) as opened:
        facts = _facts(opened)
        if verify:
            facts["verified"], facts["damage"] = _verify(opened, check)
        return facts


def inspect_directory(directory: Path, *, verify: bool, check: Callable[[], None]) -> list[Facts]:
    """The facts of each checkpoint in a directory, the oldest step first. Raises ``StoreMissing`` if there is none."""
    found = []
    for folder, opened in whole_checkpoints(directory):
        if isinstance(opened, OffloadError):
            found.append({"path": str(folder), "damage": [str(opened)]})
        elif verify:
            found.append(inspect(folder, verify=True, check=check))
        else:
            found.append(_facts(opened))
    if not found:
        raise StoreMissing(
            f"there is no checkpoint in {directory}.", advice="Give the directory that save_checkpoint was given."
        )
    return sorted(found, key=lambda facts: facts.get("step", math.inf))


def latest_in(directory: Path) -> str | None:
    """The name of the checkpoint that is loaded if none is named."""
    with contextlib.suppress(OffloadError), open_checkpoint(directory, to_read=False) as opened:
        return opened.folder.name
    return None


def damage_of(facts: Facts | Sequence[Facts]) -> bool:
    """Something of it is damaged."""
    return any(item.get("damage") for item in ([facts] if isinstance(facts, dict) else facts))


def _facts(opened: Opened) -> Facts:
    description, run = opened.description, opened.description.run
    parameters = [parameter for unit in description.units for parameter in unit.parameters]
    optimizer = description.optimizer
    disk_bytes, num_links = _on_disk(opened.folder)
    random = run.get("random") or {}
    return {
        "path": str(opened.folder),
        "kind": "durable run" if opened.is_run else "checkpoint",
        "in_use_by": opened.in_use_by,
        "model": run.get("configs", {}).get(CONFIG, {}).get("architectures"),
        "step": run["step"],
        "generation": opened.generation.generation,
        "precision": description.precision,
        "optimizer": None if optimizer is None else optimizer["optimizer"],
        "moments": None if optimizer is None else optimizer["moments"],
        "master": None if optimizer is None else optimizer.get("master", "fp32"),
        "states": [] if optimizer is None else _states(description),
        "learning_rates": [float(group["options"]["lr"]) for group in run["groups"] if "lr" in group["options"]],
        "loss_scale": run["loss_scale"][0] if run.get("loss_scale") else None,
        "parameters": sum(parameter.numel for parameter in parameters),
        "trained_parameters": sum(parameter.numel for parameter in parameters if parameter.trainable),
        "tensors": len({parameter.whole or parameter.name for parameter in parameters}),
        "buffers": len(run.get("buffers", {})),
        "units": len({unit.name for unit in description.units}),
        "ranks": len(opened.parts),
        "bytes": _bytes(opened),
        "disk_bytes": disk_bytes,
        "other_links": num_links - 1,
        "accumulated_gradients": len(run["gradients"]),
        "backwards_since_step": run["num_backwards"],
        "random_states": list(random),
        "objects": [_kinds(state) for state in run["objects"]],
        "client_state": _kinds(run["client_state"]),
    }


def _states(description: Description) -> list[str]:
    optimizer = description.optimizer or {}
    parts = (part.state for unit in description.units for tile in unit.tiles for part in tile.parts if part.state)
    return list(optimizer.get("states") or dict.fromkeys(parts))


def _bytes(opened: Opened) -> dict[str, int]:
    """By kind, as they lie in the records, padding included."""
    description, generation = opened.description, opened.generation
    width = master_bytes(description.precision, description.optimizer)
    total: Counter[str] = Counter()
    for unit in description.units:
        total["weights"] += sum(generation.extents[index].nbytes for index in unit.weights)
        for tile in unit.tiles:
            master = (tile.stop - tile.start) * width
            if tile.parts:
                master = sum(math.prod(part.shape) * width for part in tile.parts if not part.state)
            total["masters"] += master
            total["moments"] += tile.nbytes - master
        if unit.gradients is not None and generation.holds(generation.extents[unit.gradients]):
            total["gradients"] += generation.extents[unit.gradients].nbytes
    total["buffers"] += sum(value.nbytes for value in description.run.get("buffers", {}).values())
    total["description"] += len(generation.metadata)
    return dict(total)


def _on_disk(folder: Path) -> tuple[int, int]:
    """Bytes that its files take, and how many names the data have."""
    total, links = 0, 1
    for entry in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            status = entry.lstat()
            total += status.st_blocks * 512
            if entry.name.startswith("data."):
                links = max(links, status.st_nlink)
    return total, links


def _kinds(value: Any, depth: int = _DEPTH_MAX) -> Any:
    """A state with the kinds of its values in their place; of lists the number of their elements."""
    if isinstance(value, Mapping) and depth:
        return {str(name): _kinds(item, depth - 1) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return "nothing" if value is None else type(value).__name__


def _verify(opened: Opened, check: Callable[[], None]) -> tuple[dict[str, int], list[str]]:
    """Read every record; how many and how large they were, and what is wrong."""
    generation = opened.generation
    held = [extent for extent in generation.extents if generation.holds(extent)]
    names, damage, read_bytes = _names_of_extents(opened.description), [], 0
    memory = aio_ext.Memory(max((extent.nbytes for extent in held), default=4096) or 4096)
    try:
        for extent in held:
            check()
            try:
                generation.read(extent, memory.address, extent.nbytes).wait()
                read_bytes += extent.nbytes
            except StorageError as error:
                damage.append(f"{names.get(extent.index, 'a record')}: {error.args[0]}")
    finally:
        memory.close()
    return {"records": len(held), "bytes": read_bytes}, damage


def _names_of_extents(description: Description) -> dict[int, str]:
    names = {}
    for unit in description.units:
        names.update(dict.fromkeys(unit.weights, f"weights of unit {unit.name}"))
        names.update({tile.extent: f"states of unit {unit.name}, from element {tile.start} on" for tile in unit.tiles})
        if unit.gradients is not None:
            names[unit.gradients] = f"gradients of unit {unit.name}"
    return names


# For people.


def text_of(facts: Facts) -> str:
    """One checkpoint, a line for each fact."""
    lines = [facts["path"]]
    for name, value in _rows(facts):
        lines += textwrap.wrap(
            value, 118, initial_indent=f"  {name:<16}", subsequent_indent=" " * 18, break_long_words=False
        )
    return "\n".join(lines)


def table_of(directory: Path, found: Sequence[Facts], latest: str | None) -> str:
    """Several checkpoints, a line for each."""
    rows = [("TAG", "STEP", "PRECISION", "OPTIMIZER", "PARAMETERS", "ON DISK", "")]
    for facts in found:
        name = Path(facts["path"]).name
        if "step" not in facts:
            rows.append((name, "-", "-", "-", "-", "-", "damaged"))
            continue
        notes = ["latest"] if name == latest else []
        notes += ["durable run"] if facts["kind"] != "checkpoint" else []
        notes += ["in use"] if facts["in_use_by"] else []
        notes += ["data shared"] if facts["other_links"] else []
        notes += ["damaged"] if facts.get("damage") else ["whole"] if "verified" in facts else []
        optimizer = (facts["optimizer"] or "none").rpartition(".")[2]
        size = short_bytes(facts["disk_bytes"])
        number = f"{facts['parameters']:,}"
        rows.append((name, str(facts["step"]), facts["precision"], optimizer, number, size, ", ".join(notes)))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    right = (1, 4, 5)
    lines = [str(directory)]
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]  # noqa: B905
        lines.append(("  " + "  ".join((*cells, row[6]))).rstrip())
    for facts in found:
        for line in facts.get("damage", ()):
            lines.append(f"{Path(facts['path']).name}: {line}")
    return "\n".join(lines)


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "kind", facts["kind"] + (f", in use by {facts['in_use_by']}" if facts["in_use_by"] else "")
    if facts["model"]:
        yield "model", ", ".join(facts["model"])
    yield "step", f"{facts['step']:,}"
    yield "generation", f"{facts['generation']:,}"
    scale = "" if facts["loss_scale"] is None else f", loss scale {facts['loss_scale']:g}"
    yield "precision", facts["precision"] + scale
    if facts["optimizer"] is None:
        yield "optimizer", "none (it was not trained)"
    else:
        yield "optimizer", facts["optimizer"] + (f" ({', '.join(facts['states'])})" if facts["states"] else "")
        yield "moments", facts["moments"]
        if facts["master"] != "fp32":
            yield "master", f"the weights, in {facts['master']}"
        rates = Counter(f"{rate:g}" for rate in facts["learning_rates"])
        yield "learning rate", ", ".join(f"{r} ({n} groups)" if n > 1 else r for r, n in rates.items()) or "none"
    trained = facts["trained_parameters"]
    frozen = "" if trained == facts["parameters"] else f", {trained:,} of them trained"
    yield "parameters", f"{facts['parameters']:,} in {_count(facts['tensors'], 'tensor')}{frozen}"
    yield "units", f"{facts['units']:,}" + (f", in parts of {facts['ranks']} ranks" if facts["ranks"] > 1 else "")
    for kind, nbytes in facts["bytes"].items():
        if nbytes:
            yield kind, short_bytes(nbytes)
    links = facts["other_links"]
    shared = f", shared with {_count(links, 'other name')} of the same file (hard links)" if links else ""
    yield "on disk", short_bytes(facts["disk_bytes"]) + shared
    gradients = "none"
    if facts["accumulated_gradients"]:
        gradients = f"of {_count(facts['accumulated_gradients'], 'parameter')}, from "
        gradients += _count(facts["backwards_since_step"], "backward") + " since the step"
    yield "accumulated", gradients
    yield "random states", ", ".join(facts["random_states"]) or "none"
    for index, kinds in enumerate(facts["objects"]):
        yield f"object {index}", _shown(kinds)
    yield "client_state", _shown(facts["client_state"])
    if "verified" in facts:
        verified = facts["verified"]
        yield (
            "verified",
            f"{short_bytes(verified['bytes'])} in {_count(verified['records'], 'record')}"
            + ("" if facts["damage"] else ": all of it is whole"),
        )
    for line in facts.get("damage", ()):
        yield "DAMAGE", line


def _shown(kinds: Any) -> str:
    if not isinstance(kinds, dict):
        return str(kinds)
    items = [f"{name}: {'{...}' if isinstance(kind, dict) else kind}" for name, kind in kinds.items()]
    more = len(items) - _NAMES_MAX
    return "{" + ", ".join(items[:_NAMES_MAX]) + (f", and {more} more" if more > 0 else "") + "}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def short_bytes(nbytes: int) -> str:
    """As people say it: ``216.8 MiB``."""
    power = min((max(nbytes, 1).bit_length() - 1) // 10, 4)
    return f"{nbytes:,} bytes" if power == 0 else f"{nbytes / (1 << 10 * power):,.1f} {' KMGT'[power]}iB"
