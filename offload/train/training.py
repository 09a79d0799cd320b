"""The training itself: the model under the engine, and a record of what every step did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

import torch

from offload import LiveLine, OffloadEngine, Report
from offload.train import process
from offload.train.digest import digests
from offload.train.model import generate
from offload.train.settings import GRADIENT_CLIPPING, OPTIMIZER, Settings

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 240
SAMPLE_SECONDS_MAX = 20.0


@dataclass(frozen=True)
class Step:
    """One training step: what it learnt, what it took, and what the engine reports of it."""

    loss: float
    seconds: float
    rss_bytes: int
    report: Report


@dataclass
class Training:
    """The record of a run. ``digests`` are those of the weights after the step that ``digest_after`` asked for."""

    rss_imports_bytes: int
    steps: list[Step] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    plan: str = ""
    num_parameters: int = 0
    host_memory_bytes: int = 0
    host_memory_used_bytes: int = 0
    sample: bytes = b""
    peak_rss_bytes: int = 0

    @property
    def last_report(self) -> Report:
        """The engine's, of the last step."""
        return self.steps[-1].report


def train(
    settings: Settings,
    engine_options: Mapping[str, Any],
    *,
    rss_imports_bytes: int,
    digest_after: int,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Training:
    """Train for all steps and let the model write a sample; the engine is closed afterwards, however it ends.

    ``check`` is called between steps and may raise to end the run; ``say`` gets what a person wants to read before it.
    ``rss_imports_bytes`` is the memory of the process before there was a model. Raises ``InputError`` and the errors of
    the engine.
    """
    training = Training(rss_imports_bytes)
    batches = settings.batches()
    model = settings.empty_model()
    torch.manual_seed(settings.seed)
    with OffloadEngine(
        model,
        precision=settings.precision,
        lr=settings.lr,
        gradient_clipping=GRADIENT_CLIPPING,
        **OPTIMIZER,
        **engine_options,
    ) as engine:
        say(str(engine.plan))
        assert engine.optimizer is not None
        scheduler = settings.schedule(engine.optimizer)
        engine.add_observer(LiveLine(settings.steps))
        for tokens, targets in islice(batches, settings.steps):
            check()
            start = perf_counter()
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            scheduler.step()
            value = float(loss.item())
            seconds = perf_counter() - start
            engine.log(tokens_per_second=tokens.numel() / seconds)
            report = engine.report()
            training.steps.append(Step(value, seconds, process.rss_bytes(), report))
            if len(training.steps) == digest_after:
                training.digests = digests(engine.module.named_parameters())
        training.num_parameters = engine.plan.num_parameters
        training.plan = str(engine.plan)
        training.host_memory_bytes = engine.plan.host_budget_bytes
        training.host_memory_used_bytes = report.host_memory_bytes
        training.sample = generate(
            engine,
            SAMPLE_PROMPT[: settings.context],
            length=SAMPLE_BYTES,
            context=settings.context,
            seconds_max=SAMPLE_SECONDS_MAX,
            seed=settings.seed,
        )
        engine.close(discard=True)  # whole in memory, the model would be more than the demo may take
    training.peak_rss_bytes = process.peak_rss_bytes()
    return training
