#!/usr/bin/env python3
"""Take something away from a training run in its midst, as administrators and containers do: open files, sizes of
files, locked memory, address space (``setrlimit``), calls of the system (seccomp), memory (a cgroup).

A small run, durable or not, trains, saves, exports and closes. At one moment of it a limit comes down, for good. What
may follow is a run that ends well, one error that says what to do, or the end that the limit has for the process
(SIGKILL of a cgroup without memory, SIGSYS of seccomp): no hang and no other crash. Another run without the limit then
resumes at the last commit or checkpoint that was acknowledged, or after it, with the bits of a run in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import random
import resource
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from _cgroups import memory_limit
from _struck_run import LIFE_S, MOMENTS, PROGRAMS, StruckRun, Wrong, a_place
from run_kill import ended, start

MIB = 1 << 20

CALLS = {
    "io_uring": (425, 426, 427), "fallocate": (285,), "linkat": (265,), "renameat2": (316,), "copy_file_range": (326,),
    "fdatasync": (75,), "flock": (73,), "madvise": (28,), "clone3": (435,), "sched_setaffinity": (203,),
    "mbind": (237,),
}  # fmt: skip
"""Numbers of calls on x86-64 that containers are known to forbid, or could."""

ACTIONS = {"EPERM": 0x50000 | errno.EPERM, "ENOSYS": 0x50000 | errno.ENOSYS, "kill": 0x80000000}
"""What seccomp does where a forbidden call is made."""


def no_more_files(rng: random.Random) -> None:
    few = len([*Path("/proc/self/fd").iterdir()]) - 1 + rng.choice([0, 1, 2, 3, 5, 8])
    _limit(resource.RLIMIT_NOFILE, few)


def no_large_files(rng: random.Random) -> None:
    _limit(resource.RLIMIT_FSIZE, rng.choice([65536, MIB]))  # what the run tells of itself goes to a small file


def no_locked_memory(rng: random.Random) -> None:
    _limit(resource.RLIMIT_MEMLOCK, 0)


def no_more_addresses(rng: random.Random) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, taken + rng.choice([0, 65536, MIB, 4 * MIB, 32 * MIB]))


def forbid(numbers: tuple[int, ...], action: int) -> None:
    """All threads of the process, and those to come: a filter of seccomp (see ``man 2 seccomp``)."""
    load, equal, answer, allow = 0x20, 0x15, 0x06, 0x7FFF0000
    rules = [struct.pack("HBBI", load, 0, 0, 0)]
    for number in numbers:
        rules += [struct.pack("HBBI", equal, 0, 1, number), struct.pack("HBBI", answer, 0, 0, action)]
    rules.append(struct.pack("HBBI", answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(rules))
    program = ctypes.create_string_buffer(struct.pack("H6xP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, set_filter, all_threads = 38, 317, 1, 1
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.syscall(seccomp, set_filter, all_threads, program):
        raise OSError(ctypes.get_errno(), "seccomp")


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


STRIKES: dict[str, Callable[[random.Random], None]] = {
    "open files": no_more_files,
    "sizes of files": no_large_files,
    "locked memory": no_locked_memory,
    "addresses": no_more_addresses,
}
if platform.machine() == "x86_64":
    STRIKES |= {
        f"{call}, {action}": lambda rng, numbers=numbers, what=what: forbid(numbers, what)  # type: ignore[misc]
        for call, numbers in CALLS.items()
        for action, what in ACTIONS.items()
    }

ENDS = {"kill": -signal.SIGSYS, "memory": -signal.SIGKILL}
"""Ends of the process that are the limit's."""


def alone(call: Callable[[], None], memory: int | None = None) -> int:
    """Make the call in a process of its own, in a cgroup of so many bytes: its exit status. Raises ``Wrong`` if it
    hangs."""
    ready, go = os.pipe()
    process = start(lambda: (os.read(ready, 1), call()))
    deadline = time.monotonic() + LIFE_S
    with nullcontext() if memory is None else memory_limit(process, memory):
        os.write(go, b"x")
        while (status := ended(process)) is None:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                raise Wrong(f"a hang: it runs for {LIFE_S} s")
            time.sleep(0.003)
    os.close(ready), os.close(go)
    return status


def strike(run: StruckRun, kind: str, moment: str, resumes: bool, rng: random.Random) -> str:
    """What the run said, or how it ended."""
    run.prepare(resumes=resumes)

    def at(now: str) -> None:
        if now == moment and kind != "memory":
            STRIKES[kind](rng)

    memory = rng.randrange(4, 64) * MIB if kind == "memory" else None
    status = run.live(lambda call: alone(call, memory), int(resumes), rng.choice(["auto", "threads"]), at=at)
    if status not in (0, ENDS.get(kind.split(", ")[-1])):
        raise Wrong(f"the process ends with {status}")
    said = run.check(lambda: run.live(alone, 1 - int(resumes), "auto"), f"{kind}: {moment}")
    return said or ("well" if status == 0 else f"killed ({status})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=100000)
    parser.add_argument("--seconds", type=float, default=600)
    kinds = [*STRIKES, "memory"]
    parser.add_argument("--kind", action="append", choices=kinds, help="default: all; 'memory' needs root")
    arguments = parser.parse_args()
    kinds = arguments.kind or (kinds if os.geteuid() == 0 else kinds[:-1])
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    outcomes: Counter[str] = Counter()
    deadline = time.monotonic() + arguments.seconds
    with a_place() as place:
        runs: dict[int, StruckRun] = {}
        while outcomes.total() < arguments.trials and time.monotonic() < deadline:
            which, resumes = rng.randrange(len(PROGRAMS)), rng.random() < 0.4
            run = runs[which] if which in runs else runs.setdefault(which, StruckRun(place, which))
            kind = rng.choice(kinds)
            moment = "all the time" if kind == "memory" else rng.choice(MOMENTS)
            try:
                said = strike(run, kind, moment, resumes, rng)
            except Wrong as wrong:
                said = f"WRONG: {wrong}"
            outcomes[said.split(":")[0]] += 1
            print(f"{which} {'resumed' if resumes else 'new'}, {kind} ({moment}): {said}", flush=True)
    print(dict(outcomes), flush=True)
    raise SystemExit(outcomes["WRONG"] > 0)


if __name__ == "__main__":
    main()
