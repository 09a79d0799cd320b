"""How uses of units are timed on a device, and how far the host may run ahead of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from offload.report.meter import Meter
from offload.units import UnitSpec
from offload.uses import DeviceClock, Uses


@dataclass
class Event:
    device: Device
    at: float

    def wait(self) -> None:
        self.device.waited.append(self.at)

    def seconds_since(self, other: Event) -> float:
        return self.at - other.at


@dataclass
class Device:
    """A stream whose work so far ends at ``now``."""

    now: float = 0.0
    waited: list[float] = field(default_factory=list)

    @property
    def compute(self) -> Device:
        return self

    def record(self) -> Event:
        return Event(self, self.now)


class Level:
    """Weights for which the device waits as long as ``waits`` says."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.waits: dict[str, float] = {}
        self.fails = False

    def announce(self, units: Any) -> None:
        pass

    def pin(self, unit: UnitSpec) -> Any:
        def take(*, training: bool) -> None:
            if self.fails:
                raise RuntimeError("no weights")
            self.device.now += self.waits.get(unit.name, 0.0)

        return SimpleNamespace(take=take, release=lambda: None, entry=SimpleNamespace(unit=unit))


class Story:
    def __init__(self, *names: str) -> None:
        self.device = Device()
        self.level = Level(self.device)
        self.units = {name: UnitSpec(index, name, (), (), 1, 1, 0) for index, name in enumerate(names)}
        windows: Any = SimpleNamespace(open=lambda pin: False, close=lambda pin: None)
        clock = DeviceClock(self.device)  # type: ignore[arg-type]
        self.uses = Uses(list(self.units.values()), self.level, windows, clock, Meter())  # type: ignore[arg-type]

    def begin(self, name: str, *, training: bool = True) -> None:
        self.uses.begin(self.units[name], training=training)

    def end(self, name: str) -> None:
        self.uses.end(self.units[name])

    def use(self, name: str, seconds: float, *, training: bool = True) -> None:
        self.begin(name, training=training)
        self.device.now += seconds
        self.end(name)


@pytest.mark.parametrize("training", [True, False])
def test_the_host_waits_for_the_end_of_the_use_four_before(training: bool):
    story = Story("a")
    for _ in range(4):
        story.use("a", 1.0, training=training)
    assert story.device.waited == []
    for _ in range(3):
        story.use("a", 1.0, training=training)
    assert story.device.waited == [1.0, 2.0, 3.0]


def test_what_is_waited_for_before_a_use_within_another_one_is_no_compute():
    story = Story("model", "layer")
    story.level.waits = {"model": 10.0, "layer": 100.0}
    story.begin("model")
    story.device.now += 1.0
    story.use("layer", 2.0)
    story.device.now += 4.0
    story.end("model")
    assert story.uses.busy_seconds() == 7.0
    assert story.uses.busy_seconds() == 0.0


def test_uses_without_training_are_not_counted():
    story = Story("a")
    story.use("a", 5.0, training=False)
    story.use("a", 3.0)
    assert story.uses.busy_seconds() == 3.0


def test_a_use_that_fails_leaves_the_clock_for_the_next_one():
    story = Story("a", "b")
    story.begin("a")
    story.device.now += 1.0
    story.level.fails = True
    with contextlib.suppress(RuntimeError):
        story.begin("b")
    story.end("a")
    story.level.fails = False
    story.use("b", 2.0)
    assert story.uses.busy_seconds() == 3.0
