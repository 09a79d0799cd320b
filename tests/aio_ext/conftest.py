"""Every backend that works here runs the same tests, on a real file opened O_DIRECT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aio_ext import Memory, Queue, available_backends

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(params=["io_uring", "threads", "portable"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in available_backends():
        pytest.skip(f"{name} does not work here")
    return name


@pytest.fixture(autouse=True)
def short_measurements() -> None:
    """No engine is made here: those who begin pytest in other processes need not import one."""


@pytest.fixture
def queue(backend: str) -> Iterator[Queue]:
    with Queue(backend, depth=8, block_bytes=64 * KIB) as queue:
        yield queue


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory(8 * MIB) as memory:
        yield memory


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """An empty file of 8 MiB, opened O_DIRECT."""
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, 8 * MIB)
    yield fd
    os.close(fd)


@pytest.fixture
def noise() -> bytes:
    return os.urandom(1 * MIB)
