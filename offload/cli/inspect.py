"""``offload inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from offload.cli.console import Json, show_answer

Checkpoint = Annotated[
    Path,
    Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, a directory with checkpoints, or the store of a durable run (nvme_path/run-N.store).",
    ),
]


def inspect(
    context: typer.Context,
    checkpoint: Checkpoint,
    verify: Annotated[bool, Option("--verify", help="Read all of it, and check every checksum.")] = False,
    json: Json = False,
) -> int:
    """Show what is inside a checkpoint.

    Of a directory with several it shows which ones are there. Changes nothing.
    """
    from offload.checkpoint.native import inspection
    from offload.checkpoint.native.mark import is_checkpoint

    path = checkpoint.expanduser()
    if path.is_dir() and not is_checkpoint(path):
        found = inspection.inspect_directory(path, verify=verify, check=context.obj.check)
        text = inspection.table_of(path, found, inspection.latest_in(path))
        facts: Any = found
    else:
        facts = inspection.inspect(path, verify=verify, check=context.obj.check)
        text = inspection.text_of(facts)
    show_answer(facts, text, to_programs=json)
    return 1 if inspection.damage_of(facts) else 0
