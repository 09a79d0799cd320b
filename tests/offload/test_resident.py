"""Blocks that a program keeps in memory while it works on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of
from torch import nn

from offload import OffloadEngine
from offload.errors import ConfigError
from offload.tiers.home import StoredHome
from swapper import OffloadError


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Reads and writes of whole units, by name."""
    counts: Counter[tuple[str, str]] = Counter()

    def counted(what: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def call(home: StoredHome, *args: Any, **kwargs: Any) -> Any:
            counts[what, home.name] += 1
            return move(home, *args, **kwargs)

        return call

    for what in ("read", "fill"):
        monkeypatch.setattr(StoredHome, what, counted(what, getattr(StoredHome, what)))
    return counts


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., OffloadEngine]]:
    engines = []

    def made(**options: Any) -> OffloadEngine:
        torch.manual_seed(0)
        model = Tiny(64)
        least = least_budget(model, tmp_path, **options)
        engines.append(OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **options))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close(discard=True)


X = torch.ones(2, 3, 64)


@torch.no_grad()
def work_on(block: nn.Module) -> torch.Tensor:
    """Look at each weight several times, change it, and compute."""
    for _ in range(3):
        for parameter in block.parameters():
            parameter.data.mul_(1 + parameter.abs().amax())
    return block(X)


def test_work_on_a_resident_block_reads_it_once_and_writes_it_once(make, moved):
    engine, plain = make(optimizer=None), Tiny(64)
    plain.load_state_dict(engine.module.state_dict())
    block = engine.module.blocks[1]
    moved.clear()
    with engine.resident(block):
        assert type(block.up.weight) is nn.Parameter
        found = work_on(block)
        kept = block.up.weight
    assert moved["read", "weights of blocks.1"] == 1
    assert moved["fill", "weights of blocks.1"] == 1
    assert torch.equal(found, work_on(plain.blocks[1]))
    for other in engine.module.blocks:
        other(X)  # others take its place in memory
    assert torch.equal(kept, plain.blocks[1].up.weight)
    assert torch.equal(block(X), plain.blocks[1](X))


def test_a_block_that_is_resident_twice_is_so_until_the_end_of_the_outer_one(make, moved):
    engine = make(optimizer=None)
    block = engine.module.blocks[2]
    moved.clear()
    with engine.resident(block):
        with engine.resident(block):
            block(X)
        block(X)
        assert type(block.up.weight) is nn.Parameter
    assert moved["read", "weights of blocks.2"] <= 1
    assert type(block.up.weight) is not nn.Parameter


def test_an_error_within_ends_the_residence(make):
    engine = make(optimizer=None)
    block = engine.module.blocks[0]
    with pytest.raises(ZeroDivisionError), engine.resident(block):
        raise ZeroDivisionError
    assert type(block.up.weight) is not nn.Parameter


def test_a_step_within_ends_it_and_takes_what_was_written(make):
    losses = []
    for is_resident in (False, True):
        engine = make(lr=1e-2)
        (tokens, targets), block = batches(1)[0], engine.module.blocks[3]
        if is_resident:
            with engine.resident(block):
                block.up.weight.data.zero_()
                engine.backward(loss_of(engine(tokens), targets))
                engine.step()
                assert type(block.up.weight) is not nn.Parameter
        else:
            block.up.weight.data.zero_()
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        losses.append((loss_of(engine(tokens), targets), block.up.weight.sum()))
    assert losses[0] == losses[1]


def test_what_has_no_room_at_a_time_and_what_is_no_part_of_the_model_is_refused(make, moved):
    engine = make(optimizer=None)
    moved.clear()
    with pytest.raises(ConfigError, match=r"units, .* have no room at a time"), engine.resident(engine.module):
        pass
    with pytest.raises(ConfigError, match="no weights of it"), engine.resident(nn.Linear(2, 2)):
        pass
    assert not moved
    with engine.resident(engine.module.blocks[0]), pytest.raises(OffloadError, match="within a forward"):
        engine.together([1], lambda item: item)
