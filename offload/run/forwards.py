"""Forwards of a model that is not trained: each is reported as a step of a training is. In generation each makes a
token of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.report.reporter import Reporter
from offload.run.watch import Watch


def whole_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and those in it that have all of its parameters: a wrapper may call what it wraps by another method
    than ``forward``."""
    parameters = {id(parameter) for parameter in model.parameters()}
    found: nn.Module | None = model
    while found is not None:
        yield found
        children = found.children()
        found = next((each for each in children if parameters <= {id(one) for one in each.parameters()}), None)


class Forwards:
    """Counts those of one engine.

    A forward lasts from the end of the one before it: what is computed between two tokens belongs to a token. After a
    pause that is longer than the forward before it, it lasts from its own beginning.
    """

    def __init__(self, reporter: Reporter, watch: Watch, memory: Callable[[], dict[str, dict[str, int]]]) -> None:
        """``memory`` gives what rests where now, by kind and tier."""
        self._reporter = reporter
        self._watch = watch
        self._memory = memory
        self._num_done = 0
        self._depth = 0
        self._last_seconds = 0.0

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A whole module is called, maybe by another one."""
        self._depth += 1
        meter = self._reporter.meter
        if self._depth == 1 and meter.idle_seconds() > self._last_seconds:
            meter.restart()

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """Its forward is over, with an error or not."""
        self._depth -= 1
        if self._depth or output is None:
            return
        self._num_done += 1
        report = self._reporter.report(
            self._memory(), self._num_done, None, 1.0, updates_wait=False, sequences=_rows((*args, *kwargs.values()))
        )
        self._last_seconds = report.seconds
        self._watch.step(report, ())


def _rows(given: tuple[Any, ...]) -> int:
    """Of the first tensor that has any."""
    return next((value.shape[0] for value in given if isinstance(value, torch.Tensor) and value.ndim), 1)
