"""The run directory: a file to which a run adds line by line what it is and what each of its steps did.

[Note: Lines of a run] ``run.jsonl`` has one JSON object a line. ``kind`` says what it is:

- ``begin``: an engine was made. ``about`` is what ``offload/run/about.py`` says; what follows belongs to this section.
- ``step``: a step, as ``StepRecord.scalars``, ``bound_by``, ``waits`` (seconds by cause) and ``drives`` (by path: bytes
  read and written, busy seconds). A number that is there already replaces that step and all later ones: the run went on
  from a checkpoint, or began anew.
- ``log``: what ``engine.log`` was given after a step.
- ``memory``: bytes by kind and tier, where they are others than before.
- ``timeline``: the spans of one step: track, name, seconds from its start, seconds, bytes.
- ``end``: the engine was closed. Without it the process was killed, or still runs: it holds a lock on the file.

A line is one write to the end of the file, so a process that dies leaves at most one incomplete line, the last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.report.trace import Span, Trace
from offload.run.observer import Observer, StepRecord

NAME = "run.jsonl"

TIMELINE_STEP = 3
"""Of those that a section takes, this one is drawn: by then units are fetched in the order learnt before."""


class RunDirectory(Observer):
    """Writes the run of one engine to a directory. What others wrote there stays."""

    def __init__(self, path: Path, model: str) -> None:
        """Open it, or make it; nothing is written yet. ``model`` tells models apart.

        Raises ``ConfigError`` if it cannot be written, if another process writes there, or if it holds a run of another
        model.
        """
        self.path = path
        self._is_new = not path.exists()
        self._num_steps = 0
        self._memory: dict[str, dict[str, int]] = {}
        self.trace: Trace | None = None
        """Has the spans of the last step when ``step`` is called."""
        self._timeline: tuple[int, Sequence[Span]] | None = None
        """A step and its spans, which are to be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / NAME).open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"run_dir={path}: it cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_model(model)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"run_dir={path}: another process writes its run there. Name another directory."
            ) from None
        except BaseException:
            self._file.close()
            raise

    def __str__(self) -> str:
        return f"the record of the run in {self.path}"

    def _check_model(self, model: str) -> None:
        found = _model_of(self.path / NAME)
        if found is not None and found["fingerprint"] != model:
            raise ConfigError(
                f"run_dir={self.path}: a run of another model is there ({found['class']}, {found['parameters']:,} "
                "parameters). Name another directory."
            )

    def begin(self, about: Mapping[str, Any]) -> None:
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.write(b"\n")  # the last process was killed while it wrote
        self._write("begin", about=about)

    def abandon(self) -> None:
        """There is no engine: leave everything as it was."""
        is_empty = self._file.seek(0, os.SEEK_END) == 0
        self._file.close()
        with contextlib.suppress(OSError):
            if is_empty:
                (self.path / NAME).unlink()
            if self._is_new:
                self.path.rmdir()

    def step(self, record: StepRecord) -> None:
        report = record.report
        self._num_steps += 1
        self._write(
            "step",
            step=report.step,
            **record.scalars(),
            bound_by=report.bound_by,
            waits=report.stall_seconds,
            drives={use.path: [use.read_bytes, use.write_bytes, use.busy_seconds] for use in report.drives},
        )
        if report.memory != self._memory:
            self._memory = report.memory
            self._write("memory", memory=report.memory)
        # The spans are written a step later: what was under way at the end of theirs is over by then.
        if self._num_steps > TIMELINE_STEP:
            self._write_timeline()
        elif self.trace is not None:
            self._timeline = report.step, self.trace.last

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write("log", step=step, values=values)

    def close(self, error: BaseException | None) -> None:
        try:
            self._write_timeline()
            self._write("end", error=None if error is None else f"{type(error).__name__}: {error}".rstrip(": "))
        finally:
            self._file.close()

    def _write_timeline(self) -> None:
        if self._timeline is None:
            return
        (step, spans), self._timeline = self._timeline, None
        start = min((span.start for span in spans), default=0.0)
        rows = [
            [span.track, span.name, round(span.start - start, 6), round(span.seconds, 6), span.nbytes] for span in spans
        ]
        self._write("timeline", step=step, spans=rows)

    def _write(self, kind: str, **content: object) -> None:
        line = json.dumps({"kind": kind, "time": time.time(), **content}, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.close()  # nobody calls again
            raise


def _model_of(file: Path) -> dict[str, Any] | None:
    """Return what the first run there says of its model; None if there is none yet."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), file.open("rb") as lines:
        model: dict[str, Any] = json.loads(lines.readline())["about"]["model"]
        return model
    return None
