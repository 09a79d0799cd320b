"""``offload export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from offload.cli.console import Json, show_answer
from offload.cli.inspect import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offload.checkpoint.tensors import Entry


# fmt: off
def export(
    context: typer.Context,
    checkpoint: Checkpoint,
    directory: Annotated[Path, Argument(metavar="DIR",
        help="Where to write; weights that are there are replaced at the end.")],
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, Option(
        help="Of the weights (default: the checkpoint's own). Another is cast from the fp32 master.")] = None,
    format: Annotated[Literal["safetensors", "dcp"], Option(help="dcp: a torch.distributed.checkpoint.")]
        = "safetensors",
    states: Annotated[bool, Option("--states",
        help="With --format dcp: optimizer states and parameter groups, too.")] = False,
    max_shard_bytes: Annotated[str, Option(metavar="BYTES",
        help="safetensors: the most that a file has, unless one tensor is larger.")] = "5GB",
    json: Json = False,
) -> int:
    # fmt: on
    """Turn a checkpoint into a format that others read.

    That is safetensors and a config as transformers has them, or a torch.distributed.checkpoint. It takes no GPU and
    not the model's class. Of several checkpoints the latest is taken.
    """
    if states and format != "dcp":
        raise typer.BadParameter("needs --format dcp: safetensors hold the weights alone", param_hint="--states")
    from offload.checkpoint.native.inspection import short_bytes
    from offload.checkpoint.native.opened import open_checkpoint
    from offload.checkpoint.native.saved_weights import SavedWeights
    from offload.checkpoint.safetensors.export import export_safetensors

    with (
        open_checkpoint(checkpoint, to_read=True) as opened,
        SavedWeights(opened.generation, opened.description, context.obj.check) as weights,
    ):
        if format == "dcp":
            from offload.checkpoint.dcp.save import export

            entries: Sequence[Entry] = export(weights, directory, dtype, states=states)
        else:
            entries = export_safetensors(weights, directory, dtype, max_shard_bytes)
    step, folder = opened.description.run["step"], str(opened.folder)
    nbytes = sum(entry.nbytes for entry in entries)
    facts = {"directory": str(directory), "step": step, "checkpoint": folder, "tensors": len(entries), "bytes": nbytes}
    text = f"{directory}: step {step} of {folder}, {len(entries)} tensors, {short_bytes(nbytes)}"
    show_answer(facts, text, to_programs=json)
    return 0
