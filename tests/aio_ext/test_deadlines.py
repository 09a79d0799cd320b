"""The portable queue waits for its own thread, and for room, no longer than it says; and it says what it waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from faulty_queue import FaultPlan, faulty_queue

from aio_ext import Memory, Queue, portable

KIB = 1 << 10
ENOUGH_SECONDS = 10.0


class StuckThread:
    """Stands in for a plan: at the first block the queue's own thread stops, until it is let go."""

    released = True

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.let_go = threading.Event()
        self._core = self

    def next(self, *_: int) -> tuple[int, int, int, bool]:
        self.stopped.set()
        self.let_go.wait(3 * ENOUGH_SECONDS)
        return 0, 0, 0, False


@pytest.fixture
def stuck(fd: int, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setattr(portable, "_WAIT_SECONDS", 0.1, raising=False)
    plan = StuckThread()
    queue = faulty_queue(cast("FaultPlan", plan), "portable")
    queue.write(queue.register_file(fd), 0, memory.address, 4 * KIB)
    assert plan.stopped.wait(ENOUGH_SECONDS)
    yield queue
    plan.let_go.set()
    queue.close()


def outcome(act: Callable[[], object]) -> BaseException | None:
    """What ``act`` raises. Fails if it does not return."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            act()
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ENOUGH_SECONDS)
    assert raised, "it waits without a limit"
    return raised[0]


CALLS: dict[str, Callable[[Queue, int], object]] = {
    "registering a file": lambda queue, fd: queue.register_file(fd),
    "giving a file back": lambda queue, fd: queue.unregister_file(0),
    "statistics": lambda queue, fd: queue.statistics(),
    "cancelling": lambda queue, fd: queue.cancel(),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_the_queues_thread_does_not_answer_names_what_was_asked(stuck: Queue, fd: int, what: str) -> None:
    error = outcome(lambda: CALLS[what](stuck, fd))
    assert isinstance(error, TimeoutError)
    assert str(error) == f"{what}: no answer from the queue's thread in 0.1 s"


def test_a_close_whose_queue_does_not_answer_ends(stuck: Queue) -> None:
    assert isinstance(outcome(lambda: stuck.close(timeout=0.1)), TimeoutError)


def test_a_request_that_finds_no_room_ends_with_a_timeout_error(
    memory: Memory, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "_WAIT_SECONDS", 0.1, raising=False)
    monkeypatch.setattr(portable, "_REQUESTS_MAX", 2)
    plan = FaultPlan().strike(0, hold=True).strike(1, hold=True)
    with faulty_queue(plan, "portable") as queue:
        file = queue.register_file(fd)
        held = [queue.write(file, 0, memory.address, 4 * KIB) for _ in range(2)]
        error = outcome(lambda: queue.write(file, 0, memory.address, 4 * KIB))
        assert isinstance(error, TimeoutError)
        assert str(error) == "write at 0: no room among 2 requests in 0.1 s"
        plan.release()
        for ticket in held:
            ticket.wait(10)
        queue.write(file, 0, memory.address, 4 * KIB).wait(10)
