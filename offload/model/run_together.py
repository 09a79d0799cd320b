"""Micro-batches of one step: together where that gives the bits of a loop, one after the other where it would not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import nn

from offload.errors import ConfigError
from offload.model.attributes import Attributes
from offload.model.hooks import Hooks
from offload.model.interleave import Habits, MicroBatches
from offload.model.surroundings import Surroundings
from offload.waiting import Failure
from swapper import OffloadError

__all__ = ["Habits", "NotTogether", "Together", "run_together"]


_STILL_RUNNING = (
    "engine.together() was interrupted, and again while it waited for the end of a micro-batch: that may still run. "
    "Build the model and the engine again, and go on from a checkpoint"
)


class NotTogether:
    """Micro-batches cannot be run together."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run(self, items: Iterable[Any], function: Callable[[Any], Any], num_at_once: int | None) -> list[Any]:
        """Raise ``ConfigError``."""
        raise ConfigError(f"engine.together() {self._reason}. Run the micro-batches in a loop, or in one batch.")


class Together:
    """Runs the micro-batches of one engine."""

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        hooks: Hooks,
        failure: Failure,
        drop_gradients: Callable[[], None],
    ) -> None:
        self._model = model
        self._hooks = hooks
        self._failure = failure
        self._drop_gradients = drop_gradients
        self._habits = Habits()

    def run(self, items: Iterable[Any], function: Callable[[Any], Any], num_at_once: int | None) -> list[Any]:
        """See ``OffloadEngine.together``."""
        model = self._model()
        if model is None:
            raise OffloadError("the model is gone: there is nothing to run")
        return run_together(model, self._hooks, function, iter(items), num_at_once, self._habits, self._spoiled)

    def _spoiled(self, *, is_over: bool) -> None:
        """Micro-batches have ended in the middle, some of them perhaps not yet."""
        if not is_over:
            self._failure.record(OffloadError(_STILL_RUNNING))
        elif not self._failure.is_known:
            self._drop_gradients()


class Spoiled(Protocol):
    """Told after an error; ``is_over``: no micro-batch runs any more."""

    def __call__(self, *, is_over: bool) -> None: ...


def run_together(
    model: nn.Module,
    hooks: Hooks,
    function: Callable[[Any], Any],
    items: Iterator[Any],
    num_at_once: int | None,
    habits: Habits,
    spoiled: Spoiled,
) -> list[Any]:
    """The results of ``function`` for each item, ``num_at_once`` of them under way at a time (None: all)."""
    hooks.check_idle()
    surroundings, results = Surroundings(), []
    if not surroundings.can_be_carried:
        habits.say("a mode of torch around the call sees what its own thread does, and no other")
        num_at_once = 1
    group: MicroBatches | None = None
    try:
        while not habits.takes_turns and num_at_once != 1:
            attributes = Attributes(model, hooks.units)
            group = MicroBatches(hooks, function, items, num_at_once, habits, surroundings, attributes)
            results += _run_group(hooks, group)
            if group.was_last:
                return results
        return results + [function(item) for item in items]
    except BaseException:
        spoiled(is_over=group is None or group.is_over)
        raise


def _run_group(hooks: Hooks, group: MicroBatches) -> list[Any]:
    context = hooks.begin_turns(group)
    try:
        return group.run()
    finally:
        hooks.end_turns(context)
