"""The division of a rank's cores between the optimizer's kernels and everything else."""

import pytest

from offload.cores import CoreBudget

MANY = 1 << 24


class Process:
    """Seconds that a process and its thread of updates have spent on cores, as a story tells them."""

    def __init__(self, total: float, others: float) -> None:
        self.seconds = self.of_thread = 0.0
        self.is_waiting = False
        self.cores = CoreBudget(total, others, lambda: self.is_waiting, lambda: self.seconds, lambda: self.of_thread)

    def num_threads(self, numel: int = MANY) -> int:
        with self.cores.lend(numel) as num_threads:
            return num_threads

    def step(self, seconds: float, others: float, updating: float = 0.0) -> None:
        """All but the kernels keep ``others`` cores busy; each of the kernel's threads works for ``updating``."""
        with self.cores.lend(MANY) as num_threads:
            self.of_thread += updating
        self.seconds += others * seconds + num_threads * updating
        self.cores.end_step(seconds)


@pytest.mark.parametrize(
    ("total", "others", "goes_on", "waits"),
    [(2, 2, 2, 2), (16, 16, 16, 16), (16, 1, 15, 16), (64, 32, 32, 64), (1, 8, 1, 1), (0.25, 1, 1, 1), (3.5, 1, 2, 3)],
)
def test_before_the_first_step_an_update_has_what_compute_is_assumed_to_leave(
    total: float, others: float, goes_on: int, waits: int
) -> None:
    process = Process(total, others)
    assert process.num_threads() == goes_on
    process.is_waiting = True
    assert process.num_threads() == waits, "all of them while compute waits"


def test_no_core_is_woken_for_a_few_elements() -> None:
    process = Process(64, 1)
    assert [process.num_threads(numel) for numel in (0, 1, 65_535, 131_072, 1 << 20, 1 << 24)] == [1, 1, 1, 2, 16, 63]


def test_compute_that_keeps_few_cores_busy_leaves_the_others_within_some_steps() -> None:
    process = Process(16, 16)
    had = []
    for _ in range(8):
        process.step(2.0, others=3.0, updating=0.5)
        had.append(process.num_threads())
    assert had == [4, 8, 10, 11, 12, 12, 12, 12]
    assert 3.0 < process.cores.others < 3.1


def test_compute_that_keeps_all_cores_busy_shares_all_of_them_since_its_threads_wait_for_the_slowest() -> None:
    process = Process(16, 16)
    for _ in range(4):
        process.step(2.0, others=15.1, updating=1.0)
    assert process.num_threads() == 16
    assert process.num_threads(numel=131_072) == 2, "as few as ever for a few elements"


def test_checksums_and_io_are_left_what_they_take_where_a_device_computes() -> None:
    process = Process(16, 1)
    for _ in range(12):
        process.step(1.0, others=3.7, updating=0.8)
    assert process.num_threads() == 12


def test_everything_else_keeps_one_core_however_little_it_needs() -> None:
    process = Process(16, 1)
    for _ in range(8):
        process.step(1.0, others=0.2, updating=0.9)
    assert process.num_threads() == 15


def test_what_kernels_take_from_compute_is_not_taken_for_idle_in_the_next_steps() -> None:
    """Compute wants eight of eight cores; an update's threads take their part of them."""
    process = Process(8, 8)
    had = []
    for _ in range(20):
        had.append(process.num_threads())
        process.step(1.0, others=8 * 8 / (8 + had[-1]), updating=8 / (8 + had[-1]))
    assert had == [8] * 20
    assert process.cores.others == 8


def test_a_step_without_time_changes_nothing() -> None:
    process = Process(16, 4)
    process.step(0.0, others=9.0)
    assert process.cores.others == 4
