#!/usr/bin/env python3
"""A random administrator beside a training run: what was acknowledged, and nobody removed, is there and whole.

Small jobs train in one folder, with and without ``durable``, into one directory of checkpoints or into ``nvme_path``
itself, alone or two at a time, and are killed at random moments. Meanwhile, and between them, the administrator moves,
renames, copies, links and removes checkpoints and the directories that they are in, copies and links stores, puts older
ones back, and loses a manifest. After each job every checkpoint that ``save_checkpoint`` has returned from, and every
copy, is read whole; what retention has removed must have been its to remove; a durable run must resume at the last step
that was committed, or say why not. Prints what was done, and fails with the first thing that was lost or changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from run_kill import digest, ended, result, start
from torch import nn

from offload import BudgetError, OffloadEngine
from offload.checkpoint.native.inspection import inspect
from offload.checkpoint.native.mark import read_mark
from swapper import StorageCorrupt
from swapper.publication import published

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
    """One process that trains. ``log`` has a line for each thing that it has been told is done."""

    process: int
    log: Path
    durable: bool
    num_taken: int = 0
    """Lines of the log that the administrator has read."""


def train(folder: Path, log: Path, saved: Path, budget: int, seed: int, *, durable: bool) -> None:
    """What a job does."""
    rng = random.Random(seed)

    def told(*words: object) -> None:
        with log.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

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


Key = tuple[str, int]
"""A checkpoint by its mark: run and number. Copies have the same."""


class Administrator:
    """Knows what is where, and looks after each job whether it is."""

    def __init__(self, folder: Path, rng: random.Random, expected: list[str], budget: int) -> None:
        self._folder = folder
        self._rng = rng
        self._expected = expected
        self._budget = budget
        self._jobs: list[Job] = []
        self._num_jobs = self._num_copies = 0
        self.done: Counter[str] = Counter()
        self._known: dict[Path, tuple[Key, int]] = {}
        """Checkpoints that must be there, with their steps: those acknowledged, and copies of them."""
        self._seen: dict[Key, str] = {}
        """Tags under which checkpoints were ever saved."""
        self._acknowledged: dict[Key, str] = {}
        """Tags of those that ``save_checkpoint`` has returned from."""
        self._stores: dict[Path, int] = {}
        """Copies of stores that must be there, with their steps."""
        self._durable: int | None = None
        """Step at which the durable run must go on, at least."""
        self._is_damaged = False
        (folder / "nvme").mkdir()
        (folder / "attic").mkdir()

    # Jobs.

    def start_job(self) -> None:
        durable = self._rng.random() < 0.6 and not any(job.durable for job in self._jobs)
        saved = self._folder / self._rng.choice(["saved", "saved", "nvme"])
        self._num_jobs += 1
        log, seed = self._folder / f"log-{self._num_jobs}", self._num_jobs
        log.touch()
        process = start(lambda: train(self._folder, log, saved, self._budget, seed, durable=durable))
        self._jobs.append(Job(process, log, durable))
        self.done["job"] += 1

    def end_jobs(self) -> None:
        """Wait for all of them, or kill them, and see what they leave."""
        for job in self._jobs:
            status, kills = None, self._rng.random() < 0.5
            deadline = time.monotonic() + 120
            while status is None and time.monotonic() < deadline:
                if kills and job.log.stat().st_size:  # it has begun to train, or to say why not
                    kills, deadline = False, time.monotonic() + self._rng.expovariate(3)
                time.sleep(0.002)
                status = ended(job.process)
            if status is None:
                os.kill(job.process, signal.SIGKILL)
                self.done["kill"] += 1
                status = os.waitstatus_to_exitcode(os.waitpid(job.process, 0)[1])
            if status not in (0, -signal.SIGKILL):
                raise SystemExit(f"a job ended with {status}")
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            self._take_log(job)
        self._check_acknowledged()
        self._look_at_all()

    def _take_log(self, job: Job) -> None:
        lines = job.log.read_text().split("\n")[:-1]
        new, job.num_taken = lines[job.num_taken :], len(lines)
        for line in new:
            kind, *words = line.split(" ")
            if kind == "durable":
                self._durable = int(words[0])
            elif kind == "corrupt":
                if not self._is_damaged:
                    raise SystemExit(f"a store that nobody has damaged: {' '.join(words)}")
                self.done["damage said"] += 1
            elif kind == "saved":
                self._acknowledged[words[0], int(words[1])] = words[2]
            elif kind == "resumed":
                self._check_resumed(int(words[0]), words[1])
        self._learn()

    def _check_resumed(self, at: int, weights: str) -> None:
        self._is_damaged = False  # what was lost was committed a moment before a kill, and nobody was told
        if self._durable is not None and at < self._durable:
            raise SystemExit(f"the durable run resumed at step {at}, and step {self._durable} was committed")
        if weights != self._expected[at]:
            raise SystemExit(f"the durable run resumed at step {at} with other weights")

    def _learn(self) -> None:
        """Whatever has its tag is a checkpoint that must stay."""
        for directory in (self._folder / "saved", self._folder / "nvme"):
            for folder in directory.glob("[!.]*") if directory.is_dir() else ():
                mark = read_mark(folder)
                if mark is not None and mark.tag == folder.name:
                    self._seen[mark.run, mark.number] = mark.tag
                    self._check_replaced(folder, (mark.run, mark.number))
                    self._known[folder] = (mark.run, mark.number), mark.step

    def _check_replaced(self, folder: Path, key: Key) -> None:
        before = self._known.get(folder)
        if before is not None and before[0][0] != key[0] and folder.name != "best":
            raise SystemExit(f"{folder} of run {before[0][0]} was replaced by run {key[0]}")

    # What must be there.

    def _look_at_all(self) -> None:
        for folder, (key, at) in list(self._known.items()):
            if read_mark(folder) is None and not folder.exists():
                self._check_retention(folder, key)
                del self._known[folder]
                continue
            self._look_at(folder, at)
        for folder, at in self._stores.items():
            self._look_at(folder, at)
        if self._known:
            folder = self._rng.choice(sorted(self._known))
            found = result(lambda: weights_of(folder.parent, folder.name))
            if found != [self._known[folder][1], self._expected[self._known[folder][1]]]:
                raise SystemExit(f"{folder} has other weights than were saved: step {found[0]}")

    def _look_at(self, folder: Path, at: int) -> None:
        facts = inspect(folder, verify=True, check=lambda: None)
        if facts["damage"] or facts["step"] != at:
            raise SystemExit(f"{folder}, step {at}: {facts['damage']}, step {facts['step']}")
        self.done["read whole"] += 1

    def _check_retention(self, folder: Path, key: Key) -> None:
        """It is gone: by retention, because enough newer ones of its run were saved."""
        if self._seen.get(key) != folder.name or len(self._newer(key)) < KEEP_LAST:
            raise SystemExit(f"{folder} is gone, and its run has saved {len(self._newer(key))} newer ones")
        self.done["retained away"] += 1

    def _newer(self, key: Key) -> list[str]:
        """Tags of those that its run has saved after it."""
        saved = self._acknowledged | self._seen
        return [tag for other, tag in saved.items() if other[0] == key[0] and other[1] > key[1]]

    def _check_acknowledged(self) -> None:
        """Each was seen, or went before anybody looked, as it had to."""
        for key, tag in self._acknowledged.items():
            newer = self._newer(key)
            if key not in self._seen and len(newer) < KEEP_LAST and tag not in newer:
                raise SystemExit(f"checkpoint {tag}, number {key[1]} of run {key[0]}, was saved and never seen")

    # Acts.

    def act(self) -> None:
        for job in self._jobs:
            self._take_log(job)
        acts: list[Callable[[], str | None]] = [
            self._move, self._rename, self._copy, self._copy, self._remove, self._move_directory
        ]  # fmt: skip
        if not self._jobs:
            acts += [self._back_up, self._link_store, self._put_back, self._lose_manifest]
        found = self._rng.choice(acts)()
        self.done[found or "nothing to do"] += 1

    def _some(self) -> Path | None:
        here = [folder for folder in self._known if folder.exists()]
        return self._rng.choice(sorted(here)) if here else None

    def _fresh(self, name: str) -> Path:
        self._num_copies += 1
        return self._folder / self._rng.choice(["attic", "attic", "saved"]) / f"{name}-{self._num_copies}"

    def _moved(self, folder: Path, target: Path) -> bool:
        target.parent.mkdir(exist_ok=True)
        try:
            folder.rename(target)
        except FileNotFoundError:  # retention was faster
            return False
        mark = read_mark(target)
        assert mark is not None
        self._known.pop(folder)
        self._known[target] = (mark.run, mark.number), mark.step
        self._seen[mark.run, mark.number] = mark.tag
        return True

    def _move(self) -> str | None:
        folder = self._some()
        return "move" if folder is not None and self._moved(folder, self._fresh(folder.name)) else None

    def _rename(self) -> str | None:
        folder = self._some()
        if folder is None:
            return None
        self._num_copies += 1
        return "rename" if self._moved(folder, folder.parent / f"kept-{self._num_copies}") else None

    def _copied(self, copy: Callable[..., object]) -> bool:
        folder = self._some()
        if folder is None:
            return False
        target, mark = self._fresh(folder.name), read_mark(folder)
        target.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(folder, target, copy_function=copy)
        if mark is None or read_mark(folder) != mark or read_mark(target) != mark:  # retention was faster
            shutil.rmtree(target, ignore_errors=True)
            return False
        self._known[target] = (mark.run, mark.number), mark.step
        return True

    def _copy(self) -> str | None:
        name, copy = self._rng.choice([("copy", shutil.copy2), ("hard links", os.link)])
        return name if self._copied(copy) else None

    def _remove(self) -> str | None:
        folder = self._some()
        if folder is None:
            return None
        self._known.pop(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return "remove"

    def _move_directory(self) -> str | None:
        """The checkpoints of a run that goes on, or the attic."""
        name = self._rng.choice(["saved", "attic"])
        self._num_copies += 1
        source, target = self._folder / name, self._folder / f"{name}-{self._num_copies}"
        if not source.exists():
            return None
        source.rename(target)
        (self._folder / "attic").mkdir(exist_ok=True)
        self._known = {self._there(path, source, target): kept for path, kept in self._known.items()}
        self._stores = {self._there(path, source, target): at for path, at in self._stores.items()}
        return "move a directory"

    @staticmethod
    def _there(path: Path, source: Path, target: Path) -> Path:
        return target / path.relative_to(source) if path.is_relative_to(source) else path

    def _store(self) -> Path | None:
        stores = sorted((self._folder / "nvme").glob("run-*.store"), key=lambda store: int(store.stem[4:]))
        return stores[-1] if stores and not self._is_damaged else None

    @staticmethod
    def _generations(store: Path) -> list[int]:
        return [*published([entry.name for entry in store.iterdir()])]

    def _backed_up(self, copy: Callable[..., object]) -> bool:
        store = self._store()
        if store is None or not self._generations(store):
            return False
        with contextlib.suppress(Exception):  # nothing was committed yet
            at = inspect(store, verify=False, check=lambda: None)["step"]
            self._num_copies += 1
            target = self._folder / "attic" / f"run-{self._num_copies}.store"
            shutil.copytree(store, target, copy_function=copy)
            self._stores[target] = at
            return True
        return False

    def _back_up(self) -> str | None:
        return "copy a store" if self._backed_up(shutil.copy2) else None

    def _link_store(self) -> str | None:
        return "hard links of a store" if self._backed_up(os.link) else None

    def _put_back(self) -> str | None:
        """An older store comes in the place of the present one; or an empty path, to begin with."""
        for store in (self._folder / "nvme").glob("run-*.store"):
            shutil.rmtree(store)
        self._durable, self._is_damaged = None, False
        if not self._stores:
            return "remove the store"
        backup = self._rng.choice(sorted(self._stores))
        copy = self._rng.choice([shutil.copy2, os.link])
        shutil.copytree(backup, self._folder / "nvme" / "run-1.store", copy_function=copy)
        self._durable = self._stores[backup]
        return "put an older store back"

    def _lose_manifest(self) -> str | None:
        store = self._store()
        if store is None or self._durable is None or self._rng.random() < 0.5:
            return None
        for manifest in (*store.glob("generation.*"), *store.glob("retained.*")):
            if int(manifest.suffix[1:], 16) == max(self._generations(store)):
                manifest.unlink()
                self._is_damaged = True
                return "lose a manifest"
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--acts", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    expected, budget = result(reference), result(least_budget)
    rng = random.Random(arguments.seed)
    deadline = time.monotonic() + arguments.seconds
    num_acts = 0

    def goes_on(done: Counter[str]) -> bool:
        return num_acts + sum(done.values()) - done["read whole"] < arguments.acts and time.monotonic() < deadline

    while goes_on(Counter()):
        with tempfile.TemporaryDirectory() as name:
            administrator = Administrator(Path(name), rng, expected, budget)
            num_rounds = rng.randrange(6, 16)
            while num_rounds and goes_on(administrator.done):
                num_rounds -= 1
                for _ in range(rng.choice([1, 1, 2])):
                    administrator.start_job()
                for _ in range(rng.randrange(4)):
                    time.sleep(rng.expovariate(5))
                    administrator.act()
                administrator.end_jobs()
                for _ in range(rng.randrange(6)):
                    administrator.act()
            num_acts += sum(administrator.done.values()) - administrator.done["read whole"]
            print(f"{num_acts} acts: {dict(administrator.done)}", flush=True)
    print(f"{num_acts} acts: nothing was lost", flush=True)


if __name__ == "__main__":
    main()
