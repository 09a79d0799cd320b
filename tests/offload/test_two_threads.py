"""Two threads in one model at a time: one of them is told, in words that name the way out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from tiny import Block, Tiny, batches, least_budget, loss_of
from torch import nn

from offload import OffloadEngine
from offload.model.hook_context import HookContext
from offload.torch_internals import top_saved_tensors_hooks
from swapper import OffloadError


def evaluate(engine: OffloadEngine, tokens: torch.Tensor, stop: Event) -> None:
    with torch.no_grad():
        while not stop.is_set():
            engine(tokens)


@pytest.mark.parametrize("activations", ["keep", "recompute", "nvme"])
def test_of_two_threads_in_the_model_one_is_told_to_wait_for_its_turn(activations: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"nvme_path": tmp_path, "lr": 1e-2, "activations": activations}
    options["host_memory"] = least_budget(Tiny(), tmp_path, activations=activations, lr=1e-2)
    tokens, targets = batches(1)[0]
    found: list[str] = []
    for _ in range(4):
        stop = Event()
        with OffloadEngine(Tiny(), **options) as engine, ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(evaluate, engine, tokens, stop)
            try:
                for _ in range(12):
                    engine.backward(loss_of(engine(tokens), targets))
                    engine.step()
            except OffloadError as error:
                found.append(str(error))
            stop.set()
            found += [str(error)] if (error := evaluation.exception()) is not None else []
    assert found and all("two threads run the model at once" in message for message in found), found


class Waits(Block):
    """A block whose second call waits."""

    num_calls = 0
    inside: Event
    go_on: Event

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Waits.num_calls += 1
        if Waits.num_calls == 2:
            self.inside.set()
            assert self.go_on.wait(60)
        return super().forward(x)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_thread_that_comes_to_a_unit_in_use_is_refused_and_the_other_one_goes_on(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``is_late``: it has seen that nobody uses the unit, and is refused when somebody does."""
    tokens, targets = batches(1)[0]
    Waits.inside, Waits.go_on, Waits.num_calls = Event(), Event(), 0
    before, at_door = Event(), Event()
    model = Tiny()
    model.blocks = nn.ModuleList(Waits(128) for _ in range(4))
    enter = HookContext.enter

    def wait_at_door(context: HookContext, **options: bool) -> None:
        if get_ident() == own:
            at_door.set()
            assert Waits.inside.wait(60)
        enter(context, **options)

    own = get_ident()
    with OffloadEngine(model, lr=1e-2) as engine, ThreadPoolExecutor(1) as pool:
        if is_late:
            monkeypatch.setattr(HookContext, "enter", wait_at_door)
            model.blocks[0].register_forward_hook(lambda *_: before.set() or (at_door.wait(60) and None))
        training = pool.submit(lambda: engine.backward(loss_of(engine(tokens), targets)))
        assert (before if is_late else Waits.inside).wait(60)
        try:
            with pytest.raises(OffloadError, match="two threads run the model at once"):
                model.blocks[1](torch.ones(1, 128))
            assert Waits.num_calls == 2
        finally:
            Waits.go_on.set()
        training.result()
        engine.step()
        assert pool.submit(top_saved_tensors_hooks).result() is None
