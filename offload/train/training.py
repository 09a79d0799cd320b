"""The training itself: the model under the engine, and a record of what every step did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import torch

from offload import LiveLine, OffloadEngine, Plan, Report
from offload.train import process
from offload.train.digest import digests_of
from offload.train.keeping import Keeping
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


@dataclass(frozen=True)
class Training:
    """The record of a run. ``digests`` are those of the weights after the step that ``digest_after`` asked for."""

    rss_imports_bytes: int
    """Memory of the process when its model had none yet."""
    steps: list[Step]
    digests: dict[str, str]
    plan: Plan
    sample: bytes
    peak_rss_bytes: int

    @property
    def last_report(self) -> Report:
        """The engine's, of the last step."""
        return self.steps[-1].report


def train(
    settings: Settings,
    engine_options: Mapping[str, Any],
    keeping: Keeping,
    *,
    digest_after: int,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Training:
    """Train for all steps and let the model write a sample; the engine is closed afterwards, however it ends. A run
    that was stopped goes on where it was.

    ``check`` is called between steps and may raise to end the run; ``say`` gets what a person wants to read before it.
    Raises ``InputError`` and the errors of the engine.
    """
    steps: list[Step] = []
    digests: dict[str, str] = {}
    batches = settings.batches()
    model = settings.empty_model()  # torch imports 80 MB when it is first asked for one
    rss_imports_bytes = process.rss_bytes()
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
        keeping.go_on(engine)
        scheduler = settings.schedule(engine.optimizer, engine.global_step)
        engine.add_observer(LiveLine(settings.steps))
        with keeping.when_stopped(engine):
            for tokens, targets in islice(batches, engine.global_step, settings.steps):
                check()
                start = perf_counter()
                loss = engine(tokens, targets)
                engine.backward(loss)
                engine.step()
                scheduler.step()
                value = float(loss.item())
                seconds = perf_counter() - start
                engine.log(tokens_per_second=tokens.numel() / seconds)
                steps.append(Step(value, seconds, process.rss_bytes(), engine.report()))
                if len(steps) == digest_after:
                    digests = digests_of(engine.module.named_parameters())
        plan = engine.plan
        sample = generate(
            engine,
            SAMPLE_PROMPT[: settings.context],
            length=SAMPLE_BYTES,
            context=settings.context,
            seconds_max=SAMPLE_SECONDS_MAX,
            seed=settings.seed,
        )
        engine.close(discard=True)  # whole in memory, the model would be more than the demo may take
    return Training(rss_imports_bytes, steps, digests, plan, sample, process.peak_rss_bytes())
