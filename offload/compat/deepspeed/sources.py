"""Values for "auto": arguments, by the names of ``transformers`` and of scripts, and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from offload import option_values
from offload.compat.deepspeed.keys import TABLE

_NAMES = {key: names.split() for key, names in TABLE.texts('arguments that say what "auto" is').items()}


class Sources:
    """Answers for keys that are "auto"; None: nothing says it."""

    def __init__(self, arguments: object = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._arguments = arguments
        self._optimizer = optimizer
        self.resolved: dict[str, Any] = {}
        """Values that stand for "auto", by the path of the key."""

    def number(self, key: str) -> Any:
        """The value of the argument that ``key`` is called by; the optimizer's own, if it has one."""
        if self._optimizer is not None and key in self._optimizer.param_groups[0]:
            return self._optimizer.param_groups[0][key]
        for name in _NAMES.get(key, ()):
            value = self._argument(name)
            if value is not None and not isinstance(value, bool):
                return option_values.as_number(name, value)
        return None

    def count(self, key: str) -> int | None:
        """The same for a whole number of at least 1; 0 and less say nothing, as ``max_steps=-1`` does."""
        for name in _NAMES[key]:
            value = self._argument(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def flag(self, key: str) -> bool | None:
        """The same for True or False."""
        value = self._argument(key)
        return value if isinstance(value, bool) else None

    def betas(self) -> tuple[float, ...] | None:
        """Both betas of Adam."""
        if self._optimizer is not None and "betas" in self._optimizer.param_groups[0]:
            return tuple(self._optimizer.param_groups[0]["betas"])
        betas = self._argument("adam_beta1"), self._argument("adam_beta2")
        return None if None in betas else option_values.as_betas("adam_beta1, adam_beta2", betas)

    def warmup_steps(self) -> int | None:
        """Steps, also from a share of ``max_steps``: ``warmup_ratio``, or ``warmup_steps`` below 1."""
        steps, total = self.count("warmup_num_steps"), self.count("total_num_steps")
        if steps is not None or total is None:
            return steps
        for share in (self._argument("warmup_steps"), self._argument("warmup_ratio")):
            if isinstance(share, float) and 0 < share < 1:
                return math.ceil(total * share)
        return None

    def _argument(self, name: str) -> Any:
        if isinstance(self._arguments, Mapping):
            return self._arguments.get(name)
        return getattr(self._arguments, name, None)
