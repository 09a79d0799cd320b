"""Building an engine: everything that the plan names is reserved, filled and tied together, or nothing is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import aio_ext
from aio_ext.profile import IoProfile, load_profile
from offload import bandwidth
from offload.compute import Compute, DeviceCompute, HostCompute
from offload.config import OffloadConfig
from offload.device import Device
from offload.device_gradients import NUM_LANDINGS, DeviceGradients
from offload.device_homes import DeviceHomes
from offload.device_squares import Squares
from offload.device_updates import DeviceUpdates
from offload.device_weights import DeviceWeights
from offload.failure import Failure
from offload.gradients import Gradients
from offload.handle import Handle, make_handle
from offload.kernel_rule import KernelRule
from offload.layout import Formats
from offload.load import Loader
from offload.pieces import Cut, CutHandle
from offload.plan import Plan, Tier, UnitPlan
from offload.report import Bandwidths, Link, Meter
from offload.residency import Weights
from offload.rule import Rule
from offload.states import Access, CutLink, ParameterLink
from offload.tiles import Tiles
from offload.unit import GradientBuffer, Residency, Slot, StateTile, Unit
from offload.units import ParameterSpec, num_nested
from offload.update import Updater
from offload.window import POISON, DeviceWindow, Window, window_class
from swapper import PAGE_BYTES, Arena, Extent, Lease, Store, align


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. Without training there is no ``updater`` and no ``tiles``."""

    store: Store | None
    units: list[Unit]
    handles: dict[ParameterSpec, nn.Parameter]
    """What stands at the sites of each parameter or piece between its uses."""
    parameters: dict[ParameterSpec, nn.Parameter]
    """The model's parameters, which of pieces are the whole."""
    weights: Weights
    gradients: Gradients
    compute: Compute
    updater: Updater | None
    tiles: Tiles | None
    bandwidths: Bandwidths | None
    link: Link | None


def build(
    model: nn.Module,
    plan: Plan,
    config: OffloadConfig,
    rule: Rule | None,
    device: Device | None,
    failure: Failure,
    meter: Meter,
    closers: contextlib.ExitStack,
) -> Parts:
    """Reserve memory and disk, move the model's parameters to their homes, and put handles in their place.

    What must be undone goes into ``closers``, also when this raises.
    """
    formats = plan.formats
    sizes = [nbytes for item in plan.units for nbytes in _extent_sizes(item, formats, plan.shadows)]
    profile = _profile(config)
    store = _open_store(config, profile, sizes) if sizes else None
    landing_bytes = [plan.compute_bytes // NUM_LANDINGS] * NUM_LANDINGS if device is not None else []
    arena = Arena(plan.arena_bytes + sum(landing_bytes))
    closers.callback(arena.close)
    if device is not None:
        device.pin(arena.address, max(arena.nbytes, PAGE_BYTES))
        closers.callback(device.unpin, arena.address)
    if store is not None:
        closers.callback(store.close)
        store.register(arena)
    units = _make_units(plan, config, arena, store, device)
    slots = [Slot(arena.lease(plan.slot_bytes)) for _ in range(plan.staging.num_slots)]
    grad_buffers = [GradientBuffer(arena.lease(plan.grad_buffer_bytes)) for _ in range(plan.staging.num_grad_buffers)]
    tile_buffers = [arena.lease(plan.tile_buffer_bytes) for _ in range(plan.staging.num_tile_buffers)]

    background = Meter(meter.trace, track="waiting for weights")
    weights = Weights(units, slots, store, failure, meter if device is None else background, config.prefetch)
    closers.callback(weights.drain)
    gradients = Gradients(grad_buffers, store, config.gradient_dtype, failure, meter if device is None else background)
    closers.callback(gradients.drain)
    homes, squares = None, None
    if device is not None and plan.device is not None:
        if rule is not None and plan.device.obstacle is None:
            squares = Squares(device, [unit.spec for unit in units], plan.device.homes, meter)
            closers.callback(squares.close)
        on_device = [unit for unit in units if unit.on_device]
        native = rule if isinstance(rule, KernelRule) else None
        homes = DeviceHomes(on_device, device, native, formats, (config.dtype, config.gradient_dtype), squares)
        closers.callback(homes.close)
    tiles = Tiles(rule, store, homes) if rule is not None else None
    link = None if device is None else _measure_link(device, units, slots)
    updates = _make_device_updates(plan, rule, device, link, meter)
    if updates is not None:
        closers.callback(updates.close)
    updater = None
    if rule is not None:
        spare_slots = plan.staging.num_slots - num_nested([item.unit for item in plan.units])
        max_early = spare_slots - 1
        updater = Updater(tile_buffers, store, rule, formats, weights, gradients, failure, meter, max_early, updates)
        closers.callback(updater.stop)
    compute: Compute = HostCompute(weights, gradients)
    if device is not None and homes is not None and plan.device is not None:
        landings = [arena.lease(nbytes) for nbytes in landing_bytes if nbytes]
        to_device = DeviceWeights(units, weights, device, plan.device.weights_bytes, failure, meter, config.prefetch)
        to_host = DeviceGradients(
            device, gradients, landings, config.dtype, plan.device.gradients_bytes, squares, failure, meter
        )
        compute = DeviceCompute(device, to_device, gradients, to_host, homes, squares, updates)
        closers.callback(to_host.stop)
        closers.callback(to_device.close)
    torch_device = torch.device("cpu") if device is None else device.torch_device
    access = Access(weights, gradients, homes, rule, tiles, updater, compute, formats, failure, torch_device)
    links = {spec: ParameterLink(unit, spec, access) for unit in units for spec in unit.spec.parameters}
    handles = {
        spec: make_handle(link, spec.shape, config.dtype, torch_device, spec.trainable) for spec, link in links.items()
    }
    parameters = {**handles, **_wholes(links, config.dtype, torch_device)}
    Loader(store, homes, rule, formats, slots, tile_buffers).load(model, units, handles, parameters)
    if device is not None:
        _move_rest(model, torch_device)
        closers.callback(_leave_alone(model))
    bandwidths = None
    if store is not None and profile is not None:
        bandwidths = Bandwidths(profile.read_bytes_per_s, profile.write_bytes_per_s, profile.mixed_q)
    elif store is not None:
        bandwidths = _measure(store, units, slots, tile_buffers)
    return Parts(store, units, handles, parameters, weights, gradients, compute, updater, tiles, bandwidths, link)


def _wholes(
    links: dict[ParameterSpec, ParameterLink], dtype: torch.dtype, device: torch.device
) -> dict[ParameterSpec, nn.Parameter]:
    """A handle for each parameter that is in pieces, by each of its pieces."""
    of_cut: dict[Cut, list[ParameterSpec]] = {}
    for spec in links:
        if spec.piece is not None:
            of_cut.setdefault(spec.piece.cut, []).append(spec)
    handles = {}
    for cut, specs in of_cut.items():
        link = CutLink(cut, [links[spec] for spec in specs])
        handle = make_handle(link, cut.shape, dtype, device, specs[0].trainable, CutHandle)
        handles.update(dict.fromkeys(specs, handle))
    return handles


def _extent_sizes(item: UnitPlan, formats: Formats, shadows: bool) -> Iterator[int]:
    """The extents of one unit, in the order in which ``_make_units`` takes them."""
    copies = 2 if shadows and item.on_nvme else 1
    if item.weights is Tier.NVME:
        yield from [item.unit.numel * formats.weights] * copies
    for tile, tier in item.tiles:
        if tier is Tier.NVME:
            yield from [tile.nbytes] * copies
        if item.grads is Tier.NVME:
            yield tile.numel * formats.grads


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Buffers, and parameters that the engine does not manage, go where the model computes. What is shared stays so."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Handle):
                copy = nn.Parameter(parameter.to(device), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), copy)


def _leave_alone(model: nn.Module) -> Callable[[], None]:
    """Keep recurrent modules from gathering their weights in memory of their own; what undoes that.

    cuDNN likes them in one piece, and torch would point the parameters there: the engine would fill the old place.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module.__dict__["flatten_parameters"] = _nothing

    def undo() -> None:
        for module in recurrent:
            del module.__dict__["flatten_parameters"]

    return undo


def _nothing() -> None:
    return None


def _make_units(
    plan: Plan, config: OffloadConfig, arena: Arena, store: Store | None, device: Device | None
) -> list[Unit]:
    """Each unit with its window, its homes in RAM and its extents in the store."""
    formats = plan.formats
    largest = max(item.unit.numel for item in plan.units) * formats.weights
    poison = aio_ext.Pattern(largest, POISON)
    make_host_window = window_class()

    def make_window(numel: int) -> Window:
        if device is not None:
            return DeviceWindow(numel, config.dtype, device)
        return make_host_window(numel, config.dtype, poison)

    extents = iter(store.extents if store is not None else ())

    def place(nbytes: int, tier: Tier) -> tuple[Lease | None, Extent | None]:
        lease = arena.lease(nbytes) if tier is Tier.HOST else None
        return lease, next(extents) if tier is Tier.NVME else None

    units = []
    for item in plan.units:
        spec = item.unit
        window = make_window(spec.numel)
        parameters = [
            nn.Parameter(window.flat[p.offset : p.offset + p.numel].view(p.shape), requires_grad=p.trainable)
            for p in spec.parameters
        ]
        unit = Unit(item, window, parameters)
        if not unit.on_device:
            window.close()
        unit.weights_home, unit.weights_extent = place(spec.numel * formats.weights, item.weights)
        if unit.weights_home is not None:
            unit.residency = Residency.RESIDENT
        shadowed = plan.shadows and item.on_nvme
        if shadowed:
            unit.weights_shadow = next(extents)
        if item.grads is Tier.HOST:
            unit.grads_home = arena.lease(spec.trainable_numel * formats.grads)
        for tile, tier in item.tiles:
            home, extent = place(align(tile.nbytes), tier)
            shadow = next(extents) if shadowed else None
            grads_extent = next(extents) if item.grads is Tier.NVME else None
            unit.tiles.append(StateTile(tile, home, extent, grads_extent, shadow))
        units.append(unit)
    return units


def _profile(config: OffloadConfig) -> IoProfile | None:
    """What ``aio_bench.py`` has measured on the paths, if it has, and with the backend that is asked for."""
    with contextlib.suppress(OSError):  # the store refuses a path that is not there, and says so
        profile = load_profile(*config.paths) if config.paths else None
        if profile is not None and config.io_backend in ("auto", profile.backend):
            return profile
    return None


def _open_store(config: OffloadConfig, profile: IoProfile | None, sizes: Sequence[int]) -> Store:
    if profile is None:
        return Store(config.paths, sizes, backend=config.io_backend)
    return Store(
        config.paths,
        sizes,
        backend=profile.backend,
        queue_depth=profile.queue_depth,
        block_bytes=profile.block_bytes,
    )


def _measure_link(device: Device, units: Sequence[Unit], slots: Sequence[Slot]) -> Link | None:
    """The bandwidth between host memory and the device, on the memory of the largest unit that crosses it, if any."""
    unit = max((unit for unit in units if not unit.on_device), key=lambda unit: unit.weight_bytes, default=None)
    if unit is None:
        return None
    lease = unit.weights_home or slots[0].lease
    assert isinstance(unit.window, DeviceWindow)
    return bandwidth.measure_link(device, unit.window, lease.address)


def _make_device_updates(
    plan: Plan, rule: Rule | None, device: Device | None, link: Link | None, meter: Meter
) -> DeviceUpdates | None:
    """What updates tiles of the host on the device, where the plan has room for that."""
    if device is None or link is None or plan.device is None or not plan.device.updates_bytes:
        return None
    assert isinstance(rule, KernelRule)
    return DeviceUpdates(device, rule, plan.formats, plan.device.updates_bytes, link, meter)


def _measure(
    store: Store,
    units: Sequence[Unit],
    slots: Sequence[Slot],
    tile_buffers: Sequence[Lease],
) -> Bandwidths | None:
    """The store's bandwidth, measured on what is most of its bytes."""
    tiles = [tile.extent for unit in units for tile in unit.tiles if tile.extent is not None]
    weights = [unit.weights_extent for unit in units if unit.weights_extent is not None]
    for extents, buffers in ((tiles, tile_buffers), (weights, [slot.lease for slot in slots])):
        if extents and len(buffers) > 1:
            return bandwidth.measure(store, extents, buffers)
    return None
