#!/usr/bin/env python3
"""Cut the power under a whole training run, in memory: the run that resumes has the bits of one that was not cut.

A run with ``durable=1`` trains on a disk that records what is done to it. A crash is put after each of its events; of
what was not synced anything may be there, see ``store_crash_states.py``. From each such disk (a random choice of them)
a new engine resumes: it must stand at a step whose commit was acknowledged or begun, and its weights, masters and
optimizer states must be those that a run in memory has after that step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from store_crash_states import Recorder, crash_states
from store_ram_disk import RamDevice, RamDirectory, RamDisk
from torch import nn

import offload.tiers.store
import swapper.folders
from offload import BudgetError, OffloadEngine

DISK_BYTES = 24 << 20
NUM_STEPS = 4
WIDTH = 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)], nn.Linear(WIDTH, 1))


def train(engine: OffloadEngine) -> None:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(engine.global_step))
    engine.backward(engine(batch).square().mean())
    engine.step()


def digest(engine: OffloadEngine) -> str:
    """Of weights, masters and states."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        found.update(parameter.detach().clone().float().numpy().tobytes())
    states = engine.optimizer.state_dict()["state"]
    for key in sorted(states):
        for name in sorted(states[key]):
            found.update(states[key][name].float().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def on_disk(disk: RamDisk, folder: Path) -> Iterator[None]:
    """Durable stores are on ``disk``: in ``folder`` there are their names alone."""
    store = folder / "run-1.store"
    store.mkdir(mode=0o700, exist_ok=True)
    with (store / "data.0").open("ab") as file:
        file.truncate(DISK_BYTES)
    (store / "data.0").chmod(0o600)
    with (
        mock.patch.object(swapper.folders, "open_device", lambda *_, **__: RamDevice(disk)),
        mock.patch.object(swapper.folders, "RealDirectory", lambda _: RamDirectory(disk)),
        mock.patch.object(offload.tiers.store, "remove_store", lambda *_: disk.files.clear()),
    ):
        yield


def least_budget(options: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as path:
        try:
            OffloadEngine(make_model(), nvme_path=path, host_memory=1, durable=1, **options).close()
        except BudgetError as error:
            return error.needed_bytes
    raise SystemExit("one byte of host memory is enough")


class Story:
    """One run, and all the ways in which it may be cut."""

    def __init__(self, options: dict[str, Any], budget: int | str) -> None:
        self._options = options
        self._budget = budget
        self.counts = {"states": 0, "at the acknowledged step": 0, "at the next": 0, "before the first": 0}
        with OffloadEngine(make_model(), **options) as engine:
            self._expected = {}
            for step in range(1, NUM_STEPS + 1):
                train(engine)
                self._expected[step] = digest(engine)

    def tell(self, wanted: int, seed: int) -> None:
        disk = RamDisk(bytearray(DISK_BYTES))
        recorder = Recorder(disk)
        with self._engine(disk) as engine:
            for _ in range(NUM_STEPS):
                train(engine)
                engine._session.checkpoints.pass_boundary()
                recorder.mark("begun", engine.global_step)
                engine._session.checkpoints.generations.wait()
                recorder.mark("done", engine.global_step)
        rng = random.Random(seed)
        share = wanted / (2 * len(recorder.events))
        for state, marks in crash_states(recorder, 2, seed):
            if rng.random() < share:
                self._resume(state, marks)

    @contextlib.contextmanager
    def _engine(self, disk: RamDisk) -> Iterator[OffloadEngine]:
        with tempfile.TemporaryDirectory() as folder, on_disk(disk, Path(folder)):
            options = {"nvme_path": folder, "host_memory": self._budget, "durable": 1, **self._options}
            with OffloadEngine(make_model(), **options) as engine:
                yield engine

    def _resume(self, disk: RamDisk, marks: list[tuple[Any, ...]]) -> None:
        acknowledged = max((step for what, step in marks if what == "done"), default=0)
        self.counts["states"] += 1
        with self._engine(disk) as engine:
            engine.load_checkpoint()
            step = engine.global_step
            if step not in (acknowledged, acknowledged + 1):
                raise SystemExit(f"resumed at step {step}, {acknowledged} was acknowledged")
            which = (
                "before the first"
                if not step
                else "at the acknowledged step"
                if step == acknowledged
                else "at the next"
            )
            self.counts[which] += 1
            if step and digest(engine) != self._expected[step]:
                raise SystemExit(f"resumed at step {step} with other bits")
            engine._session.failure.record(RuntimeError("no commit at the end"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--states", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    programs: list[dict[str, Any]] = [
        {"lr": 1e-2},
        {"lr": 1e-2, "precision": "bf16", "gradient_clipping": 0.1},
        {"lr": 1e-2, "moments_dtype": "int8"},
    ]
    for options in programs:
        least = least_budget(options)
        for budget in (least, least * 3 // 2, "1GiB"):
            story = Story(options, budget)
            story.tell(arguments.states // (3 * len(programs)), arguments.seed)
            print(f"{options}, host memory {budget}: {story.counts}", flush=True)


if __name__ == "__main__":
    main()
