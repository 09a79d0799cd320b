"""Ranks on GPUs of their own, skipped where there are not two. ``test_on_device.py`` tries their logic anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import jobs
from ranks.pool import Pool
from ranks.programs import DEVICE_PLACEMENTS, RESIDENT, Program
from ranks.test_bits import check

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_nccl_available() or torch.cuda.device_count() < 2, reason="there are no two GPUs with NCCL"
)

ON_GPUS = [replace(placement, gpu=True) for placement in DEVICE_PLACEMENTS]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_give_the_same_bits_wherever_shards_rest(two: Pool, tmp_path: Path, precision: str):
    program = Program(
        model={"hidden": (59, 113, 61, 127, 31, 97, 89, 53), "tied": True, "frozen": (1,)},
        options={"precision": precision, "gradient_clipping": 0.7},
        steps=3,
    )
    check(two, tmp_path, program, *ON_GPUS, states=True)


def test_gpus_are_left_when_one_rank_raises(two: Pool, tmp_path: Path):
    """The other one waits in a transfer for what never comes."""
    raised, told = two(jobs.raises_between_backwards, replace(RESIDENT, gpu=True), tmp_path)
    assert raised == "ValueError: planted" and told.startswith("RankError: rank 0: ValueError: planted")
