"""The ways to learn that a request is over: polling, waiting, being called, awaiting."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
import time

import pytest
from busy_machine import allowed
from faulty_queue import FaultPlan, faulty_queue

from aio_ext import Memory, Queue, QueueError, Ticket

KIB = 1 << 10
MIB = 1 << 20


def test_await_gives_the_loop_to_others_and_returns_when_done(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(0, hold=True)

    async def story() -> list[str]:
        events = []
        with faulty_queue(plan, backend, block_bytes=64 * KIB) as queue:
            file = queue.register_file(fd)
            ticket = queue.write(file, 0, memory.address, 128 * KIB)

            async def other() -> None:
                events.append("other runs")
                plan.release()

            task = asyncio.create_task(other())
            await ticket
            events.append("ticket is done")
            await task
            await ticket  # once more returns at once
        return events

    assert asyncio.run(story()) == ["other runs", "ticket is done"]


def test_many_tickets_can_be_awaited_at_once_in_several_loops(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)

    async def story() -> int:
        async def one(i: int) -> None:
            await queue.write(file, i * 4 * KIB, memory.address, 4 * KIB)

        await asyncio.gather(*(one(i) for i in range(200)))
        return 200

    assert [asyncio.run(story()) for _ in range(3)] == [200] * 3


def test_await_raises_the_error(backend: str, memory: Memory, fd: int) -> None:
    async def story(queue: Queue) -> None:
        await queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)

    with faulty_queue(FaultPlan().strike(0, error=errno.EIO, delay_us=1000), backend) as queue:
        with pytest.raises(QueueError) as caught:
            asyncio.run(story(queue))
        assert caught.value.errno == errno.EIO


def test_an_awaiting_task_can_be_cancelled(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(0, hold=True)

    async def story(queue: Queue) -> Ticket:
        ticket = queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)

        async def wait() -> None:
            await ticket

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)
        plan.release()
        await ticket
        return ticket

    with faulty_queue(plan, backend) as queue:
        assert asyncio.run(story(queue)).done()


def test_callbacks_are_made_once_in_order_even_for_failures(backend: str, memory: Memory, fd: int) -> None:
    called: list[tuple[str, bool]] = []
    everything = threading.Event()
    plan = FaultPlan().strike(0, error=errno.EIO, delay_us=10_000)
    with faulty_queue(plan, backend) as queue:
        ticket = queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)
        ticket.add_done_callback(lambda t: called.append(("first", t.error is not None)))
        ticket.add_done_callback(lambda t: 1 / 0)
        ticket.add_done_callback(lambda t: sys.exit())
        ticket.add_done_callback(lambda t: called.append(("third", t.done())))
        with pytest.raises(QueueError):
            ticket.wait(10)
        ticket.add_done_callback(lambda t: (called.append(("late", t.done())), everything.set()))
        assert everything.wait(10)
    assert called == [("first", True), ("third", True), ("late", True)]


def test_waiting_lets_other_threads_run_and_several_threads_wait(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(0, hold=True)
    with faulty_queue(plan, backend) as queue:
        ticket = queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)
        waiting = [threading.Thread(target=ticket.wait, args=(30,)) for _ in range(3)]
        for thread in waiting:
            thread.start()
        with pytest.raises(TimeoutError):
            ticket.wait(0.05)
        plan.release()
        for thread in waiting:
            thread.join(10)
        assert not any(thread.is_alive() for thread in waiting)


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_impossible_timeouts_are_refused(queue: Queue, memory: Memory, fd: int, timeout: float) -> None:
    ticket = queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)
    with pytest.raises(ValueError):
        ticket.wait(timeout)


def test_ctrl_c_interrupts_a_wait_at_once(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(0, hold=True)
    with faulty_queue(plan, backend) as queue:
        ticket = queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        took = time.monotonic() - start
        assert took < allowed(0.6)
        timer.join()
        plan.release()
        ticket.wait(10)
