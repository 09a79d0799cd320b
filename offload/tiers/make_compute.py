"""Makes what stands between the tiers and compute: in host memory or a device's, for one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

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
from offload.tiers.compute import Compute, ComputeOnDevice, ComputeOnHost, ComputeOnRanks, WholeWeights
from offload.tiers.device_weights import DeviceCarrier, DeviceWeights, HostSource, Source
from offload.tiers.exchange import GradientExchange, Gradients
from offload.tiers.gathered import GatherCarrier, GatheredWeights, Place
from offload.tiers.gradients import GradientStore
from offload.tiers.growth import DeviceHomes, Growth
from offload.tiers.home import UnitHomes
from offload.tiers.host_weights import HostWeights, Slot
from offload.tiers.ranks_source import RanksSource
from offload.tiers.squares import Squares
from offload.tiers.transport import GradientTransport
from offload.tiers.window import DeviceWindow, HostWindow
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import Arena, Lease

Intake: TypeAlias = GradientStore | GradientTransport | GradientExchange


@dataclass(frozen=True)
class OnDevice:
    """The part of the tiers that is there where a device computes."""

    device: Device
    weights: DeviceWeights
    transport: GradientTransport
    growth: Growth
    link: LinkRates | None


@dataclass(frozen=True)
class Computing:
    """What compute asks for weights, and what takes its gradients. ``whole``: units that this rank has shards of."""

    compute: Compute
    intake: Intake
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
    host: HostWeights
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
    squares: Squares | None


def compute_on_host(base: Base, windows: Sequence[HostWindow]) -> Computing:
    """The CPU computes."""
    ranks, plan = base.ranks, base.plan.ranks
    if not isinstance(ranks.collectives, Rounds) or plan is None:
        return Computing(ComputeOnHost(windows, base.host), base.gradients)
    places = [Place(base.arena.lease(nbytes)) for nbytes in plan.places]
    carrier = GatherCarrier(base.whole, ranks.shards, base.host, places, base.config.dtype, ranks.collectives)
    gathered = GatheredWeights(base.whole, carrier, base.failure, base.meter, prefetch=base.config.prefetch)

    intake: Intake = base.gradients
    if plan.buffers:

        def over(memory: Lease | aio_ext.Memory) -> Gradients:
            return Gradients(tensor_at(memory.address, memory.nbytes, torch.uint8), memory)

        sums = over(base.arena.lease(plan.sum_bytes)).memory.view(torch.float32)
        intake = _exchange(
            base,
            ranks,
            plan,
            base.gradients,
            [over(base.arena.lease(nbytes)) for nbytes in plan.buffers],
            lambda nbytes: over(aio_ext.Memory(nbytes)),
            over(base.arena.lease(plan.landing_bytes)).memory,
            lambda numel: sums[:numel].zero_(),  # they are brought home before the next ones are made
            ranks.collectives.links,
        )
    return Computing(ComputeOnRanks(windows, gathered), intake, whole=gathered)


def compute_on_device(
    base: Base, memory: DeviceMemory, parameters: Sequence[Sequence[nn.Parameter]], slots: Sequence[Slot]
) -> Computing:
    """A device computes with these ``parameters`` of each unit. ``slots`` are those of host memory."""
    device, ranks, plan = memory.device, base.ranks, base.plan.device
    if plan is None:
        raise ValueError("the plan has no part for the device")
    links = ranks.connect(device) if ranks.size > 1 else None
    carrier = DeviceCarrier(
        memory.windows, _source(base, memory, links), device, plan.weights_bytes, plan.least_weights_bytes
    )
    weights = DeviceWeights(
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
        base.units,
        device,
        base.gradients,
        memory.landings,
        config.dtype if ranks.size == 1 else torch.float32,
        config.gradient_dtype,
        plan.gradients_bytes,
        memory.squares,
        base.failure,
        base.meter,
    )
    arrive = weights.arrive if ranks.size == 1 else weights.drop_copy  # what is gathered has no home of its own
    growth = Growth(base.homes, memory.homes, base.host, weights, arrive, base.gradients, transport, memory.squares)
    ordinary = [  # those whose memory can be looked at
        [parameter for spec, parameter in zip(unit.parameters, of_unit, strict=True) if spec.packing is None]
        for unit, of_unit in zip(base.whole, parameters, strict=True)
    ]
    compute = ComputeOnDevice(device, memory.windows, ordinary, weights)
    on_device = OnDevice(device, weights, transport, growth, _measure_link(base, memory, slots))
    intake: Intake = transport
    if links is not None and base.plan.ranks is not None and base.plan.ranks.buffers:
        intake = _exchange_on_device(base, memory, ranks, base.plan.ranks, transport, links)
    base.closers.callback(transport.stop)
    base.closers.callback(weights.close)
    return Computing(compute, intake, on_device, whole=None if ranks.size == 1 else weights)


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
    def make(nbytes: int) -> Gradients:
        window = _window(base, memory, nbytes, torch.uint8)
        return Gradients(window.target, window)

    buffers = [make(nbytes) for nbytes in plan.buffers]
    landing = make(plan.landing_bytes).memory
    zeros = partial(torch.zeros, device=memory.device.torch_device)  # anew: they are on their way home for a while
    return _exchange(base, ranks, plan, transport, buffers, make, landing, zeros, links)


def _exchange(
    base: Base,
    ranks: Ranks,
    plan: RanksPlan,
    store: GradientStore | GradientTransport,
    buffers: Sequence[Gradients],
    make_buffer: Callable[[int], Gradients],
    landing: torch.Tensor,
    make_sum: Callable[[int], torch.Tensor],
    links: Links,
) -> GradientExchange:
    assert isinstance(ranks.collectives, Rounds)
    return GradientExchange(
        base.whole,
        ranks.shards,
        store,
        base.host,
        buffers,
        make_buffer,
        landing,
        make_sum,
        base.config.dtype,
        base.config.gradient_dtype,
        links,
        ranks.collectives,
        base.failure,
        base.meter,
        holds=base.holds_gradients if plan.placement == "states" else lambda: False,
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
