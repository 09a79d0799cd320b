"""Updates that begin during backward: the same bits as those that begin after it, whatever happens in between."""

import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of

from offload import NonFiniteGradient, OffloadEngine
from offload.tiers.home import StoredHome
from offload.update.ahead import StatesAhead
from offload.waiting import Worker

OPTIONS = {"precision": "fp32", "lr": 1e-2, "tile_bytes": 65536}


def built() -> Tiny:
    torch.manual_seed(0)
    return Tiny(width=64, num_blocks=12)


def nothing(engine: OffloadEngine) -> None:
    pass


def change_lr(engine: OffloadEngine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 3e-3


def clip(engine: OffloadEngine) -> None:
    engine.clip_grad_norm_(0.01)


def change_a_gradient(engine: OffloadEngine) -> None:
    engine.module.blocks[7].up.weight.grad.clamp_(-1e-3, 1e-3)


def drop_a_gradient(engine: OffloadEngine) -> None:
    engine.module.blocks[7].up.weight.grad = None


def write_a_weight(engine: OffloadEngine) -> None:
    with torch.no_grad():
        engine.module.blocks[7].down.bias.fill_(0.5)


def evaluate(engine: OffloadEngine) -> None:
    with torch.no_grad():
        engine(batches(1)[0][0])


def load_states(engine: OffloadEngine) -> None:
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


def run(between, **options) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights, and how many early updates were begun in four steps with ``between`` before every second one."""
    model = built()
    with OffloadEngine(model, **OPTIONS, **options) as engine:
        begun = []
        early = engine._session._updates.early
        begin = early.begin

        def count(unit, update):
            if update is not None:
                begun.append(unit.name)
            return begin(unit, update)

        early.begin = count
        losses = []
        for index, (tokens, targets) in enumerate(batches(4)):
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            if index % 2:
                between(engine)
            engine.step()
            losses.append(loss.item())
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, len(begun)


@pytest.mark.parametrize("share", [1, 1.5], ids=["gradients spilled", "gradients in RAM"])
@pytest.mark.parametrize(
    "between",
    [nothing, change_lr, clip, change_a_gradient, drop_a_gradient, write_a_weight, evaluate, load_states],
)
def test_nothing_between_backward_and_step_is_lost(between, share: float, tmp_path: Path):
    budget = int(share * least_budget(built(), tmp_path, **OPTIONS))
    expected_losses, expected, none = run(between)
    losses, weights, begun = run(between, nvme_path=tmp_path, host_memory=budget)
    assert none == 0 and begun > 6
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_spilled_gradients_are_updated_from_their_buffers(tmp_path: Path, monkeypatch):
    read = []
    original = StoredHome.read
    monkeypatch.setattr(
        StoredHome, "read", lambda home, *args, **more: read.append(home) or original(home, *args, **more)
    )
    with OffloadEngine(
        built(), nvme_path=tmp_path, host_memory=least_budget(built(), tmp_path, **OPTIONS), **OPTIONS
    ) as engine:
        worker = engine._session._updates.updater._worker
        engine._session._updates.early.balance = lambda forward, backward: None  # all units
        for tokens, targets in batches(3):
            loss = loss_of(engine(tokens), targets)
            drain(worker)  # while updates of the last step run, compute does not wait for early ones
            engine.backward(loss)
            drain(worker)  # an early update that has not begun before the step never does
            engine.step()
        engine.synchronize()
        stored = [tile.grads for unit in engine._session._tiers.homes for tile in unit.tiles]
        assert all(stored) and engine.plan.nvme_bytes["grads"] > 0
        assert len(read) > len(stored) and not set(read) & set(stored)
        plan = engine.plan
        assert plan.step_read_bytes == 2 * plan.nvme_bytes["weights"] + plan.nvme_bytes["states"]


def drain(worker: Worker) -> None:
    """Return when everything that was asked of the thread is done."""
    done = threading.Event()
    worker.submit(done.set)
    assert done.wait(60)


def test_a_gradient_that_is_not_finite_takes_back_what_has_begun(tmp_path: Path):
    model = built()
    budget = int(1.5 * least_budget(built(), tmp_path, **OPTIONS))
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=budget, **OPTIONS) as engine:
        (tokens, targets), (more, more_targets), *_ = batches(3)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        states = engine.optimizer.state_dict()["state"]
        begun = []
        early = engine._session._updates.early
        begin = early.begin

        def count(unit, update):
            if update is not None:
                begun.append(unit.name)
            return begin(unit, update)

        early.begin = count
        poisoned = model.blocks[0].register_full_backward_hook(lambda m, i, o: (torch.full_like(i[0], float("nan")),))
        engine.backward(loss_of(engine(more), more_targets))
        poisoned.remove()
        assert begun
        with pytest.raises(NonFiniteGradient, match=r"embed\.weight"):
            engine.step()
        for name, value in weights.items():
            assert torch.equal(model.get_parameter(name).detach().clone(), value), name
        for index, values in engine.optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, states[index][name]) for name, value in values.items())
        engine.backward(loss_of(engine(more), more_targets))
        engine.step()
        assert engine.global_step == 2


def test_small_disks_leave_it_out(tmp_path: Path):
    budget = int(1.5 * least_budget(built(), tmp_path, **OPTIONS))
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, **OPTIONS) as engine:
        assert engine.plan.early and engine.plan.memory["second places"]["nvme"] == engine.plan.second_place_bytes > 0
        needed = sum(engine.plan.nvme_bytes.values())
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, nvme_capacity=needed, **OPTIONS) as engine:
        assert not engine.plan.early


# With a factor between backward and step.


def with_engine_step(bound: float):
    """``gradient_clipping`` in the options, and the engine's own loop."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        engine.backward(loss)
        engine.step()

    return {"gradient_clipping": bound}, take


def with_own_clipping(bound: float):
    """A loop of PyTorch."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return {}, take


def with_micro_batches(bound: float):
    """The same in two micro-batches, which nobody tells the engine of."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return {}, take


def with_scaler(bound: float):
    """The same with ``GradScaler``."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(engine.optimizer)
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound)
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()

    return {}, take


def with_fp16(bound: float):
    """Half precision, with the engine's own loss scale."""
    options, take = with_engine_step(bound)
    return {**options, "precision": "fp16"}, take


LOOPS = [with_engine_step, with_own_clipping, with_micro_batches, with_scaler, with_fp16]


def trained(
    loop, bound: float, **more
) -> tuple[list[float], dict[str, torch.Tensor], list[int], list[int], list[float]]:
    """Losses, weights, and of each of six steps: early updates begun, updates left for after it, and norms."""
    options, take = loop(bound)
    model = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with OffloadEngine(model, **{**OPTIONS, "lr": 1e-3, **options}, **more) as engine:
        early = engine._session._updates.early
        begin, confirm = early.begin, early.confirm
        begun, left, losses, norms = [0] * 6, [0] * 6, [], []

        def count_begun(unit, update):
            begun[len(losses)] += update is not None
            return begin(unit, update)

        def count_left(step):
            remaining = confirm(step)
            left[len(losses)] = len(remaining)
            return remaining

        early.begin, early.confirm = count_begun, count_left
        early.balance = lambda forward, backward: None  # it follows the disk, which has its own mind
        for tokens, targets in batches(6):
            loss = loss_of(engine(tokens), targets)
            drain(engine._session._updates.updater._worker)
            take(engine, loss, scaler)
            losses.append(loss.item())
            norms.append(engine.report().grad_norm)
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, begun, left, norms


@cache
def norms_of(loop) -> list[float]:
    return trained(loop, 1e9)[4]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("clipped", ["never", "always", "after a while"])
def test_steps_that_are_not_clipped_are_updated_early_and_those_that_are_do_not_try(loop, clipped: str, tmp_path: Path):
    ahead = {"never": 1e9, "always": 1e-3, "after a while": 1.001 * max(norms_of(loop)[:3])}[clipped]
    expected_losses, expected, none, *_ = trained(loop, ahead)
    budget = int(1.5 * least_budget(built(), tmp_path, **OPTIONS))
    losses, weights, begun, left, _ = trained(loop, ahead, nvme_path=tmp_path, host_memory=budget)
    assert not any(none)
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    if clipped == "never":
        learnt = 3 if loop is with_scaler else 1  # how many backwards a step has, and what the scale is
        assert all(begun[learnt:]) and max(left[learnt:]) < 10  # of 14 units
    if clipped == "always":  # the bound is known, or was seen
        assert not any(begun[2 if loop is with_scaler else 1 :])


@pytest.mark.parametrize(
    "between", [nothing, change_lr, change_a_gradient, drop_a_gradient, write_a_weight, load_states]
)
def test_what_is_read_before_the_verdict_of_a_clipped_step_is_what_the_update_needs(
    between, tmp_path: Path, monkeypatch
):
    budget = least_budget(built(), tmp_path, **OPTIONS)
    expected_losses, expected, _ = run(between, gradient_clipping=1e-2)
    took = []
    take = StatesAhead.take
    monkeypatch.setattr(StatesAhead, "take", lambda ahead, home: took.append(take(ahead, home)) or took[-1])
    losses, weights, begun = run(between, gradient_clipping=1e-2, nvme_path=tmp_path, host_memory=budget)
    assert begun == 0 and sum(each is not None for each in took) >= 6  # a step's at least
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_gradients_that_still_lie_in_buffers_are_not_read_back_by_a_clipped_step(tmp_path: Path, monkeypatch):
    budget = least_budget(built(), tmp_path, **OPTIONS)
    read = set()
    original = StoredHome.read
    monkeypatch.setattr(
        StoredHome, "read", lambda home, *args, **more: read.add(home.name) or original(home, *args, **more)
    )
    with OffloadEngine(built(), nvme_path=tmp_path, host_memory=budget, gradient_clipping=1e-2, **OPTIONS) as engine:
        for tokens, targets in batches(3):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.synchronize()
        assert engine.plan.staging.num_grad_buffers == 3
    back = {name for name in read if name.startswith("gradients of ")}
    assert back == {f"gradients of {name}" for name in [*(f"blocks.{index}" for index in range(2, 12)), "norm", "head"]}
