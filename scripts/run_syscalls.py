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
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _struck_run import LIFE_S, StruckRun, Wrong, a_place

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


class Traced(StruckRun):
    """A run whose calls are seen, and fail, by ``strace``."""

    @property
    def trace(self) -> Path:
        return self.place.disk.parent / "trace"

    def live_traced(self, budget: int, backend: str, *options: str) -> int:
        return self.live(partial(traced, options=list(options), trace=self.trace), budget, backend)

    def calls(self, resumes: bool, backend: str) -> dict[str, list[int]]:
        """Of each kind: which numbers of it, in its thread, go to files of the run."""
        self.prepare(resumes=resumes)
        if self.live_traced(int(resumes), backend, "-e", f"trace={','.join('?' + kind for kind in ERRORS)}"):
            raise Wrong("the run without trouble fails")
        counts: Counter[tuple[str, str]] = Counter()
        found: dict[str, set[int]] = {}
        for line in self.trace.read_text().splitlines():
            if not (match := re.match(r"(\d+)\s+(\w+)\(", line)):
                continue
            thread, kind = match.groups()
            counts[thread, kind] += 1
            if self._is_ours(kind, line):
                found.setdefault(kind, set()).add(counts[thread, kind])
        return {kind: sorted(numbers) for kind, numbers in found.items()}

    def _is_ours(self, kind: str, line: str) -> bool:
        parts = (str(self.place.disk), str(self.place.other))
        if "/log" in line:
            return False
        return (
            kind in ("mmap", "clone3", "mlock", "madvise", "memfd_create", "eventfd2", "pipe2", "ioctl")
            or kind.startswith("io_uring")
            or any(part in line for part in parts)
        )

    def run(self, resumes: bool, backend: str, kind: str, error: str, number: str) -> str:
        self.prepare(resumes=resumes)
        status = self.live_traced(
            int(resumes), backend, "-e", f"trace={kind}", "-e", f"inject={kind}:error={error}:when={number}"
        )
        struck = [line for line in self.trace.read_text().splitlines() if "INJECTED" in line]
        if status:
            raise Wrong(f"the process ends with {status}: {struck}")
        said = self.place.told("error")
        if said and error == "EINTR":
            raise Wrong(f"an interrupted call is an error: {said}\n{struck}")
        if said and not struck:
            raise Wrong(f"an error without a reason: {said}")
        elsewhere = "" if any(self._is_ours(kind, line) for line in struck) else "ELSEWHERE "
        found = self.check(
            lambda: self.live_traced(1 - int(resumes), "auto", "-e", "trace=none"), f"{elsewhere}{struck}"
        )
        return (found or "well") if struck else "not reached"


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
    with a_place() as place:
        runs: dict[int, Traced] = {}
        calls: dict[tuple[int, bool, str], dict[str, list[int]]] = {}
        while outcomes.total() < arguments.trials and time.monotonic() < deadline:
            which, resumes, backend = rng.choice([0, 1, 2, 3]), rng.random() < 0.4, rng.choice(["auto", "threads"])
            run = runs[which] if which in runs else runs.setdefault(which, Traced(place, which))
            key = which, resumes, backend
            if key not in calls:
                calls[key] = run.calls(resumes, backend)
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
                said = run.run(resumes, backend, kind, error, number)
            except Wrong as wrong:
                num_wrong += 1
                said = f"WRONG: {wrong}"
            outcomes[said.split(":")[0]] += 1
            print(f"{key} {kind} {error} {number} ({time.monotonic() - began:.1f} s): {said}", flush=True)
    print(dict(outcomes), flush=True)
    raise SystemExit(num_wrong > 0)


if __name__ == "__main__":
    main()
