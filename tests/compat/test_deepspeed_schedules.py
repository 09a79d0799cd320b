"""DeepSpeed's schedules against rates that were worked out by hand from the documented formulas."""

import math

import pytest
import torch
from torch import nn

from offload import ConfigError
from offload.compat.deepspeed import schedules


def optimizer(num_groups: int = 1, lr: float = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)]
    return torch.optim.AdamW(groups, lr=lr)


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The rate that each optimizer step is taken with."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_linear_warmup_stays_at_the_lowest_rate_for_two_steps_and_ends_at_the_highest():
    made = schedules.WarmupLR(optimizer(), 0.0, 0.4, 4, "linear")
    # n = -1 (the lowest), 0, 1, 2, 3, and from 4 on the highest.
    assert rates(made, 8) == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_logarithmic_warmup_is_the_default():
    made = schedules.WarmupLR(optimizer(), 0.1, 0.3, 4)
    # 0.1 + 0.2 * ln(n + 1) / ln(4): ln 1 = 0, ln 2 = ln(4) / 2, ln 3 = 0.79248 ln 4, ln 4.
    assert rates(made, 6) == pytest.approx([0.1, 0.1, 0.2, 0.2584962, 0.3, 0.3])


def test_warmup_without_a_highest_rate_goes_to_the_optimizers():
    assert rates(schedules.WarmupLR(optimizer(lr=0.1), warmup_num_steps=2, warmup_type="linear"), 4)[-1] == 0.1


def test_one_warmup_step_counts_as_two():
    assert rates(schedules.WarmupLR(optimizer(), 0.0, 0.2, 1, "linear"), 4) == pytest.approx([0.0, 0.0, 0.1, 0.2])


def test_warmup_and_linear_decay():
    made = schedules.WarmupDecayLR(optimizer(), 6, 0.0, 0.4, 2, "linear")
    # n = -1, 0, 1: 0, 0, 0.2; then 0.4 * (6 - n) / (6 - 2) for n = 2 ... 6, and 0 from there.
    assert rates(made, 9) == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


def test_warmup_and_cosine_decay():
    made = schedules.WarmupCosineLR(optimizer(lr=1.0), 6, 0.2, 2, 0.1, "linear")
    # 0, then 0.2 + 0.8 n / 2 for n = 0, 1; then 0.1 + 0.9 (1 + cos(pi (n - 1) / 4)) / 2 for n = 2 ... 5.
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1.0)]
    assert cosine[1] == pytest.approx(0.55)
    assert rates(made, 9) == pytest.approx([0.0, 0.2, 0.6, *cosine, 0.1, 0.1])


def test_one_cycle_goes_up_and_down_and_decays():
    made = schedules.OneCycle(optimizer(), 0.1, 0.3, 1.0, 2, 4, decay_step_size=2, cycle_momentum=False)
    # up in 2 steps, down in 4, then 0.1 / (1 + k / 2) for the k-th step after that.
    assert rates(made, 9) == pytest.approx([0.1, 0.2, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1 / 1.5, 0.05])


def test_one_cycle_turns_beta1_the_other_way():
    used = optimizer()
    made = schedules.OneCycle(used, 0.1, 0.3, 0.0, 2, 2, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_step_size=1,
                              decay_mom_rate=0.5)  # fmt: skip
    betas = []
    for _ in range(6):
        betas.append(used.param_groups[0]["betas"])
        used.step()
        made.step()
    assert [second for _, second in betas] == [0.99] * 6
    # DeepSpeed begins at the lowest; then 0.85, 0.8, 0.85, 0.9, and 0.9 * (1 + 0.5).
    assert [first for first, _ in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 1.35])


def test_stairs_hold_the_rate():
    made = schedules.OneCycle(optimizer(), 0.0, 1.0, 0.0, 4, 4, cycle_first_stair_count=2, cycle_momentum=False)
    assert rates(made, 9) == pytest.approx([0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0])


def test_range_test():
    assert rates(schedules.LRRangeTest(optimizer(), 0.1, 2, 1.0), 4) == pytest.approx([0.1, 0.15, 0.2, 0.25])
    made = schedules.LRRangeTest(optimizer(), 0.1, 2, 1.0, lr_range_test_staircase=True)
    assert rates(made, 4) == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_each_group_may_have_its_own_rates():
    made = schedules.WarmupLR(optimizer(2), [0.0, 0.1], [0.2, 0.5], 2, "linear")
    rates(made, 3)
    assert [group["lr"] for group in made.optimizer.param_groups] == pytest.approx([0.2, 0.5])
    with pytest.raises(ConfigError, match="3 rates for 2 parameter groups"):
        schedules.WarmupLR(optimizer(2), [0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    "make",
    [
        lambda used: schedules.WarmupLR(used, 0.0, 0.4, 4),
        lambda used: schedules.WarmupDecayLR(used, 9, 0.0, 0.4, 4),
        lambda used: schedules.WarmupCosineLR(used, 9, 0.0, 4),
        lambda used: schedules.OneCycle(used, 0.1, 0.3, 1.0, 2, 3, decay_step_size=2),
        lambda used: schedules.LRRangeTest(used, 0.1, 2),
    ],
    ids=lambda make: str(make.__code__.co_names[1]),
)
def test_a_schedule_that_is_resumed_has_the_rates_of_one_that_was_not_interrupted(make):
    whole = rates(make(optimizer()), 9)
    first = make(optimizer())
    assert rates(first, 4) == whole[:4]
    second = make(optimizer())
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert rates(second, 5) == whole[4:]
