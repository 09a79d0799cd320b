"""The device tier, on a simulated device: the same bits as on the CPU, its memory's bounds, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import device_schedules, expect_trouble
from tiny import Tiny, batches, least_budget, loss_of, train

from offload import BudgetError, ConfigError, OffloadEngine
from offload.errors import DeviceMemoryError
from offload.memory import tensor_at
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedEvent, SimulatedStream
from offload.tiers.gradients.host import HostGradients
from offload.tiers.gradients.store import GradientStore
from offload.tiers.weights.cache import WeightCache
from swapper import PAGE_BYTES, Arena, create_store


@pytest.mark.parametrize("seed", range(3))
def test_a_random_program_gives_the_same_bits_on_a_device_and_every_access_is_ordered(
    seed: int, tmp_path: Path
) -> None:
    assert device_schedules.check(seed, tmp_path) == []


# What the campaign is there to find: each of these is one forgotten wait.


def _no_wait(*args: Any, **options: Any) -> None:
    return None


def _forget_compute_waits(patch: pytest.MonkeyPatch) -> None:
    wait = SimulatedStream.wait
    patch.setattr(SimulatedStream, "wait", lambda self, event: None if self.computes else wait(self, event))


def _forget_the_allocation(patch: pytest.MonkeyPatch) -> None:
    wait = SimulatedStream.wait
    patch.setattr(SimulatedStream, "wait", lambda self, event: None if self.name == "to_device" else wait(self, event))


def _forget_that_compute_makes_gradients(patch: pytest.MonkeyPatch) -> None:
    wait = SimulatedStream.wait
    patch.setattr(SimulatedStream, "wait", lambda self, event: None if self.name == "to_host" else wait(self, event))


def _let_the_host_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedEvent, "wait", _no_wait)


def _keep_old_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCache, "outdate", _no_wait)


def _free_gradients_at_once(patch: pytest.MonkeyPatch) -> None:
    copy = SimulatedStream.copy
    patch.setattr(SimulatedStream, "copy", lambda self, target, source: copy(self, target, source.clone()))


@pytest.mark.parametrize(
    "forget",
    [
        _forget_compute_waits,
        _forget_the_allocation,
        _forget_that_compute_makes_gradients,
        _let_the_host_go_on,
        _keep_old_copies,
        _free_gradients_at_once,
    ],
)
def test_the_campaign_finds_a_forgotten_wait(
    forget: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget(monkeypatch)
    expect_trouble(tmp_path)


@pytest.mark.parametrize("operation", ["read", "write", "write_shadow"])
def test_a_disk_that_does_not_wait_for_a_copy_shows(
    operation: str, make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    device = SimulatedDevice(eagerness=0.0)
    arena = Arena(PAGE_BYTES)
    address = arena.lease(PAGE_BYTES).address
    buffer = tensor_at(address, PAGE_BYTES // 4, torch.float32)
    with (
        create_store([tmp_path], None, [PAGE_BYTES]) as store,
        OffloadEngine(make_model()) as engine,
        device_schedules.watched(device, engine),
    ):
        [extent] = store.extents
        device.pin(address, PAGE_BYTES)
        store.write(extent, address, PAGE_BYTES).wait()
        assert device.violations == []
        device.to_host.copy(buffer, torch.zeros_like(buffer))
        getattr(store, operation)(extent, address, PAGE_BYTES).wait()
    assert len(device.violations) == 1
    arena.close()


def test_the_least_device_memory_works_and_is_kept_to_the_byte(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="device_memory") as caught:
        OffloadEngine(make_model(), nvme_path=tmp_path, device=SimulatedDevice(), device_memory=1, precision="bf16")
    least = caught.value.needed_bytes
    with pytest.raises(BudgetError):
        OffloadEngine(
            make_model(), nvme_path=tmp_path, device=SimulatedDevice(), device_memory=least - 1, precision="bf16"
        )
    device = SimulatedDevice(seed=1)
    with OffloadEngine(
        make_model(), nvme_path=tmp_path, device=device, device_memory=least, precision="bf16"
    ) as engine:
        train(engine)
        assert engine.report().device_memory_bytes <= least
        sizes = [unit.numel * engine.plan.formats.weights for unit in (item.unit for item in engine.plan.units)]
        plan = engine.plan.device
        assert device.most_allocated_bytes <= plan.weights_bytes + plan.squares_bytes < sum(sizes)
    assert device.allocated_bytes == 0 and not device.pinned


def test_norms_of_gradients_that_leave_are_worked_out_before(
    make_model: Callable[..., Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(device: Any, **budget: int) -> OffloadEngine:
        return OffloadEngine(
            make_model(), nvme_path=tmp_path, device=device, gradient_clipping=0.1, **budget, precision="bf16"
        )

    with make("cpu") as engine:
        expected, weights = train(engine)
    with pytest.raises(BudgetError) as caught:
        make(SimulatedDevice(), device_memory=1)
    with monkeypatch.context() as patch:
        patch.delattr(HostGradients, "sum_squares")
        with make(SimulatedDevice(), device_memory=caught.value.needed_bytes) as engine:
            assert not engine.plan.device.resident
            losses, found = train(engine)
    assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())


def test_auto_takes_what_the_first_step_has_left_free(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    device = SimulatedDevice(memory_bytes=64 << 20, unsupported_reason="planted")
    with OffloadEngine(make_model(num_blocks=8), nvme_path=tmp_path, device=device, precision="fp32") as engine:
        before = engine.plan.device.weights_bytes
        train(engine, 1)
        assert before < engine.plan.device.weights_bytes <= engine.plan.device.all_bytes
        copied = engine.report().to_device_bytes
        train(engine, 1)
        assert engine.report().to_device_bytes <= copied


def test_what_stays_from_forward_to_backward_is_copied_once(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    def copied(**budget: int) -> int:
        device = SimulatedDevice(unsupported_reason="planted")
        with OffloadEngine(make_model(), nvme_path=tmp_path, device=device, **budget, precision="bf16") as engine:
            train(engine, 3)
            everything = engine.plan.device.all_bytes
            assert engine.report().to_host_bytes == 2 * engine.plan.num_parameters  # all is trained, in bf16
            return engine.report().to_device_bytes / everything

    assert copied(device_memory=64 << 20) == 1
    with pytest.raises(BudgetError) as caught:
        copied(device_memory=1)
    assert 1.5 < copied(device_memory=caught.value.needed_bytes) < 2


def test_copies_give_way_to_activations_that_grew(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    with OffloadEngine(make_model(), nvme_path=tmp_path, precision="bf16") as engine:
        expected, _ = train(engine, 2)
    device = SimulatedDevice(memory_bytes=64 << 20, unsupported_reason="planted")
    with OffloadEngine(
        make_model(), nvme_path=tmp_path, device=device, device_memory="auto", precision="bf16"
    ) as engine:
        losses, _ = train(engine, 1)
        device.pools.capacity_bytes = max(2 * item.unit.numel for item in engine.plan.units)
        tokens, targets = batches(2)[1]
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        assert [*losses, loss.item()] == expected
        device.pools.capacity_bytes = 4096
        with pytest.raises(DeviceMemoryError, match="no room"):
            engine(tokens)


def test_evaluation_with_room_for_everything_copies_nothing_again(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    tokens, _ = batches(1)[0]
    device = SimulatedDevice()
    options = {"nvme_path": tmp_path, "device": device, "device_memory": 64 << 20}
    with OffloadEngine(make_model(), **options) as engine, torch.no_grad():
        first = engine(tokens)
        copied = engine._session.parts.reporter.copied_bytes()[0]
        assert torch.equal(engine(tokens), first)
        assert engine._session.parts.reporter.copied_bytes()[0] == copied


def test_autocast_compiled_blocks_and_generation(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    def outcome(device: Any) -> list[float]:
        torch.compiler.reset()
        model = make_model()
        for block in model.blocks[:2]:
            block.compile(backend="eager")
        seen = []
        with OffloadEngine(model, nvme_path=tmp_path, device=device, precision="fp32", lr=1e-2) as engine:
            for tokens, targets in batches(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(engine(tokens), targets)
                engine.backward(loss)
                engine.step()
                seen.append(loss.item())
                with torch.no_grad():
                    for _ in range(4):
                        tokens = torch.cat((tokens, engine(tokens)[:, -1:].argmax(-1)), dim=1)
                seen += tokens[0, -4:].tolist()
        return seen

    assert outcome(SimulatedDevice()) == outcome("cpu")


def test_handles_are_of_the_device_and_see_each_other(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    with OffloadEngine(make_model(), nvme_path=tmp_path, device=SimulatedDevice(), precision="fp32") as engine:
        tokens, targets = batches(1)[0]
        before = engine(tokens).detach().clone()
        with torch.no_grad():
            engine.module.head.weight.zero_()
            engine.module.head.bias.fill_(1.0)
        assert torch.equal(engine(tokens), torch.ones_like(before))
        engine.backward(loss_of(engine(tokens), targets))
        gradient = engine.module.head.weight.grad
        assert gradient is not None and gradient.device == engine.module.head.weight.device
        torch.testing.assert_close(gradient.norm(), gradient.value().norm())


def test_what_a_forward_puts_in_the_place_of_its_parameters_data_is_the_value(tmp_path: Path) -> None:
    class Mover(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data * 0.9
            return super().forward(x)

    def losses(device: object) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Mover(4, 4))
        with OffloadEngine(model, nvme_path=tmp_path, device=device, precision="fp32", lr=1e-2) as engine:
            found = []
            for _ in range(3):
                loss = engine(torch.ones(2, 4)).square().sum()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return [*found, model[1].weight.sum().item()]

    assert losses(SimulatedDevice()) == losses("cpu")


def test_state_dicts_are_in_host_memory(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    device = SimulatedDevice()
    with OffloadEngine(make_model(), nvme_path=tmp_path, device=device, precision="bf16") as engine:
        train(engine, 1)
        before = device.most_allocated_bytes
        state = engine.state_dict()
        assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
        assert device.most_allocated_bytes == before


def test_a_fault_of_the_store_reaches_the_training_thread(
    make_model: Callable[..., Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.tiers.weights.host import HostLevel
    from swapper import StorageIOError

    device = SimulatedDevice(unsupported_reason="planted")
    options: dict[str, Any] = {"device": device, "precision": "bf16"}
    least = least_budget(make_model(), tmp_path, **options)
    engine = OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=least, **options)
    train(engine, 1)

    def fail(self: HostLevel, pin: Any, **options: Any) -> None:
        raise StorageIOError("read of weights: EIO")

    with monkeypatch.context() as patch:
        patch.setattr(HostLevel, "take", fail)
        with pytest.raises(StorageIOError, match="EIO"):
            train(engine, 1)
    with pytest.raises(StorageIOError, match="EIO"):
        engine(batches(1)[0][0])
    engine.close()
    assert device.allocated_bytes == 0


def test_a_fault_on_the_way_home_reaches_the_training_thread(
    make_model: Callable[..., Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: GradientStore, *args: Any, **options: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(GradientStore, "landed", fail)
    device = SimulatedDevice(unsupported_reason="planted")
    engine = OffloadEngine(make_model(), nvme_path=tmp_path, device=device, precision="bf16")
    with pytest.raises(RuntimeError, match="planted"):
        train(engine, 1)
    engine.close()
    assert device.allocated_bytes == 0


def test_a_device_that_is_not_there_is_refused(make_model: Callable[..., Tiny]) -> None:
    with pytest.raises(ConfigError, match=re.escape("device")):
        OffloadEngine(make_model(), device="tpu", precision="bf16")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match='Use device="cpu"'):
            OffloadEngine(make_model(), device="cuda", precision="bf16")
