"""Gradients of the last step in host memory, which a commit may still read: others wait before they replace them."""

from __future__ import annotations

from offload.units import UnitSpec
from offload.waiting import Failure, Monitor


class LastGradients:
    """Those of all units. Any thread calls ``changes``; the others belong to who takes steps and commits them."""

    def __init__(self, failure: Failure) -> None:
        self._changed: set[int] = set()
        """Units whose gradients are not those of the last step any more."""
        self._num_readers = 0
        self._monitor = Monitor(failure)
        """Guards ``_num_readers``. With the monitors of gradients in the order of locks."""

    def step_taken(self) -> None:
        """Note that the resting gradients are those of this step from now on."""
        self._changed = set()

    def are_there(self, unit: UnitSpec) -> bool:
        """The unit's are those of the last step still."""
        return unit.index not in self._changed

    def begin_reading(self) -> None:
        """They are read until ``end_reading``: nothing changes them."""
        with self._monitor:
            self._num_readers += 1

    def end_reading(self) -> None:
        with self._monitor:
            self._num_readers -= 1
            self._monitor.notify_all()

    def changes(self, unit: UnitSpec) -> None:
        """The unit's are about to change: return when nobody reads them."""
        if self._num_readers:
            with self._monitor:
                self._monitor.wait_until(lambda: not self._num_readers, lambda: "a commit that reads gradients")
        self._changed.add(unit.index)
