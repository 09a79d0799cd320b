"""Taking a model over: each parameter's value goes to its home, one unit at a time; moments begin at zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import torch
from torch import nn

from offload.errors import ConfigError
from offload.memory import tensor_at
from offload.optim.formats import Formats
from offload.optim.rule import Rule
from offload.tiers.home import Home, TileHomes, Transfer, UnitHomes
from offload.units import ParameterSpec, UnitSpec


def check_can_be_made(model: nn.Module) -> None:
    """Raise ``ConfigError`` for a module with tensors on the meta device that has no ``reset_parameters``."""
    for module in model.modules():
        names = _meta_names(module._parameters) + _meta_names(module._buffers)
        if names and getattr(module, "reset_parameters", None) is None:
            raise ConfigError(
                f"{type(module).__name__} has {', '.join(names)} on the meta device and no reset_parameters() to "
                "initialise them. Give it one, or build the model on the CPU."
            )


class Loader:
    """Moves values from the model into the tiers, through buffers of the plan: addresses of slots and tile buffers."""

    def __init__(
        self,
        homes: Sequence[UnitHomes],
        rule: Rule | None,
        formats: Formats,
        dtype: torch.dtype,
        slots: Sequence[int],
        tile_buffers: Sequence[int],
    ) -> None:
        """``dtype`` is that of the weights."""
        self._homes = homes
        self._rule = rule
        self._formats = formats
        self._dtype = dtype
        self._slots = _Ring(slots)
        self._tile_buffers = _Ring(tile_buffers)

    def load(
        self,
        model: nn.Module,
        units: Sequence[UnitSpec],
        handles: dict[ParameterSpec, nn.Parameter],
        parameters: dict[ParameterSpec, nn.Parameter],
    ) -> None:
        """Put every parameter's value in its home and its handle into the model.

        ``handles`` are for the sites of parameters and pieces, ``parameters`` for where the model has them.

        Parameters on the meta device are first made by their module's ``reset_parameters``, module by module in the
        order of ``model.modules()``, and each unit is stored as soon as all of it is there: the whole model never
        exists at once. ``check_can_be_made`` has passed.
        """
        units_of: dict[nn.Module, list[UnitSpec]] = {}
        for unit in units:
            for module in dict.fromkeys(site.module for spec in unit.parameters for site in spec.owners):
                units_of.setdefault(module, []).append(unit)
        stored: set[UnitSpec] = set()
        for module in model.modules():
            _make_real(module, units)
            for unit in units_of.get(module, ()):
                if unit in stored or any(spec.parameter.is_meta for spec in unit.parameters):
                    continue
                stored.add(unit)
                self._store_unit(unit)
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
            values = {spec: spec.value().cpu().float().contiguous() for spec in unit.parameters}
            for spec, value in values.items():
                address = weights + spec.offset * self._formats.weights
                tensor_at(address, spec.numel, self._dtype).copy_(value.flatten())
            for tile in homes.tiles:
                with _filled(tile.states, self._tile_buffers) as address:
                    self._fill_tile(tile, address, weights, values)

    def _fill_tile(
        self, home: TileHomes, address: int, weights: int, values: dict[ParameterSpec, torch.Tensor]
    ) -> None:
        """States as before the first step; each parameter's part of the master."""
        rule, tile = self._rule, home.tile
        if rule is None:
            raise ValueError("there are tiles, and no rule that knows how they lie")
        rule.begin(tile, address)
        for spec, value in values.items() if self._formats.master else ():
            start, stop = max(spec.offset, tile.start), min(spec.offset + spec.numel, tile.stop)
            if start < stop and spec.trainable:
                part = value.flatten()[start - spec.offset : stop - spec.offset]
                master = address + rule.master_offset(tile, start)
                self._formats.put_master(part, weights + start * self._formats.weights, master)


@contextlib.contextmanager
def _filled(home: Home, buffers: _Ring) -> Iterator[int]:
    """Where a record is to be put; it is on its way to its home at the end."""
    if home.stored is None:
        with home.borrow(change=True) as address:
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


def _make_real(module: nn.Module, units: Sequence[UnitSpec]) -> None:
    """Give a module whose own parameters are on the meta device real ones, initialised by ``reset_parameters``."""
    names, buffers = _meta_names(module._parameters), _meta_names(module._buffers)
    if not names and not buffers:
        return
    shared = {spec.owners[0]: spec for unit in units for spec in unit.parameters if len(spec.owners) > 1}
    for name in names:
        old = module._parameters[name]
        if old is None:
            continue
        module._parameters[name] = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        spec = shared.get((module, name))  # type: ignore[call-overload]
        for site in spec.owners if spec is not None else ():
            site.module._parameters[site.name] = module._parameters[name]
    for name in buffers:
        module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
    module.reset_parameters()  # type: ignore[operator]  # it is there: see ``check_can_be_made``


def _meta_names(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]
