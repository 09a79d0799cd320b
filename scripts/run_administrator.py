#!/usr/bin/env python3
"""A random administrator beside a training run: what was acknowledged, and nobody removed, is there and whole.

Small jobs train in one folder, with and without ``durable``, into one directory of checkpoints or into ``nvme_path``
itself, alone or two at a time, and are killed at random moments. Meanwhile, and between them, the administrator moves,
renames, copies, links and removes checkpoints and the directories that they are in, puts older ones back under their
tags, mounts the directory elsewhere and has jobs save there (where mounts are allowed), gives checkpoints to another
user and back (as root), copies and links stores, puts older ones back, and loses a manifest. After each job every
checkpoint that ``save_checkpoint`` has returned from, and every copy, is read whole; what retention has removed must
have been its to remove; a durable run must resume at the last step that was committed, or say why not. Prints what was
done, and fails with the first thing that was lost or changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from _administrator_job import KEEP_LAST, Job, least_budget, reference, train, weights_of
from _full_disk import CannotMount, in_own_mounts
from run_kill import ended, result, start

from offload.checkpoint.native.inspection import inspect
from offload.checkpoint.native.mark import read_mark
from swapper.publication import published

ANOTHER = 12345
"""A user who is not us."""

Key = tuple[str, int]
"""A checkpoint by its mark: run and number. Copies have the same."""


class Administrator:
    """Knows what is where, and looks after each job whether it is."""

    def __init__(self, folder: Path, rng: random.Random, expected: list[str], budget: int, may_mount: bool) -> None:
        self._folder = folder
        self._rng = rng
        self._expected = expected
        self._budget = budget
        self._jobs: list[Job] = []
        self._num_jobs = self._num_copies = 0
        self.done: Counter[str] = Counter()
        self._known: dict[Path, tuple[Key, int]] = {}
        """Checkpoints that must be there, with their steps: those acknowledged, and copies of them."""
        self._seen: set[tuple[Key, str]] = set()
        """Checkpoints that were ever saved, with their tags. A run whose store was put back counts again."""
        self._acknowledged: set[tuple[Key, str]] = set()
        """Those that ``save_checkpoint`` has returned from."""
        self._stores: dict[Path, int] = {}
        """Copies of stores that must be there, with their steps."""
        self._durable: int | None = None
        """Step at which the durable run must go on, at least."""
        self._is_damaged = False
        self._bound: Path | None = None
        """Where the directory of checkpoints is mounted, too."""
        self._given_away: set[Path] = set()
        """Checkpoints that belong to another user."""
        self._may_mount = may_mount
        (folder / "nvme").mkdir()
        (folder / "attic").mkdir()
        if may_mount:
            self._bind()
            self.done["mount elsewhere"] += 1

    # Jobs.

    def start_job(self) -> None:
        durable = self._rng.random() < (0.2 if any(job.durable for job in self._jobs) else 0.6)
        saved = self._rng.choice([self._bound or self._folder / "saved", self._folder / "saved", self._folder / "nvme"])
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
        self._take_logs()
        self._jobs = []
        self._check_acknowledged()
        self._look_at_all()

    def _take_logs(self) -> None:
        several = sum(job.durable for job in self._jobs) > 1
        for _, kind, *words in sorted(
            (line for job in self._jobs for line in job.new_lines()), key=lambda it: int(it[0])
        ):
            if kind == "durable":
                self._durable = int(words[0])
            elif kind == "corrupt":
                if not self._is_damaged:
                    raise SystemExit(f"a store that nobody has damaged: {' '.join(words)}")
                self.done["damage said"] += 1
            elif kind == "locked":
                if not several:
                    raise SystemExit("a store that nobody has open is locked")
                self.done["second durable job refused"] += 1
            elif kind == "unsafe":
                if not self._given_away:
                    raise SystemExit(f"nothing was given to another user: {' '.join(words)}")
                self.done["another's data refused"] += 1
            elif kind == "saved":
                self._acknowledged.add(((words[0], int(words[1])), words[2]))
            elif kind == "resumed":
                self._check_resumed(int(words[0]), words[1])
        self._learn("saved", "nvme")

    def _check_resumed(self, at: int, weights: str) -> None:
        self._is_damaged = False  # what was lost was committed a moment before a kill, and nobody was told
        if self._durable is not None and at < self._durable:
            raise SystemExit(f"the durable run resumed at step {at}, and step {self._durable} was committed")
        if weights != self._expected[at]:
            raise SystemExit(f"the durable run resumed at step {at} with other weights")

    def _learn(self, *directories: str) -> None:
        """Whatever has its tag in these directories is a checkpoint that must stay."""
        found = [(folder, read_mark(folder)) for name in directories for folder in self._in(name)]
        there = [(folder, mark) for folder, mark in found if mark is not None and mark.tag == folder.name]
        self._seen.update(((mark.run, mark.number), mark.tag) for _, mark in there)
        for folder, mark in there:
            (run, number), _ = self._known.get(folder, ((mark.run, 0), 0))
            if run != mark.run and mark.tag != "best" and len(self._newer((run, number))) < KEEP_LAST:
                raise SystemExit(f"{folder} of run {run} was replaced by run {mark.run}")
            self._known[folder] = (mark.run, mark.number), mark.step

    def _in(self, name: str) -> list[Path]:
        directory = self._folder / name
        return [*directory.glob("[!.]*")] if directory.is_dir() else []

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
        """It is gone: by retention, because enough newer ones of its run were saved; or of the run that had replaced
        it by its own of that name."""
        saved = self._acknowledged | self._seen
        replacing = [other for other, tag in saved if tag == folder.name == "best" and other[0] != key[0]]
        if (key, folder.name) not in self._seen or max(len(self._newer(of)) for of in (key, *replacing)) < KEEP_LAST:
            raise SystemExit(f"{folder} is gone, and its run has saved {len(self._newer(key))} newer ones")
        self.done["retained away"] += 1

    def _newer(self, key: Key) -> list[str]:
        """Tags of those that its run has saved after it."""
        saved = self._acknowledged | self._seen
        return [tag for other, tag in saved if other[0] == key[0] and other[1] > key[1]]

    def _check_acknowledged(self) -> None:
        """Each was seen, or went before anybody looked, as it had to."""
        saved = self._acknowledged | self._seen
        for key, tag in self._acknowledged:
            newer = self._newer(key)
            replaced = tag == "best" and any(tag == other and run != key[0] for (run, _), other in saved)
            if (key, tag) not in self._seen and len(newer) < KEEP_LAST and tag not in newer and not replaced:
                raise SystemExit(f"checkpoint {tag}, number {key[1]} of run {key[0]}, was saved and never seen")

    # Acts.

    def act(self) -> None:
        self._take_logs()
        acts: list[Callable[[], str | None]] = [
            self._move, self._rename, self._copy, self._copy, self._remove, self._move_directory, self._restore
        ]  # fmt: skip
        if not self._jobs:
            acts += [self._bind, self._give_away, self._give_away]
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
        self._seen.add(((mark.run, mark.number), mark.tag))
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
        """It is moved away first: a job may have replaced it since anybody looked."""
        folder, target = self._some(), self._fresh("removed")
        if folder is None or not self._moved(folder, target):
            return None
        self._known.pop(target)
        shutil.rmtree(target)
        return "remove"

    def _move_directory(self) -> str | None:
        """The checkpoints of a run that goes on, or the attic."""
        name = self._rng.choice(["saved", "attic"])
        self._num_copies += 1
        source, target = self._folder / name, self._folder / f"{name}-{self._num_copies}"
        if not source.exists() or (name == "saved" and self._bound is not None):
            return None
        source.rename(target)
        (self._folder / "attic").mkdir(exist_ok=True)
        self._known = {self._there(path, source, target): kept for path, kept in self._known.items()}
        self._stores = {self._there(path, source, target): at for path, at in self._stores.items()}
        self._learn(target.name)  # a job may have saved there since anybody looked
        return "move a directory"

    def _restore(self) -> str | None:
        """A copy comes back under the tag that it was saved with, if nothing has it."""
        copies = [folder for folder in self._known if folder.parent.name.startswith("attic") and folder.exists()]
        if not copies:
            return None
        copy = self._rng.choice(sorted(copies))
        mark = read_mark(copy)
        assert mark is not None
        target, made = self._folder / "saved" / mark.tag, self._folder / "saved" / ".restored"
        if target.exists() or mark.tag == "best":
            return None
        shutil.copytree(copy, made)
        try:
            made.rename(target)  # at once: a job may be saving there
        except OSError:
            shutil.rmtree(made)
            return None
        self._known[target] = (mark.run, mark.number), mark.step
        self._seen.add(((mark.run, mark.number), mark.tag))
        return "restore"

    def _bind(self) -> str | None:
        """The directory of checkpoints is mounted elsewhere, and jobs may save there; or it is no more."""
        if not self._may_mount:
            return None
        if self._bound is not None:
            subprocess.run(["umount", self._bound], check=True)
            self._bound = None
            return "unmount"
        self._num_copies += 1
        (self._folder / "saved").mkdir(exist_ok=True)
        self._bound = self._folder / f"bound-{self._num_copies}"
        self._bound.mkdir()
        subprocess.run(["mount", "--bind", self._folder / "saved", self._bound], check=True)
        for folder, (_, at) in self._known.items():
            if folder.parent == self._folder / "saved":
                self._look_at(self._bound / folder.name, at)
        return "mount elsewhere"

    def _give_away(self) -> str | None:
        """Another user gets a checkpoint, or we get all of them back."""
        if os.geteuid() != 0:
            return None
        folder = self._some()
        if folder is None or self._given_away:
            self._take_back()
            return "take back"
        self._given_away.add(folder)
        subprocess.run(["chown", "-R", str(ANOTHER), folder], check=True)
        return "give to another user"

    def _take_back(self) -> None:
        """The data may have more names: what is given back is all that there is."""
        subprocess.run(["chown", "-R", str(os.geteuid()), self._folder], check=True)
        self._given_away.clear()

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

    def close(self) -> None:
        if self._bound is not None:
            subprocess.run(["umount", self._bound], check=True)

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
    parser.add_argument("--mounts", choices=("own", "here", "none"), default="own", help="where mounts are made")
    arguments = parser.parse_args()
    may_mount = arguments.mounts == "here"
    if arguments.mounts == "own":
        try:
            raise SystemExit(in_own_mounts([sys.executable, __file__, *sys.argv[1:], "--mounts=here"]).returncode)
        except CannotMount as error:
            print(f"nothing is mounted elsewhere: {error}", flush=True)
    if os.geteuid() != 0:
        print("no checkpoint is given to another user: only root may", flush=True)
    warnings.simplefilter("ignore")
    expected, budget = result(reference), result(least_budget)
    rng = random.Random(arguments.seed)
    deadline = time.monotonic() + arguments.seconds
    num_acts = 0

    def goes_on(done: Counter[str]) -> bool:
        return num_acts + sum(done.values()) - done["read whole"] < arguments.acts and time.monotonic() < deadline

    while goes_on(Counter()):
        with (
            tempfile.TemporaryDirectory() as name,
            contextlib.closing(Administrator(Path(name), rng, expected, budget, may_mount)) as administrator,
        ):
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
