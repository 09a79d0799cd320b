"""Muon and LAMB of ours, beside torch's Muon and the formulas of LAMB's paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speculative_updates import drain
from tiny import Tiny, batches, least_budget, loss_of, train
from torch import nn

from offload import ConfigError, OffloadEngine
from offload.optim.matrix_rule import MATRIX_OPTIMIZERS
from offload.optim.matrix_steps import Muon, orthogonalised
from offload.update.step import UnitUpdate


def make_model() -> Tiny:
    torch.manual_seed(0)
    return Tiny(width=128, num_blocks=6)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2]


def only_matrices() -> Tiny:
    model = make_model()
    for parameter in set(model.parameters()) - set(matrices_of(model)):
        parameter.requires_grad_(False)
    return model


def plain(model: nn.Module, optimizer: Any, steps: int = 3) -> dict[str, torch.Tensor]:
    """Weights after the same steps in memory."""
    for tokens, targets in batches(steps):
        optimizer.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()
    return dict(model.named_parameters())


def tight(model: nn.Module, folder: Path, **options: Any) -> OffloadEngine:
    options["tile_bytes"] = 64 << 10
    return OffloadEngine(model, nvme_path=folder, host_memory=least_budget(model, folder, **options), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, {"momentum": 0.3, "ns_steps": 3, "weight_decay": 0.0}],
    ids=lambda options: "-".join(options),
)
def test_muon_on_nvme_has_the_bits_of_torch_optim_muon(tmp_path, options):
    model = only_matrices()
    expected = plain(model, torch.optim.Muon(matrices_of(model), lr=1e-2, **options))
    model = only_matrices()
    with tight(model, tmp_path, optimizer=torch.optim.Muon(matrices_of(model), lr=1e-2, **options)) as engine:
        assert engine.plan.nvme_bytes["states"] > 0
        _, weights = train(engine)
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


class Lamb(torch.optim.Optimizer):
    """Alg. 2 of the paper."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * p.grad
                v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * p.grad**2
                direction = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + group["weight_decay"] * p
                lengths = p.norm(), direction.norm()
                p -= group["lr"] * (lengths[0] / lengths[1] if min(lengths) > 0 else 1.0) * direction


def test_lamb_on_nvme_has_the_steps_of_its_paper(tmp_path):
    model = make_model()
    nn.init.zeros_(model.blocks[0].up.bias)  # whose length is 0: it moves by the direction itself
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected = plain(model, Lamb(model.parameters(), lr=1e-2, weight_decay=0.1))
    model = make_model()
    nn.init.zeros_(model.blocks[0].up.bias)
    with tight(model, tmp_path, optimizer="lamb", lr=1e-2, weight_decay=0.1) as engine:
        assert engine.plan.nvme_bytes["states"] > 0
        _, weights = train(engine)
    for name, value in weights.items():
        assert (value - expected[name]).norm() < 1e-4 * (expected[name] - start[name]).norm(), name


def mini_steps(model: nn.Module, lr: float, decay: float, steps: int = 3) -> dict[str, torch.Tensor]:
    """Alg. 1 of Adam-mini's paper, with rows of matrices as blocks, in memory."""
    state: dict[str, Any] = {}
    for step, (tokens, targets) in enumerate(batches(steps), 1):
        model.zero_grad()
        loss_of(model(tokens), targets).backward()
        for name, p in model.named_parameters():
            blocks = p.grad.flatten(1) if p.ndim == 2 else p.grad[None]
            m, v = state.get(name, (0, 0))
            m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * blocks.square().mean(1)
            state[name] = m, v
            root = (v / (1 - 0.999**step)).sqrt() + 1e-8
            root = root[:, None] if p.ndim == 2 else root
            p.data = p.data * (1 - lr * decay) - lr * m / (1 - 0.9**step) / root
    return dict(model.named_parameters())


def test_adam_mini_on_nvme_has_the_steps_of_its_paper(tmp_path):
    start = {name: value.detach().clone() for name, value in make_model().named_parameters()}
    expected = mini_steps(make_model(), 1e-2, 0.1)
    with tight(make_model(), tmp_path, optimizer="adam_mini", lr=1e-2, weight_decay=0.1) as engine:
        assert engine.plan.nvme_bytes["states"] > 0
        _, weights = train(engine)
    for name, value in weights.items():
        assert (value - expected[name]).norm() < 1e-4 * (expected[name] - start[name]).norm(), name


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_states_of_rows_come_back_from_a_checkpoint_and_from_a_state_dict(tmp_path, moments):
    options = {"optimizer": "adam_mini", "moments_dtype": moments, "lr": 1e-2}
    with tight(make_model(), tmp_path, **options) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "run")
        states, model = engine.optimizer.state_dict(), engine.state_dict()
        expected = train(engine, 2)
        assert engine.optimizer.state[engine.module.head.weight]["exp_avg_sq"].shape == (256,)
    with OffloadEngine(make_model(), **options) as engine:
        engine.load_checkpoint(tmp_path / "run")
        found = train(engine, 2)
    assert found[0] == expected[0] and all(torch.equal(value, expected[1][key]) for key, value in found[1].items())
    with OffloadEngine(make_model(), **options) as engine:
        engine.load_state_dict(model)
        engine.optimizer.load_state_dict(states)
        found = train(engine, 2)
    assert found[0] == expected[0] and all(torch.equal(value, expected[1][key]) for key, value in found[1].items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "moments", "precision"),
    [
        ("adam_mini", "int8", "bf16"),
        ("muon", "fp32", "bf16"),
        ("muon", "int8", "bf16"),
        ("muon", "bf16", "fp16"),
        ("lamb", "int8", "fp16"),
    ],
)
def test_all_placements_have_the_same_bits(tmp_path, name, moments, precision):
    options = {"optimizer": name, "moments_dtype": moments, "precision": precision, "lr": 1e-2}
    with OffloadEngine(make_model(), **options) as engine:
        losses, weights = train(engine)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    with tight(make_model(), tmp_path, **options) as engine:
        assert engine.plan.nvme_bytes["states"] > 0
        others = train(engine)
    assert others[0] == losses and all(torch.equal(value, others[1][key]) for key, value in weights.items())


def states_of(model: nn.Module, **options: Any) -> dict[str, set[str]]:
    """The names of the states of each parameter after a step, but for the number of steps."""
    with OffloadEngine(model, optimizer="muon", **options) as engine:
        train(engine, 1)
        state = engine.optimizer.state
        return {name: set(state[p]) - {"step", "master"} for name, p in model.named_parameters() if p in state}


def test_by_name_muon_takes_the_matrices_between_embedding_and_head_and_adamw_the_rest():
    found = states_of(make_model())
    assert found.keys() == dict(make_model().named_parameters()).keys()
    inner = {name for name, states in found.items() if states == {"momentum_buffer"}}
    assert inner == {f"blocks.{index}.{part}.weight" for index in range(6) for part in ("up", "down")}
    assert all(states == {"exp_avg", "exp_avg_sq"} for name, states in found.items() if name not in inner)


class Stacked(nn.Module):
    """Experts as GPT-OSS has them: a matrix and a bias of each, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(4, 128, 128)), nn.Parameter(torch.zeros(4, 128))
        self.router = nn.Parameter(torch.randn(8, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.up + self.bias[:, None]).mean(0) + x @ self.router.T @ self.router


def test_rows_beside_stacked_matrices_are_not_one_matrix():
    model = nn.Sequential(Stacked(), nn.Linear(128, 128))
    of_muon = MATRIX_OPTIMIZERS["muon"].whole(model)
    assert {name for name, each in model.named_parameters() if id(each) in of_muon} == {"0.router", "1.weight"}
    with OffloadEngine(model, optimizer="muon") as engine:
        engine.backward(model(torch.ones(2, 128)).sum())
        engine.step()
        assert set(engine.optimizer.state[model[0].bias]) >= {"exp_avg", "exp_avg_sq"}


def test_a_parameter_says_itself_whether_it_is_one_of_muons():
    model = make_model()
    model.head.weight.use_muon = True
    model.blocks[0].up.weight.use_muon = False
    found = states_of(model)
    assert found["head.weight"] == {"momentum_buffer"} and found["blocks.0.up.weight"] == {"exp_avg", "exp_avg_sq"}
    model = make_model()
    model.norm.weight.use_muon = True
    with pytest.raises(ConfigError, match=r"norm.weight \(128,\) has use_muon=True, and Muon takes matrices"):
        OffloadEngine(model, optimizer="muon")


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "moments_dtype": "int8"}], ids=["fp32", "codes"])
def test_what_adamw_takes_beside_muon_is_cut_and_a_checkpoint_goes_to_any_budget(tmp_path: Path, options):
    def make() -> Tiny:
        torch.manual_seed(0)
        return Tiny(width=32, vocab=20_011)

    options = {"optimizer": "muon", "lr": 1e-2, **options}
    least = least_budget(make(), tmp_path, **options)
    with OffloadEngine(make(), **options) as in_memory:
        cut = {spec.piece.whole.name for unit in in_memory.plan.units for spec in unit.unit.parameters if spec.piece}
        train(in_memory)
        states = in_memory.optimizer.state_dict()["state"]
        losses, weights = train(in_memory)
    with OffloadEngine(make(), nvme_path=tmp_path, host_memory=least, **options) as on_nvme:
        train(on_nvme)
        assert on_nvme.plan.nvme_bytes["states"] > 0
        on_nvme.save_checkpoint(tmp_path / "saved")
    with OffloadEngine(make(), nvme_path=tmp_path, host_memory=2 * least, **options) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        loaded = engine.optimizer.state_dict()["state"]
        again, after = train(engine)
    assert cut == {"embed.weight", "head.weight"}
    assert again == losses
    assert all(torch.equal(value, after[name]) for name, value in weights.items())
    assert states[0]["exp_avg"].shape == (20_011, 32) or "int8" in options.values()
    assert all(torch.equal(value, loaded[index][name]) for index in states for name, value in states[index].items())


def test_buffers_of_whole_parameters_are_fewer_where_memory_is_short(tmp_path: Path):
    with tight(make_model(), tmp_path, optimizer="lamb") as engine:
        assert engine.plan.staging.num_tile_buffers == 3
    with tight(make_model(), tmp_path, optimizer="adamw") as engine:
        assert engine.plan.staging.num_tile_buffers == 6


def test_muon_and_adam_mini_keep_fewer_bytes_than_adamw_and_codes_fewer_still():
    nbytes = {}
    for optimizer, moments in (
        ("adamw", "fp32"),
        ("muon", "fp32"),
        ("muon", "bf16"),
        ("muon", "int8"),
        ("adam_mini", "fp32"),
    ):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
        with OffloadEngine(model, optimizer=optimizer, moments_dtype=moments, precision="bf16") as engine:
            nbytes[optimizer, moments] = (
                sum(tile.nbytes for unit in engine.plan.units for tile, _ in unit.tiles) / 2**18
            )
    assert list(nbytes.values()) == [10, 6, 4, 2 + 1 + 4 / 256, 2 + 4 + 4 / 256]


def test_what_a_step_takes_for_itself_is_in_the_budget(tmp_path):
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    options = {"precision": "bf16", "optimizer": "muon"}
    taken = Muon().temporary_bytes(torch.Size([512, 512]), "fp32")
    assert taken == 8 * 512 * 512
    with tight(model, tmp_path, **options) as engine:
        assert engine.plan.compute_bytes >= taken


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer_options": {"momentum": 1.0}}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"optimizer_options": {"ns_steps": 100}}, r"ns_steps must be in \[1, 100\), got 100"),
        ({"optimizer_options": {"ns_steps": 0}}, "ns_steps: expected a whole number >= 1, got 0"),
        ({"optimizer_options": {"adjust_lr_fn": "originals"}}, "adjust_lr_fn: expected .* did you mean 'original'"),
        ({"optimizer_options": {"dampening": 0.1}}, "optimizer 'muon' has no option 'dampening'; it has: lr, "),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_reserved(options, said):
    with pytest.raises(ConfigError, match=said):
        OffloadEngine(make_model(), optimizer="muon", **options)


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_an_orthogonalised_matrix_has_singular_values_near_to_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), num_iterations=10))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_a_step_that_was_taken_early_is_the_one_that_comes(tmp_path, monkeypatch, name):
    comparisons = []
    original = UnitUpdate.is_the_same
    monkeypatch.setattr(
        UnitUpdate, "is_the_same", lambda early, late: comparisons.append(original(early, late)) or comparisons[-1]
    )
    with tight(make_model(), tmp_path, optimizer=name, precision="bf16") as engine:
        assert engine.plan.speculative
        updates = engine._session.parts.trained.updates
        updates.speculative.balance = lambda forward, backward: None  # all units
        for tokens, targets in batches(3):
            loss = loss_of(engine(tokens), targets)
            drain(updates.updater._worker)  # while updates of the last step run, compute does not wait for early ones
            engine.backward(loss)
            drain(updates.updater._worker)
            engine.step()
    assert comparisons and all(comparisons)
