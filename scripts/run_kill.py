#!/usr/bin/env python3
"""Kill a training run with SIGKILL at random moments, again and again: it ends with the bits of the run that was not.

Each round is one run of a small model with ``durable``, a learning-rate schedule, dropout, clipping and a data loader
that draws from the random generator. It is killed at a random moment (also in commits, checkpoints, retention, resume)
and started again, with other budgets, until it is through. In half of the rounds checkpoints go to another file system,
behind the training. Every loss that it ever printed for a step, and the final weights, must be those of a run in memory
that was never killed; no file may be left but the store and the checkpoints. A run tells where it is, so that at least
a third of the kills come while a checkpoint is saved, older ones are removed, or the run goes on from a commit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from offload import BudgetError, OffloadEngine
from offload.checkpoint.native.folder import SavingDirectory

PHASES = ("training", "saving", "retention", "resuming")
_phase = mmap.mmap(-1, 1)
"""The phase in which the run is, for whoever kills it: forked processes share this memory."""

NUM_STEPS = 12
ELSEWHERE = "/dev/shm"
WIDTH = 48
VOCAB = 300


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB))


def make_engine(settings: dict[str, object]) -> OffloadEngine:
    return OffloadEngine(make_model(), lr=1e-2, gradient_clipping=1.0, precision="fp32", **settings)


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    before, _phase[0] = _phase[0], PHASES.index(name)
    try:
        yield
    finally:
        _phase[0] = before


@contextlib.contextmanager
def phases_are_told() -> Iterator[None]:
    unfinished, retain = SavingDirectory.unfinished, SavingDirectory.retain

    @contextlib.contextmanager
    def saving(directory: SavingDirectory) -> Iterator[Path]:
        with in_phase("saving"), unfinished(directory) as folder:
            yield folder

    def retention(directory: SavingDirectory, *numbers: int) -> None:
        with in_phase("retention"):
            retain(directory, *numbers)

    with (
        mock.patch.object(SavingDirectory, "unfinished", saving),
        mock.patch.object(SavingDirectory, "retain", retention),
    ):
        yield


def train(
    engine: OffloadEngine,
    checkpoints: Path | None = None,
    log: Path | None = None,
    resume: Path | None = None,
    save_every: int = 4,
) -> list[tuple[int, str]]:
    """Go on to the last step, from what is durable or from ``resume``.

    Returns the losses, as hexadecimal numbers, and appends them to the file ``log``.
    """
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 3, 0.5)
    engine.register_for_checkpointing(schedule)
    if engine.config.durable:
        with in_phase("resuming"):
            engine.load_checkpoint()
    elif resume is not None:
        engine.load_checkpoint(resume)
    losses = []
    while engine.global_step < NUM_STEPS:
        batch = torch.randint(0, VOCAB, (2, 8))  # from the state that the last step left
        loss = nn.functional.cross_entropy(engine(batch).flatten(0, 1), batch.flatten())
        engine.backward(loss)
        engine.step()
        schedule.step()
        losses.append((engine.global_step, loss.item().hex()))
        if log is not None:
            with log.open("a") as file:
                file.write(f"{engine.global_step} {loss.item().hex()}\n")
        if checkpoints is not None and engine.global_step % save_every == 0:
            engine.save_checkpoint(checkpoints)
    return losses


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().clone().numpy().tobytes())
    return found.hexdigest()


def life(folder: Path, checkpoints: Path, host_memory: str, durable: int, save_every: int) -> None:
    """What is killed."""
    settings = {"nvme_path": folder / "nvme", "host_memory": host_memory, "durable": durable, "keep_last": 2}
    with phases_are_told(), make_engine(settings) as engine:
        torch.manual_seed(7)
        train(engine, checkpoints, folder / "log", save_every=save_every)
        final = digest(engine.module)
    (folder / "end").write_text(final)


class Story:
    """One run that is killed until it is through."""

    def __init__(self, rng: random.Random, expected: dict[int, str], final: str, budgets: tuple[str, str]) -> None:
        self._rng = rng
        self._expected = expected
        self._final = final
        self._budgets = budgets
        self.kills: Counter[str] = Counter()
        """By the phase in which they came."""

    def live(self) -> None:
        durable = self._rng.choice([1, 1, 2, 3])
        save_every = self._rng.choice([4, 4, NUM_STEPS])  # each checkpoint ends the log of updates
        elsewhere = self._rng.random() < 0.5
        with (
            tempfile.TemporaryDirectory() as name,
            tempfile.TemporaryDirectory(dir=ELSEWHERE if elsewhere else None) as checkpoints,
        ):
            folder = Path(name)
            (folder / "nvme").mkdir()
            (folder / "log").touch()
            while not (folder / "end").exists():
                self._run_once(folder, Path(checkpoints), durable, save_every)
            found = (folder / "end").read_text()
            if found != self._final:
                raise SystemExit(f"the final weights differ: {found}, {self._final} was expected")
            self._check(folder, Path(checkpoints))

    def _run_once(self, folder: Path, checkpoints: Path, durable: int, save_every: int) -> None:
        budget = self._rng.choice(self._budgets)
        size = (folder / "log").stat().st_size
        _phase[0] = 0
        process = start(lambda: life(folder, checkpoints, budget, durable, save_every))
        status = None
        kind = self._rng.random()
        if kind < 0.5:  # in a phase that a run is in for a moment
            wanted = self._rng.randrange(1, len(PHASES))
            while (status := ended(process)) is None and _phase[0] != wanted:
                time.sleep(0.0003)
            delay_s = self._rng.expovariate(1 / 0.003)
        elif kind < 0.65:  # while it starts, or resumes
            delay_s = self._rng.uniform(0.0, 0.6)
        else:  # after it has begun to train
            while (status := ended(process)) is None and (folder / "log").stat().st_size == size:
                time.sleep(0.001)
            delay_s = self._rng.expovariate(1 / 0.3)
        deadline = time.monotonic() + delay_s
        while status is None and time.monotonic() < deadline:
            time.sleep(min(0.001, delay_s))
            status = ended(process)
        if status is None:
            os.kill(process, signal.SIGKILL)
            self.kills[PHASES[_phase[0]]] += 1
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status not in (0, -signal.SIGKILL):
            raise SystemExit(f"the run ended with {status}")
        for line in (folder / "log").read_text().splitlines():
            if len(line.split()) == 2:
                step, loss = line.split()
                if self._expected[int(step)] != loss:
                    raise SystemExit(f"step {step} has loss {loss}, {self._expected[int(step)]} was expected")

    def _check(self, folder: Path, checkpoints: Path) -> None:
        """A checkpoint resumes, too, and nothing is left over."""
        stores = [entry.name for entry in (folder / "nvme").iterdir()]
        if len(stores) != 1:
            raise SystemExit(f"left under nvme_path: {stores}")
        tags = [entry.name for entry in checkpoints.glob("step*")]  # none if it was killed before each of them
        if len(tags) > 3:  # it may have been killed before the oldest was removed
            raise SystemExit(f"checkpoints: {tags}")
        if not tags:
            return
        if result(lambda: resumed(checkpoints)) != self._final:
            raise SystemExit("a run that goes on from the last checkpoint ends with other weights")


def resumed(checkpoints: Path) -> str:
    """The final weights of a run in memory that goes on from the last checkpoint."""
    with make_engine({}) as engine:
        train(engine, resume=checkpoints)
        return digest(engine.module)


def reference() -> tuple[list[tuple[int, str]], str]:
    """Losses and final weights of the run that is never killed."""
    with make_engine({}) as engine:
        torch.manual_seed(7)
        losses = train(engine)
        return losses, digest(engine.module)


def least_budget() -> int:
    with tempfile.TemporaryDirectory() as path:
        try:
            make_engine({"nvme_path": path, "host_memory": 1, "durable": 1}).close()
        except BudgetError as error:
            return error.needed_bytes
    raise SystemExit("one byte of host memory is enough")


# Processes are forked from this one, which has imported everything and used nothing: a life begins in milliseconds.


def start(call: Callable[[], object]) -> int:
    """Make the call in a process of its own; its id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return process


def ended(process: int) -> int | None:
    """Its exit status, None while it runs."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def result(call: Callable[[], Any]) -> Any:
    """What the call returns in a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        process = start(lambda: Path(file.name).write_text(json.dumps(call())))
        if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            raise SystemExit("a process of the campaign failed")
        return json.loads(Path(file.name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1000)
    arguments = parser.parse_args()
    losses, final = result(reference)
    expected = dict(losses)
    least = result(least_budget)
    rng = random.Random(arguments.seed)
    kills, num_runs = Counter[str](), 0
    while kills.total() < arguments.kills:
        story = Story(rng, expected, final, (str(least), str(least * 3 // 2), "1GiB"))
        story.live()
        kills, num_runs = kills + story.kills, num_runs + 1
        print(f"{num_runs} runs, {kills.total()} kills: the same bits {dict(kills)}", flush=True)


if __name__ == "__main__":
    main()
