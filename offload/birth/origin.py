"""Origin of one tensor's value."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Origin(ABC):
    """It is asked for when the tensor's unit is stored, and again for each piece of a weight in pieces."""

    @abstractmethod
    def whole(self) -> torch.Tensor:
        """The value, in host memory."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The rows ``[start, stop)`` of it."""
        return self.whole()[start:stop]
