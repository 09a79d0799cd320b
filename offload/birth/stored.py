"""Weights from files: which tensor of a file is which of the model's, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from offload.birth import hugging_face
from offload.birth.adapters import sites_by_name, without_adapters
from offload.birth.gguf_names import renamed_gguf
from offload.birth.hugging_face import Converted, listed
from offload.birth.initialise import tensor_of
from offload.birth.origin import Origin
from offload.birth.stored_quantised import StoredQuantised, check_known, joined
from offload.birth.weights import Weights
from offload.birth.weights_file import StackedTensor, StoredTensor
from offload.errors import ConfigError, WeightsError, warn
from offload.units import Site

Item = StoredTensor | StackedTensor | StoredQuantised | Converted
"""The forms in which files hold one weight."""


class Stored(NamedTuple):
    """A model's tensors that the files have. ``quantised``: parameters in the place of those that are quantised
    there and frozen here."""

    origins: dict[Site, Origin]
    quantised: dict[Site, nn.Parameter]


def origins_in(weights: Weights, model: nn.Module) -> Stored:
    """The origin of each parameter and persistent buffer that the files have.

    Raises ``WeightsError``, in the words of ``load_state_dict``, for names that are missing or not expected and for
    other shapes: all of them in one. As in ``from_pretrained`` a model of ``transformers`` is only warned of names.
    Of a model of ``peft`` these are those of the model that the adapters were put into.
    Raises ``ConfigError`` where the files have several values for weights that the model ties, and for adapters that
    begin with values of the weights.
    """
    model = without_adapters(model)
    sites = sites_by_name(model)
    tensors = {name: tensor_of(site) for name, site in sites.items()}
    stored = joined(weights.tensors, weights.directory)
    found: Mapping[str, Item] = stored
    pretrained = hugging_face.is_pretrained(model)
    if pretrained:
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if weights.architecture is None:
            mapped = hugging_face.renamed(model, stored, dtypes)
        else:
            mapped = renamed_gguf(model, weights.architecture, weights.of_gguf, dtypes)
        found, unexpected = mapped.found, mapped.unexpected
        check_known(unexpected, weights.path)
        model._weight_conversions = mapped.used  # type: ignore[assignment]  # ``save_pretrained`` undoes them
    else:
        unexpected = [name for name in found if name not in sites]
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    present = [[name for name in names if name in found] for names in tied.values()]
    missing = [name for names in tied.values() for name in names if not any(other in found for other in names)]
    missing += [] if pretrained else _extra_states(model)
    mismatched = [
        f"size mismatch for {name}: copying a param with shape {found[name].shape} from checkpoint, the shape in "
        f"current model is {tensors[name].shape}."
        for names in present
        for name in names
        if found[name].shape != tensors[name].shape
    ]
    if mismatched or ((missing or unexpected) and not pretrained):
        raise WeightsError(_misfit(model, weights.path, missing, unexpected, mismatched))
    if pretrained:
        missing, unexpected = hugging_face.worth_saying(model, missing, unexpected)
        if weights.architecture is not None and missing and unexpected:
            raise WeightsError(_unnamed(weights.path, missing, unexpected))
    if missing or unexpected:
        warn(_partly(weights.path, missing, unexpected))
    for names in present:
        _check_tied(weights.path, names, found)
    origins: dict[Site, Origin] = {}
    quantised: dict[Site, nn.Parameter] = {}
    for names, group in zip(present, tied.values(), strict=True):
        if not names:
            continue
        item, tensor = found[names[0]], tensors[names[0]]
        if isinstance(item, StoredQuantised):
            item = item.ordinary(tensor.dtype)
        if isinstance(item, StoredQuantised) and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            origin = item.origin(tensor.dtype)
            parameter = nn.Parameter(item.over(tensor.dtype, "meta"), requires_grad=False)
            quantised.update((sites[name], parameter) for name in group)
        else:
            origin = _origin(item, tensor.dtype)
        origins.update((sites[name], origin) for name in group)
    return Stored(origins, quantised)


def _origin(item: Item, dtype: torch.dtype) -> Origin:
    """The origin that is read from files when it is needed, and cast to the dtype that the model has."""
    if isinstance(item, Converted):
        layout = "is put together from what the files have in another order, or in several types"
        return Origin(item.whole, item.rows, made=layout)
    if isinstance(item, StoredQuantised):  # which is trained
        return Origin(partial(item.whole, dtype), partial(item.rows, dtype=dtype))
    whole, rows = partial(item.whole, dtype), partial(item.rows, dtype=dtype)
    if torch.promote_types(item.dtype, dtype) != dtype:
        return Origin(whole, rows, item.dtype, made=f"is {item.dtype} in the files, which the model's {dtype} rounds")
    return Origin(whole, rows, item.dtype, tuple(item.in_files(0)))


def _extra_states(model: nn.Module) -> list[str]:
    """The names of states beside tensors, which these files cannot have."""
    return [
        f"{prefix}._extra_state" if prefix else "_extra_state"
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def _check_tied(path: Path, names: Sequence[str], found: Mapping[str, Item]) -> None:
    """Raise ``ConfigError`` if weights that are one in the model are several in the files, with different values."""
    items = [item for item in (found[name] for name in names) if isinstance(item, StoredTensor)]
    for other in items[1:]:
        first = items[0]
        if first.dtype != other.dtype or not all(map(torch.equal, first.parts(), other.parts())):
            raise ConfigError(
                f"the model ties {names[0]} and {', '.join(names[1:])} to one weight, and they differ in {path}. Build "
                "the model without that (transformers: tie_word_embeddings=False in its config)."
            )


def _misfit(model: nn.Module, path: Path, missing: list[str], unexpected: list[str], mismatched: Sequence[str]) -> str:
    lines = [f"the weights in {path} do not fit the model. Error(s) in loading state_dict for {type(model).__name__}:"]
    for kind, names in (("Unexpected", unexpected), ("Missing", missing)):
        if names:
            quoted = ", ".join(f'"{name}"' for name in names)
            lines.append(f"{kind} key(s) in state_dict: {quoted}.")
    return "\n\t".join([*lines, *mismatched])


def _unnamed(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    return (
        f"the weights in {path} are not known by all of their names: the model's {listed(missing)} are not there, and "
        f"nothing in the model is {listed(unexpected)}. This release of transformers does not map them: give the "
        "weights as safetensors."
    )


def _partly(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    parts = [f"the weights in {path} are not quite the model's"]
    if missing:
        parts.append(f"not there, and as the model initialises them: {listed(missing)}")
    if unexpected:
        parts.append(f"there, and not used: {listed(unexpected)}")
    return "; ".join(parts)
