"""A finalizer may run at any line, on any thread: one that looks into the model is answered or refused, and never waits
for its own thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny import Tiny, batches, least_budget, loss_of
from torch import nn

import offload.waiting
from offload import OffloadEngine
from swapper import OffloadError


class Looks:
    """At each line of a step and its updates, the first time that a thread comes there, reads a weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self.refused: dict[str, OffloadError] = {}
        """By the thread's name."""
        self._layer = layer
        self._seen: set[tuple[str, Any, int]] = set()
        self._looking = False

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if Path(frame.f_code.co_filename).name not in ("step.py", "updater.py", "waiting.py", "speculative.py"):
            return None
        name = threading.current_thread().name
        place = name, frame.f_code, frame.f_lineno
        if event == "line" and place not in self._seen and not self._looking:
            self._seen.add(place)
            self._looking = True
            try:
                self._layer.weight.norm().item()
            except OffloadError as error:
                self.refused[name] = error
            self._looking = False
        return self.trace


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_look_at_a_weight_from_any_line_of_a_step_waits_for_nothing_that_its_thread_must_do(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.waiting, "WAIT_TIMEOUT_S", 5.0)
    options: dict[str, Any] = {"lr": 1e-2}
    if tier == "nvme":
        options |= {"nvme_path": tmp_path, "host_memory": least_budget(Tiny(), tmp_path, lr=1e-2)}
    before = sys.gettrace()
    model = Tiny()
    looks = Looks(model.blocks[1].up)
    threading.settrace(looks.trace)
    try:
        with OffloadEngine(model, **options) as engine:
            for tokens, targets in batches(3):
                engine.backward(loss_of(engine(tokens), targets))
                sys.settrace(looks.trace)
                engine.step()
                sys.settrace(before)
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]
    assert {"MainThread", "offload-update"} <= looks.refused.keys()
    assert all("finalizer" in str(error) for error in looks.refused.values()), looks.refused
