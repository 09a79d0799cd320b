"""Whether a step will be clipped, said during backward."""

import math
import random

import pytest

from offload.tiers.gradients.store import Gradient
from offload.update.forecast import Forecast


def backward(forecast: Forecast, norms: list[float]) -> list[bool]:
    """What is foretold at each unit of a backward whose gradients have these norms, in order."""
    return [forecast.unclipped(unit, [Gradient(norm * norm, 1.0)]) for unit, norm in enumerate(norms)]


def whole(norms: list[float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms))


def taken(forecast: Forecast, norm: float, factor: float) -> None:
    forecast.step_taken(norm, factor)
    forecast.begin()


def step(forecast: Forecast, norms: list[float], bound: float) -> list[bool]:
    """The same, and the step is taken."""
    said = backward(forecast, norms)
    taken(forecast, whole(norms), min(bound / (whole(norms) + 1e-6), 1.0))
    return said


def test_while_nothing_was_clipped_nothing_is_expected_to_be():
    forecast = Forecast(None)
    for size in (1.0, 100.0, 0.0, 1e6):
        assert all(step(forecast, [size] * 4, math.inf))


@pytest.mark.parametrize("told", [True, False])
def test_a_bound_that_was_told_or_seen_decides_from_the_first_unit_on(told: bool):
    forecast = Forecast(1.0 if told else None)
    assert any(step(forecast, [2.0] * 4, 1.0)) is not told
    assert not any(step(forecast, [2.0] * 4, 1.0))
    assert all(step(forecast, [0.4] * 4, 1.0))  # 0.8 in all, and 0.4 at the first unit
    assert not any(step(forecast, [0.6] * 4, 1.0))  # 1.2 in all, although 0.6 at the first


def test_a_bound_that_has_grown_is_seen():
    forecast = Forecast(None)
    step(forecast, [2.0] * 4, 1.0)
    step(forecast, [2.0] * 4, 100.0)
    assert all(step(forecast, [1.9] * 4, 100.0))


def test_a_factor_that_stays_is_the_one_to_expect_and_the_bound_is_seen_under_it():
    forecast = Forecast(None)
    for norm in (16.0, 17.0):
        backward(forecast, [norm / 2] * 4)
        taken(forecast, norm, 0.5)
    assert forecast.factor == 0.5 and all(backward(forecast, [80.0] * 4))
    taken(forecast, 160.0, 0.5 / 80)  # to a norm of 1
    assert forecast.factor == 0.5
    assert not any(backward(forecast, [2.0] * 4))  # 4 in all, 2 with the factor
    forecast.begin()
    assert all(backward(forecast, [0.8] * 4))


def test_after_forecasts_that_were_wrong_a_norm_near_the_bound_is_not_tried():
    chance = random.Random(1)
    forecast = Forecast(1.0)
    tried = 0
    for _ in range(100):
        norms = [0.49 * chance.uniform(0.5, 1.5) for _ in range(4)]
        tried += step(forecast, norms, 1.0)[0]
    assert tried < 70
    calm = Forecast(1.0)
    assert sum(step(calm, [0.49] * 4, 1.0)[0] for _ in range(100)) == 100


def test_gradients_that_are_dropped_count_no_more():
    forecast = Forecast(1.0)
    step(forecast, [0.3] * 4, 1.0)
    backward(forecast, [3.0] * 2)
    forecast.begin()
    assert all(step(forecast, [0.3] * 4, 1.0))
    taken(forecast, 0.0, 1.0)  # nothing came: no shares are known
    assert all(step(forecast, [0.3] * 4, 1.0))
