#!/usr/bin/env python
"""Random models and drives: whether more budget is ever slower when a step is played, and what playing is worth.

    python scripts/played_plans.py --models 200
    python scripts/played_plans.py --seed 1000 --seconds 60

Each model draws its blocks, what of them is frozen, a large embedding or none, a precision, a drive, micro-batches, and
whether steps are clipped. It is planned at every rung of the planner's ladder and at budgets between them. A plan must
obey its budget, and take no longer, played, than the plan of any rung below it. Beside that the played step is compared
with that of the plan that costs least by the rule alone, and both with a forecast of the same plans under computes from
a hundredth to all of the drive's time, which is what the planner does not know.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import nn

from offload import OffloadConfig
from offload.optim.choose import choose
from offload.optim.formats import Formats
from offload.plan.choice import Placements
from offload.plan.judge import Conditions, Judge
from offload.plan.plan import Plan
from offload.report.report import Bandwidths
from offload.units import UnitSpec
from offload.units.find import find_units


@dataclass(eq=False)
class Case:
    """A model, and the conditions of its steps."""

    units: list[UnitSpec]
    config: OffloadConfig
    conditions: Conditions

    @classmethod
    def draw(cls, seed: int, most_blocks: int = 12) -> Case:
        draw = random.Random(seed)
        with torch.device("meta"):
            model = _model(draw, most_blocks)
        config = OffloadConfig(
            precision=draw.choice(["fp32", "bf16"]), gradient_accumulation_steps=draw.choice([1, 1, 4])
        )
        read = draw.choice([0.5e9, 1e9, 2e9, 4e9, 7e9])
        drive = Bandwidths(read, read * draw.choice([0.5, 1, 2]), draw.choice([1.0, 1.3, 2.0]))
        return cls(find_units(model, dtype=config.dtype), config, Conditions(drive, draw.random() < 0.5))

    @property
    def formats(self) -> Formats:
        return Formats.of(self.config)

    @cached_property
    def placements(self) -> Placements:
        """All to choose from."""
        return Placements(
            self.units, self.formats, self.tiles_of, speculative=True,
            num_backwards=self.config.gradient_accumulation_steps, conditions=self.conditions,
        )  # fmt: skip

    def tiles_of(self, unit: UnitSpec, tile_bytes: int):
        return _tiles(self, unit, tile_bytes)


@cache
def _choice(case: Case):
    return choose(case.config, case.units)


@cache
def _tiles(case: Case, unit: UnitSpec, tile_bytes: int):
    return _choice(case).rule.tiles_of(unit, tile_bytes)


def _model(draw: random.Random, most_blocks: int) -> nn.Module:
    width = draw.choice([256, 512, 768, 1024])
    kinds = [nn.Linear(width, draw.choice([1, 2, 4]) * width) for _ in range(draw.randint(1, 4))]
    blocks = [nn.Sequential(*deepcopy(kinds)) for _ in range(draw.randint(2, most_blocks))]
    for block in blocks:
        block.requires_grad_(draw.random() < 0.9)
    ends = [nn.Embedding(draw.choice([1024, 16384, 50000]), width), nn.Linear(width, 64)]
    return nn.Sequential(ends[0], *blocks, ends[1])


@dataclass(frozen=True)
class Found:
    """What a model's plans are like when they are played. ``rises``: how much slower a budget is than a smaller one at
    the most, in parts; ``gains``: how much longer the rule's plan takes than the played one, by the budget."""

    rises: float
    rule_rises: float
    gains: list[float]
    other_gains: dict[float, list[float]]
    plan_seconds: list[float]


def check(case: Case, draw: random.Random, between: int = 4, computes: tuple[float, ...] = ()) -> Found | None:
    """Plan the case at all its budgets. Raises ``AssertionError`` where a promise is broken. None: it is too small to
    be played."""
    placements = case.placements
    judge, everything = placements.judge, placements.everything.total_bytes
    if judge is None:
        return None
    budgets = dict.fromkeys(placements.rungs, True)
    for _ in range(between):
        budgets.setdefault(draw.randint(placements.rungs[0], everything - 1), False)
    of_rungs, seconds, by_rule, plans, taken = float("inf"), [], [], [], []
    for budget, is_rung in sorted(budgets.items()):
        start = time.process_time()
        chosen = placements.choose(budget)
        taken.append(time.process_time() - start)
        rule = placements.by_cost(budget)
        assert chosen.total_bytes <= budget, f"{chosen.total_bytes} bytes are taken of {budget}"
        seconds.append(placements.played(chosen, judge))
        by_rule.append(placements.played(rule, judge))
        if not is_rung:
            plans.append(tuple(replace(one.plan(budget), speculative=True) for one in (chosen, rule)))
        assert seconds[-1] <= of_rungs, f"{budget} bytes take {seconds[-1]} s, a smaller budget {of_rungs} s"
        assert seconds[-1] <= by_rule[-1]
        of_rungs = min(of_rungs, seconds[-1]) if is_rung else of_rungs
    others = {share: _gains(judge, plans, share) for share in computes}
    gains = [b / a for a, b in zip(seconds, by_rule, strict=True)]
    return Found(_rise(seconds), _rise(by_rule), gains, others, taken)


def _gains(judge: Judge, plans: list[tuple[Plan, Plan]], share: float) -> list[float]:
    """Of steps that are not clipped, and of those that are, where that may be."""
    found = []
    for clipped in (False, True)[: 1 + judge.conditions.clipped]:
        for both in plans:
            chosen, rule = (judge.step_seconds(one, share, clipped=clipped) for one in both)
            found.append(rule / chosen)
    return found


def _rise(seconds: list[float]) -> float:
    return max([later / min(seconds[: index + 1]) - 1 for index, later in enumerate(seconds[1:])], default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no model after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--computes", type=float, nargs="*", default=[0.02, 0.25, 1.0], help="of the drive's time")
    given = parser.parse_args()
    end, found = time.monotonic() + given.seconds, []
    for seed in range(given.seed, given.seed + given.models):
        if time.monotonic() > end:
            break
        case = Case.draw(seed)
        try:
            one = check(case, random.Random(seed), computes=tuple(given.computes))
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            return 1
        found += [one] if one is not None else []
    _print(found)
    return 0


def _print(found: list[Found]) -> None:
    print(f"{len(found)} models: no budget is slower, played, than a rung below it")
    for name, rises in (("played", [one.rises for one in found]), ("the rule", [one.rule_rises for one in found])):
        over = sum(rise > 0.01 for rise in rises)
        print(f"{name}: {over} models with a budget over 1 % slower than a smaller one, {max(rises):.1%} at the most")
    _row("the steps that are played", [one.gains for one in found])
    for share in found[0].other_gains:
        _row(f"compute of {share:g} of the drive's time", [one.other_gains[share] for one in found])
    taken = [seconds for one in found for seconds in one.plan_seconds]
    print(f"a plan: {statistics.median(taken):.3f} s of a core, {max(taken):.3f} s at the most")


def _row(name: str, gains: list[list[float]]) -> None:
    flat = [gain for of_model in gains for gain in of_model]
    worse = sum(gain < 0.99 for gain in flat)
    print(
        f"{name}: the rule's plan takes {statistics.mean(flat):.3f} times as long on average, {max(flat):.2f} at the "
        f"most, {min(flat):.3f} at the least; over 1 % less at {worse} of {len(flat)} budgets"
    )


if __name__ == "__main__":
    sys.exit(main())
