"""A slice of the random programs of ``scripts/ranks_programs.py``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from ranks.pool import Pool

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import ranks_programs

NUM_PROGRAMS = 1


def test_a_slice(two: Pool, tmp_path: Path):
    pools = {2: two}
    seeds = (seed for seed in itertools.count() if ranks_programs.drawn(seed)[0] in pools)
    for seed in itertools.islice(seeds, NUM_PROGRAMS):
        assert ranks_programs.check(pools, seed, tmp_path) == []
