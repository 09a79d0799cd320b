"""Taking a model over: each parameter's value goes to its home, one unit at a time; moments begin at zero."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle

import torch
from torch import nn

from offload.memory import tensor_at
from offload.optim.formats import Formats
from offload.optim.rule import Rule
from offload.tiers.home import Home, TileHomes, Transfer, UnitHomes
from offload.units import ParameterSpec, UnitSpec

Value = Callable[[ParameterSpec], torch.Tensor]
"""The value of a parameter or piece, in its shape (of a quantised one the bytes) and on any device. Asked for once,
when its unit is stored."""

_PART_NUMEL = 4 << 20
"""Values are converted this many elements at a time."""


class Loader:
    """Moves values from the model into the tiers, through buffers of the plan: addresses of slots and tile buffers."""

    def __init__(
        self,
        homes: Sequence[UnitHomes],
        rule: Rule | None,
        formats: Formats,
        dtype: torch.dtype,
        value_of: Value,
        slots: Sequence[int],
        tile_buffers: Sequence[int],
    ) -> None:
        """``dtype`` is that of the weights."""
        self._homes = homes
        self._rule = rule
        self._formats = formats
        self._dtype = dtype
        self._value_of = value_of
        self._slots = _Ring(slots)
        self._tile_buffers = _Ring(tile_buffers)

    def load(
        self,
        units: Iterable[tuple[UnitSpec, UnitSpec]],
        handles: dict[ParameterSpec, nn.Parameter],
        parameters: dict[ParameterSpec, nn.Parameter],
    ) -> None:
        """Put every parameter's value in its home and its handle into the model. With each of the ``units`` comes what
        this rank has of it: itself, where there is one.

        ``handles`` are for the sites of parameters and pieces, ``parameters`` for where the model has them. Values are
        there for one unit at a time: a model whose values come from elsewhere never exists as a whole.
        """
        for unit, shard in units:
            self._store_unit(shard)
            for spec in unit.parameters:
                for site in spec.sites:
                    site.module._parameters[site.name] = handles[spec]
                for site in () if spec.another_piece_follows else spec.owners:
                    site.module._parameters[site.name] = parameters[spec]
        self._slots.drain()
        self._tile_buffers.drain()

    def _store_unit(self, unit: UnitSpec) -> None:
        homes = self._homes[unit.index]
        with torch.no_grad(), _filled(homes.weights, self._slots) as weights:
            tensor_at(weights, unit.numel, self._dtype).zero_()
            values = {spec: self._value_of(spec).detach().flatten() for spec in unit.parameters}
            for spec, value in values.items():
                address = weights + spec.offset * self._formats.weights
                if spec.packing is not None:
                    tensor_at(address, spec.packing.nbytes, torch.uint8).copy_(value)
                    continue
                weight = tensor_at(address, spec.numel, self._dtype)
                for start in range(0, spec.numel, _PART_NUMEL):
                    part = value[start : start + _PART_NUMEL].float().to(self._dtype)  # where it is: the link has less
                    weight[start : start + _PART_NUMEL].copy_(part)
            for tile in homes.tiles:
                with _filled(tile.states, self._tile_buffers) as address:
                    self._fill_tile(tile, address, weights, values)

    def _fill_tile(
        self, home: TileHomes, address: int, weights: int, values: dict[ParameterSpec, torch.Tensor]
    ) -> None:
        """States as before the first step; each parameter's part of the master. ``values`` are flat."""
        rule, tile = self._rule, home.tile
        if rule is None:
            raise ValueError("there are tiles, and no rule that knows how they lie")
        rule.begin(tile, address)
        for spec, value in values.items() if self._formats.master else ():
            start, stop = max(spec.offset, tile.start), min(spec.offset + spec.numel, tile.stop)
            if start < stop and spec.trainable:
                part = value[start - spec.offset : stop - spec.offset].cpu().float()
                master = address + rule.master_offset(tile, start)
                self._formats.put_master(part, weights + start * self._formats.weights, master)


@contextlib.contextmanager
def _filled(home: Home, buffers: _Ring) -> Iterator[int]:
    """Where a record is to be put; it is on its way to its home at the end."""
    if home.stored is None:
        with home.replace() as address:
            yield address
        return
    address = buffers.take()
    yield address
    buffers.lend(address, home.stored.fill(address))


class _Ring:
    """Buffers used in turn; each is waited for before it is used again."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self._transfers: dict[int, Transfer | None] = dict.fromkeys(addresses)
        self._turn: Iterator[int] = cycle(addresses)

    def take(self) -> int:
        address = next(self._turn)
        transfer = self._transfers[address]
        if transfer is not None:
            transfer.wait()
        return address

    def lend(self, address: int, transfer: Transfer) -> None:
        self._transfers[address] = transfer

    def drain(self) -> None:
        for transfer in self._transfers.values():
            if transfer is not None:
                transfer.wait()
