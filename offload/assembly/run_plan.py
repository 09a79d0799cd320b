"""From options and a model to what an engine is made of: ranks, processor, units, optimizer, plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from offload import torch_internals
from offload.birth.birth import Birth
from offload.config import OffloadConfig
from offload.device.protocol import Processor
from offload.errors import ConfigError, warn
from offload.native_optimizers import NATIVE_OPTIMIZERS
from offload.optim.choose import OptimizerChoice, choose, takes_elements, whole_parameters
from offload.optim.rule import facts_of
from offload.plan.plan import Plan, Tier
from offload.planning import check_backend, check_paths, open_processor, plan_for
from offload.ranks.agreement import Facts, disagreement, fact_of_all, told
from offload.ranks.host_cores import HostCores, host_cores
from offload.ranks.machine import bind, share
from offload.ranks.world import Peers, World, find_peers, find_world, local_index
from offload.units import Distribution, UnitSpec, shard_unit
from offload.units.distributed_tensor import check_peers
from offload.units.find import find_units
from swapper import readable_bytes

_COPIED_SHOWN = 3


@dataclass(frozen=True)
class RunPlan:
    """All that is known before anything is reserved."""

    config: OffloadConfig
    """The options of this rank, which has its part of the machine."""
    world: World
    parts: Peers
    """Ranks that have other parts of the model's ``DTensor``s."""
    sharers: int
    """Ranks that use the same drives."""
    cores: float
    """Of the host's, this rank's part."""
    processor: Processor
    units: Sequence[UnitSpec]
    """The units as compute sees them: whole ones, not shards."""
    shards: Sequence[UnitSpec]
    """Of them this rank's: the units themselves, where there is one."""
    choice: OptimizerChoice | None
    plan: Plan
    """For the shards."""


def join_world(config: OffloadConfig) -> World:
    """The ranks that train the model together. Whatever happens, ``leave`` it."""
    torch_internals.check()
    check_backend(config.io_backend)
    return find_world(config.mesh, config.rank_timeout)


def plan_run(model: nn.Module, given: OffloadConfig, world: World, birth: Birth) -> RunPlan:
    """Plan an engine over ``model``, whose values come from ``birth``. Raises what the engine raises for options,
    models and budgets that cannot be."""
    processor = open_processor(given.device, local_index(world))
    config, sharers, cores = _of_rank(given, world, processor)
    whole = whole_parameters(given.optimizer, model)
    units = find_units(
        model,
        whole=whole,
        dtype=given.dtype,
        num_ranks=world.size,
        experts=given.expert_names,
    )
    if not units:
        raise ConfigError("the model has no floating-point parameters: there is nothing to offload")
    if given.optimizer is not None and not any(p.requires_grad for p in model.parameters()):
        warn("no parameter of the model requires grad: the engine will train nothing (optimizer=None says that)")
    _refuse_for_ranks(model, units, given, world, processor)
    distributions = [spec.distribution for unit in units for spec in unit.parameters if spec.distribution]
    if distributions:
        _refuse_for_parts(distributions, given, world)
    parts = find_peers(distributions[0].members if distributions else ())
    if world.size == 1:
        units = shards = [birth.in_place(unit, config.dtype) for unit in units]
    else:
        shards = [shard_unit(unit, world.shards.own, world.shards.size) for unit in units]
        shards = [birth.in_place(shard, config.dtype) for shard in shards]
    of_model = {id(parameter) for parameter in model.parameters()}
    choice = choose(given, shards, lambda parameter: id(parameter) in of_model, whole=whole)
    _refuse_disagreement(model, given, units, choice, world, birth)
    _refuse_quantised_elsewhere(units, given, processor.torch_device)
    plan = plan_for(config, units, choice, processor, world, shards)
    _say_what_is_copied(plan, birth, config.dtype)
    return RunPlan(config, world, parts, sharers, cores, processor, units, shards, choice, plan)


def _say_what_is_copied(plan: Plan, birth: Birth, dtype: torch.dtype) -> None:
    """Warn of units on NVMe whose frozen weights are in files, and cannot be read there."""
    copied: list[str] = []
    nbytes = 0
    for unit in (item.unit for item in plan.units if item.weights is Tier.NVME):
        why = birth.why_copied(unit, dtype)
        if why is not None:
            of_unit = (unit.numel - unit.trainable_numel) * plan.formats.weights
            copied.append(f"{unit.name}, {readable_bytes(of_unit)}: {why}")
            nbytes += of_unit
    if not copied:
        return
    more = f"; and {len(copied) - _COPIED_SHOWN} units more" if len(copied) > _COPIED_SHOWN else ""
    warn(
        f"frozen weights of {len(copied)} units, {readable_bytes(nbytes)}, are not read where they lie in the files: "
        f"they are copied to nvme_path ({'; '.join(copied[:_COPIED_SHOWN])}{more}). Files that hold them as the engine "
        f"computes with them, in {dtype} and in the model's own layout, are read in place"
    )


def _refuse_quantised_elsewhere(units: Sequence[UnitSpec], config: OffloadConfig, device: torch.device) -> None:
    """Raise ``ConfigError`` for quantised parameters that were made for another device, or whose values are to come
    from files."""
    packed = ((spec, spec.packing) for unit in units for spec in unit.parameters if spec.packing is not None)
    for spec in (spec for spec, packing in packed if not packing.is_of_files):
        if config.weights_path is not None:
            raise ConfigError(
                f"weights={config.weights_path}: parameter {spec.name} is quantised, and the files have ordinary "
                "values. Load them into the model, quantise it, and make the engine without weights=."
            )
        if spec.parameter.device.type != device.type:
            raise ConfigError(
                f"parameter {spec.name} was quantised on {spec.parameter.device}, and the model computes on {device}, "
                "where its bytes may have to lie otherwise: quantise the model there."
            )


def _of_rank(config: OffloadConfig, world: World, processor: Processor) -> tuple[OffloadConfig, int, float]:
    """The options of one rank, which has its part of the machine, how many ranks share its drives, and its cores."""
    if world.size == 1:
        return config, world.local_size, host_cores().available / world.local_size
    check_paths(config.paths)
    node = bind(world.local_rank, len(world.local_ranks), processor.torch_device)
    found = world.all_gather_object((node, host_cores().told))
    own = share(config, world.local_rank, [found[rank][0] for rank in world.local_ranks])
    cores = [HostCores.of(found[rank][1]) for rank in world.local_ranks]
    worlds = world.local_size / len(world.local_ranks)  # others train other parts of the model
    config = own.config
    if config.durable:  # a store that stays has a name
        paths = [path / world.part_name for path in config.paths]
        for path in paths:
            path.mkdir(exist_ok=True)
        config = replace(config, nvme_path=paths)
    return config, int(own.sharers * worlds), cores[world.local_rank].part(cores) / worlds


def _refuse_for_ranks(
    model: nn.Module, units: Sequence[UnitSpec], config: OffloadConfig, world: World, processor: Processor
) -> None:
    """Raise ``ConfigError`` for what several ranks cannot do, and on all of them if their models differ."""
    if world.size == 1:
        return
    order = {id(parameter): index for index, (_, parameter) in enumerate(nn.Module.named_parameters(model))}
    specs = sorted(  # in the model's order: that of a unit depends on what is trained
        (spec for unit in units for spec in unit.parameters if spec.numel), key=lambda spec: order[id(spec.parameter)]
    )
    own = [f"{spec.name} {tuple(spec.shape)}" for spec in specs]
    of_ranks = world.all_gather_object(own)
    for rank, others in zip(world.members, of_ranks, strict=True):
        if others != of_ranks[0]:
            first, other = next(pair for pair in zip_longest(of_ranks[0], others) if pair[0] != pair[1])
            raise ConfigError(
                f"ranks {world.members[0]} and {rank} have different models ({first}, {other}), and would train one "
                'together: give the ranks that have equal ones, such as mesh=world_mesh["dp"], also where that has one '
                "rank"
            )
    _refuse_devices(world, processor.identity)
    if not takes_elements(config.optimizer):
        raise ConfigError(
            f"this is one of {world.size} ranks, which hold parts of parameters, and an optimizer other than these may "
            f"look at whole ones: optimizer= is one of {', '.join(NATIVE_OPTIMIZERS)}, or a class of torch that is one "
            "of them"
        )
    packed = next((spec for unit in units for spec in unit.parameters if spec.packing is not None), None)
    if packed is not None:
        raise ConfigError(f"this is one of {world.size} ranks, and parameter {packed.name} is quantised: start one")


_OF_ONE_RANK = (
    *("nvme_path", "nvme_capacity", "host_memory", "device", "device_memory", "tile_bytes", "io_backend", "prefetch"),
    *("mesh", "run_dir", "weights", "optimizer"),
)
"""Options that a rank may have for itself: those of its machine, and those whose values have other names there."""


def _refuse_disagreement(
    model: nn.Module,
    config: OffloadConfig,
    units: Sequence[UnitSpec],
    choice: OptimizerChoice | None,
    world: World,
    birth: Birth,
) -> None:
    """Raise ``ConfigError`` on all ranks where they were given what would train another model on each."""
    if world.size == 1:
        return
    facts = told(_facts_of(model, config, units, choice, birth))
    difference = disagreement(world.all_gather_object(facts), world.members)
    if difference:
        raise ConfigError(f"{difference}. They train one model together: give all of them the same")


def _facts_of(
    model: nn.Module, config: OffloadConfig, units: Sequence[UnitSpec], choice: OptimizerChoice | None, birth: Birth
) -> Facts:
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OF_ONE_RANK}
    parameters = {id(spec.parameter): spec for unit in units for spec in unit.parameters}
    found: dict[str, Any] = {
        **options,
        "the weights": "from files" if config.weights is not None else "the model's",
        "the sizes and headers of weights files": birth.headers,
        "the mesh": None if config.mesh is None else config.mesh.mesh.tolist(),
        "requires_grad": {spec.name: spec.parameter.requires_grad for spec in parameters.values()},
        "the dtype": {spec.name: str(spec.parameter.dtype) for spec in parameters.values()},
        "the buffer": {name: f"{tuple(of.shape)} {of.dtype}" for name, of in model.named_buffers()},
    }
    if choice is not None:
        found = {"the optimizer": choice.rule.identity["optimizer"], **found}
        found.update(facts_of((group, [spec.name for spec in specs]) for group, specs in choice.groups))
        found["the states"] = {spec.name: fact_of_all(states) for spec, states in choice.states().items()}
    return found


def _refuse_devices(world: World, own: str | None) -> None:
    """Raise ``ConfigError`` on all ranks if they compute on different kinds of devices, or two on the same one."""
    identities = world.all_gather_object(own)
    for rank, identity in zip(world.members, identities, strict=True):
        if (identity is None) != (identities[0] is None):
            kinds = "a device" if identities[0] else "the CPU", "a device" if identity else "the CPU"
            raise ConfigError(
                f"rank {world.members[0]} computes on {kinds[0]} and rank {rank} on {kinds[1]}: give all of them the "
                "same device"
            )
        first = world.members[identities.index(identity)]
        if identity is not None and first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} compute on the same GPU ({identity}): start as many processes as there are "
                'GPUs, with device="cuda", or give each its own by device="cuda:0", "cuda:1" and so on'
            )


def _refuse_for_parts(distributions: Sequence[Distribution], config: OffloadConfig, world: World) -> None:
    """Raise ``ConfigError`` for what a model whose parameters are ``DTensor`` cannot do."""
    check_peers(distributions, world.members)
    if config.weights_path is not None:
        raise ConfigError(
            f"weights={config.weights_path}: the model has DTensors, and the files whole values. Load them into the "
            "model, parallelise it, and make the engine without weights="
        )
    if config.optimizer is not None and not takes_elements(config.optimizer):
        raise ConfigError(
            "the model has DTensors, and an optimizer other than these may look at whole parameters: optimizer= is one "
            f"of {', '.join(NATIVE_OPTIMIZERS)}, or a class of torch that is one of them"
        )
