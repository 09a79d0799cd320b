"""Two threads in one model at a time: one of them is told, in words that name the way out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of

from offload import OffloadEngine
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
