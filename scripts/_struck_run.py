"""Small runs in which something is struck, one way or another, and what must hold then: a run that ends well or says
one error of the engine's own; and a next run that resumes at what was acknowledged, with the bits of a run in memory.

``run_syscalls.py`` and ``run_limits.py`` strike.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from run_full_disk import PROGRAMS, digest, in_memory, least_budget, make_engine, reference, take_step
from run_kill import result

import offload.checkpoint.native.inspection  # noqa: F401
from offload import OffloadError
from offload.cli import main as offload_command

STEPS = 5
OTHER = "/dev/shm"
"""Another file system than that of temporary files: checkpoints there are copies."""

LIFE_S = 40
"""A life that takes longer hangs."""


class Wrong(Exception):
    """The engine did not do what it promises."""


class Place:
    """Folders of a run, and what it has told."""

    def __init__(self, disk: Path, other: Path) -> None:
        self.disk, self.other, self.nvme, self.log = disk, other, disk / "nvme", disk / "log"

    def clear(self) -> None:
        for folder in (self.disk, self.other):
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.nvme.mkdir()
        self.log.touch()

    def told(self, name: str) -> list[Any]:
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [entry[name] for entry in entries if name in entry]


@contextlib.contextmanager
def a_place() -> Iterator[Place]:
    """A place that is removed in the end."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=OTHER) as other:
        (disk := Path(folder) / "disk").mkdir()
        yield Place(disk, Path(other))


class StruckRun:
    """One of ``PROGRAMS``, which lives in a place: once with a strike, and once more without."""

    def __init__(self, place: Place, which: int) -> None:
        self.place = place
        self.program = {name: value for name, value in PROGRAMS[which].items() if name != "weights"}
        self.expected = result(lambda: reference(self.program))
        least = result(lambda: least_budget(self.program))
        self.budgets = (least, least * 5 // 4)

    def prepare(self, *, resumes: bool) -> None:
        """An empty place, or one in which a run has taken three steps."""
        self.place.clear()
        if resumes:
            result(lambda: self.life(0, "auto", steps=3))

    def live(self, in_process: Callable[[Callable[[], None]], int], *args: Any, **more: Any) -> int:
        """A life, see ``life``, in the process that ``in_process`` makes: its exit status. The log is open before: only
        the run's own calls are to be struck."""
        log = os.open(self.place.log, os.O_WRONLY | os.O_APPEND)
        try:
            return in_process(lambda: self.life(*args, log=log, **more))
        finally:
            os.close(log)

    def life(
        self, budget: int, backend: str, *, steps: int = STEPS, at: Callable[[str], None] = lambda moment: None,
        log: int | None = None,
    ) -> None:  # fmt: skip
        """One run, from what is there to the last step; ``at`` hears the moments of ``MOMENTS``."""
        place, file = self.place, os.open(self.place.log, os.O_WRONLY | os.O_APPEND) if log is None else log

        def tell(**what: object) -> None:
            os.writev(file, [(json.dumps(what) + "\n").encode()])

        try:
            at("start")
            with make_engine(
                self.program, nvme_path=place.nvme, host_memory=self.budgets[budget], keep_last=2, io_backend=backend
            ) as engine:
                at("load")
                if self.program.get("durable"):
                    engine.load_checkpoint()
                elif any((place.disk / "saved").glob("step*")):
                    engine.load_checkpoint(place.disk / "saved")
                if engine.global_step == 0:
                    torch.manual_seed(7)
                tell(resumed=engine.global_step)
                while engine.global_step < steps:
                    at(f"step {engine.global_step + 1}")
                    loss = take_step(engine)
                    step = engine.global_step
                    tell(step=step, loss=loss)
                    if step % 2 == 0:
                        at(f"save {step}")
                        engine.save_checkpoint(place.disk / "saved")
                        tell(saved=step)
                        engine.save_checkpoint(place.other / "copied")
                        engine.wait_for_checkpoint()
                        tell(copied=step)
                    if step == 3:
                        at("export")
                        engine.save_model(place.disk / "model", max_shard_bytes="300KB")
                engine.synchronize()
                tell(weights=digest(engine.module.state_dict()), at=engine.global_step)
                at("close")
            tell(closed=steps)
        except (OffloadError, MemoryError) as error:
            tell(error=f"{type(error).__name__}: {error}")
        except BaseException as error:
            tell(bare="".join(traceback.format_exception(error)))

    def check(self, next_life: Callable[[], int], why: str) -> str | None:
        """After the life that was struck: what it has told is right, and so is the next one. Its error, None without.
        ``why`` is what a complaint shows."""
        place = self.place
        said = place.told("error")
        if bare := place.told("bare"):
            raise Wrong(f"a bare error: {bare[0]}\n{why}")
        self._check_steps()
        least, before = self._least_step(), len(place.told("resumed"))
        if status := next_life():
            raise Wrong(f"the next run ends with {status}; {said} {why}")
        if place.told("error")[len(said) :] or place.told("bare"):
            raise Wrong(f"the next run says {place.told('error')[len(said) :]} {place.told('bare')}; {said} {why}")
        at = place.told("resumed")[before]
        if at < least:
            raise Wrong(f"resumed at step {at}, {least} was acknowledged; {said} {why}")
        self._check_steps()
        if place.told("weights")[-1] != self.expected["weights"][STEPS]:
            raise Wrong("other weights")
        self._check_files()
        return said[0].splitlines()[0] if said else None

    def _least_step(self) -> int:
        saved = max(self.place.told("saved"), default=0)
        if not self.program.get("durable"):
            return saved
        every = self.program["durable"]
        return max(saved, (max(self.place.told("step"), default=1) - 1) // every * every, *self.place.told("closed"), 0)

    def _check_steps(self) -> None:
        for line in self.place.log.read_text().splitlines():
            told = json.loads(line)
            if "loss" in told and told["loss"] != self.expected["losses"][told["step"]]:
                raise Wrong(f"step {told['step']} has another loss")

    def _save_again(self) -> None:
        """What could not be removed is removed by the next save."""
        with in_memory(self.program) as engine:
            engine.save_checkpoint(self.place.disk / "saved")
            engine.save_checkpoint(self.place.other / "copied")
            engine.save_model(self.place.disk / "model")

    def _check_files(self) -> None:
        place = self.place
        folders = [entry for folder in (place.disk / "saved", place.other / "copied") for entry in folder.glob("step*")]
        for entry in [*folders, *place.nvme.iterdir()]:
            with contextlib.redirect_stdout(io.StringIO()):
                if offload_command(["inspect", str(entry), "--verify"]):
                    raise Wrong(f"{entry} is not whole")
        result(self._save_again)
        for folder in (place.disk / "saved", place.other / "copied", place.disk / "model"):
            if left := [entry.name for entry in folder.glob(".*unfinished*")]:
                raise Wrong(f"left after the next save: {left}")
        stores = [entry.name for entry in place.nvme.iterdir()]
        if len(stores) != (1 if self.program.get("durable") else 0):
            raise Wrong(f"left under nvme_path: {stores}")


MOMENTS = ("start", "load", *(f"step {step}" for step in range(1, STEPS + 1)), "save 2", "save 4", "export", "close")
