"""What the disk does wrong reaches the right ticket, and nothing else changes."""

from __future__ import annotations

import contextlib
import errno
import time

import pytest
from faulty_queue import Attempt, FaultPlan, faulty_queue, load, store

from aio_ext import Memory, Queue, QueueError, Ticket

KIB = 1 << 10
MIB = 1 << 20


def make(plan: FaultPlan, backend: str, depth: int = 8) -> Queue:
    return faulty_queue(plan, backend, depth=depth, block_bytes=64 * KIB)


def held_queue(plan: FaultPlan, backend: str) -> Queue:
    """One block in flight at a time, the first of which is held until the plan is released."""
    return faulty_queue(plan.strike(0, hold=True), backend, depth=1, block_bytes=64 * KIB)


def wait_for_attempt(plan: FaultPlan) -> None:
    """Until the first block was handed to the kernel: what is submitted from now on comes after it."""
    deadline = time.monotonic() + 10
    while not plan.log():
        assert time.monotonic() < deadline


def settle(ticket: Ticket) -> None:
    """Until the request is over, well or not."""
    with contextlib.suppress(QueueError):
        ticket.wait(10)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_each_operation_in_turn_fails_its_own_request_only(backend: str, memory: Memory, fd: int, error: int) -> None:
    num_blocks = 8
    for nth in range(num_blocks + 1):
        with make(FaultPlan().strike(nth, error=error), backend) as queue:
            file = queue.register_file(fd)
            tickets = [queue.write(file, i * 128 * KIB, memory.address, 128 * KIB) for i in range(num_blocks // 2)]
            for ticket in tickets:
                settle(ticket)
            failed = [ticket.error for ticket in tickets if ticket.error is not None]
            assert len(failed) == (1 if nth < num_blocks else 0), f"fault at operation {nth}"
            for raised in failed:
                assert raised.errno == error
                assert raised.bytes_done in (0, 64 * KIB)
                assert raised.offset <= raised.error_offset < raised.offset + raised.nbytes
            assert queue.statistics().failed_requests == len(failed)


@pytest.mark.parametrize("short_by", [1, 511, 512, 4 * KIB, 64 * KIB - 512, 64 * KIB - 1])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_short_transfers_are_continued_where_o_direct_can_resume(
    backend: str, memory: Memory, fd: int, noise: bytes, short_by: int, operation: str
) -> None:
    plan = FaultPlan()
    with make(plan, backend) as queue:
        file = queue.register_file(fd)
        store(memory.address, noise)
        plan.strike(4 if operation == "write" else 18, short_by=short_by)
        queue.write(file, 0, memory.address, 1 * MIB).wait(10)
        queue.read(file, 0, memory.address + 2 * MIB, 1 * MIB).wait(10)
        assert load(memory.address + 2 * MIB, 1 * MIB) == noise
        assert queue.statistics().short_transfers == 1
    assert len(plan.log()) == 33  # 16 blocks each way, and one remainder
    assert all(attempt.offset % 512 == 0 and attempt.nbytes % 512 == 0 for attempt in plan.log())


def test_a_busy_kernel_is_asked_again_and_then_given_up(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(0, error=errno.EAGAIN).strike(1, error=errno.EINTR)
    with make(plan, backend) as queue:
        file = queue.register_file(fd)
        queue.write(file, 0, memory.address, 4 * KIB).wait(10)
        assert queue.statistics().retries == 2

    plan = FaultPlan().strike_range(0, MIB, error=errno.EAGAIN)
    with make(plan, backend) as queue:
        file = queue.register_file(fd)
        with pytest.raises(QueueError) as caught:
            queue.write(file, 0, memory.address, 4 * KIB).wait(10)
        assert caught.value.errno == errno.EAGAIN
    assert 2 <= len(plan.log()) <= 100


def test_a_failed_sync_is_reported_and_never_repeated(backend: str, fd: int) -> None:
    for error in (errno.EIO, errno.EAGAIN):
        plan = FaultPlan().strike(0, error=error)
        with make(plan, backend) as queue:
            with pytest.raises(QueueError) as caught:
                queue.sync(queue.register_file(fd)).wait(10)
            assert caught.value.errno == error
        assert len(plan.log()) == 1


def test_a_request_that_failed_starts_no_further_blocks(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(1, error=errno.EIO)
    with make(plan, backend, depth=1) as queue:
        file = queue.register_file(fd)
        ticket = queue.write(file, 0, memory.address, 8 * MIB)
        with pytest.raises(QueueError) as caught:
            ticket.wait(10)
        assert caught.value.bytes_done == 64 * KIB
    assert [attempt.offset for attempt in plan.log()] == [0, 64 * KIB]


def test_an_urgent_request_overtakes_what_has_not_started(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan()
    with held_queue(plan, backend) as queue:
        file = queue.register_file(fd)
        background = queue.write(file, 0, memory.address, 256 * KIB)
        wait_for_attempt(plan)
        urgent = queue.read(file, 4 * MIB, memory.address + 4 * MIB, 128 * KIB, urgent=True)
        plan.release()
        urgent.wait(10)
        background.wait(10)
    assert plan.log() == [
        Attempt("write", 0, 0, 64 * KIB),
        Attempt("read", 0, 4 * MIB, 64 * KIB),
        Attempt("read", 0, 4 * MIB + 64 * KIB, 64 * KIB),
        Attempt("write", 0, 64 * KIB, 64 * KIB),
        Attempt("write", 0, 128 * KIB, 64 * KIB),
        Attempt("write", 0, 192 * KIB, 64 * KIB),
    ]


def test_reads_and_writes_take_turns(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan()
    with held_queue(plan, backend) as queue:
        file = queue.register_file(fd)
        first = queue.read(file, 0, memory.address, 4 * KIB)
        wait_for_attempt(plan)
        write = queue.write(file, 1 * MIB, memory.address, 128 * KIB)
        reads = [queue.read(file, 2 * MIB, memory.address + 1 * MIB, 128 * KIB) for _ in range(2)]
        plan.release()
        for ticket in (first, write, *reads):
            ticket.wait(10)
    kinds = [attempt.operation for attempt in plan.log()]
    if backend == "portable":  # serves requests of one rank in the order of their submission
        assert kinds == ["read", "write", "write", "read", "read", "read", "read"]
        return
    assert kinds in (
        ["read", "write", "read", "write", "read", "read", "read"],
        ["read", "read", "write", "read", "write", "read", "read"],
    )


def test_a_sync_waits_for_earlier_writes_only(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike_range(0, 64 * KIB, hold=True)
    with make(plan, backend) as queue:
        file = queue.register_file(fd)
        held = queue.write(file, 0, memory.address, 4 * KIB)
        wait_for_attempt(plan)
        sync = queue.sync(file)
        later = queue.write(file, 1 * MIB, memory.address, 4 * KIB)
        later.wait(10)
        assert not held.done() and not sync.done()
        plan.release()
        sync.wait(10)
        assert held.done()
    assert [attempt.operation for attempt in plan.log()] == ["write", "write", "sync"]


def test_syncs_between_long_writes_each_start_after_the_writes_before_them(
    backend: str, memory: Memory, fd: int
) -> None:
    plan = FaultPlan()
    with faulty_queue(plan, backend, depth=2, block_bytes=64 * KIB, num_threads=2) as queue:
        file = queue.register_file(fd)
        syncs = []
        for i in range(6):  # more syncs than the queue has blocks in flight
            queue.write(file, i * MIB, memory.address, 256 * KIB)
            syncs.append(queue.sync(file))
        for sync in syncs:
            sync.wait(10)
    log = plan.log()
    for nth, at in enumerate(i for i, attempt in enumerate(log) if attempt.operation == "sync"):
        begun = sum(attempt.operation == "write" for attempt in log[:at])
        assert begun >= 4 * (nth + 1), f"sync {nth} started after {begun} blocks"


def test_a_sync_does_not_wait_for_another_file(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike_range(0, 64 * KIB, hold=True)
    with make(plan, backend) as queue:
        held_file, free_file = queue.register_file(fd), queue.register_file(fd)
        held = queue.write(held_file, 0, memory.address, 4 * KIB)
        with pytest.raises(TimeoutError, match="not over after"):
            held.wait(0)
        queue.write(free_file, 1 * MIB, memory.address, 4 * KIB).wait(10)
        with pytest.raises(OSError, match="outstanding"):
            queue.unregister_file(held_file)
        plan.release()
        held.wait(10)


def test_random_faults_fail_what_they_hit_and_nothing_else(backend: str, memory: Memory, fd: int, noise: bytes) -> None:
    plan = FaultPlan().strike_at_random(
        7, error=0.05, errors=[errno.EIO, errno.EAGAIN], shortfall=0.1, delay=0.1, delay_us_max=500
    )
    store(memory.address, noise)
    with make(plan, backend) as queue:
        file = queue.register_file(fd)
        writes = [queue.write(file, i * 128 * KIB, memory.address + (i % 8) * 128 * KIB, 128 * KIB) for i in range(60)]
        for ticket in writes:
            settle(ticket)
    assert any(ticket.error for ticket in writes)
    with Queue(backend) as queue:
        file = queue.register_file(fd)
        for i, ticket in enumerate(writes):
            if ticket.error is None:
                queue.read(file, i * 128 * KIB, memory.address + 4 * MIB, 128 * KIB).wait(10)
                assert load(memory.address + 4 * MIB, 128 * KIB) == noise[i % 8 * 128 * KIB :][: 128 * KIB]
            else:
                assert ticket.error.errno == errno.EIO
