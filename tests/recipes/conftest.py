"""Recipes of ``docs/recipes``, run as a reader would run them, for tests that do the same without an engine."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import least_budget
from torch import nn

from offload import OffloadEngine, closing

_RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
_ran: dict[str, SimpleNamespace] = {}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], SimpleNamespace]]:
    """Run the ``python`` blocks of a page in an empty folder, in order, once: the names that they leave."""
    monkeypatch.chdir(tmp_path)
    before = set(closing._open)

    def run(page: str) -> SimpleNamespace:
        if page in _ran:
            return _ran[page]
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "__main__"}
        blocks = re.findall(r"^```python\n(.*?)^```$", (_RECIPES / page).read_text(), re.DOTALL | re.MULTILINE)
        assert blocks
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="nvme_path: .* is on")
            for block in blocks:
                exec(compile(block, page, "exec"), names)
        _ran[page] = SimpleNamespace(**names)
        return _ran[page]

    yield run
    for closers in set(closing._open) - before:
        closers.close()


@pytest.fixture
def tight(tmp_path: Path) -> Callable[..., OffloadEngine]:
    """An engine in the least memory that works: what it can do without is on NVMe."""

    def make(model: nn.Module, **options: Any) -> OffloadEngine:
        least = least_budget(model, tmp_path, **options)
        return OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **options)

    return make


@pytest.fixture
def same() -> Callable[[nn.Module, nn.Module], None]:
    """Assert that two models have the same parameters, bit for bit."""

    def check(one: nn.Module, other: nn.Module) -> None:
        theirs = dict(other.named_parameters())
        assert theirs and {name for name, _ in one.named_parameters()} == set(theirs)
        assert not [name for name, value in one.named_parameters() if not torch.equal(value, theirs[name])]

    return check
