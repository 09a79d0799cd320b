"""Makes what stands between the tiers and compute: in host memory or a device's, for one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

import aio_ext
from offload.closing import Closers
from offload.config import OffloadConfig
from offload.device.protocol import Device
from offload.memory import tensor_at
from offload.plan.plan import Plan
from offload.plan.ranks import NUM_SHARDS_ON_DEVICE, RanksPlan
from offload.ranks.collectives import Rounds
from offload.ranks.links import DeviceLinks, Links
from offload.ranks.ranks import Ranks
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.tiers import bandwidth
from offload.tiers.bounce import Bounce
from offload.tiers.gradients.exchange import Bucket, ExchangeMemory, GradientExchange
from offload.tiers.gradients.norms import Squares
from offload.tiers.gradients.sink import GradientDtypes, GradientSink
from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.transport import GradientTransport
from offload.tiers.growth import DeviceHomes, Growth
from offload.tiers.home import UnitHomes
from offload.tiers.weights.device import DeviceCarrier, DeviceLevel, Source
from offload.tiers.weights.gather import GatherBuffer, GatherCarrier, GatherLevel
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.host_source import HostSource
from offload.tiers.weights.level import Level
from offload.tiers.weights.ranks_source import RanksSource
from offload.tiers.weights.shadow import Slot
from offload.tiers.window import DeviceWindow, HostWindow
from offload.units import UnitSpec
from offload.uses import DeviceClock, DeviceWindows, HostClock, HostWindows, Uses
from offload.waiting import Failure
from swapper import Arena, Lease


class WholeWeights(Protocol):
    """Whole units, where this rank has shards of them."""

    def borrow(self, unit: UnitSpec, start: int, stop: int) -> AbstractContextManager[int]:
        """The address, in host memory, of these elements of the unit or of a copy of them, to be read."""


@dataclass(frozen=True)
class OnDevice:
    """The part of the tiers that is there where a device computes."""

    device: Device
    level: DeviceLevel
    transport: GradientTransport
    growth: Growth
    link: LinkRates | None


@dataclass(frozen=True)
class Computing:
    """What compute asks for weights, and what takes its gradients. ``whole``: units that this rank has shards of."""

    level: Level
    uses: Uses
    intake: GradientSink
    on_device: OnDevice | None = None
    whole: WholeWeights | None = None


@dataclass(frozen=True)
class Base:
    """The tiers below. ``whole`` are the units that compute sees, ``holds_gradients`` as in ``make_tiers``."""

    whole: Sequence[UnitSpec]
    plan: Plan
    config: OffloadConfig
    arena: Arena
    homes: list[UnitHomes]
    host: HostLevel
    gradients: GradientStore
    ranks: Ranks
    holds_gradients: Callable[[], bool]
    failure: Failure
    meter: Meter
    closers: Closers

    @property
    def units(self) -> list[UnitSpec]:
        """Those of this rank: the same, or its shards of them."""
        return [item.unit for item in self.plan.units]


@dataclass(frozen=True)
class DeviceMemory:
    """What there is of a device: ``windows`` are for the units that compute sees, ``landings``, in host memory, for
    gradients that come from it."""

    device: Device
    windows: Sequence[DeviceWindow]
    homes: DeviceHomes
    landings: Sequence[Lease]
    bounce: Bounce
    squares: Squares


def compute_on_host(base: Base, windows: Sequence[HostWindow]) -> Computing:
    """The CPU computes."""
    ranks, plan = base.ranks, base.plan.ranks
    if not isinstance(ranks.collectives, Rounds):
        return Computing(base.host, _uses_on_host(base, base.host, windows), base.gradients)
    places = [GatherBuffer(base.arena.lease(nbytes)) for nbytes in plan.places]
    carrier = GatherCarrier(base.whole, ranks.shards, base.host, places, base.config.dtype, ranks.collectives)
    gathered = GatherLevel(base.whole, carrier, base.failure, base.meter, prefetch=base.config.prefetch)

    intake: GradientSink = base.gradients
    if plan.buffers:

        def over(memory: Lease | aio_ext.Memory) -> torch.Tensor:
            return tensor_at(memory.address, memory.nbytes, torch.uint8)

        def bucket(memory: Lease | aio_ext.Memory) -> Bucket:
            return Bucket(over(memory), memory)

        sums = over(base.arena.lease(plan.sum_bytes)).view(torch.float32)
        memory = ExchangeMemory(
            buckets=[bucket(base.arena.lease(nbytes)) for nbytes in plan.buffers],
            make_bucket=lambda nbytes: bucket(aio_ext.Memory(nbytes)),
            landing=over(base.arena.lease(plan.landing_bytes)),
            make_sum=lambda numel: sums[:numel].zero_(),  # they are brought home before the next ones are made
        )
        intake = _exchange(base, ranks, plan, base.gradients, memory, ranks.collectives.links)
    return Computing(gathered, _uses_on_host(base, gathered, windows), intake, whole=gathered)


def _uses_on_host(base: Base, level: Level, windows: Sequence[HostWindow]) -> Uses:
    return Uses(base.whole, level, HostWindows(windows), HostClock(), base.meter)


def compute_on_device(
    base: Base, memory: DeviceMemory, parameters: Sequence[Sequence[nn.Parameter]], slots: Sequence[Slot]
) -> Computing:
    """A device computes with these ``parameters`` of each unit. ``slots`` are those of host memory."""
    device, ranks, plan = memory.device, base.ranks, base.plan.device
    links = ranks.connect(device) if ranks.size > 1 else None
    carrier = DeviceCarrier(
        memory.windows, _source(base, memory, links), device, plan.weights_bytes, plan.least_weights_bytes
    )
    weights = DeviceLevel(
        base.whole,
        lambda unit: ranks.size == 1 and base.homes[unit.index].weights.tensor is not None,
        carrier,
        device,
        memory.bounce,
        base.failure,
        base.meter,
        prefetch=base.config.prefetch,
    )
    config = base.config
    transport = GradientTransport(
        units=base.units,
        device=device,
        store=base.gradients,
        landings=memory.landings,
        dtypes=GradientDtypes(config.dtype if ranks.size == 1 else torch.float32, config.gradient_dtype),
        max_bytes=plan.gradients_bytes,
        squares=memory.squares,
        failure=base.failure,
        meter=base.meter,
    )
    arrive = (
        weights.cache.make_permanent if ranks.size == 1 else weights.cache.drop
    )  # what is gathered has no home of its own
    growth = Growth(base.homes, memory.homes, base.host, weights, arrive, base.gradients, transport, memory.squares)
    ordinary = [  # those whose memory can be looked at
        [parameter for spec, parameter in zip(unit.parameters, of_unit, strict=True) if spec.packing is None]
        for unit, of_unit in zip(base.whole, parameters, strict=True)
    ]
    uses = Uses(base.whole, weights, DeviceWindows(memory.windows, ordinary), DeviceClock(device), base.meter)
    on_device = OnDevice(device, weights, transport, growth, _measure_link(base, memory, slots))
    intake: GradientSink = transport
    if links is not None and base.plan.ranks.buffers:
        intake = _exchange_on_device(base, memory, ranks, base.plan.ranks, transport, links)
    base.closers.callback(transport.stop)
    base.closers.callback(weights.close)
    return Computing(weights, uses, intake, on_device, whole=None if ranks.size == 1 else weights)


def _source(base: Base, memory: DeviceMemory, links: DeviceLinks | None) -> Source:
    if links is None or not isinstance(base.ranks.collectives, Rounds):
        return HostSource(base.host, memory.device, base.failure, base.meter)
    largest = max(shard.numel for shard in base.ranks.shards)
    return RanksSource(
        base.whole,
        base.ranks.shards,
        base.homes,
        base.host,
        [_window(base, memory, largest, base.config.dtype) for _ in range(NUM_SHARDS_ON_DEVICE)],
        memory.device,
        links,
        base.ranks.collectives,
        base.failure,
        base.meter,
    )


def _exchange_on_device(
    base: Base, memory: DeviceMemory, ranks: Ranks, plan: RanksPlan, transport: GradientTransport, links: Links
) -> GradientExchange:
    def make(nbytes: int) -> Bucket:
        window = _window(base, memory, nbytes, torch.uint8)
        return Bucket(window.target, window)

    of_exchange = ExchangeMemory(
        buckets=[make(nbytes) for nbytes in plan.buffers],
        make_bucket=make,
        landing=_window(base, memory, plan.landing_bytes, torch.uint8).target,
        # Anew: they are on their way home for a while.
        make_sum=partial(torch.zeros, device=memory.device.torch_device),
    )
    return _exchange(base, ranks, plan, transport, of_exchange, links)


def _exchange(
    base: Base, ranks: Ranks, plan: RanksPlan, sink: GradientSink, memory: ExchangeMemory, links: Links
) -> GradientExchange:
    assert isinstance(ranks.collectives, Rounds)
    return GradientExchange(
        units=base.whole,
        shards=ranks.shards,
        sink=sink,
        fence=base.host.fence,
        memory=memory,
        dtypes=GradientDtypes(base.config.dtype, base.config.gradient_dtype),
        holds=base.holds_gradients if plan.placement == "states" else lambda: False,
        links=links,
        collectives=ranks.collectives,
        failure=base.failure,
        meter=base.meter,
    )


def _window(base: Base, memory: DeviceMemory, numel: int, dtype: torch.dtype) -> DeviceWindow:
    """Device memory until the end."""
    window = DeviceWindow(numel, dtype, memory.device)
    base.closers.callback(window.close)
    return window


def _measure_link(base: Base, memory: DeviceMemory, slots: Sequence[Slot]) -> LinkRates | None:
    """The bandwidth between host memory and the device, on the memory of the largest unit that crosses it, if any."""
    crossing = [unit for unit in base.units if base.homes[unit.index].weights.tensor is None]
    unit = max(crossing, key=lambda unit: unit.numel, default=None)
    if unit is None:
        return None
    address = base.homes[unit.index].weights.address
    window = memory.windows[unit.index]
    return bandwidth.measure_link(memory.device, window, slots[0].address if address is None else address, unit.numel)
