"""Blocks that ``torch.compile`` has compiled: the graphs, bits and silence of the same blocks in memory."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from adapted import QUANTISED
from tiny import Block, Tiny, batches, least_budget, loss_of
from torch import nn
from torch._dynamo.utils import counters

from offload import OffloadEngine
from offload.testing.simulated import SimulatedDevice

peft = pytest.importorskip("peft")

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations" / "compile.md"

SETTINGS: dict[str, Any] = {"lr": 1e-3, "precision": "fp32"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def in_silence() -> Iterator[None]:
    """Nothing is warned of: by the compiler neither, which would warn of what it cannot trace."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert [str(warning.message) for warning in said] == []


def model(num_blocks: int = 9) -> Tiny:
    """With one block more than the compiler would compile anew."""
    torch.manual_seed(0)
    return Tiny(width=64, num_blocks=num_blocks)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for x, y in batches(steps.stop)[steps.start :]:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(module: nn.Module, kind: type[nn.Module]) -> None:
    for block in module.modules():
        if type(block) is kind:
            block.compile(backend="aot_eager")


def graphs() -> tuple[int, int]:
    """How many graphs there are, and the operations in them."""
    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]


def graphs_in_memory(module: nn.Module, kind: type[nn.Module], train: Callable[..., list[float]]) -> tuple[int, int]:
    compiled(module, kind)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    train(module, torch.optim.AdamW(trained), range(2))
    found = graphs()
    torch._dynamo.reset()
    counters.clear()
    return found


@cache
def expected() -> tuple[list[float], tuple[int, int]]:
    """Losses of five steps, and the graphs in memory."""
    with OffloadEngine(model(), **SETTINGS) as engine:
        losses = train(engine.module, engine.optimizer, range(5))
    return losses, graphs_in_memory(model(), Block, train)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["RAM", "NVMe", "device"])
def test_blocks_have_the_graphs_and_the_bits_of_blocks_in_memory(place: str, when: str, tmp_path: Path) -> None:
    expected_losses, in_memory = expected()
    options = dict(SETTINGS)
    if place == "NVMe":
        options |= {"nvme_path": tmp_path, "host_memory": least_budget(model(), tmp_path, **SETTINGS)}
    if place == "device":
        options |= {"device": SimulatedDevice()}
    module = model()
    with in_silence():
        if when == "before":
            compiled(module, Block)
        with OffloadEngine(module, **options) as engine:
            if when == "after":
                compiled(module, Block)
            losses = train(module, engine.optimizer, range(2))
            assert graphs() == in_memory
            with torch._dynamo.config.patch(error_on_recompile=True):
                losses += train(module, engine.optimizer, range(2, 5))
            assert graphs() == in_memory
    assert losses == expected_losses


@pytest.mark.parametrize("base", ["nf4"])
def test_an_adapter_over_a_frozen_base_is_compiled(base: str) -> None:
    def make() -> Any:
        plain = model(num_blocks=2).bfloat16()
        torch.manual_seed(1)
        QUANTISED[base](plain.blocks)
        config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["up", "down"])
        return peft.get_peft_model(plain, config, autocast_adapter_dtype=False)

    with OffloadEngine(make(), lr=1e-2) as engine:
        expected = train(engine.module, engine.optimizer, range(4))
    in_memory = graphs_in_memory(make(), Block, train)
    module = make()
    with OffloadEngine(module, lr=1e-2) as engine:
        compiled(module, Block)
        losses = train(module, engine.optimizer, range(2))
        assert graphs() == in_memory
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses += train(module, engine.optimizer, range(2, 4))
    assert losses == expected


def test_a_whole_model_is_compiled_in_parts() -> None:
    with OffloadEngine(model(), **SETTINGS) as engine:
        expected = train(engine.module, engine.optimizer, range(4))
    with in_silence(), OffloadEngine(model(), **SETTINGS) as engine:
        whole = torch.compile(engine.module, backend="aot_eager")
        losses = train(whole, engine.optimizer, range(2))
        assert counters["stats"]["unique_graphs"] > 0  # before torch 2.13 the blocks' alone
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses += train(whole, engine.optimizer, range(2, 4))
        assert losses == expected
        torch._dynamo.reset()
        in_one = torch.compile(engine.module, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile its model without fullgraph=True"):
            train(in_one, engine.optimizer, range(1))
        assert train(engine.module, engine.optimizer, range(1)) != []


def test_a_backward_in_a_compiled_function_is_that_of_the_plain_one() -> None:
    """The compiler looks at functions that are called in it, too: hooks of a graph."""

    def run(compiled: bool) -> list[float]:
        with OffloadEngine(model(2), **SETTINGS) as engine:

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                loss = loss_of(engine.module(x), y)
                loss.backward()
                return loss

            step = torch.compile(step, backend="eager") if compiled else step
            losses = []
            for x, y in batches(2):
                losses.append(step(x, y).item())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return losses

    assert run(compiled=True) == run(compiled=False)


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    example = example.replace("block.compile()", 'block.compile(backend="aot_eager")')
    assert "aot_eager" in example
    exec(compile(example, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out.count("loss") == 4
