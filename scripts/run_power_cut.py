#!/usr/bin/env python3
"""Cut the power under a whole training run, in memory: the run that resumes has the bits of one that was not cut.

A run with ``durable=1`` trains on a disk that records what is done to it. A crash is put after each of its events; of
what was not synced anything may be there, writes and changes of names in any order, see ``store_crash_states.py``. What
each such disk holds is taken up, as a run that goes on would: it must be the generation that was acknowledged or the
next, with the manifest that the run wrote, and every byte of it whole. From one of so many an engine resumes: its
weights, masters and optimizer states must be those that a run in memory has after that step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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

import aio_ext
import offload.tiers.store
import swapper.folders
from offload import BudgetError, OffloadEngine
from swapper import StoreMissing
from swapper.manifest import Manifest
from swapper.opening import take_up
from swapper.publication import NEW

DISK_BYTES = 24 << 20
NUM_STEPS = 10
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
        self._memory = aio_ext.Memory(DISK_BYTES)
        self.counts = {"cuts": 0, "resumed": 0, "at the acknowledged step": 0, "at the next": 0, "before the first": 0}
        with OffloadEngine(make_model(), **options) as engine:
            self._expected = {}
            for step in range(1, NUM_STEPS + 1):
                train(engine)
                self._expected[step] = digest(engine)

    def tell(self, wanted: int, every: int, seed: int) -> None:
        disk = RamDisk(bytearray(DISK_BYTES))
        recorder = Recorder(disk)
        with self._engine(disk) as engine:
            for _ in range(NUM_STEPS):
                train(engine)
                engine._session.checkpoints.pass_boundary()
                recorder.mark("begun", engine.global_step)
                engine._session.checkpoints.generations.wait()
                recorder.mark("done", engine.global_step)
        written = [event[2] for event in recorder.events if event[:2] == ("create", NEW)]
        manifests = {manifest.generation: manifest for manifest in map(Manifest.decode, written)}
        points = sum(event[0] != "mark" for event in recorder.events)
        for state, marks in crash_states(recorder, -(-wanted // points), seed, wanted / points):
            self._take_up(RamDisk(state.data, dict(state.files)), marks, manifests)
            if self.counts["cuts"] % every == 0:
                self._resume(state, marks)
            self.counts["cuts"] += 1

    def _take_up(self, disk: RamDisk, marks: list[tuple[Any, ...]], manifests: dict[int, Manifest]) -> None:
        """Read every byte of the generation that the disk holds, which must be the right one."""
        acknowledged = max((step for what, step in marks if what == "done"), default=0)
        try:
            store = take_up(RamDirectory(disk), lambda _: RamDevice(disk), "the disk", reserved=())
        except StoreMissing:
            if acknowledged:
                raise SystemExit(f"nothing is there, and step {acknowledged} was acknowledged") from None
            return
        with store:
            number = store.generation
            if number not in (acknowledged, acknowledged + 1):
                raise SystemExit(f"the disk holds generation {number}, and {acknowledged} was acknowledged")
            if store.manifest_of(number) != manifests[number]:
                raise SystemExit(f"generation {number} is not the one that the run has committed")
            for extent in store.extents:
                if store.holds(extent):
                    store.read(extent, self._memory.address, extent.nbytes).wait()

    @contextlib.contextmanager
    def _engine(self, disk: RamDisk) -> Iterator[OffloadEngine]:
        with tempfile.TemporaryDirectory() as folder, on_disk(disk, Path(folder)):
            options = {"nvme_path": folder, "host_memory": self._budget, "durable": 1, **self._options}
            with OffloadEngine(make_model(), **options) as engine:
                yield engine

    def _resume(self, disk: RamDisk, marks: list[tuple[Any, ...]]) -> None:
        acknowledged = max((step for what, step in marks if what == "done"), default=0)
        self.counts["resumed"] += 1
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
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=50, help="from one of so many an engine resumes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    programs: list[dict[str, Any]] = [
        {"lr": 1e-2},
        {"lr": 1e-2, "precision": "bf16", "gradient_clipping": 0.1},
        {"lr": 1e-2, "moments_dtype": "int8"},
    ]
    num_cuts = 0
    for options in programs:
        least = least_budget(options)
        for budget in (least, least * 3 // 2, "1GiB"):
            story = Story(options, budget)
            story.tell(arguments.cuts // (3 * len(programs)), arguments.every, arguments.seed)
            num_cuts += story.counts["cuts"]
            print(f"{options}, host memory {budget}: {story.counts}", flush=True)
    print(f"{num_cuts} cuts: nothing was lost", flush=True)


if __name__ == "__main__":
    main()
