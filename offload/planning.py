"""From the options, the model and the machine to a plan: what is free, what was asked for, what may be assumed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

import aio_ext
from aio_ext.profile import load_profile
from offload.config import OffloadConfig
from offload.device.host import Cpu
from offload.device.protocol import Device, Processor
from offload.errors import BudgetError, ConfigError, RankError, warn
from offload.memory import available_bytes
from offload.optim.choose import OptimizerChoice
from offload.optim.formats import RAM_TILE_BYTES, Formats
from offload.plan.buffers import NUM_LANDINGS, device_tile_bytes
from offload.plan.choice import Placements
from offload.plan.device import AUTO_RESIDENT_SHARE, NUM_AHEAD, ON_HOST, DeviceNeeds, DevicePlan, plan_device
from offload.plan.judge import ASSUMED_DRIVE, Conditions
from offload.plan.placement import make_plan
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.plan.ranks import RanksPlan, plans_of_ranks
from offload.plan.routing import EVERYWHERE, Routing
from offload.plan.update_log import log_bytes, with_update_log
from offload.ranks.world import World
from offload.report.report import Bandwidths
from offload.tiers.store import run_bytes
from offload.tiers.window import CopyWindow, window_class
from offload.units import UnitSpec, largest_numel, num_nested
from swapper import OffloadError, StorageFull, StoreUnsafe, align, readable_bytes
from swapper.paths import Directory, Medium, look_at

AUTO_SHARE = 0.8
"""Of what is free, "auto" takes this much: activations, the loader and others need room too."""

_WHOLE_UNITS = 1 << 62
"""A tile of this many bytes holds any unit."""


class HostRoom:
    """Room of compute where the CPU computes: nothing beside the host's memory."""

    computes = False
    free_bytes = 0

    def plan(
        self,
        config: OffloadConfig,
        units: Sequence[UnitSpec],
        choice: OptimizerChoice | None,
        ranks: RanksPlan,
        host_bytes: int,
    ) -> tuple[DevicePlan, RanksPlan]:
        """No device has anything."""
        return ON_HOST, ranks

    def conditions(self, config: OffloadConfig, drive: Bandwidths | None) -> Conditions | None:
        """Conditions under which steps are played."""
        return None if drive is None else Conditions(drive, clipped=config.gradient_clipping > 0)

    def compute_host_bytes(self, config: OffloadConfig, units: Sequence[UnitSpec], ranks: RanksPlan) -> int:
        """Host memory that compute takes beside the plan's: autograd makes a gradient in memory of its own before it
        is brought to its home, and drops it then; torch may need copies of the weights in use."""
        copies = num_nested(units) if window_class() is CopyWindow else 0
        weights = copies * largest_numel(units) * config.dtype.itemsize
        return weights + _gradient_bytes(config, units, config.dtype)


ON_CPU = HostRoom()


@dataclass(frozen=True)
class DeviceRoom:
    """Room of compute on a device: its free memory, and why its streams cannot run kernels, if so."""

    free_bytes: int
    unsupported_reason: str | None = None
    computes = True

    def plan(
        self,
        config: OffloadConfig,
        units: Sequence[UnitSpec],
        choice: OptimizerChoice | None,
        ranks: RanksPlan,
        host_bytes: int,
    ) -> tuple[DevicePlan, RanksPlan]:
        """Divide the device's memory, also among what passes between ranks; the optimizer decides, too, whether
        units may be resident there.

        Each micro-batch brings the weights of a unit twice, and a copy that stays saves it; a resident unit saves more,
        but once a step, and takes the room of several copies. So there is room for more copies the more micro-batches
        there are, unless what cannot be resident goes to NVMe, whose transfers cost more than the link's.
        """
        unsupported_reason = None
        if choice is not None:
            unsupported_reason = choice.rule.device_unsupported_reason or self.unsupported_reason
        states = [sum(tile.nbytes for tile, _ in _resident_unit(unit, choice).tiles) for unit in units]
        updates = [0] * len(units)
        if choice is not None and unsupported_reason is None:
            tile_bytes = RAM_TILE_BYTES if config.tile_bytes == "auto" else int(config.tile_bytes)
            updates = [device_tile_bytes(choice.rule.tiles_of(unit, tile_bytes), Formats.of(config)) for unit in units]
        given = None if config.device_memory == "auto" else int(config.device_memory)
        adds_squares = self.unsupported_reason is None
        needs = DeviceNeeds(units, Formats.of(config), states, updates, unsupported_reason, ranks, adds_squares)
        if sum(needs.of_units(range(len(units))).values()) <= host_bytes:
            needs = dataclasses.replace(needs, num_ahead=NUM_AHEAD * config.gradient_accumulation_steps)
        with contextlib.suppress(BudgetError):
            roomy = plan_device(needs, given, self.free_bytes)
            if roomy.weights_bytes >= sum(ranks.places):  # else room for weights that come ahead is worth more
                return roomy, ranks
        tight = ranks.tight()
        return plan_device(dataclasses.replace(needs, ranks=tight), given, self.free_bytes), tight

    def conditions(self, config: OffloadConfig, drive: Bandwidths | None) -> Conditions | None:
        """None: what a link and a device do beside the drive is not known before the first step."""
        return None

    def compute_host_bytes(self, config: OffloadConfig, units: Sequence[UnitSpec], ranks: RanksPlan) -> int:
        """Host memory that gradients land in: as autograd has made them, or, where ranks have added theirs up, in
        fp32."""
        return NUM_LANDINGS * _gradient_bytes(config, units, torch.float32 if ranks.gathers else config.dtype)


@dataclass(frozen=True)
class Room:
    """Room that a plan may take of a machine, measured or described.

    ``nvme_bytes`` bounds the records on NVMe; ``spare_bytes`` bounds them with their spare copies. ``compute`` is what
    there is where the model computes, ``drive`` are the rates of what is under the paths; None: no step is played, and
    of the placements that fit the one of the least cost is taken.
    """

    host_bytes: int
    nvme_bytes: int
    spare_bytes: float
    compute: HostRoom | DeviceRoom = ON_CPU
    drive: Bandwidths | None = ASSUMED_DRIVE


def plan_for(
    config: OffloadConfig,
    units: Sequence[UnitSpec],
    choice: OptimizerChoice | None,
    processor: Processor,
    world: World,
    shards: Sequence[UnitSpec],
) -> Plan:
    """The plan for these units on this machine: for a rank's ``shards`` of them.

    Raises ``BudgetError`` for budgets that are too small, and what ``check_paths`` raises, also if all of it fits into
    memory: a wrong path is not kept until the day that it is needed.
    """
    check_paths(config.paths)
    room = _room(config, units, processor, world.local_size)
    num_ranks, num_shards = world.size, world.shards.size
    plans = plans_of_ranks(units, Formats.of(config), config.shard, num_ranks, num_shards, device=room.compute.computes)
    for ranks in plans:
        plan, error = None, None
        try:
            plan = plan_within(config, shards, choice, room, ranks)
        except OffloadError as raised:
            error = raised
        fits = plan is not None and not plan.streams and _device_fits(plan, config, room)
        told = None
        if error is not None:
            told = (str(error.args[0]), 0, "")
            if isinstance(error, BudgetError):
                told = error.message, error.needed_bytes, error.budget
        of_ranks = world.all_gather_object((fits, told))  # all of them take the same placement, or raise
        if all(fits for fits, _ in of_ranks):
            break
        if ranks is plans[-1]:
            _raise_first(error, [told for _, told in of_ranks], world)
    assert plan is not None
    return plan


def _device_fits(plan: Plan, config: OffloadConfig, room: Room) -> bool:
    """Tell whether the plan leaves enough of a device's memory to activations, as far as nobody has said how much."""
    if config.device_memory != "auto":
        return True
    return plan.device.total_bytes <= room.compute.free_bytes * AUTO_RESIDENT_SHARE


def _raise_first(own: OffloadError | None, told: Sequence[tuple[str, int, str] | None], world: World) -> None:
    """Raise the first error of the ranks, if there is one; of budgets that are too small the one that asks for most.
    Each comes with its ``message``, ``needed_bytes`` and ``budget``."""
    if own is not None and not isinstance(own, BudgetError):
        raise own
    errors = [(rank, *error) for rank, error in enumerate(told) if error is not None]
    if not errors:
        return
    rank, message, needed, budget = max(errors, key=lambda error: error[2])
    if not needed:
        raise RankError(f"rank {rank}: {message}")
    if budget != "device_memory" and world.local_size > 1:
        needed *= world.local_size
        message += (
            f" The option is for the {world.local_size} ranks of this machine; the other bytes are of one of them."
        )
    raise BudgetError(message, needed, budget=budget)


def plan_within(
    config: OffloadConfig,
    units: Sequence[UnitSpec],
    choice: OptimizerChoice | None,
    room: Room,
    ranks: RanksPlan,
    routing: Routing = EVERYWHERE,
    placements_of: Callable[..., Placements] = Placements,
) -> Plan:
    """The plan for these units in this room, which looks at no machine; of several ``ranks`` they are a rank's shards.
    ``routing`` is what is expected of experts; ``placements_of`` as in ``make_plan``.
    Raises ``BudgetError``, and ``StorageFull`` for ``durable`` without the room for it."""
    tile_bytes = None if config.tile_bytes == "auto" else int(config.tile_bytes)
    tiles_of = choice.rule.tiles_of if choice is not None else None
    temporary_bytes = choice.rule.temporary_bytes if choice is not None else 0
    device_plan, ranks = room.compute.plan(config, units, choice, ranks, room.host_bytes)
    on_host = [unit for unit in units if unit.index not in device_plan.resident]
    place = partial(
        make_plan,
        on_host,
        Formats.of(config),
        tiles_of,
        room.host_bytes,
        room.nvme_bytes,
        tile_bytes,
        room.compute.compute_host_bytes(config, on_host, ranks)
        + ranks.nbytes
        + config.activation_bytes
        + temporary_bytes,
        num_backwards=config.gradient_accumulation_steps,
        rereads=room.compute.computes,
        routing=routing,
        placements_of=placements_of,
    )

    def make(*, speculative: bool) -> Plan:
        """By playing a step, unless that takes more of NVMe than there is."""
        conditions = room.compute.conditions(config, room.drive)
        if conditions is not None:
            with contextlib.suppress(BudgetError):
                plan = place(speculative=speculative, conditions=conditions)
                if store_bytes(plan, config, speculative=speculative) <= room.spare_bytes:
                    return plan
        return place(speculative=speculative)

    speculative = choice is not None and choice.rule.repeatable and not ranks.gathers
    plan = make(speculative=speculative)
    if speculative and store_bytes(plan, config, speculative=True) > room.spare_bytes:
        speculative = False
        with contextlib.suppress(BudgetError):  # the other order may need a page more
            plan = make(speculative=False)
    needed_bytes = store_bytes(plan, config, speculative=speculative)
    has_room = needed_bytes <= room.spare_bytes
    if config.durable and not has_room:
        raise StorageFull(
            f"durable={config.durable} needs {readable_bytes(needed_bytes)} under nvme_path, two places for each "
            f"record: {readable_bytes(int(room.spare_bytes))} may be used.",
            advice="Free some, give another path, raise host_memory or nvme_capacity, or leave durable out.",
        )
    two = choice is not None and has_room and plan.spare_copy_bytes > 0
    plan = dataclasses.replace(
        plan,
        record_copies=2 if two else 1,
        speculative=two and speculative,
        ranks=ranks,
        activation_bytes=config.activation_bytes,
    )
    resident = [_resident_unit(unit, choice) for unit in units if unit.index in device_plan.resident]
    plan = plan.with_resident(resident, device_plan)
    if config.durable == 1 and choice is not None and choice.rule.replayable:
        logging = with_update_log(plan)
        plan = logging if store_bytes(logging, config, speculative=speculative) <= room.spare_bytes else plan
    updates_early = device_plan.computes and choice is not None and choice.rule.repeatable
    return plan.with_spares() if updates_early else plan  # the CPU's compute leaves no cores for it


def _room(config: OffloadConfig, units: Sequence[UnitSpec], processor: Processor, num_local: int) -> Room:
    """Room that the options leave a plan of this machine, which ``num_local`` ranks share."""
    host, nvme = config.host_memory, config.nvme_capacity
    host_bytes = (int(available_bytes() * AUTO_SHARE) if host == "auto" else int(host)) // num_local
    nvme_bytes = (1 << 62 if nvme == "auto" else int(nvme) // num_local) if config.paths else 0
    spare_bytes = free_bytes_of(config.paths) * AUTO_SHARE / num_local if nvme == "auto" else nvme_bytes
    if config.durable and nvme == "auto":  # what an earlier run has there is gone on from in its place
        spare_bytes += sum(map(run_bytes, config.paths))
    return Room(host_bytes, nvme_bytes, spare_bytes, _compute_room(processor, units), _drive(config.paths))


def _drive(paths: Sequence[Path]) -> Bandwidths:
    """Rates of the I/O profile of the paths. What is measured without one comes after the plan."""
    profile = load_profile(*paths) if paths else None
    if profile is None:
        return ASSUMED_DRIVE
    return Bandwidths(profile.read_bytes_per_s, profile.write_bytes_per_s, profile.mixed_q, stored=True)


def _compute_room(processor: Processor, units: Sequence[UnitSpec]) -> HostRoom | DeviceRoom:
    if isinstance(processor, Cpu):
        return ON_CPU
    device = cast(Device, processor)
    free_bytes = device.free_bytes() + _taken_over_bytes(units, device)
    return DeviceRoom(free_bytes, device.kernels_unsupported_reason())


def check_paths(paths: Sequence[Path]) -> None:
    """Look at the directories for the store. Warns of those in memory.

    Raises ``StoreUnsafe`` for one that cannot hold a store, ``ConfigError`` for one that is given twice.
    """
    found: dict[Directory, Path] = {}
    for path in paths:
        try:
            directory = look_at(path)
        except StoreUnsafe as error:
            raise StoreUnsafe(f"nvme_path: {error.args[0]}", advice=error.advice) from None
        if directory in found:
            raise ConfigError(f"nvme_path: {path} is the same directory as {found[directory]}: give it once")
        found[directory] = path
    for directory, path in found.items():
        if directory.medium is Medium.MEMORY:
            warn(
                f"nvme_path: {path} is on {directory.file_system}: what is stored there takes memory, and host_memory "
                "does not count it"
            )


def open_processor(device: str | torch.device | Device, local_index: int | None) -> Processor:
    """Open the processor that the model computes on. Of several GPUs that none is named of, the process with
    this index on its machine takes its own. Raises ``ConfigError`` if it is not there."""
    if not isinstance(device, (str, torch.device)):
        return device
    found = torch.device(device)
    if found.type == "cpu":
        return Cpu()
    from offload.device.cuda import CudaDevice

    return CudaDevice(found, local_index)


def check_backend(name: str) -> None:
    """The slow portable backend is taken when it is asked for, never silently. Raises ``ConfigError``."""
    missing = aio_ext.unavailable_backends()
    if name == "auto" and "threads" in missing:
        name = "threads"
    if name in missing:
        raise ConfigError(f"io_backend {name!r} does not work here: {missing[name]}")


def _taken_over_bytes(units: Sequence[UnitSpec], device: Device) -> int:
    """Bytes of a GPU's memory that the model's parameters have: they are free when the engine has taken their values
    over."""
    if device.torch_device.type == "cpu":
        return 0
    parameters = {spec.parameter for unit in units for spec in unit.parameters}
    return sum(parameter.nbytes for parameter in parameters if parameter.device == device.torch_device)


def _resident_unit(unit: UnitSpec, choice: OptimizerChoice | None) -> UnitPlan:
    """The plan of a unit that is resident on a device: its states are one tile."""
    tiles = choice.rule.tiles_of(unit, _WHOLE_UNITS) if choice is not None else ()
    return UnitPlan(unit, Tier.DEVICE, Tier.DEVICE, tuple((tile, Tier.DEVICE) for tile in tiles))


def _gradient_bytes(config: OffloadConfig, units: Sequence[UnitSpec], dtype: torch.dtype) -> int:
    """The gradient of the largest parameter; 0 where nothing is trained."""
    trainable = [spec.numel // unit.count for unit in units for spec in unit.trainable]
    return align(max(trainable, default=0) * dtype.itemsize) if config.optimizer is not None else 0


def store_bytes(plan: Plan, config: OffloadConfig, *, speculative: bool) -> int:
    """NVMe that the store takes with two places for each trained record; with ``durable`` also for those in memory and
    for logs, and a third one where a speculative update writes beside what is current and what is committed."""
    needed = sum(plan.nvme_bytes.values()) + plan.spare_copy_bytes
    if config.durable:
        needed += 2 * (plan.resident_bytes["weights"] + plan.resident_bytes["states"])
        num_places = 2 if len(config.paths) > 1 else 1  # several paths take the room of all places at once
        needed += (plan.spare_copy_bytes if speculative else 0) + log_bytes(plan) * num_places
    return needed


def scratch_bytes(plan: Plan, config: OffloadConfig) -> int:
    """NVMe that activations may take beside the store. What is free is looked at when it is needed."""
    if config.nvme_capacity == "auto":
        return 1 << 62
    return max(int(config.nvme_capacity) - store_bytes(plan, config, speculative=plan.speculative), 0)


def free_bytes_of(paths: Sequence[Path]) -> int:
    """The bytes that are free on the paths; one file system is counted once."""
    free = {}
    for path in paths:
        with contextlib.suppress(OSError):  # the store refuses the path, and says why
            found = os.statvfs(path)
            free[path.stat().st_dev] = found.f_bavail * found.f_frsize
    return sum(free.values())
