"""Looking into optimizer states from outside of the update: what checkpoints and handles do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

import aio_ext
from offload.device_homes import DeviceHomes
from offload.rule import Rule
from offload.unit import StateTile, Unit
from offload.units import ParameterSpec
from swapper import Store


class Tiles:
    """Brings tiles into RAM for a moment. The unit's update must be over, and stay so meanwhile."""

    def __init__(self, rule: Rule, store: Store | None, homes: DeviceHomes | None) -> None:
        self._rule = rule
        self._store = store
        self._homes = homes

    @contextlib.contextmanager
    def opened(self, tile: StateTile, *, to_change: bool) -> Iterator[int]:
        """The tile's address; a changed tile is back at its home when the block is over."""
        if tile.home is not None:
            yield tile.home.address
            return
        if tile.on_device is not None and self._homes is not None:
            with self._homes.states(tile, to_change=to_change) as address:
                yield address
            return
        assert self._store is not None and tile.extent is not None
        if tile.write is not None:
            tile.write.wait()
        memory = aio_ext.Memory(tile.extent.nbytes)
        try:
            self._store.read(tile.extent, memory.address, tile.extent.nbytes, urgent=True).wait()
            yield memory.address
            if to_change:
                self._store.write(tile.extent, memory.address, tile.extent.nbytes, urgent=True).wait()
        finally:
            memory.close()

    def read_states(
        self, units: Sequence[Unit], steps: dict[ParameterSpec, int]
    ) -> dict[ParameterSpec, dict[str, Any]]:
        """Copies of the states of every parameter in ``steps``."""
        pieces: dict[ParameterSpec, dict[str, list[torch.Tensor]]] = {spec: {} for spec in steps}
        for unit in units:
            for tile in unit.tiles:
                with self.opened(tile, to_change=False) as address:
                    for spec in unit.spec.parameters:
                        for name, view in self._views(tile, address, spec) if spec in steps else ():
                            pieces[spec].setdefault(name, []).append(view.clone())
        return {
            spec: {
                **self._rule.loose_states(spec, steps[spec]),
                **{name: self._whole(spec, name, states.get(name, [])) for name in self._rule.names(spec)},
            }
            for spec, states in pieces.items()
        }

    def joined(self, states: dict[ParameterSpec, dict[str, Any]]) -> dict[str, Any]:
        """The states of one parameter, from those of its pieces in order."""
        (first, values), *others = states.items()
        if not others:
            return values
        whole = dict(values)
        for name in self._rule.names(first):
            flat = torch.cat([values[name].flatten() for values in states.values()])
            assert first.piece is not None
            as_elements = self._rule.shape(first, name) == first.shape
            whole[name] = flat.view(first.piece.cut.shape) if as_elements else flat
        return whole

    def split(self, specs: Sequence[ParameterSpec], states: dict[str, Any]) -> dict[ParameterSpec, dict[str, Any]]:
        """The other way round."""
        parts = {spec: dict(states) for spec in specs}
        for name in self._rule.names(specs[0]) if len(specs) > 1 else ():
            if name in states:
                sizes = [self._rule.shape(spec, name).numel() for spec in specs]
                flat = torch.as_tensor(states[name]).flatten()
                cuts = list(accumulate(sizes[:-1]))
                for part, piece in zip(parts.values(), flat.tensor_split(cuts), strict=True):
                    part[name] = piece
        return parts

    def _whole(self, spec: ParameterSpec, name: str, views: list[torch.Tensor]) -> torch.Tensor:
        shape = self._rule.shape(spec, name)
        return torch.cat(views).view(shape) if views else torch.empty(shape)

    def write_states(
        self, units: Sequence[Unit], states: dict[ParameterSpec, dict[str, Any]]
    ) -> dict[ParameterSpec, int]:
        """Put ``states``, as ``read_states`` gave them, to their homes; the steps that each parameter has taken.

        Raises ``ValueError`` for one that is missing or has another size; nothing was changed then.
        """
        for unit in units:
            self._check(unit, states)
        done: dict[tuple[ParameterSpec, str], int] = {}
        for unit in units:
            wanted = [spec for spec in unit.spec.parameters if spec in states]
            for tile in unit.tiles if wanted else ():
                with self.opened(tile, to_change=True) as address:
                    for spec in wanted:
                        for name, view in self._views(tile, address, spec):
                            start = done.get((spec, name), 0)
                            done[spec, name] = start + view.numel()
                            view.copy_(torch.as_tensor(states[spec][name]).reshape(-1)[start : start + view.numel()])
        steps = {}
        for spec, values in states.items():
            loose = {name: value for name, value in values.items() if (spec, name) not in done}
            steps[spec] = self._rule.set_loose_states(spec, loose)
        return steps

    def _views(self, tile: StateTile, address: int, spec: ParameterSpec) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._rule.states(tile.tile, address, spec).items()

    def _check(self, unit: Unit, states: dict[ParameterSpec, dict[str, Any]]) -> None:
        for spec in unit.spec.parameters:
            for name in self._rule.names(spec) if spec in states else ():
                value = states[spec].get(name)
                expected = self._rule.shape(spec, name)
                if value is None or torch.as_tensor(value).numel() != expected.numel():
                    found = "missing" if value is None else tuple(torch.as_tensor(value).shape)
                    raise ValueError(f"optimizer state {name} of {spec.name}: expected {tuple(expected)}, {found}")
