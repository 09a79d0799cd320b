"""The line that moves while a training runs, and a few plain lines where there is no terminal. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column

from offload.run import units
from offload.run.observer import Observer, StepRecord

_REFRESH_SECONDS = 0.1
_WORTH_SECONDS = 5e-4
"""Shorter waits are not shown."""


class Line:
    """Counts steps: one line that moves on a terminal; else a line for every tenth of the way, or with no end known for
    steps 1 to 9, 10, 20 and so on."""

    def __init__(self, what: str, num_steps: int | None = None) -> None:
        self._what = what
        self._num_steps = num_steps
        self._tenths = 0
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._shown = 0.0
        if sys.stderr.isatty():
            bar: list[ProgressColumn] = [] if num_steps is None else [BarColumn(bar_width=20)]
            text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            self._progress = Progress(*bar, text, console=Console(stderr=True), auto_refresh=False)
            self._task = self._progress.add_task(f"{what}: starting", total=num_steps)
            self._progress.start()

    def show(self, step: int, values: str) -> None:
        """``step`` steps are done; ``values`` are shown beside it."""
        of_all = "" if self._num_steps is None else f" of {self._num_steps:,}"
        line = f"{self._what}: step {step:,}{of_all}  {values}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=line.replace("[", r"\["))
            if time.monotonic() - self._shown > _REFRESH_SECONDS:
                self._shown = time.monotonic()
                self._progress.refresh()
        elif self._is_due(step):
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line as it is."""
        if self._progress is not None:
            self._progress.refresh()
            self._progress.stop()

    def _is_due(self, step: int) -> bool:
        if self._num_steps is None:
            return len(str(step).rstrip("0")) == 1
        before, self._tenths = self._tenths, 10 * step // self._num_steps
        return self._tenths > before


class LiveLine(Observer):
    """One line in the terminal: step, loss, seconds of a step, share of the bound, what compute waited for, what was
    logged, and, if ``num_steps`` is given, how long the rest will take."""

    def __init__(self, num_steps: int | None = None, what: str = "training") -> None:
        self._num_steps = num_steps
        self._logged: dict[str, float] = {}
        self._seconds = 0.0
        self._num_taken = 0
        self._what = what
        self._line: Line | None = None

    def step(self, record: StepRecord) -> None:
        report = record.report
        self._num_taken += 1
        self._seconds += report.seconds
        if self._line is None:
            self._line = Line(self._what, self._num_steps)
        loss = self._logged.get("loss") if record.loss is None else record.loss
        values = [] if loss is None else [f"loss {units.number(loss)}"]
        values += [f"{name} {units.number(value)}" for name, value in self._logged.items() if name != "loss"]
        values += [units.seconds(report.seconds), f"{units.share(report.efficiency)} of the bound"]
        waits = sorted(report.stall_seconds.items(), key=lambda wait: -wait[1])
        worth = [f"{name} {units.seconds(value)}" for name, value in waits if value >= _WORTH_SECONDS]
        if worth:
            values.append(f"waited for {', '.join(worth)}")
        if self._num_steps is not None and report.step < self._num_steps:
            left = (self._num_steps - report.step) * self._seconds / self._num_taken
            values.append(f"{units.seconds(left)} left")
        self._line.show(report.step, "  ".join(values))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._logged.update(values)

    def close(self, error: BaseException | None) -> None:
        if self._line is not None:
            self._line.close()

    def __str__(self) -> str:
        return "the live line"
