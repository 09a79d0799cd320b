"""The placement: a pure function from units and budgets to a home for every byte, decided once, before step 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from offload.device_plan import GOLDEN, MARGIN, DevicePlan, plan_device
from offload.errors import BudgetError
from offload.layout import DEFAULT_TILE_BYTES, Formats, Tile
from offload.plan_text import describe
from offload.units import UnitSpec, num_nested
from swapper import align

_TILES_A_UNIT = 8
"""Tiles smaller than the largest unit's weights divided by this save no memory worth the speed they cost."""

_LEAST_TILE_BYTES = 64 << 10

_NUM_TILE_BUFFERS = 6
"""Enough for the disk to read, the kernel to work and the disk to write at the same time, and some to even out."""

_NUM_GRAD_BUFFERS = 3

Cut = Callable[[UnitSpec, int], tuple[Tile, ...]]
"""How the optimizer cuts a unit's states into tiles of at most so many bytes (``Rule.cut``)."""


class Tier(Enum):
    """Where bytes rest between uses."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Staging:
    """How many buffers of each kind the units that are not at home in RAM pass through, and how large a tile is."""

    num_slots: int
    num_grad_buffers: int
    num_tile_buffers: int
    tile_bytes: int


@dataclass(frozen=True)
class UnitPlan:
    """The home of each kind of one unit. ``tiles`` are its optimizer states, each with its own home."""

    unit: UnitSpec
    weights: Tier
    grads: Tier
    tiles: tuple[tuple[Tile, Tier], ...]

    @property
    def on_nvme(self) -> bool:
        """Weights and all states rest on NVMe."""
        return bool(self.tiles) and all(tier is Tier.NVME for tier in (self.weights, *(t for _, t in self.tiles)))

    @property
    def passes_through(self) -> bool:
        """Some of it rests on NVMe."""
        return Tier.NVME in (self.weights, self.grads, *(tier for _, tier in self.tiles))

    def moved(self) -> UnitPlan:
        """The unit, at home on a device, in the same tiles."""
        return UnitPlan(self.unit, Tier.DEVICE, Tier.DEVICE, tuple((tile, Tier.DEVICE) for tile, _ in self.tiles))


@dataclass(frozen=True)
class Plan:
    """Where everything rests, what the staging is, and what a step must move. ``print`` it for the whole table."""

    units: tuple[UnitPlan, ...]
    formats: Formats
    staging: Staging
    host_budget_bytes: int
    slot_bytes: int
    grad_buffer_bytes: int
    tile_buffer_bytes: int
    compute_bytes: int
    """What compute takes beside: the gradient that autograd has just made, copies of the weights in use where torch
    cannot use them where they are; or buffers that gradients come to from a device."""
    resident_bytes: dict[str, int]
    nvme_bytes: dict[str, int]
    shadows: bool = False
    """Units that rest on NVMe altogether have room for a second copy there, for updates that begin during backward."""
    device: DevicePlan | None = None
    """What the engine may hold in a device's memory; None where the CPU computes."""
    vacant_bytes: dict[Tier, int] = field(default_factory=dict)
    """Reserved for units that have moved to a device since."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What a step takes of NVMe at the measured bandwidth, and of compute once a step was taken."""

    @property
    def shadow_bytes(self) -> int:
        """NVMe that ``shadows`` take, or would take."""
        return sum(
            item.unit.numel * self.formats.weights + sum(align(tile.nbytes) for tile, _ in item.tiles)
            for item in self.units
            if item.on_nvme
        )

    @property
    def step_read_bytes(self) -> int:
        """NVMe reads of a step: weights for forward and for backward, and what an update needs.

        Updates during backward find the gradients where they came to. What still lies in a slot is read no more.
        """
        training = bool(self.formats.grads)
        early = [item.unit for item in self.units if self.shadows and item.on_nvme and item.grads is Tier.NVME]
        found = sum(unit.trainable_numel * self.formats.grads for unit in early)
        nvme = self.nvme_bytes
        return nvme["weights"] * (2 if training else 1) + nvme["states"] + nvme["grads"] - found

    @property
    def step_write_bytes(self) -> int:
        """NVMe writes of a step."""
        return sum(self.nvme_bytes.values()) if self.formats.grads else 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, each counted once, padding not counted."""
        return sum(spec.numel for item in self.units for spec in item.unit.parameters)

    @property
    def staging_bytes(self) -> int:
        """Host memory of the buffers that everything without a home in RAM passes through."""
        staging = self.staging
        return (
            staging.num_slots * self.slot_bytes
            + staging.num_grad_buffers * self.grad_buffer_bytes
            + staging.num_tile_buffers * self.tile_buffer_bytes
        )

    @property
    def arena_bytes(self) -> int:
        """What is at home in host memory, and staging."""
        return sum(self.resident_bytes.values()) + self.staging_bytes + self.vacant_bytes.get(Tier.HOST, 0)

    @property
    def host_bytes(self) -> int:
        """All host memory that the engine takes."""
        return self.arena_bytes + self.compute_bytes

    @property
    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of each kind in each tier, staging included."""
        on_device = {} if self.device is None else self.device.home_bytes
        kinds = {
            kind: {"device": on_device.get(kind, 0), "host": self.resident_bytes[kind], "nvme": self.nvme_bytes[kind]}
            for kind in self.resident_bytes
        }
        if self.vacant_bytes:
            kinds["vacant"] = {tier.value: nbytes for tier, nbytes in self.vacant_bytes.items()}
        shadows = self.shadow_bytes if self.shadows else 0
        return {
            **kinds,
            "staging": {"host": self.staging_bytes + self.compute_bytes, "nvme": 0},
            "shadows": {"host": 0, "nvme": shadows},
        }

    @property
    def model_state_bytes(self) -> int:
        """Weights, master, moments and gradients, wherever they rest."""
        return sum(sum(self.memory[kind].values()) for kind in self.resident_bytes)

    def with_homes(self, homes: Sequence[UnitPlan], device: DevicePlan) -> Plan:
        """The plan with these units beside its own, which are at home in a device's memory."""
        units = sorted((*self.units, *homes), key=lambda item: item.unit.index)
        return replace(self, units=tuple(units), device=device)

    def grown(self, free_bytes: int) -> DevicePlan:
        """The device's part, with what a step has left free: units move there, and copies have the rest."""
        assert self.device is not None
        grown = plan_device(
            [item.unit for item in self.units],
            self.formats,
            [sum(tile.nbytes for tile, _ in item.tiles) for item in self.units],
            [self.device.updates_bytes] * len(self.units),
            self.device.total_bytes + max(int(free_bytes * MARGIN), 0),
            0,
            self.device.obstacle,
        )
        return replace(grown, updates_bytes=self.device.updates_bytes)  # which stay where they are

    def with_device(self, device: DevicePlan) -> Plan:
        """The plan after units have moved to the device: all of its homes are there now. Their old places are empty."""
        places = {Tier.HOST: dict(self.resident_bytes), Tier.NVME: dict(self.nvme_bytes)}
        units = []
        for item in self.units:
            if item.unit.index not in device.homes or item.weights is Tier.DEVICE:
                units.append(item)
                continue
            units.append(item.moved())
            places[item.weights]["weights"] -= item.unit.numel * self.formats.weights
            places[item.grads]["grads"] -= item.unit.trainable_numel * self.formats.grads
            for tile, tier in item.tiles:
                places[tier]["states"] -= align(tile.nbytes)
        resident, nvme = places[Tier.HOST], places[Tier.NVME]
        vacant = {
            Tier.HOST: sum(self.resident_bytes.values()) - sum(resident.values()),
            Tier.NVME: sum(self.nvme_bytes.values()) - sum(nvme.values()),
        }
        return replace(
            self,
            units=tuple(units),
            device=device,
            resident_bytes=resident,
            nvme_bytes=nvme,
            vacant_bytes=vacant if any(vacant.values()) else {},
        )

    def __str__(self) -> str:
        return describe(self)


def make_plan(
    units: Sequence[UnitSpec],
    formats: Formats,
    cut: Cut | None,
    host_bytes: int,
    nvme_bytes: int,
    tile_bytes: int | None = None,
    compute_bytes: int = 0,
    early: bool = False,
) -> Plan:
    """Give every kind of every unit a home, within the budgets, by traffic saved per byte.

    Weights save three transfers of themselves a step (read for the update, read for backward, written), states and
    gradients two. Access is cyclic, so what is at home in RAM is fixed and spread evenly over the units, and the disk
    always has something to do. ``early`` tells that units which rest on NVMe altogether may be updated during backward:
    their gradients are not read back then, so weights at home save no more than the rest, and whole units come home,
    which leaves the disk work in forward and in backward. A tied weight in pieces would go over the disk for each of
    its places; it is always at home, and so are its gradients. ``cut`` is None where nothing is trained.
    ``tile_bytes=None`` lets the tile shrink when memory is short. ``compute_bytes`` are taken beside all that.

    Raises ``BudgetError``, naming the least budget that works.
    """
    choice = _Choice(units, formats, cut, Staging(0, 0, 0, tile_bytes or DEFAULT_TILE_BYTES), compute_bytes)
    everything = choice.with_all_at_home()
    if everything.total_bytes <= host_bytes:
        return everything.plan(host_bytes)
    if nvme_bytes == 0:
        raise BudgetError(
            f"host_memory is too small to hold everything and there is no nvme_path: {everything.total_bytes:,} bytes "
            f"are needed, {host_bytes:,} are given. Give an nvme_path, or a larger host_memory.",
            everything.total_bytes,
        )
    for staging in _stagings(units, formats, tile_bytes, training=cut is not None):
        choice = _Choice(units, formats, cut, staging, compute_bytes)
        choice.bring_giants_home()
        if choice.total_bytes <= host_bytes:
            break
    else:
        least = min(choice.total_bytes, everything.total_bytes)  # staging can take more than all of a small model
        raise BudgetError(
            f"host_memory is too small: the least that works for this model is {least:,} bytes, "
            f"{host_bytes:,} are given. Raise host_memory to {least}.",
            least,
        )
    choice.fill(host_bytes, whole_units=early)
    plan = choice.plan(host_bytes)
    needed = sum(plan.nvme_bytes.values())
    if needed > nvme_bytes:
        raise BudgetError(
            f"nvme_capacity is too small: {needed:,} bytes must rest on NVMe with host_memory={host_bytes}, "
            f"{nvme_bytes:,} are given. Raise nvme_capacity, or host_memory.",
            needed,
        )
    return plan


def _stagings(
    units: Sequence[UnitSpec], formats: Formats, tile_bytes: int | None, *, training: bool
) -> Iterator[Staging]:
    """From comfortable to the least that works.

    Compute holds one slot for each unit around the one at work, the update holds one, and one or two more let the next
    units arrive in time. Of three gradient buffers one is filled, one written and one read by an early update. Less
    memory would work too, but each unit would wait for the one before it. Tiles that are small against a slot save no
    memory worth their cost.
    """
    largest = max(unit.numel for unit in units) * formats.weights
    small = max(min(largest // _TILES_A_UNIT, DEFAULT_TILE_BYTES) // _LEAST_TILE_BYTES, 1) * _LEAST_TILE_BYTES
    least_slots = num_nested(units) + (1 if training else 0)
    for slots in (least_slots + 2, least_slots + 1):
        sizes = [size for size in (DEFAULT_TILE_BYTES >> shift for shift in range(3)) if size > small]
        for size in [tile_bytes] if tile_bytes else [*sizes, small]:
            yield Staging(slots, _NUM_GRAD_BUFFERS, _NUM_TILE_BUFFERS, size)


class _Choice:
    """A placement in the making: what is at home in RAM, and what all of it costs."""

    def __init__(
        self, units: Sequence[UnitSpec], formats: Formats, cut: Cut | None, staging: Staging, compute_bytes: int
    ) -> None:
        self.cut = cut
        self.compute_bytes = compute_bytes
        self.units = units
        self.formats = formats
        self.staging = staging
        self.tiles = [cut(unit, staging.tile_bytes) if cut is not None else () for unit in units]
        self.weights_at_home = [unit.reused for unit in units]
        self.grads_at_home = [unit.reused or unit.trainable_numel * formats.grads == 0 for unit in units]
        self.tiles_at_home = [[tile.nbytes == 0 for tile in tiles] for tiles in self.tiles]

    def with_all_at_home(self) -> _Choice:
        choice = _Choice(self.units, self.formats, self.cut, self.staging, self.compute_bytes)
        choice.weights_at_home = [True] * len(self.units)
        choice.grads_at_home = [True] * len(self.units)
        choice.tiles_at_home = [[True] * len(tiles) for tiles in self.tiles]
        return choice

    def bring_giants_home(self) -> None:
        """Bring home the units that make every buffer so large that without them all of it takes less memory."""
        for size in sorted({unit.numel for unit in self.units}, reverse=True):
            before, weights, grads = self.total_bytes, self.weights_at_home, self.grads_at_home
            self.weights_at_home = [home or unit.numel == size for home, unit in zip(weights, self.units, strict=True)]
            self.grads_at_home = [home or unit.numel == size for home, unit in zip(grads, self.units, strict=True)]
            if self.total_bytes >= before:
                self.weights_at_home, self.grads_at_home = weights, grads
                return

    def fill(self, host_bytes: int, *, whole_units: bool) -> None:
        """Bring home what saves most traffic per byte: of each kind as many as fit.

        First what forward begins with, whose gradient comes last: nothing else is left to do while it is updated. The
        rest in an order that is spread evenly.
        """
        first = self.units[0].cut
        is_first = [unit is self.units[0] or (unit.cut is not None and unit.cut is first) for unit in self.units]
        spread = sorted(range(len(self.units)), key=lambda index: (not is_first[index], index * GOLDEN % 1))
        if whole_units:
            self._bring_home([place for index in spread for place in self._places(index)], host_bytes)
            return
        most_tiles = max((len(tiles) for tiles in self.tiles), default=0)
        self._bring_home([(self.weights_at_home, index) for index in spread], host_bytes)
        self._bring_home([(self.grads_at_home, index) for index in spread], host_bytes)
        tiles = [(self.tiles_at_home[i], n) for n in range(most_tiles) for i in spread if n < len(self.tiles[i])]
        self._bring_home(tiles, host_bytes)

    def _places(self, index: int) -> list[tuple[list[bool], int]]:
        """Everything of one unit."""
        tiles = self.tiles_at_home[index]
        return [(self.weights_at_home, index), (self.grads_at_home, index), *((tiles, n) for n in range(len(tiles)))]

    def _bring_home(self, candidates: list[tuple[list[bool], int]], host_bytes: int) -> None:
        """Bring home the longest prefix of ``candidates`` that fits."""
        candidates = [(homes, index) for homes, index in candidates if not homes[index]]

        def bring(count: int) -> None:
            for position, (homes, index) in enumerate(candidates):
                homes[index] = position < count

        fits, too_many = 0, len(candidates) + 1
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            bring(count)
            if self.total_bytes <= host_bytes:
                fits = count
            else:
                too_many = count
        bring(fits)

    def _weight_bytes(self, index: int) -> int:
        return self.units[index].numel * self.formats.weights

    def _grad_bytes(self, index: int) -> int:
        return self.units[index].trainable_numel * self.formats.grads

    def _resident_bytes(self) -> dict[str, int]:
        everywhere = range(len(self.units))
        return {
            "weights": sum(self._weight_bytes(i) for i in everywhere if self.weights_at_home[i]),
            "grads": sum(self._grad_bytes(i) for i in everywhere if self.grads_at_home[i]),
            "states": sum(
                align(tile.nbytes)
                for i in everywhere
                for tile, at_home in zip(self.tiles[i], self.tiles_at_home[i], strict=True)
                if at_home
            ),
        }

    def _buffers(self) -> tuple[Staging, int, int, int]:
        """The staging cut down to what streams, and the bytes of a slot, a gradient buffer and a tile buffer."""
        streamed = [self._weight_bytes(i) for i, at_home in enumerate(self.weights_at_home) if not at_home]
        spilled = [self._grad_bytes(i) for i, at_home in enumerate(self.grads_at_home) if not at_home]
        spilled_tile = any(spilled) * self.formats.grads
        tiles = [
            align(tile.nbytes) * (not at_home) + tile.numel * spilled_tile * (not self.grads_at_home[i])
            for i in range(len(self.units))
            for tile, at_home in zip(self.tiles[i], self.tiles_at_home[i], strict=True)
        ]
        staging = replace(
            self.staging,
            num_slots=min(self.staging.num_slots, len(streamed)),
            num_grad_buffers=min(self.staging.num_grad_buffers, len(spilled)),
            num_tile_buffers=min(self.staging.num_tile_buffers, sum(1 for nbytes in tiles if nbytes)),
        )
        return staging, max(streamed, default=0), max(spilled, default=0), max(tiles, default=0)

    @property
    def total_bytes(self) -> int:
        staging, slot, grad_buffer, tile_buffer = self._buffers()
        buffers = (
            staging.num_slots * slot + staging.num_grad_buffers * grad_buffer + staging.num_tile_buffers * tile_buffer
        )
        return sum(self._resident_bytes().values()) + buffers + self.compute_bytes

    def plan(self, host_budget_bytes: int) -> Plan:
        staging, slot, grad_buffer, tile_buffer = self._buffers()
        resident = self._resident_bytes()
        total = self.with_all_at_home()._resident_bytes()
        nvme = {kind: total[kind] - resident[kind] for kind in total}
        tiers = {True: Tier.HOST, False: Tier.NVME}
        units = tuple(
            UnitPlan(
                unit,
                tiers[self.weights_at_home[i]],
                tiers[self.grads_at_home[i]],
                tuple(
                    (tile, tiers[at_home]) for tile, at_home in zip(self.tiles[i], self.tiles_at_home[i], strict=True)
                ),
            )
            for i, unit in enumerate(self.units)
        )
        return Plan(
            units=units,
            formats=self.formats,
            staging=staging,
            host_budget_bytes=host_budget_bytes,
            slot_bytes=slot,
            grad_buffer_bytes=grad_buffer,
            tile_buffer_bytes=tile_buffer,
            compute_bytes=self.compute_bytes,
            resident_bytes=resident,
            nvme_bytes=nvme,
        )
