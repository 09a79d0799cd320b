"""A slice of random models that hand over, keep and write in random ways: ``python -m strange_models`` tries more."""

from __future__ import annotations

import pytest
from strange_models import HANDOVERS, KEPT, WRITES, draw, run
from strange_programs import try_program

SEEDS = range(9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_strange_model_trains_as_in_torch_or_ends_with_one_typed_error(seed, tmp_path):
    fault, _ = try_program(draw, run, seed, tmp_path)
    assert fault is None, draw(seed)


def test_the_programs_have_all_ways():
    blocks = [block for seed in range(300) for block in draw(seed).blocks]
    assert {block.handover for block in blocks} == set(HANDOVERS)
    assert {block.kept for block in blocks} == {None, *KEPT}
    assert {block.write for block in blocks} == {None, *WRITES}
