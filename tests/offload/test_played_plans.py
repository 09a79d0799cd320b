"""Placements are chosen by playing a step: more budget is never slower, and the choice is the same each time."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Tiny, least_budget, train

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from played_plans import Case, check

from offload import OffloadEngine
from offload.optim.choose import choose
from offload.plan.filling import Placement
from offload.plan.judge import ASSUMED_DRIVE, Conditions
from offload.plan.ranks import ONE_RANK
from offload.planning import Room, plan_within, store_bytes

PLENTY = 1 << 60


def large_case(seed: int) -> Case:
    """The next one that is played, of few blocks."""
    case = Case.draw(seed, most_blocks=4)
    return case if case.placements.judge is not None else large_case(seed + 1000)


@pytest.mark.parametrize("seed", range(4))
def test_no_budget_is_slower_than_a_rung_below_it_nor_than_the_rule(seed: int):
    found = check(large_case(seed), random.Random(seed), between=3)
    assert found is not None and max(found.gains) >= 1.0


def test_the_choice_is_the_same_each_time_and_does_not_depend_on_what_was_asked_before():
    case = large_case(1)
    placements = case.placements
    again = replace_placements(case)
    budgets = placements.rungs[::3]
    chosen = [placements.choose(budget).key for budget in budgets]
    assert [again.choose(budget).key for budget in reversed(budgets)] == chosen[::-1]


def replace_placements(case: Case):
    return Case(case.units, case.config, case.conditions).placements


def test_a_model_whose_step_is_short_is_placed_by_cost_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It would take longer to play it."""
    monkeypatch.setattr("offload.plan.choice.Placements.by_playing", None)
    with OffloadEngine(Tiny(), host_memory="5MiB", nvme_path=tmp_path, precision="fp32") as engine:
        assert engine.plan.streams


def test_a_drive_without_room_for_the_played_plan_has_that_of_the_least_cost():
    case = large_case(2)
    config = replace(case.config, gradient_clipping=1.0)
    choice, budget = choose(config, case.units), case.placements.rungs[6]
    played = plan_within(config, case.units, choice, Room(budget, PLENTY, PLENTY), ONE_RANK)
    needed = store_bytes(played, config, speculative=True)
    tight = plan_within(config, case.units, choice, Room(budget, PLENTY, needed - 1), ONE_RANK)
    assert played.record_copies == 2 and tight.host_bytes <= budget
    assert tight.record_copies == 1 or store_bytes(tight, config, speculative=tight.speculative) < needed


@pytest.mark.parametrize("clipping", [0.0, 1.0, 1e9])
def test_the_bits_are_the_same_whatever_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clipping: float):
    """Both orders of filling, with every step clipped, some of them, and none."""
    options = {"precision": "fp32", "gradient_clipping": clipping}
    torch.manual_seed(0)
    first = Tiny()
    with OffloadEngine(deepcopy(first), host_memory="1GiB", **options) as engine:
        losses, weights = train(engine, steps=4)
        everything = engine.plan.host_bytes
    least = least_budget(deepcopy(first), tmp_path, **options)
    monkeypatch.setattr("offload.plan.judge._LEAST_SECONDS", 0.0)
    filled: list[bool] = []
    fill = Placement.fill

    def note(self: Placement, *args: int, by_unit: bool, **further: bool) -> None:
        filled.append(by_unit)
        fill(self, *args, by_unit=by_unit, **further)

    monkeypatch.setattr(Placement, "fill", note)
    for share in (0.0, 0.4, 0.8):
        budget = int(least + share * (everything - least))
        with OffloadEngine(deepcopy(first), host_memory=budget, nvme_path=tmp_path, **options) as engine:
            assert engine.plan.streams and engine.plan.host_bytes <= budget
            found = train(engine, steps=4)
        assert found[0] == losses
        assert all(torch.equal(weights[name], value) for name, value in found[1].items())
    assert {True, False} == set(filled)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_drive_of_any_speed_gives_a_plan_that_fits(clipped: bool):
    case = large_case(3)
    for rate in (1e8, 1e10):
        drive = replace(ASSUMED_DRIVE, read=rate, write=rate / 2)
        other = Case(case.units, case.config, Conditions(drive, clipped))
        for budget in other.placements.rungs[::3]:
            assert other.placements.choose(budget).total_bytes <= budget
