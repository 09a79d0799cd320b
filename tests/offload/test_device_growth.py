"""What ``device_memory="auto"`` does after the first step: units move to what it has left free, without other bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import device_schedules, forget_in
from tiny import Tiny, train

from offload import BudgetError, NonFiniteGradient, OffloadEngine
from offload.errors import DeviceMemoryError
from offload.plan.device import MARGIN
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedEvent, SimulatedStream
from offload.tiers.growth import DeviceHomes

OPTIONS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16", "gradient_clipping": 0.5},
    {"precision": "fp32", "gradient_accumulation_steps": 2},
    {"precision": "fp32", "optimizer": "adam", "optimizer_options": {"amsgrad": True}},
]


@pytest.fixture
def make(make_model: Callable[..., Tiny], tmp_path: Path) -> Callable[..., OffloadEngine]:
    """An engine with several tiles a unit; ``on_nvme`` with the least host memory."""

    def make(device: Any, *, on_nvme: bool = False, **options: Any) -> OffloadEngine:
        def build(**budgets: int) -> OffloadEngine:
            settings = {
                "precision": "bf16",
                "nvme_path": tmp_path,
                "tile_bytes": 64 << 10,
                "lr": 1e-2,
                **options,
                **budgets,
            }
            return OffloadEngine(make_model(num_blocks=6, width=64), device=device, **settings)

        if not on_nvme:
            return build()
        with pytest.raises(BudgetError) as caught:
            build(host_memory=1)
        return build(host_memory=caught.value.needed_bytes)

    return make


def whole_bytes(make: Callable[..., OffloadEngine], **options: Any) -> int:
    """Device memory that everything takes when resident there."""
    with make(SimulatedDevice(), **options) as engine:
        assert len(engine.plan.device.resident) == len(engine.plan.units)
        return engine.plan.device.total_bytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=lambda at: "-".join(map(str, OPTIONS[at].values())))
def test_units_move_home_after_the_first_step_and_the_bits_stay(
    make: Callable[..., OffloadEngine], number: int
) -> None:
    """From RAM and from NVMe; with room for some units, and for more, as all pairs of options have it."""
    options = OPTIONS[number]
    with make("cpu", **options) as engine:
        expected, weights = train(engine, 4)
        states = engine.optimizer.state_dict()["state"]
    whole = whole_bytes(make, **options)
    for seed, (share, on_nvme) in enumerate([(0.6, number % 2), (1.2, 1 - number % 2)]):
        device = SimulatedDevice(seed, memory_bytes=int(whole * share), link_speed=1e15)
        engine = make(device, on_nvme=bool(on_nvme), **options)
        with engine, device_schedules.watched(device, engine):
            before = engine.plan
            assert not before.device.resident
            losses, found = train(engine, 4)
            plan = engine.plan
            assert 0 < len(plan.device.resident) < len(plan.units)
            assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())
            for index, values in engine.optimizer.state_dict()["state"].items():
                assert all(torch.equal(value, states[index][name]) for name, value in values.items())
            assert device.most_allocated_bytes <= plan.device.total_bytes - plan.device.gradients_bytes
            assert plan.device.total_bytes <= device.memory_bytes()
            assert plan.host_bytes == before.host_bytes and plan.model_state_bytes == before.model_state_bytes
            assert "of units that are on the device now" in str(plan)
            assert engine.report().device_memory_bytes == device.allocated_bytes <= plan.device.total_bytes
        assert device.violations == [] and device.allocated_bytes == 0


def test_what_grows_leaves_activations_their_margin(make: Callable[..., OffloadEngine]) -> None:
    """Buffers of updates stay, even where no unit is left for them."""
    with make(SimulatedDevice(memory_bytes=int(whole_bytes(make) * 1.2), link_speed=1e15)) as engine:
        plan = engine.plan
        assert plan.device.updates_bytes > 0
        grown = [(free_bytes, plan.grown(free_bytes)) for free_bytes in range(0, 2 * plan.model_state_bytes, 10_000)]
        for free_bytes, device in grown:
            assert device.updates_bytes == plan.device.updates_bytes
            assert device.total_bytes <= plan.device.total_bytes + MARGIN * free_bytes
        assert {len(device.resident) for _, device in grown} >= {1, len(plan.units) - 1, len(plan.units)}


@pytest.mark.parametrize(
    ("function", "kind"),
    [("_bring", SimulatedStream), ("end_one", SimulatedEvent)],
    ids=["memory-before-copy", "copy-before-use"],
)
def test_a_forgotten_wait_shows(
    make: Callable[..., OffloadEngine], function: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(memory_bytes=int(whole_bytes(make) * 1.2))
    forget_in(function, kind)(monkeypatch)
    engine = make(device)
    with engine, device_schedules.watched(device, engine), contextlib.suppress(NonFiniteGradient):
        train(engine, 3)
    assert device.violations


def test_less_crosses_the_link_afterwards(make: Callable[..., OffloadEngine]) -> None:
    whole = whole_bytes(make)
    with make(SimulatedDevice(memory_bytes=int(whole * 1.2))) as engine:
        train(engine, 1)
        engine.synchronize()
        first = engine.report()
        train(engine, 3)
        plan, report = engine.plan, engine.report()
        staying = [item.unit for item in plan.units if item.unit.index not in plan.device.resident]
        trained = sum(spec.numel for unit in staying for spec in unit.parameters)
        assert report.to_host_bytes == 2 * trained < first.to_host_bytes == 2 * plan.num_parameters


def test_memory_in_pieces_that_are_too_small_goes_to_copies(
    make: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make("cpu") as engine:
        expected, _ = train(engine, 4)
    device = SimulatedDevice(memory_bytes=int(whole_bytes(make) * 1.2))
    make_homes, made = DeviceHomes.make, []

    def fail(homes: DeviceHomes, unit: Any, *args: Any) -> Any:
        made.append(unit)
        if len(made) == 3:
            raise DeviceMemoryError("planted")
        return make_homes(homes, unit, *args)

    monkeypatch.setattr(DeviceHomes, "make", fail)
    with make(device) as engine:
        before = engine.plan.device
        losses, _ = train(engine, 4)
        assert losses == expected and len(made) == 3
        assert not engine.plan.device.resident and engine.plan.device.weights_bytes > before.weights_bytes
        assert device.allocated_bytes <= engine.plan.device.total_bytes
    assert device.allocated_bytes == 0 and device.violations == []


def test_gradients_that_no_group_has_stay(make: Callable[..., OffloadEngine], make_model: Callable[..., Tiny]) -> None:
    device = SimulatedDevice(memory_bytes=int(whole_bytes(make) * 1.2))
    model = make_model(num_blocks=6, width=64)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("blocks.3")])
    with OffloadEngine(model, device=device, optimizer=optimizer, tile_bytes=64 << 10, precision="bf16") as engine:
        train(engine, 1)
        assert not engine.plan.device.resident
        assert engine.module.blocks[3].up.weight.grad.norm() > 0
