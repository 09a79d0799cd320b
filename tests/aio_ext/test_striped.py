"""One space over two paths: right bytes wherever they rest."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faulty_queue import FaultPlan, faulty_queue, load, store

from aio_ext import Memory, Queue, QueueError, StripedFile, StripePath
from aio_ext._core import core

KIB = 1 << 10
MIB = 1 << 20
CHUNK = 256 * KIB


class Paths:
    """Two files, each with a queue of its own."""

    def __init__(self, directory: Path, plans: list[FaultPlan], backend: str, stack: ExitStack) -> None:
        self.queues: list[Queue] = []
        self.files: list[int] = []
        for i, plan in enumerate(plans):
            queue = stack.enter_context(faulty_queue(plan, backend, depth=2, block_bytes=CHUNK, num_threads=2))
            fd = os.open(directory / f"path{i}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, 64 * MIB)
            self.files.append(queue.register_file(fd))
            os.close(fd)
            self.queues.append(queue)

    def stripe(
        self,
        nbytes: int,
        capacities: tuple[int, int] = (16 * MIB, 16 * MIB),
        table: list[tuple[int, int]] | None = None,
    ) -> StripedFile:
        paths = [
            StripePath(queue, file, capacity, 1e9)
            for queue, file, capacity in zip(self.queues, self.files, capacities, strict=True)
        ]
        return StripedFile(paths, nbytes, chunk_bytes=CHUNK, chunks_in_flight=8, table=table)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_random_reads_and_writes_agree_with_a_model(
    tmp_path: Path, backend: str, stack: ExitStack, noise: bytes
) -> None:
    for capacities in ((16 * MIB, 16 * MIB), (2 * MIB, 2 * MIB), (1 * MIB, 4 * MIB)):
        paths = Paths(tmp_path, [FaultPlan(), FaultPlan()], backend, stack)
        stripe = paths.stripe(4 * MIB - 512, capacities)  # the last chunk is not whole
        memory = stack.enter_context(Memory(8 * MIB))
        stripe.write(0, memory.address, stripe.nbytes).wait(10)
        model = bytearray(stripe.nbytes)
        choose = random.Random(5)
        for _ in range(40):
            offset = choose.randrange(0, stripe.nbytes // 512) * 512
            nbytes = min(choose.choice((512, CHUNK, 3 * CHUNK + 512)), stripe.nbytes - offset, len(noise))
            store(memory.address, noise[:nbytes])
            model[offset : offset + nbytes] = noise[:nbytes]
            stripe.write(offset, memory.address, nbytes).wait(10)
            noise = noise[512:] + noise[:512]
        stripe.sync().wait(10)
        stripe.read(0, memory.address, stripe.nbytes).wait(10)
        assert load(memory.address, stripe.nbytes) == model
        assert len(set(stripe.table())) == 16, "two chunks in one place"


def test_a_failed_write_leaves_the_chunk_as_it_was(
    tmp_path: Path, backend: str, stack: ExitStack, noise: bytes
) -> None:
    plans = [FaultPlan(), FaultPlan()]
    stripe = Paths(tmp_path, plans, backend, stack).stripe(4 * CHUNK)
    memory = stack.enter_context(Memory(2 * MIB))
    store(memory.address, noise)
    stripe.write(0, memory.address, 4 * CHUNK).wait(10)
    table = stripe.table()
    for plan in plans:
        plan.strike_range(0, 1 << 40, error=errno.ENOSPC)
    ticket = stripe.write(0, memory.address + CHUNK, CHUNK)
    with pytest.raises(QueueError) as caught:
        ticket.wait(10)
    assert caught.value.errno == errno.ENOSPC
    assert stripe.table() == table


def is_owned(address: int) -> bool:
    """True while the memory there has a user."""
    return core.lease_containing(address, 1) is not None


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_part_that_is_refused_fails_the_ticket_when_the_parts_in_flight_are_over(
    tmp_path: Path, backend: str, stack: ExitStack, operation: str
) -> None:
    plans = [FaultPlan().strike_range(0, 1 << 40, hold=True), FaultPlan()]
    paths = Paths(tmp_path, plans, backend, stack)
    stripe = paths.stripe(4 * CHUNK)
    assert [path for path, _ in stripe.table()] == [0, 1, 0, 1]
    paths.queues[1].close()  # refuses from now on
    memory = Memory(2 * MIB)
    address = memory.address
    submit = stripe.read if operation == "read" else stripe.write
    ticket = submit(CHUNK // 2, address, CHUNK)  # half of a chunk on each path
    memory.close()
    with pytest.raises(TimeoutError):
        ticket.wait(0.05)
    assert is_owned(address) and not ticket.done()
    plans[0].release()
    with pytest.raises(QueueError, match=rf"{operation} of part 2 of 2 \(path 1\)") as caught:
        ticket.wait(10)
    assert caught.value.errno == errno.ESHUTDOWN
    assert ticket.bytes_done == CHUNK // 2
    deadline = time.monotonic() + 10
    while is_owned(address):
        assert time.monotonic() < deadline


def test_a_sync_that_one_path_refuses_fails_the_ticket_with_the_name_of_the_path(
    tmp_path: Path, backend: str, stack: ExitStack
) -> None:
    plans = [FaultPlan().strike(0, hold=True), FaultPlan()]
    paths = Paths(tmp_path, plans, backend, stack)
    stripe = paths.stripe(4 * CHUNK)
    paths.queues[1].close()
    ticket = stripe.sync()
    with pytest.raises(TimeoutError):
        ticket.wait(0.05)
    plans[0].release()
    with pytest.raises(QueueError, match=r"part 2 of 2 \(path 1\)"):
        ticket.wait(10)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_request_whose_first_part_is_refused_raises_and_has_nothing_in_flight(
    tmp_path: Path, backend: str, stack: ExitStack, operation: str
) -> None:
    plans = [FaultPlan(), FaultPlan()]
    paths = Paths(tmp_path, plans, backend, stack)
    stripe = paths.stripe(4 * CHUNK)
    memory = Memory(2 * MIB)
    address = memory.address
    paths.queues[0].close()
    submit = stripe.read if operation == "read" else stripe.write
    with pytest.raises(OSError, match="closed"):
        submit(CHUNK // 2, address, 2 * CHUNK)  # the end of a chunk, a whole one, and the beginning of one
    memory.close()
    assert not is_owned(address)
    assert plans[1].log() == []


def test_a_request_can_be_awaited(tmp_path: Path, backend: str, stack: ExitStack) -> None:
    stripe = Paths(tmp_path, [FaultPlan(), FaultPlan()], backend, stack).stripe(4 * MIB)
    memory = stack.enter_context(Memory(4 * MIB))

    async def story() -> int:
        ticket = stripe.write(0, memory.address, 4 * MIB)
        await ticket
        await ticket
        return ticket.bytes_done

    assert asyncio.run(story()) == 4 * MIB


def test_ranges_outside_and_paths_too_small_are_refused(tmp_path: Path, backend: str, stack: ExitStack) -> None:
    paths = Paths(tmp_path, [FaultPlan(), FaultPlan()], backend, stack)
    with pytest.raises(ValueError, match="are needed"):
        paths.stripe(16 * MIB, (4 * MIB, 4 * MIB))
    for table in ([(0, 0)], [(0, 0), (0, 0), (1, 0), (1, 1)], [(0, 0), (0, 99), (1, 0), (1, 1)]):
        with pytest.raises(ValueError, match="table"):
            paths.stripe(4 * CHUNK, table=table)
    with pytest.raises(ValueError, match="not inside"):
        paths.stripe(1 * MIB).read(1 * MIB - 512, 0, 1024)
