#!/usr/bin/env python3
"""Let one of several ranks fail in every way there is: all of them must end, in time, with the same first error.

The ranks are processes as torchrun starts them, over gloo. One of them (or two) is killed, stopped, raises in the
model or before, exits in the middle, or has a disk that is full or fails, at all stages of an engine's life. Each
other one must end by itself with exit status 1 and the same ``RankError``, which names the rank and what it failed
with; the failing one with its own exception. No process may abort, crash at the interpreter's end, or be left over.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which takes seconds, and torch.distributed wants it
from _full_disk import CannotMount, in_own_mounts, mounted, take_room
from _ranks_processes import SERVE, Launcher, Process, end_all, serve
from torch import distributed, nn

from offload import BudgetError, OffloadEngine

NUM_RANKS = 3
WIDTH = 256
LIMIT_BYTES = 32 << 10
TROUBLE = re.compile("terminate called|Segmentation|Fatal Python|Aborted|Exception ignored|core dumped")
SLACK_S = 20.0
"""Processes take this long to end on a machine that is busy."""


class Wrong(Exception):
    """The ranks did not end as they must."""


# What one rank does.


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def life(job: dict[str, Any]) -> None:
    """Train until something happens; ``job`` says what."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    options = {"lr": 1e-2, "rank_timeout": job["timeout_s"]}
    if job["path"] is not None:
        options |= {"nvme_path": job["path"], "nvme_capacity": "64MiB"}
        options["host_memory"] = least_budget(options) if job["fault"] != "has no disk" else 10 << 20
    stage, fault = (job["stage"], FAULTS[job["fault"]]) if job["fails"] else ("", None)

    def fail(engine: Any) -> None:
        print("fails", flush=True)
        fault(engine)

    if stage == "engine":
        make = OffloadEngine._make_in
        OffloadEngine._make_in = lambda *own: (fail(None), make(*own))[1]
    engine = OffloadEngine(Model(), **options)
    with engine if job["closes"] else contextlib.nullcontext():
        if stage == "model":
            engine.module[2].register_forward_pre_hook(lambda *_: fail(engine) if engine.global_step == 3 else None)
        while engine.global_step < job["steps"]:
            if stage == "loader" and engine.global_step == 3:
                fail(engine)
            engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
            engine.step()
        if stage == "end":
            fail(engine)


def least_budget(options: dict[str, Any]) -> int:
    """So little host memory that weights rest on NVMe. All ranks ask."""
    try:
        OffloadEngine(Model(), **options, host_memory=1)
    except BudgetError as error:
        return error.needed_bytes
    raise SystemExit("one byte of host memory is enough")


def _raise(error: BaseException) -> None:
    raise error


def _wait(engine: Any) -> None:
    """For a signal from outside."""
    time.sleep(600)


def _sleep(engine: Any) -> None:
    time.sleep(1.5 * engine.config.rank_timeout)


def _limit(engine: Any) -> None:
    """The store's files may not be written any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))


def _truncate(engine: Any) -> None:
    """The store's files lose their content behind its back."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(engine.config.paths[0]):
                os.truncate(link, 0)


def _break_thread(engine: Any) -> None:
    """The thread that carries out collectives raises."""
    engine._session.parts.ranks.collectives._carry_out = {}


def _destroy(engine: Any) -> None:
    distributed.destroy_process_group()


FAULTS: dict[str, Callable[[Any], None]] = {
    "raises": lambda engine: _raise(ValueError("planted")),
    "has no memory": lambda engine: _raise(MemoryError()),
    "exits": lambda engine: sys.exit(3),
    "leaves": lambda engine: os._exit(4),
    "kills itself": lambda engine: os.kill(os.getpid(), signal.SIGKILL),
    "waits": _wait,
    "sleeps": _sleep,
    "is limited": _limit,
    "is truncated": _truncate,
    "loses a thread": _break_thread,
    "destroys the group": _destroy,
    "has no disk": _wait,
}


# What is seen from outside.


@dataclass(frozen=True)
class Case:
    """``fault`` comes over the ranks ``failing``, in ``stage``: "engine", "loader", "model" or "end"; ``signal`` comes
    from outside when they wait. ``error``: what the others say, an expression, None if they end well; ``own``: what the
    failing ones end with, an exit status, and an expression for their last error."""

    name: str
    fault: str
    failing: tuple[int, ...] = (1,)
    stage: str = "model"
    signal: int | None = None
    error: str | None = None
    own: tuple[int, str] = (1, "")
    closes: bool = True
    steps: int = 1000
    on_disk: bool = False


GONE = "RankError: (rank {} is gone, or hangs: nothing was heard of it for|the store that all ranks share does not)"
PLANTED = r"RankError: rank {}: ValueError: planted"


def cases() -> list[Case]:
    killed = (-signal.SIGKILL, "")
    found = [
        Case("raises in the model", "raises", error=PLANTED.format(1), own=(1, "ValueError: planted")),
        Case("rank 0 raises", "raises", (0,), error=PLANTED.format(0), own=(1, "ValueError: planted")),
        Case("raises in the loader", "raises", (2,), "loader", error=PLANTED.format(2), own=(1, "ValueError")),
        Case("raises without with", "raises", closes=False, error=PLANTED.format(1), own=(1, "ValueError")),
        Case("rank 0, without with", "raises", (0,), closes=False, error=PLANTED.format(0), own=(1, "ValueError")),
        Case("two raise", "raises", (0, 2), error="RankError: rank [02]: ValueError: planted", own=(1, "ValueError")),
        Case("no memory", "has no memory", error="rank 1: MemoryError", own=(1, "MemoryError")),
        Case("exits", "exits", error="rank 1: SystemExit: 3", own=(3, "")),
        Case("exits without with", "exits", closes=False, error="different places.*rank 1 at the end", own=(3, "")),
        Case("leaves", "leaves", error=GONE.format(1), own=(4, "")),
        Case("computes for long", "sleeps", stage="loader", own=(0, ""), steps=5),
        Case("a thread", "loses a thread", error="rank 1: KeyError", own=(1, "KeyError")),
        Case("raises in the making", "raises", stage="engine", error=PLANTED.format(1), own=(1, "ValueError")),
        Case("rank 0, in the making", "raises", (0,), "engine", error=PLANTED.format(0), own=(1, "ValueError")),
        Case("killed in the making", "kills itself", stage="engine", error=GONE.format(1), own=killed),
        Case("raises at the end", "raises", stage="end", steps=4, error=PLANTED.format(1), own=(1, "ValueError")),
        Case("killed at the end", "kills itself", stage="end", steps=4, error=GONE.format(1), own=killed),
        Case("killed at the end, without with", "kills itself", (1,), "end", None, None, killed, False, 4),
        Case("ends without with", "sleeps", (1,), "end", own=(0, ""), steps=4, closes=False),
        Case("destroys the group", "destroys the group", (0, 1, 2), "end", own=(0, ""), steps=4, closes=False),
        Case("disk fails to write", "is limited", error="rank 1: Storage", own=(1, "Storage"), on_disk=True),
        Case("disk fails to read", "is truncated", error="rank 1: Storage", own=(1, "Storage"), on_disk=True),
        Case("disk is full", "has no disk", (1,), "", error="rank 1: Storage", own=(1, "Storage"), on_disk=True),
    ]
    for rank in range(NUM_RANKS):
        gone = GONE.format(rank)
        found.append(Case(f"rank {rank} killed", "waits", (rank,), signal=signal.SIGKILL, error=gone, own=killed))
        found.append(
            Case(f"rank {rank} stopped", "sleeps", (rank,), signal=signal.SIGSTOP, error=gone, own=(1, "RankError"))
        )
    return found


def run(case: Case, launcher: Launcher, timeout_s: float) -> str:
    """Raises ``Wrong``. Returns the common error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"timeout_s": timeout_s, **{name: getattr(case, name) for name in ("fault", "stage", "closes", "steps")}}
        jobs = [{**job, "fails": rank in case.failing, "path": None} for rank in range(NUM_RANKS)]
        with contextlib.ExitStack() as closing:
            for rank in range(NUM_RANKS) if case.on_disk else ():
                path = folder / f"disk-{rank}"
                path.mkdir()
                jobs[rank]["path"] = str(path)
                if rank in case.failing and case.fault == "has no disk":
                    closing.enter_context(mounted("tmpfs", path))
                    take_room(path, 1 << 16)
            return _run(case, launcher.start(jobs, folder), timeout_s)


def _run(case: Case, processes: Sequence[Process], timeout_s: float) -> str:
    try:
        _wait_for_ends(case, processes, timeout_s)
        return _check(case, processes)
    except Wrong as wrong:
        told = (f"--- rank {rank}\n{process.told()}" for rank, process in enumerate(processes))
        raise Wrong("\n".join([str(wrong), *told])) from None
    finally:
        end_all(processes)


def _wait_for_ends(case: Case, processes: Sequence[Process], timeout_s: float) -> None:
    """All end by themselves, in time after the failure; one that was stopped goes on when the others have ended."""
    deadline = time.monotonic() + 60
    for rank in case.failing if case.stage else ():
        while "fails" not in processes[rank].told() and processes[rank].poll() is None:
            if time.monotonic() > deadline:
                raise Wrong(f"rank {rank} did not come to its fault")
            time.sleep(0.01)
    for rank in case.failing if case.signal else ():
        processes[rank].send(case.signal)
    deadline = time.monotonic() + 1.5 * timeout_s + SLACK_S
    others_first = sorted(range(NUM_RANKS), key=case.failing.__contains__)
    for rank in others_first:
        if rank in case.failing and case.signal == signal.SIGSTOP:
            processes[rank].send(signal.SIGCONT)
            deadline = time.monotonic() + 1.5 * timeout_s + SLACK_S
        if not processes[rank].wait(deadline - time.monotonic()):
            for process in processes:
                process.send(signal.SIGUSR1)
            time.sleep(0.5)
            raise Wrong(f"rank {rank} has not ended")


def _check(case: Case, processes: Sequence[Process]) -> str:
    others = [rank for rank in range(NUM_RANKS) if rank not in case.failing]
    errors = {_last_error(processes[rank]) for rank in others}
    if len(errors) > 1:
        raise Wrong(f"different errors: {errors}")
    error = errors.pop() if errors else ""
    if not re.search(case.error or "^$", error, re.DOTALL):
        raise Wrong(f"the others say: {error}")
    for rank, process in enumerate(processes):
        status, own = case.own if rank in case.failing else (0 if case.error is None else 1, "")
        if process.status != status:
            raise Wrong(f"rank {rank} ended with {process.status}")
        if not re.search(own, _last_error(process)):
            raise Wrong(f"rank {rank} says: {_last_error(process)}")
        if TROUBLE.search(process.told()):
            raise Wrong(f"rank {rank} is in trouble")
    return error


def _last_error(process: Process) -> str:
    """The last exception that it has told of, without the names of modules."""
    found = re.findall(r"^(?:\[rank\d\]: )?(?:[a-z_]+\.)*([A-Z]\w+(?:: .*(?:\n  .*)*)?)$", process.told(), re.MULTILINE)
    return found[-1] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=3.0, help="rank_timeout of the engines, in seconds")
    parser.add_argument("--case", action="append", help="one of them, by its name (default: all)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mounted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.mounted:
        with contextlib.suppress(CannotMount):
            command = [sys.executable, *sys.orig_argv[1:], "--mounted"]
            raise SystemExit(in_own_mounts(command).returncode)
    launcher, num_wrong = Launcher(__file__), 0
    chosen = [case for case in cases() if arguments.case is None or case.name in arguments.case]
    for _ in range(arguments.rounds):
        for case in chosen:
            started = time.monotonic()
            try:
                said = run(case, launcher, arguments.timeout).partition("\n")[0] or "nothing"
            except CannotMount as error:
                said = f"skipped: {error}"
            except Wrong as wrong:
                num_wrong, said = num_wrong + 1, f"WRONG: {wrong}"
            print(f"{case.name}: {said} ({time.monotonic() - started:.1f} s)", flush=True)
    launcher.close()
    raise SystemExit(num_wrong > 0)


if __name__ == "__main__":
    if SERVE in sys.argv:
        life(serve())
    else:
        main()
