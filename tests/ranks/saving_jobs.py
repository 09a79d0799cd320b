"""Ranks that save or load other things than each other, in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks.jobs import train
from ranks.programs import WEIGHTS, Program, raised


def two_of_one_step(rank: int, size: int, folder: Path) -> None:
    """Save ``first`` and, from other data, ``second``: both at step 1. And a step of a durable run each."""
    for name in ("first", "second"):
        store = folder / f"store of {name}"
        store.mkdir(exist_ok=True)
        with Program(options={"durable": 1}).placed(WEIGHTS, store) as engine:
            train(engine, range(1) if name == "first" else range(7, 8), rank, size)
            engine.save_checkpoint(folder / "saved", name)


def load(rank: int, size: int, folder: Path, tags: tuple[str, str]) -> str:
    """What is said where each rank takes the checkpoint of its own tag."""

    def loads() -> None:
        with Program(options={"rank_timeout": 10}).placed(WEIGHTS, folder) as engine:
            engine.load_checkpoint(folder / "saved", tags[rank])

    return raised(loads)


def go_on(rank: int, size: int, stores: tuple[Path, Path]) -> str:
    """What is said where each rank goes on with the store of a run of its own."""

    def goes_on() -> None:
        with Program(options={"durable": 1, "rank_timeout": 10}).placed(WEIGHTS, stores[rank]) as engine:
            engine.load_checkpoint()

    return raised(goes_on)


def save(rank: int, size: int, folder: Path) -> str:
    """What is said where each rank saves under a tag of its own."""

    def saves() -> None:
        with Program(options={"rank_timeout": 10}).placed(WEIGHTS, folder) as engine:
            engine.save_checkpoint(folder / "saved", f"of-{rank}")

    return raised(saves)


def state_of_one(rank: int, size: int, folder: Path) -> tuple[str, Any]:
    """What is said where the last rank has a state that cannot be saved, and what is saved and loaded afterwards."""
    with Program().placed(WEIGHTS, folder) as engine:
        state = object() if rank == size - 1 else 1
        said = raised(lambda: engine.save_checkpoint(folder / "saved", client_state=state))
        train(engine, range(1), rank, size)
        engine.save_checkpoint(folder / "saved", client_state=rank)
        return said, engine.load_checkpoint(folder / "saved")
