"""What ranks do together or alone in the tests; each rank calls these, and returns what it has seen."""

from __future__ import annotations

import contextlib
import runpy
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from ranks.programs import (
    ON_NVME,
    STATES,
    WEIGHTS,
    Model,
    Placement,
    Program,
    batch,
    bits,
    least_of,
    loss_of,
    raised,
    weights_of,
)
from tiny import Tiny
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from offload import BudgetError, ConfigError, NonFiniteGradient, OffloadEngine, RankError
from offload.testing.simulated import SimulatedDevice


def train(engine: OffloadEngine, steps: range, rank: int, size: int) -> None:
    for step in steps:
        tokens, targets = batch(step, 0, rank, size)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()


def one_looks(rank: int, size: int, placement: Placement, folder: Path, looks: bool, waits: bool = False) -> str:
    """Between two steps rank 0 alone evaluates, reads a weight and takes the state dict. The others go on with the
    next step, or they wait first. The bits of the weights at the end."""
    with Program().placed(placement, folder) as engine:
        train(engine, range(2), rank, size)
        if looks and rank == 0:
            tokens, targets = batch(99, 0, 0, 1)
            with torch.no_grad():
                before = loss_of(engine(tokens), targets)
                assert before == loss_of(engine(tokens), targets)
            values = engine.state_dict()
            assert torch.equal(values["gain"], engine.module.gain.detach())
            alone = Model()
            alone.load_state_dict(values)
            assert torch.allclose(loss_of(alone(tokens), targets), before)
        if waits:
            engine.synchronize()
        train(engine, range(2, 4), rank, size)
        return bits(weights_of(engine))


def changed_from_outside(rank: int, size: int, placement: Placement, folder: Path) -> dict[str, torch.Tensor]:
    """Weights and gradients are written between steps, by each of the ways there are."""
    with Program(options={"precision": "bf16"}).placed(placement, folder) as engine:
        module = engine.module
        train(engine, range(1), rank, size)
        other = Model(seed=1).state_dict()
        module.load_state_dict({name: other[name] for name in ("gain", "head.weight")}, strict=False)
        module.blocks[0].up.weight.data.copy_(other["blocks.0.up.weight"])
        with torch.no_grad():
            module.blocks[1].down.weight.mul_(0.5)
        train(engine, range(1, 2), rank, size)
        tokens, targets = batch(2, 0, rank, size)
        engine.backward(loss_of(engine(tokens), targets))
        gradient = module.blocks[1].up.weight.grad
        assert gradient is not None
        module.blocks[1].up.weight.grad = 2 * gradient
        module.gain.grad = torch.ones_like(module.gain)
        module.blocks[2].up.bias.grad = None
        engine.optimizer.step()
        return weights_of(engine)


def written_by_collectives(rank: int, size: int, placement: Placement, folder: Path) -> tuple[Any, ...]:
    """``torch.distributed`` writes to gradients and weights, as in a loop that averages by hand; what has changed, and
    what is said of a receive."""
    with Program().placed(placement, folder) as engine:
        weight = engine.module.blocks[0].up.weight
        tokens, targets = batch(0, 0, rank, size)
        engine.backward(loss_of(engine(tokens), targets))
        mean = weight.grad.clone()
        distributed.all_reduce(weight.grad)
        summed = weight.grad.clone()
        weight.grad.div_(size)
        work = distributed.all_reduce(weight.grad.data, async_op=True)
        work.wait()
        again = weight.grad.clone()
        before = weight.detach().clone()
        distributed.all_reduce(weight.data)
        doubled = weight.detach().clone()
        said = ""
        try:
            distributed.recv(weight.data, 1 - rank)
        except ConfigError as error:
            said = str(error)
        return bool(summed.equal(2 * mean)), bool(again.equal(2 * mean)), bool(doubled.equal(2 * before)), said


def goes_on_from_states(rank: int, size: int, folder: Path) -> tuple[str, str]:
    """A training, and one that another engine ends, with the first one's weights and optimizer states."""
    program = Program(options={"precision": "bf16", "moments_dtype": "int8"}, model={"hidden": (509, 251)})
    with program.placed(WEIGHTS, folder) as engine:
        train(engine, range(2), rank, size)
        weights, states = engine.state_dict(), engine.optimizer.state_dict()
        train(engine, range(2, 4), rank, size)
        whole = bits(weights_of(engine))
    with program.placed(ON_NVME, folder) as engine:
        engine.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        train(engine, range(2, 4), rank, size)
        return whole, bits(weights_of(engine))


def unwrapped(rank: int, size: int, folder: Path) -> tuple[str, str]:
    """Weights in the engine, and in the model that it gives back; it is an ordinary one, and another engine
    takes it."""
    engine = Program().placed(ON_NVME, folder)
    train(engine, range(1), rank, size)
    weights = bits(weights_of(engine))
    model = engine.unwrap()
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    found = bits(dict(model.named_parameters()))
    with OffloadEngine(model, lr=1e-2) as again:
        train(again, range(1), rank, size)
    return weights, found


def two_at_a_time(rank: int, size: int, folder: Path) -> tuple[list[str], list[str]]:
    """Two engines trained one after the other, and step by step in turns."""
    programs = [Program(), Program(model={"seed": 5, "hidden": (41, 43)})]
    apart, together = [], []
    for program in programs:
        with program.placed(WEIGHTS, folder) as engine:
            train(engine, range(2), rank, size)
            apart.append(bits(weights_of(engine)))
    with programs[0].placed(WEIGHTS, folder) as first, programs[1].placed(ON_NVME, folder) as second:
        for step in range(2):
            for engine in (first, second):
                train(engine, range(step, step + 1), rank, size)
        together = [bits(weights_of(engine)) for engine in (first, second)]
    return apart, together


def two_pairs(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Two meshes of two ranks each train a model of their own."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pair", "dp"))
    pair, own = divmod(rank, 2)
    program = Program(model={"seed": pair}, options={"mesh": mesh["dp"]})
    with program.placed(ON_NVME, folder) as engine:
        train(engine, range(2), own, 2)
        return {"pair": pair, "weights": weights_of(engine), "ranks": engine.plan.ranks.num_ranks}


def infers(rank: int, size: int, folder: Path) -> bool:
    """An engine that does not train computes what the model computes; each rank on its own data."""
    tokens, _ = batch(rank, 0, 0, 1)
    expected = Model()(tokens)
    with OffloadEngine(Model(), optimizer=None, nvme_path=folder, precision="fp32", shard="weights") as engine:
        assert not engine.plan.ranks.buffers
        assert f"for whole units, of which {size} ranks have shards" in str(engine.plan)
        with torch.no_grad():
            return torch.equal(engine(tokens), expected)


def not_finite(rank: int, size: int, folder: Path) -> tuple[str, bool, str]:
    """Of a step in which one rank's loss is infinite: the error, whether weights stayed, and the bits of later ones."""
    with Program().placed(ON_NVME, folder) as engine:
        train(engine, range(1), rank, size)
        before = bits(weights_of(engine))
        tokens, targets = batch(1, 0, rank, size)
        engine.backward(loss_of(engine(tokens), targets) * (float("inf") if rank == 1 else 1.0))
        try:
            engine.step()
        except NonFiniteGradient as error:
            said = str(error)
        same = bits(weights_of(engine)) == before
        train(engine, range(1, 3), rank, size)
        return said, same, bits(weights_of(engine))


def least_budget(rank: int, size: int, folder: Path) -> tuple[str, int, int]:
    """What is said of a budget that is too small, what it says to be enough, and what one byte less is answered."""
    program = Program(options={"shard": "weights"})
    try:
        program.make(folder, host_memory=1)
    except BudgetError as error:
        said, needed = str(error), error.needed_bytes
    with program.make(folder, host_memory=needed) as engine:
        train(engine, range(1), rank, size)
    try:
        program.make(folder, host_memory=needed - size)
    except BudgetError as error:
        return said, needed, error.needed_bytes
    return said, needed, 0


def refusals(rank: int, size: int, folder: Path) -> list[str]:
    """What is said of options that several ranks do not have, in order."""
    table = init_device_mesh("cpu", (1, 1, size), mesh_dim_names=("a", "b", "c"))
    shared = SimulatedDevice()
    shared.identity = "GPU 7"
    options: list[dict[str, Any]] = [
        {"device": shared},
        {"device": shared if rank else "cpu"},
        {"optimizer": torch.optim.NAdam},
        {"mesh": table},
    ]
    said = [raised(lambda of=of: OffloadEngine(Model(), precision="fp32", **of)) for of in options]  # type: ignore[misc]
    with Program().placed(WEIGHTS, folder) as engine:
        train(engine, range(1), rank, size)  # nothing has ended
    return said


def without_gradients(rank: int, size: int, placement: Placement, folder: Path, has: int) -> dict[str, torch.Tensor]:
    """A step in which one rank ``has`` gradients and the others have none, then one as usual."""
    with Program(options={"optimizer": "sgd", "lr": 0.1}).placed(placement, folder) as engine:
        if rank == has:
            tokens, targets = batch(0, 0, 0, 1)
            loss_of(engine(tokens), targets).backward()
        engine.optimizer.step()
        train(engine, range(1, 2), rank, size)
        return weights_of(engine)


def warned(rank: int, size: int, folder: Path) -> list[str]:
    """What is said in a step of a model that is so small that the last ranks have padding alone."""
    with warnings.catch_warnings(record=True) as said, Program().placed(WEIGHTS, folder) as engine:
        warnings.simplefilter("always")
        train(engine, range(1), rank, size)
    return [str(warning.message) for warning in said]


def told(rank: int, size: int, call: Any, *args: Any) -> tuple[str, float]:
    """The error with which ``call`` ends on this rank, and after how many seconds."""
    start = time.monotonic()
    try:
        call(rank, size, *args)
    except RankError as error:
        return str(error), time.monotonic() - start
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def one_ends_early(rank: int, size: int, folder: Path) -> tuple[str, float]:
    """Rank 1 has a batch less, and closes its engine."""

    def loop(rank: int, size: int) -> None:
        with Program(options={"rank_timeout": 10}).placed(WEIGHTS, folder) as engine:
            train(engine, range(2 if rank == 1 else 3), rank, size)

    return told(rank, size, loop)


def one_changes_weights(rank: int, size: int, folder: Path) -> tuple[str, float]:
    """Rank 0 alone writes a weight; the others take the next step."""

    def loop(rank: int, size: int) -> None:
        with Program(options={"rank_timeout": 10}).placed(STATES, folder) as engine:
            train(engine, range(1), rank, size)
            if rank == 0:
                engine.module.gain.data.fill_(1.0)
            train(engine, range(1, 2), rank, size)

    return told(rank, size, loop)


def one_saves(rank: int, size: int, folder: Path) -> tuple[str, float]:
    """Rank 0 alone saves a checkpoint, as scripts of one GPU do; the others take the next step."""

    def loop(rank: int, size: int) -> None:
        with Program(options={"rank_timeout": 10}).placed(STATES, folder) as engine:
            train(engine, range(1), rank, size)
            if rank == 0:
                engine.save_checkpoint(folder / "saved")
            train(engine, range(1, 2), rank, size)

    return told(rank, size, loop)


def one_raises(rank: int, size: int, folder: Path) -> tuple[str, float]:
    """The model raises on the last rank."""

    def loop(rank: int, size: int) -> None:
        with Program(options={"rank_timeout": 10}).placed(WEIGHTS, folder) as engine:
            train(engine, range(1), rank, size)
            if rank == size - 1:
                engine.module.blocks[1].register_forward_hook(_raise)
            train(engine, range(1, 2), rank, size)

    return told(rank, size, loop)


def raises_between_backwards(rank: int, size: int, placement: Placement, folder: Path) -> str:
    """What each rank's error is when the first one's loop raises, and the others are in the middle of a step."""

    def loop() -> None:
        with Program().placed(placement, folder) as engine:
            train(engine, range(1), rank, size)
            if rank == 0:
                raise ValueError("planted")
            train(engine, range(1, 3), rank, size)

    return raised(loop)


def _raise(*_: Any) -> None:
    raise ValueError("a hook of the user's own")


def moved(
    rank: int,
    size: int,
    placement: Placement,
    folder: Path,
    micro_batches: int = 1,
    *,
    hold: bool = False,
    together: bool = False,
) -> dict[str, int]:
    """Bytes that one rank moves in a step of ``Tiny``, of two steps one after the other the mean, and what its plan
    has; by name. On NVMe the budget is the least one. ``hold``: ranks hold gradients until the last micro-batch.
    ``together``: micro-batches run so."""
    options: dict[str, Any] = {"shard": placement.shard, "precision": "bf16", "lr": 1e-2, "nvme_path": folder}
    options["gradient_accumulation_steps"] = micro_batches
    if placement.budget is not None:
        options["host_memory"] = least_of(lambda: OffloadEngine(Tiny(), host_memory=1, **options))
    with OffloadEngine(Tiny(), **options) as engine:
        reports = []
        for step in range(3):

            def run(micro: int, step: int = step) -> None:
                tokens, targets = batch(step, micro, rank, size)
                with engine.no_sync() if hold and micro + 1 < micro_batches else contextlib.nullcontext():
                    engine.backward(loss_of(engine(tokens), targets))

            if together:
                engine.together(range(micro_batches), run)
            for micro in range(0 if together else micro_batches):
                run(micro)
            engine.step()
            reports.append(engine.report())
            engine.synchronize()  # what the step's update moves belongs to the next report
        plan, last = engine.plan, reports[1:]
        return {
            "read": sum(report.nvme_read_bytes for report in last) // 2,
            "write": sum(report.nvme_write_bytes for report in last) // 2,
            "network": sum(report.network_bytes for report in last) // 2,
            "to read": plan.step_read_bytes,
            "to write": plan.step_write_bytes,
            "stored": sum(plan.nvme_bytes.values()),
            "rests on the host": sum(plan.resident_bytes.values()),
            "weights": sum(item.unit.numel for item in plan.units) * size * plan.formats.weights,
        }


def saves(rank: int, size: int, placement: Placement, folder: Path) -> tuple[str, str]:
    """Bits of weights and states after two steps, which are saved in both ways; those of weights after a third."""
    with Program().placed(placement, folder) as engine:
        train(engine, range(2), rank, size)
        engine.save_checkpoint(folder / "own")
        engine.save_dcp(folder / "dcp")
        saved = bits([weights_of(engine), engine.optimizer.state_dict()["state"]])
        train(engine, range(2, 3), rank, size)
        return saved, bits(weights_of(engine))


def goes_on(rank: int, size: int, placement: Placement, folder: Path, name: str) -> tuple[str, str]:
    """The same of what was saved under this name."""
    with Program().placed(placement, folder) as engine:
        if name == "dcp":
            engine.load_dcp(folder / name)
        else:
            engine.load_checkpoint(folder / name)
        found = bits([weights_of(engine), engine.optimizer.state_dict()["state"]])
        train(engine, range(2, 3), rank, size)
        return found, bits(weights_of(engine))


def sequence_in_parts(rank: int, size: int, page: Path, folder: Path, shard: str) -> dict[str, torch.Tensor]:
    """The script of the recipe, each rank with its part of the sequence; the weights at the end."""
    names = runpy.run_path(str(page))
    model = names["build"]()
    options: dict[str, Any] = {"lr": 0.1, "optimizer": "sgd", "shard": shard, "nvme_path": folder}
    with OffloadEngine(model, **options) as engine:
        names["train"](model, engine.optimizer, names["big_bird"], rank, size, 3)
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def exchanged(rank: int, size: int, placement: Placement, folder: Path, exchange_dtype: str) -> dict[str, Any]:
    """Train in fp32: bytes of weights, bytes that a step receives, the mean loss of the last steps, and the bits."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"shard": placement.shard, "precision": "fp32", "nvme_path": folder}
    with OffloadEngine(Tiny(64), exchange_dtype=exchange_dtype, **options) as engine:
        losses = []
        for step in range(8):
            tokens, targets = batch(step % 4, 0, rank, size)
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.synchronize()
        weights = 4 * sum(item.unit.numel for item in engine.plan.units) * size
        received, mean = engine.report().network_bytes, sum(losses[-4:]) / 4
        return {"weights": weights, "network": received, "loss": mean, "bits": bits(weights_of(engine))}
