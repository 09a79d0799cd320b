"""Origin of one tensor's value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swapper import FilePart


@dataclass(frozen=True, eq=False)
class Origin:
    """It is asked for when the tensor's unit is stored, and again for each piece of a weight in pieces."""

    whole: Callable[[], torch.Tensor]
    """Gives the value, in host memory."""
    read_rows: Callable[[int, int], torch.Tensor] | None = None
    """Gives the rows ``[start, stop)`` of it, where that takes less than the whole."""
    dtype: torch.dtype | None = None
    """Dtype in which the value lies in ``parts``."""
    parts: tuple[FilePart, ...] = ()
    """Where it lies in files, flat and as it is; nothing if it is made of what is there."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The rows ``[start, stop)`` of the value."""
        return self.whole()[start:stop] if self.read_rows is None else self.read_rows(start, stop)
