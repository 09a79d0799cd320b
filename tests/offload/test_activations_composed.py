"""Activations over the tiers with what programs put together with them: the bits of the engine without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from tiny import Block, batches, loss_of, train
from torch import nn
from torch._dynamo.utils import counters

from offload import ActivationError, ConfigError, OffloadEngine, OffloadError, StorageIOError
from offload.testing.simulated import SimulatedDevice

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from device_schedules import watched

NVME: dict[str, Any] = {"activations": "nvme", "activation_memory": "64KiB"}
HOST: dict[str, Any] = {"activations": "host", "activation_memory": "2MiB"}
RECOMPUTE: dict[str, Any] = {"activations": "recompute"}


def same(left: Any, right: Any) -> bool:
    return left[0] == right[0] and all(torch.equal(left[1][name], right[1][name]) for name in left[1])


def test_an_adapter_over_a_frozen_model_is_trained_with_the_same_bits(tmp_path: Path):
    pytest.importorskip("peft")
    from adapted import OPTIONS, adapted, on_nvme, same_values
    from adapted import train as train_adapter

    with OffloadEngine(adapted(num_layers=3), **OPTIONS) as engine:
        losses, values = train_adapter(engine.module, engine.optimizer, range(2)), engine.state_dict()
    with on_nvme(lambda: adapted(num_layers=3), tmp_path, **NVME) as engine:
        assert train_adapter(engine.module, engine.optimizer, range(2)) == losses
        assert same_values(engine.state_dict(), values)
        assert engine.report().activations.kept_bytes > 0


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Dropping(Block):
    """A block that draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


def test_compiled_blocks_have_the_bits_and_graphs_of_without_and_keep_their_inputs_alone(
    compiler: None, make_model: Any, tmp_path: Path
):
    results, kept_bytes, cuts_and_graphs = [], [], []
    for mode in ({}, RECOMPUTE, NVME):
        torch._dynamo.reset()
        counters.clear()
        model = make_model(num_blocks=2)
        torch.manual_seed(3)
        model.blocks = nn.ModuleList(Dropping(128) for _ in range(2))
        for block in model.blocks:
            block.compile(backend="aot_eager")
        torch.manual_seed(0)
        with OffloadEngine(model, nvme_path=tmp_path, host_memory="8MiB", lr=1e-2, **mode) as engine:
            losses, weights = train(engine, 2)
            kept_bytes.append(engine.report().activations.kept_bytes)
            with torch.no_grad():
                losses.append(engine(batches(1)[0][0]).sum().item())
            results.append((losses, weights))
            cuts_and_graphs.append((counters["graph_break"].total(), counters["stats"]["unique_graphs"]))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert kept_bytes == [0, 0, (2 + 2) * 4 * 16 * 128 * 4]  # two blocks, and what the last norm and the head save
    assert cuts_and_graphs == [(4, 2)] * 3  # before and after a block; one with gradients, and one without


class Counting(Block):
    """A block that counts its calls, which is nothing for a graph that recomputes."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return nn.functional.dropout(super().forward(x), 0.2) * self.num_calls


def test_a_compiled_block_that_changes_an_attribute_runs_as_it_is(compiler: None, make_model: Any, tmp_path: Path):
    found = []
    for mode in ({}, NVME):
        model = make_model()
        torch.manual_seed(3)
        model.blocks = nn.ModuleList([Counting(128)])
        if mode:
            model.blocks[0].compile(backend="aot_eager")
        with OffloadEngine(model, nvme_path=tmp_path, host_memory="8MiB", lr=1e-2, **mode) as engine:
            found.append(train(engine, 2))
            assert model.blocks[0].num_calls == 2
            with torch.no_grad():
                engine(batches(1)[0][0])
            assert model.blocks[0].num_calls == 3
    assert same(*found)


def test_evaluation_within_a_step_keeps_nothing_and_changes_nothing(make_model: Any, tmp_path: Path):
    results = []
    for mode in ({}, NVME):
        with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", lr=1e-2, **mode) as engine:
            losses = []
            for tokens, targets in batches(2):
                loss = loss_of(engine(tokens), targets)
                kept = [engine._session.parts.activations.take_use().kept_bytes]
                for context in (torch.no_grad(), torch.inference_mode()):
                    with context:
                        losses.append(engine(tokens).sum().item())
                engine.module.eval()
                with torch.no_grad():
                    losses.append(engine(tokens).sum().item())
                engine.module.train()
                kept.append(engine._session.parts.activations.take_use().kept_bytes)
                assert kept[1] == 0
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            results.append((losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}))
    assert same(*results)


@pytest.mark.parametrize("mode", [RECOMPUTE, NVME], ids=["recompute", "nvme"])
def test_a_double_backward_is_refused_and_the_next_batch_trains(mode: dict[str, Any], make_model: Any, tmp_path: Path):
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", lr=1e-2, **mode) as engine:
        tokens, targets = batches(1, seed=5)[0]
        with pytest.raises(ConfigError, match="create_graph=True"):
            torch.autograd.grad(loss_of(engine(tokens), targets), [engine.module.embed.weight], create_graph=True)
        engine.optimizer.zero_grad()
        found = train(engine, 2)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", lr=1e-2) as engine:
        assert same(train(engine, 2), found)


@pytest.mark.parametrize(("mode", "eagerness"), [(HOST, 0.0), (NVME, 0.0), (NVME, 0.5)])
def test_on_a_device_every_copy_and_transfer_is_ordered(
    mode: dict[str, Any], eagerness: float, make_model: Any, tmp_path: Path
):
    """The device is told of what compute, the drive and the copies do to the memory of each activation."""
    with OffloadEngine(make_model(num_blocks=8), nvme_path=tmp_path, lr=1e-2) as engine:
        expected = train(engine, 2)
    device = SimulatedDevice(eagerness=eagerness, link_speed=1e9)
    engine = OffloadEngine(make_model(num_blocks=8), nvme_path=tmp_path, lr=1e-2, device=device, **mode)
    with engine, watched(device, engine):
        assert same(train(engine, 2), expected)
        assert engine.report().activations.kept_bytes > 0
    assert device.violations == []
    assert device.num_blocking_copies == 0


@pytest.mark.parametrize("fault", ["write", "read"])
def test_a_fault_in_one_micro_batch_ends_all_and_the_next_step_trains(
    fault: str, make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*args: object, **options: object) -> None:
        raise StorageIOError("the drive says no")

    results = []
    for mode in ({}, NVME):
        with OffloadEngine(
            make_model(), nvme_path=tmp_path, host_memory="8MiB", lr=1e-2, gradient_accumulation_steps=3, **mode
        ) as engine:

            def run(micro_batch: Any, engine: OffloadEngine = engine) -> float:
                loss = loss_of(engine(micro_batch[0]), micro_batch[1])
                engine.backward(loss)
                return loss.item()

            if mode:
                (pool,) = engine._session.parts.activations.pools
                with monkeypatch.context() as patch:
                    patch.setattr(pool.scratch, fault, fails)
                    with pytest.raises(ActivationError, match="the drive says no"):
                        engine.together(batches(3, seed=5), run)
            losses = engine.together(batches(3), run)
            engine.step()
            results.append((losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}))
            if mode:
                pool.drain()
                assert (pool.taken_bytes, pool.nvme_bytes) == (0, 0)
    assert same(*results)


class Saving(nn.Module):
    """A layer that has its weight itself, so that all that it saves goes over the tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)


class Negative(Saving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x @ self.weight).conj().imag * torch.tanh(x)


class Dual(Saving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            out, tangent = torch.autograd.forward_ad.unpack_dual(torch.tanh(dual @ self.weight))
        return out + tangent


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ gradients[0]


class AskingTwice(Saving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Asking.apply(torch.sigmoid(Asking.apply(x, self.weight)) * x, self.weight)


class HooksInside(Saving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return torch.tanh(x @ self.weight)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", [{}, NVME, HOST, RECOMPUTE])
@pytest.mark.parametrize("layer", [Negative, Dual, AskingTwice, HooksInside])
def test_odd_tensors_that_a_forward_saves_come_back_as_they_were(layer: Any, mode: dict[str, Any], tmp_path: Path):
    def make() -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.LayerNorm(64), layer(), nn.Linear(64, 64))
        return nn.ModuleDict({"first": nn.Linear(64, 64), "blocks": nn.ModuleList([layer(), block])})

    def gradients(model: Any) -> list[torch.Tensor]:
        x = model["first"](torch.randn(80, 64, generator=torch.Generator().manual_seed(1)))
        for part in model["blocks"]:
            x = part(x)
        x.square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(make())
    with OffloadEngine(make(), nvme_path=tmp_path, precision="fp32", **mode) as engine:
        assert all(map(torch.equal, gradients(engine.module), expected))


class Renamed(nn.Module):
    """Each run makes a dimension of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.nested_tensor_from_jagged(self.norm(x), torch.tensor([0, 10, 80]))
        return torch.tanh(self.linear(rows)).values()


def test_a_second_run_that_saves_other_tensors_is_an_error_of_the_unit():
    model = nn.ModuleDict({"blocks": nn.ModuleList([Renamed(), Renamed()])})
    with OffloadEngine(model, precision="fp32", **RECOMPUTE):
        x = torch.randn(80, 64)
        for block in model["blocks"]:
            x = block(x)
        with pytest.raises(OffloadError, match=r"blocks\.1.*Do not recompute it"):
            x.sum().backward()
