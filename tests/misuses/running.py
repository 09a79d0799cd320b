"""Runs cases, each in each place, in a process of its own: one that crashes or hangs takes nothing with it.

The processes are forked, so that torch is imported once. Nothing here may start a thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from misuses.case import Case
from misuses.place import Place
from offload.tiers import bandwidth
from swapper import OffloadError

_PRELOAD = ("torch._dynamo", "torch.optim.lr_scheduler", "torch.optim.swa_utils", "offload.engine")
"""What an optimizer, or an engine, would import in each process anew."""

_ROOT = str(Path(__file__).parents[2])


@dataclass
class Outcome:
    """What came of a case in one place."""

    value: Any = None
    error: str = ""
    """Its class, if it raised."""
    kinds: tuple[str, ...] = ()
    """The names of that class and of those that it is derived from."""
    is_ours: bool = False
    """It is an ``OffloadError``, or the engine has raised it by a ``raise`` of its own."""
    message: str = ""
    trace: str = ""
    said: list[str] = field(default_factory=list)
    """The engine's warnings, and the errors of it that the case has caught."""
    died: str = ""
    """How the process ended, if it did not end by itself."""
    seconds: float = 0.0


@dataclass
class _Job:
    case: Case
    place: str
    pid: int
    pipe: int
    log: Path
    folder: Path
    start: float
    answer: bytes = b""


def run(
    cases: Sequence[Case], done: Callable[[Case, dict[str, Outcome]], None], *, at_once: int = 3, patience: float = 1.0
) -> None:
    """Run the cases in all places, ``at_once`` at a time, and tell of each one that is done. ``patience`` is a factor
    for the time that they have."""
    torch.set_num_threads(1)
    for name in _PRELOAD:
        import_module(name)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again in each process
    waiting = [(case, place) for case in cases for place in case.places]
    waiting.reverse()
    running: dict[int, _Job] = {}
    outcomes: dict[str, dict[str, Outcome]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = _start(*waiting.pop())
                running[job.pipe] = job
            ready, _, _ = select.select(list(running), [], [], 0.5)
            for pipe, job in list(running.items()):
                ended = False
                if pipe in ready:
                    piece = os.read(pipe, 1 << 20)
                    job.answer += piece
                    ended = not piece
                late = time.monotonic() - job.start > job.case.seconds * patience
                if not ended and not late:
                    continue
                del running[pipe]
                found = outcomes.setdefault(job.case.name, {})
                found[job.place] = _end(job, late=not ended)
                if len(found) == len(job.case.places):
                    done(job.case, outcomes.pop(job.case.name))
    finally:
        for job in running.values():
            _end(job, late=True)


def _start(case: Case, place: str) -> _Job:
    folder = Path(tempfile.mkdtemp(prefix="misuse-"))
    log = folder / "output"
    sys.stdout.flush()
    sys.stderr.flush()
    to_read, to_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(to_read)
            os.setpgid(0, 0)
            _redirect(log)
            outcome = perform(case, place, folder)
            with os.fdopen(to_write, "wb") as pipe:
                pipe.write(pickle.dumps(outcome))
            status = 0
        finally:
            os._exit(status)
    os.close(to_write)
    return _Job(case, place, pid, to_read, log, folder, time.monotonic())


def _redirect(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    faulthandler.enable(file=2)  # what pytest may have made of sys.stderr is no file
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _end(job: _Job, *, late: bool) -> Outcome:
    if late:
        os.kill(job.pid, signal.SIGUSR1)  # it writes down where it is
        time.sleep(0.3)
        os.killpg(job.pid, signal.SIGKILL)
    _, status = os.waitpid(job.pid, 0)
    os.close(job.pipe)
    with contextlib.suppress(ProcessLookupError):  # what it has left running: workers of a loader
        os.killpg(job.pid, signal.SIGKILL)
    output = job.log.read_text(errors="replace")[-3000:] if job.log.exists() else ""
    shutil.rmtree(job.folder, ignore_errors=True)
    outcome = Outcome()
    if job.answer:
        try:
            outcome = pickle.loads(job.answer)
        except Exception as error:
            outcome.died = f"its answer cannot be read: {error!r}"
    if late:
        outcome.died = f"it hangs: not done after {job.case.seconds:.0f} s"
    elif os.WIFSIGNALED(status):
        outcome.died = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    elif not job.answer:
        outcome.died = "the process ended without an answer"
    if outcome.died:
        outcome.trace = output
    outcome.seconds = time.monotonic() - job.start
    return outcome


def perform(case: Case, place_name: str, folder: Path) -> Outcome:
    """Run a case here, in this process."""
    bandwidth._SECONDS = 0.001  # nobody looks at these measurements here
    place, outcome = Place(place_name, folder), Outcome()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome.value = plain(case.body(place))
        except BaseException as error:
            _describe(error, outcome)
        try:
            for engine in place.left:
                engine.close()
            place.left.clear()
            gc.collect()
        except BaseException as error:
            if not outcome.error:
                _describe(error, outcome)
                outcome.message = "in close(): " + outcome.message
    said = place.messages + [f"{item.category.__name__}: {item.message}" for item in caught if _is_ours(item)]
    outcome.said = [message.replace(str(folder), "FOLDER") for message in said]
    outcome.message = outcome.message.replace(str(folder), "FOLDER")
    return outcome


def _describe(error: BaseException, outcome: Outcome) -> None:
    outcome.error = type(error).__name__
    outcome.kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    outcome.message = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    on_purpose = bool(frames) and "/offload/" in frames[-1].filename and str(frames[-1].line).startswith("raise ")
    outcome.is_ours = isinstance(error, OffloadError) or on_purpose
    here = str(Path(__file__))
    outcome.trace = "\n".join(
        f"{Path(frame.filename).name if not frame.filename.startswith(_ROOT) else frame.filename[len(_ROOT) + 1 :]}"
        f":{frame.lineno} {frame.name}: {frame.line}"
        for frame in frames
        if frame.filename != here
    )


def _is_ours(item: warnings.WarningMessage) -> bool:
    of_engine = item.category.__module__.split(".")[0] in ("offload", "swapper", "aio_ext")
    names_engine = re.search(r"OffloadEngine|engine's|the engine|engine\.", str(item.message)) is not None
    return of_engine or (names_engine and "Traceback" not in str(item.message))


def plain(item: Any) -> Any:
    """The same with ordinary tensors and built-in types."""
    if isinstance(item, torch.Tensor):
        item = item.full_tensor() if hasattr(item, "full_tensor") else item  # a DTensor
        if hasattr(item, "__tensor_flatten__"):  # a quantised one, of several tensors
            return {name: plain(getattr(item, name)) for name in item.__tensor_flatten__()[0]}
        return item.detach().clone().contiguous().as_subclass(torch.Tensor)
    if isinstance(item, dict):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple, set)):
        return [plain(value) for value in item]
    if item is None or isinstance(item, (bool, int, float, str, bytes, complex)):
        return item
    if type(item).__module__ == "numpy":
        return torch.as_tensor(item).clone()
    return str(item)
