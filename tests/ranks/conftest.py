"""Pools of two and of four ranks, for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks.pool import Pool


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    yield from _pool(4)
