"""A simulated device under several of its streams and several threads: order of memory, of inputs, and of backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import device_schedules, run_in_thread
from tiny import Tiny, batches, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from offload import BudgetError, OffloadEngine, uses
from offload.model import outputs
from offload.model.inputs import Inputs
from offload.testing.simulated import SimulatedDevice
from offload.tiers.window import DeviceWindow


def at_least_memory(make: Callable[..., OffloadEngine]) -> OffloadEngine:
    with pytest.raises(BudgetError) as caught:
        make(device_memory=1)
    return make(device_memory=caught.value.needed_bytes)


# Streams.


def test_memory_goes_back_when_every_stream_that_used_it_is_through(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    device = SimulatedDevice(seed=1, unsupported_reason="planted")
    side, x = device.new_compute_stream(), torch.ones(1, 2, 128, dtype=torch.bfloat16)
    engine = OffloadEngine(make_model(), nvme_path=tmp_path, device=device, precision="bf16", device_memory="64MiB")
    with engine, device_schedules.watched(device, engine), torch.no_grad():
        main, block = device.compute, engine.module.blocks[0]
        expected = block(x)
        side.wait(main.record())
        with device.current(side):  # with the copy that the main stream has made
            assert torch.equal(block(x), expected)
        weights = engine._session.parts.tiers.computing.moving[0].level.cache
        for unit in engine._session.parts.run.units:  # the main stream has not waited for the other
            weights.drop(unit)
        assert torch.equal(block(x), expected)
        main.wait(side.record())
    assert device.violations == []


def test_a_copy_fetched_under_one_stream_and_dropped_under_another_is_over_before_its_memory_is_lent(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    device, tokens = SimulatedDevice(seed=2, eagerness=0.0), batches(1)[0][0]
    side = device.new_compute_stream()
    with (
        OffloadEngine(
            make_model(), nvme_path=tmp_path, device=device, precision="bf16", device_memory="2MiB", optimizer=None
        ) as engine,
        torch.no_grad(),
    ):
        side.wait(device.compute.record())
        with device.current(side):
            engine(tokens)
    assert device.violations == [] and device.allocated_bytes == 0


def test_a_commit_reads_what_a_step_has_changed_under_another_stream_after_that(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    device = SimulatedDevice(seed=3)
    side = device.new_compute_stream()
    with OffloadEngine(make_model(), nvme_path=tmp_path, device=device, precision="bf16", durable=1) as engine:
        assert engine.plan.device.resident
        side.wait(device.compute.record())
        with device.current(side), device_schedules.watched(device, engine):
            for tokens, targets in batches(2):  # and nobody waits for the device
                engine.backward(loss_of(engine(tokens), targets))
                engine.step()
    assert device.violations == []


# Inputs.


def test_a_pinned_buffer_may_be_filled_again_when_forward_returns(make_model: Callable[..., Tiny]) -> None:
    device = SimulatedDevice()
    tokens = batches(1)[0][0].clone()
    device.pin(tokens.data_ptr(), tokens.nbytes)
    with OffloadEngine(make_model(), device=device, precision="bf16") as engine:
        loss = engine(tokens).float().square().mean()
        device.host_access(tokens.data_ptr(), tokens.nbytes, writes=True)
        tokens.zero_()
        engine.backward(loss)
        found = engine.module.embed.weight.grad.value()
    with OffloadEngine(make_model(), precision="bf16") as engine:
        engine.backward(engine(batches(1)[0][0]).float().square().mean())
        assert torch.equal(engine.module.embed.weight.grad.value(), found)
    assert device.violations == []
    device.unpin(tokens.data_ptr())


def test_inputs_that_need_a_gradient_get_it(tmp_path: Path) -> None:
    def gradient(device: Any) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        with OffloadEngine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), device=device, precision="bf16") as engine:
            engine.backward(engine(x).float().sum())
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(SimulatedDevice()), gradient("cpu"))


# Threads.


class Passing(nn.Module):
    """A block that passes a tensor through, as blocks with a position bias do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x) + bias), bias


class WithBias(nn.Module):
    """``passes``: all of it made before the blocks, by many nodes of autograd."""

    def __init__(self, num_blocks: int = 8, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Passing(width) for _ in range(num_blocks))

    def forward(self, tokens: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
        x = self.embed(tokens)
        bias = x
        for _ in range(200):  # so that this thread's numbers are far ahead of those in which blocks are recomputed
            bias = bias * 1.01
        with set_checkpoint_early_stop(False):
            for block in self.blocks:
                x, bias = checkpoint(block, x, bias, use_reentrant=reentrant)
        return (x + bias).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_pass_a_tensor_through_are_recomputed_in_another_thread_in_the_least_memory(
    tmp_path: Path, reentrant: bool
) -> None:
    def train(device: Any, **budget: int) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        torch.manual_seed(0)
        with OffloadEngine(WithBias(), nvme_path=tmp_path, device=device, precision="fp32", **budget) as engine:
            losses = []
            for tokens, _ in batches(2, vocab=64):
                loss = engine(tokens, reentrant=reentrant)
                run_in_thread(lambda loss=loss: engine.backward(loss))
                engine.step()
                losses.append(loss.item())
            plan = engine.plan.device
            assert plan is None or engine.report().to_device_bytes <= 2 * plan.all_bytes  # for forward, for backward
            return losses, engine.state_dict(), plan

    losses, weights, _ = train("cpu")
    with pytest.raises(BudgetError) as caught:
        train(SimulatedDevice(), device_memory=1)
    device = SimulatedDevice(seed=3)
    found_losses, found, plan = train(device, device_memory=caught.value.needed_bytes)
    assert found_losses == losses and all(torch.equal(found[name], value) for name, value in weights.items())
    assert device.violations == []
    assert device.most_allocated_bytes <= plan.weights_bytes + plan.squares_bytes


def test_units_that_a_failed_backward_has_left_are_given_back_before_the_next_forward(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    device = SimulatedDevice(seed=4)

    def make(**budget: int) -> OffloadEngine:
        return OffloadEngine(make_model(), nvme_path=tmp_path, device=device, precision="bf16", **budget)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("planted")

    (tokens, targets), seen = batches(1)[0], []
    with at_least_memory(make) as engine:
        failing = loss_of(engine(tokens), targets)
        for block in engine.module.blocks:
            block.register_forward_hook(lambda module, args, output: seen.append(output))
        engine(tokens)
        del failing
        for run in (run_in_thread, lambda call: call()):
            seen.clear()
            loss = loss_of(engine(tokens), targets)
            seen[1].register_hook(fail)
            with pytest.raises(RuntimeError, match="planted"):
                run(loss.backward)
            cache = engine._session.parts.tiers.computing.moving[0].level.cache
            assert any(entry.pins for entry in cache.present)
            with torch.no_grad():
                engine(tokens)
            assert not any(entry.pins for entry in cache.present)
            engine.optimizer.zero_grad()
    assert device.violations == []


# Each of these is one thing forgotten, which the tests above must show.


def _forget_who_used_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceWindow, "used", _do_nothing)


def _forget_that_inputs_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inputs, "wait", _do_nothing)


def _take_passed_tensors_for_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outputs, "_is_older", lambda node: False)


def _do_nothing(*args: object) -> None:
    return None


@pytest.mark.parametrize(
    ("forget", "what"),
    [
        (_forget_who_used_memory, "memory"),
        (_forget_that_inputs_are_read, "inputs"),
        (_take_passed_tensors_for_own, "threads"),
    ],
    ids=["who-used-memory", "inputs-are-read", "passed-tensors"],
)
def test_what_is_forgotten_shows(
    forget: Callable[[pytest.MonkeyPatch], None],
    what: str,
    make_model: Callable[..., Tiny],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(uses, "_USES_AHEAD", 99)  # the host waits for nothing else
    with pytest.raises(AssertionError):
        if what == "memory":
            test_memory_goes_back_when_every_stream_that_used_it_is_through(make_model, tmp_path)
        elif what == "inputs":
            test_a_pinned_buffer_may_be_filled_again_when_forward_returns(make_model)
        else:
            test_blocks_that_pass_a_tensor_through_are_recomputed_in_another_thread_in_the_least_memory(
                tmp_path, reentrant=False
            )
