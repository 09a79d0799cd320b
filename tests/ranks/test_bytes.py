"""What a rank stores and moves: an N-th of one process's bytes, and what the arithmetic says of the network."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import jobs
from ranks.pool import Pool
from ranks.programs import GRADIENTS, ON_NVME, STATES, WEIGHTS, Placement

OVERHEAD = 0.01
"""Of the bytes of weights and gradients: what ranks tell each other about operations, scales and sums of squares."""


PADDING = 0.05
"""Units are padded to multiples of the number of ranks: those of ``Tiny`` by up to 4 % for four."""


def check_network(found: dict[str, int], size: int, least: int, most: int) -> None:
    """What the rank has received is so many times what the others have of all weights."""
    passes = found["network"] / (found["weights"] * (size - 1) / size)
    assert least <= passes <= most * (1 + OVERHEAD)


def test_bytes_of_a_rank_fall_with_their_number(two: Pool, four: Pool, tmp_path: Path):
    """A process by itself finds some weights in host memory still which ranks read once more."""
    one = jobs.moved(0, 1, ON_NVME, tmp_path)
    resting = jobs.moved(0, 1, WEIGHTS, tmp_path)["rests on the host"]
    assert one["network"] == 0
    for pool in (two, four):
        for found in pool(jobs.moved, ON_NVME, tmp_path):
            assert found["stored"] * pool.size == pytest.approx(one["stored"], rel=PADDING)
            assert found["to write"] * pool.size == pytest.approx(one["to write"], rel=PADDING)
            assert found["to read"] * pool.size == pytest.approx(one["to read"] + one["weights"], rel=PADDING)
            for name in ("read", "write"):  # the last writes may come after the report
                assert found[name] == pytest.approx(found[f"to {name}"], rel=0.15)
            # Gathered for forward and for backward, where some are there still; and gradients exchanged.
            check_network(found, pool.size, 1 + 1, 2 + 1)
        for found in pool(jobs.moved, STATES, tmp_path):
            assert found["rests on the host"] * pool.size == pytest.approx(resting, rel=PADDING)
            assert found["stored"] == found["read"] == found["write"] == 0
            check_network(found, pool.size, 1 + 1, 1 + 1)  # gathered once


def test_micro_batches_that_run_together_gather_weights_once_in_each_direction(two: Pool, tmp_path: Path):
    loop, together = (two(jobs.moved, ON_NVME, tmp_path, micro_batches=3, together=each) for each in (False, True))
    for of_loop, found in zip(loop, together, strict=True):
        check_network(found, two.size, 1 + 3, 2 + 3)
        assert found["read"] < 0.7 * of_loop["read"]


@pytest.mark.parametrize(
    ("placement", "micro_batches", "hold", "least", "most"),
    [
        (GRADIENTS, 1, False, 1 + 1, 1 + 1),
        (STATES, 3, False, 1 + 3, 1 + 3),
        (STATES, 3, True, 1 + 2, 1 + 2),  # gradients that were added up are fp32, and weights bf16
        (GRADIENTS, 3, False, 1 + 3, 1 + 3),
        (GRADIENTS, 3, True, 1 + 3, 1 + 3),  # it has no memory for those of the whole model
        (WEIGHTS, 3, False, 3 + 3, 6 + 3),
    ],
    ids=str,
)
def test_a_rank_receives_what_the_others_have(
    two: Pool, tmp_path: Path, placement: Placement, micro_batches: int, hold: bool, least: int, most: int
):
    for found in two(jobs.moved, placement, tmp_path, micro_batches, hold=hold):
        check_network(found, two.size, least, most)


def test_gradients_that_are_sent_rounded_are_half_the_bytes_and_train_as_well(two: Pool, tmp_path: Path):
    exact, rounded = (two(jobs.exchanged, STATES, tmp_path, dtype) for dtype in ("auto", "bf16"))
    divided = two(jobs.exchanged, WEIGHTS, tmp_path, "bf16")
    assert len({answer["bits"] for answer in (*rounded, *divided)}) == 1
    for one, other in zip(exact, rounded, strict=True):
        saved = one["network"] - other["network"]  # of the gradients of one's own half, which the other rank sends
        assert saved == pytest.approx(one["weights"] / 2 / 2, rel=PADDING)
        assert other["bits"] != one["bits"] and other["loss"] == pytest.approx(one["loss"], rel=1e-2)


def test_gradients_in_8_bits_are_a_quarter_of_the_bytes_and_train_nearly_as_well(two: Pool, tmp_path: Path):
    exact, rounded = (two(jobs.exchanged, STATES, tmp_path, dtype) for dtype in ("auto", "int8"))
    divided = two(jobs.exchanged, WEIGHTS, tmp_path, "int8")
    assert len({answer["bits"] for answer in (*rounded, *divided)}) == 1
    for one, other in zip(exact, rounded, strict=True):
        saved = one["network"] - other["network"]
        assert saved == pytest.approx(one["weights"] / 2 * (1 - 65 / 64 / 4), rel=PADDING)
        assert other["bits"] != one["bits"] and other["loss"] == pytest.approx(one["loss"], rel=3e-2)
