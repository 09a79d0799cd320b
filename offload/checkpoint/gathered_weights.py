"""``ModelWeights`` of several ranks: each reads its shards, and the first one gets whole parameters and writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.checkpoint.model_weights import ModelWeights
from offload.checkpoint.safetensors_writer import Part
from offload.ranks.ranks import Ranks
from offload.tiers.home import UnitHomes
from offload.units import ParameterSpec, UnitSpec
from swapper import OffloadError


class GatheredModelWeights(ModelWeights):
    """All ranks go through all ``parts``, also those that write nothing, and when the writer has failed."""

    def __init__(
        self,
        shards: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        access: ExternalAccess,
        specs: Mapping[nn.Parameter, Sequence[ParameterSpec]],
        ranks: Ranks,
    ) -> None:
        super().__init__(shards, homes, access, specs)
        self._ranks = ranks
        self._rest: Generator[Part, None, None] | None = None
        self.writes = ranks.world.rank == 0

    def parts(self, state_dict: Mapping[str, Any], dtype: torch.dtype) -> Generator[Part, None, None]:
        self._rest = self._joined(state_dict, dtype)
        return self._given(self._rest)

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
        for rank, told in enumerate(self._ranks.all_gather_object("save_model", None if error is None else str(error))):
            if told is not None and error is None:
                raise OffloadError(f"rank {rank}: {told}")
        if error is not None:
            raise error

    @staticmethod
    def _given(rest: Generator[Part, None, None]) -> Generator[Part, None, None]:
        """What closes this does not close the other."""
        for part in rest:  # noqa: UP028
            yield part

    def _joined(self, state_dict: Mapping[str, Any], dtype: torch.dtype) -> Generator[Part, None, None]:
        places: dict[ParameterSpec, tuple[str, int]] = {}
        for name, value in state_dict.items():
            start = 0
            for spec in self._specs.get(value, ()) if isinstance(value, nn.Parameter) else ():
                places[spec] = name, start
                start += spec.whole_shape.numel()
        others = {name: value for name, value in state_dict.items() if not self._is_engines(value)}
        yield from super().parts(others, dtype)
        for unit in self._units:
            wanted = [spec for spec in unit.parameters if spec in places]
            own = {spec: torch.empty(spec.numel, dtype=dtype) for spec in wanted}
            by_name = {spec.name: spec for spec in wanted}
            for name, start, values in self.parts_of(unit, {spec: (spec.name, 0) for spec in wanted}, dtype):
                own[by_name[name]][start : start + values.numel()] = values
            for spec, values in own.items():
                yield Part(*places[spec], self._ranks.collectives.join(f"saving {spec.name}", values))

    def _is_engines(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) and value in self._specs
