"""Which units speculative updates hold, and when."""

from __future__ import annotations

from itertools import pairwise

from speculative_room import Room, carried_out


def test_a_unit_is_held_when_all_its_gradients_have_come_and_not_before():
    room = Room(2)
    room.speculative.gradient_arrived(room.units[1])
    room.speculative.gradient_arrived(room.units[0])
    assert room.told() == [] and not room.speculative.is_held(room.units[0])
    room.speculative.gradient_arrived(room.units[0])  # its frozen parameter has none
    assert room.told() == [("hold", "u0")]
    assert [room.speculative.is_held(unit) for unit in room.units] == [True, False]
    room.speculative.gradient_arrived(room.units[1])
    assert room.told() == [("hold", "u1")]


def test_a_unit_whose_weights_are_not_in_use_is_not_held_and_takes_no_place():
    room = Room(2, max_held=1)
    room.host.in_use = False
    room.hold(0)
    assert not room.speculative.is_held(room.units[0])
    room.host.in_use = True
    room.gradients(1)
    assert room.speculative.is_held(room.units[1])
    assert room.told() == [("hold", "u0"), ("hold", "u1")]


def test_nothing_is_held_before_the_last_backward_of_a_step_nor_where_there_are_no_second_places():
    room = Room(2, eligible=[0], num_backwards=2)
    room.gradients(0, 1)
    assert room.told() == []
    room.gradients(0, 1)
    assert room.told() == [("hold", "u0")]


def test_the_second_step_expects_as_many_gradients_as_came_for_the_first():
    room = Room(2)
    room.speculative.gradient_arrived(room.units[0])  # one of two: the other parameter took no part
    assert room.told() == []
    room.speculative.confirm([])
    room.speculative.gradient_arrived(room.units[0])
    assert room.told() == [("hold", "u0")]
    room.speculative.gradient_arrived(room.units[1])
    assert room.told() == []  # none of u1's came: all of them are expected, as at first
    room.speculative.gradient_arrived(room.units[1])
    assert room.told() == [("hold", "u1")]


def test_a_unit_whose_gradients_come_twice_is_held_after_all_of_them_from_the_second_step_on():
    room = Room()
    room.hold(0)
    assert room.told() == [("hold", "u0")]
    room.gradients(0)  # of another micro-batch, or once more, as under a checkpoint
    room.speculative.confirm([])
    assert room.told() == [("end hold", "u0")]
    room.hold(0)
    assert room.told() == []
    room.gradients(0)
    assert room.told() == [("hold", "u0")]


def test_a_disk_that_is_busier_in_backward_leaves_units_for_forward_evenly_spread_and_takes_them_back():
    room = Room(8)

    def held() -> list[int]:
        room.speculative.drop_all()
        room.hold(*range(8))
        return [unit.index for unit in room.units if room.speculative.is_held(unit)]

    assert held() == list(range(8))
    room.speculative.balance(0.85, 0.8)  # about equal
    assert held() == list(range(8))
    for num_left in (7, 6, 5, 4):
        room.speculative.balance(0.1, 0.9)
        assert len(held()) == num_left
    assert max(b - a for a, b in pairwise(held())) <= 3
    for _ in range(20):
        room.speculative.balance(0.9, 0.1)
    assert held() == list(range(8))


def test_gradients_that_are_dropped_are_no_measure_of_how_many_come():
    room = Room()
    room.speculative.gradient_arrived(room.units[0])
    room.speculative.drop_all()
    room.speculative.gradient_arrived(room.units[0])
    assert room.told() == []
    room.speculative.gradient_arrived(room.units[0])
    assert room.told() == [("hold", "u0")]


def test_not_more_units_are_held_at_a_time_than_there_are_slots_to_spare():
    room = Room(4, max_held=2)
    room.hold(0, 1, 2)
    assert room.told() == [("hold", "u0"), ("hold", "u1")]
    room.speculative.begin(room.units[0], None)
    room.gradients(3)
    assert room.told() == [("end hold", "u0"), ("hold", "u3")]


def test_every_unit_is_held_whose_gradients_are_spilled_while_no_step_is_under_way():
    room = Room(5, max_held=1, spilled=[1, 2, 3, 4])
    room.hold(0, 1, 2)
    assert room.told() == [("hold", "u0"), ("hold", "u1"), ("hold", "u2")]
    room.speculative.step_begins()
    room.gradients(3)
    assert room.told() == []
    room.speculative.step_begins()
    room.speculative.step_is_over()
    room.gradients(3)
    assert room.told() == []  # one step of two is over
    room.speculative.step_is_over()
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
    room.speculative.begin(room.units[1], None)
    room.queue(2)
    room.speculative.invalidate(room.units[2])
    assert room.told() == [("forget beside", "u2")]  # nothing to let go
    assert carried_out(room) == []


def test_a_unit_that_has_moved_to_a_device_is_updated_early_no_more():
    room = Room(2)
    room.hold(0)
    room.speculative.confirm([])
    room.may.remove(0)
    room.speculative.look_at_homes()
    room.told()
    room.hold(0, 1)
    assert room.told() == [("hold", "u1")]
