"""Ranks that compute on a device each: the same bits as on the CPU, and every access ordered."""

from __future__ import annotations

from pathlib import Path

from ranks import jobs
from ranks.pool import Pool
from ranks.programs import DEVICE_PLACEMENTS, ON_DEVICE, RESIDENT, STATES_ON_DEVICE, WEIGHTS, Program
from ranks.test_bits import check

DEEP = {"hidden": (59, 113, 61, 127, 31, 97, 89, 53)}
"""More units than any of the least budgets holds."""


def test_two_devices_train_as_two_cpus(two: Pool, tmp_path: Path):
    program = Program(model=DEEP, options={"gradient_clipping": 0.7}, steps=3)
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
