"""The birth of a model: the values that its parameters and buffers begin with, whoever has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from offload.birth import adapters, hugging_face
from offload.birth.initialise import (
    forget,
    give,
    initialise,
    initialise_missing,
    recorded,
    sites_of,
    tensor_of,
    without_value,
)
from offload.birth.origin import Origin
from offload.birth.stored import origins_in
from offload.birth.weights import Weights
from offload.memory import trim_heap
from offload.quantised import QuantisedWeight
from offload.quantised.linear_4bit import weights_of_layers
from offload.units import Packing, ParameterSpec, Site, UnitSpec
from swapper import FilePart


class Birth:
    """Gives values one at a time: the model is never whole in memory. Close it at the end."""

    def __init__(self, model: nn.Module, weights: Path | None, dtype: torch.dtype) -> None:
        """``weights`` are files to read, ``dtype`` is that of the engine's weights. What is on the meta device and not
        in the files is left to the model's initialisers: see ``begin``.

        Raises ``ConfigError``, and ``WeightsError`` for files that do not fit. The model has not changed then.
        """
        self._model = model
        self._weights = None if weights is None else Weights(weights)
        self._origins: Mapping[Site, Origin] = {}
        self._replaced: dict[Site, tuple[nn.Parameter, nn.Parameter | None]] = {}
        """Parameters that stand for quantised weights of the files or of layers, and those in whose places they are."""
        if self._weights is not None:
            try:
                found = origins_in(self._weights, model)
            except BaseException:
                self.close()
                raise
            self._origins = found.origins
            self._quantise(found.quantised)
        else:
            layers = weights_of_layers(model, dtype)
            self._quantise({Site(layer, "weight"): parameter for layer, parameter in layers.items()})
        self._read = frozenset(self._origins)
        """Those that come from ``weights``."""

    def begin(self) -> None:
        """Find where everything else comes from: random numbers are drawn now. Raises ``ConfigError``."""
        self._origins = {**self._origins, **self._find_rest(self._model)}

    def in_place(self, unit: UnitSpec, dtype: torch.dtype) -> UnitSpec:
        """The unit, or a rank's shard of one, which knows where its frozen weights lie in the files, if all of them lie
        there in this dtype as they are."""
        if not any(map(self.is_read, _frozen(unit))) or self.why_copied(unit, dtype) is not None:
            return unit
        parts: list[FilePart] = []
        for spec in _frozen(unit):
            origin = self._origins[spec.owners[0]]
            for begin, end, at in spec.places(dtype):
                base = spec.offset * dtype.itemsize + at
                found = origin.parts_within(begin, end)
                parts += [replace(part, offset=part.offset + base) for part in found]
        return replace(unit, in_files=tuple(parts))

    def why_copied(self, unit: UnitSpec, dtype: torch.dtype) -> str | None:
        """Say why the unit's frozen weights cannot be read in this dtype where they lie in the files; None if they can,
        or if there are none in the files."""
        if not any(map(self.is_read, _frozen(unit))):
            return None
        for spec in _frozen(unit):
            origin = self._origins.get(spec.owners[0])
            if origin is None or not self.is_read(spec):
                return f"{spec.name} is not in the files"
            if not origin.parts:
                return f"{spec.name} {origin.made}"
            if origin.dtype != dtype:
                return f"{spec.name} is {origin.dtype} in the files, and {dtype} in the engine"
        return None

    @property
    def headers(self) -> list[tuple[int, int]]:
        """Bytes and checksum of the header of each weights file. Equal for copies."""
        files = () if self._weights is None else self._weights.files
        return sorted((file.read_only.nbytes, file.read_only.header) for file in files)

    def value(self, spec: ParameterSpec) -> torch.Tensor:
        """The parameter's value, or the piece's, in its shape. May be the model's own tensor."""
        origin = self._origins.get(spec.owners[0])
        if origin is None:
            return spec.value()
        return origin.whole() if spec.piece is None else origin.rows(spec.piece.start, spec.piece.stop)

    def is_read(self, spec: ParameterSpec) -> bool:
        """The value comes from a file."""
        return spec.owners[0] in self._read

    def shown(self, units: Sequence[UnitSpec]) -> Iterator[UnitSpec]:
        """The units, under a progress bar if there is something to read or make, and somebody who sees it."""
        with tqdm(
            total=sum(unit.numel for unit in units), unit_scale=True, disable=None if self._origins else True
        ) as bar:
            bar.set_description("Weights")
            for unit in units:
                yield unit
                bar.update(unit.numel)
                if self._origins:
                    trim_heap()

    def fill_rest(self, units: Sequence[UnitSpec]) -> None:
        """Put into the model what is in no unit: buffers, and parameters that the engine does not hold."""
        held = {site for unit in units for spec in unit.parameters for site in spec.owners}
        made: dict[int, torch.Tensor] = {}
        for site in [site for site in self._origins if site not in held]:
            tensor = tensor_of(site)
            if id(tensor) not in made:
                made[id(tensor)] = _filled(tensor, self._origins[site].whole())
            tensors: dict[str, torch.Tensor | None] = (
                site.module._parameters if site.name in site.module._parameters else site.module._buffers  # type: ignore[assignment]
            )
            tensors[site.name] = made[id(tensor)]
        forget(self._model)
        self._replaced = {}

    def close(self) -> None:
        """Close the files. Nothing more can be asked for. A model that no engine has taken over is as it was."""
        self._origins = {}
        for (module, name), (own, before) in self._replaced.items():
            if module._parameters.get(name) is own:
                module._parameters[name] = before
        if self._weights is not None:
            self._weights.close()

    def _quantise(self, parameters: Mapping[Site, nn.Parameter]) -> None:
        for site, parameter in parameters.items():
            self._replaced[site] = parameter, site.module._parameters[site.name]
            site.module._parameters[site.name] = parameter

    def _find_rest(self, model: nn.Module) -> Mapping[Site, Origin]:
        rest = {site for site in sites_of(model) if site not in self._read and tensor_of(site).device.type == "meta"}
        if self._weights is None:
            return initialise(model, rest)
        base = adapters.without_adapters(model)
        of_adapters = recorded(model, rest) if base is not model else {}
        rest -= of_adapters.keys()
        missing = initialise_missing if hugging_face.is_pretrained(base) else initialise
        found = {**of_adapters, **missing(model, rest)}
        if base is not model:
            self._compute_adapters(base, {**self._origins, **found})
        return found

    def _compute_adapters(self, base: nn.Module, origins: Mapping[Site, Origin]) -> None:
        """Have what adapters begin with computed from the values that the weights of ``base`` have. Raises
        ``ConfigError`` where it is not known how."""
        sites = set(adapters.sites_by_name(base).values()) & origins.keys()
        give(self._model, (self._with_numbers(site, origins[site]) for site in sites))
        computed = {site: what for what, site in adapters.computed(base)}
        for site in without_value(self._model, computed):
            raise adapters.without_value(computed[site])

    def _with_numbers(self, site: Site, origin: Origin) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """The tensor that the model had there at first, and its value as the model computes with it."""
        own, before = self._replaced.get(site, (None, None))
        if own is None or before is None:
            return tensor_of(site), origin.whole
        return before, partial(_dequantised, Packing(own.detach()), origin)


def _frozen(unit: UnitSpec) -> list[ParameterSpec]:
    """Parameters of the unit that are not trained."""
    return [spec for spec in unit.parameters if not spec.trainable and spec.numel]


def _dequantised(packing: Packing, origin: Origin) -> torch.Tensor:
    value = packing.over(origin.whole())
    assert isinstance(value, QuantisedWeight)
    return value.dequantize()


@torch.no_grad()
def _filled(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The tensor with this value; one on the meta device gives its place to another."""
    if tensor.device.type != "meta":
        return tensor.copy_(value)
    value = value.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
