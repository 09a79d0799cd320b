"""Content of a state dict of a model in an engine, read a few MiB at a time, unit by unit. Memory: as ``Elements``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.checkpoint.every_rank import tell
from offload.checkpoint.tensors import Entry, Part, Place, Tensors, parts_of
from offload.errors import ConfigError, warn
from offload.model.handle import Handle
from offload.model.packed_handle import PackedHandle
from offload.units import ParameterSpec, UnitSpec


@dataclass
class ModelWeights:
    """The values are those of the last step: its update must be over, and no other may begin meanwhile."""

    units: Sequence[UnitSpec]
    access: ExternalAccess
    specs: Mapping[nn.Parameter, Sequence[ParameterSpec]]

    @property
    def writes(self) -> bool:
        """This process is the one that writes them."""
        return self.access.ranks.rank == 0

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around all that is done with them."""
        return contextlib.nullcontext()

    def entries(self, state_dict: Mapping[str, Any], dtype: torch.dtype) -> list[Entry]:
        """Those of ``parts``. Parameters of the engine get ``dtype``, other tensors keep theirs."""
        found = []
        for name, value in state_dict.items():
            if isinstance(value, PackedHandle):
                raise ConfigError(
                    f"{name} is quantised, and ordinary numbers are written here: save engine.state_dict() by "
                    "torch.save, or what was trained over it as an adapter of peft"
                )
            if isinstance(value, torch.Tensor):
                own = dtype if isinstance(value, Handle) else value.dtype
                found.append(Entry(name, own, tuple(value.shape)))
            else:
                warn(f"{name} in the model's state dict is a {type(value).__name__}: only tensors are written")
        return found

    def parts(self, state_dict: Mapping[str, Any], dtype: torch.dtype) -> Generator[Part, None, None]:
        """The values of a state dict of handles and ordinary tensors, each under its name, in the order of units. The
        parts are in the same memory, one after the other."""
        places: dict[ParameterSpec, Place] = {}
        for name, value in state_dict.items():
            specs = self.specs.get(value, ()) if isinstance(value, nn.Parameter) else ()
            start = 0
            for spec in specs:
                places[spec] = Place(name, value.shape, start)
                start += spec.whole_shape.numel()
            if isinstance(value, torch.Tensor) and not specs:
                yield Part(name, 0, _on_host(value, dtype).reshape(-1))
        units = [unit for unit in self.units if any(spec in places for spec in unit.parameters)]
        yield from self._of_units(units, places, dtype)

    def _of_units(
        self, units: Sequence[UnitSpec], places: Mapping[ParameterSpec, Place], dtype: torch.dtype
    ) -> Generator[Part, None, None]:
        with self.access.elements() as elements:
            yield from parts_of(Tensors(elements, units, places).portions(lambda spec: dtype), dtype)


class GatheredModelWeights(ModelWeights):
    """Those of several ranks: each reads its shards, and the first one gets whole parameters and writes them.

    All ranks go through all ``parts``, also those that write nothing, and when the writer has failed.
    """

    _rest: Generator[Part, None, None] | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ends when the weights are written, on all ranks. Raises what the writer has failed with."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        for _ in self._rest or ():  # the others wait for this rank's shards
            pass
        tell(self.access.ranks, "save_model", error)
        if error is not None:
            raise error

    def parts(self, state_dict: Mapping[str, Any], dtype: torch.dtype) -> Generator[Part, None, None]:
        self._rest = rest = super().parts(state_dict, dtype)
        return (part for part in rest)  # what closes this does not close the other

    def _of_units(
        self, units: Sequence[UnitSpec], places: Mapping[ParameterSpec, Place], dtype: torch.dtype
    ) -> Generator[Part, None, None]:
        for unit in units:
            own = {spec.name: spec for spec in unit.parameters if spec in places}
            values = {name: torch.empty(spec.numel, dtype=dtype) for name, spec in own.items()}
            by_name = {spec: Place(spec.name, spec.shape, 0) for spec in own.values()}
            for part in super()._of_units([unit], by_name, dtype):
                values[part.name][part.start : part.start + part.values.numel()] = part.values
            for name, spec in own.items():
                whole = self.access.ranks.join(f"saving {name}", values[name])
                yield Part(places[spec].name, places[spec].first, whole)


def _on_host(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, Handle):  # a part of a parameter, which a hook of the model's has made
        return value.value_on_host().to(dtype)
    return value.detach().cpu()
