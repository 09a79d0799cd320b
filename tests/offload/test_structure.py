"""What the structure of the engine promises whatever the model: found by reading, each held by a test."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import ConfigError, OffloadEngine, OffloadError, StorageIOError
from offload.birth.loading import Loader
from offload.closing import Closers
from offload.errors import WaitTimeout
from offload.passes import Passes
from offload.testing.simulated import SimulatedDevice
from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.host import NvmeCarrier
from offload.tiers.weights.shadow import ShadowSlots
from offload.units import Tile, UnitSpec
from offload.update.speculative import SpeculativeUpdates, Stage
from offload.waiting import Worker

WIDTH, DEPTH = 128, 8


class Caller(nn.Module):
    """A block that calls the next one from inside of its own forward, though that is no part of it."""

    def __init__(self, after: list[Caller]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self._after = tuple(after)  # no submodule: the model's structure does not show the call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        for block in self._after:
            x = block(x)
        return self.norm(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: list[Caller] = []
        for _ in range(DEPTH):
            blocks.append(Caller(blocks[-1:]))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[-1](x)


def nested_losses(**options: object) -> list[float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with OffloadEngine(Nested(), precision="fp32", lr=1e-3, **options) as engine:
        for _ in range(3):
            loss = engine(torch.randn(4, WIDTH, generator=generator)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_unit_that_calls_one_outside_of_itself_beyond_the_spare_places_gets_one_more(
    device: str, tmp_path: Path
) -> None:
    expected = nested_losses()
    options: dict[str, object] = {"precision": "fp32", "device": SimulatedDevice(0) if device != "cpu" else "cpu"}
    if device != "cpu":
        options["device_memory"] = 6 * (WIDTH * WIDTH + 4 * WIDTH) * 4
    budget = least_budget(Nested(), tmp_path, **options)
    del options["precision"]
    with pytest.warns(UserWarning, match="called from inside of units that it is no part of") as caught:
        losses = nested_losses(nvme_path=tmp_path, host_memory=budget, **options)
    assert losses == expected
    if device == "cpu":
        assert Path(caught[0].filename) == Path(__file__)


class Adapted(nn.Module):
    """A linear layer whose weight is frozen, with an adapter of low rank beside it, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 512).requires_grad_(False)
        self.down = nn.Linear(512, 4, bias=False)
        self.up = nn.Linear(4, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["updated speculatively", "updated after the step"])
def test_frozen_weights_beside_trained_ones_are_never_written(clipping: float, tmp_path: Path) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Adapted() for _ in range(8)))

    options = {"precision": "bf16", "gradient_clipping": clipping, "tile_bytes": 65536}
    budget = least_budget(built(), tmp_path, **options)
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, **options) as engine:
        trained = sum(item.unit.trainable_numel for item in engine.plan.units)
        frozen = sum(item.unit.numel - item.unit.trainable_numel for item in engine.plan.units)
        assert frozen > 20 * trained and engine.plan.nvme_bytes["weights"] > frozen
        written = []
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 512)).float().square().mean())
            engine.step()
            engine.synchronize()
            written.append(engine.report().nvme_write_bytes)
        most = (2 + 10 + 2) * trained  # weights, states and gradients of what is trained
        assert sum(written) <= len(written) * most and engine.plan.step_write_bytes <= most


def test_a_frozen_weight_that_is_written_from_outside_keeps_its_value(tmp_path: Path) -> None:
    model = nn.Sequential(*(Adapted() for _ in range(8)))
    budget = least_budget(model, tmp_path)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=budget) as engine:
        with torch.no_grad():
            model[3].base.weight.fill_(0.25)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 512)).float().square().mean())
            engine.step()
        assert (model[3].base.weight == 0.25).all()


def test_the_memory_in_the_report_is_measured(make_model, tmp_path: Path) -> None:
    budget = least_budget(make_model(), tmp_path, precision="fp32")
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget, precision="fp32") as engine:
        train(engine, 1)
        taken = engine.report().host_memory_bytes
        assert 0.8 * engine.plan.arena_bytes < taken < engine.plan.arena_bytes + (2 << 20)
        engine._session.parts.tiers.host.carrier.added_bytes += 4096  # a place that the plan does not know of
        assert engine.report().host_memory_bytes == taken + 4096
    device = SimulatedDevice(0)
    with OffloadEngine(make_model(), device=device) as engine:
        train(engine, 1)
        assert engine.report().device_memory_bytes == device.allocated_bytes > 0
        spare = torch.UntypedStorage(0)
        device.allocate(spare, 4096)
        assert engine.report().device_memory_bytes == device.allocated_bytes
        device.free(spare)


def test_collecting_an_engine_waits_for_nothing() -> None:
    go_on, over, thread = threading.Event(), threading.Event(), []

    def wait_long() -> None:
        thread.append(threading.get_ident())
        assert go_on.wait(30)
        over.set()

    closers = Closers()
    closers.callback(wait_long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del closers
        gc.collect()
    assert not over.is_set()  # we are here while the call still waits
    go_on.set()
    assert over.wait(30) and thread[0] != threading.get_ident()


def test_an_interrupt_leaves_the_rest_of_the_closing_for_later() -> None:
    made, interrupts = [], [KeyboardInterrupt]

    def wait_for_a_thread() -> None:
        if interrupts:
            raise interrupts.pop()
        made.append("waited")

    def fail() -> None:
        raise OSError("disk")

    closers = Closers()
    closers.callback(lambda: made.append("memory given back"))
    closers.callback(wait_for_a_thread)
    closers.callback(fail)
    with pytest.raises(KeyboardInterrupt):
        closers.close()
    assert made == []
    closers.close()
    closers.close()
    assert made == ["waited", "memory given back"]


def test_a_worker_that_ended_works_again() -> None:
    worker, made = Worker("test"), []
    worker.finish()
    worker.submit(lambda: made.append(1)).wait(lambda: "the first call")
    worker.finish()
    worker.submit(lambda: made.append(2)).wait(lambda: "the second call")
    worker.finish()
    assert made == [1, 2]


def test_dropping_an_engine_without_close_is_a_resource_warning(make_model) -> None:
    engine = OffloadEngine(make_model())
    with pytest.warns(ResourceWarning, match="without close"):
        del engine
        gc.collect()


def test_an_engine_lives_as_long_as_its_model_is_trained(make_model) -> None:
    model = make_model()
    optimizer = OffloadEngine(model, precision="fp32").optimizer
    gc.collect()
    losses = []
    for tokens, targets in batches(2):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with OffloadEngine(make_model(), precision="fp32") as engine:
        assert losses == train(engine, 2)[0]


class NeverMade(nn.Module):
    """Its parameter is on the meta device, and nothing says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(4, device="meta"))


def test_a_model_that_cannot_be_made_is_refused_before_it_is_touched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), NeverMade())
    before = [type(parameter) for parameter in model.parameters()]
    with pytest.raises(ConfigError, match="NeverMade has gain on the meta device"):
        OffloadEngine(model, precision="fp32")
    assert [type(parameter) for parameter in model.parameters()] == before
    assert model[0].weight.norm() > 0


def test_parameters_of_an_engine_that_could_not_be_made_raise_when_they_are_read(monkeypatch) -> None:
    """They used to read memory that was unmapped by then."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    store_unit, stored = Loader._store_unit, []

    def fail(loader: Loader, unit: UnitSpec) -> None:
        if stored:
            raise StorageIOError("planted")
        stored.append(unit)
        store_unit(loader, unit)

    monkeypatch.setattr(Loader, "_store_unit", fail)
    with pytest.raises(StorageIOError, match="planted"):
        OffloadEngine(model, precision="fp32")
    with pytest.raises(OffloadError, match="could not be made"):
        model[0].weight.norm()


def test_a_wait_that_reached_its_deadline_ends_the_engine_for_good(make_model, tmp_path: Path, monkeypatch) -> None:
    budget = least_budget(make_model(), tmp_path)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget) as engine:
        train(engine, 1)
        engine.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr("offload.waiting.WAIT_TIMEOUT_S", 0.2)
            patch.setattr(NvmeCarrier, "take_place", lambda carrier, unit: None)
            patch.setattr(WeightCache, "_victim", lambda *_: None)
            patch.setattr(WeightCache, "_compute_holds_all", lambda _: False)
            with pytest.raises(WaitTimeout, match="a place for unit"):
                for tokens, _ in batches(3):
                    engine(tokens)
        with pytest.raises(WaitTimeout, match="a place for unit"):
            engine(tokens)


class UsedTwice(Tiny):
    """Each block is called twice in a row, and recomputed for each backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)
        return self.head(self.norm(x))


def test_a_unit_that_backward_uses_again_while_its_speculative_update_runs_harms_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    """The update waited for the use to end, and the use for the update: forced, whatever the speed of the machine."""

    def outcome(**options: object) -> list[float]:
        torch.manual_seed(0)
        with OffloadEngine(UsedTwice(width=64), precision="fp32", lr=1e-2, **options) as engine:
            return train(engine, 2)[0]

    expected = outcome()
    budget = int(1.5 * least_budget(UsedTwice(width=64), tmp_path, precision="fp32"))
    used_again = {name: threading.Event() for name in (f"blocks.{index}" for index in range(4))}
    running = {name: threading.Event() for name in used_again}
    begin_use, lend = Passes.begin_use, ShadowSlots.lend

    def watched_use(passes: Passes, unit: UnitSpec) -> None:
        speculative = passes.speculative.of_unit.get(unit.index)
        is_asked_for = unit.name in running and speculative is not None and speculative.stage is not Stage.HELD
        if is_asked_for and running[unit.name].wait(10):  # the thread of updates may have had no core yet
            used_again[unit.name].set()
        begin_use(passes, unit)

    def late_lend(host: ShadowSlots, unit: UnitSpec, written: Sequence[Tile], wanted: Callable[[], bool]) -> object:
        if unit.name in running:
            running[unit.name].set()
        if unit.name in used_again:
            used_again[unit.name].wait(2)  # it is not used again where both of its gradients have come
        return lend(host, unit, written, wanted)

    monkeypatch.setattr("offload.waiting.WAIT_TIMEOUT_S", 20.0)
    monkeypatch.setattr(Passes, "begin_use", watched_use)
    monkeypatch.setattr(ShadowSlots, "lend", late_lend)
    assert outcome(nvme_path=tmp_path, host_memory=budget) == expected
    assert any(event.is_set() for event in used_again.values())


def test_a_gradient_that_a_user_sets_is_added_to_on_a_device_too(make_model, tmp_path: Path) -> None:
    def outcome(**options: object) -> torch.Tensor:
        model = make_model()
        with OffloadEngine(model, precision="fp32", **options):
            weight = model.blocks[1].up.weight
            weight.grad = torch.ones(weight.shape)
            tokens, targets = batches(1)[0]
            loss_of(model(tokens), targets).backward()
            return weight.grad.detach().clone()

    expected = outcome()
    assert expected.mean() > 0.5
    device = {
        "device": SimulatedDevice(0, unsupported_reason="planted"),
        "device_memory": 1 << 21,
        "nvme_path": tmp_path,
    }
    assert torch.equal(outcome(**device), expected)


def test_a_gradient_that_a_step_has_used_says_so(make_model) -> None:
    model = make_model()
    with OffloadEngine(model) as engine:
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))
        gradient = model.head.weight.grad
        engine.step()
        for use in (gradient.norm, gradient.clone, lambda: gradient.mul_(2.0)):
            with pytest.raises(OffloadError, match=r"gradient of head\.weight is gone"):
                use()


def test_an_error_in_a_step_is_kept(make_model, tmp_path: Path, monkeypatch) -> None:
    budget = least_budget(make_model(), tmp_path)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget) as engine:
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))

        def fail(*_: object) -> None:
            raise StorageIOError("write of weights: EIO")

        with monkeypatch.context() as patch:
            patch.setattr(SpeculativeUpdates, "confirm", fail)
            with pytest.raises(StorageIOError, match="EIO"):
                engine.step()
        with pytest.raises(StorageIOError, match="EIO"):
            engine(tokens)


def test_every_room_stands_on_lower_ones_only() -> None:
    """The contract of ``lint-imports``; here so that a test run alone shows a broken one."""
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename=str(Path(__file__).parents[2] / "pyproject.toml"), no_cache=True) == 0


def test_a_tiny_model_still_trains_in_every_room(tmp_path: Path) -> None:
    """Everything streams: weights, states and gradients, early and late."""
    torch.manual_seed(0)
    expected = None
    for options in ({}, {"nvme_path": tmp_path, "host_memory": least_budget(Tiny(), tmp_path)}):
        torch.manual_seed(0)
        with OffloadEngine(Tiny(), **options) as engine:
            losses, _ = train(engine, 4)
        expected = expected or losses
        assert losses == expected
