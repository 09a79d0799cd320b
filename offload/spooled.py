"""Copies of what may be larger than memory, for state dicts: each lies in a file that has no name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from offload.errors import named
from offload.memory import trim_heap
from swapper import Spool, let_go

_LEAST_BYTES = 1 << 20
"""A smaller tensor stays in memory: there are few pages to be had of it."""


class Spooled:
    """Moves copies to a directory; without one they stay in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._spool = Spool(paths[0]) if paths else None

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """An ordinary tensor with the same value, whose memory the kernel may write out. Raises ``StorageFull``."""
        if self._spool is None or value.nbytes < _LEAST_BYTES:
            return value
        with named("memory for a copy"):
            memory = self._spool.memory(value.nbytes)
        kept = torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
        kept.copy_(value)
        let_go(memory)
        trim_heap()  # the values before this one
        return kept
