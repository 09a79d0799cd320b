"""Tasks and jobs on cores that they share."""

from __future__ import annotations

import pytest

from offload.play.schedule import Places, Steps, UnitWork, step_seconds
from offload.play.simulator import Job, Pile, Played, Row, Shares, Task


def ends(tasks: list[Task], jobs: list[Job], shares: Shares) -> list[float]:
    return Played(tasks, [Row(jobs)], Pile(), shares).ends


def test_a_transfer_slows_compute_down_by_what_it_takes_of_the_cores():
    shares = Shares(compute=1.0, network=0.25)
    assert ends([Task(3.0)], [Job(-1, 0.0, network=4.0)], shares) == pytest.approx([4.0])
    assert ends([Task(3.0)], [Job(-1, 0.0, network=4.0)], Shares()) == [3.0]


def test_parts_that_want_more_than_there_is_get_equal_parts():
    both = Shares(compute=1.0, network=1.0)
    assert ends([Task(1.0), Task(1.0)], [Job(-1, 0.0, network=1.0)], both) == pytest.approx([2.0, 3.0])


def test_what_wants_more_than_there_is_loses_some_of_it_in_proportion():
    """A half where twice as much is wanted: a quarter where half as much more is."""
    job = Job(-1, 0.0, sweep=9.0)
    assert ends([Task(1.0)], [job], Shares(compute=1.0, sweep=1.0, lost=0.5)) == pytest.approx([1 / 0.25])
    job = Job(-1, 0.0, sweep=9.0)
    assert ends([Task(1.0)], [job], Shares(compute=0.75, sweep=0.75, lost=0.5)) == pytest.approx([0.75 / 0.375])
    job = Job(-1, 0.0, sweep=9.0)
    assert ends([Task(1.0)], [job], Shares(compute=0.5, sweep=0.5, lost=0.5)) == pytest.approx([1.0])


def test_a_part_that_wants_little_gets_it_beside_two_that_want_all():
    three = Shares(compute=1.0, drive=0.2, sweep=1.0)
    job = Job(-1, 1.0, sweep=0.4)  # the drive goes at its full speed, the others at 0.4 of theirs
    assert ends([Task(1.0)], [job], three) == pytest.approx([1.6])


def test_cores_are_not_charged_for_what_compute_waits_for():
    fetched = Job(-1, 0.0, network=2.0)
    shares = Shares(compute=1.0, network=0.5)
    assert ends([Task(1.0, [fetched])], [fetched], shares) == pytest.approx([3.0])


def test_a_step_takes_at_least_what_it_asks_of_the_cores():
    works = [UnitWork(forward=1.0, backward=2.0, exchange=2.0, sweep=0.5) for _ in range(6)]
    shares = Shares(compute=1.0, sweep=1.0, network=0.5)
    of_cores = 6 * (3.0 + 0.5 + 0.5 * 2.0)
    alone = step_seconds(works, Places(6, 6, 6), Steps())
    assert alone < of_cores <= step_seconds(works, Places(6, 6, 6), Steps(), shares) < of_cores + 1.5
