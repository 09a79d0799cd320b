"""What ranks do together, what one may do alone, and how all of them end when they are at different places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import jobs
from ranks.pool import Pool
from ranks.programs import ON_NVME, STATES, WEIGHTS, Placement, Program, bits, run

DEADLINE_S = 20.0
"""Within which all ranks know the first error; ``rank_timeout`` is 10 s there."""


def same(answers: list[Any]) -> Any:
    """What all ranks answered alike."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


@pytest.mark.each_value
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("placement", [WEIGHTS, ON_NVME], ids=str)
def test_one_rank_evaluates_and_reads_weights_alone(two: Pool, tmp_path: Path, placement: Placement, waits: bool):
    found = same(two(jobs.one_looks, placement, tmp_path, True, waits))
    assert found == same(two(jobs.one_looks, STATES, tmp_path, False))


def test_weights_and_gradients_are_written_by_all_ranks(two: Pool, tmp_path: Path):
    first, second = (two(jobs.changed_from_outside, placement, tmp_path) for placement in (WEIGHTS, ON_NVME))
    same([bits(found) for found in (*first, *second)])
    one = jobs.changed_from_outside(0, 1, WEIGHTS, tmp_path)
    for name, weight in one.items():
        torch.testing.assert_close(first[0][name], weight, rtol=0.01, atol=0.02)


def test_collectives_of_the_user_write_to_weights_and_gradients(two: Pool, tmp_path: Path):
    *wrote, said = same(two(jobs.written_by_collectives, ON_NVME, tmp_path))
    assert wrote == [True] * 3
    assert "blocks.0.up.weight has no memory that could be received into" in said


def test_weights_and_states_are_taken_to_another_engine(two: Pool, tmp_path: Path):
    whole, in_parts = same(two(jobs.goes_on_from_states, tmp_path))
    assert whole == in_parts


def test_unwrap_gives_all_ranks_the_model(two: Pool, tmp_path: Path):
    within, afterwards = same(two(jobs.unwrapped, tmp_path))
    assert within == afterwards


def test_two_engines_in_turns(two: Pool, tmp_path: Path):
    apart, together = same(two(jobs.two_at_a_time, tmp_path))
    assert apart == together


def test_two_meshes_of_two_ranks_train_two_models(four: Pool, two: Pool, tmp_path: Path):
    ranks = four(jobs.two_pairs, tmp_path)
    assert [found["pair"] for found in ranks] == [0, 0, 1, 1] and {found["ranks"] for found in ranks} == {2}
    for pair in (0, 1):
        alone = two(run, Program(model={"seed": pair}), WEIGHTS, tmp_path)
        same([bits(found["weights"]) for found in (*ranks[2 * pair : 2 * pair + 2], *alone)])


def test_an_engine_that_does_not_train_infers_by_shards(two: Pool, tmp_path: Path):
    assert two(jobs.infers, tmp_path) == [True, True]


def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks(two: Pool, tmp_path: Path):
    said, weights_stayed, _ = same(two(jobs.not_finite, tmp_path))
    assert "step 2" in said and "not finite" in said and weights_stayed


def test_a_budget_that_is_too_small_is_so_on_all_ranks(two: Pool, tmp_path: Path):
    said, needed, less = same(two(jobs.least_budget, tmp_path))
    assert f"Raise host_memory to {needed}." in said and "the 2 ranks of this machine" in said
    assert less == needed


def test_what_several_ranks_do_not_have_is_said(two: Pool, tmp_path: Path):
    shared, mixed, optimizer, mesh = same(two(jobs.refusals, tmp_path))
    assert shared.startswith("ConfigError: ranks 0 and 1 compute on the same GPU (GPU 7)")
    assert mixed.startswith("ConfigError: rank 0 computes on the CPU and rank 1 on a device")
    assert optimizer.startswith("ConfigError: this is one of 2 ranks") and "look at whole ones" in optimizer
    assert mesh.startswith("ConfigError: mesh: ") and "3 (('a', 'b', 'c'))" in mesh


@pytest.mark.each_value
@pytest.mark.parametrize("has", [0, 1])
@pytest.mark.parametrize("placement", [STATES, WEIGHTS], ids=str)
def test_a_rank_without_any_gradient_takes_the_step(two: Pool, tmp_path: Path, placement: Placement, has: int):
    same([bits(found) for found in two(jobs.without_gradients, placement, tmp_path, has)])


def test_a_rank_that_has_padding_alone_is_not_warned_of_a_step_without_gradients(four: Pool, tmp_path: Path):
    assert four(jobs.warned, tmp_path) == [[], [], [], []]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            jobs.one_ends_early,
            ["at different places of the program", "rank 0 at step 3", "rank 1 at the end (close())"],
        ),
        (jobs.one_changes_weights, ["rank 0 at a change", "rank 1 at step 2"]),
        (jobs.one_saves, ["rank 0 at save_checkpoint()", "rank 1 at step 2", "`if rank == 0:` around one"]),
    ],
)
def test_ranks_at_different_places_end_with_one_error(
    two: Pool, tmp_path: Path, job: Callable[..., Any], words: list[str]
):
    answers = two(job, tmp_path)
    said = same([error for error, _ in answers])
    assert all(word in said for word in words), said
    assert all(seconds < DEADLINE_S for _, seconds in answers)


def test_an_error_of_one_rank_ends_all(four: Pool, tmp_path: Path):
    answers = four(jobs.one_raises, tmp_path)
    *others, own = [error for error, _ in answers]
    assert own == "ValueError: a hook of the user's own"
    assert same(others).startswith(f"rank 3: {own}")
    assert all(seconds < DEADLINE_S for _, seconds in answers)
