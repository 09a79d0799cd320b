"""Programs that run several times over: as they are, with blocks that are recomputed, with activations over the tiers,
with micro-batches together, and with a checkpoint from which another engine goes on in their middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from misuses.case import Family
from misuses.exact import SGD
from misuses.place import gradients
from misuses.strangers import WIDTH, Net

ROWS = 160
"""An activation of 20 KiB: smaller ones than 16 KiB stay where they are."""


def batch(index: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


class Run:
    """A program's way to an engine. ``joint`` is the name of one of ``JOINTS``."""

    def __init__(self, place: Any, joint: str) -> None:
        self.place = place
        self.joint = joint

    def engine(self, model: nn.Module | None = None, **options: Any) -> Any:
        if "recomputed" in self.joint:
            options = {"activations": "recompute", **options}
        if "over the tiers" in self.joint:
            tier = "nvme" if self.place.name == "nvme" else "host"
            options = {"activations": tier, "activation_memory": "4MiB", **options}
        if "mixed" in self.joint:
            tier = "nvme" if self.place.name == "nvme" else "host"
            by_unit = {"*.0": "keep", "*.1": "recompute", "*.2": "host", "*": tier}
            options = {"activations": by_unit, "activation_memory": "4MiB", **options}
        if not self.place.has_engine:
            options = {name: value for name, value in options.items() if not name.startswith("activation")}
        return self.place.wrap(Net() if model is None else model, **{**SGD, **options})

    def accumulate(self, engine: Any, items: Any, body: Callable[[Any], Any]) -> list[Any]:
        """The body of a loop over micro-batches, called with each."""
        return engine.together(items, body) if "together" in self.joint else [body(item) for item in items]

    def resume(self, engine: Any, build: Callable[[], nn.Module] = Net, **options: Any) -> Any:
        """The engine, or where a run is saved and goes on elsewhere, another one that has all of it from files."""
        if "resumed" not in self.joint or not self.place.has_engine:
            return engine
        engine.save_checkpoint(self.place.folder / "saved")
        engine.close()
        self.place.left.remove(engine)
        state = torch.random.get_rng_state()
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        torch.random.set_rng_state(state)
        engine = self.engine(model, **options)
        engine.load_checkpoint(self.place.folder / "saved")
        return engine


JOINTS = ("plain", "recomputed", "over the tiers", "together", "resumed")
PLAIN = JOINTS[:3]
ACCUMULATED = JOINTS[:4]
RESUMED = (*JOINTS[:3], "resumed")
PAIRS = ("together, recomputed", "together, over the tiers", "resumed, recomputed")
"""Two at once."""
TODAY = ("plain", "mixed", "together, over the tiers", "resumed")
"""``mixed``: each block has another word of ``activations=``."""


def program(
    family: Family,
    title: str,
    joints: tuple[str, ...] = PLAIN,
    refused: dict[str, str] | None = None,
    differs: dict[str, str] | None = None,
    **options: Any,
) -> Callable[[Any], Any]:
    """A decorator: one case for each joint, whose bits are compared. At those that are ``refused`` the engine's error
    must match a pattern; where it ``differs``, the documentation says why."""

    def add(body: Callable[[Run], Any]) -> Callable[[Run], Any]:
        for joint in joints:

            def case(place: Any, joint: str = joint) -> Any:
                return body(Run(place, joint))

            case.__name__ = (
                body.__name__ if joint == "plain" else f"{body.__name__}_{joint.replace(',', '').replace(' ', '_')}"
            )
            told = title if joint == "plain" else f"{title} ({joint})"
            if joint in (refused or {}):
                family.refused(told, (refused or {})[joint], **options)(case)
            elif joint in (differs or {}):
                family.differs(told, (differs or {})[joint], rtol=0.0, atol=0.0, **options)(case)
            else:
                family.same_bits(told, **options)(case)
        return body

    return add


def stepped(engine: Any) -> dict[str, Any]:
    """The gradients of a step, which is taken."""
    found = gradients(engine.module)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return found
