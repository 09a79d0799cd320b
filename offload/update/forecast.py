"""Forecast of whether gradients will be clipped, during backward: a speculative update is worth its bytes if its factor
is right.

[Note: What the forecast is made of] Between backward and step, gradients are multiplied by one factor: 1 where nothing
clips, 1/scale of a ``GradScaler``, less than either where the norm is over its bound. All but the last stay the same
from step to step. Whether the norm will be over its bound shows early in backward: what has come so far is compared
with what had come at the same unit of the last step. The bound need not be told: it is the norm that a clipped step was
left with. A forecast that is wrong changes no result; it costs the bytes of updates that are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from offload.tiers.gradients.store import Gradient

_MEMORY = 0.75
"""Weight of earlier steps in the mean error."""

_SLACK = 1.001
"""A clipped norm is a little below the bound, and is not quite the same each time."""


class Forecast:
    """Looks at the gradients of each unit while they come, and at each step's norm and factor."""

    def __init__(self, bound: float | None) -> None:
        """``bound`` of the norm, if it is known."""
        self.factor = 1.0
        """Factor of the coming step's gradients if they are not clipped."""
        self._last = (0.0, 1.0)
        """Norm and factor of the last step."""
        self._clips = bool(bound)
        """A bound is known, or was."""
        self._bound = bound or math.inf
        """The norm, with ``factor``, that is the largest one not to be clipped, as far as is known."""
        self._came: dict[int, float] = {}
        """Squared norms of the units whose backward is over, by unit; the next one is their sum."""
        self._sum = 0.0
        self._sums: dict[int, float] = {}
        """The sum when each unit's backward was over."""
        self._shares: dict[int, float] = {}
        """The same of the last step, as shares of its square."""
        self._first: float | None = None
        """The first norm that was foretold for the coming step."""
        self._error = 0.0
        """Mean relative error of first forecasts."""

    def unclipped(self, unit: int, gradients: Iterable[Gradient]) -> bool:
        """The backward of the unit of index ``unit`` is over, and these are its gradients: the step will, as far as can
        be said now, multiply by ``factor`` and nothing else."""
        if not self._clips:
            return True
        squared = sum(gradient.came_squared for gradient in gradients)
        self._sum += squared - self._came.get(unit, 0.0)
        self._came[unit] = squared
        self._sums[unit] = self._sum
        share = self._shares.get(unit, 1.0)
        norm = math.sqrt(max(self._sum, 0.0) / share) * self.factor if share > 0 else math.inf
        if self._first is None and unit in self._shares:
            self._first = norm
        return norm * (1 + self._error) < self._bound

    def step_taken(self, norm: float, factor: float) -> None:
        """The gradients of a step came with ``norm``, and were multiplied by ``factor``."""
        norm_left = norm * factor
        if factor == self.factor:
            if norm_left > self._bound * _SLACK:  # it has grown, and nobody says to what
                self._bound = math.inf
        elif factor == self._last[1] and norm != self._last[0]:  # it does not depend on the norm
            self.factor, self._bound, self._first = factor, math.inf, None
        elif factor < self.factor:
            self._clips, self._bound = True, norm_left
        self._last = norm, factor
        if self._first is not None and norm > 0:
            error = abs(self._first / (norm * self.factor) - 1)
            self._error = _MEMORY * self._error + (1 - _MEMORY) * error
        self._shares = {unit: each / (norm * norm) for unit, each in self._sums.items()} if norm > 0 else {}

    def begin(self) -> None:
        """No gradient of the coming step is there."""
        self._first, self._sum = None, 0.0
        self._came, self._sums = {}, {}
