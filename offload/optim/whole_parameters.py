"""Tiles that hold whole parameters: ``[master of a | states of a | master of b | ...]``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.memory import tensor_at
from offload.optim.formats import Formats
from offload.optim.rule import TilePart
from offload.units import GRAIN, ParameterSpec, Tile, UnitSpec

_ALIGNMENT = 64

Schema = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes of a parameter's states that rest in its tile, by their names."""


@dataclass(frozen=True)
class State:
    """One state tensor of a parameter: where it lies in the tile."""

    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Record:
    """Content of a tile that belongs to one parameter."""

    spec: ParameterSpec
    master: int
    states: tuple[State, ...]


class WholeParameters(ABC):
    """Layout of an optimizer that looks at a parameter as a whole. See ``TileLayout``."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._records: dict[Tile, dict[ParameterSpec, Record]] = {}

    @abstractmethod
    def _schema(self, spec: ParameterSpec) -> Schema:
        """The states that rest in tiles of this parameter."""

    def tiles_of(self, unit: UnitSpec, tile_bytes: int) -> tuple[Tile, ...]:
        tiles: list[Tile] = []
        records: dict[ParameterSpec, Record] = {}
        start = end = 0

        def close(stop: int) -> None:
            tile = Tile(start, stop, end)
            tiles.append(tile)
            self._records[tile] = dict(records)

        for spec in unit.parameters:
            if not spec.trainable:
                continue
            record, after = self._lay_out(spec, end)
            if records and after > tile_bytes and spec.offset % GRAIN == 0:  # gradients of a tile are whole pages
                close(spec.offset)
                records.clear()
                start = spec.offset
                record, after = self._lay_out(spec, 0)
            records[spec] = record
            end = after
        if unit.trainable_numel:
            close(unit.trainable_numel)
        return tuple(tiles)

    def tile_between(self, unit: UnitSpec, start: int, stop: int) -> Tile:
        records: dict[ParameterSpec, Record] = {}
        end = 0
        for spec in unit.trainable:
            if start <= spec.offset < stop:
                records[spec], end = self._lay_out(spec, end)
        tile = Tile(start, stop, end)
        self._records[tile] = records
        return tile

    def parts(self, tile: Tile) -> Sequence[TilePart]:
        found = []
        for spec, record in self._records[tile].items():
            if self._formats.master:
                master = torch.float32 if self._formats.master == 4 else torch.uint16
                found.append(TilePart(spec.name, "", record.master, tuple(spec.shape), master))
            found += [TilePart(spec.name, s.name, s.offset, tuple(s.shape), s.dtype) for s in record.states]
        return found

    def begin(self, tile: Tile, address: int) -> None:
        tensor_at(address, tile.nbytes, torch.uint8).zero_()

    def master_offset(self, tile: Tile, element: int) -> int:
        record = next(
            record
            for spec, record in self._records[tile].items()
            if spec.offset <= element < spec.offset + max(spec.numel, 1)
        )
        return record.master + (element - record.spec.offset) * self._formats.master

    def states(self, tile: Tile, address: int, spec: ParameterSpec) -> dict[str, torch.Tensor]:
        record = self._records[tile].get(spec)
        if record is None:
            return {}
        return {
            state.name: tensor_at(address + state.offset, state.shape.numel(), state.dtype) for state in record.states
        }

    def shape(self, spec: ParameterSpec, name: str) -> torch.Size:
        return self._schema(spec)[name][0]

    def _lay_out(self, spec: ParameterSpec, offset: int) -> tuple[Record, int]:
        """The parameter's record when it begins at ``offset`` of a tile, and where the record ends."""
        master = offset
        offset = _align(offset + spec.numel * self._formats.master)
        states = []
        for name, (shape, dtype) in self._schema(spec).items():
            states.append(State(name, offset, shape, dtype))
            offset = _align(offset + shape.numel() * dtype.itemsize)
        return Record(spec, master, tuple(states)), offset


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
