"""Micro-batches of one step: together where that gives the bits of a loop, one after the other where it would not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from offload.model.attributes import Attributes
from offload.model.hooks import Hooks
from offload.model.interleave import Habits, MicroBatches
from offload.model.surroundings import Surroundings

__all__ = ["Habits", "run_together"]


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
