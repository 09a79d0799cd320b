"""Programs that train one small model over a mesh: sharded and replicated data, tensor parallelism, pipelines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from offload import ConfigError, OffloadEngine
from offload.testing.simulated import SimulatedDevice

ROWS, WIDTH, BLOCKS, STEPS, MICRO_BATCHES = 16, 30, 4, 3, 4
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 1e-2, "host_memory": 100 << 20}
MAX_NORM = 0.1

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def batch(step: int, own: int = 0, count: int = 1) -> tuple[Tensor, Tensor]:
    """Part ``own`` of ``count`` equal parts of a step's batch: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, ROWS, 2, WIDTH, generator=generator).unbind()
    return inputs.chunk(count)[own], targets.chunk(count)[own]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def plain() -> dict[str, Any]:
    """The same training in one process, in memory: losses, norms of gradients, weights."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": whole(model.state_dict())}


def whole(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Ordinary tensors of one's own for what may be ``DTensor``. All ranks of it call this together."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in values.items()
    }


def parallelised(blocks: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    """Linear layers in parts over the ranks. Norms are ordinary parameters, which all ranks hold; or they work on parts
    of the ``sequence``, as replicated ``DTensor``s whose gradients come as partial sums."""
    plan: dict[str, Any] = {}
    for index, _ in blocks.named_children():
        plan |= {f"{index}.up": ColwiseParallel(), f"{index}.down": RowwiseParallel()}
        if sequence:
            plan |= {
                f"{index}": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
                f"{index}.norm": SequenceParallel(),
                f"{index}.up": ColwiseParallel(input_layouts=Shard(1)),
                f"{index}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
    parallelize_module(blocks, mesh, plan)
    gathered = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    return parallelize_module(blocks, mesh, dict.fromkeys(dict(blocks.named_children()), gathered) if sequence else {})


def mean(value: Tensor, mesh: DeviceMesh) -> float:
    """Of what the ranks of the mesh have."""
    total = value.detach().clone()
    for group in mesh.get_all_groups():
        distributed.all_reduce(total, group=group)
    return total.item() / mesh.size()


def hybrid(rank: int, size: int, rows: int, *, on_device: bool = False, **options: Any) -> dict[str, Any]:
    """Replicas over the first dimension of a mesh, shards over the second."""
    options |= {"device": SimulatedDevice()} if on_device else {}
    mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("replicate", "shard"))
    losses, norms = [], []
    with OffloadEngine(make_model(), mesh=mesh, **OPTIONS, **options) as engine:
        for step in range(STEPS):
            inputs, targets = batch(step, rank, size)
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            norms.append(engine.clip_grad_norm_(MAX_NORM).item())
            engine.step()
            losses.append(mean(loss, mesh))
        resting = sum(item.unit.numel for item in engine.plan.units)
        return {"losses": losses, "norms": norms, "weights": engine.state_dict(), "resting": resting}


class Gathered(torch.autograd.Function):
    """The parts of all ranks, one after the other along dimension 1."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        distributed.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        distributed.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Attends to the whole sequence, of which each rank of ``group`` has an equal part; alone to what it is given."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # of keys it has no gradient but rounding

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.group is not None:
            key, value = Gathered.apply(key, self.group), Gathered.apply(value, self.group)
        return x + nn.functional.scaled_dot_product_attention(query, key, value)


def context(rank: int, size: int, *, shard: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each rank has a part of every sequence: what ranks train, and one process on whole sequences."""

    def model(group: Any) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Attention(group), Block(), Attention(group), Block())

    def train(engine: OffloadEngine, own: int, count: int) -> dict[str, Any]:
        losses = []
        for step in range(STEPS):
            inputs, targets = (part.view(2, ROWS, WIDTH).chunk(count, 1)[own] for part in batch(step))
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return {"losses": losses, "weights": engine.state_dict()}

    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    with OffloadEngine(model(mesh["cp"].get_group()), mesh=mesh, shard=shard, **OPTIONS) as engine:  # type: ignore[arg-type]
        found = train(engine, rank, size)
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("others", "dp"))["dp"]
    with OffloadEngine(model(None), mesh=alone, **OPTIONS) as engine:
        return found, train(engine, 0, 1)


def composed(
    rank: int,
    size: int,
    pp: int,
    tp: int,
    *,
    replicas: int = 1,
    schedule: str = "1f1b",
    sequence: bool = False,
    on_device: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Stages of a pipeline over ``pp`` ranks, each of them in parts over ``tp`` ranks; the rest feed different data,
    and hold ``replicas`` of shards."""
    options |= {"device": SimulatedDevice()} if on_device else {}
    lengths = (pp, replicas, size // pp // replicas // tp, tp)
    mesh = init_device_mesh("cpu", lengths, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]
    place = mesh["replicate"].get_local_rank() * lengths[2] + mesh["shard"].get_local_rank()
    stages, numbers = _stages(
        make_model(), pp, mesh["pp"].get_local_rank(), SCHEDULES[schedule] is ScheduleInterleaved1F1B
    )
    if tp > 1:
        for blocks in stages:
            parallelised(blocks, mesh["tp"], sequence=sequence)
    losses, norms = [], []
    with OffloadEngine(
        stages, mesh=data, gradient_accumulation_steps=MICRO_BATCHES if pp > 1 else 1, **OPTIONS, **options
    ) as engine:
        step_of = _pipeline(engine.module, numbers, mesh["pp"], schedule) if pp > 1 else _loop(engine)
        for step in range(STEPS):
            loss = step_of(*batch(step, place, data.size()))
            norms.append(clip(engine, mesh["pp"].get_group()))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if loss is not None:
                losses.append(mean(loss, data))
        weights = {name.split(".", 1)[1]: value for name, value in whole(engine.state_dict()).items()}
        return {"losses": losses, "norms": norms, "weights": weights}


def clip(engine: OffloadEngine, stages: Any) -> float:
    """Clip by the norm over all stages, which none of the engines knows."""
    parameters = list(engine.module.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    total = norm.double() ** 2
    distributed.all_reduce(total, group=stages)
    norm = total.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)
    return norm.item()


def _stages(model: nn.Sequential, pp: int, own: int, interleaved: bool) -> tuple[nn.ModuleList, list[int]]:
    """This rank's stages of the model, and their numbers."""
    num_stages = 2 * pp if interleaved else pp
    length = BLOCKS // num_stages
    numbers = list(range(own, num_stages, pp))
    return nn.ModuleList(model[number * length : (number + 1) * length] for number in numbers), numbers


def _pipeline(stages: nn.Module, numbers: list[int], mesh: DeviceMesh, schedule: str) -> Any:
    num_stages, group = len(numbers) * mesh.size(), mesh.get_group()
    made = [
        PipelineStage(module, number, num_stages, torch.device("cpu"), group=group)
        for module, number in zip(stages, numbers, strict=True)
    ]
    kind = SCHEDULES[schedule]
    runner = kind(made if kind is ScheduleInterleaved1F1B else made[0], MICRO_BATCHES, loss_fn=loss_of)

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        first, last = 0 in numbers, num_stages - 1 in numbers
        runner.step(*[inputs][: int(first)], **{"target": targets, "losses": losses} if last else {})
        return torch.stack(losses).mean() if last else None

    return step


def _loop(engine: OffloadEngine) -> Any:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(engine.module[0](inputs), targets)
        loss.backward()
        return loss.detach()

    return step


def uneven(rank: int, size: int) -> tuple[list[list[float]], list[Tensor], list[int]]:
    """Losses and last weights of layers in parts that are not equal, by the engine and without, and the parts' rows."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 31), nn.ReLU(), nn.Linear(31, 3), nn.ReLU(), nn.Linear(3, WIDTH))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(STEPS):
            inputs, targets = batch(step)
            loss = loss_of(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = make()
    losses = [train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))]
    gathered = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("0", "2", "4")}
    model = parallelize_module(make(), mesh["tp"], gathered)
    with OffloadEngine(model, mesh=mesh["dp"], **OPTIONS) as engine:
        losses.append(train(model, engine.optimizer))
        model[0].weight.data = model[0].weight.full_tensor().clone()  # as it is
        weights = torch.cat([value.view(-1) for value in whole(engine.state_dict()).values()])
        rows = [len(model[index].weight.to_local()) for index in (0, 2, 4)]
    return losses, [nn.utils.parameters_to_vector(plain.parameters()).detach(), weights], rows


def values_of_distributed(rank: int, size: int) -> dict[str, Any]:
    """What is read and written from outside of a model in parts."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))

    def make() -> OffloadEngine:
        return OffloadEngine(parallelised(make_model(), mesh["tp"], sequence=True), mesh=mesh["dp"], **OPTIONS)

    def train(engine: OffloadEngine, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 2):
            inputs, targets = batch(step)
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    found: dict[str, Any] = {}
    with make() as engine, make() as other:
        parameter = engine.module[0].up.weight
        inputs, targets = batch(9)
        engine.backward(loss_of(engine(inputs), targets))
        gradient = parameter.grad
        found["shapes"] = parameter.shape, parameter.to_local().shape, gradient.shape, gradient.to_local().shape
        found["norms"] = [gradient.norm().item(), gradient.full_tensor().norm().item()]
        gradient.add_(1)
        found["written norms"] = [gradient.norm().item(), gradient.full_tensor().norm().item()]
        engine.optimizer.zero_grad()
        (parameter**2).sum().backward()
        found["of a sum of squares"] = whole({"is": parameter.grad})["is"], whole({"is": parameter})["is"]
        engine.optimizer.zero_grad()
        parameter.data.mul_(2)
        parameter.data = parameter.full_tensor() + 1
        found["written"] = whole({"is": parameter})["is"]
        train(engine, 0)
        weights, states = engine.state_dict(), engine.optimizer.state_dict()
        found["classes"] = {type(value).__name__ for value in weights.values()} | {
            type(value).__name__ for of in states["state"].values() for name, value in of.items() if name != "step"
        }
        other.load_state_dict(weights)
        other.optimizer.load_state_dict(states)
        found["resumed"] = train(engine, 2), train(other, 2)
        found["last"] = whole(engine.state_dict())
        found["unwrapped"] = whole(engine.unwrap().state_dict())
    return found


def refused(rank: int, size: int, what: str) -> str:
    """The message of the ``ConfigError`` that making an engine over this model and mesh raises."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model, options = make_model(), dict(OPTIONS)
    if what == "parts, and no mesh":
        parallelised(model, mesh["tp"], sequence=False)
    elif what == "stages, and no mesh":
        model = model[rank : rank + 1]
    elif what == "three dimensions":
        options["mesh"] = init_device_mesh("cpu", (1, 1, size))
    elif what == "two meshes":
        parallelised(model[:2], mesh["tp"], sequence=False)
        parallelised(model[2:], mesh["dp"], sequence=False)
        options["mesh"] = mesh["dp"]
    elif what == "an optimizer without a kernel":
        parallelised(model, mesh["tp"], sequence=False)
        options |= {"mesh": mesh["dp"], "optimizer": torch.optim.Adamax}
    try:
        OffloadEngine(model, **options)
    except ConfigError as error:
        return str(error)
    return "made"


def save_model_of_parts(rank: int, size: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = parallelised(make_model(), mesh["tp"], sequence=False)
    with OffloadEngine(model, mesh=mesh["dp"], **OPTIONS) as engine:
        try:
            engine.save_model(folder)
        except ConfigError as error:
            return str(error)
    return "saved"


def two_engines(rank: int, size: int) -> list[list[float]]:
    """Losses of two models that are trained side by side, and of each of them alone."""

    def train(*seeds: int) -> list[list[float]]:
        engines = [OffloadEngine(make_model(seed), **OPTIONS) for seed in seeds]
        found: list[list[float]] = [[] for _ in seeds]
        for step in range(STEPS):
            inputs, targets = batch(step, rank, size)
            losses = [loss_of(engine(inputs), targets) for engine in engines]
            torch.stack(losses).sum().backward()
            for engine, loss, of_engine in zip(engines, losses, found, strict=True):
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                of_engine.append(loss.item())
        for engine in engines:
            engine.close()
        return found

    return [*train(0, 1), *train(0), *train(1)]


def written_gradient(rank: int, size: int) -> list[float]:
    """The norm of a gradient that was written, as its handle says and by its elements."""
    with OffloadEngine(make_model(), **OPTIONS) as engine:
        inputs, targets = batch(0, rank, size)
        engine.backward(loss_of(engine(inputs), targets))
        parameter = engine.module[0].up.weight
        parameter.grad = parameter.grad.clone() * 3
        return [parameter.grad.norm().item(), parameter.grad.clone().norm().item()]


def saved_over_replicas(rank: int, size: int, folder: str) -> bool:
    """Whether ranks without replicas find what replicas have saved."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    with OffloadEngine(make_model(), mesh=mesh, **OPTIONS) as engine:
        inputs, targets = batch(0, rank, size)
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
        engine.save_checkpoint(folder)
        weights, states = engine.state_dict(), engine.optimizer.state_dict()["state"]
    with OffloadEngine(make_model(seed=1), **OPTIONS) as engine:
        engine.load_checkpoint(folder)
        found, loaded = engine.state_dict(), engine.optimizer.state_dict()["state"]
    return all(torch.equal(value, weights[name]) for name, value in found.items()) and all(
        torch.equal(of["exp_avg"], states[key]["exp_avg"]) for key, of in loaded.items()
    )


def run_program(rank: int, size: int, text: str) -> tuple[int, list[float]]:
    """Run a program as torchrun would: the steps that its ``engine`` has taken, and the ``losses`` of the last one."""
    os.environ["WORLD_SIZE"] = str(size)
    try:
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        return namespace["engine"].global_step, [loss.item() for loss in namespace["losses"]]
    finally:
        del os.environ["WORLD_SIZE"]
