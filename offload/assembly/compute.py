"""The chains between the tiers and compute: on the CPU or a device, for one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import aio_ext
from offload.assembly.run_plan import RunPlan
from offload.closing import Closers
from offload.device.protocol import Device
from offload.memory import fault_in, tensor_at
from offload.plan.buffers import NUM_LANDINGS
from offload.plan.ranks import NUM_SHARDS_ON_DEVICE
from offload.ranks.collectives import Rounds
from offload.ranks.links import DeviceLinks, Links
from offload.ranks.ranks import Ranks
from offload.report.meter import Meter
from offload.report.report import LinkRates, MemoryRates
from offload.tiers import bandwidth
from offload.tiers.bounce import Bounce
from offload.tiers.gradients.exchange import Bucket, ExchangeMemory, GradientExchange
from offload.tiers.gradients.norms import DeviceSquares, Squares
from offload.tiers.gradients.sink import GradientDtypes, GradientSink
from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.transport import GradientTransport
from offload.tiers.gradients.wire import WIRES
from offload.tiers.growth import DeviceHomes, Growth
from offload.tiers.home import UnitHomes
from offload.tiers.make import HomesOnDevice, make_windows
from offload.tiers.weights.carrier import HostBuffer
from offload.tiers.weights.device import DeviceCarrier, DeviceLevel, Source
from offload.tiers.weights.gather import GatherCarrier, GatherLevel
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.host_source import HostSource
from offload.tiers.weights.level import Level, Unsharded, WholeWeights
from offload.tiers.weights.ranks_source import RanksSource
from offload.tiers.weights.shadow import Slot
from offload.tiers.window import POISON, DeviceWindow, HostWindow, window_class
from offload.units import Tile, UnitSpec
from offload.uses import DeviceClock, DeviceWindows, HostClock, HostWindows, Uses, UsesOfResidents
from offload.waiting import Failure
from swapper import PAGE_BYTES, Arena, Lease


@dataclass(frozen=True)
class Base:
    """The tiers below. ``holds_gradients`` as in ``make_tiers``."""

    run: RunPlan
    ranks: Ranks
    arena: Arena
    homes: list[UnitHomes]
    slots: Sequence[Slot]
    host: HostLevel
    gradients: GradientStore
    holds_gradients: Callable[[], bool]
    failure: Failure
    meter: Meter
    closers: Closers


@dataclass(frozen=True)
class Moving:
    """The parts that move bytes between the host and a device."""

    level: DeviceLevel
    transport: GradientTransport
    growth: Growth
    link: LinkRates
    host_memory: MemoryRates
    """Of what both ends of the link and updates on the CPU move there."""


@dataclass(frozen=True)
class Computing:
    """The level that compute asks for weights, and the sink that takes its gradients."""

    level: Level
    uses: Uses
    sink: GradientSink
    whole: WholeWeights = Unsharded()  # noqa: RUF009  # it has no state
    """Units that this rank has shards of."""
    moving: tuple[Moving, ...] = ()
    """The device's side, where one computes: its level, its transport and its link."""


class OnHost:
    """The CPU computes, on weights as they lie in host memory."""

    landing_bytes: Sequence[int] = ()

    def __init__(self, run: RunPlan) -> None:
        self._run = run

    def pin(self, arena: Arena) -> None:
        """Nothing copies from it by itself."""

    def make_windows(self, units: Sequence[UnitSpec]) -> tuple[list[HostWindow], list[list[nn.Parameter]]]:
        """A closed window for each unit, and the parameters in it."""
        largest = max(unit.numel for unit in units) * self._run.plan.formats.weights
        poison = aio_ext.Pattern(largest, POISON)
        make: Callable[[int], HostWindow] = partial(window_class(), dtype=self._run.config.dtype, poison=poison)
        self._windows, parameters = make_windows(units, make)
        return self._windows, parameters

    def make_homes(self, units: Sequence[UnitSpec], windows: object) -> HomesOnDevice:
        """Nothing can rest on a device."""
        return _NoHomes()

    def make_squares(self, units: Sequence[UnitSpec]) -> Squares:
        """Sums of squares of gradients."""
        return Squares()

    def connect(self, base: Base, parameters: Sequence[Sequence[nn.Parameter]], squares: Squares) -> Computing:
        """Tie compute to the tiers."""
        collectives, plan, config = base.ranks.collectives, base.run.plan.ranks, base.run.config
        if not isinstance(collectives, Rounds):
            return Computing(base.host, self._uses(base, base.host), base.gradients)
        places = [HostBuffer(base.arena.lease(nbytes)) for nbytes in plan.places]
        carrier = GatherCarrier(base.run.units, base.run.shards, base.host, places, config.dtype, collectives)
        level = GatherLevel(base.run.units, carrier, base.failure, base.meter, prefetch=config.prefetch)
        sink: GradientSink = base.gradients
        if plan.buffers:
            sink = _exchange(base, collectives, sink, self._exchange_memory(base), collectives.links)
        return Computing(level, self._uses(base, level), sink, whole=level)

    def _uses(self, base: Base, level: HostLevel | GatherLevel) -> Uses:
        windows = HostWindows(self._windows, level.cache.leave_memory)
        base.closers.callback(windows.shut)
        if isinstance(level, HostLevel) and level.all_are_resident:
            return UsesOfResidents(base.run.units, level, self._windows, windows, base.meter)
        return Uses(base.run.units, level, windows, HostClock(), base.meter)

    def _exchange_memory(self, base: Base) -> ExchangeMemory:
        plan = base.run.plan.ranks

        def over(memory: Lease | aio_ext.Memory) -> torch.Tensor:
            return tensor_at(memory.address, memory.nbytes, torch.uint8)

        def bucket(memory: Lease | aio_ext.Memory) -> Bucket:
            return Bucket(over(memory), memory)

        sums = over(base.arena.lease(plan.sum_bytes)).view(torch.float32)
        return ExchangeMemory(
            buckets=[bucket(base.arena.lease(nbytes)) for nbytes in plan.buffers],
            make_bucket=lambda nbytes: bucket(aio_ext.Memory(nbytes)),
            landing=over(base.arena.lease(plan.landing_bytes)),
            make_sum=lambda numel: sums[:numel].zero_(),  # they are brought home before the next ones are made
        )


class _NoHomes:
    def make(self, unit: UnitSpec, tiles: Sequence[Tile]) -> UnitHomes:
        raise ValueError(f"unit {unit.name} is to rest on a device, and there is none")


class OnDevice:
    """A device computes, on weights in its own memory."""

    def __init__(self, run: RunPlan, device: Device, meter: Meter, closers: Closers) -> None:
        self._run = run
        self._device = device
        self._meter = meter
        self._closers = closers
        self._bounce = Bounce(device)
        compute_bytes = run.plan.compute_bytes - run.plan.activation_bytes
        self.landing_bytes = [compute_bytes // NUM_LANDINGS] * NUM_LANDINGS
        """Of buffers in host memory for gradients that come from the device."""

    def pin(self, arena: Arena) -> None:
        """Let the device copy from and to it by itself."""
        device = self._device
        fault_in(arena.address, arena.nbytes, max(int(self._run.cores), 1))  # to pin it, the kernel would use one
        device.pin(arena.address, max(arena.nbytes, PAGE_BYTES))
        self._closers.callback(partial(device.unpin, arena.address))

    def make_windows(self, units: Sequence[UnitSpec]) -> tuple[list[DeviceWindow], list[list[nn.Parameter]]]:
        """A closed window for each unit, and the parameters in it."""
        self._windows, parameters = make_windows(
            units, partial(DeviceWindow, dtype=self._run.config.dtype, device=self._device)
        )
        return self._windows, parameters

    def make_homes(self, units: Sequence[UnitSpec], windows: object) -> HomesOnDevice:
        """Homes of units that rest on the device: in the windows, or, where ranks have shards, in others."""
        own = self._windows if self._run.world.size == 1 else self.make_own_windows(units)
        self._closers.callback(self._bounce.close)
        self._homes = DeviceHomes(
            self._device, own, self._run.plan.formats, self._run.config.gradient_dtype, self._bounce
        )
        self._closers.callback(self._homes.close)
        return self._homes

    def make_own_windows(self, shards: Sequence[UnitSpec]) -> list[DeviceWindow]:
        """Windows for this rank's shards."""
        return make_windows(shards, partial(DeviceWindow, dtype=self._run.config.dtype, device=self._device))[0]

    def make_squares(self, units: Sequence[UnitSpec]) -> Squares:
        """Sums of squares of gradients: by kernels on the device, if it can run some."""
        plan = self._run.plan.device
        if not plan.squares_bytes:
            return Squares()
        squares = DeviceSquares(self._device, units, plan.resident, self._meter)
        self._closers.callback(squares.close)
        return squares

    def connect(self, base: Base, parameters: Sequence[Sequence[nn.Parameter]], squares: Squares) -> Computing:
        """Tie compute to the tiers, with these ``parameters`` of each unit."""
        run, device, collectives, plan = base.run, self._device, base.ranks.collectives, base.run.plan
        is_sharded = isinstance(collectives, Rounds)
        links = [base.ranks.connect(device)] if is_sharded else []
        source = (
            self._ranks_source(base, links[0]) if links else HostSource(base.host, device, base.failure, base.meter)
        )
        level = DeviceLevel(
            run.units,
            lambda unit: not is_sharded and base.homes[unit.index].weights.tensor is not None,
            DeviceCarrier(self._windows, source, device, plan.device.weights_bytes, plan.device.least_weights_bytes),
            device,
            self._bounce,
            base.failure,
            base.meter,
            prefetch=run.config.prefetch,
        )
        made = torch.float32 if is_sharded else run.config.dtype  # ranks add theirs up
        transport = GradientTransport(
            units=run.shards,
            device=device,
            store=base.gradients,
            landings=[base.arena.lease(nbytes) for nbytes in self.landing_bytes if nbytes],
            dtypes=GradientDtypes(made, run.config.gradient_dtype),
            max_bytes=plan.device.gradients_bytes,
            squares=squares,
            failure=base.failure,
            meter=base.meter,
        )
        sink: GradientSink = transport
        if links and plan.ranks.buffers:
            assert isinstance(collectives, Rounds)
            sink = _exchange(base, collectives, sink, self._exchange_memory(base), links[0])
        base.closers.callback(transport.stop)
        base.closers.callback(level.close)
        arrive = level.cache.drop if is_sharded else level.cache.make_permanent  # what is gathered has no home here
        growth = Growth(base.homes, self._homes, base.host, level, arrive, base.gradients, transport, squares)
        moving = Moving(level, transport, growth, *self._measure(base))
        uses = Uses(run.units, level, self._device_windows(base, parameters), DeviceClock(device), base.meter)
        return Computing(level, uses, sink, level if is_sharded else Unsharded(), (moving,))

    def _device_windows(self, base: Base, parameters: Sequence[Sequence[nn.Parameter]]) -> DeviceWindows:
        ordinary = [  # those whose memory can be looked at
            [parameter for spec, parameter in zip(unit.parameters, of_unit, strict=True) if spec.packing is None]
            for unit, of_unit in zip(base.run.units, parameters, strict=True)
        ]
        return DeviceWindows(self._windows, ordinary)

    def _ranks_source(self, base: Base, links: DeviceLinks) -> Source:
        assert isinstance(base.ranks.collectives, Rounds)
        run, largest = base.run, max(shard.numel for shard in base.run.shards)
        return RanksSource(
            run.units,
            run.shards,
            base.homes,
            base.host,
            [self._window(base, largest, run.config.dtype) for _ in range(NUM_SHARDS_ON_DEVICE)],
            self._device,
            links,
            base.ranks.collectives,
            base.failure,
            base.meter,
        )

    def _exchange_memory(self, base: Base) -> ExchangeMemory:
        plan = base.run.plan.ranks

        def make(nbytes: int) -> Bucket:
            window = self._window(base, nbytes, torch.uint8)
            return Bucket(window.target, window)

        return ExchangeMemory(
            buckets=[make(nbytes) for nbytes in plan.buffers],
            make_bucket=make,
            landing=self._window(base, plan.landing_bytes, torch.uint8).target,
            # Anew: they are on their way home for a while.
            make_sum=partial(torch.zeros, device=self._device.torch_device),
        )

    def _window(self, base: Base, numel: int, dtype: torch.dtype) -> DeviceWindow:
        """Device memory until the end."""
        window = DeviceWindow(numel, dtype, self._device)
        base.closers.callback(window.close)
        return window

    def _measure(self, base: Base) -> tuple[LinkRates, MemoryRates]:
        """The bandwidth between host memory and the device, on the memory of the largest unit that crosses it; and that
        of host memory, on states that are updated there meanwhile."""
        crossing = [unit for unit in base.run.shards if base.homes[unit.index].weights.tensor is None]
        unit = max(crossing, key=lambda unit: unit.numel, default=None)
        if unit is None:
            return LinkRates(), MemoryRates()
        address = base.homes[unit.index].weights.address
        address = base.slots[0].address if address is None else address
        window, numel = self._windows[unit.index], unit.numel
        link = bandwidth.measure_link(self._device, window, address, numel)
        states = [tile.states for homes in base.homes for tile in homes.tiles]
        updated = [(home.address, home.nbytes) for home in states if home.address is not None and home.nbytes]
        return link, bandwidth.measure_memory(self._device, window, address, numel, updated)


def _exchange(
    base: Base, collectives: Rounds, sink: GradientSink, memory: ExchangeMemory, links: Links
) -> GradientExchange:
    """The sink of gradients of whole units, between ranks that have shards of them."""
    config = base.run.config
    return GradientExchange(
        units=base.run.units,
        shards=base.run.shards,
        sink=sink,
        fence=base.host.fence,
        memory=memory,
        dtypes=GradientDtypes(config.dtype, config.gradient_dtype),
        wire=WIRES[config.exchange_dtype](),
        holds=base.holds_gradients if base.run.plan.ranks.placement == "states" else lambda: False,
        links=links,
        collectives=collectives,
        failure=base.failure,
        meter=base.meter,
    )
