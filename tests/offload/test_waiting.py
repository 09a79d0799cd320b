"""Waiting for other threads: the first failure ends every wait, every wait has a deadline, a worker keeps its order."""

from __future__ import annotations

import _thread
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from interrupted import at_every_point

from aio_ext.latch import Latch
from offload import waiting
from offload.errors import WaitTimeout
from offload.waiting import DaemonThread, Failure, Job, Monitor, Worker
from swapper import OffloadError, StorageIOError

FOREVER_S = 20.0
"""No test takes this long, unless it fails."""


@pytest.fixture(autouse=True)
def _a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", FOREVER_S)


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for its end; raises what it has raised."""
        self._thread.join(FOREVER_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error


class Watched(Monitor):
    """A monitor that tells when somebody waits: his condition is false, and he holds the lock until he waits."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.looked = threading.Semaphore(0)

    def wait(self, timeout_s: float) -> None:
        self.looked.release()
        super().wait(timeout_s)


# Failure.


def test_the_first_error_wins_and_every_later_check_raises_it() -> None:
    failure, first, second = Failure(), RuntimeError("first"), RuntimeError("second")
    failure.check()
    assert failure.record(first) is first
    assert failure.record(second) is first
    for raising in (failure.check, failure.__enter__, partial(failure.raise_first, second)):
        with pytest.raises(RuntimeError) as caught:
            raising()
        assert caught.value is first


@pytest.mark.parametrize("fault", [StorageIOError("read of a: EIO"), WaitTimeout("the end of a use")])
def test_a_fault_of_a_disk_or_another_thread_is_fatal_and_others_are_not(fault: Exception) -> None:
    failure = Failure()
    with pytest.raises(KeyError), failure:
        raise KeyError("the user's own")
    failure.check()
    with pytest.raises(OffloadError) as caught, failure:
        raise fault
    assert caught.value is fault
    with pytest.raises(OffloadError) as caught, failure:
        pytest.fail("a block began after the first failure")
    assert caught.value is fault


def test_a_block_that_fails_after_another_thread_raises_the_others_error() -> None:
    failure, earlier = Failure(), RuntimeError("of another thread")
    with pytest.raises(RuntimeError) as caught, failure:
        failure.record(earlier)
        raise StorageIOError("write of a: EIO")
    assert caught.value is earlier


# Monitor.


def test_a_wait_ends_when_its_condition_holds() -> None:
    monitor = Watched(Failure())
    events: list[str] = []

    def wait() -> None:
        with monitor:
            monitor.wait_until(lambda: bool(events), lambda: "an event")
            events.append("woken")

    call = Call(wait)
    assert monitor.looked.acquire(timeout=FOREVER_S)
    with monitor:
        events.append("changed")
        monitor.notify_all()
    call.result()
    assert events == ["changed", "woken"]


def test_a_condition_that_holds_is_not_waited_for_even_after_a_failure() -> None:
    failure = Failure()
    failure.record(RuntimeError("planted"))
    monitor = Watched(failure)
    with monitor:
        monitor.wait_until(lambda: True, lambda: "nothing")
    assert not monitor.looked.acquire(blocking=False)


def test_a_failure_of_another_thread_ends_a_wait() -> None:
    failure = Failure()
    monitor = Watched(failure)

    def wait() -> None:
        with monitor:
            monitor.wait_until(lambda: False, lambda: "what never comes")

    call = Call(wait)
    assert monitor.looked.acquire(timeout=FOREVER_S)
    failure.record(RuntimeError("planted"))  # without a word to the monitor
    with pytest.raises(RuntimeError, match="planted"):
        call.result()


def test_a_wait_that_takes_too_long_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
    monitor, uses = Monitor(Failure()), ["3 uses"]
    with monitor, pytest.raises(WaitTimeout, match=r"the end of 2 uses.* 0\.01 s") as caught:
        uses.append("2 uses")  # the message is made when it is needed
        monitor.wait_until(lambda: False, lambda: f"the end of {uses[-1]}")
    assert "dmesg" in str(caught.value)


def test_a_transfer_is_waited_for_without_the_lock_and_it_is_taken_again_whatever_happens() -> None:
    monitor = Monitor(Failure())

    def others_come_in() -> None:
        def enter() -> None:
            with monitor:
                events.append("another thread")

        Call(enter).result()

    def fail() -> None:
        raise StorageIOError("EIO")

    events: list[str] = []
    with monitor:
        monitor.free_during(others_come_in)
        with pytest.raises(StorageIOError):
            monitor.free_during(fail)
        monitor.notify_all()  # raises where the lock is not held
    assert events == ["another thread"]


# Worker.


def test_a_worker_makes_its_calls_in_order_on_one_thread_of_its_own() -> None:
    worker, events = Worker("in order"), list[tuple[int, str]]()
    jobs = [
        worker.submit(lambda number=number: events.append((number, threading.current_thread().name)))
        for number in range(50)
    ]
    jobs[-1].wait(lambda: "the last call")
    assert events == [(number, "in order") for number in range(50)]
    worker.finish()


class Gate:
    """A call that goes on when it is let."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.open.wait(FOREVER_S)


def test_stop_lets_the_call_at_hand_end_and_makes_none_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, gate, events = Worker("stopped"), Gate(), list[str]()

    def at_hand() -> None:
        gate()
        events.append("at hand ends")

    worker.submit(at_hand)
    later = [worker.submit(lambda: events.append("later")) for _ in range(3)]
    assert gate.entered.wait(FOREVER_S)
    joining = threading.Event()

    class Told(Latch):
        def wait(self, timeout: float | None = None) -> bool:
            joining.set()
            return super().wait(timeout)

    monkeypatch.setattr(worker, "_has_ended", Told())
    stop = Call(lambda: (worker.stop(), events.append("stopped")))
    assert joining.wait(FOREVER_S)
    gate.open.set()
    stop.result()
    for job in later:  # those that are not made are over, too: nobody waits for them in vain
        job.wait(lambda: "a call that is not made")
    assert events == ["at hand ends", "stopped"]


def test_finish_makes_all_calls() -> None:
    worker, gate, events = Worker("finished"), Gate(), list[int]()
    worker.submit(gate)
    for number in range(3):
        worker.submit(lambda number=number: events.append(number))
    assert gate.entered.wait(FOREVER_S)
    gate.open.set()
    worker.finish()
    assert events == [0, 1, 2]


def test_what_is_submitted_after_stop_is_not_made_and_its_wait_returns() -> None:
    worker, events = Worker("over"), list[str]()
    worker.submit(lambda: events.append("before")).wait(lambda: "the first call")
    worker.stop()
    job = worker.submit(lambda: events.append("after"))
    job.wait(lambda: "a call that is not made")
    worker.stop()
    assert events == ["before"]


@pytest.mark.parametrize("end", [Worker.stop, Worker.finish])
def test_a_worker_that_was_never_used_ends_at_once(end: Callable[[Worker], None]) -> None:
    threads = threading.active_count()
    end(Worker("never used"))
    assert threading.active_count() == threads


@pytest.mark.parametrize("end", [Worker.stop, Worker.finish])
def test_a_call_that_hangs_is_an_error_that_names_the_thread(
    end: Callable[[Worker], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, gate = Worker("offload-that-hangs"), Gate()
    job = worker.submit(gate)
    assert gate.entered.wait(FOREVER_S)
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
        with pytest.raises(WaitTimeout, match="the end of thread offload-that-hangs"):
            end(worker)
        with pytest.raises(WaitTimeout, match="the call"):
            job.wait(lambda: "the call")
    gate.open.set()
    job.wait(lambda: "the call")


@pytest.mark.parametrize("end", [Worker.stop, Worker.finish])
def test_a_worker_may_be_ended_by_its_own_call(end: Callable[[Worker], None]) -> None:
    worker, events = Worker("ends itself"), list[str]()
    worker.submit(lambda: (end(worker), events.append("ended"))).wait(lambda: "the end")
    assert events == ["ended"]


def test_a_call_that_was_made_keeps_nothing_alive_though_its_job_is_kept() -> None:
    class Owner:
        def __init__(self) -> None:
            self.worker = Worker("idle")

        def work(self) -> None:
            events.append("worked")

    events: list[str] = []
    owner = Owner()
    jobs = [owner.worker.submit(owner.work), owner.worker.submit(lambda owner=owner: owner.work())]
    at_hand = Gate()  # the worker is at this one: it has forgotten those before
    last = owner.worker.submit(at_hand)
    assert at_hand.entered.wait(FOREVER_S)
    gone, worker = weakref.ref(owner), owner.worker
    gc.disable()  # nothing but the count of references may free it
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    at_hand.open.set()
    last.wait(lambda: "the last call")
    assert len(jobs) == 2
    worker.finish()
    assert events == ["worked", "worked"]


def test_an_idle_worker_refers_to_nothing_of_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.worker = Worker("idle")

        def work(self) -> None:
            pass

    freed = threading.Event()
    owner = Owner()
    weakref.finalize(owner, freed.set)
    owner.worker.submit(owner.work)
    worker = owner.worker
    gc.disable()  # the worker itself must let go
    try:
        del owner
        assert freed.wait(FOREVER_S)  # while the thread lives, and waits for its next call
    finally:
        gc.enable()
    worker.finish()


# Interrupts.


@pytest.mark.parametrize("part", ["/threading.py", "offload/waiting.py", "aio_ext/latch.py"])
def test_a_wait_that_is_interrupted_at_any_point_leaves_no_lock_to_anybody(part, monkeypatch):
    """``threading.Event`` has a lock within, which an interrupted wait keeps: the thread that ends the wait stood there
    for ever, and an interrupted ``Condition.wait`` left a block without the lock that the block gives back."""
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.001)

    def of_job(interrupted):
        job = Job(lambda: None)
        with contextlib.suppress(WaitTimeout):
            interrupted(lambda: job.wait(str))
        Call(job.run).result()
        job.wait(str)

    def of_monitor(interrupted):
        monitor = Monitor(Failure())

        def wait() -> None:
            with monitor:
                monitor.wait(0.001)

        def tell() -> None:
            with monitor:
                monitor.notify_all()

        interrupted(wait)
        Call(tell).result()

    num_points = [at_every_point(part, run) for run in (of_job, of_monitor)]
    assert part == "/threading.py" or min(num_points) > 1


def test_a_worker_whose_thread_does_not_begin_says_so_and_has_no_end_to_wait_for(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    worker = Worker("offload-test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't create new thread"):
            worker.submit(lambda: None)
        patch.setattr("offload.waiting.WAIT_TIMEOUT_S", 0.01)
        worker.finish()
    made = []
    worker.submit(lambda: made.append(True)).wait(lambda: "a call")
    worker.finish()
    assert made == [True]


def test_a_thread_that_finds_no_memory_to_begin_with_is_one_that_the_system_does_not_give(monkeypatch):
    """CPython tells nobody of it, and would wait for its sign for ever."""
    begun: list[threading.Thread] = []
    bootstrap = threading.Thread._bootstrap
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda thread: begun.append(thread))
    monkeypatch.setattr("offload.waiting._BEGIN_S", 0.05)
    made: list[int] = []
    with pytest.raises(OffloadError, match="ulimit -u"):
        Worker("lost").submit(lambda: made.append(1))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        DaemonThread(lambda: made.append(2), "lost").start()
    monkeypatch.undo()
    is_over = threading.Event()
    _thread.start_new_thread(lambda: (bootstrap(begun[-1]), is_over.set()), ())
    assert is_over.wait(30)
    assert made == [], "who has given it up goes on without it"
    DaemonThread(lambda: made.append(3), "in order").start()
    deadline = time.monotonic() + 30
    while not made and time.monotonic() < deadline:
        time.sleep(0.001)
    assert made == [3]
