"""The birth of a model: the values that its parameters and buffers begin with, whoever has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from offload.birth import hugging_face
from offload.birth.initialise import forget, initialise, initialise_missing, sites_of, tensor_of
from offload.birth.origin import Origin
from offload.birth.stored import origins_in
from offload.birth.weights_file import Weights
from offload.memory import trim_heap
from offload.units import ParameterSpec, Site, UnitSpec


class Birth:
    """Gives values one at a time: the model is never whole in memory. Close it at the end."""

    def __init__(self, model: nn.Module, weights: Path | None) -> None:
        """``weights`` are files to read. What is on the meta device and not there is left to the model's initialisers.

        Raises ``ConfigError``, and ``WeightsError`` for files that do not fit. The model has not changed then.
        """
        self._model = model
        self._weights = None if weights is None else Weights(weights)
        self._origins: Mapping[Site, Origin] = {}
        self._read: frozenset[Site] = frozenset()
        """Those that come from ``weights``."""
        self._given: set[Site] = set()
        """Sites that ``value`` was asked for, and those of the same tensors."""
        try:
            self._origins = self._find_origins(model)
        except BaseException:
            self.close()
            raise

    def value(self, spec: ParameterSpec) -> torch.Tensor:
        """The parameter's value, or the piece's, in its shape. May be the model's own tensor."""
        self._given.update(spec.owners)
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

    def fill_rest(self) -> None:
        """Put into the model what nobody has asked for: buffers, and parameters that the engine does not hold."""
        made: dict[int, torch.Tensor] = {}
        for site in [site for site in self._origins if site not in self._given]:
            tensor = tensor_of(site)
            if id(tensor) not in made:
                made[id(tensor)] = _filled(tensor, self._origins[site].whole())
            tensors: dict[str, torch.Tensor | None] = (
                site.module._parameters if site.name in site.module._parameters else site.module._buffers  # type: ignore[assignment]
            )
            tensors[site.name] = made[id(tensor)]
        forget(self._model)

    def close(self) -> None:
        """Close the files. Nothing more can be asked for."""
        self._origins = {}
        if self._weights is not None:
            self._weights.close()

    def _find_origins(self, model: nn.Module) -> Mapping[Site, Origin]:
        origins = {} if self._weights is None else origins_in(self._weights, model)
        self._read = frozenset(origins)
        rest = {site for site in sites_of(model) if site not in origins and tensor_of(site).device.type == "meta"}
        if self._weights is not None and hugging_face.is_pretrained(model):
            return {**origins, **initialise_missing(model, rest)}
        return {**origins, **initialise(model, rest)}


@torch.no_grad()
def _filled(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The tensor with this value; one on the meta device gives its place to another."""
    if tensor.device.type != "meta":
        return tensor.copy_(value)
    value = value.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
