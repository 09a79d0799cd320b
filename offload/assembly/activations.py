"""Activations over the tiers: the pool that they go into, and which units' activations do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import cast

import torch
from torch import nn

from offload import option_values
from offload.assembly.run_plan import RunPlan
from offload.closing import Closers
from offload.config import OffloadConfig
from offload.device.host import Cpu
from offload.device.protocol import Device, Processor
from offload.errors import ConfigError
from offload.memory import map_large_blocks
from offload.model.activation_choice import FixedActivations, MeasuredActivations
from offload.model.activations import OffloadedTensors
from offload.model.forward_costs import DeviceClock, ForwardCosts, HostClock
from offload.model.hooks import Hooks
from offload.model.recompute import RecomputedForward, recomputed_modules
from offload.model.saved_tensors import SavedTensors
from offload.model.unit_in_model import SavesTensors
from offload.planning import scratch_bytes
from offload.report.meter import Meter
from offload.report.report import ActivationUse
from offload.tiers.activations.copies import Copies, DeviceCopies, HostCopies
from offload.tiers.activations.pool import ActivationPool
from offload.tiers.store import queue_options
from offload.units import UnitSpec
from swapper import Arena, Scratch, open_scratch


@dataclass(eq=False)
class Activations:
    """Modes of the units' activations, and the pool for those that leave the memory of compute."""

    modes: Sequence[str]
    """By unit."""
    pools: Sequence[ActivationPool]
    """One, or none where nothing leaves."""
    chosen: FixedActivations = field(default_factory=FixedActivations)
    """Changes of modes, and their moments."""

    @property
    def scratch(self) -> Sequence[Scratch]:
        """The space on NVMe."""
        return [pool.scratch for pool in self.pools if pool.scratch is not None]

    def take_use(self) -> ActivationUse:
        """Bytes that were moved and taken since the last call."""
        return next((pool.take_use() for pool in self.pools), ActivationUse())

    def tie(self, hooks: Hooks, model: nn.Module, processor: Processor, num_sharers: int) -> None:
        """Have the hooks of the model do what the modes say. So many ranks share the processor's memory."""
        in_memory = (each for each in model.buffers() if each.layout is torch.strided and not each.is_meta)
        lasting = {buffer.untyped_storage()._cdata for buffer in in_memory}
        here: SavesTensors = SavedTensors(hooks)
        kinds: dict[str, SavesTensors] = {"keep": here, "recompute": here}
        for pool in self.pools:
            for mode in ("host", "nvme"):
                kinds[mode] = OffloadedTensors(hooks, pool, lasting, spills=mode == "nvme")
        away = "nvme" if self.scratch else "recompute"
        modules = recomputed_modules(hooks.units)
        measured: list[tuple[RecomputedForward, ForwardCosts]] = []
        clock = HostClock() if isinstance(processor, Cpu) else DeviceClock(cast(Device, processor))
        for unit, mode in zip(hooks.units, self.modes, strict=True):
            unit.saved_tensors = kinds[away if mode == "auto" else mode]
            if mode == "keep" or unit not in modules:
                continue
            forward = RecomputedForward(modules[unit], unit)
            hooks.installed.add(forward)
            if mode == "auto":
                free_bytes = lambda: processor.free_bytes() // num_sharers  # noqa: E731
                costs = ForwardCosts(clock, free_bytes, unit.holds, hooks.runs_alone)
                forward.costs = costs
                measured.append((forward, costs))
        if measured:
            forwards, of_forwards = zip(*measured, strict=True)
            self.chosen = MeasuredActivations(forwards, of_forwards, away, kinds)


def make_activations(run: RunPlan, meter: Meter, closers: Closers) -> Activations:
    """Reserve the memory, and open the scratch space. Raises ``ConfigError`` for patterns without a unit,
    ``StoreUnsafe``."""
    modes = activation_modes(run.config, run.units)
    if not run.plan.activation_bytes:
        return Activations(modes, ())
    memory = Arena(run.plan.activation_bytes)
    closers.callback(memory.close)
    copies: Copies = HostCopies()
    if isinstance(run.processor, Cpu):
        map_large_blocks()  # else what activations leave is kept by the C library
    else:
        device = cast(Device, run.processor)
        copies = DeviceCopies(device)
        device.pin(memory.address, memory.nbytes)
        closers.callback(partial(device.unpin, memory.address))
    scratch = None
    if "nvme" in modes or "auto" in modes:
        options = queue_options(run.config, run.sharers)
        scratch = open_scratch(run.config.paths, scratch_bytes(run.plan, run.config), **options)
        closers.callback(scratch.close)
        scratch.register(memory)
    pool = ActivationPool(memory, scratch, copies, meter)
    closers.callback(pool.drain)
    return Activations(modes, (pool,))


def activation_modes(config: OffloadConfig, units: Sequence[UnitSpec]) -> list[str]:
    """The mode of each unit's activations. Raises ``ConfigError`` for a pattern that matches none."""
    asked = config.activations
    if isinstance(asked, str):
        return [asked] * len(units)
    names = [unit.name for unit in units]
    for pattern in asked:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = option_values.nearest(pattern, names)
            raise ConfigError(
                f"activations: no unit is called {pattern!r}. There are {', '.join(names[:4])}"
                f"{', ...' if len(names) > 4 else ''}" + ("" if near is None else f"; did you mean {near!r}?")
            )
    return [next((mode for pattern, mode in asked.items() if fnmatchcase(name, pattern)), "keep") for name in names]
