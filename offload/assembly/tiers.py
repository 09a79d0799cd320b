"""Reserves memory and disk for a plan, and ties homes, levels and gradients together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from offload.assembly.compute import Base, Computing, OnDevice, OnHost
from offload.assembly.run_plan import RunPlan
from offload.closing import Closers
from offload.memory import interleave
from offload.ranks.host_cores import host_nodes
from offload.ranks.ranks import Ranks
from offload.report.meter import Meter
from offload.report.report import Bandwidths
from offload.tiers import bandwidth
from offload.tiers.gradients.last_step import LastGradients
from offload.tiers.gradients.make import make_unit_gradients
from offload.tiers.gradients.norms import AddUp, DistributedParts, RankSquares, add_up_shards
from offload.tiers.gradients.spill import BufferPool
from offload.tiers.gradients.store import GradientStore, of_one_rank
from offload.tiers.gradients.unit import UnitGradients
from offload.tiers.home import UnitHomes
from offload.tiers.make import make_homes
from offload.tiers.store import EngineStore, RecordExtents, extents_of_records, open_engine_store, open_files
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.shadow import Slot
from offload.tiers.window import Window
from offload.waiting import Failure
from swapper import Arena, DurableStore, InPlaceFiles, Lease


@dataclass(frozen=True)
class Tiers:
    """Everything that holds or moves bytes. ``homes`` change when units move to a device; the list stays."""

    arena: Arena
    store: DurableStore | None
    files: InPlaceFiles | None
    """Files that frozen weights are read from in place."""
    opened: EngineStore | None
    """The store as it was opened."""
    records: Sequence[RecordExtents]
    """Extents that a commit puts each unit's records into; none if the store cannot hold generations."""
    homes: list[UnitHomes]
    windows: Sequence[Window]
    parameters: Sequence[Sequence[nn.Parameter]]
    """Of each unit, in order: views of its window, which the model computes with."""
    slots: Sequence[Slot]
    tile_buffers: Sequence[Lease]
    host: HostLevel
    gradients: GradientStore
    last_gradients: LastGradients
    computing: Computing
    """The chains between the tiers and compute."""


def make_tiers(
    run: RunPlan,
    ranks: Ranks,
    variant: OnHost | OnDevice,
    failure: Failure,
    meter: Meter,
    closers: Closers,
    holds_gradients: Callable[[], bool],
) -> Tiers:
    """Reserve everything. What must be undone goes into ``closers``, also when this raises.

    ``holds_gradients``: a rank keeps what it has made of gradients for a later backward, if it has the memory.
    """
    plan, config = run.plan, run.config
    units = [item.unit for item in plan.units]
    arena, opened, files = _reserve(run, ranks, variant, closers)
    store = opened.store if opened is not None else None
    windows, parameters = variant.make_windows(run.units)
    staging = plan.staging
    homes = make_homes(plan, arena, store, files, variant.make_homes(units, windows), meter.trace)
    slots = [Slot(arena.lease(staging.slot_bytes)) for _ in range(staging.num_slots)]
    grad_buffers = [arena.lease(staging.grad_buffer_bytes) for _ in range(staging.num_grad_buffers)]
    tile_buffers = [arena.lease(staging.tile_buffer_bytes) for _ in range(staging.num_tile_buffers)]
    if files is not None:
        files.use(arena, staging.edge_bytes, staging.num_slots)
    is_computed_on = isinstance(variant, OnHost) and ranks.size == 1
    host_meter = meter if is_computed_on else Meter(meter.trace, track="waiting for weights")
    places = {"prefetch": config.prefetch, "may_add_places": is_computed_on}
    host = HostLevel(units, homes, slots, staging.slot_bytes, failure, host_meter, **places)
    closers.callback(host.drain)
    pool = BufferPool(grad_buffers, host.fence, failure, host_meter)
    closers.callback(pool.drain)
    squares = variant.make_squares(units)
    last_gradients = LastGradients(failure)
    by_unit = [
        make_unit_gradients(unit, homes[unit.index], pool, config.gradient_dtype, squares, host_meter, last_gradients)
        for unit in units
    ]
    gradients = _gradients(run, ranks, failure, by_unit)
    base = Base(run, ranks, arena, homes, slots, host, gradients, holds_gradients, failure, meter, closers)
    return Tiers(
        arena=arena,
        store=store,
        files=files,
        opened=opened,
        records=extents_of_records(plan, homes, opened) if opened is not None and opened.holds_generations else (),
        homes=homes,
        windows=windows,
        parameters=parameters,
        slots=slots,
        tile_buffers=tile_buffers,
        host=host,
        gradients=gradients,
        last_gradients=last_gradients,
        computing=variant.connect(base, parameters, squares),
    )


def _reserve(
    run: RunPlan, ranks: Ranks, variant: OnHost | OnDevice, closers: Closers
) -> tuple[Arena, EngineStore | None, InPlaceFiles | None]:
    """Host memory, pinned where a device copies from it; the store; the files that are read in place."""
    plan, config = run.plan, run.config
    opened = open_engine_store(config, plan, run.sharers, ranks)
    arena = Arena(plan.arena_bytes + sum(variant.landing_bytes) + plan.ranks.arena_bytes)
    closers.callback(partial(ranks.close_memory, arena))
    nodes = host_nodes()
    if len(nodes) > 1:  # else the kernel does it by itself
        interleave(arena.address, arena.nbytes, nodes)
    variant.pin(arena)
    if opened is not None:
        closers.callback(opened.close)
        opened.store.register(arena)
    files = open_files(config, plan, run.sharers)
    if files is not None:
        closers.callback(files.close)
    return arena, opened, files


def _gradients(run: RunPlan, ranks: Ranks, failure: Failure, by_unit: Sequence[UnitGradients]) -> GradientStore:
    """The last of the sinks, and the way in which it makes sums of squares those of whole gradients."""
    units = [item.unit for item in run.plan.units]
    over: list[AddUp] = []
    spilled_by_ranks: set[int] = set()
    if ranks.size > 1:
        over.append(partial(add_up_shards, ranks))
        own = [unit.index for unit, gradients in zip(units, by_unit, strict=True) if gradients.spills]
        spilled_by_ranks.update(*ranks.all_gather_object("where gradients are stored", own))
    if run.parts.size > 1:
        over.append(DistributedParts(units, run.parts, failure).add_up)
    return GradientStore(by_unit, RankSquares(units, over).make_whole if over else of_one_rank, spilled_by_ranks)


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
