"""``offload train``: from arguments to results. What goes wrong on purpose ends here, as one line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload import ConfigError, OffloadError, StorageFull, StoreUnsafe
from offload.train import process
from offload.train.errors import InputError, RunError
from offload.train.output import output_folder
from offload.train.progress import Progress
from offload.train.report import series, summary, table
from offload.train.settings import Settings, fastest_precision
from offload.train.training import Training, train
from offload.train.verify import Verification, check_fits_in_memory, verify

_BAD_INPUT = (InputError, ConfigError, StoreUnsafe, StorageFull)
_FAULT = (RunError, OffloadError, OSError, MemoryError)


def run(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    """Train as asked for and present the results; returns the exit status. ``check`` may raise to end the run."""
    try:
        return _run(arguments, check)
    except (*_BAD_INPUT, *_FAULT, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_expected(error):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"{arguments.program}: error: {message}", file=sys.stderr)
        return 2 if isinstance(error, _BAD_INPUT) else 1


def _run(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    say = _to_stderr if arguments.json else print
    settings = _settings(arguments, say)
    settings.empty_model()  # for what torch imports when it is first asked for one, 80 MB
    rss_imports_bytes = process.rss_bytes()
    out = Path(arguments.out or time.strftime("runs/%Y-%m-%d_%H-%M-%S"))
    with output_folder(out):
        training = train(
            settings,
            {
                "nvme_path": arguments.nvme_path,
                "host_memory": arguments.host_memory,
                "nvme_capacity": arguments.nvme_capacity,
                "tile_bytes": arguments.tile_bytes,
                "io_backend": arguments.io_backend,
                "device": arguments.device,
                "device_memory": arguments.device_memory,
            },
            rss_imports_bytes=rss_imports_bytes,
            digest_after=arguments.verify or 0,
            check=check,
            say=say,
        )
        verification = _verify(settings, training, arguments.verify) if arguments.verify else None
        figures = summary(settings, training, verification)
        _write(out, settings, figures, training)
    say(f"\n{table(figures, settings, verification)}\n")
    say(f"sample of what it writes now:\n\n{training.sample.decode(errors='replace')}\n")
    say(f"written: {out / 'loss.png'}, {out / 'memory.png'}, {out / 'run.json'}")
    if arguments.json:
        print(json.dumps(figures))
    return 1 if figures["verified"] is False else 0


def _settings(arguments: argparse.Namespace, say: Callable[[str], None]) -> Settings:
    precision, why = arguments.precision, "as asked for"
    if precision == "auto":
        precision, why = fastest_precision()
    settings = Settings(
        text=tuple(str(Path(path).absolute()) for path in arguments.text),
        layers=arguments.layers,
        width=arguments.width,
        heads=arguments.heads,
        context=arguments.context,
        batch=arguments.batch,
        steps=arguments.steps,
        lr=arguments.lr,
        seed=arguments.seed,
        precision=precision,
    )
    if arguments.verify:
        check_fits_in_memory(settings)
    text = settings.open_text()
    say(f"text: {len(text):,} bytes in {text.num_files:,} files; precision: {precision} ({why})")
    return settings


def _verify(settings: Settings, training: Training, num_steps: int) -> Verification:
    losses = [step.loss for step in training.steps[:num_steps]]
    with Progress("verifying", num_steps) as progress:
        return verify(settings, losses, training.digests, lambda loss: progress.step({"loss": f"{loss:.3f}"}))


def _write(out: Path, settings: Settings, figures: dict[str, Any], training: Training) -> None:
    from offload.train.plots import plot_loss, plot_memory  # late: see there

    by_step = series(training)
    plot_loss(out / "loss.png", figures, by_step["losses"])
    plot_memory(out / "memory.png", figures, training.memory, by_step["rss_bytes"])
    record = {**figures, "settings": vars(settings), "plan": training.plan.splitlines(), "series": by_step}
    (out / "run.json").write_text(json.dumps(record, indent=1) + "\n")


def _is_expected(error: RuntimeError) -> bool:
    """Errors on purpose, and torch's way to say that memory is short. Any other is a mistake of ours: traceback."""
    return isinstance(error, _BAD_INPUT + _FAULT) or "can't allocate memory" in str(error)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
