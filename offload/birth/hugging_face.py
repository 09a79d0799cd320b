"""Knowledge of models of ``transformers``: how they are built, initialised, and named in files.

``transformers`` is imported only by those who use it: a model of it cannot exist before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from offload.birth.stacked import stacked
from offload.birth.stored_quantised import StoredQuantised
from offload.birth.weights_file import StackedTensor, StoredTensor
from offload.errors import ConfigError, WeightsError
from offload.units import Site

_NAMES_SHOWN = 10


def is_pretrained(module: nn.Module) -> bool:
    """It is a ``transformers.PreTrainedModel``."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def build_again(model: Any, wanted: Set[Site]) -> dict[Site, torch.Tensor]:
    """The tensors at the wanted sites as the model's class makes them from its config. To be recorded.

    On the meta device ``transformers`` skips its initialisers, silently. Raises ``ConfigError`` for tensors that the
    class does not make.
    """
    config = copy.deepcopy(model.config)
    twin = type(model)._from_config(config, dtype=model.dtype)
    made = dict((*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False)))
    found: dict[Site, torch.Tensor] = {}
    strange: list[str] = []
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full_name = f"{prefix}.{name}" if prefix else name
            if Site(module, name) not in wanted:
                continue
            other = made.get(full_name)
            if other is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
                strange.append(full_name)
            else:
                found[Site(module, name)] = other
    if strange:
        raise ConfigError(
            f"{type(model).__name__} has {listed(strange)} on the meta device, and does not make it from its config: "
            "it was changed after it was built. Build and change it in one function, by offload.deferred_init(build), "
            "give its weights (weights=), or build it on the CPU."
        )
    return found


def initialise_missing(model: Any, loaded: Iterable[torch.Tensor]) -> None:
    """Run the model's initialisers on what is not ``loaded``, as ``from_pretrained`` does. To be recorded."""
    for tensor in loaded:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


@dataclass(frozen=True)
class Renamed:
    """The tensors of weights files by the names that the model has for them."""

    found: Mapping[str, StoredTensor | StackedTensor | StoredQuantised | Converted]
    unexpected: list[str]
    used: list[Any] | None
    """The conversions of ``transformers`` that were used: it undoes them when the model is saved. None: those that it
    has for the model."""


def renamed(
    model: Any, stored: Mapping[str, StoredTensor | StoredQuantised], dtypes: Mapping[str, torch.dtype]
) -> Renamed:
    """Find the model's names for what is stored, by the mappings that ``from_pretrained`` has for its class.

    ``dtypes`` are those of the model's tensors. Raises ``ConfigError`` where this release of ``transformers`` does it
    in another way.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError as error:
        raise ConfigError(
            f"this release of transformers maps the names of weights in a way that is not known here ({error}). Load "
            "the model in memory (from_pretrained) and make the engine of that."
        ) from None
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own = dict.fromkeys(dtypes, True)
    prefix = model.base_model_prefix
    found: dict[str, StoredTensor | StackedTensor | StoredQuantised | Converted] = {}
    sources: dict[str, list[_Source]] = {}
    unexpected: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        new_name, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if new_name not in own and name in own:
            new_name, pattern = rename_source_key(name, [], [], prefix, own)
        if new_name not in own:
            unexpected.append(name)
        elif pattern is None:
            found[new_name] = stored[name]
        else:
            sources.setdefault(new_name, []).append(_Source(pattern, stored[name], dtypes[new_name]))
    for first, several in sources.items():
        conversion = _Conversion(model, converter_of[several[0].pattern], first, several)
        for name, shape in conversion.shapes().items():
            if name in own:
                found[name] = conversion.stacked(name, shape) or Converted(conversion, name, shape)
            else:
                unexpected.append(name)
    return Renamed(found, unexpected, [entry for entry in conversions if entry.was_used()])


class Conversion(Protocol):
    """Makes weights as the model has them."""

    def result(self, name: str, *, keeps: bool = False) -> torch.Tensor:
        """The weight of this name. ``keeps``: it will be asked for again."""
        ...


@dataclass(frozen=True)
class _Source:
    """A tensor that a conversion takes in, in the place of ``pattern``."""

    pattern: str
    stored: StoredTensor | StoredQuantised
    dtype: torch.dtype


@dataclass
class _Conversion:
    """Makes weights as the model has them of several tensors, such as experts that were stored one by one. ``first`` is
    the name of its first result."""

    model: Any
    converter: Any
    first: str
    sources: list[_Source]

    def __post_init__(self) -> None:
        self._results: dict[str, torch.Tensor] = {}
        self._waiting: set[str] = set()

    def shapes(self) -> dict[str, torch.Size]:
        """The names and shapes of what it makes. Reads nothing."""
        try:
            results = self._run(lambda source: torch.empty(source.stored.shape, dtype=source.dtype, device="meta"))
        except Exception as error:
            names = listed([source.stored.name for source in self.sources])
            raise WeightsError(f"{names} cannot be made into {self.first} of the model: {error}") from error
        self._waiting = set(results)
        return {name: value.shape for name, value in results.items()}

    def stacked(self, name: str, shape: torch.Size) -> StackedTensor | StoredQuantised | None:
        """The sources as one tensor, if all that it does with them is to put one behind the other."""
        patterns = self.converter.source_patterns
        columns = [[source.stored for source in self.sources if source.pattern == pattern] for pattern in patterns]
        return stacked(name, shape, self.converter.operations, columns)

    def result(self, name: str, *, keeps: bool = False) -> torch.Tensor:
        """Makes all of them, and keeps those that have not been asked for. ``keeps``: this one will be again."""
        if name not in self._results:
            self._results = self._run(lambda source: source.stored.whole(source.dtype))
        value = self._results[name]
        if not keeps:
            self._waiting.discard(name)
        if not self._waiting:
            self._results = {}
        return value

    def _run(self, read: Callable[[_Source], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for source in self.sources:
            converter.add_tensor(self.first, source.stored.name, source.pattern, lambda source=source: read(source))
        with torch.no_grad():
            results = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


@dataclass(frozen=True, eq=False)
class Converted:
    """One weight that a conversion makes."""

    conversion: Conversion
    name: str
    shape: torch.Size

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.conversion.result(self.name)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The rows ``[start, stop)``. The whole is kept until the last ones are asked for."""
        value = self.conversion.result(self.name, keeps=stop < self.shape[0])
        return value[start:stop]


def worth_saying(model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those names of missing and unexpected weights that the model's class does not declare harmless."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    adjust = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if adjust is not None:
        adjust(info)
    return sorted(info.missing_keys), sorted(info.unexpected_keys)


def listed(names: Sequence[str]) -> str:
    """The names as a message shows them: not too many."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
