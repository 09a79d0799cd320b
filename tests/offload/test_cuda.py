"""The device tier on a GPU, skipped where there is none. ``test_device.py`` tries its logic anywhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used

import pytest
import torch
from tiny import Tiny, batches, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from offload import BudgetError, OffloadEngine, kernels
from offload.device.cuda import CudaDevice
from offload.device.driver import Context, DriverError
from offload.dtypes import kernel_dtype
from offload.model.handle import Handle
from offload.report.report import LinkRates
from offload.tiers import bandwidth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() says there is no GPU")


@pytest.fixture(autouse=True)
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def train(engine: OffloadEngine, steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for tokens, targets in batches(steps):
        loss = loss_of(engine(tokens), targets.cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: p.detach().cpu() for name, p in engine.module.named_parameters()}


def least(make: Callable[..., OffloadEngine], budget: str) -> int:
    with pytest.raises(BudgetError) as caught:
        make(**{budget: 1})
    return caught.value.needed_bytes


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_same_bits_over_all_budgets(
    make_model: Callable[..., Tiny], tmp_path: Path, precision: str, micro_batches: int
) -> None:
    def make(**budgets: int) -> OffloadEngine:
        return OffloadEngine(
            make_model(),
            device="cuda",
            nvme_path=tmp_path,
            precision=precision,
            gradient_accumulation_steps=micro_batches,
            gradient_clipping=1.0,
            lr=1e-3,
            **budgets,
        )

    device_memory = least(make, "device_memory")
    host_memory = least(partial(make, device_memory=device_memory), "host_memory")
    with make() as engine:
        whole = engine.plan.device.total_bytes
    outcomes, homes = [], []
    for chosen in (
        {},  # auto: all resident on the device
        {"device_memory": 1 << 30},
        {"device_memory": whole * 9 // 10},  # some resident there
        {"device_memory": device_memory},  # none
        {"device_memory": device_memory, "host_memory": host_memory},
    ):
        with make(**chosen) as engine:
            outcomes.append(train(engine))
            homes.append(len(engine.plan.device.resident))
    assert homes[0] == homes[1] > homes[2] > homes[3] == homes[4] == 0
    for losses, weights in outcomes[1:]:
        assert losses == outcomes[0][0]
        assert all(torch.equal(weights[name], value) for name, value in outcomes[0][1].items())


def test_near_plain_pytorch_in_fp32(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    expected = []
    for tokens, targets in batches(4):
        loss = loss_of(model(tokens.cuda()), targets.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with OffloadEngine(make_model(), device="cuda", nvme_path=tmp_path, precision="fp32", lr=1e-3) as engine:
        losses, weights = train(engine)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name], value.detach().cpu(), rtol=1e-4, atol=1e-5)


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "precision": "bf16"},
    {"optimizer": "adam", "precision": "fp16", "optimizer_options": {"amsgrad": True}},
    {"optimizer": "adamw", "precision": "fp32", "moments_dtype": "bf16"},
    {"optimizer": "adagrad", "precision": "fp32"},
    {"optimizer": "lion", "precision": "bf16"},
    {"optimizer": "sgd", "precision": "fp32"},
    {"optimizer": "sgd", "precision": "bf16", "optimizer_options": {"momentum": 0.9}},
    {"optimizer": "sgd", "precision": "fp16", "optimizer_options": {"momentum": 0.9, "nesterov": True}},
]


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda options: "-".join(map(str, options.values())))
def test_updates_on_the_gpu_have_the_bits_of_the_cpu(
    make_model: Callable[..., Tiny], tmp_path: Path, options: dict[str, Any]
) -> None:
    """The same gradients, given by hand, to a model resident on the device and to one on the CPU."""

    def outcome(device: str) -> tuple[list[float], dict[str, Any], dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        norms = []
        with OffloadEngine(make_model(), device=device, lr=1e-2, gradient_clipping=1.0, **options) as engine:
            assert device == "cpu" or len(engine.plan.device.resident) == len(engine.plan.units)
            for step in range(4):
                for parameter in engine.module.parameters():
                    parameter.grad = (torch.randn(parameter.shape) * 10.0 ** (step - 2)).to(parameter)
                norms.append(float(engine.clip_grad_norm_(1e9)))
                engine.optimizer.step()
            states = engine.optimizer.state_dict()["state"]
            return norms, states, {name: value.cpu() for name, value in engine.state_dict().items()}

    (norms, states, weights), (expected_norms, expected_states, expected) = outcome("cuda"), outcome("cpu")
    assert norms == expected_norms
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    for index, values in expected_states.items():
        assert all(torch.equal(states[index][name], value) for name, value in values.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_tiles_of_the_host_are_updated_on_either_side_with_the_same_bits(
    make_model: Callable[..., Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A link that is said to be slow leaves all tiles to the CPU, a fast one sends all but the first of a step."""

    def make(**budgets: int) -> OffloadEngine:
        options = {"nvme_path": tmp_path, "tile_bytes": 64 << 10, "precision": precision, "lr": 1e-3, **budgets}
        return OffloadEngine(make_model(num_blocks=8), device="cuda", **options)

    device_memory = 4 * least(make, "device_memory")
    host_memory = least(partial(make, device_memory=device_memory), "host_memory")
    outcomes = []
    for speed in (1.0, 1e15):
        monkeypatch.setattr(bandwidth, "measure_link", lambda *_, speed=speed: LinkRates(speed, speed))
        for budgets in ({}, {"host_memory": host_memory}):
            with make(device_memory=device_memory, **budgets) as engine:
                assert engine.plan.device.updates_bytes > 0
                outcomes.append(train(engine))
                sent = engine._session.parts.trained.updates.device_side.copied_bytes
                assert sent == (0, 0) if speed == 1.0 else sent[0] > sent[1] > 0
    for losses, weights in outcomes[1:]:
        assert losses == outcomes[0][0]
        assert all(torch.equal(weights[name], value) for name, value in outcomes[0][1].items())


def test_units_move_to_what_the_first_step_has_left_free(
    make_model: Callable[..., Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(**budgets: int) -> OffloadEngine:
        return OffloadEngine(make_model(width=512, num_blocks=12), device="cuda", nvme_path=tmp_path, **budgets)

    with make(device_memory=1 << 30) as engine:
        expected, weights = train(engine)
        whole = engine.plan.device.total_bytes
    torch.cuda.empty_cache()
    memory_bytes = torch.cuda.memory_reserved() + whole * 8 // 5  # less than twice: not all comes home at once
    monkeypatch.setattr(CudaDevice, "memory_bytes", lambda device: memory_bytes)
    with make() as engine:
        assert not engine.plan.device.resident
        losses, found = train(engine)
        assert engine.plan.device.resident
    assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())


def test_memory_that_cannot_be_pinned_changes_no_bits(
    make_model: Callable[..., Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(**budgets: int) -> OffloadEngine:
        return OffloadEngine(make_model(), device="cuda", nvme_path=tmp_path, **budgets)

    def refuse(context: Context, address: int, nbytes: int) -> None:
        raise DriverError("planted")

    device_memory = least(make, "device_memory")
    with make(device_memory=device_memory) as engine:
        expected, weights = train(engine)
    monkeypatch.setattr(Context, "register", refuse)
    with pytest.warns(UserWarning, match="could not be pinned"), make(device_memory=device_memory) as engine:
        losses, found = train(engine)
    assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_thread_that_has_not_used_cuda_launches_kernels() -> None:
    device = CudaDevice(torch.device("cuda"))
    source, ranges = torch.ones(1000).cuda(), torch.tensor([[0, 1000, 0]]).cuda()
    lanes, sums = (torch.empty(numel, dtype=torch.float64).cuda() for numel in (kernels.SQUARES_LANES, 1))
    torch.cuda.synchronize()
    stream = device.new_stream()
    thread = threading.Thread(target=stream.sum_squares, args=(source, ranges, lanes, sums))
    thread.start()
    thread.join()
    stream.record().wait()
    assert sums.tolist() == [1000.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_gpu_that_is_not_the_current_one_trains_with_the_same_bits(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    outcomes = []
    for device in ("cuda:0", "cuda:1"):
        options: dict[str, Any] = {"device": device, "nvme_path": tmp_path, "tile_bytes": 64 << 10}
        device_memory = 4 * least(partial(OffloadEngine, make_model(), **options), "device_memory")
        with OffloadEngine(make_model(), device_memory=device_memory, **options) as engine:
            losses = []
            for tokens, targets in batches(4):
                loss = loss_of(engine(tokens), targets.to(device))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            outcomes.append(losses)
    assert outcomes[0] == outcomes[1]


def test_an_event_says_when_its_stream_has_come_to_it() -> None:
    device = CudaDevice(torch.device("cuda"))
    stream = device.new_stream()
    host, there = torch.zeros(64 << 20, dtype=torch.uint8).pin_memory(), torch.empty(64 << 20, dtype=torch.uint8).cuda()
    before = stream.record()
    stream.copy(there, host)
    after = stream.record()
    after.wait()
    assert before.done() and after.done() and after.seconds_since(before) > 0


def test_sums_of_squares_on_the_gpu_have_the_bits_of_the_cpu() -> None:
    stream = CudaDevice(torch.device("cuda")).compute
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        source = (torch.randn(100_000) * 1e-2).to(dtype)
        ranges = torch.tensor([[0, 7, 0], [256, 0, 1], [512, 60_000, 1], [65_536, 16_384, 5]])
        lanes = torch.empty(6 * kernels.SQUARES_LANES, dtype=torch.float64, device="cuda")
        sums = torch.empty(4, dtype=torch.float64, device="cuda")
        stream.sum_squares(source.cuda(), ranges.cuda(), lanes, sums)
        for (start, numel, _), found in zip(ranges.tolist(), sums.tolist(), strict=True):
            address = source.data_ptr() + start * source.itemsize
            assert found == (kernels.sum_squares(address, numel, kernel_dtype(dtype)) if numel else 0)


def test_kernels_can_run_here() -> None:
    assert CudaDevice(torch.device("cuda")).kernels_unsupported_reason() is None


def test_nothing_crosses_the_link_when_all_is_resident(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    with OffloadEngine(make_model(width=512), device="cuda", nvme_path=tmp_path) as engine:
        assert len(engine.plan.device.resident) == len(engine.plan.units)
        train(engine, 3)
        report = engine.report()
        assert report.to_device_bytes == report.to_host_bytes == report.nvme_read_bytes == report.host_memory_bytes == 0


def test_device_memory_is_kept_and_does_not_grow(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    def make(**budgets: int) -> OffloadEngine:
        return OffloadEngine(make_model(width=512, num_blocks=12), device="cuda", nvme_path=tmp_path, **budgets)

    torch.nn.Linear(8, 8).cuda()(torch.ones(8, 8, device="cuda")).sum().backward()  # cuBLAS takes its workspaces
    budget = least(make, "device_memory")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with make(device_memory=budget) as engine:
        train(engine, 3)
        torch.cuda.synchronize()
        settled = torch.cuda.memory_allocated()
        peaks = []
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats()
            train(engine, 2)
            peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= settled + (2 << 20)
        assert peaks[-1] - peaks[0] <= engine.plan.device.gradients_bytes  # so much may be on its way, or not yet
        assert settled - before <= budget + (2 << 20)
        engine.close(discard=True)  # else the model has weights of its own again, there
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_between_uses_parameters_are_handles_on_the_device(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    with OffloadEngine(make_model(), device="cuda", nvme_path=tmp_path, precision="fp32") as engine:
        weight = engine.module.head.weight
        assert isinstance(weight, Handle) and weight.is_cuda
        with torch.no_grad():
            weight.mul_(2)
        assert weight.detach().clone().is_cuda
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets.cuda()))
        assert weight.grad is not None and weight.grad.is_cuda
        torch.testing.assert_close(
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e9),
            torch.stack([p.grad.value().norm() for p in engine.module.parameters()]).norm(),
        )
        engine.step()
        assert all(not value.is_meta for value in engine.state_dict().values())


def test_autocast_checkpointing_compile_and_evaluation(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()
            self.inner.head.compile()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.inner.embed(tokens)
            x = checkpoint_sequential(list(self.inner.blocks), 2, x, use_reentrant=False)
            return self.inner.head(self.inner.norm(x))

    tokens, targets = batches(1)[0]
    with OffloadEngine(Sequence(), device="cuda", nvme_path=tmp_path, precision="fp32", lr=1e-3) as engine:
        losses = []
        for _ in range(8):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(engine(tokens), targets.cuda())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            with torch.no_grad():
                assert engine(tokens).isfinite().all()
        assert losses[-1] < losses[0]


def test_recurrent_weights_are_trained(tmp_path: Path) -> None:
    """cuDNN would gather them in memory of its own, where updates do not reach."""
    torch.manual_seed(0)
    model = nn.LSTM(16, 16, num_layers=2)
    with OffloadEngine(model, device="cuda", nvme_path=tmp_path, precision="fp32", lr=1e-3) as engine:
        losses = []
        for _ in range(20):
            loss = engine(torch.ones(3, 2, 16))[0].square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2


def test_a_report_names_bytes_and_bounds(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    def make(**budgets: int) -> OffloadEngine:
        return OffloadEngine(make_model(width=512), device="cuda", nvme_path=tmp_path, **budgets)

    with make(device_memory=least(make, "device_memory")) as engine:
        train(engine, 3)
        report = engine.report()
        assert report.to_host_bytes == engine.config.dtype.itemsize * engine.plan.num_parameters
        assert report.to_device_bytes >= engine.plan.device.all_bytes
        assert 0 < report.compute_seconds < report.seconds
        assert report.to_device_seconds > 0 and report.to_host_seconds > 0
        engine.timeline(tmp_path / "trace.json")
        text = (tmp_path / "trace.json").read_text()
        assert "to device" in text and "to host" in text
