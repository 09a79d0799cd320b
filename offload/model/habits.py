"""Habits of a function that micro-batches run: what shows that they must run one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import warn

TOGETHER = "engine.together()"


@dataclass
class Habits:
    """Habits of the function that micro-batches run, from one call to the next."""

    takes_turns: bool = False
    """Its forward draws random numbers, for example: each micro-batch runs after the other, as in a loop."""
    draws_first: bool = False
    """It has drawn some before it used the model, and none later."""
    are_seen: bool = False
    """A call that went backward has run alone: the first of all."""
    _has_warned: bool = False

    def take_turns(self, reason: str) -> None:
        """Have each micro-batch run after the other from now on, and say why, once."""
        if not self.takes_turns:
            self.takes_turns = True
            self.say(reason)

    def say(self, reason: str) -> None:
        """Warn, once, that micro-batches run one after the other."""
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{TOGETHER}: {reason}. So micro-batches run one after the other, as in a loop: the same numbers, and "
                "weights are read for each of them"
            )
