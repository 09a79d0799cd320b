"""Models that are never whole in memory begin with the weights that they would have had there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from births import EVERYWHERE, assert_same, held
from tiny import Tiny, train
from torch import nn

from offload import ConfigError, OffloadEngine, deferred_init


def assert_born_as_in_memory(build: Callable[[], nn.Module], unborn: Callable[[], nn.Module], **options: Any) -> None:
    """The weights of ``unborn()`` are those of ``build()``, and so is the next random number."""
    torch.manual_seed(4)
    model = build()
    after = torch.rand(1)
    with OffloadEngine(model, precision="fp32", **options) as engine:
        expected = held(engine)
    torch.manual_seed(4)
    with OffloadEngine(unborn(), precision="fp32", **options) as engine:
        assert torch.equal(torch.rand(1), after)
        assert_same(held(engine), expected)


class OfItsOwn(nn.Module):
    """Initialises its weights in every way but ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)  # copies of one layer
        self.embed = nn.Embedding(100, 32, padding_idx=3)
        self.gain = nn.Parameter(torch.randn(5, 7) * 0.1)
        self.scale = nn.Parameter(torch.ones(32))
        self.square = nn.Linear(24, 20)
        self.sparse = nn.Linear(12, 5)
        self.cut_off = nn.Linear(32, 33, dtype=torch.bfloat16)
        self.apply(self._init_weights)
        nn.init.orthogonal_(self.square.weight)
        nn.init.sparse_(self.sparse.weight, 0.3)
        nn.init.trunc_normal_(self.cut_off.weight, std=0.02, a=-0.01, b=0.03)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("constant", torch.tensor([1.0, 2.0]))
        with torch.no_grad():
            self.square.bias.copy_(self.sparse.weight.sum() + torch.arange(20.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)


def test_whatever_a_constructor_does_comes_out_as_in_memory() -> None:
    assert_born_as_in_memory(OfItsOwn, lambda: deferred_init(OfItsOwn))


def test_a_deferred_model_takes_no_memory_and_copies_of_it_differ_from_nothing() -> None:
    def build() -> nn.Module:
        first = nn.Linear(8, 8)
        return nn.Sequential(first, copy.deepcopy(first), nn.LSTM(8, 8), nn.BatchNorm1d(8)).to(torch.bfloat16)

    assert all(parameter.is_meta for parameter in deferred_init(build).parameters())
    assert_born_as_in_memory(build, lambda: deferred_init(build))


def test_a_deferred_model_may_be_used_after_a_budget_that_was_too_small() -> None:
    torch.manual_seed(0)
    expected = Tiny().state_dict()
    torch.manual_seed(0)
    model = deferred_init(Tiny)
    with pytest.raises(ConfigError):
        OffloadEngine(model, host_memory="64KiB", precision="fp32")
    torch.manual_seed(9)
    with OffloadEngine(model, precision="fp32") as engine:
        assert_same(engine.state_dict(), dict(expected))


def test_a_constructor_that_looks_into_its_weights_is_refused() -> None:
    class Looks(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.norm = self.weight.norm().item()

    with pytest.raises(ConfigError, match="looks into its weights"):
        deferred_init(Looks)
    with pytest.raises(ConfigError, match="a function that returns a model, and got Tensor"):
        deferred_init(torch.zeros, 3)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(Tiny, id="blocks"),
        pytest.param(
            lambda: nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))),
            id="torch transformer",
        ),
        pytest.param(
            lambda: nn.Sequential(nn.MultiheadAttention(32, 4, kdim=8, vdim=9), nn.LSTM(4, 5)), id="attention"
        ),
        pytest.param(
            lambda: nn.Sequential(nn.AdaptiveLogSoftmaxWithLoss(16, 50, [10, 20]), nn.Bilinear(3, 4, 5)), id="own"
        ),
        pytest.param(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)), id="convolutions"
        ),
    ],
)
def test_modules_of_torch_on_the_meta_device_come_out_as_in_memory(build: Callable[[], nn.Module]) -> None:
    def unborn() -> nn.Module:
        with torch.device("meta"):
            return build()

    assert_born_as_in_memory(build, unborn)


def test_a_weight_that_was_tied_after_its_making_comes_out_as_in_memory(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 16), nn.Linear(16, 20_000), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    def unborn() -> nn.Module:
        with torch.device("meta"):
            return build()

    assert_born_as_in_memory(build, unborn, nvme_path=tmp_path)


def test_what_no_initialiser_fills_is_named() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(4))
            self.bias = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.bias)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Forgets())
    with pytest.raises(ConfigError, match=r"Forgets has gain on the meta device .*offload.deferred_init"):
        OffloadEngine(model)
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())


def test_initialisers_leave_weights_that_are_in_memory_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = model[0].weight.detach().clone()
    with OffloadEngine(model, precision="fp32") as engine:
        assert torch.equal(engine.state_dict()["0.weight"], before)


@pytest.mark.each_value
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_deferred_model_trains_as_in_memory(precision: str, place: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(2)
    with OffloadEngine(Tiny(), precision=precision) as engine:
        expected = train(engine)
    torch.manual_seed(2)
    with OffloadEngine(deferred_init(Tiny), precision=precision, nvme_path=tmp_path, **place) as engine:
        losses, weights = train(engine)
    assert losses == expected[0]
    assert_same(weights, expected[1])
