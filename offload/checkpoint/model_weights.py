"""What a state dict of a model in an engine holds, read a few MiB at a time, unit by unit.

Memory: the weights of one unit and one tile where they are not resident, and a few MiB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.checkpoint.safetensors_writer import Entry, Part
from offload.errors import ConfigError, warn
from offload.memory import passing_tensor, tensor_at
from offload.model.handle import Handle
from offload.model.packed_handle import PackedHandle
from offload.tiers.home import UnitHomes
from offload.units import ParameterSpec, UnitSpec

_PART_NUMEL = 1 << 20


class ModelWeights:
    """The values are those of the last step: its update must be over, and no other may begin meanwhile."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        access: ExternalAccess,
        specs: Mapping[nn.Parameter, Sequence[ParameterSpec]],
    ) -> None:
        self._units = units
        self._homes = homes
        self._access = access
        self._specs = specs
        self._buffer: _Buffer | None = None
        self.writes = True
        """This process is the one that writes them."""

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
        places: dict[ParameterSpec, tuple[str, int]] = {}
        for name, value in state_dict.items():
            specs = self._specs.get(value, ()) if isinstance(value, nn.Parameter) else ()
            start = 0
            for spec in specs:
                places[spec] = name, start
                start += spec.numel
            if isinstance(value, torch.Tensor) and not specs:
                yield Part(name, 0, _on_host(value, dtype).reshape(-1))
        for unit in self._units:
            if any(spec in places for spec in unit.parameters):
                yield from self.parts_of(unit, places, dtype)

    def parts_of(
        self, unit: UnitSpec, places: Mapping[ParameterSpec, tuple[str, int]], dtype: torch.dtype
    ) -> Generator[Part, None, None]:
        """The values of a unit's parameters that have a place: a name, and the element at which theirs begin."""
        if self._buffer is None or self._buffer.dtype != dtype:
            self._buffer = _Buffer(dtype)
        yield from self._of_unit(unit, places, self._buffer)

    def _of_unit(
        self, unit: UnitSpec, places: Mapping[ParameterSpec, tuple[str, int]], buffer: _Buffer
    ) -> Generator[Part, None, None]:
        formats, access = self._access.layout.formats, self._access
        with contextlib.ExitStack() as borrowed:
            with access.failure:
                weights = borrowed.enter_context(access.weights(unit))
            for spec in unit.parameters:
                if spec in places and not self._has_master(spec, buffer.dtype):
                    name, origin = places[spec]
                    address = weights + spec.offset * formats.weights
                    for start, stop in _ranges(0, spec.numel):
                        values = tensor_at(address + start * formats.weights, stop - start, access.layout.dtype)
                        yield Part(name, origin + start, buffer.cast(values))
            if any(spec in places and self._has_master(spec, buffer.dtype) for spec in unit.parameters):
                yield from self._masters(unit, places, weights, buffer)

    def _masters(
        self, unit: UnitSpec, places: Mapping[ParameterSpec, tuple[str, int]], weights: int, buffer: _Buffer
    ) -> Generator[Part, None, None]:
        """What is trained, from the fp32 masters: those of a tile after the other."""
        formats, rule = self._access.layout.formats, self._access.layout.rule
        assert rule is not None
        for homes in self._homes[unit.index].tiles:
            tile = homes.tile
            with contextlib.ExitStack() as borrowed:
                with self._access.failure:
                    states = borrowed.enter_context(homes.states.borrow(change=False))
                for spec in unit.trainable:
                    begin, end = max(spec.offset, tile.start), min(spec.offset + spec.numel, tile.stop)
                    if spec not in places or begin >= end:
                        continue
                    name, origin = places[spec]
                    for start, stop in _ranges(begin, end):
                        master = states + rule.master_offset(tile, start)
                        values = buffer.masters[: stop - start]
                        formats.copy_master(values, weights + start * formats.weights, master)
                        yield Part(name, origin + start - spec.offset, buffer.cast(values))

    def _has_master(self, spec: ParameterSpec, dtype: torch.dtype) -> bool:
        """The value in ``dtype`` is that of the master, cast."""
        return self._access.layout.has_master(spec, dtype)


class _Buffer:
    """Memory for one part: as fp32 ``masters``, and in the dtype asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.masters = passing_tensor(_PART_NUMEL * 4).view(torch.float32)
        self._cast = passing_tensor(_PART_NUMEL * dtype.itemsize).view(dtype)

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        """The values, in the dtype asked for."""
        if values.dtype == self.dtype:
            return values
        return self._cast[: values.numel()].copy_(values)


def _on_host(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, Handle):  # a part of a parameter, which a hook of the model's has made
        return value.value_on_host().to(dtype)
    return value.detach().cpu()


def _ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + _PART_NUMEL, stop)) for begin in range(start, stop, _PART_NUMEL))
