"""A slice of random programs over other tensors that look at weights: ``python -m strange_aliases`` tries more."""

from __future__ import annotations

import pytest
from strange_aliases import ALIASES, WRITES, draw, run
from strange_programs import try_program

SEEDS = (0, 5, 12, 13, 39, 50)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_with_aliases_ends_as_in_torch_or_with_one_typed_error(seed, tmp_path):
    fault, _ = try_program(draw, run, seed, tmp_path)
    assert fault is None, draw(seed)


def test_the_programs_have_all_ways():
    programs = [draw(seed) for seed in range(300)]
    assert {how for program in programs for how, _, _ in program["aliases"]} == set(ALIASES)
    assert {what for program in programs for *_, what in program["acts"]} == {"read", *WRITES}
