"""What ranks do with a ``torch.distributed.checkpoint`` in the tests."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks.jobs import train
from ranks.programs import WEIGHTS, Model, Placement, Program, batch, bits, loss_of, raised, weights_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from offload import OffloadEngine
from offload.checkpoint.dcp.reader import DistributedReader
from offload.checkpoint.dcp.writer import Planner


def all_of(engine: OffloadEngine) -> dict[str, Any]:
    """All that a DCP holds of an engine: of 16-bit weights also the masters, by bits."""
    found = engine.optimizer.state_dict()
    return {
        "weights": bits(weights_of(engine)),
        "states": {index: {name: bits(value) for name, value in of.items()} for index, of in found["state"].items()},
        "groups": found["param_groups"],
        "buffers": bits(dict(engine.module.named_buffers())),
        "step": engine.global_step,
    }


def saves(rank: int, size: int, program: Program, placement: Placement, folder: Path) -> dict[str, Any]:
    with program.placed(placement, folder) as engine:
        train(engine, range(program.steps), rank, size)
        engine.optimizer.param_groups[0]["lr"] *= 0.7
        engine.save_dcp(folder / "dcp")
        return all_of(engine)


def saves_as_a_table(rank: int, size: int, program: Program, folder: Path) -> dict[str, Any]:
    """Two copies of the model, each of two shards."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return saves(rank, size, replace(program, options={"mesh": mesh}), WEIGHTS, folder)


def loads(rank: int, size: int, program: Program, placement: Placement, folder: Path) -> dict[str, Any]:
    """What is there afterwards, after some steps that are forgotten; and later losses."""
    with program.placed(placement, folder) as engine:
        train(engine, range(9, 10), rank, size)
        engine.load_dcp(folder / "dcp")
        found = all_of(engine)
        return {**found, "later": losses(engine, range(2, 4), rank, size)}


def losses(engine: OffloadEngine, steps: range, rank: int, size: int) -> list[float]:
    found = []
    for step in steps:
        tokens, targets = batch(step, 0, rank, size)
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, size: int) -> list[float]:
    found = []
    for step in steps:
        tokens, targets = batch(step, 0, rank, size)
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _wrapped(kind: str, seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Model(seed=seed)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def there_and_back(rank: int, size: int, kind: str, folder: Path) -> dict[str, list[float]]:
    """DDP or FSDP2 trains and saves, an engine goes on and saves, and the first goes on from that; beside it, all of
    it by the first."""
    model, optimizer = _wrapped(kind, 0, 1e-2)
    before = plain_losses(model, optimizer, range(2), rank, size)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / "theirs")
    alone = before + plain_losses(model, optimizer, range(2, 6), rank, size)
    with Program(model={"seed": 5}, options={"lr": 7.0, "shard": "weights"}).make(folder) as engine:
        engine.load_dcp(folder / "theirs")
        before += losses(engine, range(2, 4), rank, size)
        engine.save_dcp(folder / "ours")
    model, optimizer = _wrapped(kind, 6, 8.0)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {"alone": alone, "in turns": before + plain_losses(model, optimizer, range(4, 6), rank, size)}


def one_fails(rank: int, size: int, failing: int, folder: Path) -> dict[str, Any]:
    """The file of one rank may not become as long as it is; the next one may. What is said, what is there, and whether
    the first checkpoint comes back."""
    with Program(options={"shard": "weights"}).make(folder) as engine:
        train(engine, range(1), rank, size)
        engine.save_dcp(folder / "dcp")
        first = all_of(engine)
        names = sorted(entry.name for entry in (folder / "dcp").iterdir())
        train(engine, range(1, 2), rank, size)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
        said = raised(lambda: engine.save_dcp(folder / "dcp"))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        engine.synchronize()
        kept = sorted(entry.name for entry in (folder / "dcp").iterdir()) == names
        second = all_of(engine)
        engine.load_dcp(folder / "dcp")
        whole = all_of(engine) == first
        train(engine, range(1, 2), rank, size)
        goes_on = all_of(engine) == second
        engine.save_dcp(folder / "dcp")
        return {"said": said, "kept": kept, "whole": whole, "goes on": goes_on}


def reads_what_is_damaged(rank: int, size: int, folder: Path) -> str:
    """One rank sees a file that is too short; what all of them say, before anything has changed."""
    with Program(options={"shard": "weights"}).make(folder) as engine:
        train(engine, range(1), rank, size)
        engine.save_dcp(folder / "dcp")
        before = all_of(engine)
        if rank == 1:
            data = folder / "dcp" / "__0_0.distcp"
            data.write_bytes(data.read_bytes()[:-1])
        engine.synchronize()
        said = raised(lambda: engine.load_dcp(folder / "dcp"))
        assert all_of(engine) == before
        return said


def refusals(rank: int, size: int, folder: Path) -> list[str]:
    """What is said of a model of which each rank has a part."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = Model(hidden=(58,))
    parallelize_module(model.blocks[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with OffloadEngine(model, mesh=mesh["dp"], precision="fp32") as engine:
        return [raised(lambda: engine.save_dcp(folder / "dcp")), raised(lambda: engine.load_dcp(folder / "dcp"))]


def counted(rank: int, size: int, folder: Path) -> dict[str, int]:
    """Bytes that one rank reads to take over its shard, and the most that it holds of a file at a time."""
    taken = {"read": 0, "most": 0, "most written": 0}
    read, resolve = DistributedReader._read, Planner.resolve_data

    def counting(self: Any, file: str, offset: int, target: torch.Tensor) -> None:
        taken["read"] += target.nbytes
        taken["most"] = max(taken["most"], target.nbytes)
        read(self, file, offset, target)

    def resolving(self: Any, item: Any) -> Any:
        found = resolve(self, item)
        if isinstance(found, torch.Tensor):
            taken["most written"] = max(taken["most written"], found.nbytes)
        return found

    DistributedReader._read, Planner.resolve_data = counting, resolving  # type: ignore[method-assign]
    try:
        with Program(model={"large": True}, options={"shard": "weights"}).make(folder) as engine:
            train(engine, range(1), rank, size)
            engine.save_dcp(folder / "dcp")
            engine.load_dcp(folder / "dcp")
            taken["states"] = sum(value.nbytes for value in _tensors(engine.optimizer.state_dict()["state"]))
            taken["weights"] = sum(parameter.numel() * 4 for parameter in engine.module.parameters())
    finally:
        DistributedReader._read, Planner.resolve_data = read, resolve  # type: ignore[method-assign]
    return taken


def _tensors(states: dict[int, dict[str, Any]]) -> Iterator[torch.Tensor]:
    return (value for of in states.values() for value in of.values() if torch.is_tensor(value) and value.dim())
