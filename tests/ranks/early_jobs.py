"""Ranks that compute on a device each, and update units in RAM before their step is certain."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ranks.programs import Placement, Program, batch, bits, loss_of, weights_of
from speculative_updates import drain
from torch import distributed

from offload import OffloadEngine

FOREVER_S = 20.0


class _Early:
    """What an engine's speculative updates come to: counts of those begun, and of each step those left for after it."""

    def __init__(self, engine: OffloadEngine) -> None:
        parts = engine._session.parts
        self.exchange: Any = parts.tiers.computing.sink
        self.updates, self.passes, self.ranks = parts.trained.updates, parts.trained.step.passes, parts.ranks
        self.left: list[int] = []
        confirm = self.updates.speculative.confirm

        def count(step: Any) -> Any:
            remaining = confirm(step)
            self.left.append(len(remaining))
            return remaining

        self.updates.speculative.confirm = count

    def look(self) -> None:
        """Begin what can be begun with all that has come from any rank so far, and have it done."""
        drain(self.exchange.sink._finisher)
        self.passes.policy.look()
        drain(self.updates.updater._worker)

    def meet(self) -> None:
        """All ranks are here, and have exchanged what they had."""
        self.ranks.collectives.all_gather("here", torch.empty(0))


def updates_early(
    rank: int, size: int, program: Program, placement: Placement, folder: Path
) -> tuple[str, list[int], list[int], list[str]]:
    """The bits of the weights, and of each step: units, and those that the verdict left; accesses out of order."""
    left, num_units = [], []
    with program.placed(placement, folder) as engine:
        early = _Early(engine)
        for step in range(program.steps):
            for micro in range(engine.config.gradient_accumulation_steps):
                tokens, targets = batch(step, micro, rank, size)
                engine.backward(loss_of(engine(tokens), targets))
                early.meet()
                early.look()
            engine.step()
        left, num_units = early.left, [len(engine.plan.units)] * program.steps
        weights = bits(weights_of(engine))
    return weights, num_units, left, engine.config.device.violations


LATE = Program(model={"hidden": (59, 113, 61, 127)}, paths=((0, 1, 2, 3), (3, 0, 1, 2)), steps=1)
"""Rank 1 uses the last block first: its gradient of it comes last."""


def gets_more_from_another(rank: int, size: int, placement: Placement, folder: Path) -> tuple[str, int]:
    """A step in which rank 0 has updated its shard of a block when rank 1 begins with the backward of that block. The
    bits of the weights, and the updates that the verdict leaves."""
    group = distributed.new_group()
    with LATE.placed(placement, folder) as engine:
        early, came, sent = _Early(engine), threading.Event(), []
        block = next(unit for unit in early.exchange.units if unit.name == "blocks.3")
        close = early.exchange.sink.close

        def tell(shard: Any) -> None:
            close(shard)
            if shard.index == block.index:
                came.set()

        def meet(gradient: torch.Tensor) -> None:
            if rank:
                distributed.recv(torch.empty(1), 0, group)
                return
            assert came.wait(FOREVER_S)
            early.look()
            assert early.updates.speculative.of_unit[block.index].stage.name == "WRITTEN"
            sent.append(distributed.isend(torch.zeros(1), 1, group))

        def meet_in_backward(module: torch.nn.Module, inputs: Any, out: torch.Tensor) -> None:
            out.register_hook(meet)

        tokens, targets = batch(0, 0, rank, size)
        with patch.object(early.exchange.sink, "close", tell):
            # Rank 0 is two blocks further, rank 1 is about to begin with that block.
            hook = engine.module.blocks[3 if rank else 1].register_forward_hook(meet_in_backward)
            loss = loss_of(engine(tokens, LATE.paths[rank]), targets)
            hook.remove()
            engine.backward(loss)
        engine.step()
        found = bits(weights_of(engine)), early.left[0]
    assert not engine.config.device.violations
    return found
