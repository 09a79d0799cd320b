"""A frozen model beside the one that is trained, in an engine of its own: how the two share the budgets.

A byte of host memory saves least where it holds the frozen model: one read a step, against two or three bytes of
traffic where it holds states or weights that are trained. So the frozen model gets the least that it runs with, and
training the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import BudgetError


class Sharing:
    """The budgets of one config, divided between a model that is trained and ``frozen``.

    Budgets that are "auto" stay so for the one that is trained."""

    def __init__(self, config: OffloadConfig, frozen: nn.Module) -> None:
        self._frozen = frozen
        self._least: dict[str, int] = {}
        """Bytes of each budget that the frozen one has."""
        self._ours = config
        self._theirs = replace(
            config, optimizer=None, gradient_accumulation_steps=1, moments_dtype="fp32", weights=None
        )
        if config.device_memory != "auto" and not _computes_on_the_cpu(config):
            self._divide("device_memory")
        self._divide("host_memory")

    def engines(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[OffloadEngine, OffloadEngine]:
        """Engines over ``model``, which ``optimizer`` trains, and over the frozen one.

        Raises ``BudgetError`` before either model is touched; ``needed_bytes`` is for both, then.
        """
        try:
            ours = OffloadEngine(model, replace(self._ours, optimizer=optimizer))
        except BudgetError as error:
            least = self._least.get(error.budget, 0)
            told = f" The frozen model beside it takes {least:,} of these bytes." if least else ""
            raise BudgetError(error.message + told, error.needed_bytes + least, budget=error.budget) from None
        try:
            return ours, OffloadEngine(self._frozen, self._with_nvme_left_by(ours))
        except BaseException:
            ours.close()
            raise

    def _divide(self, budget: str) -> None:
        """The least of ``budget`` for the frozen model, and the rest for the other."""
        whole = getattr(self._ours, budget)
        self._least[budget] = least = _least(self._frozen, self._theirs, budget)
        if whole != "auto":  # where nothing is left the model that is trained says what both need
            self._ours = OffloadConfig.of(self._ours, {budget: max(int(whole) - least, 1)})
        self._theirs = OffloadConfig.of(self._theirs, {budget: least})

    def _with_nvme_left_by(self, engine: OffloadEngine) -> OffloadConfig:
        """The frozen model's config, with what ``engine`` on the same paths has left of ``nvme_capacity``."""
        if self._theirs.nvme_capacity == "auto" or not self._theirs.paths:
            return self._theirs
        plan = engine.plan
        taken = sum(plan.nvme_bytes.values()) + (plan.spare_copy_bytes if plan.record_copies == 2 else 0)
        return replace(self._theirs, nvme_capacity=max(int(self._theirs.nvme_capacity) - taken, 0))


def _least(model: nn.Module, config: OffloadConfig, budget: str) -> int:
    """The least bytes of ``budget`` that an engine over ``model`` runs with. Changes nothing. Raises ``BudgetError`` if
    another budget is too small for it alone."""
    nothing: dict[str, Any] = {budget: 1}
    try:
        OffloadEngine(model, config, **nothing).unwrap()
    except BudgetError as error:
        if error.budget != budget:
            raise
        return error.needed_bytes
    return 1


def _computes_on_the_cpu(config: OffloadConfig) -> bool:
    return isinstance(config.device, (str, torch.device)) and torch.device(config.device).type == "cpu"
