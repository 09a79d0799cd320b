#!/usr/bin/env python3
"""An interrupt at every line that a training step executes: the run goes on with the same bits, or ends with our error.

A small model is trained for a few steps without an interrupt. Then, for each line of ours that one of these steps
executes on the training thread, the same run is made again with one Ctrl-C there. The program catches it and goes on as
one does who wants to keep the run: a step that was not taken is made again after ``zero_grad()``, one that was taken
is not. All losses and final weights must be those of the first run, to the last bit, or an ``OffloadError`` must say
why not; on several ranks the same one on all of them. Nothing may hang, crash or raise anything else, no Ctrl-C may be
lost, ``close()`` must work, and a simulated device must have seen every access in order and have all its memory back.

Several interrupts are tried in one run, each in a step of its own; if that goes wrong, each of them in a run of its
own. The runs are made in processes that are forked for them; one that hangs is ended at its deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which takes seconds: once, and not in each process
from _interrupts_model import VARIANTS, Model, Variant, take_step
from _interrupts_watch import Place, Target, Watch
from torch import distributed

from offload import OffloadEngine, OffloadError
from offload.testing.simulated import SimulatedDevice
from offload.tiers import bandwidth

NUM_RECORDED = 3
"""Steps in which places are looked for: the first one does more than the others."""

NUM_STEPS = NUM_RECORDED + 1
"""Of a run with one interrupt: a whole step follows it."""


def recover(engine: OffloadEngine, step: int) -> None:
    """What the user does about an interrupt in this step."""
    if engine.global_step == step:
        assert engine.optimizer is not None
        engine.optimizer.zero_grad()


# One run, in a process of its own.


@dataclass
class Run:
    """What one run on one rank came to. ``error`` is ours; ``wrong`` says what must not be."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, Counter[Place]] = field(default_factory=dict)
    stacks: dict[int, list[str]] = field(default_factory=dict)
    """See ``Watch``, as of the last."""
    said: set[str] = field(default_factory=set)
    """Warnings."""
    taken: dict[int, bool] = field(default_factory=dict)
    """Of each step that an interrupt came out of: it had been taken then."""
    num_dropped: int = 0
    """Interrupts that came in finalizers: Python drops them."""
    error: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class Task:
    """A run of so many steps, with these interrupts. Without any, places are counted. See ``Watch`` for the others."""

    num_steps: int
    targets: Sequence[Target] = ()
    points: bool = False
    library: bool = False


def run(variant: Variant, settings: dict[str, Any], rank: int, task: Task) -> Run:
    """Train, and be interrupted."""
    targets = [target for target in task.targets if target.rank == rank]
    watch = Watch(targets, 0 if task.targets else NUM_RECORDED, task.points, task.library)
    found = Run(counts=watch.counts, stacks=watch.stacks)
    settings = variant.with_device(settings)
    sys.unraisablehook = partial(_note_dropped, found)
    engine: OffloadEngine | None = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with OffloadEngine(Model(), **settings) as engine:
                _train(engine, variant, rank, task.num_steps, watch, found)
                found.weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            if variant.options.get("durable"):
                found.wrong = _committed(settings, found.weights)
        except OffloadError as error:
            found.error = f"{type(error).__name__}: {error}"
        except KeyboardInterrupt as error:
            found.wrong = f"a later call raises it again: {_described(error)}"
        except BaseException as error:
            found.wrong = _described(error)
        try:
            engine.close() if engine is not None else None
        except BaseException as error:
            found.wrong = found.wrong or f"close(): {_described(error)}"
    found.said = {str(warning.message) for warning in said}
    num_lost = len(found.stacks) - len(found.taken) - found.num_dropped
    if num_lost > bool(found.error):
        found.wrong = found.wrong or f"{num_lost} interrupts were lost"
    found.wrong = found.wrong or _left(settings.get("device"))
    return found


def _train(engine: OffloadEngine, variant: Variant, rank: int, num_steps: int, watch: Watch, found: Run) -> None:
    handler = signal.getsignal(signal.SIGINT)
    while (step := engine.global_step) < num_steps:
        try:
            with watch.over(step):
                take_step(engine, variant, rank, found.losses)
        except KeyboardInterrupt:
            if step in found.taken:
                raise
            found.taken[step] = engine.global_step > step
            recover(engine, step)
        else:
            if signal.getsignal(signal.SIGINT) != handler:
                raise AssertionError("after a step another handler of Ctrl-C is there than before")


def _committed(settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    """What is wrong with the last commit."""
    with OffloadEngine(Model(), **settings) as engine:
        engine.load_checkpoint()
        for name, parameter in engine.module.named_parameters():
            if not torch.equal(parameter.detach(), weights[name]):
                return f"the last commit has other bits of {name}"
    return ""


def _left(device: SimulatedDevice | None) -> str:
    """What the engine has left behind."""
    deadline = time.monotonic() + 2
    while threads := sorted(t.name for t in threading.enumerate() if t.name.startswith("offload-")):
        if time.monotonic() > deadline:
            return f"threads are left after close(): {', '.join(threads)}"
        time.sleep(0.001)
    if device is None:
        return ""
    if device.violations:
        return f"not ordered: {device.violations[0]}"
    if device.allocated_bytes or device.pinned:
        return f"{device.allocated_bytes} bytes of the device and {len(device.pinned)} pinned ranges are left"
    return ""


def _note_dropped(found: Run, unraisable: Any) -> None:
    found.num_dropped += unraisable.exc_type is KeyboardInterrupt


def _described(error: BaseException) -> str:
    own = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    where = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in reversed(frames)]
    return f"{type(error).__name__}: {error} in {' < '.join(where[:4])}"


def _serve(variant: Variant, rank: int, parent: Connection, folder: Path, dump: Path) -> None:
    """Make the runs that ``parent`` asks for, until it is gone."""
    descriptor = os.open(dump, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if variant.num_ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if rank == 0:
            store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            parent.send(store.port)
        else:
            store = distributed.TCPStore("127.0.0.1", parent.recv())
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=variant.num_ranks)
    gc.freeze()
    settings: dict[str, Any] | None = None
    with contextlib.suppress(EOFError):
        while True:
            task, name = parent.recv()
            path = folder / name
            path.mkdir(exist_ok=True)
            if settings is None:
                settings = variant.settings(path)
            answer = run(variant, {**settings, "nvme_path": path}, rank, task)
            shutil.rmtree(path, ignore_errors=True)
            parent.send(answer)


class Stuck(Exception):
    """A process hangs, or has ended."""


class Processes:
    """The processes of one variant, one for each rank. They are started by the first run, and anew after ``stop``."""

    def __init__(self, variant: Variant, folder: Path) -> None:
        self._variant = variant
        self._folder = folder
        self._context = multiprocessing.get_context("fork")
        self._started: list[Any] = []
        self._ends: list[Connection] = []
        self._dumps: list[Path] = []
        self._count = 0

    def run(self, task: Task, deadline_s: float) -> list[Run]:
        """One run on all ranks. Raises ``Stuck``."""
        if not self._started:
            self._start()
            deadline_s += 20
        self._count += 1
        for end in self._ends:
            end.send((task, f"run-{self._count}"))
        answers: dict[int, Run] = {}
        deadline = time.monotonic() + deadline_s
        while len(answers) < len(self._ends):
            missing = [end for rank, end in enumerate(self._ends) if rank not in answers]
            ready = wait(missing, max(deadline - time.monotonic(), 0))
            if not ready:
                told = "; ".join(self._where(rank) for rank in range(len(self._ends)) if rank not in answers)
                self.stop()
                raise Stuck(f"not over after {deadline_s:g} s: {told}")
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    answers[rank] = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._started[rank].join()
                    told = f"ended with {self._started[rank].exitcode}: {self._dumps[rank].read_text()[-2000:]}"
                    self.stop()
                    raise Stuck(told) from None
        return [answers[rank] for rank in range(len(self._ends))]

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in self._started:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._started, self._ends, self._dumps = [], [], []

    def _start(self) -> None:
        for rank in range(self._variant.num_ranks):
            own, other = self._context.Pipe()
            dump = Path(tempfile.mkstemp(prefix="dump-", dir=self._folder)[1])
            arguments = (self._variant, rank, other, self._folder, dump)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            self._started.append(process)
            self._ends.append(own)
            self._dumps.append(dump)
        if len(self._ends) > 1:
            port = self._ends[0].recv()
            for end in self._ends[1:]:
                end.send(port)

    def _where(self, rank: int) -> str:
        """Where a rank's training thread hangs."""
        before = len(self._dumps[rank].read_text())
        os.kill(self._started[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        lines = self._dumps[rank].read_text()[before:].splitlines()
        own = lines[max(index for index, line in enumerate(lines or [""]) if "hread 0x" in line or not index) :]
        frames = re.findall(r'File ".*?([^/]*)", line (\d+) in (.*)', "\n".join(own))
        return f"rank {rank} in " + " < ".join(f"{function} ({file}:{line})" for file, line, function in frames[:9])


# The campaign.


@dataclass
class Outcome:
    """Of one interrupt. ``kind``: "same", "error", "not reached" or "WRONG"."""

    target: Target
    kind: str
    said: str = ""
    stack: Sequence[str] = ()
    taken: bool = False


def judge(expected: Sequence[Run], found: Sequence[Run]) -> tuple[str, str]:
    """What kind of end a run came to, and what there is to say of it. There is one for each rank."""
    of_ranks = "" if len(found) == 1 else "rank {}: "
    for rank, (before, after) in enumerate(zip(expected, found, strict=True)):
        wrong = after.wrong or ("" if after.error else _difference(before, after))
        if wrong:
            return "WRONG", of_ranks.format(rank) + wrong
    errors = [each.error for each in found]
    if len(set(errors)) > 1:
        said = "; ".join(f"rank {rank}: {error or 'no error'}" for rank, error in enumerate(errors))
        return "WRONG", f"not the same end: {said}"
    return ("error", errors[0]) if errors[0] else ("same", "")


def _difference(expected: Run, found: Run) -> str:
    losses = [step for step, values in expected.losses.items() if found.losses.get(step) != values]
    if losses:
        return f"other losses from step {losses[0]} on: {found.losses.get(losses[0])}, not {expected.losses[losses[0]]}"
    for name, weight in expected.weights.items():
        if not torch.equal(weight, found.weights[name]):
            return f"other bits of {name} at the end"
    more = found.said - expected.said
    return f"it warns: {sorted(more)[0]}" if more else ""


@dataclass
class Campaign:
    """The interrupts of one variant, and what became of them."""

    name: str
    processes: Processes
    task: Task
    """Of one run without interrupts."""
    rng: random.Random
    every: bool
    together: int
    """Interrupts in one run."""
    lines: Sequence[str]
    """Only these places, if there are any."""
    deadline_s: float
    expected: dict[int, Sequence[Run]] = field(default_factory=dict)
    """By the number of steps: what a run without interrupts comes to."""

    def run(self, seconds: float, most: int) -> list[Outcome]:
        """Try as many as there is time for. Prints what was found."""
        started = time.monotonic()
        targets = self._targets(self._recorded())
        self.rng.shuffle(targets)
        outcomes: list[Outcome] = []
        chosen = targets[:most]
        while chosen and time.monotonic() - started < seconds:
            group, chosen = chosen[: self.together], chosen[self.together :]
            outcomes += self._try_together(group)
        self.processes.stop()
        self._tell(outcomes, len(targets), time.monotonic() - started)
        return outcomes

    def _recorded(self) -> Sequence[Run]:
        """The places of each rank. Raises ``AssertionError`` if not even runs without interrupts are equal."""
        num_steps = self._num_steps if self.together > 1 else NUM_STEPS
        expected = self._expected(num_steps)
        again = self.processes.run(replace(self.task, num_steps=num_steps), self.deadline_s)
        kind, said = judge(expected, again)
        if kind != "same":
            raise AssertionError(f"{self.name}, without an interrupt: {said}")
        for before, after in zip(expected, again, strict=True):
            for step in range(NUM_RECORDED):  # other threads decide about some lines
                before.counts[step] |= after.counts[step]
        return expected

    @property
    def _num_steps(self) -> int:
        """Of a run with several interrupts: a whole step follows the last one."""
        return self.together + 2

    def _expected(self, num_steps: int) -> Sequence[Run]:
        if num_steps not in self.expected:
            found = self.processes.run(replace(self.task, num_steps=num_steps), self.deadline_s)
            kind, said = judge(found, found)
            if kind != "same":
                raise AssertionError(f"{self.name}, without an interrupt: {said}")
            self.expected[num_steps] = found
        return self.expected[num_steps]

    def _try_together(self, targets: Sequence[Target]) -> list[Outcome]:
        """In one run; in runs of their own, if that does not end as if nothing had been."""
        if len(targets) == 1:
            return [self._try(targets[0])]
        placed: dict[int, Target] = {}
        for target in sorted(targets):  # of the first step there is one: the others take later ones
            placed.setdefault(0 if target.step == 0 and 0 not in placed else len(placed) + 1, target)
        moved = [target._replace(step=step) for step, target in placed.items()]
        found: Sequence[Run] = ()
        try:
            expected = self._expected(self._num_steps)
            found = self.processes.run(replace(self.task, num_steps=self._num_steps, targets=moved), self.deadline_s)
            kind, said = judge(expected, found)
        except Stuck as error:
            kind, said = "WRONG", str(error)
        if kind == "same":
            outcomes = [self._outcome(target, found, "same", "", step) for step, target in placed.items()]
            return [self._try(each.target) if each.kind == "not reached" else each for each in outcomes]
        self.processes.stop()
        outcomes = [self._try(target) for target in targets]
        if kind == "WRONG" and all(each.kind != "WRONG" for each in outcomes):
            places = ", ".join(f"{target.place}" for target in placed.values())
            said = f"together, not one by one ({places}): {said}"
            outcomes[-1] = replace(outcomes[-1], kind="WRONG", said=said)
        return outcomes

    def _try(self, target: Target) -> Outcome:
        try:
            expected = self._expected(NUM_STEPS)
            found = self.processes.run(replace(self.task, targets=[target]), self.deadline_s)
        except Stuck as error:
            return Outcome(target, "WRONG", str(error))
        kind, said = judge(expected, found)
        if kind == "WRONG":  # what is left of it must not be taken for the next one's
            self.processes.stop()
        return self._outcome(target, found, kind, said, target.step)

    def _outcome(self, target: Target, found: Sequence[Run], kind: str, said: str, step: int) -> Outcome:
        own = found[target.rank]
        if kind == "same" and step not in own.stacks:
            kind = "not reached"
        return Outcome(target, kind, said, own.stacks.get(step, ()), own.taken.get(step, False))

    def _targets(self, expected: Sequence[Run]) -> list[Target]:
        """The first and the last time that a step comes to each place, and one by chance; or all times. Of several
        ranks one is interrupted, by chance."""
        targets: list[Target] = []
        places = {place for each in expected for counts in each.counts.values() for place in counts}
        for place in sorted(places):
            if self.lines and f"{place.path}:{place.line}" not in self.lines:
                continue
            ranks = [each.counts for each in expected if any(counts[place] for counts in each.counts.values())]
            counts = self.rng.choice(ranks)
            rank = [each.counts for each in expected].index(counts)
            steps = [step for step in (1, 2, 0) if counts[step][place]]
            if self.every:
                chosen = {(step, count) for step in steps for count in range(1, counts[step][place] + 1)}
            else:
                step, any_step = steps[0], self.rng.choice(steps)
                chosen = {(step, 1), (step, counts[step][place])}
                chosen.add((any_step, self.rng.randint(1, counts[any_step][place])))
            targets += (Target(step, place, count, rank) for step, count in sorted(chosen))
        return targets

    def _tell(self, outcomes: Sequence[Outcome], num_targets: int, seconds: float) -> None:
        kinds = Counter(outcome.kind for outcome in outcomes)
        places = len({outcome.target.place for outcome in outcomes})
        figures = ", ".join(f"{kinds[kind]} {kind}" for kind in ("same", "error", "not reached", "WRONG"))
        tried = f"{len(outcomes)} of {num_targets} interrupts at {places} places"
        print(f"{self.name}: {tried} in {seconds:.0f} s: {figures}", flush=True)
        lines = (outcome.said.partition("\n")[0] for outcome in outcomes if outcome.kind == "error")
        errors = Counter(re.sub(r"\b(rank|step) \d+", r"\1 N", line) for line in lines)
        for said, count in errors.most_common():
            print(f"  {count} times our error: {said}")
        by_place: dict[Place, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if outcome.kind == "WRONG":
                by_place[outcome.target.place].append(outcome)
        for place, wrong in sorted(by_place.items()):
            for said, of_said in sorted(_grouped(wrong, lambda outcome: outcome.said).items()):
                first = of_said[0]
                which = f"step {first.target.step}, time {first.target.count}, rank {first.target.rank}"
                when = "taken" if first.taken else "not taken"
                print(f"  WRONG at {place} ({len(of_said)} times; {which}, {when}): {said}")
                print(f"    in {' < '.join(first.stack[:7])}", flush=True)


def _grouped(items: Sequence[Outcome], key: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of what is tried first, and of what is tried by chance")
    parser.add_argument("--seconds", type=float, default=1200, help="how long to go on, all variants together")
    parser.add_argument("--trials", type=int, default=1 << 62, help="how many interrupts of a variant to try at most")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="one of them (default: all)")
    parser.add_argument("--line", action="append", default=[], metavar="PATH:LINE", help="only there: offload/x.py:7")
    parser.add_argument("--every", action="store_true", help="each time that a step comes to a place")
    parser.add_argument(
        "--points", action="store_true", help="not at lines, but where CPython handles signals: calls and jumps back"
    )
    parser.add_argument("--library", action="store_true", help="also in the parts of the standard library that we call")
    parser.add_argument("--together", type=int, default=20, help="interrupts in one run, where it takes several")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds after which a run hangs")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder for the swap stores")
    options = parser.parse_args()
    if not hasattr(bandwidth, "_SECONDS"):
        raise SystemExit("offload.tiers.bandwidth has no _SECONDS any more: say here how engines measure for less time")
    bandwidth._SECONDS = 0.005  # thousands of engines are made
    names = options.variant or list(VARIANTS)
    task = Task(NUM_STEPS, (), options.points, options.library)
    num_wrong, started = 0, time.monotonic()
    for index, name in enumerate(names):
        seconds = (options.seconds - (time.monotonic() - started)) / (len(names) - index)
        rng = random.Random(f"{options.seed} {name}")
        together = 1 if VARIANTS[name].once else options.together
        with tempfile.TemporaryDirectory(prefix="interrupts-", dir=options.path) as folder:
            processes = Processes(VARIANTS[name], Path(folder))
            campaign = Campaign(name, processes, task, rng, options.every, together, options.line, options.deadline)
            outcomes = campaign.run(seconds, options.trials)
        num_wrong += sum(outcome.kind == "WRONG" for outcome in outcomes)
    print(f"{num_wrong} interrupts went wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
