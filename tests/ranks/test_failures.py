"""A rank that fails ends all ranks with one error, in time; torchrun starts them again. Slices of two campaigns."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import forked
import pytest
from torch.distributed import HashStore, PrefixStore

from offload import RankError
from offload.ranks.heartbeat import Heartbeat
from offload.waiting import Failure

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import ranks_failures  # noqa: E402
from _ranks_processes import Launcher  # noqa: E402

CASES = {case.name: case for case in ranks_failures.cases()}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in forked.children().items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", forked.INTERPRETER)
        started = Launcher(str(SCRIPTS / "ranks_failures.py"))
    yield started
    started.close()


@pytest.mark.parametrize("name", ["raises in the making", "disk fails to write", "rank 0 killed"])
def test_all_ranks_end_with_one_error(launcher: Launcher, name: str):
    ranks_failures.run(CASES[name], launcher, 4.0)


def test_a_rank_that_is_stopped_ends_the_others(launcher: Launcher):
    ranks_failures.run(CASES["rank 0 stopped"], launcher, 3.0)


def test_the_campaign_finds_ranks_that_end_otherwise(launcher: Launcher):
    """The check of the checker."""
    case = CASES["two raise"]
    other = type(case)(case.name, case.fault, (0,), error=case.error, own=(3, ""))
    with pytest.raises(ranks_failures.Wrong, match="rank 0 ended with 1"):
        ranks_failures.run(other, launcher, 4.0)


def test_ranks_that_are_killed_go_on_with_the_same_bits():
    run = forked.run_script(SCRIPTS / "ranks_kill.py", "--seed", "3", "--kills", "2", "--ranks", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["kills"] >= 2


# The heartbeat, over a store in memory.


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
    heartbeat = Heartbeat(0, 2, store, 1.0, Failure())
    time.sleep(1.3)
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
