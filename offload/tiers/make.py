"""Makes homes and windows: here, and nowhere else, a tier of the plan becomes the home of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import nn

from offload.plan.plan import Plan, Tier, UnitPlan
from offload.report.trace import Trace
from offload.tiers.home import ExtentPart, Home, HostHome, SpareHostHome, StoredHome, TileHomes, UnitHomes
from offload.tiers.window import Window
from offload.units import Tile, UnitSpec
from swapper import Arena, DurableStore, InPlaceFiles, InPlaceRecord, align

_Window = TypeVar("_Window", bound=Window)


class HomesOnDevice(Protocol):
    """Makes homes in a device's memory, if there is one."""

    def make(self, unit: UnitSpec, tiles: Sequence[Tile]) -> UnitHomes: ...


def make_homes(
    plan: Plan,
    arena: Arena,
    store: DurableStore | None,
    files: InPlaceFiles | None,
    on_device: HomesOnDevice,
    trace: Trace,
) -> list[UnitHomes]:
    """The homes of every record of the plan's units. ``files`` are those that frozen weights are read from in place."""
    formats = plan.formats
    extents = iter(store.extents if store is not None else ())

    def part(name: str) -> ExtentPart:
        if store is None:
            raise ValueError(f"{name} is to be stored on NVMe, and there is no store")
        return ExtentPart(store, next(extents))

    def stored(name: str) -> StoredHome:
        return StoredHome(name, part(name), None, trace)

    def in_ram(nbytes: int, item: UnitPlan) -> HostHome:
        lease = arena.lease(nbytes)
        return SpareHostHome(lease, arena.lease(nbytes)) if item.has_spares else HostHome(lease)

    def home_of_weights(item: UnitPlan) -> Home:
        unit = item.unit
        if _is_host(item.weights):
            return in_ram(unit.numel * formats.weights, item)
        name = f"weights of {unit.name}"
        trained = part(name) if unit.trainable_numel else None
        if unit.in_files:
            return StoredHome(name, trained, in_files(unit, name), trace)
        return StoredHome(name, trained, part(name) if unit.numel > unit.trainable_numel else None, trace)

    def in_files(unit: UnitSpec, name: str) -> InPlaceRecord:
        if files is None:
            raise ValueError(f"{name} are to be read in place, and no files are open")
        begin = unit.trainable_numel * formats.weights
        parts = [replace(piece, offset=piece.offset - begin) for piece in unit.in_files]
        return InPlaceRecord(name, parts, (unit.numel - unit.trainable_numel) * formats.weights, files)

    homes = []
    for item in plan.units:
        unit = item.unit
        if item.weights is Tier.DEVICE:
            homes.append(on_device.make(unit, [tile for tile, _ in item.tiles]))
            continue
        weights, grads = home_of_weights(item), None
        if _is_host(item.grads):
            grads = HostHome(arena.lease(unit.trainable_numel * formats.grads))
        tiles = [
            TileHomes(
                tile,
                in_ram(align(tile.nbytes), item) if _is_host(tier) else stored(f"states of {unit.name}"),
                None if grads is not None else stored(f"gradients of {unit.name}"),
            )
            for tile, tier in item.tiles
        ]
        homes.append(UnitHomes(weights, grads, tiles))
    return homes


def _is_host(tier: Tier) -> bool:
    """In host memory, or on NVMe. A tier that no home is made in would lose what is stored there."""
    if tier not in (Tier.HOST, Tier.NVME):
        raise ValueError(f"no home is made in {tier}")
    return tier is Tier.HOST


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
