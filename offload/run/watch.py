"""The observers of one engine, and the way of losses and metrics to them."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError, warn
from offload.option_values import as_real
from offload.report.report import Report
from offload.run.observer import Observer, StepRecord

_log = logging.getLogger("offload")


class Watch:
    """Gathers what observers see, and tells them. Without observers each call returns at once.

    Numbers on a device are read when the device has come to them anyway: nobody waits for it here.
    """

    def __init__(self) -> None:
        self.about: Callable[[], Mapping[str, Any]] = dict
        """Says what the run is."""
        self._observers: list[Observer] = []
        self._losses: list[float | torch.Tensor] = []
        """Those of the coming step."""
        self._logged: list[tuple[int, dict[str, float | torch.Tensor]]] = []
        """Values that the observers have not been told yet, by step."""
        self._told: Report | None = None

    def add(self, observer: Observer) -> None:
        """Tell it what the run is, and of all that comes from now on."""
        self._observers.append(observer)
        self._tell(lambda each: each.begin(self.about()), [observer])

    def saw_loss(self, loss: torch.Tensor, *, is_first: bool) -> None:
        """A backward has begun with ``loss``, the first of a step or another one."""
        if self._observers:
            if is_first:
                self._losses.clear()
            self._losses.append(_number(loss))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Tell the observers of ``values``, which belong to the last step."""
        if self._observers:
            self._logged.append((step, {name: _metric(name, value) for name, value in values.items()}))
            if not any(isinstance(value, torch.Tensor) for value in self._logged[-1][1].values()):
                self.arrive()

    def arrive(self) -> None:
        """All that a device was given so far is done: what it computed can be read."""
        self._losses = [float(loss) for loss in self._losses]
        logged, self._logged = self._logged, []
        for step, values in logged:
            numbers = {name: float(value) for name, value in values.items()}
            self._tell(lambda observer, step=step, numbers=numbers: observer.log(step, numbers))  # type: ignore[misc]

    def step(self, report: Report | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """Tell the observers of the last step, unless they know it: the present one was skipped then."""
        if report is None or report is self._told:
            return
        self._told = report
        _log.debug("%s", report)
        if not self._observers:
            return
        losses, self._losses = [float(loss) for loss in self._losses], []
        record = StepRecord(
            report=report,
            time=time.time(),
            loss=math.fsum(losses) / len(losses) if losses else None,
            learning_rates=tuple(float(group["lr"]) for group in groups if "lr" in group),
            process_bytes=_process_bytes(),
        )
        self._tell(lambda observer: observer.step(record))

    def close(self) -> None:
        """Tell the observers that it is over. Safe to call twice."""
        self.arrive()
        error = _ended_by()
        self._tell(lambda observer: observer.close(error))
        self._observers.clear()

    def _tell(self, call: Callable[[Observer], None], observers: Sequence[Observer] | None = None) -> None:
        """Make the call of all observers, or of these."""
        for observer in observers or list(self._observers):
            try:
                call(observer)
            except Exception as error:
                self._observers.remove(observer)
                _log.debug("%s failed", observer, exc_info=True)
                warn(f"{observer} failed ({error}): the training goes on, and it is told no more")


def _number(value: torch.Tensor) -> float | torch.Tensor:
    """The value of one element in host memory; that of a device as it is, without its graph."""
    return value.item() if value.device.type == "cpu" else value.detach()


def _metric(name: str, value: object) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return _number(value)
    number = as_real(value)
    if number is None:
        raise ConfigError(f"log: {name}: expected a number or a tensor of one element, got {type(value).__name__}")
    return number


def _process_bytes() -> int:
    """Resident memory of this process; huge pages of hugetlbfs are not in it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ended_by() -> BaseException | None:
    """The error that is on its way through ``with`` or ``finally``, or has ended the program."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt, the last error may be any
        error = getattr(sys, "last_value", None)
    return error
