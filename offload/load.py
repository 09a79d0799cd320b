"""Taking a model over: each parameter's value goes to its home, one unit at a time; moments begin at zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import nn

from offload.device_homes import DeviceHomes
from offload.errors import ConfigError
from offload.layout import Formats
from offload.memory import tensor_at
from offload.rule import Rule
from offload.unit import Slot, StateTile, Unit
from offload.units import ParameterSpec
from swapper import Lease, Store, Ticket


class Loader:
    """Moves values from the model into the tiers, through the slots and tile buffers of the plan."""

    def __init__(
        self,
        store: Store | None,
        homes: DeviceHomes | None,
        rule: Rule | None,
        formats: Formats,
        slots: Sequence[Slot],
        tile_buffers: Sequence[Lease],
    ) -> None:
        self._store = store
        self._homes = homes
        self._rule = rule
        self._formats = formats
        self._slots = _Ring([slot.lease for slot in slots])
        self._tile_buffers = _Ring(list(tile_buffers))

    def load(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        handles: dict[ParameterSpec, nn.Parameter],
        parameters: dict[ParameterSpec, nn.Parameter],
    ) -> None:
        """Put every parameter's value to its home and its handle into the model.

        ``handles`` are for the sites of parameters and pieces, ``parameters`` for where the model has them.

        Parameters on the meta device are first made by their module's ``reset_parameters``, module by module in the
        order of ``model.modules()``, and each unit is stored as soon as all of it is there: the whole model never
        exists at once. Raises ``ConfigError`` for a module that has no ``reset_parameters``.
        """
        units_of: dict[nn.Module, list[Unit]] = {}
        for unit in units:
            for module in dict.fromkeys(site.module for spec in unit.spec.parameters for site in spec.owners):
                units_of.setdefault(module, []).append(unit)
        stored: set[str] = set()
        for module in model.modules():
            _make_real(module, units)
            for unit in units_of.get(module, ()):
                if unit.name in stored or any(spec.parameter.is_meta for spec in unit.spec.parameters):
                    continue
                stored.add(unit.name)
                self._store_unit(unit)
                for spec in unit.spec.parameters:
                    for site in spec.sites:
                        site.module._parameters[site.name] = handles[spec]
                    for site in () if spec.another_piece_follows else spec.owners:
                        site.module._parameters[site.name] = parameters[spec]
        self._slots.drain()
        self._tile_buffers.drain()

    def _store_unit(self, unit: Unit) -> None:
        with torch.no_grad(), self._weights(unit) as weights:
            tensor_at(weights, unit.spec.numel, unit.dtype).zero_()
            values = {spec: spec.value().cpu().float().contiguous() for spec in unit.spec.parameters}
            for spec, value in values.items():
                address = weights + spec.offset * self._formats.weights
                tensor_at(address, spec.numel, unit.dtype).copy_(value.flatten())
            for tile in unit.tiles:
                with self._tile(tile) as address:
                    self._fill_tile(tile, address, weights, values)

    @contextlib.contextmanager
    def _weights(self, unit: Unit) -> Iterator[int]:
        """Where the unit's weights are to be put; they go home at the end."""
        if unit.on_device and self._homes is not None:
            with self._homes.weights(unit, 0, unit.spec.numel, to_change=True) as address:
                yield address
            return
        lease = unit.weights_home or self._slots.take()
        yield lease.address
        if unit.weights_extent is not None:
            assert self._store is not None
            self._slots.lend(lease, self._store.write(unit.weights_extent, lease.address, unit.weight_bytes))

    @contextlib.contextmanager
    def _tile(self, tile: StateTile) -> Iterator[int]:
        """Where the tile is to be put; it goes home at the end."""
        if tile.on_device is not None and self._homes is not None:
            with self._homes.states(tile, to_change=True) as address:
                yield address
            return
        lease = tile.home or self._tile_buffers.take()
        yield lease.address
        if tile.extent is not None:
            assert self._store is not None
            self._tile_buffers.lend(lease, self._store.write(tile.extent, lease.address, tile.extent.nbytes))

    def _fill_tile(
        self, tile: StateTile, address: int, weights: int, values: dict[ParameterSpec, torch.Tensor]
    ) -> None:
        """States as before the first step; each parameter's part of the master."""
        assert self._rule is not None
        self._rule.begin(tile.tile, address)
        for spec, value in values.items() if self._formats.master else ():
            start, stop = max(spec.offset, tile.start), min(spec.offset + spec.numel, tile.stop)
            if start < stop and spec.trainable:
                part = value.flatten()[start - spec.offset : stop - spec.offset]
                master = address + self._rule.master_offset(tile.tile, start)
                self._formats.put_master(part, weights + start * self._formats.weights, master)


class _Ring:
    """Buffers used in turn; each is waited for before it is used again."""

    def __init__(self, leases: list[Lease]) -> None:
        self._tickets: dict[Lease, Ticket | None] = dict.fromkeys(leases)
        self._turn: Iterator[Lease] = cycle(leases)

    def take(self) -> Lease:
        lease = next(self._turn)
        ticket = self._tickets[lease]
        if ticket is not None:
            ticket.wait()
        return lease

    def lend(self, lease: Lease, ticket: Ticket) -> None:
        self._tickets[lease] = ticket

    def drain(self) -> None:
        for ticket in self._tickets.values():
            if ticket is not None:
                ticket.wait()


def _make_real(module: nn.Module, units: Sequence[Unit]) -> None:
    """Give a module whose own parameters are on the meta device real ones, initialised by ``reset_parameters``."""
    names = [name for name, p in module._parameters.items() if p is not None and p.is_meta]
    buffers = [name for name, b in module._buffers.items() if b is not None and b.is_meta]
    if not names and not buffers:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"{type(module).__name__} has {', '.join(names + buffers)} on the meta device and no reset_parameters() "
            "to initialise them. Give it one, or build the model on the CPU."
        )
    shared = {spec.owners[0]: spec for unit in units for spec in unit.spec.parameters if len(spec.owners) > 1}
    for name in names:
        old = module._parameters[name]
        assert old is not None
        module._parameters[name] = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        spec = shared.get((module, name))  # type: ignore[call-overload]
        for site in spec.owners if spec is not None else ():
            site.module._parameters[site.name] = module._parameters[name]
    for name in buffers:
        module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
    reset()
