"""Training with speculative updates: a model whose units stream, and loops that may multiply gradients before the
step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, loss_of

from offload import BudgetError, OffloadEngine
from offload.tiers.gradients.transport import GradientTransport
from offload.units import UnitSpec
from offload.waiting import Worker

OPTIONS: dict[str, Any] = {"precision": "fp32", "lr": 1e-2, "tile_bytes": 65536}


def built() -> Tiny:
    torch.manual_seed(0)
    return Tiny(width=64, num_blocks=12)


def with_least(given: dict[str, Any], *budgets: str, make_model: Callable[[], Tiny] = built, **options: Any) -> None:
    """Add the least of each of these budgets, one after the other, to the options that are given."""
    for name in budgets:
        with pytest.raises(BudgetError) as caught:
            OffloadEngine(make_model(), **{**OPTIONS, **options}, **{**given, name: 1})
        given[name] = caught.value.needed_bytes


def drain(worker: Worker) -> None:
    """Return when everything that was asked of the thread is done."""
    done = threading.Event()
    worker.submit(done.set)
    assert done.wait(60)


def let_gradients_come_first(patch: pytest.MonkeyPatch) -> None:
    """Whoever looks which gradients have come from a device sees all that were sent before."""
    complete = GradientTransport.complete

    def complete_later(transport: GradientTransport) -> Iterator[UnitSpec]:
        drain(transport._finisher)
        return complete(transport)

    patch.setattr(GradientTransport, "complete", complete_later)


def with_engine_step(bound: float):
    """``gradient_clipping`` in the options, and the engine's own loop."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        engine.backward(loss)
        engine.step()

    return {"gradient_clipping": bound}, take


def with_own_clipping(bound: float):
    """A loop of PyTorch."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return {}, take


def with_micro_batches(bound: float):
    """The same in two micro-batches, which nobody tells the engine of."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return {}, take


def with_scaler(bound: float):
    """The same with ``GradScaler``."""

    def take(engine: OffloadEngine, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(engine.optimizer)
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound)
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()

    return {}, take


def with_fp16(bound: float):
    """Half precision, with the engine's own loss scale."""
    options, take = with_engine_step(bound)
    return {**options, "precision": "fp16"}, take


LOOPS = [with_engine_step, with_own_clipping, with_micro_batches, with_scaler, with_fp16]


def trained(
    loop, bound: float, **more
) -> tuple[list[float], dict[str, torch.Tensor], list[int], list[int], list[float]]:
    """Losses, weights, and of each of six steps: speculative updates begun, updates left for after it, and norms."""
    options, take = loop(bound)
    model = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with OffloadEngine(model, **{**OPTIONS, "lr": 1e-3, **options}, **more) as engine:
        early = engine._session.parts.trained.updates.speculative
        begin, confirm = early.begin, early.confirm
        begun, left, losses, norms = [0] * 6, [0] * 6, [], []

        def count_begun(unit, update):
            begun[len(losses)] += update is not None
            return begin(unit, update)

        def count_left(step):
            remaining = confirm(step)
            left[len(losses)] = len(remaining)
            return remaining

        early.begin, early.confirm = count_begun, count_left
        early.balance = lambda forward, backward: None  # it follows the disk, which has its own mind
        for tokens, targets in batches(6):
            loss = loss_of(engine(tokens), targets)
            drain(engine._session.parts.trained.updates.updater._worker)
            take(engine, loss, scaler)
            losses.append(loss.item())
            norms.append(engine.report().grad_norm)
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, begun, left, norms


@cache
def trained_in_memory(loop, bound: float) -> tuple[list[float], dict[str, torch.Tensor], list[int], list[float]]:
    """Losses, weights, speculative updates begun, and norms."""
    losses, weights, begun, _, norms = trained(loop, bound)
    return losses, weights, begun, norms


NEVER, ALWAYS = 1e9, 1e-3
"""Bounds of norms: steps are clipped never, or always."""


def norms_of(loop) -> list[float]:
    return trained_in_memory(loop, NEVER)[3]
