"""Dynamic loss scaling for fp16: gradients that would vanish are made larger, until some are too large."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger("offload")

_GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """The factor that the loss is multiplied by, with the constants of ``torch.amp.GradScaler``."""

    value: float = 2.0**16
    num_good_steps: int = 0

    def update(self, finite: bool) -> None:
        """A step is over: halve the scale if a gradient was not finite, double it after many steps that were."""
        if not finite:
            self.value, self.num_good_steps = self.value / 2, 0
            _log.info("a gradient is not finite: the step is skipped, the loss scale is %g now", self.value)
            return
        self.num_good_steps += 1
        if self.num_good_steps == _GROWTH_INTERVAL:
            self.value, self.num_good_steps = self.value * 2, 0
            _log.info("the loss scale is %g now", self.value)
