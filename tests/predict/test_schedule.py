"""The schedule of a step, on units whose seconds are chosen by hand."""

from __future__ import annotations

import pytest

from offload.play.schedule import Places, Steps, UnitWork, step_seconds

NONE: frozenset[int] = frozenset()


def test_with_everything_in_memory_a_step_takes_compute_and_the_first_update():
    works = [UnitWork(forward=1.0, backward=2.0, sweep=0.25) for _ in range(4)]
    assert step_seconds(works, Places(4, 4), Steps()) == pytest.approx(12.25)


def test_the_drive_works_beside_compute_and_the_slower_one_limits():
    slow_compute = [UnitWork(forward=1.0, backward=2.0, fetch=0.2, streamed=True) for _ in range(8)]
    assert step_seconds(slow_compute, Places(4, 8), Steps()) == pytest.approx(24.0, rel=0.02)
    slow_drive = [UnitWork(forward=0.1, backward=0.2, fetch=1.0, streamed=True) for _ in range(8)]
    kept = 2  # units that still lie in their slots are not read again
    assert step_seconds(slow_drive, Places(4, 8), Steps()) == pytest.approx(16.0 - kept, rel=0.06)


def test_an_update_that_waits_for_the_verdict_has_only_forward_to_hide_behind():
    works = [
        UnitWork(forward=0.5, backward=1.0, fetch=0.1, update=1.5, sweep=0.1, streamed=True, eligible=True)
        for _ in range(8)
    ]
    late = step_seconds(works, Places(4, 8), Steps())
    some = step_seconds(works, Places(4, 8), Steps(frozenset({0, 2, 4, 6})))
    assert late >= 8 * 1.5 + 8 * 1.0  # all updates under forward, then backward
    assert some < late - 3  # the drive works in backward, too


def test_a_step_never_takes_less_than_what_one_part_of_the_machine_takes():
    works = [
        UnitWork(forward=0.3, backward=0.4, fetch=0.2, update=0.9, spill=0.1, late=0.1, streamed=True, eligible=True)
        for _ in range(12)
    ]
    for speculative in (NONE, frozenset(range(0, 12, 3)), frozenset(range(12))):
        drive = sum(0.9 + 0.1 + 0.1 * (index not in speculative) for index in range(12))
        assert step_seconds(works, Places(4, 12), Steps(speculative)) >= max(drive, 12 * 0.7)


def test_micro_batches_compute_and_fetch_again_and_update_once():
    works = [UnitWork(forward=0.1, backward=0.2, fetch=0.4, update=2.0, streamed=True) for _ in range(6)]
    one = step_seconds(works, Places(4, 6), Steps())
    three = step_seconds(works, Places(4, 6), Steps(micro_batches=3))
    assert 4 * 6 * 0.4 - 6 * 0.4 <= three - one <= 4 * 6 * 0.4 + 2


def test_a_tied_weight_computes_at_both_ends_and_its_update_comes_before_the_first_block():
    tied = UnitWork(forward=1.0, backward=2.0, update=3.0, calls=2)
    blocks = [UnitWork(forward=1.0, backward=2.0) for _ in range(2)]
    assert step_seconds([tied, *blocks], Places(2, 3), Steps()) == pytest.approx(3 * 3 + 3)


def test_copies_to_a_device_run_ahead_as_far_as_its_windows_reach():
    works = [UnitWork(forward=1.0, backward=2.0, to_device=1.0, to_device_again=1.0) for _ in range(6)]
    wide, narrow = step_seconds(works, Places(6, 6), Steps()), step_seconds(works, Places(6, 2), Steps())
    assert 18 <= wide <= narrow


def test_whole_units_are_gathered_for_forward_and_again_for_backward_unless_they_are_still_there():
    slow_network = [UnitWork(forward=0.1, backward=0.1, gather=1.0) for _ in range(6)]
    still_there = 3  # as many as there are places: those that forward ends with
    assert step_seconds(slow_network, Places(6, 6, 3), Steps()) == pytest.approx(12.0 - still_there, rel=0.15)
    slow_compute = [UnitWork(forward=1.0, backward=2.0, gather=0.5) for _ in range(6)]
    first = 0.5  # every other gather runs ahead
    assert step_seconds(slow_compute, Places(6, 6, 3), Steps()) == pytest.approx(18.0 + first)


def test_with_a_place_for_every_unit_a_step_gathers_once_however_many_micro_batches_it_has():
    works = [UnitWork(forward=0.1, backward=0.2, gather=1.0) for _ in range(6)]
    one, three = (step_seconds(works, Places(6, 6, 6), Steps(micro_batches=micro_batches)) for micro_batches in (1, 3))
    assert three - one == pytest.approx(2 * 6 * 0.3)
    few = step_seconds(works, Places(6, 6, 3), Steps(micro_batches=3))
    assert few > 6 + 2 * 3 + 3 * 3  # the first forward, what later ones no longer have, and what backwards have not


def test_gradients_are_exchanged_under_the_backward_of_the_next_unit():
    works = [UnitWork(forward=1.0, backward=2.0, gather=0.1, exchange=1.5) for _ in range(4)]
    last, gathered = 1.5, 0.1
    assert step_seconds(works, Places(4, 4, 3), Steps()) == pytest.approx(12.0 + last + gathered, abs=0.01)
    slow = [UnitWork(forward=0.1, backward=0.1, exchange=3.0) for _ in range(4)]
    assert step_seconds(slow, Places(4, 4, 4), Steps()) == pytest.approx(4 * 0.1 + 0.1 + 4 * 3.0)


def test_ranks_agree_on_the_end_of_backward_before_an_update_begins():
    works = [UnitWork(forward=1.0, backward=2.0, sweep=0.25) for _ in range(4)]
    assert step_seconds(works, Places(4, 4, 4), Steps(settle=0.5)) == pytest.approx(12.75)


def test_a_unit_is_gathered_when_its_update_is_over_and_shards_are_read_for_gathers_alone():
    works = [UnitWork(forward=1.0, backward=1.0, update=3.0, gather=0.5, fetch=1.0, streamed=True) for _ in range(4)]
    replicated = step_seconds(works, Places(4, 4, 4), Steps())
    assert replicated == pytest.approx(4 * 3.0 + 0.5 + 1.0 + 4.0)  # four updates, the last gather and forward, backward
    few = step_seconds(works, Places(4, 4, 2), Steps())
    assert few > replicated
