"""A slice of the campaign of disagreements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import forked
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import ranks_disagreements as campaign  # noqa: E402
from _ranks_processes import Launcher  # noqa: E402


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in forked.children().items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", forked.INTERPRETER)
        started = Launcher(str(SCRIPTS / "ranks_disagreements.py"))
    yield started
    started.close()


def program(case: str) -> campaign.Program:
    return campaign.Program(0, case, 2, (1,), "weights", "adamw", False)


def test_an_evaluation_on_one_rank_before_a_barrier_changes_nothing(launcher: Launcher):
    assert campaign.run(program("evaluation, then a barrier"), launcher, 2.0) == "the same"


def test_a_call_that_keeps_the_interpreter_is_no_death(launcher: Launcher):
    assert campaign.run(program("keeps the interpreter"), launcher, 1.0) == "the same"


def test_a_barrier_that_some_never_come_to_ends_with_one_error(launcher: Launcher):
    assert "RankError: the ranks wait for each other" in campaign.run(program("a barrier of some"), launcher, 1.5)


def test_the_campaign_finds_ranks_that_end_otherwise(launcher: Launcher):
    """The check of the checker."""
    with pytest.MonkeyPatch.context() as patch:
        case = campaign.CASES["a weight of one"]
        patch.setitem(campaign.CASES, "a weight of one", replace(case, words=("something else",)))
        with pytest.raises(campaign.Wrong, match="not what it is, on all ranks"):
            campaign.run(program("a weight of one"), launcher, 2.0)
