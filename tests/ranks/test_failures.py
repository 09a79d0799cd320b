"""A rank that fails ends all ranks with one error, in time; torchrun starts them again. Slices of three campaigns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import ranks_failures  # noqa: E402
from _full_disk import CannotMount, in_own_mounts  # noqa: E402
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


def test_starts_that_bring_no_new_step_are_counted_but_for_those_that_a_kill_explains():
    from ranks_kill import restarts_in_vain

    def begins(count: int) -> list[list[str]]:
        return [["begins", rank, str(count), "1"] for rank in "01"]

    def step(number: int) -> list[list[str]]:
        return [["step", rank, str(number), "0x1p0"] for rank in "01"]

    told = [*begins(0), *step(1), *step(2), ["killed"], *begins(1)]
    assert restarts_in_vain(told) == 0
    told += [*step(2), *begins(2), *begins(3)]  # step 2 is no new one
    assert restarts_in_vain(told) == 2
    assert restarts_in_vain([*told, ["killed"], *begins(4)]) == 2
    assert restarts_in_vain([*told, *step(3)]) == 0


def test_ranks_that_are_killed_go_on_with_the_same_bits():
    run = forked.run_script(SCRIPTS / "ranks_kill.py", "--seed", "3", "--kills", "1", "--ranks", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["kills"] >= 1


def test_a_rank_without_its_disk_ends_all_and_they_go_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forked.fork_children(monkeypatch)
    options = ["--seed", "3", "--trials", "1", "--fault", "full", "--mounted"]
    try:
        found = in_own_mounts([sys.executable, "-W", "ignore", str(SCRIPTS / "ranks_disks.py"), *options])
    except CannotMount as error:
        pytest.skip(str(error))
    told = capfd.readouterr()
    assert found.returncode == 0, told
    assert "'trials': 1" in told.out
