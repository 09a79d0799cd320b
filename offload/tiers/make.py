"""Makes homes and windows: here, and nowhere else, a tier of the plan becomes the home of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import nn

from offload.plan.plan import Plan, Tier, UnitPlan
from offload.report.trace import Trace
from offload.tiers.home import Home, HostHome, StoredHome, TileHomes, UnitHomes
from offload.tiers.window import Window
from offload.units import Tile, UnitSpec
from swapper import Arena, DurableStore, align

_Window = TypeVar("_Window", bound=Window)


class HomesOnDevice(Protocol):
    """Makes homes in a device's memory, if there is one."""

    def make(self, unit: UnitSpec, tiles: Sequence[Tile]) -> UnitHomes: ...


def make_homes(
    plan: Plan, arena: Arena, store: DurableStore | None, on_device: HomesOnDevice, trace: Trace
) -> list[UnitHomes]:
    """The homes of every record of the plan's units."""
    formats = plan.formats
    extents = iter(store.extents if store is not None else ())

    def stored(name: str, *, trained: bool, frozen: bool) -> StoredHome:
        if store is None:
            raise ValueError(f"{name} is to rest on NVMe, and there is no store")
        return StoredHome(name, store, next(extents) if trained else None, next(extents) if frozen else None, trace)

    def home_of_weights(item: UnitPlan) -> Home:
        unit = item.unit
        if item.weights is Tier.HOST:
            return HostHome(arena.lease(unit.numel * formats.weights))
        frozen = unit.numel > unit.trainable_numel
        return stored(f"weights of {unit.name}", trained=unit.trainable_numel > 0, frozen=frozen)

    homes = []
    for item in plan.units:
        unit = item.unit
        if item.weights is Tier.DEVICE:
            homes.append(on_device.make(unit, [tile for tile, _ in item.tiles]))
            continue
        weights, grads = home_of_weights(item), None
        if item.grads is Tier.HOST:
            grads = HostHome(arena.lease(unit.trainable_numel * formats.grads))
        tiles = []
        for tile, tier in item.tiles:
            if tier is Tier.HOST:
                states: Home = HostHome(arena.lease(align(tile.nbytes)))
            else:
                states = stored(f"states of {unit.name}", trained=True, frozen=False)
            spilled = None
            if item.grads is Tier.NVME:
                spilled = stored(f"gradients of {unit.name}", trained=True, frozen=False)
            tiles.append(TileHomes(tile, states, spilled))
        homes.append(UnitHomes(weights, grads, tiles))
    return homes


def make_windows(
    units: Sequence[UnitSpec], make: Callable[[int], _Window]
) -> tuple[list[_Window], list[list[nn.Parameter]]]:
    """A closed window for each unit, and the parameters in it. ``make`` makes one, for so many elements."""
    windows: list[_Window] = []
    parameters = []
    for unit in units:
        window = make(unit.numel)
        windows.append(window)
        parameters.append([spec.over(window.flat[spec.offset : spec.offset + spec.numel]) for spec in unit.parameters])
        window.close()
    return windows, parameters
