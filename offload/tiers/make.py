"""Makes the tiers that a plan names: reserves memory and disk, and ties homes, caches and gradients together."""

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
from offload.plan.ranks import RanksPlan
from offload.ranks.ranks import Ranks
from offload.ranks.world import Peers
from offload.report.meter import Meter
from offload.report.report import Bandwidths, LinkRates
from offload.report.trace import Trace
from offload.tiers import bandwidth
from offload.tiers.compute import Compute, ComputeOnDevice, ComputeOnHost, ComputeOnRanks
from offload.tiers.device_weights import DeviceCarrier, DeviceWeights
from offload.tiers.exchange import GradientExchange, Gradients
from offload.tiers.gathered import GatherCarrier, GatheredWeights, Place
from offload.tiers.gradients import GradientStore, UnitGradients, resident_gradients
from offload.tiers.growth import DeviceHomes, Growth
from offload.tiers.home import Home, HostHome, StoredHome, TileHomes, UnitHomes
from offload.tiers.host_weights import HostWeights, Slot
from offload.tiers.spill import BufferPool, GradientBuffer, SpilledGradients
from offload.tiers.squares import Squares
from offload.tiers.store import EngineStore, RecordExtents, extents_of_records, open_engine_store
from offload.tiers.transport import GradientTransport
from offload.tiers.whole_squares import WholeSquares
from offload.tiers.window import POISON, DeviceWindow, HostWindow, Window, window_class
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import PAGE_BYTES, Arena, DurableStore, Lease, align


@dataclass(frozen=True)
class OnDevice:
    """The part of the tiers that is there where a device computes."""

    device: Device
    weights: DeviceWeights
    transport: GradientTransport
    growth: Growth
    link: LinkRates | None


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
    host: HostWeights
    gradients: GradientStore
    intake: GradientStore | GradientTransport | GradientExchange
    """Takes gradients as compute makes them."""
    compute: Compute
    on_device: OnDevice | None
    gathered: GatheredWeights | None = None
    """Whole units, where there are several ranks."""


def make_tiers(
    whole: Sequence[UnitSpec],
    plan: Plan,
    config: OffloadConfig,
    device: Device | None,
    ranks: Ranks | None,
    parts: Peers | None,
    failure: Failure,
    meter: Meter,
    closers: Closers,
    *,
    sharers: int,
    squares_on_device: bool,
    is_last_backward: Callable[[], bool],
) -> Tiers:
    """Reserve everything. What must be undone goes into ``closers``, also when this raises.

    ``whole`` are the units that compute sees; those of the plan, or what they are ``ranks``' shards of. ``parts`` are
    ranks that have other parts of ``DTensor``s.
    ``sharers``: processes that use the same drives. ``squares_on_device``: kernels run on the device, so that it can
    add up squares of gradients.
    """
    units = [item.unit for item in plan.units]
    opened = open_engine_store(config, plan, sharers, ranks)
    store = opened.store if opened is not None else None
    landing_bytes = [plan.compute_bytes // NUM_LANDINGS] * NUM_LANDINGS if device is not None else []
    arena = Arena(plan.arena_bytes + sum(landing_bytes) + (0 if plan.ranks is None else plan.ranks.arena_bytes))
    closers.callback(arena.close)
    if device is not None:
        fault_in(arena.address, arena.nbytes, torch.get_num_threads())  # to pin it, the kernel would use one
        device.pin(arena.address, max(arena.nbytes, PAGE_BYTES))
        closers.callback(partial(device.unpin, arena.address))
    if opened is not None:
        closers.callback(opened.close)
        opened.store.register(arena)
    windows, parameters = _make_windows(whole, plan, config.dtype, device)
    device_homes = None
    if device is not None:
        device_homes = DeviceHomes(device, plan.formats, config.gradient_dtype)
        closers.callback(device_homes.close)
    homes = _make_homes(plan, arena, store, device_homes, windows, meter.trace)
    if device is not None:
        closers.callback(partial(_close_resident, windows, homes))
    slots = [Slot(arena.lease(plan.slot_bytes)) for _ in range(plan.staging.num_slots)]
    grad_buffers = [GradientBuffer(arena.lease(plan.grad_buffer_bytes)) for _ in range(plan.staging.num_grad_buffers)]
    tile_buffers = [arena.lease(plan.tile_buffer_bytes) for _ in range(plan.staging.num_tile_buffers)]
    on_host_meter = meter if device is None and ranks is None else Meter(meter.trace, track="waiting for weights")
    host = HostWeights(
        units,
        homes,
        slots,
        plan.slot_bytes,
        failure,
        on_host_meter,
        prefetch=config.prefetch,
        may_add_places=device is None and ranks is None,
    )
    closers.callback(host.drain)
    pool = BufferPool(grad_buffers, failure, on_host_meter)
    closers.callback(pool.drain)
    squares = None
    if device is not None and plan.device is not None and squares_on_device:
        squares = Squares(device, units, plan.device.resident, meter)
        closers.callback(squares.close)
    by_unit = [
        _unit_gradients(unit, homes[unit.index], pool, config.gradient_dtype, squares, on_host_meter) for unit in units
    ]
    make_whole = None
    if ranks is not None or parts is not None:
        make_whole = WholeSquares(units, None if ranks is None else ranks.collectives, parts, failure).exchange
    gradients = GradientStore(by_unit, make_whole)
    on_device = gathered = None
    intake: GradientStore | GradientTransport | GradientExchange = gradients
    if ranks is not None and plan.ranks is not None:
        gathered = _gathered(whole, plan.ranks, arena, host, config, ranks, failure, meter)
        compute: Compute = ComputeOnRanks(cast(Sequence[HostWindow], windows), gathered)
        if plan.ranks.buffers:
            intake = _exchange(
                whole, plan.ranks, arena, host, gradients, config, ranks, failure, meter, is_last_backward
            )
    elif device is None or device_homes is None or plan.device is None:
        compute = ComputeOnHost(cast(Sequence[HostWindow], windows), host)
    else:
        own = cast(Sequence[DeviceWindow], windows)
        carrier = DeviceCarrier(
            own, host, device, plan.device.weights_bytes, plan.device.least_weights_bytes, failure, meter
        )
        weights = DeviceWeights(
            units,
            lambda unit: homes[unit.index].weights.tensor is not None,
            carrier,
            device,
            failure,
            meter,
            prefetch=config.prefetch,
        )
        transport = GradientTransport(
            units,
            device,
            gradients,
            [arena.lease(nbytes) for nbytes in landing_bytes if nbytes],
            config.dtype,
            config.gradient_dtype,
            plan.device.gradients_bytes,
            squares,
            failure,
            meter,
        )
        growth = Growth(homes, device_homes, own, host, weights, gradients, transport, squares)
        ordinary = [  # those whose memory can be looked at
            [parameter for spec, parameter in zip(unit.parameters, of_unit, strict=True) if spec.packing is None]
            for unit, of_unit in zip(units, parameters, strict=True)
        ]
        compute, intake = ComputeOnDevice(device, own, ordinary, weights), transport
        on_device = OnDevice(device, weights, transport, growth, _measure_link(device, units, homes, own, slots))
        closers.callback(transport.stop)
        closers.callback(weights.close)
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
        intake=intake,
        compute=compute,
        on_device=on_device,
        gathered=gathered,
    )


def _gathered(
    whole: Sequence[UnitSpec],
    plan: RanksPlan,
    arena: Arena,
    host: HostWeights,
    config: OffloadConfig,
    ranks: Ranks,
    failure: Failure,
    meter: Meter,
) -> GatheredWeights:
    places = [Place(arena.lease(nbytes)) for nbytes in plan.places]
    carrier = GatherCarrier(whole, ranks.shards, host, places, config.dtype, ranks.collectives)
    return GatheredWeights(whole, carrier, failure, meter, prefetch=config.prefetch)


def _exchange(
    whole: Sequence[UnitSpec],
    plan: RanksPlan,
    arena: Arena,
    host: HostWeights,
    gradients: GradientStore,
    config: OffloadConfig,
    ranks: Ranks,
    failure: Failure,
    meter: Meter,
    is_last_backward: Callable[[], bool],
) -> GradientExchange:
    """Where whole gradients rest until the last backward of a step, they are added up as they are in their homes."""
    at_once = plan.placement != "states"
    return GradientExchange(
        whole,
        ranks.shards,
        gradients,
        host,
        [Gradients(arena.lease(nbytes)) for nbytes in plan.buffers],
        arena.lease(plan.landing_bytes),
        config.dtype if at_once else config.gradient_dtype,
        ranks.collectives,
        failure,
        meter,
        is_last=(lambda: True) if at_once else is_last_backward,
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
    plan: Plan,
    arena: Arena,
    store: DurableStore | None,
    device_homes: DeviceHomes | None,
    windows: Sequence[Window],
    trace: Trace,
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
    for item, window in zip(plan.units, windows, strict=True):
        unit = item.unit
        if item.weights is Tier.DEVICE:
            if device_homes is None or not isinstance(window, DeviceWindow):
                raise ValueError(f"unit {unit.name} is to rest on a device, and there is none")
            homes.append(device_homes.make(unit, [tile for tile, _ in item.tiles], window))
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
    whole: Sequence[UnitSpec], plan: Plan, dtype: torch.dtype, device: Device | None
) -> tuple[list[Window], list[list[nn.Parameter]]]:
    """A window for each unit, open where the unit is resident on a device, else closed; and the parameters in it."""
    windows: list[Window] = []
    parameters = []
    largest = max(unit.numel for unit in whole) * plan.formats.weights
    make: Callable[[int], Window]
    if device is not None:
        make = partial(DeviceWindow, dtype=dtype, device=device)
    else:
        make = partial(window_class(), dtype=dtype, poison=aio_ext.Pattern(largest, POISON))
    for item, unit in zip(plan.units, whole, strict=True):
        window = make(unit.numel)
        windows.append(window)
        parameters.append([spec.over(window.flat[spec.offset : spec.offset + spec.numel]) for spec in unit.parameters])
        if item.weights is not Tier.DEVICE:
            window.close()
    return windows, parameters


def _close_resident(windows: Sequence[Window], homes: Sequence[UnitHomes]) -> None:
    for window, home in zip(windows, homes, strict=True):
        if home.weights.tensor is not None:
            window.close()


def _unit_gradients(
    unit: UnitSpec,
    homes: UnitHomes,
    pool: BufferPool,
    dtype: torch.dtype,
    squares: Squares | None,
    meter: Meter,
) -> UnitGradients:
    resident = resident_gradients(unit, homes, dtype, squares)
    return SpilledGradients(unit, homes.tiles, pool, dtype, meter) if resident is None else resident


def _measure_link(
    device: Device,
    units: Sequence[UnitSpec],
    homes: Sequence[UnitHomes],
    windows: Sequence[DeviceWindow],
    slots: Sequence[Slot],
) -> LinkRates | None:
    """The bandwidth between host memory and the device, on the memory of the largest unit that crosses it, if any."""
    crossing = [unit for unit in units if homes[unit.index].weights.tensor is None]
    unit = max(crossing, key=lambda unit: unit.numel, default=None)
    if unit is None:
        return None
    address = homes[unit.index].weights.address
    return bandwidth.measure_link(device, windows[unit.index], slots[0].address if address is None else address)
