"""Moments and weights in bf16, rounded at random: the same bits wherever they rest, and as far as fp32 masters come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of, train

from offload import ConfigError, OffloadEngine

SMALL: dict[str, Any] = {"precision": "bf16", "moments_dtype": "bf16", "master_dtype": "bf16"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3},
    "adamw, moments in fp32": {"lr": 1e-3, "moments_dtype": "fp32"},
    "adamw, moments in int8": {"lr": 1e-3, "moments_dtype": "int8"},
    "adam with amsgrad": {"optimizer": "adam", "lr": 1e-3, "optimizer_options": {"amsgrad": True}},
    "sgd": {"optimizer": "sgd", "lr": 1e-1},
    "muon": {"optimizer": "muon", "lr": 1e-2},
    "lamb": {"optimizer": "lamb", "lr": 1e-2},
    "adam_mini": {"optimizer": "adam_mini", "lr": 1e-3},
}


def make_model(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(num_blocks=3)


def trained(steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    with OffloadEngine(make_model(), **options) as engine:
        return train(engine, steps)[1]


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, others[name]) for name, value in some.items())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("of_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_bits_do_not_depend_on_where_things_rest_nor_on_tiles(of_optimizer: dict[str, Any], tmp_path: Path) -> None:
    options = {**SMALL, **of_optimizer}
    in_ram = trained(**options)
    before = dict(make_model().named_parameters())
    assert all(value.dtype == torch.bfloat16 for value in in_ram.values())
    assert all(not torch.equal(value.float(), before[name].bfloat16().float()) for name, value in in_ram.items())
    tight = {**options, "tile_bytes": 64 << 10}
    budget = least_budget(make_model(), tmp_path, **tight)
    assert_same(trained(**tight, nvme_path=tmp_path, host_memory=budget), in_ram)


def test_a_run_that_goes_on_from_a_checkpoint_with_other_tiles_has_the_same_bits(tmp_path: Path) -> None:
    options = {**SMALL, "lr": 1e-3}
    with OffloadEngine(make_model(), **options) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        uninterrupted = train(engine, 2)
    folder = tmp_path / "nvme"
    folder.mkdir()
    budget = least_budget(make_model(), folder, **options, tile_bytes=64 << 10)
    tight = {**options, "nvme_path": folder, "host_memory": budget, "tile_bytes": 64 << 10}
    with OffloadEngine(make_model(1), **tight) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        again = train(engine, 2)
    assert again[0] == uninterrupted[0]
    assert_same(again[1], uninterrupted[1])


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("there", "here"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_checkpoint_with_the_other_kind_of_masters_comes_over(
    there: str, here: str, optimizer: str, tmp_path: Path
) -> None:
    options = {"precision": "bf16", "lr": 1e-3, "optimizer": optimizer}
    with OffloadEngine(make_model(), **options, master_dtype=there) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        saved = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values() if "exp_avg" in state]
    with OffloadEngine(make_model(1), **options, master_dtype=here) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(saved, dict(engine.module.named_parameters()))
        states = engine.optimizer.state.values()
        assert_equal_moments(moments, [state["exp_avg"] for state in states if "exp_avg" in state])
        train(engine, 1)


def assert_equal_moments(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others) > 0
    assert all(map(torch.equal, some, others))


def test_two_bytes_of_a_parameter_are_gone() -> None:
    nbytes = {}
    for master, moments in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("bf16", "int8")):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2)))
        options = {"precision": "bf16", "master_dtype": master, "moments_dtype": moments}
        with OffloadEngine(model, **options) as engine:
            nbytes[master, moments] = sum(t.nbytes for unit in engine.plan.units for t, _ in unit.tiles) / 2**17
    assert list(nbytes.values()) == [10, 6, 4, 2 + 8 / 256]


def test_weights_rounded_at_random_come_as_far_as_masters_and_rounded_to_nearest_they_would_not() -> None:
    """Steps of about a fiftieth of a unit of bf16, all in one direction. Elements alike are rounded alike, so that what
    each of them gets is drawn."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.uniform_(model.weight, 1.0, 1.5)
    gradient = torch.empty_like(model.weight).uniform_(0.5, 1.5).bfloat16()
    start = model.weight.detach().bfloat16().float()
    lr, steps = 2.0**-7 / 50, 200
    options = {"optimizer": "sgd", "lr": lr, "precision": "bf16", "master_dtype": "bf16"}
    with OffloadEngine(model, **options) as engine:
        for _ in range(steps):
            engine.backward((model.weight * gradient).sum())
            engine.step()
        moved = (start - model.weight.float()).mean().item()
    assert moved == pytest.approx(lr * steps * gradient.float().mean().item(), rel=0.03)


def test_it_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"master_dtype=\"bf16\" is of weights in bf16, and precision is 'fp32'"):
        OffloadEngine(make_model(), precision="fp32", master_dtype="bf16")
    with pytest.raises(ConfigError, match="master_dtype='bf16' needs an optimizer with a kernel"):
        OffloadEngine(make_model().bfloat16(), optimizer=torch.optim.NAdam, master_dtype="bf16")
    with pytest.raises(ConfigError, match="precision is 'fp32'"):  # what the model has
        OffloadEngine(make_model(), master_dtype="bf16")


def test_gradients_that_are_not_taken_leave_no_trace(tmp_path: Path) -> None:
    """Updates before the verdict, beside what is there, have the bits of those after it."""
    options = {**SMALL, "lr": 1e-3, "gradient_clipping": 1e-2}
    tight = {**options, "tile_bytes": 64 << 10}
    budget = least_budget(make_model(), tmp_path, **tight)
    with OffloadEngine(make_model(), **tight, nvme_path=tmp_path, host_memory=3 * budget) as engine:
        for tokens, targets in batches(3):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    assert_same(trained(3, **options), found)
