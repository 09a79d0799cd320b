"""Logits and MLPs in tiles of rows: the values of the whole to rounding, one tile alive at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Block, Tiny, batches, least_budget
from torch import nn

from offload import ConfigError, OffloadEngine, attention_in_tiles, cross_entropy_in_tiles, in_tiles


class Largest:
    """The bytes of the largest tensor that autograd saves within."""

    def __enter__(self) -> Largest:
        self.nbytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._look, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _look(self, tensor: torch.Tensor) -> torch.Tensor:
        self.nbytes = max(self.nbytes, tensor.nbytes)
        return tensor


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(bias: bool, reduction: Any):
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 97, bias=bias), torch.randn(3, 25, 16, requires_grad=True)
    targets = torch.randint(0, 97, (3, 25)).masked_fill(torch.rand(3, 25) < 0.2, -100)
    expected = nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)
    expected.backward()
    whole = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    with Largest() as saved:
        loss = cross_entropy_in_tiles(head, hidden, targets, rows=16, reduction=reduction)
    assert saved.nbytes <= head.weight.nbytes  # and no logits
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for value, other in zip([hidden.grad, *(each.grad for each in head.parameters())], whole, strict=True):
        torch.testing.assert_close(value, other)
    assert "forward" not in vars(head)


def test_an_mlp_in_tiles_has_the_values_and_gradients_of_the_whole_and_saves_no_middle():
    torch.manual_seed(0)
    block, x = Block(16), torch.randn(2, 40, 16, requires_grad=True)
    expected = block(x)
    expected.square().sum().backward()
    whole = [x.grad, *(parameter.grad for parameter in block.parameters())]
    x.grad = None
    block.zero_grad()
    undo = in_tiles(block, rows=16)
    with Largest() as saved:
        found = block(x)
    assert saved.nbytes <= max(x.nbytes, block.up.weight.nbytes)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for value, other in zip([x.grad, *(each.grad for each in block.parameters())], whole, strict=True):
        torch.testing.assert_close(value, other)
    undo()
    assert torch.equal(block(x), expected)


def test_a_recomputed_block_in_tiles_calls_itself_in_the_second_run_and_has_the_same_bits():
    losses = []
    for activations in ("keep", "recompute"):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(16) for _ in range(3)])
        for block in model:
            in_tiles(block, rows=16)
        x = torch.randn(2, 40, 16)
        with OffloadEngine(model, lr=1e-2, activations=activations) as engine:
            for _ in range(2):
                loss = engine(x).square().sum()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:2] == losses[2:]


class Attention(nn.Module):
    """As those of transformers: four heads of queries, two of keys and values."""

    head_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, n) for n in (32, 16, 16, 32))
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden_states: torch.Tensor, turned: tuple[torch.Tensor, ...], cache: Any = None) -> Any:
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self.norm(query) + turned[0], (key + turned[0]).repeat_interleave(2, 1)
        value = value.repeat_interleave(2, 1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None if cache is None else query


def test_an_attention_in_tiles_has_the_values_and_gradients_of_the_whole_and_queries_of_one_tile_at_a_time():
    torch.manual_seed(0)
    attention, x = Attention(), torch.randn(2, 40, 32, requires_grad=True)
    given = {"hidden_states": x, "turned": (torch.randn(40, 8),)}
    expected = attention(**given)[0]
    expected.square().sum().backward()
    whole = [x.grad, *(parameter.grad for parameter in attention.parameters())]
    x.grad = None
    attention.zero_grad()
    undo = attention_in_tiles(attention, tiles=2)
    widths: list[int] = []
    attention.q_proj.register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))
    found, others = attention(**given)
    assert (widths, others) == ([16, 16], None)
    found.square().sum().backward()
    assert widths == [16] * 4
    torch.testing.assert_close(found, expected)
    for value, other in zip([x.grad, *(each.grad for each in attention.parameters())], whole, strict=True):
        torch.testing.assert_close(value, other)
    with torch.no_grad():
        assert torch.equal(attention(**given, cache=[])[0], expected)
    with pytest.raises(ConfigError, match=r"is given a Generator, which each tile would change for the next one"):
        attention(**given, cache=torch.Generator())
    with pytest.raises(ConfigError, match=r"Attention gives more than one tensor"):
        attention(**given, cache=1)
    undo()
    assert torch.equal(attention(**given)[0], expected)
    assert "forward" not in vars(attention)


@pytest.mark.parametrize(
    "mode", [{}, {"activations": "recompute"}, {"activations": "nvme", "activation_memory": "64KiB"}], ids=str
)
def test_in_an_engine_weights_come_in_once_for_all_tiles(mode: dict[str, Any], tmp_path: Path):
    class Split(Tiny):
        """Gives the loss, in tiles or not."""

        rows = 1 << 30

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return cross_entropy_in_tiles(self.head, self.norm(x), targets, rows=self.rows)

    def train(rows: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], list[tuple[str, str]]]:
        torch.manual_seed(0)
        model, losses, told = Split(width=32), [], []
        model.rows = rows
        if rows < 64:
            for block in model.blocks:
                in_tiles(block, rows=rows)
        options["host_memory"] = least_budget(model, tmp_path, lr=1e-2, **options)  # all weights come in
        with OffloadEngine(model, nvme_path=tmp_path, lr=1e-2, **options) as engine:
            passes = engine._session.trained.step.passes
            begin = passes.begin_use
            passes.begin_use = lambda unit: told.append(unit.name) or begin(unit)  # type: ignore[method-assign]
            for tokens, targets in batches(2):
                loss = engine(tokens, targets)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            return losses, {name: each.detach().clone() for name, each in model.named_parameters()}, told

    whole, tiled = train(1 << 30), train(16, **mode)
    assert tiled[0] == pytest.approx(whole[0], rel=1e-5)
    for name, value in whole[1].items():
        torch.testing.assert_close(tiled[1][name], value, rtol=0, atol=1e-3)
    assert tiled[2].count("head") == whole[2].count("head")
    assert len(tiled[2]) == len(whole[2])


def test_what_does_not_fit_is_one_error():
    hidden, targets = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"expected an nn\.Linear as the head, got LayerNorm"):
        cross_entropy_in_tiles(nn.LayerNorm(8), hidden, targets)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"hidden \(2, 3, 8\) and targets \(6,\) do not fit"):
        cross_entropy_in_tiles(nn.Linear(8, 9), hidden, targets.flatten())
    with pytest.raises(ConfigError, match="rows: expected a positive number, got 0"):
        in_tiles(nn.Linear(8, 9), rows=0)
    with pytest.raises(ConfigError, match=r"tiles=4 do not divide the 2 heads of k_proj. Take a divisor of 2"):
        attention_in_tiles(Attention(), tiles=4)
    with pytest.raises(ConfigError, match=r"no linear layer 'qkv'. Those that it has: q_proj, k_proj, v_proj, o_proj"):
        attention_in_tiles(Attention(), tiles=2, inputs=["qkv"])


def test_a_head_that_the_engine_cuts_into_pieces_gives_the_loss_in_tiles():
    torch.manual_seed(0)
    found = []
    for rows in (1 << 30, 16):
        torch.manual_seed(0)
        head = nn.Linear(32, 20_011)
        model = nn.Sequential(nn.Linear(32, 32), head)
        with OffloadEngine(model, lr=1e-2) as engine:
            assert sum(item.unit.whole is not None for item in engine.plan.units) > 1
            torch.manual_seed(1)
            hidden, targets = torch.randn(64, 32), torch.randint(0, 20_011, (64,))
            loss = cross_entropy_in_tiles(head, model[0](hidden), targets, rows=rows)
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), head.weight.detach().clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-3)
