"""``offload train``: from settings to results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offload.config import OffloadConfig
from offload.run.live import Line
from offload.train.errors import InputError
from offload.train.keeping import Keeping
from offload.train.output import output_folder
from offload.train.report import series, summary, table
from offload.train.settings import Settings
from offload.train.training import Training, train
from offload.train.verify import Verification, check_activations_fit, check_fits_in_memory, verify


def run(
    settings: Settings,
    options: Mapping[str, Any],
    out: Path,
    *,
    num_verified: int,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train, write the results to the folder ``out``, and return the figures of ``summary``.

    A run that was stopped in the same folder goes on. ``options`` are those of the engine. The first ``num_verified``
    steps are repeated with everything in memory. ``check`` may raise to end the run, ``say`` is given lines for people.
    """
    keeping = Keeping(out, settings)
    if num_verified and keeping.is_there:
        raise InputError(f"--verify: {out} has a run that was stopped, which goes on without its first steps")
    if OffloadConfig(**options).device == "cpu":
        check_activations_fit(settings)
    if num_verified:
        check_fits_in_memory(settings)
    text = settings.open_text()
    say(f"text: {len(text):,} bytes in {text.num_files:,} files")
    with output_folder(out):
        training = train(
            settings,
            {**options, "run_dir": out},
            keeping,
            digest_after=num_verified,
            check=check,
            say=say,
        )
        verification = _verify(settings, training, num_verified) if num_verified else None
        figures = summary(settings, training, verification)
        names = _write(out, settings, figures, training, say)
    say(f"\n{table(figures, settings, verification)}\n")
    say(f"sample of what it writes now:\n\n{training.sample.decode(errors='replace')}\n")
    say(f"written: {', '.join(str(out / name) for name in names)}; `offload report {out}` makes a page of it")
    return figures


def _verify(settings: Settings, training: Training, num_steps: int) -> Verification:
    losses = [step.loss for step in training.steps[:num_steps]]
    with contextlib.closing(Line("verifying", num_steps)) as line:
        return verify(settings, losses, training.digests, lambda step, loss: line.show(step, f"loss {loss:.3f}"))


def _write(
    out: Path, settings: Settings, figures: dict[str, Any], training: Training, say: Callable[[str], None]
) -> list[str]:
    """Write the results; the names of the files."""
    by_step = series(training)
    record = {**figures, "settings": vars(settings), "plan": str(training.plan).splitlines(), "series": by_step}
    (out / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    try:
        from offload.train.plots import plot_loss, plot_memory  # late: see there
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say("no pictures: matplotlib is not installed (pip install 'offload-engine[plot]')")
        return ["run.json"]
    plot_loss(out / "loss.png", figures, by_step["losses"])
    plot_memory(out / "memory.png", figures, training.last_report.memory, by_step["rss_bytes"])
    return ["loss.png", "memory.png", "run.json"]
