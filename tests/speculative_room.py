"""Speculative updates over fakes that tell what they are asked for. The test is the pipeline: it takes each task and
ends it.

Nothing that may wait is called while the monitor of speculative updates is held: the fakes look, from a thread of their
own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from cache_rig import Call

from offload.tiers.gradients.unit import UnitGradients
from offload.tiers.home import TileHomes, UnitHomes
from offload.tiers.weights.shadow import Slot
from offload.units import ParameterSpec, Tile, UnitSpec
from offload.update.speculative import SpeculativeUpdate, SpeculativeUpdates
from offload.update.step import Segment, UnitUpdate
from offload.waiting import Failure
from swapper import Lease

PATIENCE_S = 30.0
"""A thread that has not done its part until then never will."""


class WatchedFailure(Failure):
    """Tells when somebody waits: every wait looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.somebody_waits = threading.Event()

    def check(self) -> None:
        self.somebody_waits.set()
        super().check()


class Stored:
    """A record on disk that tells what becomes of it."""

    address = None

    def __init__(self, room: Room, name: str) -> None:
        self.room = room
        self.name = name

    @property
    def stored(self) -> Stored:
        return self

    def write(self, address: int) -> str:
        self.room.tell("write", self.name)
        return f"write of {self.name}"

    def write_shadow(self, address: int) -> str:
        self.room.tell("write beside", self.name)
        return f"write beside of {self.name}"

    def flip(self) -> None:
        self.room.tell("flip tile", self.name)


class InHostMemory:
    """A record resident in RAM."""

    stored = None

    def __init__(self, address: int) -> None:
        self.address = address


class Host:
    """Weights in host memory."""

    waits = True

    def __init__(self, room: Room) -> None:
        self.room = room
        self.in_use = True
        """Compute has every unit."""

    def hold(self, unit: UnitSpec) -> bool:
        self.room.tell("hold", unit.name)
        return self.in_use

    def end_hold(self, unit: UnitSpec) -> None:
        self.room.tell("end hold", unit.name)

    def updated(self, units: Sequence[UnitSpec]) -> None:
        for unit in units:
            self.room.tell("updated", unit.name)

    def bring(self, unit: UnitSpec) -> None:
        self.room.may_wait()
        self.room.tell("bring", unit.name)

    def lend(self, unit: UnitSpec, written: Sequence[Tile], wanted: Callable[[], bool]) -> Slot | None:
        self.room.may_wait()
        if not wanted():
            self.room.tell("lend nothing", unit.name)
            return None
        self.room.tell("lend slot", unit.name)
        return Slot(Lease(4096 * (unit.index + 1), 4096))

    def give_back(self, unit: UnitSpec, slot: Slot) -> None:
        self.room.may_wait()
        self.room.tell("give back", unit.name)

    def flip(self, unit: UnitSpec) -> None:
        self.room.may_wait()
        self.room.tell("flip", unit.name)

    def forget(self, unit: UnitSpec) -> None:
        self.room.tell("forget beside", unit.name)

    # Of a step that is certain.

    def try_fetch(self, unit: UnitSpec) -> None:
        self.room.tell("try fetch", unit.name)

    def begin_update(self, unit: UnitSpec) -> int:
        self.room.tell("acquire for update", unit.name)
        return 4096

    def end_update(self, unit: UnitSpec) -> None:
        self.room.tell("end update", unit.name)


class AtHome(UnitGradients):
    """Gradients resident in host memory."""


class Loan:
    """The buffer in which the gradients of a unit still lie."""

    def __init__(self, room: Room, unit: UnitSpec) -> None:
        self.room = room
        self.unit = unit
        self.address = 8192 * (unit.index + 1)

    def end_loan(self) -> None:
        self.room.tell("end loan", self.unit.name)


class Spilled(UnitGradients):
    """Gradients on disk. ``loan`` is None if they lie in no buffer any more."""

    spills = True

    def __init__(self, room: Room, unit: UnitSpec) -> None:
        self.room = room
        self.unit = unit
        self.loan: Loan | None = Loan(room, unit)

    def lend(self) -> Loan | None:
        self.room.tell("lend buffer", self.unit.name)
        return self.loan

    def wait_until_spilled(self) -> None:
        self.room.may_wait()
        self.room.tell("wait until spilled", self.unit.name)


class Gradients:
    def __init__(self, places: Sequence[UnitGradients]) -> None:
        self.places = places

    def gradients_of(self, unit: UnitSpec) -> UnitGradients:
        return self.places[unit.index]

    def lend(self, units: Iterable[UnitSpec]) -> list[object]:
        return [self.places[unit.index].lend() for unit in units]


class Room:
    """Speculative updates of ``num_units`` units u0, u1, ... with two parameters and ``num_tiles`` tiles each."""

    def __init__(
        self,
        num_units: int = 1,
        *,
        max_held: int | None = 99,
        spilled: Iterable[int] = (),
        eligible: Iterable[int] | None = None,
        num_tiles: int = 1,
        num_backwards: int = 1,
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self.units = [unit_of(index, num_tiles) for index in range(num_units)]
        spilled = set(spilled)
        self.may = set(range(num_units)) if eligible is None else set(eligible)
        self.homes = [
            UnitHomes(
                Stored(self, f"{unit.name} weights"),
                None if unit.index in spilled else InHostMemory(100 * (unit.index + 1)),
                [
                    TileHomes(Tile(100 * index, 100 * (index + 1), 8), Stored(self, f"{unit.name}.{index}"))
                    for index in range(num_tiles)
                ],
            )
            for unit in self.units
        ]
        self.places = [Spilled(self, unit) if unit.index in spilled else AtHome() for unit in self.units]
        self.host = Host(self)
        self.failure = WatchedFailure()
        self.speculative: SpeculativeUpdates = SpeculativeUpdates(
            self.units,
            lambda unit: unit.index in self.may,
            max_held,
            self.homes,
            lambda unit: self.host,
            Gradients(self.places),
            self.failure,
            num_backwards=num_backwards,
        )

    def tell(self, what: str, name: str) -> None:
        self.events.append((what, name))

    def told(self) -> list[tuple[str, str]]:
        """What has happened since this was asked last."""
        events, self.events = self.events, []
        return events

    def may_wait(self) -> None:
        """What is called now may wait: others must get at the speculative updates meanwhile."""

        def look() -> None:
            self.speculative.step_begins()
            self.speculative.step_is_over()

        Call(look).result()

    def update(self, index: int, frozen: object = "lr 1") -> UnitUpdate:
        unit = self.units[index]
        return UnitUpdate(unit, (Segment(0, unit.numel, frozen),))

    def gradients(self, *indices: int) -> None:
        """All gradients of these units arrive."""
        for index in indices:
            for _ in self.units[index].trainable:
                self.speculative.gradient_arrived(self.units[index])

    def hold(self, *indices: int) -> None:
        """A backward, in which all gradients of these units come."""
        self.gradients(*indices)

    def queue(self, *indices: int) -> None:
        """The same, and their updates are asked for."""
        self.hold(*indices)
        for index in indices:
            self.speculative.begin(self.units[index], self.update(index))

    def run(self, *indices: int) -> list[SpeculativeUpdate]:
        """The same, and their updates have begun."""
        self.queue(*indices)
        return [next(self.speculative.tasks()) for _ in indices]

    def write(self, *indices: int) -> list[SpeculativeUpdate]:
        """The same, and are done."""
        tasks = self.run(*indices)
        for task in tasks:
            carry_out(task)
        return tasks


def unit_of(index: int, num_tiles: int = 1, num_parameters: int = 2) -> UnitSpec:
    size = torch.Size([50])
    specs = tuple(ParameterSpec(f"u{index}.p{i}", size, 50, 50 * i, True, ()) for i in range(num_parameters))
    frozen = ParameterSpec(f"u{index}.frozen", size, 50, 100 * num_tiles, False, ())
    return UnitSpec(index, f"u{index}", (), (*specs, frozen), 100 * num_tiles, 100 * num_tiles + 50, 0)


def carry_out(task: SpeculativeUpdate) -> None:
    """What the pipeline does with a task, but for transfers and arithmetic."""
    task.begins()
    if task.grads is None:
        task.before_grads()
    if task.weights() is not None:
        for tile in task.tiles:
            task.write(tile.states.stored, 0)
    task.finish()


def carried_out(room: Room) -> list[str]:
    """Carry out all that is asked for; the units."""
    names = []
    for task in room.speculative.tasks():
        names.append(task.unit.name)
        carry_out(task)
    return names
