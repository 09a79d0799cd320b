"""Pools of two and of four ranks, for the tests of a file.

Each group of gloo that a rank has had polls every 10 ms, and an engine that is refused leaves its group behind: ranks
that live longer take more and more of a core, even while nobody calls them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks.pool import Pool


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    yield from _pool(4)
