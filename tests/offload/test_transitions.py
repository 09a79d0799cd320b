"""What a program has under way when it saves, loads or ends: a checkpoint has all of it, and what fails loses none."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import bits
from safetensors.torch import load_file
from torch import nn

from offload import ConfigError, OffloadEngine, OffloadError
from offload.tiers.window import CopyWindow
from swapper import StoreMissing


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def backward(engine: OffloadEngine, index: int = 0) -> None:
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(index))
    engine(inputs).square().mean().backward()


def from_checkpoint(engine: OffloadEngine, path: Path) -> dict[str, Any]:
    engine.save_checkpoint(path)
    with OffloadEngine(layers(1), lr=1e-2) as other:
        other.load_checkpoint(path)
        return {name: value.clone() for name, value in other.module.state_dict().items()}


def from_files(engine: OffloadEngine, path: Path) -> dict[str, Any]:
    engine.save_model(path)
    return load_file(path / "model.safetensors")


def from_dcp(engine: OffloadEngine, path: Path) -> dict[str, Any]:
    engine.save_dcp(path)
    with OffloadEngine(layers(1), lr=1e-2) as other:
        other.load_dcp(path)
        return {name: value.clone() for name, value in other.module.state_dict().items()}


def from_the_model(engine: OffloadEngine, path: Path) -> dict[str, Any]:
    engine.close()
    return engine.module.state_dict()


SAVING = (from_checkpoint, from_files, from_dcp, from_the_model)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("save", SAVING)
def test_what_was_written_to_a_resident_block_is_saved(tmp_path: Path, save, copies: bool, monkeypatch):
    """It stays resident, unless the engine ends."""
    if copies:
        for module in ("planning", "assembly.compute"):
            monkeypatch.setattr(f"offload.{module}.window_class", lambda: CopyWindow)
    with OffloadEngine(layers(), lr=1e-2) as engine, engine.resident(engine.module[1]):
        weight = engine.module[1].weight
        weight.data = torch.full((64, 64), 0.5)
        assert save(engine, tmp_path / "saved")["1.weight"].eq(0.5).all()
        weight.data.add_(0.5)
    assert engine.module[1].weight.eq(1).all()


@pytest.mark.parametrize("save", SAVING)
def test_what_was_written_to_memory_that_a_weight_had_is_saved(tmp_path: Path, save):
    model = layers()
    alias = model[1].weight.data
    with OffloadEngine(model, lr=1e-2) as engine:
        alias.fill_(0.5)
        assert save(engine, tmp_path / "saved")["1.weight"].eq(0.5).all()


@pytest.mark.parametrize("how", ["memory that it had", "a resident block"])
def test_a_commit_has_what_was_written_to_a_weight_after_its_step(tmp_path: Path, how: str):
    model = layers()
    alias = model[1].weight.data
    with OffloadEngine(model, nvme_path=tmp_path, durable=1, lr=1e-2) as engine:
        backward(engine)
        engine.optimizer.step()
        with engine.resident(model[1]) if how == "a resident block" else contextlib.nullcontext():
            (alias if how == "memory that it had" else model[1].weight.data).fill_(0.5)
        backward(engine)  # commits
        alias.fill_(0.25)  # belongs to no step that is committed
        engine.close(discard=True)
    with OffloadEngine(layers(), nvme_path=tmp_path, durable=1, lr=1e-2) as engine:
        engine.load_checkpoint()
        assert engine.module[1].weight.eq(0.5).all()


def test_gradients_that_a_program_has_assigned_are_saved(tmp_path: Path):
    def run(*, resumes: bool) -> torch.Tensor:
        engine = OffloadEngine(layers(), lr=1e-2)
        backward(engine)
        for parameter in engine.module.parameters():
            parameter.grad = parameter.grad * 2
        engine.module[1].bias.grad = None
        if resumes:
            engine.save_checkpoint(tmp_path / "saved")
            engine.close(discard=True)
            engine = OffloadEngine(layers(1), lr=1e-2)
            engine.load_checkpoint(tmp_path / "saved")
        backward(engine, 1)
        engine.optimizer.step()
        engine.close()
        return bits(engine.module)

    assert run(resumes=False).equal(run(resumes=True))


def test_a_load_that_finds_nothing_leaves_the_last_step_to_be_committed(tmp_path: Path):
    with OffloadEngine(layers(), nvme_path=tmp_path, durable=1, lr=1e-2) as engine:
        backward(engine)
        engine.optimizer.step()
        with pytest.raises(StoreMissing):
            engine.load_checkpoint(tmp_path / "nothing")
        assert engine._session.checkpoints.is_due  # at the next forward, and not at the end alone


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor])
def test_a_state_dict_stays_what_it_was_as_training_goes_on(kind):
    """All of it: with the steps of later ones, moments of before would be another optimizer's."""
    with OffloadEngine(layers(), optimizer=kind, lr=1e-2) as engine:
        for step in range(4):
            backward(engine, step)
            engine.optimizer.step()
            if step == 1:
                weights, states = engine.state_dict(), engine.optimizer.state_dict()
                weights = {name: value.clone() for name, value in weights.items()}
                expected = copy.deepcopy(states)
        final = bits(engine.module)
        assert all(same.equal(expected["state"][0][name]) for name, same in states["state"][0].items())
        engine.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        for step in range(2, 4):
            backward(engine, step)
            engine.optimizer.step()
        assert bits(engine.module).equal(final)


class Batches:
    """A data loader with a state; one of its batches is too large for fp16."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        self.index += 1
        batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(self.index))
        return batch * 1e6 if self.index == 3 else batch

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


@pytest.mark.parametrize("scales", ["the engine", "the program"])
def test_a_durable_run_goes_on_behind_a_step_that_was_skipped(tmp_path: Path, scales: str):
    """With the loss scale that it has after it, and with the batch that follows."""
    is_ours = scales == "the engine"
    precision = "fp16" if is_ours else "fp32"

    def run(path: Path, until: int) -> tuple[torch.Tensor, float]:
        options = {"nvme_path": path, "durable": 10, "precision": precision, "lr": 1e-2}
        with OffloadEngine(layers(), **options) as engine:
            scaler, batches = torch.amp.GradScaler("cpu", enabled=not is_ours, init_scale=4.0), Batches()
            engine.register_for_checkpointing(batches, scaler)
            engine.load_checkpoint()
            while batches.index < until:
                batch = next(batches)
                loss = engine(batch).float().square().mean()
                if is_ours:
                    engine.backward(loss)
                    engine.step()
                else:
                    loss = loss * math.inf if batches.index == 3 else loss
                    engine.optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.step(engine.optimizer)
                    scaler.update()
            scale = engine._session.progress.loss_scale.value if is_ours else scaler.get_scale()
            return bits(engine.module), scale

    for name in ("in one", "in two"):
        (tmp_path / name).mkdir()
    final, scale = run(tmp_path / "in one", 6)
    run(tmp_path / "in two", 3)
    resumed, resumed_scale = run(tmp_path / "in two", 6)
    assert resumed.equal(final) and resumed_scale == scale


def evaluated(engine: OffloadEngine, path: Path) -> None:
    with torch.no_grad():
        engine(torch.ones(4, 64))


def saved(engine: OffloadEngine, path: Path) -> None:
    engine.save_checkpoint(path / "saved")


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("before", [evaluated, saved])
def test_what_follows_an_evaluation_or_a_save_belongs_to_the_step(
    tmp_path: Path, before: Callable[[OffloadEngine, Path], None], every: int
):
    """A plateau by the loss of an evaluation, weights that are cut: a durable run that ends then has them."""
    (tmp_path / "store").mkdir()
    options: dict[str, Any] = {"nvme_path": tmp_path / "store", "durable": every, "lr": 1e-2}
    with OffloadEngine(layers(), **options) as engine:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        engine.register_for_checkpointing(plateau)
        for index in range(3):
            backward(engine, index)
            engine.step()
        before(engine, tmp_path)
        plateau.step(1.0)
        plateau.step(2.0)
        with torch.no_grad():
            engine.module[1].weight.mul_(0.5)
    expected = bits(engine.module)
    with OffloadEngine(layers(1), **options) as engine:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        engine.register_for_checkpointing(plateau)
        engine.load_checkpoint()
        assert engine.global_step == 3 and plateau.best == 1.0
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert bits(engine.module).equal(expected)


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_is_given_up_leaves_no_trace_in_buffers(tmp_path: Path, every: int):
    """Statistics that its forward has moved are those of the last step, also where the last end was such a one."""
    options: dict[str, Any] = {"nvme_path": tmp_path, "durable": every, "lr": 1e-2}
    expected = None
    for _ in range(3):
        with OffloadEngine(nn.Sequential(nn.BatchNorm1d(64), *layers()), **options) as engine:
            engine.load_checkpoint()
            while engine.global_step < 3:
                backward(engine, engine.global_step)
                engine.step()
            statistics = engine.module[0].running_mean
            expected = statistics.clone() if expected is None else expected
            assert statistics.equal(expected)
            backward(engine, 9)
            assert not statistics.equal(expected)


@pytest.mark.parametrize("way", ["checkpoint", "dcp"])
def test_a_graph_from_before_a_load_has_no_backward(tmp_path: Path, way: str):
    """Its values are gone, as behind ``load_state_dict``."""
    with OffloadEngine(layers(), lr=1e-2) as engine:
        getattr(engine, f"save_{way}")(tmp_path / "saved")
        loss = engine(torch.ones(4, 64)).square().mean()
        getattr(engine, f"load_{way}")(tmp_path / "saved")
        with pytest.raises(OffloadError, match="modified by an inplace operation"):
            loss.backward()
        engine.optimizer.zero_grad()
        backward(engine)
        engine.step()


@pytest.mark.parametrize("way", ["checkpoint", "dcp"])
def test_a_program_loads_with_any_default_device_and_without_gradients(tmp_path: Path, way: str):
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 1e-2, "optimizer_options": {"momentum": 0.9}}
    results = []
    with OffloadEngine(layers(), **options) as engine:
        backward(engine)
        engine.step()
        with torch.device("meta"):
            getattr(engine, f"save_{way}")(tmp_path / "saved")
        backward(engine, 1)
        engine.step()
        results.append(bits(engine.module))
    with OffloadEngine(layers(1), **options) as engine:
        with torch.inference_mode(), torch.device("meta"):
            getattr(engine, f"load_{way}")(tmp_path / "saved")
        backward(engine, 1)
        engine.step()
        results.append(bits(engine.module))
    assert results[0].equal(results[1])


def test_micro_batches_of_a_step_are_not_divided_by_several_numbers(tmp_path: Path):
    with OffloadEngine(layers(), lr=1e-2, gradient_accumulation_steps=4) as engine:
        engine.backward(engine(torch.ones(4, 64)).square().mean())
        engine.save_checkpoint(tmp_path, "within")
        engine.optimizer.step()
        engine.save_checkpoint(tmp_path, "between")
    with OffloadEngine(layers(1), lr=1e-2, gradient_accumulation_steps=2) as engine:
        with pytest.raises(ConfigError, match="after 1 of 4 micro-batches"):
            engine.load_checkpoint(tmp_path, "within")
        engine.load_checkpoint(tmp_path, "between")
