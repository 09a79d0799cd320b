"""Weights for others: a model in an engine, or a checkpoint, becomes safetensors as ``transformers`` writes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.checkpoint import hugging_face
from offload.checkpoint.native.saved_weights import SavedWeights
from offload.checkpoint.publish import Unfinished, sync_file
from offload.checkpoint.safetensors.model_weights import ModelWeights
from offload.checkpoint.safetensors.writer import SafetensorsWriter
from offload.checkpoint.tensors import Entry, Part, as_dtype, parts_of
from offload.errors import ConfigError
from offload.model.handle import Handle
from offload.option_values import Bytes, parse_bytes

MAX_SHARD_BYTES = "5GB"


def save_model(
    model: nn.Module,
    weights: ModelWeights,
    path: str | os.PathLike[str],
    dtype: str,
    max_shard_bytes: Bytes | str,
) -> None:
    """See ``OffloadEngine.save_model``."""
    torch_dtype = as_dtype(dtype)
    shard_bytes = as_shard_bytes(max_shard_bytes)
    state_dict = model.state_dict(keep_vars=True)  # handles, and no values
    is_adapter = hugging_face.is_peft_model(model)
    if is_adapter:
        state_dict = hugging_face.adapter_of(model, state_dict)
    for name in hugging_face.not_saved(model):
        state_dict.pop(name, None)
    kept, tied = _each_once(state_dict, hugging_face.tied_to_others(model))
    parts = weights.parts(kept, torch_dtype)
    if not weights.writes:
        return
    entries = weights.entries(kept, torch_dtype)
    with contextlib.closing(parts), Unfinished(path) as unfinished:
        if is_adapter:
            hugging_face.write_adapter_config(model, unfinished.folder)
            _write(unfinished, entries, parts, 1 << 63, tied, "adapter_model")  # peft reads one file
            return
        if hugging_face.is_transformers_model(model):
            hugging_face.write_configs(model, unfinished.folder, torch_dtype)
        _write(unfinished, entries, parts, shard_bytes, tied, "model")


def export_safetensors(
    weights: SavedWeights, path: str | os.PathLike[str], dtype: str | None, max_shard_bytes: Bytes | str
) -> Sequence[Entry]:
    """Write the weights of a checkpoint, and the model's config if it has one; which tensors these are. As
    ``save_model``, without what only the model's class knows: other names of tied weights."""
    torch_dtype = as_dtype(dtype or weights.description.precision)
    shard_bytes = as_shard_bytes(max_shard_bytes)
    entries = weights.entries(torch_dtype)
    with Unfinished(path) as unfinished:
        hugging_face.write_saved_configs(weights.run.get("configs", {}), unfinished.folder, torch_dtype)
        _write(unfinished, entries, _parts(weights, torch_dtype), shard_bytes, {}, "model")
    return entries


def _parts(weights: SavedWeights, dtype: torch.dtype) -> Generator[Part, None, None]:
    yield from parts_of(weights.tensors.portions(lambda spec: dtype), dtype)
    yield from (Part(name, 0, value) for name, value in weights.buffers.items())


def as_shard_bytes(value: Bytes | str) -> int:
    """Raises ``ConfigError`` for what is no number of bytes, and for none."""
    number = parse_bytes("max_shard_bytes", value)
    if number == "auto" or number < 1:
        raise ConfigError(f'max_shard_bytes: expected a number of bytes above 0, such as "5GB", got {value!r}')
    return number


def _write(
    unfinished: Unfinished,
    entries: Sequence[Entry],
    parts: Generator[Part, None, None],
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    stem: str,
) -> None:
    others = [entry.name for entry in unfinished.folder.iterdir()]
    with (
        contextlib.closing(parts),
        SafetensorsWriter(unfinished, entries, max_shard_bytes, metadata, stem=stem) as writer,
    ):
        for part in parts:
            writer.write(part)
        writer.finish()
    for name in others:
        sync_file(unfinished.folder / name)
    unfinished.publish(stem, others)


def _each_once(state_dict: Mapping[str, Any], tied_to_others: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict with each tensor under one name, and its other names: under the first one that the model does not
    tie to others when it is loaded."""
    names: dict[object, list[str]] = {}
    for name, value in state_dict.items():
        names.setdefault(_identity(name, value), []).append(name)
    name_of: dict[str, str] = {}
    for several in names.values():
        first = next((name for name in several if name not in tied_to_others), several[0])
        name_of.update(dict.fromkeys(several, first))
    kept = {name: value for name, value in state_dict.items() if name_of[name] == name}
    return kept, {name: other for name, other in name_of.items() if name != other}


def _identity(name: str, value: Any) -> object:
    """Equal for two names of one tensor."""
    if isinstance(value, Handle):
        return id(value) if isinstance(value, nn.Parameter) else name
    if isinstance(value, torch.Tensor) and value.numel():
        return value.data_ptr(), value.dtype, value.shape, value.stride(), str(value.device)
    return name
