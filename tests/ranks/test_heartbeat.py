"""Heartbeats of ranks that are threads, over a store in memory: who is gone, and which error ends all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from offload import RankError
from offload.ranks import heartbeat as heartbeat_module
from offload.ranks.heartbeat import Heartbeat, NoHeartbeat
from offload.ranks.places import Place
from offload.ranks.signs import OwnStores
from offload.waiting import Failure


class Stuck:
    """A store whose process was stopped: no call comes back."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.goes_on = threading.Event()

    def add(self, key: str, number: int) -> int:
        self.asked.set()
        self.goes_on.wait(60)
        raise RuntimeError("its process is gone")


def first_error(heartbeat: Heartbeat) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            heartbeat.check()
        except RankError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("no error")


def beat_quickly(heartbeats: list[Heartbeat]) -> list[Heartbeat]:
    """Have them look often, however long a rank may be silent: under load it is for a while."""
    for heartbeat in heartbeats:
        heartbeat._interval_s = 0.02
        heartbeat._wake.set()
    return heartbeats


def look_twice(heartbeat: Heartbeat) -> None:
    """Until it has looked at the others from beginning to end."""
    deadline = time.monotonic() + 20
    for _ in range(2):
        before = heartbeat._beat_at
        while heartbeat._beat_at == before:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_store_that_hangs_is_noticed_by_who_waits():
    store = Stuck()
    heartbeat = Heartbeat(0, 2, store, 1.0, Failure())
    assert store.asked.wait(10)
    error = first_error(heartbeat)
    assert "the store that all ranks share does not answer" in error
    store.goes_on.set()
    heartbeat.leave(None)


def test_a_rank_that_has_not_come_is_no_rank_that_is_gone():
    store = PrefixStore("world", HashStore())
    heartbeat = Heartbeat(0, 2, store, 0.4, Failure())
    time.sleep(0.6)
    heartbeat.check()
    store.add("1", 1)  # it comes, and is not heard of again
    assert "rank 1 is gone, or hangs" in first_error(heartbeat)


def test_of_two_that_fail_together_one_is_the_error_of_the_others():
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    heartbeats = [Heartbeat(rank, 3, PrefixStore("world", store), 2.0, Failure()) for rank in range(3)]
    leaving = [threading.Thread(target=heartbeats[rank].leave, args=(ValueError(f"of {rank}"),)) for rank in range(2)]
    for thread in leaving:
        thread.start()
    said = first_error(heartbeats[2]).partition("\n")[0]
    assert said in ("rank 0: ValueError: of 0", "rank 1: ValueError: of 1")
    assert store.get("world/first error").decode() == said
    for thread in leaving:
        thread.join()
    heartbeats[2].leave(None)


# What ranks tell each other.


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[Heartbeat]]]:
    made: list[Heartbeat] = []

    def make(size: int, timeout_s: float = 0.8) -> list[Heartbeat]:
        store = HashStore()
        made.extend(Heartbeat(rank, size, PrefixStore("world", store), timeout_s, Failure()) for rank in range(size))
        return made

    yield make
    for heartbeat in made:
        heartbeat.leave(None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("planted"), "rank 0: ValueError: planted"),
        (KeyboardInterrupt(), "rank 0: KeyboardInterrupt"),
        (RankError("rank 7 is gone"), "rank 7 is gone"),
    ],
)
def test_the_error_of_one_is_that_of_all(ranks: Callable[..., list[Heartbeat]], error: BaseException, said: str):
    own, other = ranks(2)
    own.leave(error)
    assert first_error(other).partition("\n")[0] == said
    assert own.failure.first is error


def test_a_rank_that_counts_on_is_waited_for_and_ranks_that_leave_in_peace_end_nobody(
    ranks: Callable[..., list[Heartbeat]],
):
    own, other, _ = beat_quickly(ranks(3, timeout_s=100.0))
    other.leave(None)  # it waits for the others, not without end
    look_twice(own)
    own.check()
    assert not own.failure.is_known


class Work:
    """A collective, over after some looks, that may fail."""

    def __init__(self, num_looks: int, error: Exception | None = None) -> None:
        self._left = num_looks
        self._error = error

    def is_completed(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("not in this slice of time")
        if self._error is not None:
            raise self._error


def test_a_collective_is_waited_for_in_slices(ranks: Callable[..., list[Heartbeat]]):
    own, other = ranks(2)
    own.wait_for(Work(3))
    other.leave(ValueError("planted"))
    with pytest.raises(RankError, match="rank 1: ValueError: planted"):
        own.wait_for(Work(10**9))


def test_a_collective_that_fails_while_all_ranks_live_is_the_error(ranks: Callable[..., list[Heartbeat]]):
    own, _ = ranks(2, timeout_s=0.4)
    with pytest.raises(RankError, match=r"a collective has failed, and no rank is gone: Connection reset"):
        own.wait_for(Work(0, RuntimeError("Connection reset\nby peer")))


def test_a_collective_that_fails_because_a_rank_is_gone_is_blamed_on_it():
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    own = Heartbeat(0, 3, PrefixStore("world", store), 0.8, Failure())
    for rank in ("1", "2"):
        PrefixStore("world", store).add(rank, 1)  # they have come, and count no more
    with pytest.raises(RankError, match=r"rank [12] is gone, or hangs"):
        own.wait_for(Work(0, RuntimeError("Connection reset")))
    own.leave(None)


def test_a_call_that_waits_for_all_ranks_is_left_behind(
    ranks: Callable[..., list[Heartbeat]], monkeypatch: pytest.MonkeyPatch
):
    own, other = ranks(2)
    assert own.wait_for_call(lambda: "made", "make it") == "made"
    monkeypatch.setattr(heartbeat_module, "PATIENCE_S", 0.05)
    goes_on = threading.Event()
    with pytest.raises(RankError, match=r"not all of the 2 ranks have come to make it in 0\.05 s"):
        own.wait_for_call(lambda: goes_on.wait(60), "make it")
    monkeypatch.undo()
    other.leave(ValueError("planted"))
    with pytest.raises(RankError, match="rank 1: ValueError: planted"):
        own.wait_for_call(lambda: goes_on.wait(60), "make it")
    goes_on.set()


def test_a_call_that_fails_is_looked_into(ranks: Callable[..., list[Heartbeat]]):
    def fail() -> Any:
        raise RuntimeError("no route to host")

    with pytest.raises(RankError, match="a collective has failed, and no rank is gone: no route to host"):
        ranks(2, timeout_s=0.4)[0].wait_for_call(fail, "make it")


def test_who_was_stopped_itself_blames_nobody():
    """Between two looks of a process that was stopped there is more time than a rank may be silent."""
    store = Stuck()
    own = Heartbeat(0, 2, store, 1.0, Failure())
    assert store.asked.wait(10)
    own._beat_at -= 100
    own._checked_at -= 100
    own.check()
    own._beat_at -= 100
    with pytest.raises(RankError, match="the store that all ranks share does not answer"):
        own.check()
    store.goes_on.set()
    own.leave(None)


# Ranks that wait for each other.


class Waits:
    """What a rank waits for, and whether it was asked to give."""

    def __init__(self, waited_s: float = 0.0, stuck_s: float = 0.0, *, can_be_given: bool = False) -> None:
        self._waited_s = waited_s
        self._stuck_s = stuck_s
        self._can_be_given = can_be_given
        self.given = threading.Event()

    def waited_s(self) -> float:
        return self._waited_s

    def can_be_given(self) -> bool:
        return self._can_be_given

    def give(self) -> None:
        self.given.set()

    def place(self) -> Place:
        return Place("step 3" if self._waited_s else "train.py, line 7", self._stuck_s)


def test_a_rank_that_can_be_given_what_it_waits_for_calls_the_others(ranks: Callable[..., list[Heartbeat]]):
    given = [Waits(100.0, can_be_given=True), Waits(), Waits()]
    for heartbeat, waits in zip(beat_quickly(ranks(3, timeout_s=800.0)), given, strict=True):
        heartbeat.attach(waits)
    assert all(waits.given.wait(20) for waits in given[1:])


def test_one_that_cannot_be_given_anything_asks_for_nothing(ranks: Callable[..., list[Heartbeat]]):
    given = [Waits(100.0), Waits()]
    own, other = beat_quickly(ranks(2, timeout_s=150.0))
    own.attach(given[0]), other.attach(given[1])
    deadline = time.monotonic() + 20
    while other._num_calls < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert other._num_calls >= 2 and not given[1].given.is_set()


def test_ranks_that_wait_for_each_other_end_with_the_place_of_each(ranks: Callable[..., list[Heartbeat]]):
    own, other = beat_quickly(ranks(2, timeout_s=80.0))
    waits = Waits(100.0, 90.0), Waits(0.0, 50.0)
    own.attach(waits[0]), other.attach(waits[1])
    said = "the ranks wait for each other: rank 0 at step 3, rank 1 at train.py, line 7. One of these"
    for each in (own, other):
        assert first_error(each).startswith(said) and "`if rank == 0:` around it" in first_error(each)


def test_one_that_waits_for_a_rank_which_may_go_on_says_so_once(
    ranks: Callable[..., list[Heartbeat]], monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    log = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(heartbeat_module, "_log", log)  # whatever other tests have done to the logger
    own, other = beat_quickly(ranks(2, timeout_s=40.0))
    waits = Waits(), Waits(90.0, 90.0)
    other.attach(waits[0]), own.attach(waits[1])
    deadline = time.monotonic() + 20
    while (own._num_calls < 8 or not said) and time.monotonic() < deadline:
        time.sleep(0.01)
    own.check()
    assert len(said) == 1 and "rank 0 has waited for 90 s for the others: " in said[0]


# Ranks that stand still.


class Answers:
    """Of ranks that are asked."""

    def __init__(self, answers: bool) -> None:
        self.num_asked = 0
        self._answers = answers
        self._is_asked = False

    def ask(self, rank: int) -> None:
        self.num_asked += 1
        self._is_asked = True

    def has_answered(self, rank: int) -> bool:
        asked, self._is_asked = self._is_asked, False
        return asked and self._answers


def test_a_rank_that_counts_no_more_but_answers_is_not_gone():
    """Something keeps its interpreter."""
    store, answers = PrefixStore("world", HashStore()), Answers(True)
    store.add("1", 1)
    own = Heartbeat(0, 2, store, 0.2, Failure(), answers)
    deadline = time.monotonic() + 20
    while answers.num_asked < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    own.check()
    own.leave(None)


def test_a_rank_that_is_asked_and_does_not_answer_is_gone():
    store, answers = PrefixStore("world", HashStore()), Answers(False)
    store.add("1", 1)
    own = Heartbeat(0, 2, store, 0.2, Failure(), answers)
    assert "rank 1 is gone, or hangs" in first_error(own) and answers.num_asked
    own.leave(None)


def test_processes_answer_by_stores_of_their_own():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (OwnStores(rank, PrefixStore("world", store), 5.0) for rank in range(2))
    assert not first.has_answered(1)
    first.ask(1), second.ask(7)  # which is not there
    deadline = time.monotonic() + 20
    while not (answered := first.has_answered(1)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert answered and not first.has_answered(1) and not second.has_answered(7)


def test_where_processes_share_a_store_in_another_way_nobody_answers():
    signs = OwnStores(0, PrefixStore("world", HashStore()), 5.0)
    signs.ask(0)
    assert not signs.has_answered(0)


def test_one_rank_waits_for_nobody():
    alone = NoHeartbeat(Failure())
    alone.wait_for(Work(0))
    assert alone.wait_for_call(lambda: 7, "make it") == 7
    alone.leave(ValueError("planted"))
    alone.check()
    alone.failure.record(RankError("planted"))
    with pytest.raises(RankError, match="planted"):
        alone.check()
