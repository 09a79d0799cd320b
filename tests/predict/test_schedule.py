"""The schedule of a step, on units whose seconds are chosen by hand."""

from __future__ import annotations

import pytest

from offload.predict.schedule import UnitWork, step_seconds

NONE: frozenset[int] = frozenset()


def test_with_everything_in_memory_a_step_takes_compute_and_the_first_update():
    works = [UnitWork(forward=1.0, backward=2.0, sweep=0.25) for _ in range(4)]
    assert step_seconds(works, 4, 4, NONE) == pytest.approx(12.25)


def test_the_drive_works_beside_compute_and_the_slower_one_limits():
    slow_compute = [UnitWork(forward=1.0, backward=2.0, fetch=0.2, streamed=True) for _ in range(8)]
    assert step_seconds(slow_compute, 4, 8, NONE) == pytest.approx(24.0, rel=0.02)
    slow_drive = [UnitWork(forward=0.1, backward=0.2, fetch=1.0, streamed=True) for _ in range(8)]
    kept = 2  # units that still lie in their slots are not read again
    assert step_seconds(slow_drive, 4, 8, NONE) == pytest.approx(16.0 - kept, rel=0.06)


def test_an_update_that_waits_for_the_verdict_has_only_forward_to_hide_behind():
    works = [
        UnitWork(forward=0.5, backward=1.0, fetch=0.1, update=1.5, sweep=0.1, streamed=True, eligible=True)
        for _ in range(8)
    ]
    late = step_seconds(works, 4, 8, NONE)
    some = step_seconds(works, 4, 8, frozenset({0, 2, 4, 6}))
    assert late >= 8 * 1.5 + 8 * 1.0  # all updates under forward, then backward
    assert some < late - 3  # the drive works in backward, too


def test_a_step_never_takes_less_than_what_one_part_of_the_machine_takes():
    works = [
        UnitWork(forward=0.3, backward=0.4, fetch=0.2, update=0.9, spill=0.1, late=0.1, streamed=True, eligible=True)
        for _ in range(12)
    ]
    for early in (NONE, frozenset(range(0, 12, 3)), frozenset(range(12))):
        drive = sum(0.9 + 0.1 + 0.1 * (index not in early) for index in range(12))
        assert step_seconds(works, 4, 12, early) >= max(drive, 12 * 0.7)


def test_micro_batches_compute_and_fetch_again_and_update_once():
    works = [UnitWork(forward=0.1, backward=0.2, fetch=0.4, update=2.0, streamed=True) for _ in range(6)]
    one = step_seconds(works, 4, 6, NONE)
    three = step_seconds(works, 4, 6, NONE, micro_batches=3)
    assert 4 * 6 * 0.4 - 6 * 0.4 <= three - one <= 4 * 6 * 0.4 + 2


def test_a_tied_weight_computes_at_both_ends_and_its_update_comes_before_the_first_block():
    tied = UnitWork(forward=1.0, backward=2.0, update=3.0, calls=2)
    blocks = [UnitWork(forward=1.0, backward=2.0) for _ in range(2)]
    assert step_seconds([tied, *blocks], 2, 3, NONE) == pytest.approx(3 * 3 + 3)


def test_copies_to_a_device_run_ahead_as_far_as_its_windows_reach():
    works = [UnitWork(forward=1.0, backward=2.0, to_device=1.0, to_device_again=1.0) for _ in range(6)]
    wide, narrow = step_seconds(works, 6, 6, NONE), step_seconds(works, 6, 2, NONE)
    assert 18 <= wide <= narrow
    gathered = [UnitWork(forward=0.1, backward=0.1, gather=1.0) for _ in range(6)]
    assert step_seconds(gathered, 6, 3, NONE) == pytest.approx(12.0, rel=0.1)
