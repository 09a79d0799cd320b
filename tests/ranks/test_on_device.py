"""Ranks that compute on a device each: the same bits as on the CPU, and every access ordered."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import early_jobs, jobs, programs
from ranks.pool import Pool
from ranks.programs import DEVICE_PLACEMENTS, ON_DEVICE, RESIDENT, STATES_ON_DEVICE, WEIGHTS, Program, bits
from ranks.test_bits import check

DEEP = {"hidden": (59, 113, 61, 127, 31, 97, 89, 53)}
"""More units than any of the least budgets holds."""


def test_two_devices_train_as_two_cpus(two: Pool, tmp_path: Path):
    program = Program(model=DEEP, options={"gradient_clipping": 0.7})
    check(two, tmp_path, program, WEIGHTS, *DEVICE_PLACEMENTS, states=True)


def test_four_devices_with_frozen_and_tied_weights_in_bf16(four: Pool, tmp_path: Path):
    program = Program(
        model={"tied": True, "recompute": "other", "frozen": (2,)},
        options={"precision": "bf16", "gradient_accumulation_steps": 2},
    )
    check(four, tmp_path, program, WEIGHTS, RESIDENT, STATES_ON_DEVICE)


def test_devices_are_left_when_one_rank_raises(two: Pool, tmp_path: Path):
    """The other one waits in a transfer for what never comes."""
    raised, told = two(jobs.raises_between_backwards, RESIDENT, tmp_path)
    assert raised == "ValueError: planted" and told.startswith("RankError: rank 0: ValueError: planted")


def test_what_is_saved_on_devices_is_taken_up_anywhere(two: Pool, four: Pool, tmp_path: Path):
    saved = two(jobs.saves, RESIDENT, tmp_path)
    for placement, name in ((STATES_ON_DEVICE, "own"), (ON_DEVICE, "dcp"), (WEIGHTS, "own")):
        assert two(jobs.goes_on, placement, tmp_path, name) == saved
    assert {found for found, _ in four(jobs.goes_on, RESIDENT, tmp_path, "own")} == {saved[0][0]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "gradient_accumulation_steps": 2}], ids=["one", "two"])
def test_shards_in_ram_are_updated_in_backward_with_the_bits_of_the_step(two: Pool, tmp_path: Path, options: dict):
    program = Program(model={"hidden": (59, 113, 61, 127)}, options=options, steps=3)
    (in_memory,) = {bits(found["weights"]) for found in two(programs.run, program, WEIGHTS, tmp_path)}
    for weights, num_units, left, violations in two(early_jobs.updates_early, program, ON_DEVICE, tmp_path):
        assert weights == in_memory and violations == []
        assert all(remaining <= all_of_them // 2 for remaining, all_of_them in zip(left, num_units, strict=True)), left


def test_an_update_is_void_where_another_rank_sends_more_of_the_gradient_after_it(two: Pool, tmp_path: Path):
    (in_memory,) = {bits(found["weights"]) for found in two(programs.run, early_jobs.LATE, WEIGHTS, tmp_path)}
    (first, left), (second, _) = two(early_jobs.gets_more_from_another, ON_DEVICE, tmp_path)
    assert first == second == in_memory
    assert left > 0, "rank 0 has updated the block, and must do it again"
