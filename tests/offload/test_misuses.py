"""A slice of the campaign of misuses; ``PYTHONPATH=tests python -m misuses`` is the whole of it."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest
from misuses import CASES
from misuses.case import Family
from misuses.judging import Result, judge
from misuses.running import Outcome

_TESTS = Path(__file__).parents[1]

_SLICE = [
    *("retained_graph_over_a_step", "grad_scaler_unscale_clip", "loaded_by_assignment", "written_through_views"),
    *("random_objects_1", "group_decays_otherwise", "step_looks_at_model", "parametrized_before", "loader_forked"),
    *("interrupt_in_backward", "main_grad_by_function", "recorded_in_recomputed", "weights_transposed_before"),
    *("saves_dual_numbers", "together_two_graphs", "equilibrium_with_a_hook_recomputed", "group_split_by_hand_torch"),
    *("truncated_by_deque_over_the_tiers", "byol_with_buffers_together", "kronecker_factors_recomputed"),
    *("rows_detached_once", "today_counted_in_class_mixed", "today_global_written_mixed"),
    *("pruning_grows_together", "states_exchanged_torch", "step_in_autocast", "flushed_in_forward_recomputed"),
    *("signal_saves", "interrupted_forward_goes_on_mixed", "global_generator_together", "module_slots_mixed"),
    "backward_replaced",
]


def test_a_slice_of_the_campaign_comes_out_as_it_must():
    assert {case.name for case in CASES} >= set(_SLICE)
    path = os.pathsep.join([str(_TESTS), str(_TESTS.parent)])  # a case begins processes
    done = forked.run_module("misuses", "-v", "--patience", "3", *_SLICE, PYTHONPATH=path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert f"{len(_SLICE)} cases in" in done.stdout


@pytest.mark.parametrize(
    ("torch_outcome", "found", "expected"),
    [
        (Outcome(1.0), Outcome(1.0), Result.AS_IN_TORCH),
        (Outcome(1.0), Outcome(1.1), Result.SILENT),
        (Outcome(1.0), Outcome(1.0, said=["UserWarning: the engine ..."]), Result.SAID),
        (Outcome(1.0), Outcome(1.1, said=["UserWarning: the engine ..."]), Result.SILENT),
        (Outcome(1.0), Outcome(error="ConfigError", kinds=("ConfigError",), is_ours=True), Result.OUR_ERROR),
        (Outcome(1.0), Outcome(error="KeyError", kinds=("KeyError",)), Result.BARE),
        (Outcome(1.0), Outcome(died="killed by SIGSEGV"), Result.DIED),
        (Outcome(error="ValueError"), Outcome(error="ValueError", kinds=("ValueError",)), Result.AS_IN_TORCH),
        (Outcome(error="ValueError"), Outcome(1.0), Result.SILENT),
        (Outcome(error="ValueError"), Outcome(error="KeyError", kinds=("KeyError",)), Result.BARE),
        (Outcome(died="it hangs"), Outcome(1.0), Result.BROKEN),
    ],
)
def test_the_judge_calls_each_outcome_by_its_name(torch_outcome, found, expected):
    family = Family("test")
    family.works("a case")(_nothing)
    verdict = judge(family.cases[0], {"torch": torch_outcome, "ram": found, "nvme": found})
    assert verdict.result is expected
    assert bool(verdict.fault) is (expected not in (Result.AS_IN_TORCH, Result.SAID))


def test_the_judge_asks_for_the_same_bits_on_nvme_and_for_a_message_that_names_the_way():
    family = Family("test")
    family.works("works")(_nothing)
    family.refused("refused", "engine.optimizer")(_other)
    works, refused = family.cases
    near = judge(works, {"torch": Outcome(1.0), "ram": Outcome(1.0), "nvme": Outcome(1.0 + 1e-9)})
    assert near.result is Result.SILENT and "other bits" in near.reason
    said = Outcome(error="ConfigError", kinds=("ConfigError",), is_ours=True, message="no")
    assert judge(refused, {"torch": Outcome(), "ram": said, "nvme": said}).fault
    said.message = "use engine.optimizer"
    assert not judge(refused, {"torch": Outcome(), "ram": said, "nvme": said}).fault


_CRASH_AND_HANG = """
import os, signal, time
from misuses.case import Family
from misuses.running import run
family = Family("test")
@family.works("crashes")
def crashes(place):
    os.kill(os.getpid(), signal.SIGSEGV)
@family.works("hangs", seconds=1.0)
def hangs(place):
    time.sleep(30)
@family.works("works")
def works(place):
    return 1.0
run(family.cases, lambda case, outcomes: print(case.name, {o.died or o.value for o in outcomes.values()}))
"""


def test_a_case_that_crashes_or_hangs_is_a_finding_and_ends_nothing_else():
    assert sorted(forked.run_well(_CRASH_AND_HANG).splitlines()) == [
        "crashes {'killed by SIGSEGV'}",
        "hangs {'it hangs: not done after 1 s'}",
        "works {1.0}",
    ]


def _nothing(place):
    return None


def _other(place):
    return None
