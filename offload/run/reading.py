"""A run directory, read: the steps as columns of numbers, and what else its file says."""

from __future__ import annotations

import fcntl
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.run.directory import NAME


class Columns:
    """Numbers of steps, by name. A number that a step has not is NaN."""

    def __init__(self) -> None:
        self._length = 0
        self._of: defaultdict[str, array[float]] = defaultdict(self._unknown)

    def __getitem__(self, name: str) -> array[float]:
        """All of one name, in the order of steps; NaN throughout if there is none."""
        return self._of.get(name) or self._unknown()

    @property
    def names(self) -> list[str]:
        return list(self._of)

    def append(self, numbers: dict[str, float]) -> None:
        for name in {**self._of, **numbers}:
            self._of[name].append(numbers.get(name, math.nan))
        self._length += 1

    def _unknown(self) -> array[float]:
        return array("d", [math.nan]) * self._length

    def truncate(self, length: int) -> None:
        for column in self._of.values():
            del column[length:]
        self._length = length


@dataclass
class Section:
    """Record of one engine."""

    about: dict[str, Any]
    begin: float
    end: float
    """Time when it was closed, or the last that is known of it. Both in seconds since 1970."""
    first_step: int | None = None
    last_step: int | None = None
    is_closed: bool = False
    error: str | None = None
    """Error that ended it, if one did."""


@dataclass
class Run:
    """All sections of a run together. Steps that were taken again are here once, as they were taken last."""

    path: Path
    is_running: bool
    """A process has the file open to write to it."""
    sections: list[Section] = field(default_factory=list)
    steps: array[float] = field(default_factory=lambda: array("d"))
    """Their numbers."""
    numbers: Columns = field(default_factory=Columns)
    """``StepRecord.scalars``."""
    waits: Columns = field(default_factory=Columns)
    """Seconds by cause."""
    limits: list[str] = field(default_factory=list)
    """``Report.bound_by``."""
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Values that were logged, with their steps."""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    timeline: tuple[int, list[tuple[str, str, float, float, int]]] | None = None
    """A step, and its spans: track, name, start, seconds, bytes."""
    drives: dict[str, list[float]] = field(default_factory=dict)
    """By path: bytes read, bytes written, and busy seconds, of all steps that were taken."""
    step_seconds: float = 0.0
    """Of all steps that were taken."""
    num_repeated: int = 0
    """Steps that were taken again later."""
    num_damaged: int = 0
    """Lines that make no sense: the end of a process that was killed while it wrote."""

    @property
    def about(self) -> dict[str, Any]:
        """Of the last section."""
        return self.sections[-1].about


def read_run(path: Path) -> Run:
    """Read what is in the directory ``path``. Raises ``ConfigError`` if there is no run."""
    file = path / NAME
    try:
        with file.open("rb") as lines:
            run = Run(path, _is_locked(lines.fileno()))
            for content in _objects(lines, run):
                _add(run, content)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no run: {NAME} is missing. The option run_dir= of an engine makes such a directory."
        ) from None
    except NotADirectoryError:
        raise ConfigError(f"{path} is a file: give the run directory, which an engine makes with run_dir=") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not run.sections:
        raise ConfigError(f"{file}: the file has no line that a run begins with")
    return run


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _objects(lines: Iterator[bytes], run: Run) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            run.num_damaged += bool(line.strip())
            continue
        if isinstance(content, dict) and (run.sections or content.get("kind") == "begin"):
            yield content


def _add(run: Run, content: dict[str, Any]) -> None:
    """Take one line in, see [Note: Lines of a run]."""
    kind = content["kind"]
    if kind == "begin":
        run.sections.append(Section(content["about"], content["time"], content["time"]))
        run.memory = content["about"]["memory"]
    section = run.sections[-1]
    section.end = content["time"]
    if kind == "step":
        _add_step(run, section, content)
    elif kind == "log":
        for name, value in content["values"].items():
            run.metrics.setdefault(name, []).append((content["step"], value))
    elif kind == "memory":
        run.memory = content["memory"]
    elif kind == "timeline":
        run.timeline = content["step"], [tuple(span) for span in content["spans"]]
    elif kind == "end":
        section.is_closed, section.error = True, content["error"]


def _add_step(run: Run, section: Section, content: dict[str, Any]) -> None:
    step = content["step"]
    if run.steps and step <= run.steps[-1]:
        _forget_from(run, step)
    section.first_step = step if section.first_step is None else section.first_step
    section.last_step = step
    run.step_seconds += content["seconds"]
    run.steps.append(step)
    run.limits.append(content["bound_by"])
    run.waits.append(content["waits"])
    for path, moved in content["drives"].items():
        before = run.drives.get(path, [0.0, 0.0, 0.0])
        run.drives[path] = [total + more for total, more in zip(before, moved, strict=True)]
    run.numbers.append(
        {name: value for name, value in content.items() if isinstance(value, (int, float)) and name != "step"}
    )


def _forget_from(run: Run, step: int) -> None:
    """The run goes on with this step: what came after the one before is not part of it any more."""
    kept = sum(1 for number in run.steps if number < step)
    run.num_repeated += len(run.steps) - kept
    del run.steps[kept:], run.limits[kept:]
    run.numbers.truncate(kept)
    run.waits.truncate(kept)
    for name, values in run.metrics.items():
        run.metrics[name] = [(at, value) for at, value in values if at < step]


def seconds_by_cause(run: Run) -> dict[str, float]:
    """Seconds of compute, and of waits by cause, of all steps that the run has."""
    waits = {name: math.fsum(value for value in run.waits[name] if value == value) for name in run.waits.names}
    return {"compute": math.fsum(computing(run)), **waits}


def computing(run: Run) -> list[float]:
    """Seconds of each step in which the training thread waited for nothing."""
    waited = [run.waits[name] for name in run.waits.names]
    stalls = [math.fsum(value for value in row if value == value) for row in zip(*waited, strict=True)]
    return [
        max(seconds - stalled, 0.0)
        for seconds, stalled in zip(run.numbers["seconds"], stalls or [0.0] * len(run.steps), strict=True)
    ]
