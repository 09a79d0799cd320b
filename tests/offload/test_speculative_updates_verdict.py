"""What makes a speculative update void, and what the step does with those that are written."""

from __future__ import annotations

import pytest
from cache_rig import Call
from speculative_room import PATIENCE_S, Room, carried_out, carry_out

from offload.tiers.home import SpareHostHome
from offload.update.speculative import Stage
from offload.update.step import Segment, UnitUpdate
from swapper import Lease, StorageIOError


def test_an_update_that_is_held_stays_held_when_another_gradient_comes():
    room = Room()
    room.hold(0)
    room.speculative.invalidate(room.units[0])
    assert room.speculative.is_held(room.units[0])
    assert room.told() == [("hold", "u0")]


def test_an_update_that_has_not_begun_never_will_once_it_is_void():
    room = Room(3, spilled=[1])
    room.queue(0, 1, 2)
    room.told()
    room.speculative.invalidate(room.units[1])
    assert sorted(room.told()) == sorted([("end loan", "u1"), ("end hold", "u1"), ("forget beside", "u1")])
    assert carried_out(room) == ["u0", "u2"]
    room.told()
    assert room.speculative.confirm([room.update(1)]) == [room.update(1)]
    assert not [event for event in room.told() if event[1].startswith("u1")]


def test_a_void_update_is_over_when_invalidate_returns_and_flips_nothing():
    room = Room()
    (task,) = room.run(0)
    task.weights()
    room.told()
    training = Call(lambda: room.speculative.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert task.stage is Stage.VOID and not training.over
    task.write(room.homes[0].tiles[0].states, 0)
    Call(task.finish).result()  # the update thread is not in the way of the training thread, nor the other way round
    training.result()
    assert task.stage is Stage.OVER
    assert room.told() == [("write beside", "u0.0"), ("give back", "u0")] + 2 * [("forget beside", "u0")]
    assert room.speculative.confirm([room.update(0)]) == [room.update(0)]
    assert room.told() == []


def test_while_one_thread_waits_for_a_void_update_the_other_takes_and_ends_the_next_ones():
    room = Room(3)
    (task,) = room.run(0)
    room.gradients(1, 2)
    for index in (1, 2):
        room.speculative.begin(room.units[index], room.update(index))
    training = Call(lambda: room.speculative.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert Call(lambda: carried_out(room)).result() == ["u1", "u2"]
    assert not training.over
    carry_out(task)
    training.result()


def test_a_written_update_that_is_void_flips_nothing():
    room = Room()
    (task,) = room.write(0)
    room.told()
    room.speculative.invalidate(room.units[0])
    assert task.stage is Stage.OVER
    assert room.speculative.confirm([room.update(0)]) == [room.update(0)]
    assert room.told() == [("forget beside", "u0")]


def test_a_unit_without_an_speculative_update_is_none_of_the_invalidated():
    room = Room()
    room.speculative.invalidate(room.units[0])
    assert room.told() == []


def test_a_failure_ends_the_wait_for_a_void_update():
    room = Room()
    room.run(0)
    training = Call(lambda: room.speculative.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    room.failure.record(StorageIOError("the update thread has failed."))
    with pytest.raises(StorageIOError, match="the update thread has failed"):
        training.result()


# The verdict.


def test_written_updates_that_are_what_the_step_does_are_flipped_tile_by_tile_and_then_the_weights():
    room = Room(2, num_tiles=3)
    room.hold(0, 1)
    segments = (Segment(0, 50, "x"), Segment(210, 220, "x"))  # nothing in the second tile
    room.speculative.begin(room.units[0], UnitUpdate(room.units[0], segments))
    room.speculative.begin(room.units[1], room.update(1))
    carried_out(room)
    room.told()
    assert room.speculative.confirm([UnitUpdate(room.units[0], segments), room.update(1)]) == []
    assert room.told() == [
        ("flip tile", "u0.0"),
        ("flip tile", "u0.2"),
        ("flip", "u0"),
        ("flip tile", "u1.0"),
        ("flip tile", "u1.1"),
        ("flip tile", "u1.2"),
        ("flip", "u1"),
    ]


@pytest.mark.parametrize("wanted", [True, False])
def test_states_in_ram_are_updated_in_their_spare_place_which_counts_if_the_step_wants_it(wanted: bool):
    room = Room()
    states = SpareHostHome(Lease(4096, 64), Lease(8192, 64))
    room.homes[0].tiles[0].states = states
    room.hold(0)
    room.speculative.begin(room.units[0], room.update(0))
    (task,) = room.speculative.tasks()
    assert task.states_at(states) == 8192
    task.weights()
    task.finish()
    assert states.address == 4096, "whoever looks before the verdict sees the current ones"
    step = [room.update(0, "lr 1" if wanted else "lr 2")]
    assert room.speculative.confirm(step) == ([] if wanted else step)
    assert (states.address, states.spare_address) == ((8192, 4096) if wanted else (4096, 8192))


def test_a_running_update_that_the_step_wants_is_flipped_when_it_is_done():
    room = Room(num_tiles=2)
    (task,) = room.run(0)
    room.told()
    assert room.speculative.confirm([room.update(0)]) == []
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
    assert room.speculative.confirm([room.update(0)]) == []
    room.speculative.invalidate(room.units[0])
    room.speculative.drop_all()
    assert task.stage is Stage.CONFIRMED
    room.told()
    task.finish()
    assert room.told() == [("flip tile", "u0.0"), ("flip", "u0")]


def test_a_written_update_that_the_step_does_not_want_is_forgotten_and_done_in_its_turn():
    room = Room()
    (task,) = room.write(0)
    room.told()
    other = room.update(0, "lr 2")
    assert room.speculative.confirm([other]) == [other]
    assert room.told() == [("forget beside", "u0")]
    assert task.stage is Stage.OVER


def test_a_running_update_that_the_step_does_not_want_is_not_waited_for_and_never_flips():
    room = Room(spilled=[0])
    (task,) = room.run(0)
    task.weights()
    room.told()
    other = room.update(0, "lr 2")
    assert room.speculative.confirm([other]) == [other]  # and returns, while the update stands still
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
    assert room.speculative.confirm([other]) == [other]
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
    assert room.speculative.confirm(step) == step
    events = room.told()
    assert sorted(events) == [
        ("end hold", "u0"),
        ("end hold", "u1"),
        ("end hold", "u2"),
    ]
    assert carried_out(room) == []


def test_updates_of_units_that_take_no_part_in_the_step_are_forgotten():
    room = Room(3)
    room.write(0)
    room.gradients(1, 2)
    room.speculative.begin(room.units[1], room.update(1))
    room.told()
    assert room.speculative.confirm([]) == []
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
    assert room.speculative.confirm(step) == [step[0], step[2], step[3], step[4]]
    assert room.told() == [("flip tile", "u1.0"), ("flip", "u1"), ("forget beside", "u3")]


def test_dropping_everything_waits_for_what_runs_and_forgets_the_rest():
    room = Room(4)
    (written,) = room.write(0)
    room.gradients(1, 2, 3)
    for index in (1, 2):
        room.speculative.begin(room.units[index], room.update(index))
    running = next(room.speculative.tasks())
    room.told()
    training = Call(room.speculative.drop_all)
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    assert running.stage is Stage.VOID and not training.over
    carry_out(running)
    training.result()
    assert (written.stage, running.stage) == (Stage.OVER, Stage.OVER)
    events = room.told()
    assert {event for event in events if event[0] in ("flip", "flip tile")} == set()
    assert [event for event in events if event[0] == "end hold"] == [("end hold", "u2"), ("end hold", "u3")]
    assert {name for what, name in events if what == "forget beside"} == {"u0", "u1", "u2"}
    assert not any(room.speculative.is_held(unit) for unit in room.units)
    assert carried_out(room) == []
