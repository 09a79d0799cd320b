#!/usr/bin/env python3
"""Let one call of the system fail in the middle of a training run, each kind with each errno: a typed error, and the
last good state goes on with the same bits.

A small run is traced by ``strace`` once to see which calls it makes on its own files and threads. In each trial
``strace`` then lets the N-th call of one kind fail (``inject``), in every thread that comes so far. What may follow is
a run that ends well, or one error of the engine's own that names a path or a thing to do, in time, and no crash of the
interpreter. Another run then resumes without trouble: at the last commit or checkpoint that was acknowledged, or after
it, and its losses and weights are those of a run in memory. A call that was interrupted (EINTR) is no error at all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from run_full_disk import PROGRAMS, digest, in_memory, least_budget, make_engine, reference, take_step
from run_kill import result

import offload.checkpoint.native.inspection  # noqa: F401
from offload import OffloadError
from offload.cli import main as offload_command

LIFE_S = 40
STEPS = 5
OTHER = "/dev/shm"

ERRORS = {
    "openat": "EMFILE EACCES EIO ENOSPC EINTR",
    "mkdir": "ENOSPC EACCES EIO",
    "rename": "ENOSPC EIO EACCES",
    "link": "EMLINK EPERM EIO ENOSPC",
    "linkat": "EMLINK EPERM EIO ENOSPC ENOENT",
    "unlink": "EIO EACCES",
    "rmdir": "EIO EBUSY",
    "fsync": "EIO ENOSPC EDQUOT EINTR",
    "fdatasync": "EIO ENOSPC EDQUOT",
    "fallocate": "EIO ENOSPC EOPNOTSUPP EINTR EFBIG",
    "ftruncate": "EIO EFBIG EINTR",
    "pread64": "EIO EINTR EAGAIN",
    "pwrite64": "EIO ENOSPC EDQUOT EFBIG EINTR EAGAIN",
    "preadv": "EIO",
    "preadv2": "EIO",
    "pwritev": "EIO ENOSPC EDQUOT",
    "read": "EIO EINTR",
    "write": "EIO ENOSPC EDQUOT EINTR",
    "newfstatat": "EIO EACCES",
    "fstat": "EIO",
    "statx": "EIO ENOSYS",
    "statfs": "EIO",
    "fstatfs": "EIO",
    "flock": "EIO ENOLCK EINTR",
    "fcntl": "EIO EAGAIN",
    "getdents64": "EIO",
    "copy_file_range": "EIO ENOSPC EXDEV",
    "sendfile": "EIO",
    "fchmod": "EPERM EIO",
    "chmod": "EPERM EIO",
    "lseek": "EIO",
    "io_uring_enter": "EINTR EAGAIN EBUSY EIO",
    "io_uring_setup": "EPERM ENOSYS ENOMEM EMFILE",
    "io_uring_register": "ENOMEM EPERM",
    "madvise": "EINVAL ENOMEM",
    "clone3": "EAGAIN",
    "readlink": "EIO",
    "utimensat": "EIO",
    "ioctl": "EIO",
    "mlock": "ENOMEM",
    "pipe2": "EMFILE",
    "eventfd2": "EMFILE",
    "memfd_create": "EMFILE",
}


class Wrong(Exception):
    """The engine did not do what it promises."""


class Place:
    def __init__(self, disk: Path, other: Path) -> None:
        self.disk, self.other, self.nvme, self.log = disk, other, disk / "nvme", disk / "log"

    def clear(self) -> None:
        for folder in (self.disk, self.other):
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.nvme.mkdir()
        self.log.touch()

    def tell(self, **what: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def told(self, name: str) -> list[Any]:
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [entry[name] for entry in entries if name in entry]


def life(place: Place, program: dict[str, Any], budget: int, backend: str, log: int) -> None:
    """One run, from what is there to the last step. ``log`` is open already: only the run's own calls are to fail."""

    def tell(**what: object) -> None:
        line = (json.dumps(what) + "\n").encode()
        os.writev(log, [line])

    try:
        with make_engine(program, nvme_path=place.nvme, host_memory=budget, keep_last=2, io_backend=backend) as engine:
            if program.get("durable"):
                engine.load_checkpoint()
            elif any((place.disk / "saved").glob("step*")):
                engine.load_checkpoint(place.disk / "saved")
            if engine.global_step == 0:
                torch.manual_seed(7)
            tell(resumed=engine.global_step)
            while engine.global_step < STEPS:
                loss = take_step(engine)
                step = engine.global_step
                tell(step=step, loss=loss)
                if step % 2 == 0:
                    engine.save_checkpoint(place.disk / "saved")
                    tell(saved=step)
                    engine.save_checkpoint(place.other / "copied")
                    engine.wait_for_checkpoint()
                    tell(copied=step)
                if step == 3:
                    engine.save_model(place.disk / "model", max_shard_bytes="300KB")
            engine.synchronize()
            tell(weights=digest(engine.module.state_dict()), at=engine.global_step)
        tell(closed=STEPS)
    except OffloadError as error:
        tell(error=f"{type(error).__name__}: {error}")
    except BaseException as error:
        tell(bare="".join(traceback.format_exception(error)))


def traced(call: Callable[[], None], options: list[str], trace: Path) -> int:
    """Make the call in a process of its own, under ``strace``: its exit status. Raises ``Wrong`` if it hangs."""
    ready, go = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            os.read(ready, 1)
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    tracer = subprocess.Popen(
        ["strace", "-f", "-q", "-y", "-s", "0", "-o", str(trace), *options, "-p", str(process)],
        stderr=subprocess.DEVNULL,
    )
    try:
        while "TracerPid:\t0" in Path(f"/proc/{process}/status").read_text():
            if tracer.poll() is not None:
                raise SystemExit("strace does not attach")
            time.sleep(0.002)
        os.write(go, b"x")
        deadline = time.monotonic() + LIFE_S
        while True:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                stacks = (
                    subprocess.run(
                        ["py-spy", "dump", "--pid", str(process)], capture_output=True, text=True, check=False
                    ).stdout
                    if shutil.which("py-spy")
                    else ""
                )
                raise Wrong(f"a hang: it runs for {LIFE_S} s {stacks}")
            time.sleep(0.003)
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(ready), os.close(go)
        tracer.wait()


class Trial:
    def __init__(self, place: Place, program: dict[str, Any]) -> None:
        self.place, self.program = place, program
        self.expected = result(lambda: reference(program))
        least = result(lambda: least_budget(program))
        self.budgets = (least, least * 5 // 4)
        self.trace = place.disk.parent / "trace"

    def live(self, budget: int, backend: str, options: list[str]) -> int:
        log = os.open(self.place.log, os.O_WRONLY | os.O_APPEND)
        try:
            return traced(
                lambda: life(self.place, self.program, self.budgets[budget], backend, log), options, self.trace
            )
        finally:
            os.close(log)

    def prepare(self, resumes: bool, backend: str) -> None:
        self.place.clear()
        if resumes:
            result(self._first)

    def _first(self) -> None:
        log = os.open(self.place.log, os.O_WRONLY | os.O_APPEND)
        global STEPS
        STEPS = 3
        life(self.place, self.program, self.budgets[0], "auto", log)

    def calls(self, resumes: bool, backend: str) -> dict[str, list[int]]:
        """Of each kind: which numbers of it, in its thread, go to files of the run."""
        self.prepare(resumes, backend)
        if self.live(int(resumes), backend, ["-e", f"trace={','.join('?' + kind for kind in ERRORS)}"]):
            raise Wrong("the run without trouble fails")
        counts: Counter[tuple[str, str]] = Counter()
        found: dict[str, set[int]] = {}
        for line in self.trace.read_text().splitlines():
            if not (match := re.match(r"(\d+)\s+(\w+)\(", line)):
                continue
            thread, kind = match.groups()
            counts[thread, kind] += 1
            if self.is_ours(kind, line):
                found.setdefault(kind, set()).add(counts[thread, kind])
        return {kind: sorted(numbers) for kind, numbers in found.items()}

    def is_ours(self, kind: str, line: str) -> bool:
        parts = (str(self.place.disk), str(self.place.other))
        if "/log" in line:
            return False
        return (
            kind in ("mmap", "clone3", "mlock", "madvise", "memfd_create", "eventfd2", "pipe2", "ioctl")
            or kind.startswith("io_uring")
            or any(part in line for part in parts)
        )

    def run(self, resumes: bool, backend: str, kind: str, error: str, number: str) -> str:
        place = self.place
        self.prepare(resumes, backend)
        status = self.live(
            int(resumes), backend, ["-e", f"trace={kind}", "-e", f"inject={kind}:error={error}:when={number}"]
        )
        struck = [line for line in self.trace.read_text().splitlines() if "INJECTED" in line]
        ours = [line for line in struck if self.is_ours(kind, line)]
        said = place.told("error")
        if status:
            raise Wrong(f"the process ends with {status}: {struck}")
        if bare := place.told("bare"):
            raise Wrong(f"{'' if ours else 'ELSEWHERE '}a bare error: {bare[0]}\n{struck}")
        if said and error in ("EINTR",):
            raise Wrong(f"an interrupted call is an error: {said}\n{struck}")
        if said and not struck:
            raise Wrong(f"an error without a reason: {said}")
        self.check_steps()
        least = self.least_step()
        before = len(place.told("resumed"))
        if self.live(1 - int(resumes), "auto", ["-e", "trace=none"]):
            raise Wrong("the next run fails")
        if place.told("error")[len(said) :] or place.told("bare"):
            raise Wrong(f"the next run says {place.told('error')[len(said) :]} {place.told('bare')}; {said} {struck}")
        at = place.told("resumed")[before]
        if at < least:
            raise Wrong(f"resumed at step {at}, {least} was acknowledged; {said} {struck}")
        self.check_steps()
        if place.told("weights")[-1] != self.expected["weights"][STEPS]:
            raise Wrong("other weights")
        self.check_files()
        return (said[0].splitlines()[0] if said else "well") if struck else "not reached"

    def least_step(self) -> int:
        saved = max(self.place.told("saved"), default=0)
        if not self.program.get("durable"):
            return saved
        every = self.program["durable"]
        return max(saved, (max(self.place.told("step"), default=1) - 1) // every * every, *self.place.told("closed"), 0)

    def check_steps(self) -> None:
        for line in self.place.log.read_text().splitlines():
            told = json.loads(line)
            if "loss" in told and told["loss"] != self.expected["losses"][told["step"]]:
                raise Wrong(f"step {told['step']} has another loss")

    def save_again(self) -> None:
        """What could not be removed is removed by the next save."""
        with in_memory(self.program) as engine:
            engine.save_checkpoint(self.place.disk / "saved")
            engine.save_checkpoint(self.place.other / "copied")
            engine.save_model(self.place.disk / "model")

    def check_files(self) -> None:
        place = self.place
        folders = [entry for folder in (place.disk / "saved", place.other / "copied") for entry in folder.glob("step*")]
        for entry in [*folders, *place.nvme.iterdir()]:
            with contextlib.redirect_stdout(io.StringIO()):
                if offload_command(["inspect", str(entry), "--verify"]):
                    raise Wrong(f"{entry} is not whole")
        result(self.save_again)
        for folder in (place.disk / "saved", place.other / "copied", place.disk / "model"):
            if left := [entry.name for entry in folder.glob(".*unfinished*")]:
                raise Wrong(f"left after the next save: {left}")
        stores = [entry.name for entry in place.nvme.iterdir()]
        if len(stores) != (1 if self.program.get("durable") else 0):
            raise Wrong(f"left under nvme_path: {stores}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=100000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kind", action="append")
    parser.add_argument("--from-then-on", action="store_true", help="all calls from the N-th on fail")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    outcomes: Counter[str] = Counter()
    deadline = time.monotonic() + arguments.seconds
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=OTHER) as other:
        disk = Path(folder) / "disk"
        disk.mkdir()
        place = Place(disk, Path(other))
        trials: dict[int, Trial] = {}
        calls: dict[Any, dict[str, list[int]]] = {}
        while outcomes.total() < arguments.trials and time.monotonic() < deadline:
            which, resumes, backend = rng.choice([0, 1, 2, 3]), rng.random() < 0.4, rng.choice(["auto", "threads"])
            if which not in trials:
                trials[which] = Trial(place, {k: v for k, v in PROGRAMS[which].items() if k != "weights"})
            trial = trials[which]
            key = which, resumes, backend
            if key not in calls:
                calls[key] = trial.calls(resumes, backend)
                print(key, {kind: len(numbers) for kind, numbers in calls[key].items()}, flush=True)
            kinds = sorted(set(calls[key]) & set(arguments.kind or ERRORS))
            if not kinds:
                continue
            kind = rng.choice(kinds)
            error = rng.choice(ERRORS[kind].split())
            number = str(rng.choice(calls[key][kind])) + (
                "+" if arguments.from_then_on and error not in ("EINTR", "EAGAIN", "EBUSY") else ""
            )
            began = time.monotonic()
            try:
                said = trial.run(*key[1:], kind, error, number)
            except Wrong as wrong:
                num_wrong += 1
                said = f"WRONG: {wrong}"
            outcomes[said.split(":")[0]] += 1
            print(f"{key} {kind} {error} {number} ({time.monotonic() - began:.1f} s): {said}", flush=True)
    print(dict(outcomes), flush=True)
    raise SystemExit(num_wrong > 0)


if __name__ == "__main__":
    main()
