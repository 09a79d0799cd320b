"""What a job of ``run_administrator.py`` does: a small run that trains, commits and saves, and tells what is done."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from run_kill import digest
from torch import nn

from offload import BudgetError, OffloadEngine
from offload.checkpoint.native.mark import read_mark
from swapper import StorageCorrupt, StoreLocked, StoreUnsafe

KEEP_LAST = 2
STEPS_MAX = 60
WIDTH = 32


def make_engine(**options: object) -> OffloadEngine:
    torch.manual_seed(0)
    return OffloadEngine(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), lr=1e-2, **options)


def step(engine: OffloadEngine) -> None:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(engine.global_step))
    engine.backward(nn.functional.mse_loss(engine(inputs), inputs))
    engine.step()


def reference() -> list[str]:
    """The weights after each step, whoever trains."""
    with make_engine() as engine:
        found = [digest(engine.module)]
        for _ in range(STEPS_MAX):
            step(engine)
            found.append(digest(engine.module))
        return found


def least_budget() -> int:
    with tempfile.TemporaryDirectory() as path:
        try:
            make_engine(nvme_path=path, host_memory=1, durable=1).close()
        except BudgetError as error:
            return error.needed_bytes
    raise SystemExit("one byte of host memory is enough")


def weights_of(directory: Path, tag: str) -> tuple[int, str]:
    """Step and weights of a checkpoint, loaded."""
    with make_engine() as engine:
        engine.load_checkpoint(directory, tag)
        return engine.global_step, digest(engine.module)


@dataclass
class Job:
    """One process that trains. ``log`` has a line for each thing that it has been told is done, with the time."""

    process: int
    log: Path
    durable: bool
    num_taken: int = 0
    """Lines of the log that the administrator has read."""

    def new_lines(self) -> list[list[str]]:
        lines = self.log.read_text().split("\n")[:-1]
        new, self.num_taken = lines[self.num_taken :], len(lines)
        return [line.split(" ") for line in new]


def train(folder: Path, log: Path, saved: Path, budget: int, seed: int, *, durable: bool) -> None:
    """What a job does."""
    rng = random.Random(seed)

    def told(*words: object) -> None:
        with log.open("a") as file:
            file.write(" ".join(map(str, (time.monotonic_ns(), *words))) + "\n")

    try:
        engine = make_engine(nvme_path=folder / "nvme", host_memory=budget, keep_last=KEEP_LAST, durable=int(durable))
        with engine:
            if durable:
                engine.load_checkpoint()
                told("resumed", engine.global_step, digest(engine.module))
            elif tags := sorted(entry.name for entry in saved.glob("[!.]*") if read_mark(entry) is not None):
                with contextlib.suppress(Exception):  # the administrator may be moving it
                    engine.load_checkpoint(saved, rng.choice(tags) if rng.random() < 0.5 else None)
            for _ in range(rng.randrange(2, 9)):
                if engine.global_step == STEPS_MAX:
                    break
                step(engine)
                if durable:
                    engine._session.checkpoints.pass_boundary()
                    engine._session.checkpoints.generations.wait()
                    told("durable", engine.global_step)
                if rng.random() < 0.6:
                    tag = "best" if rng.random() < 0.2 else None
                    engine.save_checkpoint(saved, tag)
                    run = engine._session.checkpoints._identity.value
                    marks = [
                        mark for mark in map(read_mark, saved.glob("[!.]*")) if mark is not None and mark.run == run
                    ]
                    if marks:  # else the administrator has moved it
                        newest = max(marks, key=lambda mark: mark.number)
                        told("saved", run, newest.number, newest.tag)
            engine.close(discard=True)
    except StorageCorrupt as error:
        told("corrupt", str(error.args[0]).replace("\n", " "))
    except StoreLocked:
        told("locked")
    except StoreUnsafe as error:
        told("unsafe", str(error.args[0]).replace("\n", " "))
