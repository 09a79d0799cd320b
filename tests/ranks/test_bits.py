"""Several ranks train as one does, and where shards rest changes no bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.pool import Pool
from ranks.programs import (
    BY_THREADS,
    GRADIENTS,
    ON_DEVICE,
    ON_NVME,
    PLACEMENTS,
    STATES,
    WEIGHTS,
    Placement,
    Program,
    bits,
    bits_of_placements,
    run,
)

TOLERANCE = 2e-6
"""Of weights of about one after three steps in fp32. Ranks and one process add up the same numbers in another order:
each sum differs by a few roundings (6e-8 of it), and a step of Adam has the size of ``lr`` whatever the gradient's."""

OF_BF16 = 0.05
"""Gradients are rounded to 8 bits in another order: those of about nothing may change sign, and with it the direction
of two steps of ``lr``, 0.01."""


def check(
    pool: Pool, folder: Path, program: Program, *placements: Placement, states: bool = False
) -> list[dict[str, Any]]:
    """What each rank has, after checking that all placements gave it the same bits, and all ranks the same weights."""
    ranks = pool(bits_of_placements, program, placements, folder, states=states)
    for found in ranks:
        assert len(set(found["bits"].values())) == 1, found["bits"]
    for name in ("weights", "states"):
        assert len({bits(found[name]) for found in ranks}) == 1, f"ranks have other {name}"
    for of_step in zip(*(found["seen"] for found in ranks), strict=True):
        assert len({(seen["norm"], seen["step"], seen.get("clipped")) for seen in of_step}) == 1
    return ranks


def check_against_one(ranks: list[dict[str, Any]], program: Program, folder: Path, tolerance: float) -> None:
    """The mean of the ranks' losses, the norms and the weights are those of one process with the global batch."""
    one = run(0, 1, program, WEIGHTS, folder)
    for index, seen in enumerate(one["seen"]):
        of_ranks = [found["seen"][index] for found in ranks]
        for micro, loss in enumerate(seen["losses"]):
            mean = sum(of_rank["losses"][micro] for of_rank in of_ranks) / len(ranks)
            assert mean == pytest.approx(loss, rel=tolerance)
        assert of_ranks[0]["norm"] == pytest.approx(seen["norm"], rel=tolerance)
        assert of_ranks[0]["step"] == seen["step"]
    for name, weight in one["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=0, atol=tolerance, msg=name)


def test_two_ranks_train_as_one(two: Pool, tmp_path: Path):
    program = Program(options={"gradient_clipping": 0.7}, steps=3)
    ranks = check(two, tmp_path, program, *PLACEMENTS, states=True)
    check_against_one(ranks, program, tmp_path, TOLERANCE)


def test_four_ranks_train_as_one(four: Pool, tmp_path: Path):
    program = Program(model={"frozen": (1,), "tied": True}, steps=3)
    ranks = check(four, tmp_path, program, STATES, WEIGHTS, ON_NVME)
    check_against_one(ranks, program, tmp_path, TOLERANCE)


def test_bf16_with_every_step_clipped_and_blocks_computed_again(two: Pool, tmp_path: Path):
    program = Program(
        model={"tied": True, "recompute": "other", "frozen": (2,)},
        options={"precision": "bf16", "gradient_clipping": 0.05},
    )
    ranks = check(two, tmp_path, program, GRADIENTS, WEIGHTS, BY_THREADS)
    assert all(seen["norm"] > 0.05 for seen in ranks[0]["seen"])
    check_against_one(ranks, program, tmp_path, OF_BF16)


def test_fp16_skips_a_step_on_all_ranks_if_one_overflows(two: Pool, tmp_path: Path):
    program = Program(
        model={"recompute": "reentrant"}, options={"precision": "fp16"}, steps=3, planted=(1, 1, math.inf)
    )
    ranks = check(two, tmp_path, program, STATES, WEIGHTS, ON_NVME)
    assert [seen["step"] for seen in ranks[0]["seen"]] == [1, 1, 2]


def test_codes_of_eight_bits_in_pytorchs_own_loop(two: Pool, tmp_path: Path):
    options = {"moments_dtype": "int8", "gradient_clipping": 0.8}
    program = Program(model={"hidden": (509, 251)}, options=options, loop="plain", clip=0.9)
    ranks = check(two, tmp_path, program, GRADIENTS, ON_NVME, states=True)
    assert all(seen["clipped"] > 0.9 for seen in ranks[0]["seen"])


def test_moments_and_weights_rounded_at_random(two: Pool, tmp_path: Path):
    options = {"precision": "bf16", "moments_dtype": "bf16", "master_dtype": "bf16"}
    check(two, tmp_path, Program(model={"hidden": (509, 251)}, options=options), STATES, GRADIENTS, ON_NVME)


@pytest.mark.parametrize("optimizer", ["sgd", "lion"])
def test_units_that_ranks_use_in_other_orders_twice_or_not_at_all(two: Pool, tmp_path: Path, optimizer: str):
    options = {"optimizer": optimizer, "lr": 1e-3, "optimizer_options": {"momentum": 0.9} if optimizer == "sgd" else {}}
    program = Program(options=options, paths=((0, 1, 0), (2, 1)))
    check(two, tmp_path, program, STATES, WEIGHTS, ON_NVME)


def test_units_that_four_ranks_use_in_other_orders(four: Pool, tmp_path: Path):
    program = Program(paths=((0, 1), (1, 0), (2, 0, 2), ()))
    check(four, tmp_path, program, GRADIENTS, ON_NVME)


def test_large_layers_in_pieces(two: Pool, tmp_path: Path):
    program = Program(model={"large": True, "tied": True, "hidden": (59, 61)})
    ranks = check(two, tmp_path, program, GRADIENTS, BY_THREADS)
    check_against_one(ranks, program, tmp_path, TOLERANCE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", TOLERANCE), ("bf16", OF_BF16)])
def test_micro_batches_are_exchanged_one_by_one_or_once_a_step(
    two: Pool, tmp_path: Path, precision: str, tolerance: float
):
    """Added up by each rank first, gradients of several micro-batches come out as others to rounding."""
    options = {"gradient_accumulation_steps": 3 if precision == "fp32" else 2, "precision": precision}
    program = Program(options=options, model={"frozen": (0,)})
    one_by_one = check(two, tmp_path, program, GRADIENTS, WEIGHTS, ON_NVME)
    once = check(two, tmp_path, program, STATES)
    for ranks in (one_by_one, once):
        check_against_one(ranks, program, tmp_path, tolerance)


def test_micro_batches_that_run_together_have_the_bits_of_the_loop(two: Pool, tmp_path: Path):
    """Ranks exchange each one's gradients, in the loop's order; one rank uses other units than the other."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "precision": "bf16", "gradient_clipping": 0.05}
    paths = ((0, 1, 2), (2, 0))
    loop = check(two, tmp_path, Program(options=options, paths=paths), WEIGHTS)
    options |= {"activations": "nvme", "activation_memory": "64KiB"}
    together = check(two, tmp_path, Program(options=options, paths=paths, loop="together"), ON_NVME, ON_DEVICE)
    assert [bits(found["weights"]) for found in together] == [bits(found["weights"]) for found in loop]
    assert [found["seen"] for found in together] == [found["seen"] for found in loop]


def test_activations_of_ranks_that_hold_their_gradients_leave_with_the_same_bits(two: Pool, tmp_path: Path):
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    kept = check(two, tmp_path, Program(options=options, loop="held"), STATES)
    options |= {"activations": "nvme", "activation_memory": "64KiB"}
    left = check(two, tmp_path, Program(options=options, loop="held"), STATES)
    assert [bits(found["weights"]) for found in left] == [bits(found["weights"]) for found in kept]
