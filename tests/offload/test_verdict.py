"""The verdict: what a step does to every unit, from what is known of the gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from offload.errors import NonFiniteGradient
from offload.tiers.gradients.store import Gradient, GradientStore
from offload.units import ALIGNMENT, ParameterSpec, UnitSpec
from offload.update.step import Segment, UnitUpdate
from offload.update.verdict import Verdict, groups_by_parameter


class Rule:
    """Freezes what it is given, so that a test can see it; says for which parameters it was asked."""

    def __init__(self, *, uniform: bool) -> None:
        self.uniform = uniform
        self.asked: list[str] = []

    def begin_step(self, stepping: object) -> None:
        pass

    def freeze(self, spec: ParameterSpec, group: dict, step: int, grad_scale: float) -> tuple[object, ...]:
        self.asked.append(spec.name)
        return (*(() if self.uniform else (spec.name,)), group["lr"], step, grad_scale)


class Place:
    """Where no gradient rests: the verdict looks at none."""

    def forget(self) -> None:
        pass


class Story:
    """Units whose parameters have these sizes, all in one group with learning rate 0.5.

    Parameters have the names of their letters, in order: a, b, c, ...
    """

    def __init__(self, *sizes: Sequence[int], uniform: bool = True, named_order: str | None = None) -> None:
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        self.spec: dict[str, ParameterSpec] = {}
        self.units: list[UnitSpec] = []
        for index, numels in enumerate(sizes):
            specs, end = [], 0
            for numel in numels:
                specs.append(ParameterSpec(next(letters), torch.Size([numel]), numel, end, True, ()))
                end += -(-numel // ALIGNMENT) * ALIGNMENT
            self.spec.update({spec.name: spec for spec in specs})
            self.units.append(UnitSpec(index, f"u{index}", (), tuple(specs), end, end, 0))
        self.unit_of = {spec: unit for unit in self.units for spec in unit.parameters}
        self.gradients = GradientStore([Place() for _ in self.units])
        self.parameters = {spec: nn.Parameter(torch.zeros(1)) for spec in self.spec.values()}
        self.rule = Rule(uniform=uniform)
        order = [self.spec[name] for name in named_order or self.spec]
        self.verdict = Verdict(self.units, self.gradients, order, self.parameters, self.rule)
        self.groups = [self.group("".join(self.spec), lr=0.5)]

    def group(self, names: str, lr: float) -> dict:
        return {"params": [self.parameters[self.spec[name]] for name in names], "lr": lr}

    def come(self, names: str, sum_squares: float = 1.0, scale: float = 1.0) -> None:
        """Gradients of these parameters are there."""
        for name in names:
            spec = self.spec[name]
            self.gradients.landed(self.unit_of[spec], spec, scale, sum_squares)

    def freeze(self) -> list[tuple[str, tuple[Segment, ...]]]:
        """Freeze the step, after which there are no gradients; the updates."""
        updates = self.verdict.freeze(self.groups)
        for unit in self.units:
            self.gradients.forget(unit)
        return [(update.unit.name, update.segments) for update in updates]

    def steps(self) -> dict[str, int]:
        return {spec.name: number for spec, number in self.verdict.num_steps.items()}


# The norm.


def test_the_norm_is_summed_in_the_order_of_the_model_whatever_the_order_of_the_units():
    numbers = random.Random(3)
    orders = ["".join(numbers.sample("abcdefgh", 8)) for _ in range(20)]
    values = {name: numbers.random() * 10 ** numbers.randrange(-8, 8) for name in "abcdefgh"}
    norms = set()
    for order in orders:
        story = Story([1, 1, 1], [1, 1], [1, 1, 1], named_order=order)
        for name, value in values.items():
            story.come(name, value)
        total = 0.0
        for name in order:  # not ``sum``, which compensates since Python 3.12
            total += values[name]
        assert story.verdict.norm() == math.sqrt(total)
        norms.add(story.verdict.norm())
    assert len(norms) > 1


def test_the_norm_is_a_double_of_squares_that_are_multiplied_by_their_scale():
    story = Story([1, 1], [1])
    story.come("a", 3.0, scale=0.1)
    story.come("b", 1e-30)
    story.come("c", 7.0, scale=1 / 3)
    assert story.verdict.norm() == math.sqrt(3.0 * 0.1 * 0.1 + 1e-30 + 7.0 * (1 / 3) * (1 / 3))


def test_parameters_without_gradients_and_those_outside_of_the_order_are_not_in_the_norm():
    story = Story([1, 1, 1], named_order="ac")
    story.come("ab", 9.0)
    assert story.verdict.norm() == 3.0
    assert Story([1]).verdict.norm() == 0.0


def test_the_gradients_are_scaled_and_the_norm_with_them():
    story = Story([1], [1])
    story.come("a", 9.0, scale=0.5)
    story.come("b", 16.0)
    story.verdict.scale(0.5)
    known = [gradient for unit in story.units for gradient in story.gradients.of(unit).values()]
    assert known == [Gradient(9.0, 0.25, came_with=0.5), Gradient(16.0, 0.5, came_with=1.0)]
    assert story.verdict.factor() == 0.5
    assert story.verdict.norm() == math.sqrt(9.0 / 16 + 4.0)
    assert story.freeze() == [("u0", (Segment(0, 1, (0.5, 1, 0.25)),)), ("u1", (Segment(0, 1, (0.5, 1, 0.5)),))]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_parameter_of_the_model_whose_gradient_is_not_finite_is_named(bad):
    story = Story([1, 1], [1, 1], named_order="dcba")
    story.come("d", 1.0)
    story.come("abc", bad)
    assert not math.isfinite(story.verdict.norm())
    error = story.verdict.non_finite(7)
    assert isinstance(error, NonFiniteGradient)
    assert str(error).startswith("step 7: the gradient of c is not finite. The step was not taken")


# What is frozen.


def test_neighbours_that_take_the_same_step_are_one_segment():
    story = Story([10, 300, 256], [5])
    story.come("abcd")
    assert story.freeze() == [
        ("u0", (Segment(0, 1024, (0.5, 1, 1.0)),)),
        ("u1", (Segment(0, 5, (0.5, 1, 1.0)),)),
    ]
    assert story.rule.asked == ["a"]


@pytest.mark.parametrize("numel", [1, 255, 256])
def test_a_parameter_without_gradient_is_left_out_however_little_room_it_takes(numel):
    story = Story([256, numel, 20])
    story.come("ac")
    assert story.freeze() == [("u0", (Segment(0, 256, (0.5, 1, 1.0)), Segment(512, 532, (0.5, 1, 1.0))))]
    assert story.steps() == {"a": 1, "c": 1}


def test_a_parameter_without_group_is_left_out_and_a_unit_without_any_has_no_update():
    story = Story([20, 20], [20], [20])
    story.groups = [story.group("ad", lr=0.5)]
    story.come("abcd")
    assert story.freeze() == [
        ("u0", (Segment(0, 20, (0.5, 1, 1.0)),)),
        ("u2", (Segment(0, 20, (0.5, 1, 1.0)),)),
    ]
    assert story.steps() == {"a": 1, "d": 1}


def test_step_numbers_count_the_steps_that_a_parameter_takes_part_in():
    story = Story([20, 20], [20])
    story.come("ac")
    assert story.freeze() == [
        ("u0", (Segment(0, 20, (0.5, 1, 1.0)),)),
        ("u1", (Segment(0, 20, (0.5, 1, 1.0)),)),
    ]
    story.come("ab")
    assert story.freeze() == [("u0", (Segment(0, 20, (0.5, 2, 1.0)), Segment(256, 276, (0.5, 1, 1.0))))]
    story.come("abc")
    assert story.freeze() == [
        ("u0", (Segment(0, 20, (0.5, 3, 1.0)), Segment(256, 276, (0.5, 2, 1.0)))),
        ("u1", (Segment(0, 20, (0.5, 2, 1.0)),)),
    ]
    assert story.freeze() == []
    assert story.steps() == {"a": 3, "b": 2, "c": 2}


def test_learning_rate_and_scale_are_frozen_as_they_are_at_that_moment_and_part_the_segments():
    story = Story([20, 20, 20, 20])
    story.groups = [story.group("ab", lr=0.5), story.group("cd", lr=0.25)]
    story.come("abc")
    story.come("d", scale=0.125)
    updates = story.verdict.freeze(story.groups)
    story.groups[0]["lr"] = 9.0
    assert [update.segments for update in updates] == [
        (
            Segment(0, 276, (0.5, 1, 1.0)),
            Segment(512, 532, (0.25, 1, 1.0)),
            Segment(768, 788, (0.25, 1, 0.125)),
        )
    ]
    assert story.rule.asked == ["a", "c", "d"]
    assert story.freeze()[0][1][0] == Segment(0, 276, (9.0, 2, 1.0))


def test_equal_groups_are_one_segment_as_well():
    story = Story([20, 20])
    story.groups = [story.group("a", lr=0.5), story.group("b", lr=0.5)]
    story.come("ab")
    assert story.freeze() == [("u0", (Segment(0, 276, (0.5, 1, 1.0)),))]
    assert story.rule.asked == ["a", "b"]


def test_a_rule_that_is_not_uniform_is_asked_for_each_parameter():
    story = Story([20, 20], uniform=False)
    story.come("ab")
    assert story.freeze() == [("u0", (Segment(0, 20, ("a", 0.5, 1, 1.0)), Segment(256, 276, ("b", 0.5, 1, 1.0))))]
    assert story.rule.asked == ["a", "b"]


def test_a_parameter_without_elements_takes_the_step_and_makes_no_segment():
    story = Story([20, 0, 20], [0])
    story.come("abcd")
    assert story.freeze() == [("u0", (Segment(0, 276, (0.5, 1, 1.0)),))]
    assert story.steps() == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_a_rule_that_refuses_its_settings_leaves_the_step_numbers_as_they_were():
    def refuse(spec: ParameterSpec, group: dict, step: int, grad_scale: float) -> None:
        if spec.name == "c":
            raise ValueError("lr")

    story = Story([20], [20], [20], uniform=False)
    story.rule.freeze = refuse
    story.come("abc")
    with pytest.raises(ValueError, match="lr"):
        story.freeze()
    assert story.steps() == {}


# One unit at a time.


@pytest.mark.parametrize("uniform", [True, False])
def test_a_unit_is_frozen_by_itself_to_what_the_whole_step_does_to_it(uniform):
    numbers = random.Random(5)
    story = Story([20, 300, 20, 256, 0], [20, 20, 20], [20, 512], [20], uniform=uniform)
    names = "".join(story.spec)
    num_compared = 0
    for _ in range(40):
        parts = numbers.sample(names, 8)
        story.groups = [story.group("".join(parts[:4]), lr=numbers.choice([0.5, 0.25])), story.group(parts[4:], lr=0.5)]
        for name in numbers.sample(names, 7):
            story.come(name, 1.0, scale=numbers.choice([1.0, 0.5]))
        before = dict(story.verdict.num_steps)
        groups = groups_by_parameter(story.groups)
        alone = [story.verdict.freeze_unit(unit, groups, 1.0) for unit in story.units]
        assert story.verdict.num_steps == before
        together = story.verdict.freeze(story.groups)
        assert [update for update in alone if update is not None] == together
        num_compared += len(together)
        for unit in story.units:
            story.gradients.forget(unit)
    assert num_compared > 80


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_unit_with_a_gradient_that_is_not_finite_is_not_frozen_by_itself(bad):
    story = Story([20, 20], [20])
    story.come("ac")
    story.come("b", bad)
    groups = groups_by_parameter(story.groups)
    assert story.verdict.freeze_unit(story.units[0], groups, 1.0) is None
    expected = UnitUpdate(story.units[1], (Segment(0, 20, (0.5, 1, 1.0)),))
    assert story.verdict.freeze_unit(story.units[1], groups, 1.0) == expected


def test_a_step_is_the_same_only_with_the_gradients_that_it_was_frozen_with():
    story = Story([20, 20], [20])
    story.come("ac")
    unit, groups = story.units[0], groups_by_parameter(story.groups)
    early = story.verdict.freeze_unit(unit, groups, 0.5)
    story.verdict.scale(0.5)
    assert early.is_the_same(story.verdict.freeze_unit(unit, groups, 1.0)), "a factor leaves the gradient what it is"
    story.come("a")  # a later one is added to it
    late = story.verdict.freeze_unit(unit, groups, 1.0)
    assert late.segments[0][:2] == early.segments[0][:2] and not early.is_the_same(late)
    story.come("b")
    assert not late.is_the_same(story.verdict.freeze_unit(unit, groups, 1.0))


def test_a_unit_without_gradient_or_group_is_not_frozen_by_itself():
    story = Story([20], [20])
    story.come("b")
    assert story.verdict.freeze_unit(story.units[0], groups_by_parameter(story.groups), 1.0) is None
    assert story.verdict.freeze_unit(story.units[1], {}, 1.0) is None


def test_groups_are_found_by_their_parameters():
    story = Story([1, 1, 1])
    first, second = story.group("ac", lr=1.0), story.group("b", lr=2.0)
    found = groups_by_parameter([first, second])
    of = [found[id(story.parameters[story.spec[name]])] for name in "abc"]
    assert of[0] is first and of[1] is second and of[2] is first and len(found) == 3
