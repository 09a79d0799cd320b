"""Schedulers that a program steps between ``step()`` and its next call into the engine, and those that an end comes
before. See [Note: The boundary of a step] in ``offload.checkpoint.checkpoints``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Followers:
    """Knows them by their ``last_epoch``: those that moved behind the step before are expected to move behind this."""

    def __init__(self) -> None:
        self._at_step: dict[int, int] | None = None
        """Epochs when the last step returned, by the number of the object; None: its boundary is passed."""
        self._follow: set[int] = set()

    def step_taken(self, objects: Sequence[Any]) -> None:
        """A step has returned."""
        self._at_step = _epochs(objects)

    def pass_boundary(self, objects: Sequence[Any]) -> None:
        """The next call into the engine has come."""
        if self._at_step is not None:
            self._follow = self._at_step.keys() - self._still(objects)
            self._at_step = None

    def missed(self, objects: Sequence[Any]) -> list[int]:
        """Numbers of the objects whose turn has not come, if the program ends here."""
        return [] if self._at_step is None else sorted(self._follow & self._still(objects))

    def _still(self, objects: Sequence[Any]) -> set[int]:
        """Those that have not moved since the last step."""
        assert self._at_step is not None
        return {number for number, epoch in _epochs(objects).items() if self._at_step.get(number) == epoch}


def _epochs(objects: Sequence[Any]) -> dict[int, int]:
    epochs = {number: getattr(item, "last_epoch", None) for number, item in enumerate(objects)}
    return {number: epoch for number, epoch in epochs.items() if isinstance(epoch, int)}
