#!/usr/bin/env python3
"""Fill the disk at any moment of a training run: a typed error, and the last good state goes on with the same bits.

Runs of a small model do all that an engine does with a disk, on two file systems of 64 MiB: one has ``nvme_path``,
checkpoints that are links and weights for others, the other one checkpoints that are copied. A run without trouble
tells which moments there are: every call of the system that may need room, by what the run does meanwhile. In each
trial the file system is filled just before one of them, up to some bytes or to the last name, and the call is made:
what it says is the kernel's own. A write to space that is taken already finds it taken away, as on file systems that
copy on write. After the error the run goes on with room again, goes on without, closes, or just ends. Then there is
room, and another run with another budget resumes.

Wanted: no error but ``StorageFull``, with numbers, what survives and what to do; an end in time; nothing half-made
among the checkpoints and no room lost; ``offload inspect --verify`` is content; a resumed run stands at the last commit
that was acknowledged, or after it; it, and each checkpoint, ends with the losses and weights of a run that never was
without room; weights for others are those of before or the new ones.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from _full_disk import KINDS, CannotMount, Moment, Watch, clear, give_room, in_own_mounts, mounted
from run_kill import ended, result, start
from safetensors.torch import load_file, save_file
from torch import nn

import offload.checkpoint.dcp.save
import offload.checkpoint.native.inspection  # noqa: F401
from offload import BudgetError, OffloadEngine, StorageFull
from offload.checkpoint.native.run_identity import clear_held
from offload.cli import main as offload_command

NUM_STEPS = 6
WIDTH = 32
VOCAB = 8192
LIFE_S = 180
"""A life that takes longer hangs: waits of the engine end later."""
CANNOT_MOUNT = 77

PROGRAMS: tuple[dict[str, Any], ...] = (
    {"durable": 1},  # updated speculatively, beside what is current
    {"precision": "bf16"},
    {"durable": 2, "precision": "bf16", "gradient_clipping": 1.0, "weights": True},
    {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2},
)


class Wrong(Exception):
    """The engine did not do what it promises."""


# The model and its training.


def make_model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, 8))
    model[2].requires_grad_(False)
    return model


def make_engine(program: dict[str, Any], weights: Path | None = None, **more: object) -> OffloadEngine:
    """With ``weights`` the model is born from that file, without it in memory."""
    options = {"lr": 1e-2, "tile_bytes": "256KiB", **program, **more}
    options.pop("weights", None)
    if weights is not None:
        return OffloadEngine(make_model("meta"), weights=weights, **options)
    return OffloadEngine(make_model(), **options)


def in_memory(program: dict[str, Any]) -> OffloadEngine:
    return make_engine({name: value for name, value in program.items() if name != "durable"})


def take_step(engine: OffloadEngine) -> str:
    """The last loss, as a hexadecimal number."""
    loss = torch.zeros(())
    for _ in range(engine.config.gradient_accumulation_steps):
        batch = torch.randint(0, VOCAB, (4, 8))  # from the state that the last step left
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
    engine.step()
    return loss.item().hex()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().float().numpy().tobytes())
    return found.hexdigest()


def digest_of_states(states: dict[str, Any]) -> str:
    return digest({f"{key} {name}": value for key, of in states["state"].items() for name, value in of.items()})


def reference(program: dict[str, Any]) -> dict[str, list[str]]:
    """Of each step, 0 included, in memory: loss, weights, states."""
    found: dict[str, list[str]] = {"losses": [""], "weights": [], "states": []}
    with in_memory(program) as engine:
        torch.manual_seed(7)
        while True:
            found["weights"].append(digest(engine.module.state_dict()))
            found["states"].append(digest_of_states(engine.optimizer.state_dict()))
            if engine.global_step == NUM_STEPS:
                return found
            found["losses"].append(take_step(engine))


def least_budget(program: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as path:
        try:
            make_engine(program, nvme_path=path, host_memory=1).close()
        except BudgetError as error:
            return error.needed_bytes
    raise SystemExit("one byte of host memory is enough")


# One life: a process that trains.


class Life:
    """Trains from what is there up to ``stop``, and tells the file ``log`` what it has seen.

    ``then`` is what it does after the first error: "end" at once, "close" the engine, go on with "room" or "without".
    """

    def __init__(self, place: Place, program: dict[str, Any], budget: int, watch: Watch, then: str, stop: int) -> None:
        self._place, self._program, self._budget = place, program, budget
        self._watch, self._then, self._stop = watch, then, stop

    def live(self) -> None:
        with self._watch.on():
            try:
                self._run()
            except StorageFull as error:
                self._tell_error(error)
            self._tell(counts=dict(self._watch.counts))

    def _run(self) -> None:
        place = self._place
        engine = self._start()
        end = contextlib.ExitStack()
        end.callback(self._in_phase, "close")
        try:
            if not self._has_failed(engine):
                self._train(engine)
        except StorageFull as error:
            self._tell_error(error)
            if self._then == "end":
                return
            self._in_phase("close")
            with contextlib.suppress(StorageFull):  # the same, or the last step has no room
                engine.close()
            self._tell(closed_after_error=True)
            return
        self._in_phase("close")
        engine.close()
        self._tell(closed=engine.global_step)
        if self._stop == NUM_STEPS:
            self._export("safetensors", place.disk / "exported")
            self._export("dcp", place.other / "dcp", "--states")

    def _has_failed(self, engine: OffloadEngine) -> bool:
        return bool(engine._session.failure.is_known)

    def _start(self) -> OffloadEngine:
        self._in_phase("start")
        place = self._place
        weights = place.weights if self._program.get("weights") else None
        before = used_bytes(place.nvme)
        options = {"nvme_path": place.nvme, "host_memory": self._budget, "keep_last": 2}

        def make() -> OffloadEngine:
            return make_engine(self._program, weights, **options)

        try:
            return make()
        except StorageFull as error:
            self._tell_error(error)
            if (left := used_bytes(place.nvme)) > before:
                raise Wrong(f"an engine that cannot be made takes {left - before} bytes more than before") from error
            if self._then != "room":
                raise
            self._watch.give_room()
            return make()

    def _train(self, engine: OffloadEngine) -> None:
        place = self._place
        self._in_phase("resume")
        if self._program.get("durable"):
            engine.load_checkpoint()
        elif any((place.disk / "saved").glob("step*")):  # a first save that failed leaves an empty directory
            engine.load_checkpoint(place.disk / "saved")
        if engine.global_step == 0:
            torch.manual_seed(7)
        self._tell(resumed=engine.global_step)
        while engine.global_step < self._stop:
            self._in_phase("step")
            loss = take_step(engine)
            step = engine.global_step
            self._tell(step=step, loss=loss)
            if step >= 2:
                self._try("save_checkpoint", lambda: engine.save_checkpoint(place.disk / "saved"), engine, saved=step)
            if step in (3, 4, 5):
                self._try("copy", lambda: self._copy(engine), engine, copied=step)
            if step in (3, 5):
                save = functools.partial(engine.save_model, place.disk / "model", max_shard_bytes="300KB")
                self._try("save_model", save, engine, model=step)
            if step == 4:
                self._try("state_dict", lambda: self._look_at_states(engine), engine)
        self._in_phase("step")
        engine.synchronize()
        self._tell(weights=digest(engine.module.state_dict()), at=engine.global_step)

    def _copy(self, engine: OffloadEngine) -> None:
        engine.save_checkpoint(self._place.other / "copied")
        engine._session.checkpoints.generations.wait_for_background()  # the next save does

    def _look_at_states(self, engine: OffloadEngine) -> None:
        states = digest_of_states(engine.optimizer.state_dict())
        self._tell(states=states, weights=digest(engine.module.state_dict()), at=engine.global_step)

    def _export(self, form: str, target: Path, *more: str) -> None:
        self._in_phase(f"export {form}")
        place, text = self._place, io.StringIO()
        command = ["export", str(place.disk / "saved"), str(target), "--format", form, *more]
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
            status = offload_command(command)
        if status == 0:
            self._tell(exported=form)
            return
        if status != 2 or self._watch.struck is None:
            raise Wrong(f"offload {' '.join(command)}: exit status {status}: {text.getvalue()}")
        self._tell(refused=text.getvalue())
        if list(target.glob("*")) or list(target.glob(".*")):
            raise Wrong(f"left by an export without room: {list(target.iterdir())}")
        self._watch.give_room()
        if offload_command(command):
            raise Wrong("an export with room again fails")

    def _try(self, phase: str, call: Any, engine: OffloadEngine, **done: int) -> None:
        """After an error that leaves the engine in order, go on as ``then`` says."""
        self._in_phase(phase)
        try:
            call()
        except StorageFull as error:
            if self._has_failed(engine) or self._then not in ("room", "without"):
                raise
            self._tell_error(error)
            self._check_nothing_unfinished()
            if self._then == "room":
                self._watch.give_room()
                call()
        else:
            self._tell(**done)
            return
        self._tell(goes_on=phase, **(done if self._then == "room" else {}))

    def _check_nothing_unfinished(self) -> None:
        folders = (self._place.disk / "saved", self._place.disk / "model", self._place.other / "copied")
        left = [
            entry for folder in folders if folder.exists() for entry in folder.iterdir() if "unfinished" in entry.name
        ]
        if left:
            raise Wrong(f"left after an error: {left}")

    def _in_phase(self, name: str) -> None:
        self._watch.phase = name

    def _tell_error(self, error: StorageFull) -> None:
        if self._watch.struck is None:
            raise Wrong("an error without a reason") from error
        if not error.survives or not error.advice or not any(letter.isdigit() for letter in str(error)):
            raise Wrong(f"an error that says too little: {error!r}: {error}") from error
        self._tell(error=str(error), phase=self._watch.phase, kind=type(error).__name__)

    def _tell(self, **what: object) -> None:
        with self._place.log.open("a") as file:
            file.write(json.dumps(what) + "\n")


def used_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*"))


class Place:
    """What a trial has: two file systems, and a folder elsewhere."""

    def __init__(self, disk: Path, other: Path, elsewhere: Path) -> None:
        self.disk, self.other, self.nvme = disk, other, disk / "nvme"
        self.log, self.weights = elsewhere / "log", elsewhere / "weights.safetensors"

    def clear(self) -> None:
        """As before the first life."""
        clear(self.disk)
        clear(self.other)
        self.nvme.mkdir()
        self.log.write_text("")

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def value(self, name: str, default: Any = None) -> Any:
        """What was told of it last."""
        return next((told[name] for told in reversed(self.told()) if name in told), default)


# A trial: lives, one of which meets a full disk, until one is through.


class Trial:
    """One program on one kind of file system."""

    def __init__(self, place: Place, program: dict[str, Any]) -> None:
        self.place, self._program = place, program
        self._expected = result(lambda: reference(program))
        least = result(lambda: least_budget(program))
        self._budgets = (least, 1 << 30)

    def moments(self, resumes: bool) -> dict[str, int]:
        """How many there are of each kind in a first life, or in one that resumes."""
        self.place.clear()
        if resumes:
            self._live(0, stop=3)
        self._live(int(resumes))
        found: dict[str, int] = self.place.value("counts")
        return found

    def run(self, resumes: bool, moment: Moment, then: str) -> list[dict[str, Any]]:
        """Raises ``Wrong``. Returns what was told."""
        place = self.place
        place.clear()
        if resumes:
            self._live(0, stop=3)
        self._live(int(resumes), moment=moment, then=then)
        give_room(place.disk)
        give_room(place.other)
        self._check_steps()
        if place.value("exported") != "dcp":
            least = self._least_step()
            self._live(1 - int(resumes))
            found = next(told["resumed"] for told in reversed(place.told()) if "resumed" in told)
            if found < least:
                raise Wrong(f"resumed at step {found}, {least} was durable")
            self._check_steps()
        self._in_process(self._check_files)
        return place.told()

    def _live(self, budget: int, *, stop: int = NUM_STEPS, moment: Moment | None = None, then: str = "end") -> None:
        place = self.place
        with place.log.open("a") as file:
            file.write(json.dumps({"life": stop}) + "\n")
        watch = Watch((place.disk, place.other), moment)
        self._in_process(Life(place, self._program, self._budgets[budget], watch, then, stop).live)

    def _in_process(self, call: Callable[[], None]) -> None:
        process = start(call)
        deadline = time.monotonic() + LIFE_S
        while (status := ended(process)) is None:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                raise Wrong(f"a hang: it runs for {LIFE_S} s")
            time.sleep(0.005)
        if status:
            raise Wrong(f"a process ended with {status}")

    def _least_step(self) -> int:
        """The last step whose commit, or checkpoint, a life was told of."""
        saved, every = max(self._told_all("saved"), default=0), self._program.get("durable")
        if not every:
            return saved
        committed = (max(self._told_all("step"), default=1) - 1) // every * every
        return max(saved, committed, *self._told_all("closed"))

    def _check_steps(self) -> None:
        for told in self.place.told():
            if "loss" in told and told["loss"] != self._expected["losses"][told["step"]]:
                raise Wrong(f"step {told['step']} has another loss")
            for what in ("weights", "states"):
                if what in told and told[what] != self._expected[what][told["at"]]:
                    raise Wrong(f"step {told['at']} has other {what}")

    def _check_files(self) -> None:
        place = self.place
        newest = self._check_checkpoints("saved", place.disk / "saved")
        self._check_checkpoints("copied", place.other / "copied")
        self._check_weights(place.disk / "exported", [newest])
        if self._told_all("model") or (place.disk / "model").exists():
            least = max(self._told_all("model"), default=0)
            self._check_weights(place.disk / "model", [step for step in (3, 5) if step >= least])
        stores = [entry.name for entry in place.nvme.iterdir()]
        if len(stores) != (1 if self._program.get("durable") else 0):
            raise Wrong(f"left under nvme_path: {stores}")
        for store in stores:
            self._inspect(place.nvme / store)

    def _check_checkpoints(self, name: str, folder: Path) -> int:
        """The step of the newest one; 0 if there is none, and none was acknowledged."""
        acknowledged = max(self._told_all(name), default=0)
        tags = [entry.name for entry in folder.glob("step*")]
        if folder.exists():
            clear_held(folder)  # as the next save would: a run that just ended has held its identity there
        others = {entry.name for entry in folder.glob("*")} - {*tags, "latest"}
        if others:
            raise Wrong(f"beside the checkpoints: {others}")
        newest = max((int(tag.removeprefix("step")) for tag in tags), default=0)
        if newest < acknowledged or len(tags) > 3:  # the oldest may not be removed yet
            raise Wrong(f"checkpoints: {tags}; that of step {acknowledged} was acknowledged")
        for tag in tags:
            self._inspect(folder / tag)
            if self._end_from(folder, tag) != self._expected["weights"][NUM_STEPS]:
                raise Wrong(f"{tag} of {folder.name} ends with other weights")
        return newest

    def _inspect(self, path: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            if offload_command(["inspect", str(path), "--verify"]):
                raise Wrong(f"{path.name} is not whole: {text.getvalue()}")

    def _told_all(self, name: str) -> list[int]:
        return [told[name] for told in self.place.told() if name in told]

    def _end_from(self, folder: Path, tag: str) -> str:
        with in_memory(self._program) as engine:
            engine.load_checkpoint(folder, tag)
            while engine.global_step < NUM_STEPS:
                take_step(engine)
            return digest(engine.module.state_dict())

    def _check_weights(self, folder: Path, steps: Sequence[int]) -> None:
        found: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            found.update(load_file(file))
        if digest(found) not in [self._expected["weights"][step] for step in steps]:
            raise Wrong(f"{folder.name} does not hold the weights of step {steps}")


def campaign(place: Place, num_trials: int, programs: Sequence[int], rng: random.Random) -> Counter[str]:
    """Trials at moments of all kinds: each kind is as likely as another one."""
    save_file(make_model().state_dict(), place.weights)
    trial_of = functools.cache(lambda which: Trial(place, PROGRAMS[which]))
    moments_of = functools.cache(lambda which, resumes: trial_of(which).moments(resumes))
    counts: Counter[str] = Counter()
    kinds: set[tuple[int, bool, str]] = set()
    while counts["trials"] < num_trials:
        which, resumes = rng.choice(programs), rng.random() < 0.4
        moments = moments_of(which, resumes)
        kind = rng.choice(sorted(moments))
        spare_bytes = rng.choice([0, 0, 0, rng.randrange(16) << 12, rng.randrange(1 << 21), None])
        moment = Moment(kind, rng.randrange(moments[kind]), spare_bytes)
        then = rng.choice(["end", "close", "room", "without"])
        counts["trials"] += 1
        try:
            told = trial_of(which).run(resumes, moment, then)
        except Wrong as wrong:
            print(*(line for line in place.log.read_text().splitlines() if "counts" not in line), sep="\n")
            print(f"program {which}, resumes: {resumes}, {moment}, {then}: {wrong}", flush=True)
            counts["failures"] += 1
            continue
        kinds.add((which, resumes, kind))
        counts["errors"] += any("error" in entry or "refused" in entry for entry in told)
        counts["went on"] += any("goes_on" in entry for entry in told)
        counts.update(f"in {entry.get('phase', 'export')}" for entry in told if "error" in entry or "refused" in entry)
        print(f"{counts['trials']} trials, {counts['errors']} with an error", flush=True)
    counts["kinds of moments"] = len(kinds)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--on", choices=KINDS, action="append", help="file systems (default: all that can be mounted)")
    parser.add_argument("--program", type=int, choices=range(len(PROGRAMS)), action="append", help="(default: all)")
    parser.add_argument("--mounted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.mounted:
        try:
            command = [sys.executable, *sys.orig_argv[1:], "--mounted"]
            raise SystemExit(in_own_mounts(command).returncode)
        except CannotMount as error:
            print(f"skipped: {error}")
            raise SystemExit(CANNOT_MOUNT) from None
    torch.set_num_threads(1)
    kinds = arguments.on or KINDS
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
            disk, other, elsewhere = (Path(folder) / name for name in ("disk", "other", "elsewhere"))
            for path in (disk, other, elsewhere):
                path.mkdir()
            try:
                for path in (disk, other):
                    closing.enter_context(mounted(kind, path))
            except CannotMount as error:
                print(f"{kind}: skipped: {error}")
                continue
            place, programs = Place(disk, other, elsewhere), arguments.program or range(len(PROGRAMS))
            counts = campaign(place, arguments.trials, programs, random.Random(arguments.seed))
            print(f"{kind}: {dict(counts)}", flush=True)
            if counts["failures"]:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
