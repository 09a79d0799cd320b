"""Device memory that others want, too: activations, live tensors, torch's allocator; and the host's end of copies."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, loss_of, train

from offload import BudgetError, ConfigError, OffloadConfig, OffloadEngine
from offload.device import allocator
from offload.device.cuda import CudaDevice
from offload.memory import fault_in, resident_bytes
from offload.model import gradient_handle
from offload.testing.simulated import SimulatedDevice
from offload.tiers.bounce import Bounce
from swapper import Arena


@pytest.fixture
def make(make_model: Callable[..., Tiny], tmp_path: Path) -> Callable[..., OffloadEngine]:
    def make(device: Any, **options: Any) -> OffloadEngine:
        return OffloadEngine(make_model(num_blocks=8), nvme_path=tmp_path, device=device, precision="bf16", **options)

    return make


def others_leave(device: SimulatedDevice, nbytes: int) -> None:
    """Other tensors take all that is free now, but for ``nbytes``."""
    device.pools.capacity_bytes = device.pools.taken_bytes + nbytes


def forward_and_backward(
    engine: OffloadEngine, device: SimulatedDevice, number: int, backward: Callable[[torch.Tensor], None]
) -> float:
    tokens, targets = batches(number + 1)[number]
    with device.activations.counted():
        loss = loss_of(engine(tokens), targets)
        backward(loss)
    return loss.item()


# Activations that grow.


@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
def test_what_found_no_memory_can_be_run_again_because_copies_give_way(
    make: Callable[..., OffloadEngine], plain: bool
) -> None:
    with make("cpu") as engine:
        expected, _ = train(engine, 3)
    device = SimulatedDevice(unsupported_reason="planted")
    with make(device, device_memory="1GiB") as engine:
        backward = torch.Tensor.backward if plain else engine.backward

        def step(number: int) -> float:
            loss = forward_and_backward(engine, device, number, backward)
            engine.step()
            return loss

        losses = [step(0)]
        copies = engine._session.parts.tiers.computing.moving[0].level.carrier
        with torch.no_grad():
            engine(batches(1)[0][0])  # every copy is there, and none is in use
        assert copies.used_bytes == engine.plan.device.all_bytes
        others_leave(device, device.activations.most_used_bytes // 2)
        with pytest.raises(torch.OutOfMemoryError):
            step(1)
        engine.optimizer.zero_grad()
        with pytest.warns(UserWarning, match=r"no room for what the model computes.*can be run again"):
            losses.append(step(1))
        assert copies.max_bytes == engine.plan.device.least_weights_bytes
        failed = device.shortages().failed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses.append(step(2))
        assert losses == expected and device.shortages().failed == failed
    assert device.violations == [] and device.allocated_bytes == 0


def test_a_refused_copy_is_not_asked_for_again_at_every_use(make: Callable[..., OffloadEngine]) -> None:
    device = SimulatedDevice(unsupported_reason="planted")
    with make(device, device_memory="1GiB") as engine, torch.no_grad():
        tokens = batches(1)[0][0]
        expected = engine(tokens)
        whole, least = engine.plan.device.all_bytes, engine.plan.device.least_weights_bytes
        engine.module.embed.weight.mul_(1)  # the value is the same, and its copy is dropped
        device.pools.capacity_bytes = whole // 2 + 2 * least
        copies = engine._session.parts.tiers.computing.moving[0].level.carrier
        for unit in engine._session.parts.run.units:
            engine._session.parts.tiers.computing.moving[0].level.cache.drop(unit)
        for _ in range(4):
            assert torch.equal(engine(tokens), expected)
        assert device.shortages().emptied <= 2
        assert least <= copies.used_bytes <= copies.max_bytes < device.pools.capacity_bytes


def test_copies_leave_room_when_torch_had_to_empty_its_cache(make: Callable[..., OffloadEngine]) -> None:
    device = SimulatedDevice(unsupported_reason="planted")
    with make(device, device_memory="1GiB") as engine, torch.no_grad():
        tokens = batches(1)[0][0]
        engine(tokens)
        copies = engine._session.parts.tiers.computing.moving[0].level.carrier
        before = copies.used_bytes
        pools = device.pools
        pools.capacity_bytes = pools.taken_bytes + 1000
        pools.give("another stream", 0)
        assert pools.take("another stream", 600)
        pools.give("another stream", 600)
        assert pools.take("compute", 600)  # which is in the other stream's pool
        assert device.shortages().emptied == 1 and device.shortages().failed == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine(tokens)
        largest = max(unit.numel for unit in engine._session.parts.run.units) * 2
        assert before - 2 * largest <= copies.max_bytes <= before - largest
        pools.give("compute", 600)


# What is free.


def test_auto_does_not_count_what_other_tensors_have(make: Callable[..., OffloadEngine]) -> None:
    with make(SimulatedDevice()) as engine:
        needed = engine.plan.device.total_bytes
        assert engine.plan.device.resident
    device = SimulatedDevice(memory_bytes=2 * needed)
    device.pools.take("another", 4096)
    with make(device) as engine:
        assert not engine.plan.device.resident
    device.pools.give("another", 4096)
    with make(device) as engine:
        assert engine.plan.device.resident


def test_a_model_is_unwrapped_only_where_there_is_room_beside_other_tensors(make: Callable[..., OffloadEngine]) -> None:
    device = SimulatedDevice()
    with make(device) as engine:
        others_leave(device, 1000)
        with pytest.raises(BudgetError, match="free"):
            engine.unwrap()


@pytest.mark.parametrize("kind", ["mps", "xpu", "meta"])
def test_a_device_of_another_kind_is_refused(kind: str) -> None:
    for given in (kind, torch.device(kind)):
        with pytest.raises(ConfigError, match='device: expected "cpu" or "cuda"'):
            OffloadConfig(device=given)
    with pytest.raises(ConfigError, match=f'device="{kind}"'):
        CudaDevice(torch.device(kind))


@pytest.mark.parametrize(("kind", "lacking"), [("xpu", "cannot be registered"), ("mps", "share one memory")])
def test_what_is_missing_on_a_device_of_another_kind_is_said(kind: str, lacking: str) -> None:
    for refused in (lambda: OffloadConfig(device=kind), lambda: CudaDevice(torch.device(kind))):
        with pytest.raises(ConfigError, match=f"On {kind} .*{lacking}"):
            refused()


# Torch's allocator.


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("release", "name"), [("2.6.0", "PYTORCH_CUDA_ALLOC_CONF"), ("2.13.0+cpu", "PYTORCH_ALLOC_CONF")]
)
def test_segments_are_expandable_before_cuda_is_used(no_settings: pytest.MonkeyPatch, release: str, name: str) -> None:
    no_settings.setattr(torch, "__version__", release)
    allocator.prefer_expandable_segments()
    assert os.environ.pop(name) == "expandable_segments:True"


@pytest.mark.parametrize("older", [False, True])
def test_segments_to_come_are_expandable_where_cuda_is_in_use(no_settings: pytest.MonkeyPatch, older: bool) -> None:
    settings: list[str] = []
    no_settings.setattr(torch.cuda, "is_initialized", lambda: True)
    no_settings.setattr(
        torch._C, "_accelerator_setAllocatorSettings", None if older else settings.append, raising=False
    )
    no_settings.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allocator.prefer_expandable_segments()
    assert settings == ["expandable_segments:True"] and "PYTORCH_ALLOC_CONF" not in os.environ


def test_what_the_user_has_set_stays_and_what_comes_too_late_is_said(no_settings: pytest.MonkeyPatch) -> None:
    no_settings.setattr(torch.cuda, "is_initialized", lambda: True)
    no_settings.setattr(torch._C, "_accelerator_setAllocatorSettings", None, raising=False)
    no_settings.setattr(torch.cuda.memory, "_set_allocator_settings", None, raising=False)
    with pytest.warns(UserWarning, match="CUDA was in use before"):
        allocator.prefer_expandable_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    no_settings.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allocator.prefer_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"


# The host's end of copies.


@pytest.mark.parametrize("device_memory", ["1GiB", "least"])
def test_no_copy_of_a_step_blocks(make: Callable[..., OffloadEngine], device_memory: str) -> None:
    device = SimulatedDevice()
    if device_memory == "least":
        with pytest.raises(BudgetError) as caught:
            make(device, device_memory=1)
        device_memory = str(caught.value.needed_bytes)
    with make(device, device_memory=device_memory, gradient_clipping=0.1) as engine:
        assert device.num_blocking_copies == 0  # nor of loading
        for tokens, targets in batches(3):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.synchronize()
        assert device.num_blocking_copies == 0


def test_the_arena_is_in_memory_before_it_is_pinned(
    make: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    present: list[bool] = []
    pin = SimulatedDevice.pin

    def look(device: SimulatedDevice, address: int, nbytes: int) -> None:
        present.append(resident_bytes([(address, nbytes)]) >= nbytes)
        pin(device, address, nbytes)

    monkeypatch.setattr(SimulatedDevice, "pin", look)
    with make(SimulatedDevice(unsupported_reason="planted")):
        assert present and all(present)


def test_memory_is_faulted_in_by_several_threads() -> None:
    arena = Arena(5 << 20)
    assert resident_bytes([(arena.address, arena.nbytes)]) == 0
    fault_in(arena.address, arena.nbytes, num_threads=3)
    assert resident_bytes([(arena.address, arena.nbytes)]) >= arena.nbytes
    arena.close()


def test_clipping_reads_one_number_whatever_the_number_of_parameters(
    make: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[float] = []
    read = torch.Tensor.__float__

    def count(tensor: torch.Tensor) -> float:
        reads.append(read(tensor))
        return reads[-1]

    def copy_from_host(*args: Any, **options: Any) -> None:
        pytest.fail("a tensor from a number of Python's is copied to the device")

    with make("cpu") as engine:
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))
        expected = engine._session.parts.trained.verdict.norm()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__float__", count)
            patch.setattr(torch, "tensor", copy_from_host)
            patch.setattr(gradient_handle, "_is_here", lambda tensor: False)
            norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
        assert len(reads) == 1
        assert float(norm) == pytest.approx(expected, rel=1e-2)
        assert engine._session.parts.trained.verdict.norm() == pytest.approx(0.01, rel=1e-2)


def test_factors_in_one_tensor_that_changes_are_each_read(make: Callable[..., OffloadEngine]) -> None:
    with make("cpu") as engine:
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))
        first, second = engine.module.norm.weight.grad, engine.module.norm.bias.grad
        norms = first.norm().item(), second.norm().item()
        factor = torch.tensor(0.5)
        first.mul_(factor)
        factor.fill_(0.25)
        second.mul_(factor)
        assert first.norm().item() == pytest.approx(norms[0] / 2, rel=1e-2)
        assert second.norm().item() == pytest.approx(norms[1] / 4, rel=1e-2)


@pytest.mark.parametrize("nbytes", [1, 4 << 20, (7 << 20) + 5])
def test_bytes_pass_through_pinned_pieces_in_both_directions(nbytes: int) -> None:
    device = SimulatedDevice(eagerness=0.0)
    bounce, storage = Bounce(device), torch.UntypedStorage(0)
    device.allocate(storage, nbytes)
    there = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,))  # type: ignore[call-overload]
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    device.to_device.wait(device.compute.record())
    bounce.to_device(there, sent)
    assert torch.equal(there, sent)
    back = torch.zeros_like(sent)
    device.to_host.wait(device.to_device.record())
    bounce.to_host(back, there)
    assert torch.equal(back, sent)
    bounce.close()
    assert device.violations == [] and device.num_blocking_copies == 0 and not device.pinned
