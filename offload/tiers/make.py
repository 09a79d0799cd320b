"""Makes the tiers that a plan names: reserves memory and disk, and ties homes, caches and gradients together.

What stands between them and compute is made in ``offload.tiers.make_compute``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

import aio_ext
from offload.closing import Closers
from offload.config import OffloadConfig
from offload.device.protocol import Device
from offload.memory import fault_in
from offload.plan.buffers import NUM_LANDINGS
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.ranks.ranks import Ranks
from offload.ranks.world import Peers
from offload.report.meter import Meter
from offload.report.report import Bandwidths
from offload.report.trace import Trace
from offload.tiers import bandwidth
from offload.tiers.bounce import Bounce
from offload.tiers.gradients.make import resident_gradients
from offload.tiers.gradients.norms import (
    AddUp,
    DeviceSquares,
    DistributedParts,
    HostSquares,
    RankSquares,
    Squares,
    add_up_shards,
)
from offload.tiers.gradients.sink import GradientSink
from offload.tiers.gradients.spill import BufferPool, SpilledGradients
from offload.tiers.gradients.store import GradientStore, of_one_rank
from offload.tiers.gradients.unit import UnitGradients
from offload.tiers.growth import DeviceHomes
from offload.tiers.home import Home, HostHome, StoredHome, TileHomes, UnitHomes
from offload.tiers.make_compute import Base, DeviceMemory, OnDevice, WholeWeights, compute_on_device, compute_on_host
from offload.tiers.store import EngineStore, RecordExtents, extents_of_records, open_engine_store
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.level import Level
from offload.tiers.weights.shadow import Slot
from offload.tiers.window import POISON, DeviceWindow, HostWindow, Window, window_class
from offload.units import UnitSpec
from offload.uses import Uses
from offload.waiting import Failure
from swapper import PAGE_BYTES, Arena, DurableStore, Lease, align


@dataclass(frozen=True)
class Tiers:
    """Everything that holds or moves bytes. ``homes`` change when units move to a device; the list stays."""

    arena: Arena
    store: DurableStore | None
    opened: EngineStore | None
    """How the store was opened."""
    records: Sequence[RecordExtents]
    """What of the store a commit puts each unit's records into; nothing if it cannot hold generations."""
    homes: list[UnitHomes]
    windows: Sequence[Window]
    parameters: Sequence[Sequence[nn.Parameter]]
    """Of each unit, in order: views of its window, which the model computes with."""
    slots: Sequence[Slot]
    tile_buffers: Sequence[Lease]
    host: HostLevel
    gradients: GradientStore
    intake: GradientSink
    """Takes gradients as compute makes them."""
    level: Level
    """Units where compute uses them."""
    uses: Uses
    on_device: OnDevice | None
    whole: WholeWeights | None
    """Whole units, where there are several ranks."""


def make_tiers(
    whole: Sequence[UnitSpec],
    plan: Plan,
    config: OffloadConfig,
    device: Device | None,
    ranks: Ranks,
    parts: Peers,
    failure: Failure,
    meter: Meter,
    closers: Closers,
    *,
    sharers: int,
    squares_on_device: bool,
    holds_gradients: Callable[[], bool],
) -> Tiers:
    """Reserve everything. What must be undone goes into ``closers``, also when this raises.

    ``whole`` are the units that compute sees; those of the plan, or what they are ``ranks``' shards of. ``parts`` are
    ranks that have other parts of ``DTensor``s.
    ``sharers``: processes that use the same drives. ``squares_on_device``: kernels run on the device, so that it can
    add up squares of gradients. ``holds_gradients``: a rank keeps what it has made of gradients for a later backward,
    if it has the memory.
    """
    units = [item.unit for item in plan.units]
    opened = open_engine_store(config, plan, sharers, ranks)
    store = opened.store if opened is not None else None
    landing_bytes = [plan.compute_bytes // NUM_LANDINGS] * NUM_LANDINGS if device is not None else []
    arena = Arena(plan.arena_bytes + sum(landing_bytes) + plan.ranks.arena_bytes)
    closers.callback(partial(ranks.close_memory, arena))
    if device is not None:
        fault_in(arena.address, arena.nbytes, torch.get_num_threads())  # to pin it, the kernel would use one
        device.pin(arena.address, max(arena.nbytes, PAGE_BYTES))
        closers.callback(partial(device.unpin, arena.address))
    if opened is not None:
        closers.callback(opened.close)
        opened.store.register(arena)
    windows, parameters = _make_windows(whole, plan, config.dtype, device)
    homes_on_device = bounce = None
    if device is not None:
        bounce = _bounce(device, closers)
        own = windows if ranks.size == 1 else _make_windows(units, plan, config.dtype, device)[0]
        homes_on_device = DeviceHomes(
            device, cast(Sequence[DeviceWindow], own), plan.formats, config.gradient_dtype, bounce
        )
        closers.callback(homes_on_device.close)
    homes = _make_homes(plan, arena, store, homes_on_device, meter.trace)
    slots = [Slot(arena.lease(plan.staging.slot_bytes)) for _ in range(plan.staging.num_slots)]
    grad_buffers = [arena.lease(plan.staging.grad_buffer_bytes) for _ in range(plan.staging.num_grad_buffers)]
    tile_buffers = [arena.lease(plan.staging.tile_buffer_bytes) for _ in range(plan.staging.num_tile_buffers)]
    on_host_meter = meter if device is None and ranks.size == 1 else Meter(meter.trace, track="waiting for weights")
    host = HostLevel(
        units,
        homes,
        slots,
        plan.staging.slot_bytes,
        failure,
        on_host_meter,
        prefetch=config.prefetch,
        may_add_places=device is None and ranks.size == 1,
    )
    closers.callback(host.drain)
    pool = BufferPool(grad_buffers, failure, on_host_meter)
    closers.callback(pool.drain)
    squares: Squares = HostSquares()
    if device is not None and squares_on_device:
        squares = on_device = DeviceSquares(device, units, plan.device.resident, meter)
        closers.callback(on_device.close)
    by_unit = [
        _unit_gradients(unit, homes[unit.index], pool, config.gradient_dtype, squares, on_host_meter) for unit in units
    ]
    over: list[AddUp] = []
    if ranks.size > 1:
        over.append(partial(add_up_shards, ranks))
    if parts.size > 1:
        over.append(DistributedParts(units, parts, failure).add_up)
    gradients = GradientStore(by_unit, RankSquares(units, over).make_whole if over else of_one_rank)
    base = Base(whole, plan, config, arena, homes, host, gradients, ranks, holds_gradients, failure, meter, closers)
    if device is not None and homes_on_device is not None and bounce is not None:
        landings = [arena.lease(nbytes) for nbytes in landing_bytes if nbytes]
        memory = DeviceMemory(device, cast(Sequence[DeviceWindow], windows), homes_on_device, landings, bounce, squares)
        found = compute_on_device(base, memory, parameters, slots)
    else:
        found = compute_on_host(base, cast(Sequence[HostWindow], windows))
    return Tiers(
        arena=arena,
        store=store,
        opened=opened,
        records=extents_of_records(plan, homes, opened) if opened is not None and opened.holds_generations else (),
        homes=homes,
        windows=windows,
        parameters=parameters,
        slots=slots,
        tile_buffers=tile_buffers,
        host=host,
        gradients=gradients,
        intake=found.intake,
        level=found.level,
        uses=found.uses,
        on_device=found.on_device,
        whole=found.whole,
    )


def store_bandwidths(tiers: Tiers) -> Bandwidths | None:
    """The store's bandwidths: as ``aio_bench.py`` has measured them, or measured now, on what is most of its bytes."""
    if tiers.opened is None:
        return None
    store, profile = tiers.opened.store, tiers.opened.profile
    if profile is not None:
        return Bandwidths(profile.read_bytes_per_s, profile.write_bytes_per_s, profile.mixed_q, stored=True)
    tiles = [tile.states.stored for homes in tiers.homes for tile in homes.tiles]
    weights = [homes.weights.stored for homes in tiers.homes]
    for records, buffers in (
        (tiles, [lease.address for lease in tiers.tile_buffers]),
        (weights, [slot.address for slot in tiers.slots]),
    ):
        extents = [extent for home in records if home is not None for extent in home.extents]
        if extents and len(buffers) > 1:
            return bandwidth.measure(store, extents, buffers)
    return None


def _make_homes(
    plan: Plan, arena: Arena, store: DurableStore | None, on_device: DeviceHomes | None, trace: Trace
) -> list[UnitHomes]:
    """The homes of every record: here, and nowhere else, a tier of the plan becomes a home."""
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
            if on_device is None:
                raise ValueError(f"unit {unit.name} is to rest on a device, and there is none")
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


def _make_windows(
    units: Sequence[UnitSpec], plan: Plan, dtype: torch.dtype, device: Device | None
) -> tuple[list[Window], list[list[nn.Parameter]]]:
    """A closed window for each unit, and the parameters in it."""
    windows: list[Window] = []
    parameters = []
    largest = max(unit.numel for unit in units) * plan.formats.weights
    make: Callable[[int], Window]
    if device is not None:
        make = partial(DeviceWindow, dtype=dtype, device=device)
    else:
        make = partial(window_class(), dtype=dtype, poison=aio_ext.Pattern(largest, POISON))
    for unit in units:
        window = make(unit.numel)
        windows.append(window)
        parameters.append([spec.over(window.flat[spec.offset : spec.offset + spec.numel]) for spec in unit.parameters])
        window.close()
    return windows, parameters


def _bounce(device: Device, closers: Closers) -> Bounce:
    bounce = Bounce(device)
    closers.callback(bounce.close)
    return bounce


def _unit_gradients(
    unit: UnitSpec,
    homes: UnitHomes,
    pool: BufferPool,
    dtype: torch.dtype,
    squares: Squares,
    meter: Meter,
) -> UnitGradients:
    resident = resident_gradients(unit, homes, dtype, squares)
    return SpilledGradients(unit, homes.tiles, pool, dtype, meter) if resident is None else resident
