"""Units that are resident in a device's memory, on a simulated one: bits, bytes, order, and looking in from outside."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import expect_trouble, forget_in
from tiny import Tiny, batches, loss_of, train
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from offload import BudgetError, NonFiniteGradient, OffloadEngine
from offload.optim.formats import Formats
from offload.plan.device import DeviceNeeds, DevicePlan, plan_device
from offload.plan.ranks import ONE_RANK
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedEvent, SimulatedStream
from offload.units.find import find_units
from offload.units.spread import spread_rank

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def equal(left: Outcome, right: Outcome) -> bool:
    return left[0] == right[0] and all(torch.equal(value, right[1][name]) for name, value in left[1].items())


def num_resident(engine: OffloadEngine) -> int:
    return len(engine.plan.device.resident)


@pytest.mark.parametrize("seed", range(8))
def test_residents_are_those_that_fit_when_one_after_the_other_is_tried(seed: int):
    draw = random.Random(seed)
    widths = [draw.choice([16, 64, 128, 256]) for _ in range(12)]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, 64), nn.Linear(64, width)) for width in widths))
    for block in model:
        block.requires_grad_(draw.random() < 0.7)
    units = find_units(model)
    states = [unit.trainable_numel * 8 for unit in units]
    updates = [draw.choice([0, 1 << 16, 1 << 20]) for _ in units]
    needs = DeviceNeeds(
        units, Formats(weights=4, master=0, grads=4), states, updates, None, ONE_RANK, adds_squares=True
    )
    squares = needs.squares(range(len(units)))
    whole = sum(needs.of_units(range(len(units))).values())
    for share in (0.2, 0.5, 0.8, 1.0):
        budget = int(whole * share) + (4 << 20)

        def tried(num_first: int, budget: int = budget) -> set[int]:
            chosen: set[int] = set()
            order = sorted(range(12), key=lambda i: (-needs.saved_per_byte(i), i >= num_first, spread_rank(i)))
            for index in order:
                more = {*chosen, index}
                _, comfortable, gradients, _ = needs.staged(more)
                taken = sum(needs.of_units(more).values()) + squares + comfortable + gradients + needs.updated(more)
                chosen = more if taken <= budget else chosen
            return chosen

        assert plan_device(needs, budget, 0).resident == tried(-(-len(tried(0)) * 2 // 5))


OPTIONS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16", "gradient_clipping": 0.5},
    {"precision": "fp32", "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
    {"precision": "bf16", "gradient_accumulation_steps": 3, "moments_dtype": "bf16"},
    {"precision": "bf16", "moments_dtype": "bf16", "master_dtype": "bf16"},
    {"precision": "fp32", "optimizer": "adam", "optimizer_options": {"amsgrad": True}},
    {"precision": "bf16", "optimizer": "lion"},
    {"precision": "fp32", "optimizer": "adagrad", "optimizer_options": {"initial_accumulator_value": 0.1}},
    {"precision": "fp16", "optimizer": "sgd", "optimizer_options": {"momentum": 0.9, "nesterov": True}},
    {"precision": "fp32", "optimizer": "sgd"},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_the_bits_are_those_of_the_cpu(make_model: Callable[..., Tiny], options: dict[str, Any]) -> None:
    def outcome(device: Any) -> Any:
        with OffloadEngine(make_model(), device=device, lr=1e-3, **options) as engine:
            assert device == "cpu" or num_resident(engine) == len(engine.plan.units)
            return train(engine, 6), engine.optimizer.state_dict()["state"]

    device = SimulatedDevice(seed=1)
    (expected, states), (found, states_found) = outcome("cpu"), outcome(device)
    assert equal(found, expected)
    assert all(torch.equal(states[i][name], value) for i in states for name, value in states_found[i].items())
    assert device.violations == [] and device.allocated_bytes == 0


def test_parameter_groups_and_checkpointing_by_an_optimizer_that_was_built(make_model: Callable[..., Tiny]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = checkpoint_sequential(list(self.inner.blocks), 2, self.inner.embed(tokens), use_reentrant=False)
            return self.inner.head(self.inner.norm(x))

    def outcome(device: Any) -> Outcome:
        model = Checkpointed()
        biases = [p for p in model.parameters() if p.ndim == 1]
        rest = [p for p in model.parameters() if p.ndim > 1]
        optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}], lr=1e-3)
        with OffloadEngine(model, device=device, optimizer=optimizer, precision="bf16") as engine:
            return train(engine, 4)

    assert equal(outcome(SimulatedDevice()), outcome("cpu"))


def test_nothing_crosses_the_link_or_rests_on_the_host(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    device = SimulatedDevice()
    with OffloadEngine(make_model(), nvme_path=tmp_path, device=device, precision="bf16") as engine:
        train(engine, 3)
        report = engine.report()
        assert report.to_device_bytes == report.to_host_bytes == 0
        assert report.nvme_read_bytes == report.nvme_write_bytes == report.host_memory_bytes == 0
        plan = engine.plan.device
        assert (
            plan is not None
            and device.allocated_bytes == plan.total_bytes == sum(plan.resident_bytes.values()) + plan.squares_bytes
        )
        assert engine.plan.model_state_bytes == sum(plan.resident_bytes.values())
        assert "7 of 7 units resident" in str(engine.plan)


def test_more_memory_brings_more_units_home_and_every_byte_is_counted(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    with OffloadEngine(make_model(num_blocks=8), nvme_path=tmp_path, precision="bf16") as engine:
        expected = train(engine, 3)
    with pytest.raises(BudgetError) as caught:
        OffloadEngine(
            make_model(num_blocks=8), nvme_path=tmp_path, device=SimulatedDevice(), device_memory=1, precision="bf16"
        )
    counts = []
    for factor in (1, 3, 6, 12, 40):
        device = SimulatedDevice(seed=factor)
        budget = caught.value.needed_bytes * factor
        model = make_model(num_blocks=8)
        with OffloadEngine(model, nvme_path=tmp_path, device=device, device_memory=budget, precision="bf16") as engine:
            assert equal(train(engine, 3), expected)
            plan = engine.plan.device
            assert plan is not None and plan.total_bytes <= budget
            assert device.most_allocated_bytes <= plan.total_bytes - plan.gradients_bytes
            counts.append(num_resident(engine))
            hosted = [item.unit for item in engine.plan.units if item.unit.index not in plan.resident]
            trained = sum(spec.numel for unit in hosted for spec in unit.parameters)
            assert engine.report().to_host_bytes == 2 * trained
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == len(engine.plan.units)
    assert any(0 < count < counts[-1] for count in counts)


def test_micro_batches_bring_weights_again_so_more_copies_stay_unless_units_would_go_to_nvme(
    make_model: Callable[..., Tiny], tmp_path: Path
) -> None:
    def trained(num_micro_batches: int, host_memory: str | int) -> tuple[Outcome, DevicePlan, int]:
        device = SimulatedDevice(seed=num_micro_batches)
        with OffloadEngine(
            make_model(num_blocks=8), device=device, device_memory=6 << 20, host_memory=host_memory,
            nvme_path=tmp_path, precision="bf16", gradient_accumulation_steps=num_micro_batches,
        ) as engine:  # fmt: skip
            outcome = train(engine, 2 * num_micro_batches)
            assert device.violations == [] and engine.plan.device.total_bytes <= 6 << 20
            return outcome, engine.plan.device, engine.report().to_device_bytes

    (_, one, _), (outcome, four, moved) = trained(1, "auto"), trained(4, "auto")
    assert four.num_ahead == 4 * one.num_ahead and len(four.resident) < len(one.resident)
    expected, on_nvme, moved_on_nvme = trained(4, 6 << 20)
    assert on_nvme.num_ahead == one.num_ahead and len(on_nvme.resident) > len(four.resident)
    assert equal(outcome, expected) and moved < moved_on_nvme


@pytest.mark.parametrize(
    ("options", "unsupported_reason", "why"),
    [
        ({"moments_dtype": "int8"}, None, "8-bit moments are updated on the CPU"),
        ({"optimizer": torch.optim.NAdam}, None, "the optimizer has no kernel"),
        ({}, "libnvrtc.so.12 is not installed", "libnvrtc.so.12 is not installed"),
    ],
)
def test_the_plan_says_why_no_unit_is_resident(
    make_model: Callable[..., Tiny], options: dict[str, Any], unsupported_reason: str | None, why: str
) -> None:
    device = SimulatedDevice(unsupported_reason=unsupported_reason)
    with OffloadEngine(make_model(), device=device, device_memory="64MiB", **options) as engine:
        assert num_resident(engine) == 0 and f"0 of 7 units resident in 0.0 MiB ({why})" in str(engine.plan)
        train(engine, 1)


def test_auto_leaves_half_of_the_device_to_activations(make_model: Callable[..., Tiny]) -> None:
    with OffloadEngine(make_model(), device=SimulatedDevice(), precision="bf16") as engine:
        needed = engine.plan.device.total_bytes
    for memory, count in ((2 * needed, 7), (2 * needed - 2, 0)):
        with OffloadEngine(make_model(), device=SimulatedDevice(memory_bytes=memory), precision="bf16") as engine:
            assert num_resident(engine) == count


def test_frozen_units_come_home_first(make_model: Callable[..., Tiny]) -> None:
    model = make_model(num_blocks=6)
    for block in list(model.blocks)[::2]:
        block.requires_grad_(False)
    units = find_units(model)
    frozen = {unit.index for unit in units if unit.trainable_numel == 0}
    states = [10 * unit.trainable_numel for unit in units]
    formats = Formats(weights=2, master=2, grads=2)
    budget = sum(2 * unit.numel for unit in units)
    budget += 4 * max(2 * unit.numel for unit in units)
    homes = plan_device(DeviceNeeds(units, formats, states, [0] * len(units), None, ONE_RANK, True), budget, 0).resident
    assert len(frozen) == 3 and frozen <= homes < set(range(len(units)))


def test_states_and_weights_are_seen_and_changed_from_outside(make_model: Callable[..., Tiny]) -> None:
    device = SimulatedDevice(seed=3)
    with (
        OffloadEngine(make_model(), device=device, lr=1e-2, precision="bf16") as engine,
        OffloadEngine(make_model(), lr=1e-2, precision="bf16") as other,
    ):
        train(engine, 3)
        other.load_state_dict(engine.state_dict())
        other.optimizer.load_state_dict(engine.optimizer.state_dict())
        copied = copy.deepcopy(engine.module)
        ema = [p.detach().clone().lerp_(p, 0.5) for p in engine.module.parameters()]
        assert all(torch.equal(p, value) for p, value in zip(copied.parameters(), ema, strict=True))
        tokens, _ = batches(1)[0]
        with torch.no_grad():
            assert torch.equal(engine(tokens), other(tokens))
            engine.module.head.weight.mul_(0.5)
            other.module.head.weight.mul_(0.5)
        engine.load_state_dict(engine.state_dict())  # each master becomes exactly the weight, as in the other
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        assert equal(train(engine, 3), train(other, 3))
    assert device.violations == []


def test_gradients_are_seen_and_changed_from_outside(make_model: Callable[..., Tiny]) -> None:
    def outcome(device: Any) -> tuple[list[float], Outcome]:
        seen = []
        with OffloadEngine(make_model(), device=device, lr=1e-2, precision="fp32") as engine:
            for tokens, targets in batches(3):
                engine.backward(loss_of(engine(tokens), targets))
                weight = engine.module.head.weight
                seen += [weight.grad.norm().item(), weight.grad.clone().abs().max().item()]
                weight.grad.mul_(0.5)
                engine.module.head.bias.grad = torch.ones(256)
                engine.module.norm.bias.grad = None
                seen.append(float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.5)))
                engine.step()
            return seen, train(engine, 1)

    seen, found = outcome(SimulatedDevice(seed=4))
    expected_seen, expected = outcome("cpu")
    assert seen == pytest.approx(expected_seen, rel=1e-6) and equal(found, expected)


def test_a_gradient_that_is_not_finite_changes_nothing(make_model: Callable[..., Tiny]) -> None:
    with OffloadEngine(make_model(), device=SimulatedDevice(), lr=1e-2, precision="bf16") as engine:
        train(engine, 1)
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets) * float("inf"))
        with pytest.raises(NonFiniteGradient, match="not finite"):
            engine.step()
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        train(engine, 1)


def test_a_model_without_anything_to_train_is_resident_too(make_model: Callable[..., Tiny]) -> None:
    tokens, targets = batches(1)[0]
    device = SimulatedDevice()
    with OffloadEngine(make_model().requires_grad_(False), device=device, precision="bf16") as engine:
        assert num_resident(engine) == 7
        assert loss_of(engine(tokens), targets).isfinite()
        engine.optimizer.step()
    assert device.allocated_bytes == 0


def test_inference_needs_weights_alone(make_model: Callable[..., Tiny]) -> None:
    tokens, _ = batches(1)[0]
    with OffloadEngine(make_model(), optimizer=None, precision="bf16") as engine, torch.no_grad():
        expected = engine(tokens)
    device = SimulatedDevice(unsupported_reason="no kernels are needed")
    with OffloadEngine(make_model(), optimizer=None, device=device, precision="bf16") as engine, torch.no_grad():
        assert num_resident(engine) == 7 and torch.equal(engine(tokens), expected)
        assert device.allocated_bytes == engine.plan.device.total_bytes == engine.plan.device.resident_bytes["weights"]


# What the campaign is there to find, here too: each of these is one forgotten wait, or work in the wrong place.


class _Beside(SimulatedStream):
    """A stream that compute does not wait for, and whose work is done in time by luck."""

    def _give(self, work: Callable[[], None]) -> None:
        super()._give(work)
        self.run_to(self.num_done + len(self._work))


def _beside_compute(method: str) -> Callable[[pytest.MonkeyPatch], None]:
    def forget(patch: pytest.MonkeyPatch) -> None:
        do = getattr(SimulatedStream, method)
        patch.setattr(SimulatedStream, method, lambda self, *args: do(_Beside(self.device, "beside"), *args))

    return forget


@pytest.mark.parametrize(
    "forget",
    [
        forget_in("_bring_to_host", SimulatedStream),
        forget_in("collect", SimulatedEvent),
        forget_in("borrow_part", SimulatedStream),
        forget_in("end_one", SimulatedEvent),
        _beside_compute("kernel"),
        _beside_compute("sum_squares"),
    ],
    ids=["sums-before-kernel", "sums-before-copy", "look-before-compute", "look-before-copy", "update", "squares"],
)
def test_the_campaign_finds_a_forgotten_wait(
    forget: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget(monkeypatch)
    expect_trouble(tmp_path)


def test_what_is_resident_is_saved_and_taken_up(make_model: Callable[..., Tiny], tmp_path: Path) -> None:
    def make() -> OffloadEngine:
        return OffloadEngine(make_model(), nvme_path=tmp_path, device=SimulatedDevice(), lr=1e-3)

    with make() as engine:
        assert num_resident(engine) == len(engine.plan.units)
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.state_dict()
    with make() as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
