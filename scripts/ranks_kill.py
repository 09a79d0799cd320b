#!/usr/bin/env python3
"""Kill ranks with SIGKILL at random moments, again and again: torchrun starts all of them anew, and the run ends with
the bits of the one that was not killed.

Each run trains a small model with dropout, clipping, a learning-rate schedule and data of each rank's own. What ends it
in the middle is only the kill of one rank, or several, from outside; what goes on is only torchrun's agent with its
``max_restarts``, and ``load_checkpoint`` in each rank. A run is ``durable``, or saves a checkpoint every few steps. A
kill comes at any moment: while ranks start, load, train, commit, save or close. Every loss that a rank ever printed for
a step, and the final weights on every rank, must be those of a run in memory. What torchrun starts has a rank forked
from a process that has imported everything, so that a start takes milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which takes seconds, and torch.distributed wants it
import torch.distributed.run
from torch import nn

from offload import BudgetError, OffloadEngine

NUM_STEPS = 10
WIDTH = 32
VOCAB = 100
QUIET_S = 120.0
"""No run may be without a new line for so long."""
IN_VAIN_MAX = 4
"""So often may all ranks start anew without a kill before and a new step in between: a rank that is killed late may
make the others fail in the next start."""


# What each rank does.


def make_engine(options: dict[str, Any]) -> OffloadEngine:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB))
    return OffloadEngine(model, lr=1e-2, gradient_clipping=1.0, precision="fp32", **options)


def life(folder: str, options: dict[str, Any], save_every: int) -> None:
    """One rank, from what is durable or saved to the last step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, log = os.environ["RANK"], Path(folder, "log")

    def tell(what: str, *values: object) -> None:
        line = " ".join(map(str, (what, rank, *values))) + "\n"
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode())  # at once, or not at all
        os.close(descriptor)

    tell("begins", os.environ["TORCHELASTIC_RESTART_COUNT"], os.getpid())
    saved = Path(folder, "saved")
    with make_engine(options) as engine:
        torch.manual_seed(7 + int(rank))
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 3, 0.5)
        engine.register_for_checkpointing(schedule)
        if engine.config.durable:
            engine.load_checkpoint()
        elif (saved / "latest").exists():
            engine.load_checkpoint(saved)
        tell("resumes", engine.global_step)
        while engine.global_step < NUM_STEPS:
            batch = torch.randint(0, VOCAB, (2, 6))  # from the state that the last step left
            loss = nn.functional.cross_entropy(engine(batch).flatten(0, 1), batch.flatten())
            engine.backward(loss)
            engine.step()
            schedule.step()
            tell("step", engine.global_step, loss.item().hex())
            if save_every and engine.global_step % save_every == 0:
                engine.save_checkpoint(saved)
        digest = hashlib.sha256()
        for value in engine.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
    tell("ends", digest.hexdigest())


def reference(folder: str) -> None:
    """The run that is not killed; and so little host memory that weights rest on NVMe."""
    try:
        make_engine({"nvme_path": folder, "host_memory": 1, "durable": 1})
    except BudgetError as error:
        Path(folder, "least").write_text(str(error.needed_bytes))  # the same of all ranks
    life(folder, {}, 0)


# How they are started.


class Forks:
    """A process that forks ranks for those who ask at a socket (``_ranks_stand_in``)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._process = os.fork()
        if self._process == 0:
            self._serve()

    def close(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _serve(self) -> None:
        """Never returns. Has one thread, as a process that forks must."""
        asking: dict[int, socket.socket] = {}
        self._listener.settimeout(0.005)
        while True:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(None)
                process = os.fork()
                if process == 0:
                    _live(connection)
                asking[process] = connection
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    connection = asking.pop(ended[0])
                    with contextlib.suppress(OSError):  # torchrun may have killed the one that asked
                        connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
                    connection.close()


def _live(connection: socket.socket) -> None:
    """The forked process, to its end."""
    status = 1
    try:
        with connection.makefile("rw") as file:
            os.environ.update(json.loads(file.readline()))
            output = os.open(os.environ["RANKS_OUTPUT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1), os.dup2(output, 2)
            file.write(f"{os.getpid()}\n")
            file.flush()
        job = json.loads(os.environ["RANKS_JOB"])
        {"life": life, "reference": reference}[job[0]](*job[1:])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def torchrun(forks: Forks, num_ranks: int, output: Path, *job: object) -> int:
    """``torchrun --max-restarts`` in a process of its own, which leads a group of processes."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1), os.dup2(file, 2)
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANKS_OUTPUT": str(output), "RANKS_JOB": json.dumps(job)}
        options = ["--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=10000", "--monitor-interval=0.02"]
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_ranks_stand_in.py")), str(forks.path)]
        torch.distributed.run.main([*options, "--no-python", *command])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# Who kills.


def restarts_in_vain(told: list[list[str]]) -> int:
    """How often all ranks have started anew since the last new step, but for those starts that a kill explains."""
    step = newest = in_vain = 0
    for words in told:
        if words[0] == "step" and int(words[2]) > step:
            step, in_vain = int(words[2]), 0
        elif words[0] == "begins" and int(words[2]) > newest:
            newest, in_vain = int(words[2]), in_vain + 1
        elif words[0] == "killed":
            in_vain -= 1
    return in_vain


class Run:
    """One training, and the log that its ranks write."""

    def __init__(self, forks: Forks, num_ranks: int, folder: Path, job: str, *args: object) -> None:
        self._log = folder / "log"
        self._log.touch()
        self._output = folder / "output"
        self._torchrun = torchrun(forks, num_ranks, self._output, job, str(folder), *args)
        self._status: int | None = None
        self._last = time.monotonic(), 0

    def told(self) -> list[list[str]]:
        return [line.split() for line in self._log.read_text().splitlines()]

    def is_over(self) -> bool:
        """Raises ``SystemExit`` if it hangs, or the agent has failed."""
        if self._status is None:
            found, status = os.waitpid(self._torchrun, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        if self._status:
            raise SystemExit(f"{self._output.read_text()}\ntorchrun ended with {self._status}")
        size = self._log.stat().st_size
        if size != self._last[1]:
            self._last = time.monotonic(), size
            if restarts_in_vain(self.told()) > IN_VAIN_MAX:
                raise SystemExit(
                    f"{self._output.read_text()}\nthe run cannot go on: {IN_VAIN_MAX + 1} starts brought no new step"
                )
        elif time.monotonic() - self._last[0] > QUIET_S:
            raise SystemExit(f"{self._output.read_text()}\na hang: no rank does anything for {QUIET_S:g} s")
        return self._status is not None

    def note_kill(self) -> None:
        with self._log.open("a") as log:
            log.write("killed\n")

    def workers(self) -> tuple[int, list[int]]:
        """How often all were started anew, and the processes of the ranks that have begun since."""
        begun = [(int(count), int(process)) for what, _, count, process in self._of("begins", 4)]
        newest = max((count for count, _ in begun), default=0)
        return newest, [process for count, process in begun if count == newest]

    def _of(self, what: str, num_words: int) -> list[list[str]]:
        return [words for words in self.told() if words[0] == what and len(words) == num_words]

    def losses(self) -> list[tuple[int, int, str]]:
        """Of each rank and step."""
        return [(int(rank), int(step), loss) for _, rank, step, loss in self._of("step", 4)]

    def finals(self) -> set[tuple[str, ...]]:
        return {tuple(words[2:]) for words in self._of("ends", 3)}

    def resumed_at(self) -> list[int]:
        return [int(step) for _, rank, step in self._of("resumes", 3) if rank == "0"]

    def wait(self) -> None:
        while not self.is_over():
            time.sleep(0.01)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing of it goes on, whatever has happened."""
        for process in [self._torchrun, *self.workers()[1]] if self._status is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def kill_some(run: Run, rng: random.Random, num_ranks: int) -> int:
    """Kill ranks of the present start, in a moment; how many starts were ended so."""
    count = run.workers()[0]
    moment = rng.choice(["start", "resume", "train"])
    before = len(run.told())
    wanted = {"start": 1, "resume": num_ranks + 1, "train": 2 * num_ranks + rng.randrange(4 * num_ranks)}[moment]
    while not run.is_over() and len(run.told()) < before + wanted and run.workers()[0] == count:
        time.sleep(0.002)
    time.sleep(rng.expovariate(1 / 0.1))  # the moment is what is random here
    processes = run.workers()[1]
    if run.is_over() or not processes:
        return 0
    for process in rng.sample(processes, rng.choice([1, 1, 1, 2, len(processes)]) if len(processes) > 1 else 1):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            return 0
    run.note_kill()
    count = run.workers()[0]
    while not run.is_over() and run.workers()[0] == count:
        time.sleep(0.002)
    return int(run.workers()[0] > count)


def campaign(forks: Forks, seed: int, num_kills: int, num_ranks: int) -> Counter[str]:
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, Run(forks, num_ranks, Path(name), "reference") as run:
        run.wait()
        least = int(Path(name, "least").read_text())
        expected = {(rank, step): loss for rank, step, loss in run.losses()}
        final = run.finals()
    if len(final) != 1 or len(expected) != num_ranks * NUM_STEPS:
        raise SystemExit(f"the run that was not killed: {final}, {len(expected)} losses")
    while counts["kills"] < num_kills:
        with tempfile.TemporaryDirectory() as name:
            nvme = Path(name, "nvme")
            nvme.mkdir()
            durable, save_every = rng.choice([(1, 0), (1, 0), (2, 0), (0, 1), (0, 3)])
            options = {"nvme_path": str(nvme), "host_memory": rng.choice([least, 2 * least, 64 << 20])}
            options |= {"shard": rng.choice(["weights", "gradients", "states", "auto"]), "durable": durable}
            if options["host_memory"] == least:
                options["shard"] = "auto"
            with Run(forks, num_ranks, Path(name), "life", options, save_every) as run:
                in_run = rng.randint(1, 12)
                while in_run > 0 and counts["kills"] < num_kills and not run.is_over():
                    killed = kill_some(run, rng, num_ranks)
                    counts["kills"] += killed
                    in_run -= killed
                run.wait()
            wrong = [(rank, step, loss) for rank, step, loss in run.losses() if expected[rank, step] != loss]
            if wrong or run.finals() != final:
                raise SystemExit(f"{options}, saved every {save_every}: other bits: {wrong or run.finals()}")
            counts["runs"] += 1
            counts["resumed in the middle"] += sum(step > 0 for step in run.resumed_at())
            print(f"{dict(counts)} (durable={durable}, save_every={save_every})", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        forks = Forks(Path(name, "socket"))
        try:
            print(json.dumps(campaign(forks, arguments.seed, arguments.kills, arguments.ranks)))
        finally:
            forks.close()


if __name__ == "__main__":
    main()
