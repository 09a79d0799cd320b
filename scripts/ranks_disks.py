#!/usr/bin/env python3
"""Let one of two ranks lose its disk, its checkpoints or its time while it trains, saves or loads: all end in time with
an error of the engine's own, and what was committed or saved last goes on with the same bits.

Each rank has a file system of its own as ``nvme_path``, and both save into one directory. In each trial something
happens to one rank in a phase that it tells of: its file system is filled, its files may not be written any more, the
directory of checkpoints is removed, moved away or read-only, it is stopped for some seconds and goes on, or it is
killed. Ranks that end by themselves must end all, with a typed error or well. Then all is as before (what was removed
stays so), and two ranks go on to the end: from the last commit or checkpoint that both were told of, or after it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which takes seconds, and torch.distributed wants it
from _full_disk import CannotMount, give_room, in_own_mounts, mounted, take_room
from _ranks_processes import SERVE, Launcher, Process, end_all, serve
from torch import nn

from offload import BudgetError, OffloadEngine, OffloadError

NUM_RANKS = 2
NUM_STEPS = 8
WIDTH = 96
TROUBLE = re.compile("terminate called|Segmentation|Fatal Python|Aborted|Exception ignored|core dumped|Traceback")
TIMEOUT_S = 4.0
STOPPED_S = 20.0
SLACK_S = 30.0

FAULTS = ("full", "removed", "moved", "read-only", "stopped", "stopped too long", "killed")
PHASES = ("loading", "training", "saving")


class Wrong(Exception):
    """The ranks did not do what they promise."""


# What one rank does.


def make_engine(**options: object) -> OffloadEngine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(5)))
    return OffloadEngine(model, lr=1e-2, gradient_clipping=1.0, **options)


def least_budget(options: dict[str, Any]) -> int:
    """So little host memory that weights rest on NVMe. All ranks ask."""
    try:
        make_engine(**options, host_memory=1)
    except BudgetError as error:
        return error.needed_bytes
    raise SystemExit("one byte of host memory is enough")


def life(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def tell(**what: object) -> None:
        os.write(log, (json.dumps(what) + "\n").encode())

    options = {"rank_timeout": job["timeout_s"]}
    if job["path"] is not None:
        options |= {"nvme_path": job["path"], "nvme_capacity": "32MiB", "durable": job["durable"], "keep_last": 2}
    try:
        if job["path"] is not None:
            options["host_memory"] = least_budget(options)
        _live(job, options, tell)
    except OffloadError as error:
        tell(error=f"{type(error).__name__}: {error}")


def _live(job: dict[str, Any], options: dict[str, Any], tell: Any) -> None:
    saved = Path(job["saved"])
    with make_engine(**options) as engine:
        torch.manual_seed(7 + int(os.environ["RANK"]))
        tell(phase="loading")
        if job["durable"]:
            engine.load_checkpoint()
        elif job["resumes"]:
            engine.load_checkpoint(saved)
        tell(resumed=engine.global_step)
        while engine.global_step < job["steps"]:
            tell(phase="training")
            inputs = torch.randn(4, WIDTH)  # from the state that the last step left
            loss = engine(inputs).square().mean()
            engine.backward(loss)
            engine.step()
            tell(step=engine.global_step, loss=loss.item().hex())
            if engine.global_step % 2 == 0 and job["path"] is not None:
                tell(phase="saving")
                engine.save_checkpoint(saved)
                tell(saved=engine.global_step)
        digest = hashlib.sha256()
        for value in engine.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
    tell(final=digest.hexdigest())


# What happens to them.


class Trial:
    def __init__(self, launcher: Launcher, folder: Path, durable: int, disks: list[Path]) -> None:
        self.launcher, self.folder, self.durable, self.disks = launcher, folder, durable, disks
        self.saved = folder / "checkpoints" / "saved"

    def start(self, steps: int, timeout_s: float, *, resumes: bool = False, in_memory: bool = False) -> list[Process]:
        jobs = []
        for rank, disk in enumerate(self.disks):
            job = {"log": str(self.folder / f"log-{rank}"), "path": None if in_memory else str(disk / "nvme")}
            job |= {"durable": 0 if in_memory else self.durable, "saved": str(self.saved), "steps": steps}
            jobs.append(job | {"timeout_s": timeout_s, "resumes": resumes})
        return self.launcher.start(jobs, self.folder)

    def told(self, rank: int, name: str) -> list[Any]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"log-{rank}").read_text().splitlines()
            return [told[name] for told in map(json.loads, lines) if name in told]
        return []

    def ends(self, processes: list[Process], within_s: float, but: tuple[int, ...] = ()) -> None:
        deadline = time.monotonic() + within_s
        for rank, process in enumerate(processes):
            if rank not in but and not process.wait(max(deadline - time.monotonic(), 0.01)):
                raise Wrong(f"a hang: rank {rank} has not ended")

    def clear(self) -> None:
        for entry in self.folder.glob("log-*"):
            entry.unlink()
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        self.saved.parent.mkdir()
        for disk in self.disks:
            for entry in disk.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            (disk / "nvme").mkdir()

    def run(self, fault: str, phase: str, count: int, rank: int, delay_s: float, spare: int, expected: Any) -> str:
        self.clear()
        processes: list[Process] = []
        try:
            if phase == "loading":
                processes = self.start(4, 30.0)
                self.ends(processes, 60)
            timeout_s = 60.0 if fault == "stopped" else TIMEOUT_S
            resumes = phase == "loading"
            before = self.told(rank, "phase").count(phase)
            processes = self.start(NUM_STEPS, timeout_s, resumes=resumes)
            deadline = time.monotonic() + 60
            wanted = before + (1 if phase == "loading" else count)
            while self.told(rank, "phase").count(phase) < wanted and processes[rank].poll() is None:
                if time.monotonic() > deadline:
                    raise Wrong("it does not come to its phase")
                time.sleep(0.001)
            time.sleep(delay_s)
            with contextlib.ExitStack() as undo:
                self.strike(fault, processes[rank], rank, spare, undo)
                self.ends(processes, 1.5 * timeout_s + SLACK_S + (STOPPED_S if "stopped" in fault else 0))
            errors = [self.told(each, "error") for each in range(NUM_RANKS)]
            self.check(processes, fault, rank, errors, expected)
            least = self.least()
            gone = fault == "removed" or not (self.saved / "latest").exists()
            if not self.durable and gone:
                return str(errors)
            processes = self.start(NUM_STEPS, 30.0, resumes=(self.saved / "latest").exists())
            self.ends(processes, 90)
            again = [self.told(each, "error")[len(errors[each]) :] for each in range(NUM_RANKS)]
            if any(again):
                raise Wrong(f"the next run says {again}, after {errors}")
            self.check(processes, "", rank, again, expected)
            at = [self.told(each, "resumed")[-1] for each in range(NUM_RANKS)]
            if min(at) < (0 if not self.durable and gone else least):
                raise Wrong(f"resumed at {at}, {least} was acknowledged; {errors}")
            return str(errors)
        except Wrong as wrong:
            outputs = "\n".join(process.told()[-3000:] for process in processes)
            logs = [(self.folder / f"log-{each}").read_text()[-1500:] for each in range(NUM_RANKS)]
            raise Wrong(f"{wrong}\n{outputs}\n{logs}") from None
        finally:
            end_all(processes)

    def strike(self, fault: str, process: Process, rank: int, spare: int, undo: contextlib.ExitStack) -> None:
        if fault == "full":
            take_room(self.disks[rank], spare)
            undo.callback(give_room, self.disks[rank])
        elif fault == "removed":
            shutil.rmtree(self.saved, ignore_errors=True)
        elif fault == "moved" and self.saved.exists():
            aside = self.saved.with_name("aside")
            self.saved.rename(aside)
            undo.callback(self.put_back, aside)
        elif fault == "read-only":
            top = self.saved.parent
            subprocess.run(["mount", "--bind", top, top], check=True)
            undo.callback(subprocess.run, ["umount", "--lazy", str(top)], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", top], check=True)
        elif fault.startswith("stopped"):
            process.send(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            process.send(signal.SIGCONT)
        elif fault == "killed":
            process.send(signal.SIGKILL)

    def put_back(self, aside: Path) -> None:
        if self.saved.exists():
            shutil.rmtree(self.saved)
        aside.rename(self.saved)

    def least(self) -> int:
        if not self.durable:
            return min(max(self.told(rank, "saved"), default=0) for rank in range(NUM_RANKS))
        return max(0, min(max(self.told(rank, "step"), default=0) for rank in range(NUM_RANKS)) - 2)

    def check(self, processes: list[Process], fault: str, rank: int, errors: Any, expected: Any) -> None:
        for each, process in enumerate(processes):
            if fault == "killed" and each == rank:
                continue
            if process.status or TROUBLE.search(process.told()):
                raise Wrong(f"rank {each} is in trouble: status {process.status}")
        if fault not in ("killed",) and len({bool(found) for found in errors}) > 1:
            raise Wrong(f"not all end with an error: {errors}")
        if fault == "stopped" and any(errors):
            raise Wrong(f"a stop that is shorter than the timeout is an error: {errors}")
        for each in range(NUM_RANKS):
            with contextlib.suppress(FileNotFoundError):
                for line in (self.folder / f"log-{each}").read_text().splitlines():
                    told = json.loads(line)
                    if "loss" in told and told["loss"] != expected["losses"][each][told["step"]]:
                        raise Wrong(f"rank {each}: step {told['step']} has another loss")
                    if "final" in told and told["final"] not in expected["finals"]:
                        raise Wrong(f"rank {each}: other weights")


def reference(launcher: Launcher, folder: Path, disks: list[Path]) -> dict[str, Any]:
    trial = Trial(launcher, folder, 0, disks)
    trial.clear()
    finals = set()
    for steps in (4, NUM_STEPS):
        for entry in folder.glob("log-*"):
            entry.unlink()
        processes = trial.start(steps, 30.0, in_memory=True)
        trial.ends(processes, 60)
        finals |= {trial.told(rank, "final")[0] for rank in range(NUM_RANKS)}
    losses = [["", *trial.told(rank, "loss")] for rank in range(NUM_RANKS)]
    if len(finals) != 2:
        raise SystemExit(f"the run without trouble: {finals} {[p.told() for p in processes]}")
    return {"losses": losses, "finals": finals}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--trials", type=int, default=100000)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--mounted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.mounted:
        try:
            raise SystemExit(in_own_mounts([sys.executable, *sys.orig_argv[1:], "--mounted"]).returncode)
        except CannotMount as error:
            raise SystemExit(f"skipped: {error}") from None
    rng, launcher, counts = random.Random(arguments.seed), Launcher(__file__), Counter[str]()
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as closing:
        folder = Path(name)
        disks = [folder / f"disk-{rank}" for rank in range(NUM_RANKS)]
        for disk in disks:
            disk.mkdir()
            closing.enter_context(mounted("tmpfs", disk))
        expected = reference(launcher, folder, disks)
        while counts["trials"] < arguments.trials and time.monotonic() < deadline:
            fault, phase = rng.choice(arguments.fault or FAULTS), rng.choice(PHASES)
            trial = Trial(launcher, folder, rng.choice([0, 1, 1, 2]), disks)
            rank, count = rng.randrange(NUM_RANKS), rng.randint(1, 4)
            delay_s, spare = rng.expovariate(1 / 0.01), rng.choice([0, 0, 1 << 16])
            began = time.monotonic()
            try:
                said = trial.run(fault, phase, count, rank, delay_s, spare, expected)
            except Wrong as wrong:
                counts["WRONG"] += 1
                said = f"WRONG: {wrong}"
            counts["trials"] += 1
            counts[fault] += 1
            what = f"{fault} in {phase} {count}, rank {rank}, durable={trial.durable}, {spare} spare"
            print(f"{what} ({time.monotonic() - began:.1f} s): {said}", flush=True)
    launcher.close()
    print(dict(counts), flush=True)
    raise SystemExit(counts["WRONG"] > 0)


if __name__ == "__main__":
    if SERVE in sys.argv:
        life(serve())
    else:
        main()
