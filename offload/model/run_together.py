"""Micro-batches of one step: together where that gives the bits of a loop, one after the other where it would not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from aio_ext.latch import Latch
from offload.device.protocol import Processor
from offload.model.attributes import Attributes
from offload.model.habits import Habits
from offload.model.hooks import Hooks
from offload.model.interleave import MicroBatches
from offload.model.surroundings import Surroundings
from offload.waiting import Deadline, Failure
from swapper import OffloadError

_SLICE_S = 0.1
_STILL_RUNNING = (
    "engine.together() was interrupted, and again while it waited for the end of a micro-batch: that may still run. "
    "Build the model and the engine again, and go on from a checkpoint"
)


class Left:
    """Micro-batches that an interrupt of the wait for their end has left: one of them may compute with the engine's
    memory still. Refers to nothing of the engine."""

    def __init__(self) -> None:
        self.over: Latch | None = None
        """None: there are none."""

    def wait(self) -> None:
        """Return when none of them touches anything any more. Raises ``WaitTimeout``."""
        deadline = Deadline(lambda: "the end of a micro-batch of engine.together(), which was interrupted twice")
        while self.over is not None and not self.over.wait(_SLICE_S):
            deadline.check()


@dataclass(eq=False)
class Together:
    """Runs the micro-batches of one engine."""

    model: Callable[[], nn.Module | None]
    hooks: Hooks
    processor: Processor
    failure: Failure
    drop_gradients: Callable[[], None]
    left: Left = field(default_factory=Left)
    """Whoever gives memory back waits for them."""

    def __post_init__(self) -> None:
        self._habits = Habits()
        self.passes: int | None = None
        """Groups in which the micro-batches of the last call ran, each together; None: one after the other, or there
        was no call."""

    def run(self, items: Iterable[Any], function: Callable[[Any], Any], num_at_once: int | None) -> list[Any]:
        """See ``OffloadEngine.together``."""
        model, hooks, habits, items = self.model(), self.hooks, self._habits, iter(items)
        if model is None:
            raise OffloadError("the model is gone: there is nothing to run")
        hooks.check_idle()
        surroundings, results = Surroundings(self.processor), []
        if not surroundings.can_be_carried:
            habits.say("a mode of torch around the call sees what its own thread does, and no other")
            num_at_once = 1
        group: MicroBatches | None = None
        self.passes, passes = None, 0
        try:
            while not habits.takes_turns and num_at_once != 1:
                attributes = Attributes(model, hooks.units)
                if attributes.of_threads:
                    habits.take_turns("a threading.local keeps something for each thread by itself")
                    break
                group = MicroBatches(hooks, function, items, num_at_once, habits, surroundings, attributes)
                if group.of_threads is not None:
                    habits.take_turns(group.of_threads)
                    break
                found = _run_group(hooks, group)
                results += found
                passes += bool(found)
                if group.was_last:
                    self.passes = None if habits.takes_turns else max(passes, 1)
                    return results
            return results + [function(item) for item in _rest_of(items)]
        except BaseException:
            self._spoil(group)
            raise

    def _spoil(self, group: MicroBatches | None) -> None:
        """Micro-batches have ended in the middle, those of the ``group`` last."""
        if group is not None and not group.is_over:
            self.left.over = group.over
            self.failure.record(OffloadError(_STILL_RUNNING))
        elif not self.failure.is_known:
            self.drop_gradients()


def _rest_of(items: Iterator[Any]) -> Iterator[Any]:
    """Without ``iter``, which begins some iterators anew."""
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


def _run_group(hooks: Hooks, group: MicroBatches) -> list[Any]:
    context = hooks.begin_turns(group)
    try:
        return group.run()
    finally:
        hooks.end_turns(context)
