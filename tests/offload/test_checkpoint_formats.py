"""What a checkpoint holds in one form is loaded into another: moments in every format, and what else a model has."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of
from torch import nn

from offload import ConfigError, OffloadEngine
from offload.checkpoint.native.description import METADATA_BYTES_MAX
from offload.cli import main
from offload.optim.moments import SQUARES, read_moments
from offload.tiers.home import UnitHomes

safetensors = pytest.importorskip("safetensors.torch")

FORMATS = ("fp32", "bf16", "int8")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3},
    "amsgrad in bf16": {"precision": "bf16", "optimizer": "adam", "optimizer_options": {"amsgrad": True}},
    "adagrad": {"optimizer": "adagrad", "lr": 1e-2},
    "sgd": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "lr": 1e-2},
    "muon": {"optimizer": "muon", "lr": 1e-3},
    "lamb in bf16": {"precision": "bf16", "optimizer": "lamb", "lr": 1e-3},
}


def make_model(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(width=128, num_blocks=2)


def train(engine: OffloadEngine, last: int) -> list[float]:
    losses = []
    while engine.global_step < last:
        tokens, targets = batches(engine.global_step + 1)[-1]
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_of(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def numbers_of(engine: OffloadEngine) -> list[dict[str, torch.Tensor]]:
    """What the moments of each parameter stand for, flat and in fp32."""
    found = []
    for states in engine.optimizer.state_dict()["state"].values():
        names = [name for name in states if name not in ("step", "master") and not name.endswith("_scale")]
        found.append({name: read_moments(name, states, 0, states[name].numel()).float() for name in names})
    return found


def states_of(engine: OffloadEngine) -> list[dict[str, torch.Tensor]]:
    return [dict(states) for states in engine.optimizer.state_dict()["state"].values()]


def tiles_of(engine: OffloadEngine) -> list[tuple[int, int]]:
    homes: list[UnitHomes] = engine._session.parts.tiers.homes
    return [(homes.tile.start, homes.tile.stop) for unit in homes for homes in unit.tiles]


def assert_equal_states(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    for own, other in zip(some, others, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


def assert_close(there: list[dict[str, torch.Tensor]], here: list[dict[str, torch.Tensor]], moments: str) -> None:
    """Moments that became ``moments`` are off by no more than the step of that format."""
    for before, after in zip(there, here, strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            if moments == "int8":
                blocks = torch.nn.functional.pad(value.abs(), (0, -len(value) % 256)).view(-1, 256)
                least = 2.0**-30 if name in SQUARES else 2.0**-14
                allowed = value.abs() / 8 + (blocks.amax(1) * least).repeat_interleave(256)[: len(value)]
                assert ((after[name] - value).abs() <= allowed).all(), name
            else:
                assert torch.equal(after[name], value.bfloat16().float() if moments == "bf16" else value), name


def holds(moments: str, there: str) -> bool:
    """Every number of the format ``there`` is one of ``moments``."""
    return moments in ("fp32", there)


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("there", FORMATS)
def test_moments_become_those_of_every_other_format(tmp_path: Path, there: str, options: dict[str, Any]):
    def make(seed: int, moments: str, tile_bytes: int) -> OffloadEngine:
        config = {"moments_dtype": moments, "tile_bytes": tile_bytes, **options}
        budget = least_budget(make_model(), tmp_path, **config)
        return OffloadEngine(make_model(seed), nvme_path=tmp_path, host_memory=budget, **config)

    with make(0, there, 64 << 10) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path / "saved")
        weights, before, tiles = weights_of(engine), numbers_of(engine), tiles_of(engine)
        state_dict = engine.optimizer.state_dict()
        expected = train(engine, 5)
    for here in FORMATS:
        results, other_tiles = [], []
        for tile_bytes in (112 << 10, 1 << 20) if here == "int8" else (1 << 20,):  # codes share a scale, over tiles
            with make(1, here, tile_bytes) as engine:
                other_tiles.append(tiles_of(engine) != tiles)
                train(engine, 1)  # what it did before does not matter
                engine.load_checkpoint(tmp_path / "saved")
                assert all(torch.equal(value, weights[name]) for name, value in weights_of(engine).items())
                assert_close(before, numbers_of(engine), here if not holds(here, there) else "fp32")
                results.append(states_of(engine))
                losses = train(engine, 5)
                assert losses == expected if here == there else losses == pytest.approx(expected, rel=0.02)
        assert any(other_tiles)
        assert_equal_states(results[0], results[-1])
        with OffloadEngine(make_model(1), moments_dtype=here, **options) as engine:
            engine.module.load_state_dict(weights)
            engine.optimizer.load_state_dict(state_dict)
            assert_equal_states(states_of(engine), results[0])


def test_codes_that_became_numbers_become_the_same_numbers_again(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3, moments_dtype="int8") as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path / "codes")
        numbers = numbers_of(engine)
    with OffloadEngine(make_model(1), lr=1e-3, moments_dtype="fp32") as engine:
        engine.load_checkpoint(tmp_path / "codes")
        engine.save_checkpoint(tmp_path / "numbers")
    with OffloadEngine(make_model(2), lr=1e-3, moments_dtype="int8") as engine:
        engine.load_checkpoint(tmp_path / "numbers")
        assert_equal_states(numbers_of(engine), numbers)


def test_a_durable_run_goes_on_with_moments_in_another_format(tmp_path: Path):
    options = {"lr": 1e-3, "nvme_path": tmp_path, "durable": 1}
    with OffloadEngine(make_model(), moments_dtype="int8", **options) as engine:
        train(engine, 3)
        numbers = numbers_of(engine)
    engine = OffloadEngine(make_model(1), moments_dtype="fp32", **options)
    with engine:
        engine.load_checkpoint()
        assert_equal_states(numbers_of(engine), numbers)
        train(engine, 4)


def test_a_weight_in_pieces_takes_over_moments_in_another_format(tmp_path: Path):
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Embedding(10_011, 256), *(nn.Linear(256, 32) if i % 2 else nn.Linear(32, 256) for i in range(1, 7))
        )

    def step(engine: OffloadEngine) -> None:
        engine.backward(engine(torch.arange(0, 10_011, 13)).square().mean())
        engine.step()

    for there, here in (("int8", "fp32"), ("fp32", "int8")):
        with OffloadEngine(make(0), lr=1e-3, moments_dtype=there) as engine:
            assert any("[" in item.unit.name for item in engine.plan.units)
            step(engine)
            engine.save_checkpoint(tmp_path / there)
            state_dict, numbers = engine.optimizer.state_dict(), numbers_of(engine)
        with OffloadEngine(make(1), lr=1e-3, moments_dtype=here) as engine:
            engine.load_checkpoint(tmp_path / there)
            assert_close(numbers, numbers_of(engine), here)
            states = states_of(engine)
        with OffloadEngine(make(1), lr=1e-3, moments_dtype=here) as engine:
            engine.optimizer.load_state_dict(state_dict)
            loaded = states_of(engine)
            assert_equal_states(loaded, states)


def test_a_state_that_is_set_is_taken_in_numbers_and_in_codes():
    with OffloadEngine(make_model(), lr=1e-3, moments_dtype="int8") as engine:
        train(engine, 1)
        parameter = next(engine.module.parameters())
        engine.optimizer.state[parameter]["exp_avg"] = torch.full(parameter.shape, 0.5)
        states = engine.optimizer.state_dict()["state"][0]
        assert (read_moments("exp_avg", states, 0, parameter.numel()) - 0.5).abs().max() <= 0.5 / 8
        with pytest.raises(ValueError, match=r"exp_avg of embed.weight: expected \(256, 128\), \(4,\)"):
            engine.optimizer.state[parameter]["exp_avg"] = torch.zeros(4)
        short = {**states, "exp_avg_scale": states["exp_avg_scale"][1:]}
        with pytest.raises(ValueError, match=r"exp_avg_scale of embed\.weight"):
            engine.optimizer.state[parameter] = short


# What else a model has.


class Quantised(nn.Module):
    """A frozen base in 8 bits, a scale, an integer table, and a count that is no tensor; the head is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        base = torch.randint(0, 256, (64, 64), generator=generator, dtype=torch.uint8)
        self.base = nn.Parameter(base, requires_grad=False)
        self.table = nn.Parameter(torch.randint(-9, 9, (7,), generator=generator), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(64, generator=generator) < 0.5, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(64, 1, generator=generator) / 256, requires_grad=False)
        self.norm = nn.BatchNorm1d(64)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        self.num_seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen += len(x)
        x = nn.functional.linear(x, self.base.to(x.dtype) * self.scale.to(x.dtype)) * self.mask
        return self.blocks(self.norm(x))

    def get_extra_state(self) -> dict[str, Any]:
        return {"num_seen": self.num_seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_seen = state["num_seen"]


def train_quantised(engine: OffloadEngine, last: int) -> list[float]:
    losses = []
    while engine.global_step < last:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(engine.global_step))
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_same_model(model: nn.Module, expected: dict[str, Any]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value


def state_dict_of(model: nn.Module) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_of_a_state_dict_survives(tmp_path: Path, precision: str):
    options = {"lr": 1e-3, "precision": precision, "nvme_path": tmp_path}
    with OffloadEngine(Quantised(0), durable=1, **options) as engine:
        train_quantised(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        with pytest.warns(UserWarning, match="_extra_state in the model's state dict is a dict"):
            engine.save_model(tmp_path / "weights")
        expected = state_dict_of(engine.module)
        losses = train_quantised(engine, 4)
        final = state_dict_of(engine.module)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "exported")]) == 0
    for folder in ("weights", "exported"):
        found = safetensors.load_file(tmp_path / folder / "model.safetensors")
        assert set(found) == set(expected) - {"_extra_state"}
        assert all(found[n].dtype == expected[n].dtype and torch.equal(found[n], expected[n]) for n in found)
    assert expected["base"].dtype == torch.uint8 and expected["_extra_state"] == {"num_seen": 16}
    with OffloadEngine(Quantised(1), **options) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_same_model(engine.module, expected)
        assert train_quantised(engine, 4) == losses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = OffloadEngine(Quantised(1), durable=1, **options)
    with engine:
        engine.load_checkpoint()
        assert engine.global_step == 4
        assert_same_model(engine.module, final)


class Tally(nn.Module):
    """A sum in an attribute, which it puts into its state dict by itself, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = torch.zeros(()), [torch.zeros(1)]
        self.register_buffer("count", torch.zeros(()))

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, prefix=prefix, **options)
        return found.update({prefix + "total": self.total, prefix + "seen": list(self.seen)}) or found

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.total, self.seen = state.pop(prefix + "total"), state.pop(prefix + "seen")
        super()._load_from_state_dict(state, prefix, *args)


class Tallied(Tiny):
    def __init__(self) -> None:
        super().__init__(width=32, num_blocks=2)
        self.tallies = nn.ModuleList([Tally(), Tally()])


@pytest.mark.parametrize("way", ["checkpoint", "dcp"])
def test_what_a_module_puts_into_a_state_dict_by_itself_survives(tmp_path: Path, way: str):
    with OffloadEngine(Tallied(), lr=1e-3) as engine:
        tally = engine.module.tallies[1]
        tally.total, tally.seen = torch.tensor(7.0), [torch.ones(2), torch.ones(3)]
        tally.count.add_(5)
        getattr(engine, f"save_{way}")(tmp_path / "saved")
    with OffloadEngine(Tallied(), lr=1e-3) as engine:
        getattr(engine, f"load_{way}")(tmp_path / "saved")
        first, second = engine.module.tallies
        assert (second.total.item(), second.count.item(), [len(item) for item in second.seen]) == (7.0, 5.0, [2, 3])
        assert (first.total.item(), first.count.item(), len(first.seen)) == (0.0, 0.0, 1)


@pytest.mark.parametrize("has_extra_state", [False, True])
def test_the_last_commit_comes_when_the_model_is_gone(tmp_path: Path, has_extra_state: bool):
    def make(seed: int) -> nn.Module:  # of which nothing but the engine's hooks holds what is inside
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)]
        return nn.Sequential(Quantised(seed), *layers) if has_extra_state else nn.Sequential(*layers)

    options = {"lr": 1e-3, "nvme_path": tmp_path, "durable": 1}
    engine = OffloadEngine(make(0), **options)
    train_quantised(engine, 2)
    expected, model = state_dict_of(engine.module), weakref.ref(engine.module)
    optimizer = engine.optimizer
    del engine
    gc.collect()
    assert model() is None
    if has_extra_state:  # what it was then nobody knows
        with pytest.raises(ConfigError, match=r"the model is gone, and with it the extra states of 0\._extra_state"):
            optimizer._engine.checkpoints.finish(None)
    else:
        optimizer._engine.checkpoints.finish(None)
    optimizer._engine.passes.closers.close()
    engine = OffloadEngine(make(1), **options)
    with engine:
        engine.load_checkpoint()
        if not has_extra_state:
            assert_same_model(engine.module, expected)


def test_a_model_with_other_buffers_is_refused_before_anything_has_changed(tmp_path: Path):
    class Other(Quantised):
        def __init__(self, change: str) -> None:
            super().__init__(1)
            if change == "missing":
                del self.table
            elif change == "more":
                self.register_buffer("counts", torch.zeros(3))
            else:
                self.table = nn.Parameter(torch.zeros(9, dtype=torch.int64), requires_grad=False)

    with OffloadEngine(Quantised(0), lr=1e-3) as engine:
        train_quantised(engine, 1)
        engine.save_checkpoint(tmp_path)
    for change, words in (
        ("missing", "table is there and not in this model"),
        ("more", "counts is in this model and not there"),
        ("shape", r"table is int64 \(7,\) there and int64 \(9,\) here"),
    ):
        with OffloadEngine(Other(change), lr=1e-3) as engine:
            before = state_dict_of(engine.module)
            with pytest.raises(ConfigError, match=words):
                engine.load_checkpoint(tmp_path)
            assert_same_model(engine.module, before)
            train_quantised(engine, 1)


# The limit.


def test_a_description_that_is_too_large_is_refused_before_anything_is_written(tmp_path: Path):
    large = torch.zeros(METADATA_BYTES_MAX + 1, dtype=torch.uint8)
    words = r"at most 67,108,864 bytes, and there are 67,1\d\d,\d\d\d: client_state takes alone 67,10\d,\d\d\d"
    for options in ({}, {"nvme_path": tmp_path}):  # copied, and linked
        with OffloadEngine(make_model(), lr=1e-3, **options) as engine:
            expected = train(engine, 1)
            with pytest.raises(ConfigError, match=words):
                engine.save_checkpoint(tmp_path / "saved", client_state={"large": large})
            assert not any((tmp_path / "saved").glob("[!.]*"))
            engine.save_checkpoint(tmp_path / "saved", client_state={"large": large[: 60 << 20]})
            expected += train(engine, 2)
        with OffloadEngine(make_model(1), lr=1e-3) as engine:
            assert engine.load_checkpoint(tmp_path / "saved")["large"].numel() == 60 << 20
            assert train(engine, 2) == expected[1:]
        for entry in (tmp_path / "saved").rglob("*"):
            if entry.is_file():
                entry.unlink()
        for entry in (tmp_path / "saved").iterdir():
            entry.rmdir()
