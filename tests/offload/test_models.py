"""Models of every shape: with everything on NVMe they give the bits that they give in RAM, and those of torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import Block, Tiny, batches, least_budget, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import ConfigError, OffloadEngine
from offload.tiers.window import CopyWindow


class Tied(Tiny):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Twice(Tiny):
    """The first block is called again after the last."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(self.norm(x))


class Experts(Tiny):
    """Each step uses two of four blocks; the others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(tokens)
        for index in (self.calls % 4, (self.calls * 3 + 1) % 4):
            x = self.blocks[index](x)
        return self.head(self.norm(x))


class Frozen(Tiny):
    """Low-rank adapters on frozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = Adapted(block.up)
        self.head.requires_grad_(True)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Checkpointed(Tiny):
    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedInPairs(Tiny):
    """One checkpoint around two units."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for first in (0, 2):
            x = checkpoint(lambda x, i=first: self.blocks[i + 1](self.blocks[i](x)), x, use_reentrant=False)
        return self.head(self.norm(x))


class OwnParameters(Tiny):
    """Parameters of the root module, resident around everything."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(128))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x) + self.scale
        return self.head(self.norm(x))


class OneModule(nn.Module):
    """A model that is a single leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


class Structured(Tiny):
    """Blocks that take keywords and return dictionaries; a skip connection over all of them."""

    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *, x: torch.Tensor, first: torch.Tensor) -> dict[str, object]:
            return {"x": self.block(x), "aux": [first * 0.5]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrapped(block) for block in self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(tokens)
        for block in self.blocks:
            out = block(x=x, first=first)
            x = out["x"] + out["aux"][0]
        return self.head(self.norm(x))


class ManyEmbeddings(Tiny):
    """Several leaves without an input that requires grad: all of them are open when the backward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Embedding(256, 128) for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + sum(more(tokens) for more in self.more)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OwnOutput(Tiny):
    """Modules that return their parameter, a view of it, and a view that the caller changes in place."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 128))

        def forward(self, length: int) -> torch.Tensor:
            return self.table[:length]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(128))

        def forward(self) -> torch.Tensor:
            return self.scale

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.Table()
        self.whole = self.Whole()
        self.mask = nn.Parameter(torch.randn(128))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.whole() + self.positions(tokens.shape[1])
        for block in self.blocks:
            x = block.down(torch.nn.functional.gelu(block.up(block.norm(x))))
            x[:, 1:3] = self.mask
        return self.head(self.norm(x))


class PassedThrough(Tiny):
    """Blocks hand on a tensor that the first of them has made, as T5 does with its position bias."""

    class Biased(nn.Module):
        def __init__(self, block: nn.Module, first: bool) -> None:
            super().__init__()
            self.block = block
            self.bias = nn.Parameter(torch.randn(128)) if first else None

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            bias = self.bias * 2 if bias is None else bias
            return self.block(x + bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Biased(block, i == 0) for i, block in enumerate(self.blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, bias = self.embed(tokens), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(self.norm(x))


class Generated(Tiny):
    """A weight that is computed from a parameter and takes its place for one call."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        weight = self.head.weight * 1.5
        return torch.func.functional_call(self.head, {"weight": weight}, (self.norm(x),))


class Buffers(nn.Module):
    """Batch norm: buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embed(tokens).flatten(0, 1))
        return self.head(x).view(*tokens.shape, -1)


MODELS = [
    Tiny,
    Tied,
    Twice,
    Experts,
    Frozen,
    Checkpointed,
    Reentrant,
    CheckpointedInPairs,
    OwnParameters,
    OneModule,
    Structured,
    ManyEmbeddings,
    OwnOutput,
    PassedThrough,
    Generated,
    Buffers,
]

ADAMW = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
"""A large epsilon: where a gradient is nearly zero, Adam's step is otherwise its sign, and that is rounding."""


def run(model: nn.Module, call: Callable[..., torch.Tensor], backward: Callable[[torch.Tensor], object], step):
    """Five steps with an evaluation in between; losses and final weights."""
    losses = []
    for index, (tokens, targets) in enumerate(batches(5)):
        loss = loss_of(call(tokens), targets)
        backward(loss)
        step()
        losses.append(loss.item())
        if index == 2 and not isinstance(model, Experts):
            model.eval()
            with torch.no_grad():
                losses.append(call(tokens).float().mean().item())
            model.train()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def offloaded(kind: type[nn.Module], **options: object):
    model = built(kind)
    with OffloadEngine(model, gradient_clipping=1.0, **ADAMW, **options) as engine:
        return run(model, engine, engine.backward, engine.step)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", MODELS)
def test_same_bits_everywhere_and_close_to_torch(kind, tmp_path: Path):
    plain = built(kind)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    reference_losses, reference = run(plain, plain, torch.Tensor.backward, step)
    in_ram_losses, in_ram = offloaded(kind, precision="fp32")
    budget = least_budget(built(kind), tmp_path, precision="fp32")
    on_nvme_losses, on_nvme = offloaded(kind, precision="fp32", nvme_path=tmp_path, host_memory=budget)
    assert in_ram_losses == pytest.approx(reference_losses, rel=1e-4, abs=1e-5)
    assert on_nvme_losses == in_ram_losses
    for name, value in in_ram.items():
        assert torch.equal(on_nvme[name], value), name
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-4, msg=name)


def test_accumulated_micro_batches_make_one_step(tmp_path: Path):
    plain = built(Tiny)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for index, (tokens, targets) in enumerate(batches(6)):
        (loss_of(plain(tokens), targets) / 3).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    results = []
    for options in ({}, {"nvme_path": tmp_path, "host_memory": least_budget(built(Tiny), tmp_path, precision="fp32")}):
        model = built(Tiny)
        with OffloadEngine(model, precision="fp32", **ADAMW, gradient_accumulation_steps=3, **options) as engine:
            for tokens, targets in batches(6):
                engine.backward(loss_of(engine(tokens), targets))
                engine.step()
            assert engine.global_step == 2
            results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, parameter in plain.named_parameters():
        assert torch.equal(results[0][name], results[1][name])
        torch.testing.assert_close(results[0][name], parameter.detach(), rtol=1e-3, atol=1e-4, msg=name)


def test_the_untouched_loop_of_pytorch_works(tmp_path: Path):
    model = built(Tiny)
    with OffloadEngine(model, precision="fp32", **ADAMW, nvme_path=tmp_path, host_memory="8MiB") as engine:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 5)
        for tokens, targets in batches(3):
            loss_of(model(tokens), targets).backward()
            engine.optimizer.step()
            schedule.step()
            engine.optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = built(Tiny)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for tokens, targets in batches(3):
        loss_of(plain(tokens), targets).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-4, msg=name)


def test_an_exception_in_forward_leaves_the_engine_usable(tmp_path: Path):
    class Fragile(Tiny):
        broken = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            x = self.blocks[0](x)
            if self.broken:
                x = self.blocks[1](x[..., :3])
            return self.head(self.norm(x))

    model = built(Fragile)
    budget = least_budget(built(Fragile), tmp_path)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=budget) as engine:
        tokens, targets = batches(1)[0]
        model.broken = True
        for _ in range(8):
            with pytest.raises(RuntimeError):
                engine(tokens)
        model.broken = False
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        engine.synchronize()
        assert engine.global_step == 1


def test_units_are_the_repeated_blocks():
    with OffloadEngine(built(Tiny)) as engine:
        names = [item.unit.name for item in engine.plan.units]
    assert names == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    assert isinstance(Block(8), nn.Module)


@pytest.mark.parametrize("kind", [Tiny, Twice, Checkpointed])
def test_a_torch_that_cannot_exchange_pointers_gives_the_same_bits(kind, tmp_path: Path, monkeypatch):
    expected, expected_weights = offloaded(kind, precision="fp32")
    for module in ("planning", "assembly.compute"):
        monkeypatch.setattr(f"offload.{module}.window_class", lambda: CopyWindow)
    budget = least_budget(built(kind), tmp_path, precision="fp32")
    losses, weights = offloaded(kind, precision="fp32", nvme_path=tmp_path, host_memory=budget)
    assert losses == expected
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


def test_a_complex_parameter_is_refused_with_the_way_to_have_its_parts():
    model = nn.Sequential(nn.Linear(4, 4))
    model.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"turn is torch\.complex64.*view_as_real.*view_as_complex"):
        OffloadEngine(model, optimizer="adamw", precision="fp32")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_used_saved_and_loaded(layout: torch.layout, tmp_path: Path):
    class Graph(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("adjacency", (scale * torch.eye(4)).to_sparse(layout=layout))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.adjacency @ self.linear(x)

    with OffloadEngine(Graph(3.0), precision="fp32") as engine:
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path)
        expected = engine(torch.ones(4, 4))
    with OffloadEngine(Graph(1.0), precision="fp32") as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.module.adjacency.layout is layout
        assert torch.equal(engine.module.adjacency.to_dense(), 3 * torch.eye(4))
        assert torch.equal(engine(torch.ones(4, 4)), expected)
