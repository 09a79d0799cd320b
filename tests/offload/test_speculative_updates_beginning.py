"""Speculative updates begin: with a slot that is lent, and gradients from wherever they are."""

from __future__ import annotations

from speculative_room import Room, carried_out, carry_out

from offload.update.speculative import Stage
from offload.update.step import Segment, UnitUpdate


def test_an_update_that_will_not_come_ends_the_hold():
    room = Room()
    room.hold(0)
    assert room.speculative.begin(room.units[0], None) is False
    assert room.told() == [("hold", "u0"), ("end hold", "u0")]
    assert not room.speculative.is_held(room.units[0])
    assert carried_out(room) == []


def test_begin_says_when_tasks_must_be_carried_out_anew():
    room = Room(4)
    early, units = room.speculative, room.units
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
    assert room.speculative.begin(room.units[0], room.update(0)) is True
    room.speculative.invalidate(room.units[0])
    assert room.speculative.begin(room.units[1], room.update(1)) is False
    assert carried_out(room) == ["u1"]


def test_a_speculative_update_writes_beside_from_a_slot_that_it_borrows():
    room = Room(num_tiles=3)
    room.hold(0)
    update = UnitUpdate(room.units[0], (Segment(0, 50, "x"), Segment(210, 220, "x")))
    room.speculative.begin(room.units[0], update)
    (task,) = room.speculative.tasks()
    assert task.update is update
    assert [home.tile.start for home in task.tiles] == [0, 200]
    assert task.grads == room.homes[0].grads.address
    assert task.weights_at_hand() is False
    assert task.weights() == (4096, 4096)
    assert task.write(task.tiles[1].states, 77) == "write beside of u0.2"
    task.finish()
    assert room.told() == [("hold", "u0"), ("lend slot", "u0"), ("write beside", "u0.2"), ("give back", "u0")]
    assert task.stage is Stage.WRITTEN


def test_spilled_gradients_are_updated_from_the_buffer_that_they_came_to():
    room = Room(spilled=[0])
    room.queue(0)
    (task,) = room.speculative.tasks()
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
    (task,) = room.speculative.tasks()
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
    room.speculative.step_begins()
    room.queue(0)
    (task,) = room.speculative.tasks()
    assert task.grads is None and task.loan is None
    assert room.told() == [("hold", "u0")]


def test_the_unit_that_forward_needs_first_is_updated_first_unless_another_holds_what_compute_may_want():
    room = Room(5, max_held=None, spilled=[3])
    room.queue(4, 3, 2, 1)  # as backward goes
    tasks = room.speculative.tasks()
    assert [next(tasks).unit.name for _ in range(3)] == ["u3", "u1", "u2"]
    room.queue(0)
    assert [task.unit.name for task in tasks] == ["u0", "u4"]
    holding = Room(3)
    holding.queue(2, 1, 0)
    assert [task.unit.name for task in holding.speculative.tasks()] == ["u2", "u1", "u0"]
