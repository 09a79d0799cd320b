"""Speculative updates on the update thread, and over weights in host memory that are no fake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
from cache_rig import Call
from speculative_room import PATIENCE_S, Gradients, Room, carry_out

from offload import waiting
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.tiers.home import UnitHomes
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.shadow import Slot
from offload.update.device_side import DeviceSide
from offload.update.speculative import SpeculativeUpdate, Stage
from offload.update.state_prefetch import StatePrefetch
from offload.update.updater import Updater
from swapper import Lease, StorageIOError


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

    def write_shadow(self, address: int) -> Transfer:
        return Transfer()


def with_real_weights(room: Room) -> HostLevel:
    homes = [UnitHomes(Weights(), home.grads, home.tiles) for home in room.homes]
    slots = [Slot(Lease(4096 * index, 4096)) for index in range(1, 4)]
    host = HostLevel(room.units, homes, slots, 4096, room.failure, Meter(), prefetch=False)
    room.speculative.shadow_of = lambda unit: host.shadows
    return host


def test_a_slot_is_lent_when_compute_has_let_the_unit_go():
    room = Room()
    host = with_real_weights(room)
    use = host.pin(room.units[0])
    use.take()
    (task,) = room.run(0)
    room.failure.somebody_waits.clear()
    update = Call(lambda: carry_out(task))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert not update.over
    use.release()
    update.result()
    assert task.stage is Stage.WRITTEN
    assert room.told() == [("write beside", "u0.0")]


def test_a_gradient_that_comes_to_a_unit_in_use_does_not_wait_for_an_update_that_waits_for_the_use_to_end(monkeypatch):
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 10.0)
    room = Room()
    host = with_real_weights(room)
    use = host.pin(room.units[0])
    use.take()
    (task,) = room.run(0)  # its states are being read
    use.release()
    use.take()  # once more in the same backward, as under a checkpoint, or in the next one
    room.failure.somebody_waits.clear()
    update = Call(lambda: carry_out(task))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    training = Call(lambda: room.speculative.invalidate(room.units[0]))  # another gradient has come
    training.result()
    update.result()
    assert task.stage is Stage.OVER
    use.release()
    host.leave(room.units[0])  # which waits until nobody uses or holds it
    assert room.told() == []


# The update thread.


class Line:
    """In place of the pipeline: carries tasks out, and counts its runs."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.ahead = StatePrefetch([])
        self.error: BaseException | None = None
        self.num_runs = 0
        self.changed = threading.Condition()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def run(self, tasks: Iterable[SpeculativeUpdate]) -> None:
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
        alone = DeviceSide(None, None, Meter(), LinkRates())
        updater = Updater(line, room.speculative, room.homes, room.host, Gradients(room.places), alone, room.failure)
        made.append(updater)
        return updater, line

    yield make
    for updater in made:
        updater.stop()


def test_a_step_comes_after_the_speculative_updates_before_it_and_does_what_they_have_not(updaters):
    room = Room(3, num_tiles=2, spilled=[2])
    updater, line = updaters(room)
    room.hold(0, 1)
    room.told()
    line.may_go_on.clear()
    for index in (0, 1):
        updater.begin_speculative(room.units[index], room.update(index))
    line.wait_for_run(1)  # it stands still
    step = [room.update(0), room.update(1, "lr 2"), room.update(2)]
    remaining = room.speculative.confirm(step)
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


def test_speculative_updates_are_carried_out_in_one_run_as_long_as_they_come(updaters):
    room = Room(3)
    updater, line = updaters(room)
    room.hold(0, 1, 2)
    line.may_go_on.clear()
    for index in (2, 1, 0):
        updater.begin_speculative(room.units[index], room.update(index))
    line.wait_for_run(1)
    line.may_go_on.set()
    updater.start([])
    line.wait_for_run(2)
    assert [event for event in room.told() if event[0] == "begin"] == [("begin", f"u{index}") for index in (2, 1, 0)]
    assert line.num_runs == 2


def test_a_speculative_update_that_will_not_come_is_no_work_for_the_update_thread(updaters):
    room = Room()
    updater, line = updaters(room)
    room.hold(0)
    updater.begin_speculative(room.units[0], None)
    updater.start([])
    line.wait_for_run(1)
    assert room.told() == [("hold", "u0"), ("end hold", "u0")]


def test_while_a_step_is_under_way_compute_does_not_wait_for_speculative_updates(updaters):
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
    updater.begin_speculative(room.units[0], room.update(0))
    assert line.num_runs == 0
    assert room.told() == [("hold", "u0"), ("stop", "the pipeline")]
