"""The prediction of a step: the engine's own plan for the model in the machine, and how long its schedule takes.

[Note: Ranks] With several ranks each holds its share of every unit in its own tiers: weights, gradients and states. It
gathers a whole unit before compute needs it and drops it afterwards, and gradients are added up over the ranks and
scattered. So each rank's plan is the engine's for units of that share, with windows for whole units beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.config import OffloadConfig
from offload.errors import BudgetError
from offload.optim.choose import OptimizerChoice, choose
from offload.optim.formats import DEFAULT_TILE_BYTES, Formats
from offload.optim.rule import Rule
from offload.plan.device import GOLDEN, MARGIN
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.planning import DeviceRoom, Room, plan_within
from offload.predict.machine import CONTEXT_BYTES, Machine
from offload.predict.model import Model
from offload.predict.schedule import UnitWork, step_seconds
from offload.predict.workload import Workload
from offload.units import GRAIN, Tile, UnitSpec, num_nested

_MOST_TILES = 4096
"""A larger model is planned in bundles of tiles: placing them one by one would take minutes at a trillion."""

_PLENTY = 1 << 61
"""More bytes than any machine has."""

_ACTIVATIONS = 34
"""16-bit bytes of activations that a transformer's layer keeps for each token and unit of width, where attention keeps
no matrix of its own. Source: Korthikanti et al., arXiv:2205.05198, section 4."""

_EARLY_SHARES = 8
"""The engine finds out how many units to update during backward. So many shares of them are tried here."""


@dataclass(frozen=True)
class Phase:
    """A part of a step, and the seconds that it takes of each part of a machine: at once, or one after the other."""

    name: str
    loads: Mapping[str, float]
    overlapped: bool = True

    @property
    def limit(self) -> str:
        """What it takes longest of."""
        return max(self.loads, key=lambda name: self.loads[name])

    @property
    def seconds(self) -> float:
        """The least that it takes."""
        return self.loads[self.limit] if self.overlapped else sum(self.loads.values())


@dataclass(frozen=True)
class Shortage:
    """A budget that is too small. ``kind``: "device memory", "host memory" or "NVMe"; bytes of one rank."""

    kind: str
    needed_bytes: int
    given_bytes: int


@dataclass(frozen=True)
class Prediction:
    """What a step will take. ``plan`` is None where it does not fit: ``shortage`` says of what there is too little.

    ``links`` are the seconds that a step takes of each part of the machine, ``seconds`` the step. Bytes are a rank's.
    """

    model: Model
    machine: Machine
    workload: Workload
    activation_bytes: int
    shortage: Shortage | None = None
    read_bytes: int = 0
    written_bytes: int = 0
    plan: Plan | None = None
    gathered_bytes: int = 0
    """Device memory for whole units, where ranks hold shares."""
    links: dict[str, float] = field(default_factory=dict)
    seconds: float = math.inf

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def limit(self) -> str:
        """The part of the machine that a step takes longest of."""
        return Phase("step", self.links).limit

    @property
    def bound_seconds(self) -> float:
        """No schedule takes less."""
        return Phase("step", self.links).seconds

    @property
    def unoverlapped_seconds(self) -> float:
        """What it would take if nothing were done beside anything else."""
        return Phase("step", self.links, overlapped=False).seconds

    @property
    def tokens(self) -> int:
        """Of a step, of all ranks."""
        return self.workload.tokens * self.workload.micro_batches * self.machine.num_ranks

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def compute_bound_batch(self) -> int:
        """The batch from which compute takes longer than any link, whose seconds do not grow with it."""
        others = max((seconds for name, seconds in self.links.items() if name != "compute"), default=0.0)
        return max(math.ceil(self.workload.batch * others / self.links["compute"]), 1)


def predict(model: Model, machine: Machine, workload: Workload) -> Prediction:
    """Plan the model into the machine as the engine would, and play a step through. Raises ``ConfigError``."""
    whole = model.units(workload.dtype)
    units = [_share(unit, machine.num_ranks) for unit in whole]
    activations = activation_bytes(model, machine, workload)
    config, gathered = _with_device_budget(workload.config(), machine, whole, activations)
    choice = _bundled(choose(config, units), units)
    prediction = Prediction(model, machine, workload, activations, gathered_bytes=gathered)
    room = _room(machine, config)
    try:
        plan = plan_within(config, units, choice, room)
    except BudgetError as error:
        return replace(prediction, shortage=_shortage(config, units, choice, room, error))
    works, links = _works(model, machine, workload, whole, plan)
    read, written = _nvme_bytes(plan, [_bytes(item, plan.formats) for item in plan.units], workload)
    slots = plan.staging.num_slots if plan.staging.num_slots else len(units)
    seconds = min(
        step_seconds(works, slots, _num_windows(plan), early, workload.micro_batches)
        for early in _choices_of_early(plan, works, workload)
    )
    seconds = max(seconds, *links.values())
    return replace(prediction, plan=plan, links=links, seconds=seconds, read_bytes=read, written_bytes=written)


def least_host_bytes(model: Model, machine: Machine, workload: Workload) -> int:
    """The least ``host_memory`` of a rank with which the model is trained. Raises ``BudgetError`` of other memory."""
    whole = model.units(workload.dtype)
    units = [_share(unit, machine.num_ranks) for unit in whole]
    config, _ = _with_device_budget(workload.config(), machine, whole, activation_bytes(model, machine, workload))
    room = replace(_room(machine, config), host_bytes=0)
    try:
        plan_within(config, units, _bundled(choose(config, units), units), room)
    except BudgetError as error:
        return error.needed_bytes
    return 0


def activation_bytes(model: Model, machine: Machine, workload: Workload) -> int:
    """What autograd keeps for one micro-batch, and logits with their gradients: an estimate, outside of all budgets."""
    width = 4 if workload.precision == "fp32" else 2
    layer = _ACTIVATIONS * model.width * workload.tokens * width // 2
    kept = model.width * workload.tokens * width
    blocks = model.layers * kept + layer if workload.recomputed else model.layers * layer
    return blocks + workload.tokens * model.vocabulary * (width + 8)


def _room(machine: Machine, config: OffloadConfig) -> Room:
    nvme = machine.nvme_bytes if machine.nvme is not None else 0
    device = DeviceRoom(int(config.device_memory)) if machine.device is not None else None
    return Room(machine.host_bytes, nvme, float(nvme), device)


def _with_device_budget(
    config: OffloadConfig, machine: Machine, units: Sequence[UnitSpec], activations: int
) -> tuple[OffloadConfig, int]:
    """The options with ``device_memory`` in bytes, and what of it goes to gathered units."""
    if machine.device is None:
        return replace(config, device_memory="auto"), 0
    formats, gathered = Formats.of(config), 0
    if machine.num_ranks > 1:
        largest = max(unit.numel for unit in units)
        gathered = largest * ((num_nested(units) + 2) * formats.weights + formats.weights)
    left = machine.device.memory_bytes - CONTEXT_BYTES - activations
    given = left * MARGIN if config.device_memory == "auto" else min(int(config.device_memory), left)
    return replace(config, device_memory=max(int(given) - gathered, 0)), gathered


def _shortage(
    config: OffloadConfig, units: Sequence[UnitSpec], choice: OptimizerChoice | None, room: Room, error: BudgetError
) -> Shortage:
    """Which budget it is that ``error`` is about: the first that is still too small when the others are not."""
    for kind, others in (
        ("device memory", replace(room, host_bytes=_PLENTY, nvme_bytes=_PLENTY, spare_bytes=_PLENTY)),
        ("host memory", replace(room, nvme_bytes=max(room.nvme_bytes, _PLENTY * bool(room.nvme_bytes)))),
    ):
        try:
            plan_within(config, units, choice, others)
        except BudgetError as found:
            given = int(config.device_memory) if kind == "device memory" else room.host_bytes
            return Shortage(kind, found.needed_bytes, given)
    return Shortage("NVMe", error.needed_bytes, room.nvme_bytes)


def _share(unit: UnitSpec, ranks: int) -> UnitSpec:
    """The part of a unit that one of so many ranks holds."""
    if ranks == 1:
        return unit

    def part(numel: int) -> int:
        return -(-numel // (ranks * GRAIN)) * GRAIN

    parameters = tuple(replace(spec, numel=-(-spec.numel // ranks)) for spec in unit.parameters)
    return replace(unit, numel=part(unit.numel), trainable_numel=part(unit.trainable_numel), parameters=parameters)


class _Bundles:
    """A rule whose tiles are taken several for one."""

    def __init__(self, rule: Rule, size: int) -> None:
        self.repeatable, self.obstacle_on_devices = rule.repeatable, rule.obstacle_on_devices
        self._rule, self._size = rule, size

    def tiles_of(self, unit: UnitSpec, tile_bytes: int) -> tuple[Tile, ...]:
        one = self._rule.tiles_of(unit, tile_bytes * self._size)
        step = max((tile.numel for tile in one), default=0) // self._size or 1
        return tuple(Tile(tile.start, tile.stop, tile.nbytes, -(-tile.numel // step)) for tile in one)


def _bundled(choice: OptimizerChoice | None, units: Sequence[UnitSpec]) -> OptimizerChoice | None:
    if choice is None:
        return None
    numel = sum(unit.trainable_numel for unit in units)
    states = sum(tile.nbytes for tile in choice.rule.tiles_of(units[0], _PLENTY)) / max(units[0].trainable_numel, 1)
    size = math.ceil(numel * states / DEFAULT_TILE_BYTES / _MOST_TILES)
    return choice if size <= 1 else replace(choice, rule=_Bundles(choice.rule, size))  # type: ignore[arg-type]


def _num_windows(plan: Plan) -> int:
    """Weights of so many units are on a device at a time."""
    if plan.device is None or not plan.device.all_bytes:
        return len(plan.units)
    offloaded = len(plan.units) - len(plan.device.resident)
    return max(int(plan.device.weights_bytes / plan.device.all_bytes * offloaded), 2)


def _choices_of_early(plan: Plan, works: Sequence[UnitWork], workload: Workload) -> list[frozenset[int]]:
    """Which units may be updated during backward: none, or so many of those that can be, evenly spread."""
    eligible = [index for index, work in enumerate(works) if work.eligible]
    if not plan.early or workload.clipped or not eligible:
        return [frozenset()]
    spread = sorted(eligible, key=lambda index: index * GOLDEN % 1)
    counts = {len(spread) * share // _EARLY_SHARES for share in range(_EARLY_SHARES + 1)}
    return [frozenset(spread[:count]) for count in sorted(counts)]


@dataclass(frozen=True)
class _Bytes:
    """What one unit moves over NVMe in a step: its weights, once; its states; its gradients."""

    weights: int
    trained: int
    states: int
    grads: int
    in_memory: int
    """Traffic of its update in host memory."""


def _bytes(item: UnitPlan, formats: Formats) -> _Bytes:
    unit, on_nvme = item.unit, Tier.NVME
    states = sum(tile.nbytes for tile, _ in item.tiles)
    sweep = 2 * states + unit.trainable_numel * (2 * formats.weights + formats.grads)
    if item.weights is Tier.DEVICE:
        return _Bytes(0, 0, 0, 0, 0)
    return _Bytes(
        unit.numel * formats.weights * (item.weights is on_nvme),
        unit.trainable_numel * formats.weights * (item.weights is on_nvme),
        sum(tile.nbytes for tile, tier in item.tiles if tier is on_nvme),
        unit.trainable_numel * formats.grads * (item.grads is on_nvme),
        sweep if unit.trainable_numel else 0,
    )


def _works(
    model: Model, machine: Machine, workload: Workload, whole: Sequence[UnitSpec], plan: Plan
) -> tuple[list[UnitWork], dict[str, float]]:
    """The seconds of every unit, and those of each part of the machine in all."""
    formats, ranks, device = plan.formats, machine.num_ranks, machine.device
    moved = [_bytes(item, formats) for item in plan.units]
    compute = _compute(model, machine, workload, whole)
    read, written = _nvme_bytes(plan, moved, workload)
    nvme = machine.nvme.seconds(read, written) if machine.nvme is not None else 0.0
    alone = read / machine.nvme.read + written / machine.nvme.write if machine.nvme is not None else 0.0
    overlap = nvme / alone if alone else 1.0

    def drive(read_bytes: float, write_bytes: float = 0.0) -> float:
        if machine.nvme is None:
            return 0.0
        return (read_bytes / machine.nvme.read + write_bytes / machine.nvme.write) * overlap

    sweeps = [one.in_memory / machine.update for one in moved]
    computing = sum(map(sum, compute)) * workload.micro_batches
    if device is None:  # its cores update and check, too
        grads = sum(item.unit.trainable_numel for item in plan.units) * formats.grads
        own = sum(sweeps) + (read + written) / machine.checksum + 2 * grads * workload.micro_batches / machine.update
        at_rest, moving = machine.unit_seconds
        streamed = sum(1 for item in plan.units if item.passes_through)
        own += (len(plan.units) - streamed) * at_rest + streamed * moving
        busier = 1 + own / computing
        compute = [(forward * busier, backward * busier) for forward, backward in compute]
        computing += own
    works, link, back, gathered = [], 0.0, 0.0, 0.0
    stays = (
        1.0 if plan.device is None or not plan.device.all_bytes else plan.device.weights_bytes / plan.device.all_bytes
    )
    for item, one, (forward, backward), sweep, unit in zip(plan.units, moved, compute, sweeps, whole, strict=True):
        passes = device is not None and item.weights is not Tier.DEVICE
        weights, trained = item.unit.numel * formats.weights, item.unit.trainable_numel * formats.weights
        to_device = weights / device.link if passes and device is not None else 0.0
        to_host = trained / device.link if passes and device is not None else 0.0
        again = to_device * (1 - min(stays, 1.0))
        gather = scatter = 0.0
        if device is not None and ranks > 1:
            gather = unit.numel * formats.weights * (ranks - 1) / ranks / device.peers
            scatter = unit.trainable_numel * formats.weights * (ranks - 1) / ranks / device.peers
        streamed_weights = item.weights is Tier.NVME
        works.append(
            UnitWork(
                forward=forward, backward=backward, fetch=drive(one.weights),
                update=drive(one.weights + one.states, one.trained + one.states),
                sweep=sweep, spill=drive(0, one.grads), late=drive(one.grads), to_device=to_device,
                to_device_again=again, to_host=to_host, gather=gather, scatter=scatter, calls=2 if _tied(unit) else 1,
                streamed=streamed_weights, eligible=item.streamed,
            )
        )  # fmt: skip
        link += to_device + again + (to_device + again) * (workload.micro_batches - 1)
        back += to_host * workload.micro_batches
        gathered += (2 * gather + scatter) * workload.micro_batches
    links = {"compute": computing, "NVMe": nvme}
    if device is not None:
        links |= {"link to the device": link, "link to the host": back, "CPU updates": sum(sweeps)}
        if ranks > 1:
            links["network"] = gathered
    return works, links


def _nvme_bytes(plan: Plan, moved: Sequence[_Bytes], workload: Workload) -> tuple[int, int]:
    """What a rank reads and writes in a step. Units that still lie in their slots are read no more."""
    streamed = [one.weights for one in moved if one.weights]
    kept = sum(streamed[-max(plan.staging.num_slots - 2, 1) :])
    more = workload.micro_batches - 1
    grads = sum(one.grads for one in moved) * more
    read = plan.step_read_bytes + (2 * sum(streamed) - kept) * more - kept + grads
    if workload.clipped and plan.early:  # gradients are read by updates that begin later
        read += sum(one.grads for item, one in zip(plan.units, moved, strict=True) if item.streamed)
    return read, plan.step_write_bytes + grads


def _compute(
    model: Model, machine: Machine, workload: Workload, units: Sequence[UnitSpec]
) -> list[tuple[float, float]]:
    """Seconds of each unit in forward and backward of one micro-batch."""
    products = [model.flops(unit) for unit in units]
    heads = [_is_head(model, unit) for unit in units]
    in_blocks = sum(forward for (forward, _), head in zip(products, heads, strict=True) if not head) or 1.0
    attention = model.attention_flops(workload.sequence) * model.layers
    seconds = []
    for (forward, trained), head in zip(products, heads, strict=True):
        rate = workload.tokens / (machine.cores.head if head else machine.cores.blocks)
        mixing = 0.0 if head else attention * forward / in_blocks
        again = forward + mixing if workload.recomputed and not head else 0.0
        seconds.append((rate * (forward + mixing), rate * (forward + trained + 2 * mixing + again)))
    return seconds


def _is_head(model: Model, unit: UnitSpec) -> bool:
    """It makes logits: all its products end in the vocabulary."""
    shapes = [spec.shape if spec.piece is None else spec.piece.whole.shape for spec in unit.parameters]
    return bool(model.vocabulary) and all(len(shape) == 2 and shape[0] == model.vocabulary for shape in shapes)


def _tied(unit: UnitSpec) -> bool:
    return any(len(spec.owners) > 1 for spec in unit.parameters)
