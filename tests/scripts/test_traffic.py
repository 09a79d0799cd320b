"""A slice of ``scripts/traffic.py``: what programs read and write, against the plan and against what PyTorch needs."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import traffic

CASES = {case.name: case for case in traffic.all_cases()}
SLICE = [
    "plain", "reversed", "generation, not trained", "segments, reentrant", "halves of blocks, reentrant",
    "activations nvme, little memory", "four in a loop", "four together", "four together, halves of blocks, reentrant",
    "four together, each block twice", "nested units", "functional", "adapters", "bf16", "int8 moments",
    "experts: fused, unbound", "experts: fused, checkpointed",
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SLICE)
def test_a_step_moves_no_more_than_it_must(name: str, tmp_path: Path):
    case = CASES[name]
    needs, budgets = traffic.needs_of(case), traffic.budgets(case, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = traffic.measure(case, budgets["least"], tmp_path)
    assert list(traffic.judge(case, "least", seen, needs)) == []


def test_nothing_is_moved_where_all_is_in_memory(tmp_path: Path):
    case = CASES["plain"]
    seen = traffic.measure(case, traffic.budgets(case, tmp_path)["all"], tmp_path)
    assert (seen.store_read, seen.store_written) == (0, 0)


def test_more_than_a_step_must_move_is_told(tmp_path: Path):
    case = CASES["evaluation before"]
    seen = traffic.measure(case, traffic.budgets(case, tmp_path)["least"], tmp_path)
    one_forward = traffic.needs_of(CASES["forward, not trained"])
    assert any("weights" in found for found in traffic.judge(case, "least", seen, one_forward))
