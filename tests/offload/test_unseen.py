"""The engine's own work is not shown to modes of the program's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, loss_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from offload import BudgetError, OffloadEngine
from offload.torch_internals import dispatch_modes, function_modes, unseen

ACTIVATIONS = ("keep", "host", "nvme", "recompute")


class Calls(TorchFunctionMode):
    """Counts what is called, but for what torch's own checkpoint looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[function] += function != torch.Tensor.device.__get__  # type: ignore[attr-defined]
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations, but for what autograd detaches for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[function] += function is not torch.ops.aten.detach.default
        return function(*args, **(kwargs or {}))


def _built() -> Tiny:
    torch.manual_seed(0)
    return Tiny(32, 4, 64)


def _seen(mode: Any, call: Any, step: Any) -> Counter[Any]:
    for tokens, targets in batches(2, 64):
        with mode:
            loss_of(call(tokens), targets).backward()
        step()
    return +mode.found


@pytest.mark.parametrize("kind", [Calls, Operations])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("is_tight", [False, True])
def test_modes_see_what_they_see_without_the_engine(
    kind: Any, activations: str, is_tight: bool, tmp_path: Path
) -> None:
    plain = _built()
    optimizer = torch.optim.AdamW(plain.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    expected = _seen(kind(), plain, step)
    options: dict[str, Any] = {"precision": "fp32", "activations": activations, "nvme_path": tmp_path}
    if is_tight:
        options["tile_bytes"] = 65536
        with pytest.raises(BudgetError) as error:
            OffloadEngine(_built(), **options, host_memory=1)
        options["host_memory"] = error.value.needed_bytes
    with OffloadEngine(_built(), **options) as engine:
        assert _seen(kind(), engine, engine.step) == expected


def test_modes_are_as_before_after_own_work_that_raises() -> None:
    with Calls() as outer, Operations() as inner, torch.device("meta"):
        before = function_modes(), dispatch_modes()
        with pytest.raises(ZeroDivisionError), unseen():
            assert not function_modes() and not dispatch_modes()
            assert torch.empty(1).device.type == "cpu"
            _ = 1 / 0
        assert (function_modes(), dispatch_modes()) == before
    assert not +inner.found and torch.empty not in outer.found


class Scaling(nn.Module):
    """A mode of the block's own counts operations, and the count is part of the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Calls() as calls:
            y = self.down(torch.tanh(self.up(x)))
        return x + y * calls.found.total() / 10


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_block_scales_by_the_number_of_its_calls(activations: str, tmp_path: Path) -> None:
    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Scaling() for _ in range(4)])

    x = torch.randn(4, 8)
    expected = built()(x)
    with OffloadEngine(built(), precision="fp32", activations=activations, nvme_path=tmp_path) as engine:
        assert torch.equal(engine(x), expected)
