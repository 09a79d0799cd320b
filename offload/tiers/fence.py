"""The fence between a step's updates and whoever uses weights or gradients next: a use waits for its own unit's
update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.report.meter import Meter
from offload.units import UnitSpec
from offload.waiting import Failure, Monitor, of_thread, refuse_finalizer, refuse_within_step


class UpdateFence:
    """Units whose last update is not done: their weights are the old ones, and not for use, and their gradients are
    read. Any thread waits; ``done`` belongs to the thread that updates."""

    def __init__(self, units: Sequence[UnitSpec], monitor: Monitor, meter: Meter, held: Callable[[], str]) -> None:
        """``monitor`` is that of the weights: whoever waits there for a place sees who waits here. ``held`` tells who
        has the places, for messages."""
        self._units = units
        self._monitor = monitor
        self._meter = meter
        self._held = held
        self.pending: set[int] = set()
        """Units that ``wait`` would wait for, by index."""
        self._waiting: set[object] = set()
        """A token for each wait under way. Guarded by the monitor."""

    @classmethod
    def open(cls) -> UpdateFence:
        """A fence that nobody waits at: no update reads what comes behind it."""
        return cls((), Monitor(Failure()), Meter(), str)

    @property
    def is_waited_for(self) -> bool:
        """Somebody waits for an update."""
        return bool(self._waiting)

    def begin(self, units: Sequence[UnitSpec]) -> None:
        """Updates of these units are certain, and begin."""
        with self._monitor:
            self.pending.update([unit.index for unit in units])

    def is_pending(self, unit: UnitSpec) -> bool:
        """The unit's update is not done. Takes no lock."""
        return unit.index in self.pending

    def done(self, *units: UnitSpec) -> None:
        """The update has reached these units. Takes no lock unless somebody waits."""
        self.pending.difference_update([unit.index for unit in units])
        if self._waiting:
            with self._monitor:
                self._monitor.notify_all()

    def wait(self, unit: UnitSpec) -> None:
        """Block until the last step's update has reached the unit."""
        if of_thread.stepping:
            refuse_within_step()
        if unit.index not in self.pending:
            return
        refuse_finalizer(self._monitor)
        with self._monitor:
            self.wait_held(unit)

    def wait_held(self, unit: UnitSpec) -> None:
        """The same with the monitor held, once."""
        if of_thread.stepping:
            refuse_within_step()
        if unit.index not in self.pending:
            return
        refuse_finalizer()
        token = object()
        with self._meter.stall("update"):
            try:
                self._waiting.add(token)
                self._monitor.notify_all()
                self._monitor.wait_until(
                    lambda: unit.index not in self.pending, lambda: f"the update of unit {unit.name} ({self._held()})"
                )
            finally:
                self._waiting.discard(token)

    def wait_all(self) -> None:
        """Block until no unit waits for its update."""
        for unit in self._units:
            self.wait(unit)
