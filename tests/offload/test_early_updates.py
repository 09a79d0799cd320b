"""Early updates over fakes that tell what they are asked for. The test is the pipeline: it takes each task and ends it.

Nothing that may wait is called while the monitor of early updates is held: the fakes look, from a thread of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, product

import pytest
import torch

from offload import waiting
from offload.report.meter import Meter
from offload.tiers.gradients import UnitGradients
from offload.tiers.home import TileHomes, UnitHomes
from offload.tiers.host_weights import HostWeights, Slot
from offload.units import ParameterSpec, Tile, UnitSpec
from offload.update.ahead import StatesAhead
from offload.update.early import EarlyUpdate, EarlyUpdates, Stage
from offload.update.step import Segment, UnitUpdate
from offload.update.updater import Updater
from offload.waiting import Failure
from swapper import Lease, StorageIOError

PATIENCE_S = 30.0
"""A thread that has not done its part until then never will."""


class Thread:
    """A thread whose result, or error, is what ``result`` gives."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._result: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(PATIENCE_S)
        assert self.is_over(), "it still waits"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error


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

    def write_beside(self, address: int) -> str:
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

    def __init__(self, room: Room) -> None:
        self.room = room
        self.in_use = True
        """Compute has every unit."""

    def hold(self, unit: UnitSpec) -> bool:
        self.room.tell("hold", unit.name)
        return self.in_use

    def end_hold(self, unit: UnitSpec) -> None:
        self.room.tell("end hold", unit.name)

    def bring(self, unit: UnitSpec) -> None:
        self.room.may_wait()
        self.room.tell("bring", unit.name)

    def lend(self, unit: UnitSpec, wanted: Callable[[], bool]) -> Slot | None:
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

    def forget_beside(self, unit: UnitSpec) -> None:
        self.room.tell("forget beside", unit.name)

    # Of a step that is certain.

    def try_fetch(self, unit: UnitSpec) -> None:
        self.room.tell("try fetch", unit.name)

    def acquire_for_update(self, unit: UnitSpec) -> int:
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


class Room:
    """Early updates of ``num_units`` units u0, u1, ... with two parameters and ``num_tiles`` tiles each."""

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
        self.early: EarlyUpdates = EarlyUpdates(
            self.units,
            lambda unit: unit.index in self.may,
            max_held,
            self.homes,
            self.host,
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
        """What is called now may wait: others must get at the early updates meanwhile."""

        def look() -> None:
            self.early.step_begins()
            self.early.step_is_over()

        Thread(look).result()

    def update(self, index: int, frozen: object = "lr 1") -> UnitUpdate:
        unit = self.units[index]
        return UnitUpdate(unit, (Segment(0, unit.numel, frozen),))

    def gradients(self, *indices: int) -> None:
        """All gradients of these units arrive."""
        for index in indices:
            for _ in self.units[index].trainable:
                self.early.gradient_arrived(self.units[index])

    def hold(self, *indices: int) -> None:
        """A backward, in which all gradients of these units come."""
        self.gradients(*indices)

    def queue(self, *indices: int) -> None:
        """The same, and their updates are asked for."""
        self.hold(*indices)
        for index in indices:
            self.early.begin(self.units[index], self.update(index))

    def run(self, *indices: int) -> list[EarlyUpdate]:
        """The same, and their updates have begun."""
        self.queue(*indices)
        return [next(self.early.tasks()) for _ in indices]

    def write(self, *indices: int) -> list[EarlyUpdate]:
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


def carry_out(task: EarlyUpdate) -> None:
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
    for task in room.early.tasks():
        names.append(task.unit.name)
        carry_out(task)
    return names


# Stages.

ALLOWED = {
    (Stage.HELD, Stage.QUEUED),
    (Stage.HELD, Stage.OVER),
    (Stage.QUEUED, Stage.RUNNING),
    (Stage.QUEUED, Stage.OVER),
    (Stage.RUNNING, Stage.WRITTEN),
    (Stage.RUNNING, Stage.CONFIRMED),
    (Stage.RUNNING, Stage.VOID),
    (Stage.CONFIRMED, Stage.OVER),
    (Stage.VOID, Stage.OVER),
    (Stage.WRITTEN, Stage.OVER),
}


@pytest.mark.parametrize(("before", "after"), list(product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_stage_follows_another_only_as_allowed(before: Stage, after: Stage):
    room = Room()
    early = EarlyUpdate(room.units[0], room.early, is_slot_held=True)
    early.stage = before
    if (before, after) in ALLOWED:
        early.become(after)
        assert early.stage is after
    else:
        message = f"the early update of unit u0 cannot be {after.name} after {before.name}"
        with pytest.raises(RuntimeError, match=message):
            early.become(after)
        assert early.stage is before


# Holding.


def test_a_unit_is_held_when_all_its_gradients_have_come_and_not_before():
    room = Room(2)
    room.early.gradient_arrived(room.units[1])
    room.early.gradient_arrived(room.units[0])
    assert room.told() == [] and not room.early.is_held(room.units[0])
    room.early.gradient_arrived(room.units[0])  # its frozen parameter has none
    assert room.told() == [("hold", "u0")]
    assert [room.early.is_held(unit) for unit in room.units] == [True, False]
    room.early.gradient_arrived(room.units[1])
    assert room.told() == [("hold", "u1")]


def test_a_unit_whose_weights_are_not_in_use_is_not_held_and_takes_no_place():
    room = Room(2, max_held=1)
    room.host.in_use = False
    room.hold(0)
    assert not room.early.is_held(room.units[0])
    room.host.in_use = True
    room.gradients(1)
    assert room.early.is_held(room.units[1])
    assert room.told() == [("hold", "u0"), ("hold", "u1")]


def test_nothing_is_held_before_the_last_backward_of_a_step_nor_where_there_are_no_second_places():
    room = Room(2, eligible=[0], num_backwards=2)
    room.gradients(0, 1)
    assert room.told() == []
    room.gradients(0, 1)
    assert room.told() == [("hold", "u0")]


def test_the_second_step_expects_as_many_gradients_as_came_for_the_first():
    room = Room(2)
    room.early.gradient_arrived(room.units[0])  # one of two: the other parameter took no part
    assert room.told() == []
    room.early.confirm([])
    room.early.gradient_arrived(room.units[0])
    assert room.told() == [("hold", "u0")]
    room.early.gradient_arrived(room.units[1])
    assert room.told() == []  # none of u1's came: all of them are expected, as at first
    room.early.gradient_arrived(room.units[1])
    assert room.told() == [("hold", "u1")]


def test_a_unit_whose_gradients_come_twice_is_held_after_all_of_them_from_the_second_step_on():
    room = Room()
    room.hold(0)
    assert room.told() == [("hold", "u0")]
    room.gradients(0)  # of another micro-batch, or once more, as under a checkpoint
    room.early.confirm([])
    assert room.told() == [("end hold", "u0")]
    room.hold(0)
    assert room.told() == []
    room.gradients(0)
    assert room.told() == [("hold", "u0")]


def test_a_disk_that_is_busier_in_backward_leaves_units_for_forward_evenly_spread_and_takes_them_back():
    room = Room(8)

    def held() -> list[int]:
        room.early.drop_all()
        room.hold(*range(8))
        return [unit.index for unit in room.units if room.early.is_held(unit)]

    assert held() == list(range(8))
    room.early.balance(0.85, 0.8)  # about equal
    assert held() == list(range(8))
    for num_left in (7, 6, 5, 4):
        room.early.balance(0.1, 0.9)
        assert len(held()) == num_left
    assert max(b - a for a, b in pairwise(held())) <= 3
    for _ in range(20):
        room.early.balance(0.9, 0.1)
    assert held() == list(range(8))


def test_gradients_that_are_dropped_are_no_measure_of_how_many_come():
    room = Room()
    room.early.gradient_arrived(room.units[0])
    room.early.drop_all()
    room.early.gradient_arrived(room.units[0])
    assert room.told() == []
    room.early.gradient_arrived(room.units[0])
    assert room.told() == [("hold", "u0")]


def test_not_more_units_are_held_at_a_time_than_there_are_slots_to_spare():
    room = Room(4, max_held=2)
    room.hold(0, 1, 2)
    assert room.told() == [("hold", "u0"), ("hold", "u1")]
    room.early.begin(room.units[0], None)
    room.gradients(3)
    assert room.told() == [("end hold", "u0"), ("hold", "u3")]


def test_every_unit_is_held_whose_gradients_are_spilled_while_no_step_is_under_way():
    room = Room(5, max_held=1, spilled=[1, 2, 3, 4])
    room.hold(0, 1, 2)
    assert room.told() == [("hold", "u0"), ("hold", "u1"), ("hold", "u2")]
    room.early.step_begins()
    room.gradients(3)
    assert room.told() == []
    room.early.step_begins()
    room.early.step_is_over()
    room.gradients(3)
    assert room.told() == []  # one step of two is over
    room.early.step_is_over()
    room.gradients(4)
    assert room.told() == [("hold", "u4")]


def test_a_place_is_free_again_when_the_update_is_written():
    room = Room(2, max_held=1)
    room.write(0)
    room.told()
    room.gradients(1)
    assert room.told() == [("hold", "u1")]


def test_where_compute_has_no_slots_none_is_held_and_the_update_brings_the_weights_in_when_it_runs():
    room = Room(3, max_held=None)
    room.host.in_use = False
    room.write(0)
    assert room.told() == [
        *(("bring", "u0"), ("lend slot", "u0")),
        *(("write beside", "u0.0"), ("give back", "u0")),
    ]
    room.hold(1)
    room.early.begin(room.units[1], None)
    room.queue(2)
    room.early.invalidate(room.units[2])
    assert room.told() == [("forget beside", "u2")]  # nothing to let go
    assert carried_out(room) == []


def test_a_unit_that_has_moved_to_a_device_is_updated_early_no_more():
    room = Room(2)
    room.hold(0)
    room.early.confirm([])
    room.may.remove(0)
    room.early.look_at_homes()
    room.told()
    room.hold(0, 1)
    assert room.told() == [("hold", "u1")]


# Beginning.


def test_an_update_that_will_not_come_ends_the_hold():
    room = Room()
    room.hold(0)
    assert room.early.begin(room.units[0], None) is False
    assert room.told() == [("hold", "u0"), ("end hold", "u0")]
    assert not room.early.is_held(room.units[0])
    assert carried_out(room) == []


def test_begin_says_when_tasks_must_be_carried_out_anew():
    room = Room(4)
    early, units = room.early, room.units
    room.hold(0, 1, 2, 3)
    assert early.begin(units[0], room.update(0)) is True
    assert early.begin(units[1], room.update(1)) is False  # asked for already
    tasks = early.tasks()
    assert next(tasks).unit is units[0]
    assert early.begin(units[2], room.update(2)) is False  # those who carry out will see it
    assert [task.unit for task in tasks] == [units[1], units[2]]
    assert early.begin(units[3], room.update(3)) is True  # they have looked, and gone
    assert [task.unit for task in early.tasks()] == [units[3]]


def test_begin_after_the_only_update_was_made_void_leaves_it_to_those_who_are_called_already():
    room = Room(2)
    room.hold(0, 1)
    assert room.early.begin(room.units[0], room.update(0)) is True
    room.early.invalidate(room.units[0])
    assert room.early.begin(room.units[1], room.update(1)) is False
    assert carried_out(room) == ["u1"]


def test_an_early_update_writes_beside_from_a_slot_that_it_borrows():
    room = Room(num_tiles=3)
    room.hold(0)
    update = UnitUpdate(room.units[0], (Segment(0, 50, "x"), Segment(210, 220, "x")))
    room.early.begin(room.units[0], update)
    (task,) = room.early.tasks()
    assert task.update is update
    assert [home.tile.start for home in task.tiles] == [0, 200]
    assert task.grads == room.homes[0].grads.address
    assert task.weights_at_hand() is False
    assert task.weights() == 4096
    assert task.write(task.tiles[1].states, 77) == "write beside of u0.2"
    task.finish()
    assert room.told() == [("hold", "u0"), ("lend slot", "u0"), ("write beside", "u0.2"), ("give back", "u0")]
    assert task.stage is Stage.WRITTEN


def test_spilled_gradients_are_updated_from_the_buffer_that_they_came_to():
    room = Room(spilled=[0])
    room.queue(0)
    (task,) = room.early.tasks()
    assert task.grads == 8192
    carry_out(task)
    assert room.told() == [
        ("hold", "u0"),
        ("lend buffer", "u0"),
        ("lend slot", "u0"),
        ("write beside", "u0.0"),
        ("give back", "u0"),
        ("end loan", "u0"),
    ]


def test_spilled_gradients_that_have_left_their_buffer_are_read():
    room = Room(spilled=[0])
    room.places[0].loan = None
    room.queue(0)
    (task,) = room.early.tasks()
    assert task.grads is None
    carry_out(task)
    assert room.told() == [
        ("hold", "u0"),
        ("lend buffer", "u0"),
        ("wait until spilled", "u0"),
        ("lend slot", "u0"),
        ("write beside", "u0.0"),
        ("give back", "u0"),
    ]


def test_no_buffer_is_lent_while_a_step_is_under_way():
    room = Room(spilled=[0])
    room.early.step_begins()
    room.queue(0)
    (task,) = room.early.tasks()
    assert task.grads is None and task.loan is None
    assert room.told() == [("hold", "u0")]


# Invalidation.


def test_an_update_that_is_held_stays_held_when_another_gradient_comes():
    room = Room()
    room.hold(0)
    room.early.invalidate(room.units[0])
    assert room.early.is_held(room.units[0])
    assert room.told() == [("hold", "u0")]


def test_an_update_that_has_not_begun_never_will_once_it_is_void():
    room = Room(3, spilled=[1])
    room.queue(0, 1, 2)
    room.told()
    room.early.invalidate(room.units[1])
    assert sorted(room.told()) == sorted([("end loan", "u1"), ("end hold", "u1"), ("forget beside", "u1")])
    assert carried_out(room) == ["u0", "u2"]
    room.told()
    assert room.early.confirm([room.update(1)]) == [room.update(1)]
    assert not [event for event in room.told() if event[1].startswith("u1")]


def test_a_void_update_is_over_when_invalidate_returns_and_flips_nothing():
    room = Room()
    (task,) = room.run(0)
    task.weights()
    room.told()
    training = Thread(lambda: room.early.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert task.stage is Stage.VOID and not training.is_over()
    task.write(room.homes[0].tiles[0].states, 0)
    Thread(task.finish).result()  # the update thread is not in the way of the training thread, nor the other way round
    training.result()
    assert task.stage is Stage.OVER
    assert room.told() == [("write beside", "u0.0"), ("give back", "u0")] + 2 * [("forget beside", "u0")]
    assert room.early.confirm([room.update(0)]) == [room.update(0)]
    assert room.told() == []


def test_while_one_thread_waits_for_a_void_update_the_other_takes_and_ends_the_next_ones():
    room = Room(3)
    (task,) = room.run(0)
    room.gradients(1, 2)
    for index in (1, 2):
        room.early.begin(room.units[index], room.update(index))
    training = Thread(lambda: room.early.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert Thread(lambda: carried_out(room)).result() == ["u1", "u2"]
    assert not training.is_over()
    carry_out(task)
    training.result()


def test_a_written_update_that_is_void_flips_nothing():
    room = Room()
    (task,) = room.write(0)
    room.told()
    room.early.invalidate(room.units[0])
    assert task.stage is Stage.OVER
    assert room.early.confirm([room.update(0)]) == [room.update(0)]
    assert room.told() == [("forget beside", "u0")]


def test_a_unit_without_an_early_update_is_none_of_the_invalidated():
    room = Room()
    room.early.invalidate(room.units[0])
    assert room.told() == []


def test_a_failure_ends_the_wait_for_a_void_update():
    room = Room()
    room.run(0)
    training = Thread(lambda: room.early.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    room.failure.record(StorageIOError("the update thread has failed."))
    with pytest.raises(StorageIOError, match="the update thread has failed"):
        training.result()


# The verdict.


def test_written_updates_that_are_what_the_step_does_are_flipped_tile_by_tile_and_then_the_weights():
    room = Room(2, num_tiles=3)
    room.hold(0, 1)
    segments = (Segment(0, 50, "x"), Segment(210, 220, "x"))  # nothing in the second tile
    room.early.begin(room.units[0], UnitUpdate(room.units[0], segments))
    room.early.begin(room.units[1], room.update(1))
    carried_out(room)
    room.told()
    assert room.early.confirm([UnitUpdate(room.units[0], segments), room.update(1)]) == []
    assert room.told() == [
        ("flip tile", "u0.0"),
        ("flip tile", "u0.2"),
        ("flip", "u0"),
        ("flip tile", "u1.0"),
        ("flip tile", "u1.1"),
        ("flip tile", "u1.2"),
        ("flip", "u1"),
    ]


def test_states_resident_in_ram_are_not_flipped():
    room = Room(num_tiles=2)
    room.homes[0].tiles[0].states = InHostMemory(0)
    room.hold(0)
    room.early.begin(room.units[0], room.update(0))
    (task,) = room.early.tasks()
    task.weights()
    task.finish()
    room.told()
    assert room.early.confirm([room.update(0)]) == []
    assert room.told() == [("flip tile", "u0.1"), ("flip", "u0")]


def test_a_running_update_that_the_step_wants_is_flipped_when_it_is_done():
    room = Room(num_tiles=2)
    (task,) = room.run(0)
    room.told()
    assert room.early.confirm([room.update(0)]) == []
    assert room.told() == [] and task.stage is Stage.CONFIRMED
    carry_out(task)
    assert task.stage is Stage.OVER
    assert room.told() == [
        ("lend slot", "u0"),
        ("write beside", "u0.0"),
        ("write beside", "u0.1"),
        ("give back", "u0"),
        ("flip tile", "u0.0"),
        ("flip tile", "u0.1"),
        ("flip", "u0"),
    ]


def test_a_confirmed_update_is_no_longer_to_be_made_void():
    room = Room()
    (task,) = room.run(0)
    assert room.early.confirm([room.update(0)]) == []
    room.early.invalidate(room.units[0])
    room.early.drop_all()
    assert task.stage is Stage.CONFIRMED
    room.told()
    task.finish()
    assert room.told() == [("flip tile", "u0.0"), ("flip", "u0")]


def test_a_written_update_that_the_step_does_not_want_is_forgotten_and_done_in_its_turn():
    room = Room()
    (task,) = room.write(0)
    room.told()
    other = room.update(0, "lr 2")
    assert room.early.confirm([other]) == [other]
    assert room.told() == [("forget beside", "u0")]
    assert task.stage is Stage.OVER


def test_a_running_update_that_the_step_does_not_want_is_not_waited_for_and_never_flips():
    room = Room(spilled=[0])
    (task,) = room.run(0)
    task.weights()
    room.told()
    other = room.update(0, "lr 2")
    assert room.early.confirm([other]) == [other]  # and returns, while the update stands still
    assert task.stage is Stage.VOID
    assert room.told() == []
    task.finish()
    assert task.stage is Stage.OVER
    assert room.told() == [("give back", "u0"), ("end loan", "u0"), ("forget beside", "u0")]


def test_a_void_update_that_has_no_slot_yet_gets_none():
    room = Room(spilled=[0])
    (task,) = room.run(0)
    room.told()
    other = room.update(0, "lr 2")
    assert room.early.confirm([other]) == [other]
    assert task.weights() is None
    task.finish()
    assert task.stage is Stage.OVER
    assert room.told() == [("lend nothing", "u0"), ("end loan", "u0"), ("forget beside", "u0")]


def test_updates_that_have_not_begun_when_the_step_comes_are_left_to_the_step():
    room = Room(3)
    room.queue(0, 1)
    room.gradients(2)  # held, and no more
    room.told()
    step = [room.update(0), room.update(1, "lr 2"), room.update(2)]
    assert room.early.confirm(step) == step
    events = room.told()
    assert sorted(events) == [
        ("end hold", "u0"),
        ("end hold", "u1"),
        ("end hold", "u2"),
        ("forget beside", "u0"),
        ("forget beside", "u1"),
    ]
    assert carried_out(room) == []


def test_updates_of_units_that_take_no_part_in_the_step_are_forgotten():
    room = Room(3)
    room.write(0)
    room.gradients(1, 2)
    room.early.begin(room.units[1], room.update(1))
    room.told()
    assert room.early.confirm([]) == []
    assert sorted(room.told()) == [
        ("end hold", "u1"),
        ("end hold", "u2"),
        ("forget beside", "u0"),
        ("forget beside", "u1"),
    ]


def test_the_step_that_the_units_take_is_returned_in_order():
    room = Room(5)
    room.write(1, 3)
    step = [room.update(index, "lr 2" if index == 3 else "lr 1") for index in range(5)]
    room.told()
    assert room.early.confirm(step) == [step[0], step[2], step[3], step[4]]
    assert room.told() == [("flip tile", "u1.0"), ("flip", "u1"), ("forget beside", "u3")]


def test_dropping_everything_waits_for_what_runs_and_forgets_the_rest():
    room = Room(4)
    (written,) = room.write(0)
    room.gradients(1, 2, 3)
    for index in (1, 2):
        room.early.begin(room.units[index], room.update(index))
    running = next(room.early.tasks())
    room.told()
    training = Thread(room.early.drop_all)
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert running.stage is Stage.VOID and not training.is_over()
    carry_out(running)
    training.result()
    assert (written.stage, running.stage) == (Stage.OVER, Stage.OVER)
    events = room.told()
    assert {event for event in events if event[0] in ("flip", "flip tile")} == set()
    assert [event for event in events if event[0] == "end hold"] == [("end hold", "u2"), ("end hold", "u3")]
    assert {name for what, name in events if what == "forget beside"} == {"u0", "u1", "u2"}
    assert not any(room.early.is_held(unit) for unit in room.units)
    assert carried_out(room) == []


def by_none(room: Room) -> None:
    room.hold(0)
    room.early.begin(room.units[0], None)


def by_void_before(room: Room) -> None:
    room.queue(0)
    room.early.invalidate(room.units[0])


def by_void_meanwhile(room: Room) -> None:
    (task,) = room.run(0)
    training = Thread(lambda: room.early.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    carry_out(task)
    training.result()


def by_void_after(room: Room) -> None:
    room.write(0)
    room.early.invalidate(room.units[0])


def by_confirmation(room: Room) -> None:
    room.write(0)
    room.early.confirm([room.update(0)])


def by_confirmation_meanwhile(room: Room) -> None:
    (task,) = room.run(0)
    room.early.confirm([room.update(0)])
    carry_out(task)


def by_refusal(room: Room) -> None:
    room.write(0)
    room.early.confirm([room.update(0, "lr 2")])


def by_refusal_meanwhile(room: Room) -> None:
    (task,) = room.run(0)
    room.early.confirm([room.update(0, "lr 2")])
    carry_out(task)


def by_a_step_before(room: Room) -> None:
    room.queue(0)
    room.early.confirm([room.update(0)])


def by_dropping_held(room: Room) -> None:
    room.hold(0)
    room.early.drop_all()


def by_dropping_queued(room: Room) -> None:
    room.queue(0)
    room.early.drop_all()


@pytest.mark.parametrize(
    "end",
    [
        by_none,
        by_void_before,
        by_void_meanwhile,
        by_void_after,
        by_confirmation,
        by_confirmation_meanwhile,
        by_refusal,
        by_refusal_meanwhile,
        by_a_step_before,
        by_dropping_held,
        by_dropping_queued,
    ],
)
@pytest.mark.parametrize("spilled", [(), (0,)], ids=["resident", "spilled"])
def test_however_an_update_ends_loans_and_holds_end_with_it_and_the_next_backward_holds_the_unit_again(end, spilled):
    room = Room(max_held=1, spilled=spilled)
    for _ in range(2):  # the place of the first one is free for the second
        end(room)
        events = [what for what, _ in room.told()]
        assert events.count("hold") == 1
        assert events.count("end hold") + events.count("lend slot") + events.count("lend nothing") == 1
        assert events.count("lend slot") == events.count("give back")
        assert events.count("lend buffer") == events.count("end loan")
        assert (
            events.count("flip") == events.count("flip tile") == (end in (by_confirmation, by_confirmation_meanwhile))
        )
        carried_out(room)
        assert room.told() == []
        room.early.drop_all()


# With weights in host memory that are no fake.


class Transfer:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Weights:
    """Weights on a disk that is fast."""

    address = None
    write_in_flight = None

    @property
    def stored(self) -> Weights:
        return self

    def read(self, address: int, *, urgent: bool = False) -> Transfer:
        return Transfer()

    def write_beside(self, address: int) -> Transfer:
        return Transfer()


def with_real_weights(room: Room) -> HostWeights:
    homes = [UnitHomes(Weights(), home.grads, home.tiles) for home in room.homes]
    slots = [Slot(Lease(4096 * index, 4096)) for index in range(1, 4)]
    host = HostWeights(room.units, homes, slots, 4096, room.failure, Meter(), prefetch=False)
    room.early.host = host
    return host


def test_a_slot_is_lent_when_compute_has_let_the_unit_go():
    room = Room()
    host = with_real_weights(room)
    host.acquire(room.units[0])
    (task,) = room.run(0)
    room.failure.somebody_waits.clear()
    update = Thread(lambda: carry_out(task))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert not update.is_over()
    host.release(room.units[0])
    update.result()
    assert task.stage is Stage.WRITTEN
    assert room.told() == [("write beside", "u0.0")]


def test_a_gradient_that_comes_to_a_unit_in_use_does_not_wait_for_an_update_that_waits_for_the_use_to_end(monkeypatch):
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 10.0)
    room = Room()
    host = with_real_weights(room)
    host.acquire(room.units[0])
    (task,) = room.run(0)  # its states are being read
    host.release(room.units[0])
    host.acquire(room.units[0])  # once more in the same backward, as under a checkpoint, or in the next one
    room.failure.somebody_waits.clear()
    update = Thread(lambda: carry_out(task))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    training = Thread(lambda: room.early.invalidate(room.units[0]))  # another gradient has come
    training.result()
    update.result()
    assert task.stage is Stage.OVER
    host.release(room.units[0])
    host.leave(room.units[0])  # which waits until nobody uses or holds it
    assert room.told() == []


# The update thread.


class Line:
    """In place of the pipeline: carries tasks out, and counts its runs."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.ahead = StatesAhead([])
        self.error: BaseException | None = None
        self.num_runs = 0
        self.changed = threading.Condition()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def run(self, tasks: Iterable[EarlyUpdate]) -> None:
        with self.changed:
            self.num_runs += 1
            self.changed.notify_all()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        for task in tasks:
            self.room.tell("begin", task.update.unit.name)
            carry_out(task)

    def stop(self) -> None:
        self.room.tell("stop", "the pipeline")

    def wait_for_run(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_runs >= number, PATIENCE_S)


@pytest.fixture
def updaters() -> Iterator[Callable[[Room], tuple[Updater, Line]]]:
    made = []

    def make(room: Room) -> tuple[Updater, Line]:
        line = Line(room)
        updater = Updater(line, room.early, room.homes, room.host, Gradients(room.places), None, room.failure)
        made.append(updater)
        return updater, line

    yield make
    for updater in made:
        updater.stop()


def test_a_step_comes_after_the_early_updates_before_it_and_does_what_they_have_not(updaters):
    room = Room(3, num_tiles=2, spilled=[2])
    updater, line = updaters(room)
    room.hold(0, 1)
    room.told()
    line.may_go_on.clear()
    for index in (0, 1):
        updater.begin_early(room.units[index], room.update(index))
    line.wait_for_run(1)  # it stands still
    step = [room.update(0), room.update(1, "lr 2"), room.update(2)]
    remaining = room.early.confirm(step)
    assert remaining == step and room.told()
    updater.start(remaining)
    assert room.told() == [("lend buffer", "u2")]  # its gradients lie there still
    line.may_go_on.set()
    updater.start([])
    line.wait_for_run(3)  # the second one is over
    assert room.told() == [
        event
        for name in ("u0", "u1", "u2")
        for event in [
            ("begin", name),
            ("try fetch", name),
            ("acquire for update", name),
            ("write", f"{name}.0"),
            ("write", f"{name}.1"),
            *([("end loan", name)] if name == "u2" else []),
            ("end update", name),
        ]
    ]


def test_early_updates_are_carried_out_in_one_run_as_long_as_they_come(updaters):
    room = Room(3)
    updater, line = updaters(room)
    room.hold(0, 1, 2)
    line.may_go_on.clear()
    for index in (2, 1, 0):
        updater.begin_early(room.units[index], room.update(index))
    line.wait_for_run(1)
    line.may_go_on.set()
    updater.start([])
    line.wait_for_run(2)
    assert [event for event in room.told() if event[0] == "begin"] == [("begin", f"u{index}") for index in (2, 1, 0)]
    assert line.num_runs == 2


def test_an_early_update_that_will_not_come_is_no_work_for_the_update_thread(updaters):
    room = Room()
    updater, line = updaters(room)
    room.hold(0)
    updater.begin_early(room.units[0], None)
    updater.start([])
    line.wait_for_run(1)
    assert room.told() == [("hold", "u0"), ("end hold", "u0")]


def test_while_a_step_is_under_way_compute_does_not_wait_for_early_updates(updaters):
    room = Room(2, max_held=0, spilled=[0, 1])
    updater, line = updaters(room)
    line.may_go_on.clear()
    updater.start([])
    room.hold(0)
    assert room.told() == []
    line.may_go_on.set()
    updater.start([])
    line.wait_for_run(2)
    updater.stop()
    room.gradients(1)
    assert ("hold", "u1") in room.told()


def test_after_a_failed_update_none_is_carried_out_and_every_wait_raises_its_error(updaters):
    room = Room(2, max_held=0, spilled=[1])
    updater, line = updaters(room)
    line.error = StorageIOError("the disk said no.")
    updater.start([room.update(0)])
    line.wait_for_run(1)
    updater.start([room.update(1)])
    updater._worker.finish()
    assert line.num_runs == 1
    assert room.told() == [("lend buffer", "u1")]
    with pytest.raises(StorageIOError, match="the disk said no"):
        room.failure.check()
    room.hold(1)
    assert room.told() == [("hold", "u1")]  # the steps that failed are over, too


def test_after_stop_nothing_is_carried_out(updaters):
    room = Room()
    updater, line = updaters(room)
    room.hold(0)
    updater.stop()
    updater.start([room.update(0)])
    updater.begin_early(room.units[0], room.update(0))
    assert line.num_runs == 0
    assert room.told() == [("hold", "u0"), ("stop", "the pipeline")]
