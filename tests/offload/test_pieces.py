"""Layers that are much larger than all else are worked through in pieces: what is cut, the bits, and the handles."""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny import Block, batches, least_budget, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import BudgetError, OffloadEngine
from offload.model.own_writes import OwnWrites
from offload.model.strays import Strays
from offload.testing.simulated import SimulatedDevice
from offload.units.find import find_units

VOCAB, WIDTH = 20_011, 32


class Huge(nn.Module):
    """97 of 100 parameters are in the embedding and in the head."""

    tied, bias, both = False, True, False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=13_337)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=self.bias)
        nn.init.normal_(self.embed.weight, std=0.1)
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(Huge):
    tied, bias = True, False


class Frozen(Huge):
    """Only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Twice(Huge):
    """The embedding is called twice, and looks up what it is given in another shape."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.embed(tokens.flip(-1).flatten()).view(*tokens.shape, -1)
        return self.head(self.blocks[0](x))


class Checkpointed(Huge):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.embed, tokens, use_reentrant=False)
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return checkpoint(self.head, x, use_reentrant=False)


class Normalised(Huge):
    """The head is used in a way that no piece knows, too, and the embedding outside of its module."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](F.embedding(tokens, self.embed.weight))
        cosine = F.linear(x, F.normalize(self.head.weight, dim=-1))
        return cosine + self.head(x) + F.linear(x, self.embed.weight.detach())


MODELS = [Huge, Tied, Frozen, Twice, Checkpointed, Normalised]
ADAMW = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
Numbers = tuple[list[float], dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]]]


def built(kind: type[Huge]) -> Huge:
    torch.manual_seed(0)
    return kind()


def run(model: nn.Module, call: nn.Module | OffloadEngine, optimizer: torch.optim.Optimizer) -> Numbers:
    """Three steps of two micro-batches in the plain loop; losses, weights and states."""
    losses = []
    for index, (tokens, targets) in enumerate(batches(6, VOCAB)):
        loss = loss_of(call(tokens), targets)
        (loss / 2).backward()
        losses.append(loss.item())
        if index % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, weights, optimizer.state_dict()["state"]


def offloaded(kind: type[Huge], **options: object) -> Numbers:
    model = built(kind)
    with OffloadEngine(model, **ADAMW, **options) as engine:
        assert engine.optimizer is not None
        return run(model, engine, engine.optimizer)


def assert_same(one: Numbers, other: Numbers) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert one[2].keys() == other[2].keys()
    for index, states in one[2].items():
        assert all(torch.equal(value, other[2][index][name]) for name, value in states.items())


# What is cut.


def pieces_of(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model, whole=()) if unit.parameters[0].piece is not None]


def test_what_is_much_larger_than_the_other_units_is_cut_evenly():
    units = {unit.name: unit for unit in find_units(Huge(), whole=())}
    assert pieces_of(Huge()) == [
        f"{name}[{start}:{stop}]"
        for name in ("embed", "head")
        for start, stop in ((0, 6670), (6670, 13340), (13340, 20011))
    ]
    assert [spec.name for spec in units["head"].parameters] == ["head.bias"]
    assert sum(spec.numel for unit in units.values() for spec in unit.parameters) == sum(
        p.numel() for p in Huge().parameters()
    )
    assert all(unit.depth == (1 if name.startswith("head[") else 0) for name, unit in units.items())


def test_the_measure_is_the_largest_block_however_many_there_are():
    def model(num_blocks: int) -> nn.Module:
        blocks = nn.ModuleList(Block(256) for _ in range(num_blocks))
        return nn.ModuleList([nn.Embedding(5_000, 256), blocks])

    assert len(pieces_of(model(2))) == len(pieces_of(model(40))) == 3


def test_layers_of_like_size_are_not_cut_nor_is_what_is_used_otherwise():
    assert pieces_of(nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))) == []
    assert pieces_of(nn.Sequential(nn.Embedding(VOCAB, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 8))) == []
    assert pieces_of(nn.Sequential(nn.EmbeddingBag(VOCAB, WIDTH), nn.Linear(WIDTH, 8))) == []
    assert len(pieces_of(nn.Linear(WIDTH, VOCAB))) == 3


def test_an_optimizer_that_looks_at_whole_parameters_gets_them_whole(tmp_path: Path):
    with OffloadEngine(Huge(), optimizer=torch.optim.Adafactor) as engine:
        assert all(item.unit.parameters[0].piece is None for item in engine.plan.units)


# The bits.


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", MODELS)
def test_same_bits_everywhere_and_close_to_torch(kind: type[Huge], tmp_path: Path):
    plain = built(kind)
    reference = run(plain, plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW))
    in_ram = offloaded(kind, precision="fp32")
    budget = least_budget(built(kind), tmp_path, precision="fp32")
    assert_same(offloaded(kind, precision="fp32", nvme_path=tmp_path, host_memory=budget), in_ram)
    assert in_ram[0] == pytest.approx(reference[0], rel=1e-4)
    for name, value in in_ram[1].items():
        torch.testing.assert_close(value, reference[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"moments_dtype": "int8"}, {"gradient_clipping": 1.0}])
def test_a_layer_larger_than_all_staging_memory_is_trained(options: dict[str, object], tmp_path: Path):
    common = {"precision": "fp32", **options}
    budget = least_budget(built(Huge), tmp_path, **common)
    state_bytes = sum(p.numel() for p in Huge().parameters()) * 16
    assert budget < 0.6 * state_bytes
    results = []
    for memory in (budget, 1 << 30):
        model = built(Huge)
        with OffloadEngine(model, nvme_path=tmp_path, host_memory=memory, **ADAMW, **common) as engine:
            losses = []
            for tokens, targets in batches(2, VOCAB):
                loss = loss_of(engine(tokens), targets)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            results.append((losses, engine.state_dict(), engine.report().nvme_write_bytes))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    assert results[0][2] > 0 == results[1][2]


def test_a_wide_layer_takes_a_fraction_of_its_own_bytes(tmp_path: Path):
    model = nn.Sequential(nn.Embedding(100_000, 64), nn.Linear(64, 8))
    budget = least_budget(model, tmp_path, precision="fp32")
    assert budget < 100_000 * 64 * 4 / 2
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=budget, precision="fp32") as engine:
        tokens = torch.randint(0, 100_000, (8, 16))
        engine.backward(engine(tokens).square().mean())
        engine.step()
        assert 0 < engine.report().host_memory_bytes <= budget + (2 << 20)  # memory comes in huge pages


def test_the_same_bits_on_a_device(tmp_path: Path):
    in_ram = offloaded(Tied, precision="fp32")
    device = SimulatedDevice(0)
    with pytest.raises(BudgetError) as caught:
        OffloadEngine(built(Tied), precision="fp32", device=device, device_memory=1)
    weight_bytes = VOCAB * WIDTH * 4
    assert caught.value.needed_bytes < weight_bytes
    small: dict[str, object] = {"precision": "fp32", "device": device, "device_memory": caught.value.needed_bytes}
    least = least_budget(built(Tied), tmp_path, **small)
    assert_same(offloaded(Tied, nvme_path=tmp_path, host_memory=least, **small), in_ram)


# Indices.


@pytest.mark.parametrize("index", [-1, VOCAB])
def test_an_index_that_is_out_of_range_is_refused_as_torch_does(index: int):
    with OffloadEngine(built(Huge), precision="fp32") as engine:
        tokens, targets = batches(1, VOCAB)[0]
        with pytest.raises(IndexError):
            engine(torch.full_like(tokens, index))
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()


def test_the_padding_index_gets_no_gradient_in_its_piece():
    with OffloadEngine(built(Huge), precision="fp32") as engine:
        loss_of(engine(torch.tensor([[13_337, 13_338, 0]])), torch.tensor([[1, 2, 3]])).backward()
        gradient = engine.module.embed.weight.grad
        rows = gradient.detach().clone().abs().sum(-1).nonzero().flatten().tolist()
        assert rows == [0, 13_338]


# The handle of the whole.


def test_the_whole_is_read_and_written_like_any_parameter(tmp_path: Path):
    reference = built(Huge)
    budget = least_budget(built(Huge), tmp_path, precision="fp32")
    with OffloadEngine(built(Huge), nvme_path=tmp_path, host_memory=budget, precision="fp32", lr=0.0) as engine:
        weight = engine.module.embed.weight
        assert weight.shape == (VOCAB, WIDTH) and [name for name, _ in engine.module.named_parameters()] == [
            name for name, _ in reference.named_parameters()
        ]
        assert torch.equal(weight, reference.embed.weight) and weight.norm() == reference.embed.weight.norm()
        with torch.no_grad():
            weight[6668:6672] = 5.0
            weight.mul_(2)
        assert weight[6669].tolist() == [10.0] * WIDTH and weight[0, 0] == 2 * reference.embed.weight[0, 0]
        twin = copy.deepcopy(engine.module)
        assert type(twin.embed.weight) is nn.Parameter and torch.equal(twin.embed.weight, weight)
        tokens, _ = batches(1, VOCAB)[0]
        assert torch.allclose(twin(tokens), engine(tokens), atol=1e-5)
        engine.load_state_dict(reference.state_dict())
        assert torch.equal(weight, reference.embed.weight)


def test_the_gradient_of_the_whole_is_that_of_torch_and_can_be_changed():
    reference = built(Tied)
    tokens, targets = batches(1, VOCAB)[0]
    loss_of(reference(tokens), targets).backward()
    with OffloadEngine(built(Tied), precision="fp32") as engine:
        weight = engine.module.embed.weight
        assert weight.grad is None
        loss_of(engine(tokens), targets).backward()
        torch.testing.assert_close(weight.grad.clone(), reference.embed.weight.grad)
        assert weight.grad.norm() == pytest.approx(reference.embed.weight.grad.double().norm().item(), rel=1e-5)
        weight.grad.mul_(0.5)
        weight.grad = weight.grad
        weight.grad[:7000] = 0
        torch.testing.assert_close(weight.grad[7000:].clone(), reference.embed.weight.grad[7000:] / 2)
        assert weight.grad[:7000].abs().max() == 0
        weight.grad = None
        assert weight.grad is None


def test_states_go_out_and_in_whole(tmp_path: Path):
    plain = built(Huge)
    groups = [{"params": [plain.embed.weight], "lr": 1e-3}, {"params": [*plain.blocks.parameters()]}]
    built_before = torch.optim.AdamW([*groups, {"params": [*plain.head.parameters()], "weight_decay": 0.0}], **ADAMW)
    reference = run(plain, plain, built_before)
    model = copy.deepcopy(plain)
    again = torch.optim.AdamW(model.parameters(), **ADAMW)
    again.load_state_dict(torch.optim.AdamW(plain.parameters(), **ADAMW).state_dict())
    for parameter, twin in zip(plain.parameters(), model.parameters(), strict=True):
        again.state[twin] = {name: value.clone() for name, value in built_before.state[parameter].items()}
    with OffloadEngine(model, optimizer=again, precision="fp32", nvme_path=tmp_path) as engine:
        assert engine.optimizer is not None
        states = engine.optimizer.state_dict()
        assert torch.equal(states["state"][0]["exp_avg"], reference[2][0]["exp_avg"])
        states["state"][0]["exp_avg"] = torch.arange(VOCAB * WIDTH).view(VOCAB, WIDTH).float()
        engine.optimizer.load_state_dict(states)
        assert torch.equal(engine.optimizer.state_dict()["state"][0]["exp_avg"], states["state"][0]["exp_avg"])
        states["state"][0]["exp_avg"] = torch.zeros(VOCAB, WIDTH + 1)
        with pytest.raises(ValueError, match=r"exp_avg of embed.weight\[13340:20011\]"):
            engine.optimizer.load_state_dict(states)


def test_a_model_on_the_meta_device_is_made_piece_by_piece(tmp_path: Path):
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB))

    torch.manual_seed(0)
    reference = make().state_dict()
    with torch.device("meta"):
        model = make()
    torch.manual_seed(0)
    with OffloadEngine(model, nvme_path=tmp_path, precision="fp32") as engine:
        for name, value in engine.state_dict().items():
            assert torch.equal(value, reference[name]), name


def test_a_model_in_pieces_is_collected_with_its_engine(tmp_path: Path):
    engine = OffloadEngine(built(Tied), nvme_path=tmp_path, precision="fp32")
    tokens, targets = batches(1, VOCAB)[0]
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
    model = weakref.ref(engine.module)
    del engine
    deadline = time.monotonic() + 30
    while model() is not None and time.monotonic() < deadline:  # the update under way still needs it
        gc.collect()
        time.sleep(0.01)
    assert model() is None


def test_a_compiled_model_uses_its_pieces():
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model = built(Huge)
        if compiled:
            model.head.compile(backend="eager")
            model.embed.compile(backend="eager")
        with OffloadEngine(model, precision="fp32", **ADAMW) as engine:
            for tokens, targets in batches(2, VOCAB):
                loss = loss_of(engine(tokens), targets)
                engine.backward(loss)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # what the compiler keeps of the head is nothing that a forward has
                    engine.step()
            results.append((loss.item(), model.embed.weight.detach().clone()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("piece", [None, "rows 0 to 4"])
def test_what_a_forward_has_kept_is_looked_for_where_others_than_the_engine_see_the_weights(piece: object):
    flat = torch.zeros(16)
    window = SimpleNamespace(flat=flat, keep=lambda keeps: None, has_copy=lambda: True)
    parameter = nn.Parameter(flat.view(4, 4))
    unit = SimpleNamespace(name="unit", parameters=[SimpleNamespace(piece=piece)])
    strays = Strays(unit, window, OwnWrites([parameter]), ["weight"])
    strays.begin_use()
    kept = parameter.data
    strays.end_use()
    assert strays.are_left == (piece is None) and kept.shape == (4, 4)
