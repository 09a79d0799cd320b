"""DeepSpeed's learning rate schedules as schedulers of torch.

The formulas are those of DeepSpeed's documentation and release 0.19. A schedule there begins one step late: the first
optimizer step has the lowest rate, and the next ones those of n = 0, 1, 2, ... Here n is ``last_epoch - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offload.errors import ConfigError

Rates = float | Sequence[float]
"""One for all parameter groups, or one for each."""


class WarmupLR(LRScheduler):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, by their logarithm or linearly.

    ``warmup_max_lr=None``: the rate that each group has.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _each(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = rates if warmup_max_lr is None else _each(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the coming step."""
        share = 0.0 if self.last_epoch == 0 else self._share(self.last_epoch - 1)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self, n: int) -> float:
        if n >= self.warmup_num_steps:
            return self._share_after(n)
        return _warmup(n, self.warmup_num_steps, self.warmup_type)

    def _share_after(self, n: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, and then linearly back to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_epoch)

    def _share_after(self, n: int) -> float:
        return max(0.0, (self.total_num_steps - n) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRScheduler):
    """Each group's own rate times a factor: from ``warmup_min_ratio`` to 1 in ``warmup_num_steps`` steps, then along
    half a cosine to ``cos_min_ratio`` at ``total_num_steps``. The factor of the very first step is 0."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the coming step."""
        factor = 0.0 if self.last_epoch == 0 else self._factor(self.last_epoch - 1)
        return [rate * factor for rate in self.base_lrs]

    def _factor(self, n: int) -> float:
        warmup = self.warmup_num_steps
        if n < warmup:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * _warmup(n, warmup, self.warmup_type)
        progress = min(1.0, (n - warmup + 1) / max(1, self.total_num_steps - warmup))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class OneCycle(LRScheduler):
    """From ``cycle_min_lr`` up to ``cycle_max_lr`` and back, and then divided by 1 + ``decay_lr_rate`` for every
    ``decay_step_size`` steps. With ``cycle_momentum`` beta1 goes the other way, and beta2 is 0.99.

    A stair count holds rate and beta1 for equal parts of its half of the cycle; 0 changes them at every step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        second, stairs = cycle_second_step_size, cycle_second_stair_count
        self.sizes = (cycle_first_step_size, cycle_first_step_size if second is None else second)
        self.stairs = (cycle_first_stair_count, cycle_first_stair_count if stairs is None else stairs)
        self.lrs = (cycle_min_lr, cycle_max_lr)
        self.momenta = (cycle_min_mom, cycle_max_mom)
        self.decays = (decay_lr_rate, decay_mom_rate)
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the coming step. Writes the groups' betas."""
        low, high = self.lrs
        past = self._steps_past_the_cycle()
        rate = low + (high - low) * self._height() if past is None else low / self._growth(past, self.decays[0])
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self._momentum(past), 0.99)
        return [rate] * len(self.optimizer.param_groups)

    def _momentum(self, past: int | None) -> float:
        low, high = self.momenta
        if self.last_epoch == 0:
            return low  # as DeepSpeed begins, although the cycle goes down from ``cycle_max_mom``
        return high - (high - low) * self._height() if past is None else high * self._growth(past, self.decays[1])

    def _steps_past_the_cycle(self) -> int | None:
        """Steps since the cycle was over; None while it goes on."""
        past = self.last_epoch - sum(self.sizes)
        return past if past > 0 else None

    def _growth(self, past: int, decay: float) -> float:
        return 1 + decay * past / self.decay_step_size if self.decay_step_size else 1.0

    def _height(self) -> float:
        """Height of the cycle, from 0 to 1."""
        up, down = self.sizes
        at = self.last_epoch % (up + down)
        done, size, stairs = (at, up, self.stairs[0]) if at <= up else (up + down - at, down, self.stairs[1])
        return (done * stairs // size) / stairs if stairs else done / size


class LRRangeTest(LRScheduler):
    """``lr_range_test_min_lr`` times 1 + ``step_rate`` for every ``step_size`` steps, in stairs or smoothly."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        self.min_lrs = _each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the coming step."""
        interval = self.last_epoch / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * factor for rate in self.min_lrs]


def _warmup(n: int, num_steps: int, warmup_type: str) -> float:
    """Share of the warm-up that is done, from 0 to 1."""
    return n / num_steps if warmup_type == "linear" else math.log(n + 1) / math.log(num_steps)


def _each(optimizer: Optimizer, name: str, rates: Rates) -> list[float]:
    """The rate of each parameter group. Raises ``ConfigError`` for another number of rates than of groups."""
    num_groups = len(optimizer.param_groups)
    if not isinstance(rates, Sequence):
        return [rates] * num_groups
    if len(rates) != num_groups:
        raise ConfigError(f"scheduler.params.{name}: {len(rates)} rates for {num_groups} parameter groups")
    return list(rates)
