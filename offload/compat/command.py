"""``offload config``. Imports nothing heavy before the arguments are understood."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.compat.deepspeed.translation import Translation


def add_config(subparsers: Any) -> None:
    """Add the subcommand ``config``."""
    text = "Translate the configuration of another library."
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "config", help="translate the configuration of another library", description=text, allow_abbrev=False
    )
    of_config = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=type(parser))
    text = """Print what a configuration of DeepSpeed means here: the options of the engine, and what becomes of each
    key. Nothing is trained and nothing is written."""
    command = of_config.add_parser("from-deepspeed", help="translate a ds_config", description=text, allow_abbrev=False)
    command.add_argument("file", type=Path, metavar="FILE", help="the JSON file")
    command.add_argument("--json", action="store_true", help="print one JSON value")
    command.set_defaults(run=_run, program=command.prog, parser=command)
    text = "Print what becomes of every key that DeepSpeed has, as tables in Markdown."
    keys = of_config.add_parser("deepspeed-keys", help="all keys of a ds_config", description=text, allow_abbrev=False)
    keys.set_defaults(run=_print_keys, program=keys.prog, parser=keys)


def _print_keys(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    from offload.compat.deepspeed.table import markdown

    print(markdown(), end="")
    return 0


def _run(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    from offload.compat.deepspeed.translation import translate
    from offload.errors import ConfigError

    try:
        translation = translate(arguments.file)
    except ConfigError as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"{arguments.program}: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_facts(translation), indent=2) if arguments.json else _text(translation))
    return 0


def _facts(translation: Translation) -> dict[str, Any]:
    scheduler, batch = translation.scheduler, translation.batch
    options = {
        name: value.__name__ if isinstance(value, type) else value for name, value in translation.options.items()
    }
    return {
        "options": options,
        "batch": {"train": batch.train, "micro": batch.micro, "gradient_accumulation_steps": batch.steps},
        "scheduler": None if scheduler is None else {"type": scheduler.name, "params": scheduler.params},
        "missing": [] if scheduler is None else [f"scheduler.params.{name}" for name in scheduler.missing],
        "keys": [
            {"key": row.key, "given": row.given, "effect": row.effect.value, "says": row.says}
            for row in translation.rows
        ],
    }


def _text(translation: Translation) -> str:
    from offload.compat.deepspeed.table import table_of

    lines = ["engine = OffloadEngine(", "    model,"]
    for name, value in translation.options.items():
        shown = f"torch.optim.{value.__name__}" if isinstance(value, type) else repr(value)
        lines.append(f"    {name}={shown},")
    lines.append(")")
    if translation.optimizer is None:
        lines.append("# The file names no optimizer: give optimizer=, lr=, ...; without them it is AdamW.")
    if translation.scheduler is not None:
        lines += _scheduler_lines(translation)
    batch = translation.batch
    lines.append(f"# A step takes {batch.train} samples, in {batch.steps} forwards of {batch.micro}.")
    return "\n".join([*lines, "", table_of(translation.rows)])


def _scheduler_lines(translation: Translation) -> list[str]:
    scheduler = translation.scheduler
    assert scheduler is not None
    module = "torch.optim.lr_scheduler" if scheduler.kind.__module__.startswith("torch.") else "schedules"
    params = {**dict.fromkeys(scheduler.missing, ...), **scheduler.params}
    given = "".join(f", {name}={'...' if value is ... else repr(value)}" for name, value in params.items())
    lines = [f"scheduler = {module}.{scheduler.name}(engine.optimizer{given})"]
    if module == "schedules":
        lines.insert(0, "from offload.compat.deepspeed import schedules")
    lines += [f"# scheduler.params.{name} is auto: write the number." for name in scheduler.missing]
    return lines
