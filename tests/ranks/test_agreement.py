"""Facts that must be the same on all ranks: a difference is one error on all, before anything stands on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import disagreement_jobs as jobs
from ranks.pool import Pool

from offload.ranks.agreement import disagreement, fact_of, told

BEGIN = "the ranks differ in what must be the same on all of them: "


def said_of(*of_ranks: Any, members: Any = range(9)) -> str:
    return disagreement([told(facts) for facts in of_ranks], members[: len(of_ranks)])


def test_equal_facts_say_nothing():
    assert said_of({"a": 1, "b": {"x": [1.0]}}, {"a": 1, "b": {"x": [1.0]}}) == ""


def test_a_difference_names_the_fact_its_values_and_the_ranks():
    of_ranks = [{"lr": {"group 0": lr}, "shard": "weights"} for lr in (0.1, 0.2, 0.1, 0.1)]
    assert said_of(*of_ranks) == f"{BEGIN}lr of group 0 is 0.1 on ranks 0, 2 and 3, 0.2 on rank 1"
    assert "0.1 on ranks 4, 6 and 7, 0.2 on rank 5" in said_of(*of_ranks, members=range(4, 8))


def test_a_fact_that_a_rank_lacks_is_nothing_there():
    assert (
        said_of({"buffer": {"mean": "(3,)"}}, {"buffer": {}})
        == f"{BEGIN}buffer of mean is '(3,)' on rank 0, nothing on rank 1"
    )


def test_many_differences_are_counted():
    assert said_of({"n": dict.fromkeys(range(9), 0)}, {"n": dict.fromkeys(range(9), 1)}).endswith("; and 6 more")


def test_values_that_are_too_long_to_be_shown_differ_all_the_same():
    said = said_of({"names": ["x" * 50] * 40 + ["a"]}, {"names": ["x" * 50] * 40 + ["b"]})
    assert said.startswith(BEGIN) and len(said) < 800


def test_a_tensors_fact_is_of_its_elements_shape_and_dtype():
    same = fact_of(torch.arange(6.0).view(2, 3))
    assert fact_of(torch.arange(6.0).view(3, 2).t().contiguous().view(3, 2)) != same
    assert fact_of(torch.arange(6.0, dtype=torch.float64).view(2, 3).float()) == same
    assert fact_of(torch.arange(6.0).view(2, 3).to(torch.int32)) != same
    assert fact_of(torch.empty(0)).startswith("(0,) float32")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", jobs.OPTIONS)
def test_other_options_or_models_are_one_error_before_anything_is_taken_over(two: Pool, tmp_path: Path, name: str):
    (first, was_whole), (second, _) = two(jobs.other_options, name, tmp_path)
    assert first == second and was_whole
    assert first.startswith("ConfigError: ") and jobs.OPTIONS[name].said in first


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", jobs.STEPS)
def test_another_step_is_one_error_before_it_is_taken(two: Pool, tmp_path: Path, name: str):
    first, second = two(jobs.other_step, name, tmp_path)
    assert first == second and first.startswith("RankError: ") and jobs.STEPS[name].said in first


@pytest.mark.parametrize("own", [{"lr": 0.5}, {"host_memory": 1}], ids=str)
def test_an_engine_that_is_refused_leaves_no_group_and_another_one_is_made(two: Pool, own: dict[str, Any]):
    for said, groups, threads, loss in two(jobs.refused_and_made_again, own):
        assert len(said) == 4 and all("Error: " in each for each in said)
        assert len(set(groups)) == len(set(threads)) == 1
        assert loss > 0
