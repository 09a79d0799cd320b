"""Taking a model over: each parameter's value goes to its home, one unit at a time; moments begin at zero."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle

import torch
from torch import nn

from offload.elements import Layout, NewElements, first_states, source_of
from offload.memory import tensor_at
from offload.optim.rule import Rule
from offload.tiers.home import Home, TileHomes, Transfer, UnitHomes
from offload.units import ParameterSpec, UnitSpec

Value = Callable[[ParameterSpec], torch.Tensor]
"""The value of a parameter or piece, in its shape (of a quantised one the bytes) and on any device. Asked for once,
when its unit is stored."""


class Loader:
    """Moves values from the model into the tiers, through buffers of the plan: addresses of slots and tile buffers."""

    def __init__(
        self,
        homes: Sequence[UnitHomes],
        layout: Layout[Rule],
        value_of: Value,
        slots: Sequence[int],
        tile_buffers: Sequence[int],
    ) -> None:
        self._layout = layout
        self._begin = first_states(layout)
        self._value_of = value_of
        self._records = _FilledRecords(homes, _Ring(slots), _Ring(tile_buffers))

    def load(
        self,
        units: Iterable[tuple[UnitSpec, UnitSpec]],
        handles: dict[ParameterSpec, nn.Parameter],
    ) -> None:
        """Put every parameter's value in its home and its handle into the model. With each of the ``units`` comes what
        this rank has of it: itself, where there is one.

        Values are there for one unit at a time: a model whose values come from elsewhere never exists as a whole.
        """
        for unit, shard in units:
            self._store_unit(shard)
            for spec in unit.parameters:
                for site in () if spec.another_piece_follows else spec.owners:
                    site.module._parameters[site.name] = handles[spec]
        self._records.drain()

    def _store_unit(self, unit: UnitSpec) -> None:
        """Frozen weights that are to be read from their files stay there."""
        stays = bool(unit.in_files) and self._records.are_stored(unit)
        wanted = unit.trainable if stays else unit.parameters
        if not wanted:
            return
        with torch.no_grad(), NewElements(self._records, self._layout, self._begin) as elements:
            weights = elements.weights(unit)
            tensor_at(weights, unit.stored_numel if stays else unit.numel, self._layout.dtype).zero_()
            values = {spec: self._value_of(spec).detach().flatten() for spec in wanted}
            for span in elements.spans(unit, wanted):
                value = values[span.spec]
                if span.spec.packing is None:
                    elements.write(span, source_of(value))
                else:
                    address = weights + span.start * self._layout.formats.weights
                    tensor_at(address, span.spec.packing.nbytes, torch.uint8).copy_(value)


class _FilledRecords:
    """Records that are filled for the first time, and are on their way to their homes when they are given back."""

    def __init__(self, homes: Sequence[UnitHomes], slots: _Ring, tile_buffers: _Ring) -> None:
        self._homes = homes
        self._slots = slots
        self._tile_buffers = tile_buffers

    def tiles(self, unit: UnitSpec) -> Sequence[TileHomes]:
        return self._homes[unit.index].tiles

    def are_stored(self, unit: UnitSpec) -> bool:
        """The unit's weights rest on NVMe."""
        return self._homes[unit.index].weights.stored is not None

    def lend_weights(self, unit: UnitSpec) -> contextlib.AbstractContextManager[int]:
        return self._slots.lend(self._homes[unit.index].weights)

    def lend_tile(self, tile: TileHomes) -> contextlib.AbstractContextManager[int]:
        return self._tile_buffers.lend(tile.states)

    def drain(self) -> None:
        """Return when all of them have arrived."""
        self._slots.drain()
        self._tile_buffers.drain()


class _Ring:
    """Buffers used in turn; each is waited for before it is used again."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self._transfers: dict[int, Transfer | None] = dict.fromkeys(addresses)
        self._turn: Iterator[int] = cycle(addresses)

    @contextlib.contextmanager
    def lend(self, home: Home) -> Iterator[int]:
        """Lend the memory that a record is to be put into."""
        if home.stored is None:
            with home.replace() as address:
                yield address
            return
        address = next(self._turn)
        transfer = self._transfers[address]
        if transfer is not None:
            transfer.wait()
        yield address
        self._transfers[address] = home.stored.begin(address)

    def drain(self) -> None:
        for transfer in self._transfers.values():
            if transfer is not None:
                transfer.wait()
