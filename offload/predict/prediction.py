"""The prediction of a step: the engine's own plan for the model in the machine, and how long its schedule takes.

[Note: Ranks] With several ranks each holds its shard of every unit in its own tiers. It gathers whole units for
compute, and sends each other rank its part of their gradients. So a rank's plan is the engine's for its shards, with
what whole units take beside them (``plan_ranks``). The ranks are alike: one of them is planned and played. Pipelines
and tensor parallelism are no part of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from offload.config import OffloadConfig
from offload.errors import BudgetError, ConfigError
from offload.optim.choose import OptimizerChoice, choose, takes_elements, whole_parameters
from offload.optim.formats import DEFAULT_TILE_BYTES, Formats
from offload.optim.rule import Rule
from offload.plan.choice import Placements
from offload.plan.device import MARGIN
from offload.plan.judge import ASSUMED_DRIVE
from offload.plan.moved import places_of
from offload.plan.plan import Plan, TilesOf
from offload.plan.ranks import RanksPlan, plans_of_ranks
from offload.plan.routing import Routing
from offload.planning import DeviceRoom, Room, plan_within
from offload.play.schedule import Order, bound_seconds
from offload.predict.activation_bytes import ActivationBytes, activation_bytes
from offload.predict.cores import bound, shares_of
from offload.predict.machine import CONTEXT_BYTES, Machine
from offload.predict.model import Model
from offload.predict.unit_costs import (
    kept_link_seconds,
    link_seconds,
    nvme_bytes,
    receiving_seconds,
    works_of,
)
from offload.predict.workload import Workload
from offload.units import Tile, UnitSpec, shard_unit

_MOST_TILES = 1024
"""A larger model is planned in bundles of tiles: placing them one by one would take minutes at a trillion."""

MOST_BATCH = 1 << 16
"""No larger one is looked at."""

_MOST_KEPT = 128
"""Forecasts that are kept: searches for batches, advice and ways ask for some of them again."""

_placements = functools.lru_cache(maxsize=16)(Placements)
"""What was filled and played for one batch is kept for others, whose units, tiles and staging are the same."""

_PLENTY = 1 << 61
"""More bytes than any machine has."""


@dataclass(frozen=True)
class Shortage:
    """A budget that is too small. ``kind``: "device memory", "host memory", "NVMe" or "memory for activations"; bytes
    of one rank."""

    kind: str
    needed_bytes: int
    given_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Forecast of a step. ``plan`` is None where it does not fit: ``shortage`` says of what there is too little.

    ``links`` are the seconds that a step takes of each part of the machine, those of activations in ``kept_links``.
    Bytes are a rank's.
    """

    model: Model
    machine: Machine
    workload: Workload
    activations: ActivationBytes
    """Of a pass."""
    shortage: Shortage | None = None
    read_bytes: int = 0
    written_bytes: int = 0
    plan: Plan | None = None
    links: dict[str, float] = field(default_factory=dict)
    kept_links: dict[str, float] = field(default_factory=dict)
    schedule_seconds: float = 0.0
    """Seconds that the order of a step takes at least: what must come in forward, and then backward."""
    order: Order | None = None
    """The work of a step, to be played; None where it does not fit."""

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @functools.cached_property
    def seconds(self) -> float:
        """The step. Its order is played when this is asked for first: a search asks for few of what it weighs."""
        if self.order is None:
            return math.inf
        return max(self.bound_seconds, self.order.seconds(max(self.bound_seconds, self.schedule_seconds)))

    @property
    def shard(self) -> str | None:
        """Parts of the state that ranks hold shards of, one of ``PLACEMENTS``; None where there is one rank, or nothing
        fits."""
        return None if self.plan is None else self.plan.ranks.placement

    @property
    def limit(self) -> str:
        """The part of the machine that a step takes longest of."""
        return max(self.links, key=lambda name: self.links[name])

    @property
    def bound_seconds(self) -> float:
        """No schedule takes less."""
        return max(self.links.values())

    @property
    def unoverlapped_seconds(self) -> float:
        """Seconds of a step if nothing were done beside anything else."""
        return sum(self.links.values())

    @property
    def tokens(self) -> int:
        """Of a step, of all ranks."""
        return self.workload.tokens * self.workload.passes * self.machine.num_ranks

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def most_tokens_per_second(self) -> float:
        """No schedule makes more; known before the step is played."""
        return self.tokens / max(self.bound_seconds, self.schedule_seconds) if self.fits else 0.0

    @property
    def compute_bound_batch(self) -> int:
        """The batch from which compute would take longer than any link, if these took as long with it as they do
        now, but for activations. ``Batches.of`` looks whether it fits; ``MOST_BATCH`` and one if there is none."""
        compute, least = self.links["compute"], 1
        for name, seconds in self.links.items():
            if name == "compute":
                continue
            growing = self.kept_links.get(name, 0.0)
            faster = (compute - growing) * MOST_BATCH > (seconds - growing) * self.workload.size
            batch = self.workload.size * (seconds - growing) / (compute - growing) if faster else MOST_BATCH + 1
            least = max(least, math.ceil(batch))
        return least


@functools.lru_cache(maxsize=_MOST_KEPT)
def predict(model: Model, machine: Machine, workload: Workload) -> Prediction:
    """Plan the model into the machine as the engine would, and weigh a step. Raises ``ConfigError``."""
    activations = activation_bytes(model, workload, machine.host_bytes)
    prediction = Prediction(model, machine, workload, activations)
    found = _placed(model, machine, workload, activations)
    if isinstance(found, Shortage):
        return replace(prediction, shortage=found)
    case, plan = found
    places = places_of(plan)
    read, written = nvme_bytes(plan, places, workload, activations)
    works = works_of(model, machine, workload, case.whole, plan, activations, case.products, read, written)
    links = link_seconds(machine, workload, plan, places, works, read, written)
    received = receiving_seconds(machine, workload, plan, places, case.whole)
    shares = shares_of(machine, plan, works, links, read + written, received)
    links["compute"] = max(links["compute"], bound(shares, works, links))
    return replace(
        prediction, plan=plan, links=links, kept_links=kept_link_seconds(works, workload),
        schedule_seconds=bound_seconds(works, places, workload.passes, clipped=workload.clipped),
        order=Order(works, places, shares, workload.passes, machine.network.settle_seconds, workload.clipped),
        read_bytes=read, written_bytes=written,
    )  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """Batches of a workload, or numbers of micro-batches that are together, all else as it is: the ``largest`` that
    fits, 0 if none does, and the least of those that fit with which compute limits (``computing``); None: it does with
    none of them."""

    largest: int
    computing: int | None

    @classmethod
    def of(cls, prediction: Prediction) -> Batches:
        """Try out batches."""
        model, machine, workload = prediction.model, prediction.machine, prediction.workload
        if workload.size == 1 and not prediction.fits:
            return cls(0, None)
        largest = _largest_batch(model, machine, workload)
        if not prediction.fits or prediction.limit == "compute":
            return cls(largest, workload.size if prediction.fits else None)
        batch, found = workload.size, prediction
        while found.limit != "compute":
            batch = max(found.compute_bound_batch, batch + 1)
            if batch > largest:
                return cls(largest, None)
            found = predict(model, machine, workload.of_size(batch))
        return cls(largest, batch)


def _largest_batch(model: Model, machine: Machine, workload: Workload) -> int:
    """The largest batch that fits, up to ``MOST_BATCH``; 0 if none does."""

    def kept(batch: int) -> ActivationBytes:
        return activation_bytes(model, workload.of_size(batch), machine.host_bytes)

    device = machine.device
    room = device.memory_bytes - CONTEXT_BYTES if device.computes else machine.beside_bytes
    each = max(kept(2).computing - kept(1).computing, 1)
    once = kept(1).computing - each

    def of_room(nbytes: float) -> int:
        return int(min(max((nbytes - once) / each, 0), MOST_BATCH))

    batch = of_room(room)
    least, most, guess = 0, batch + 1, batch
    while most - least > 1:
        found = _placed(model, machine, workload.of_size(batch), kept(batch))
        if not isinstance(found, Shortage):
            least, guess = batch, batch + (batch == guess)  # a guess that fits may be the last that does
        else:
            most, guess = batch, least
            if found.kind == "device memory":
                guess = of_room(room - found.needed_bytes / MARGIN)
        batch = guess if least < guess < most else (least + most) // 2
    return least


def least_host_bytes(model: Model, machine: Machine, workload: Workload) -> int:
    """The least ``host_memory`` of a rank with which the model is trained. Raises ``BudgetError`` of other memory."""
    case = list(_cases(model, machine, workload, activation_bytes(model, workload)))[-1]
    try:
        case.plan(replace(case.room, host_bytes=0, drive=None))
    except BudgetError as error:
        return error.needed_bytes
    return 0


@dataclass(frozen=True)
class _Case:
    """Case that a rank's plan depends on: the ``whole`` units, its ``shards`` of them, what whole units take there, and
    what activations take of NVMe (``kept_bytes``). ``routing`` is what is expected of the tokens of a pass."""

    whole: Sequence[UnitSpec]
    shards: Sequence[UnitSpec]
    config: OffloadConfig
    choice: OptimizerChoice | None
    room: Room
    ranks: RanksPlan
    kept_bytes: int
    routing: Routing

    def products(self, unit: UnitSpec) -> float:
        """FLOP of the products that the unit's update takes."""
        return 0.0 if self.choice is None else self.choice.rule.products(unit)

    def plan(self, room: Room | None = None) -> Plan:
        """The rank's plan, in another room if one is given. Raises ``BudgetError``."""
        room = self.room if room is None else room
        return plan_within(self.config, self.shards, self.choice, room, self.ranks, self.routing, _placements)

    def shortage(self, refused: BudgetError) -> Shortage:
        """Find the budget that is too small, which the plan was ``refused`` for: that of the device, or the first that
        still is when the others are not. Whether something fits does not depend on how long its steps take: none is
        played."""
        room = replace(self.room, drive=None)
        if refused.budget == "device_memory":
            return Shortage("device memory", refused.needed_bytes, room.compute.free_bytes)
        any_nvme = replace(room, nvme_bytes=_PLENTY if room.nvme_bytes else 0)
        for kind, tried, given in (("host memory", any_nvme, room.host_bytes), ("NVMe", room, room.nvme_bytes)):
            try:
                self.plan(tried)
            except BudgetError as error:
                aside = self.kept_bytes if kind == "NVMe" else 0
                return Shortage(kind, error.needed_bytes + aside, given + aside)
        raise AssertionError("the plan fits")


@functools.lru_cache(maxsize=_MOST_KEPT)
def _placed(
    model: Model, machine: Machine, workload: Workload, activations: ActivationBytes
) -> tuple[_Case, Plan] | Shortage:
    """The plan, and what it depends on; else of what there is too little."""
    if not machine.device.computes and activations.computing > machine.beside_bytes:
        return Shortage("memory for activations", activations.computing, int(machine.beside_bytes))
    nvme = machine.nvme_bytes if machine.nvme is not None else 0
    if activations.written > nvme:
        return Shortage("NVMe", activations.written, nvme)
    return _planned(list(_cases(model, machine, workload, activations)))


def _cases(model: Model, machine: Machine, workload: Workload, activations: ActivationBytes) -> Iterator[_Case]:
    """One for each placement that may be taken, in the order in which the engine tries them; one for a single rank."""
    count = machine.num_ranks
    if count > 1 and not takes_elements(workload.optimizer):
        raise ConfigError(
            f"--optimizer {workload.optimizer} looks at whole matrices, and {count} ranks hold parts of them: plan one"
        )
    kept = whole_parameters(workload.optimizer, model.module)
    whole = model.units(workload.dtype, count, kept)
    numbers = Workload(  # all that bears on tiles
        precision=workload.precision,
        moments_dtype=workload.moments_dtype,
        master_dtype=workload.master_dtype,
        optimizer=workload.optimizer,
    )
    shards, choice = _trained(whole, count, numbers, kept)
    config = replace(workload.config, device_memory="auto")
    if activations.memory:  # what is set aside is the same for both, and there is no path here
        config = replace(config, activations="host", activation_memory=activations.memory)
    formats = Formats.of(config)
    nvme = machine.nvme_bytes - activations.written if machine.nvme is not None else 0
    room = Room(machine.host_bytes, nvme, float(nvme), drive=machine.nvme or ASSUMED_DRIVE)
    if machine.device.computes:
        left = machine.device.memory_bytes - CONTEXT_BYTES - activations.computing
        given = left * MARGIN if workload.device_bytes is None else min(workload.device_bytes, left)
        budget = max(int(given), 0)
        config, room = replace(config, device_memory=budget), replace(room, compute=DeviceRoom(budget))
    routing = Routing.of_tokens(workload.tokens * count, model.active)  # what one rank needs comes from all of them
    for ranks in plans_of_ranks(whole, formats, workload.shard, count, count, device=machine.device.computes):
        yield _Case(whole, shards, config, choice, room, ranks, activations.written, routing)


@functools.lru_cache(maxsize=8)
def _trained(
    whole: tuple[UnitSpec, ...], count: int, numbers: Workload, kept: frozenset[int] | None
) -> tuple[Sequence[UnitSpec], OptimizerChoice | None]:
    """Shards of one of ``count`` ranks, and how they are trained: the same for all batches that a search weighs."""
    shards = [shard_unit(unit, 0, count) for unit in whole]
    return shards, _bundled(choose(numbers.config, shards, whole=kept), shards)


def _planned(cases: Sequence[_Case]) -> tuple[_Case, Plan] | Shortage:
    """The first that needs no NVMe, else the last one; what that lacks if it does not fit, either."""
    for case in cases[:-1]:
        with contextlib.suppress(BudgetError):
            plan = case.plan()
            if not any(plan.nvme_bytes.values()):
                return case, plan
    try:
        return cases[-1], cases[-1].plan()
    except BudgetError as refused:
        return cases[-1].shortage(refused)


class _Tiling:
    """A rule as a plan needs it. It finds the tiles of a unit once: many plans ask for them."""

    def __init__(self, rule: Rule, tiles_of: TilesOf) -> None:
        self.repeatable, self.device_unsupported_reason = rule.repeatable, rule.device_unsupported_reason
        self.temporary_bytes, self.products = rule.temporary_bytes, rule.products
        self.replayable = rule.replayable
        self.tiles_of = functools.cache(tiles_of)


def _bundles_of(rule: Rule, size: int, unit: UnitSpec, tile_bytes: int) -> tuple[Tile, ...]:
    """The unit's tiles, ``size`` of them taken for one. None is larger than one of the units that are taken
    together."""
    states = sum(tile.nbytes for tile in rule.tiles_of(unit, _PLENTY))
    one = rule.tiles_of(unit, min(tile_bytes, states // unit.count or tile_bytes) * size)
    step = max((tile.numel for tile in one), default=0) // size or 1
    return tuple(Tile(tile.start, tile.stop, tile.nbytes, -(-tile.numel // step)) for tile in one)


def _bundled(choice: OptimizerChoice | None, units: Sequence[UnitSpec]) -> OptimizerChoice | None:
    if choice is None:
        return None
    rule = choice.rule
    numel = sum(unit.trainable_numel for unit in units)
    states = sum(tile.nbytes for tile in rule.tiles_of(units[0], _PLENTY)) / max(units[0].trainable_numel, 1)
    size = math.ceil(numel * states / DEFAULT_TILE_BYTES / _MOST_TILES)
    one_by_one = size <= 1 and all(unit.count == 1 for unit in units)
    tiles_of = rule.tiles_of if one_by_one else functools.partial(_bundles_of, rule, max(size, 1))
    return replace(choice, rule=_Tiling(rule, tiles_of))  # type: ignore[arg-type]
