"""``offload inspect`` and ``offload export``. Imports nothing heavy before the arguments are understood."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.checkpoint.safetensors_writer import Entry

_CHECKPOINT = "a checkpoint, a directory with checkpoints, or the store of a durable run (nvme_path/run-N.store)"


def add_inspect(subparsers: Any) -> None:
    """Add the subcommand ``inspect``."""
    text = "Show what is inside a checkpoint, or which checkpoints a directory has. Changes nothing."
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect", help="show what is inside a checkpoint", description=text, allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=_CHECKPOINT)
    parser.add_argument("--verify", action="store_true", help="read all of it, and check every checksum")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.set_defaults(run=_run(_inspect), program=parser.prog, parser=parser)


def add_export(subparsers: Any) -> None:
    """Add the subcommand ``export``."""
    text = """Turn a checkpoint into a format that others read, without a GPU and without the model's class: into
    safetensors and a config as transformers has them, or into a torch.distributed.checkpoint. Of several checkpoints
    the latest is taken."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export", help="turn a checkpoint into safetensors", description=text, allow_abbrev=False
    )
    option = parser.add_argument
    # fmt: off
    option("checkpoint", type=Path, metavar="CHECKPOINT", help=_CHECKPOINT)
    option("directory", type=Path, metavar="DIR", help="where to write; weights that are there are replaced at the end")
    option("--dtype", choices=("fp32", "bf16", "fp16"),
           help="of the weights; what is not the checkpoint's own is cast from the fp32 master (default: its own)")
    option("--format", choices=("safetensors", "dcp"), default="safetensors",
           help="dcp: a torch.distributed.checkpoint (default: %(default)s)")
    option("--states", action="store_true", help="with --format dcp: optimizer states and parameter groups, too")
    option("--max-shard-bytes", default="5GB", metavar="BYTES",
           help="safetensors: the most that a file has, unless one tensor is larger (default: %(default)s)")
    # fmt: on
    parser.set_defaults(run=_run(_export), program=parser.prog, parser=parser)


Command = Callable[[argparse.Namespace, Callable[[], None]], int]


def _run(command: Command) -> Command:
    """The command, with what goes wrong on purpose as one line. Exit status: 1 for a fault, 2 for bad input."""

    def run(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
        from offload.errors import ConfigError
        from swapper import OffloadError, StorageFull, StoreMissing, StoreUnsafe

        try:
            return command(arguments, check)
        except (OffloadError, OSError, MemoryError) as error:
            if getattr(arguments, "json", False):
                print(json.dumps({"error": type(error).__name__, "message": str(error)}))
            else:
                message = " ".join(str(error).split()) or type(error).__name__
                print(f"{arguments.program}: error: {message}", file=sys.stderr)
            return 2 if isinstance(error, (ConfigError, StoreMissing, StoreUnsafe, StorageFull)) else 1

    return run


def _inspect(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    from offload.checkpoint import inspection
    from offload.checkpoint.opened import holds_generation

    path = arguments.checkpoint.expanduser()
    if path.is_dir() and not holds_generation(path):
        found = inspection.inspect_directory(path, verify=arguments.verify, check=check)
        text = inspection.table_of(path, found, inspection.latest_in(path))
        facts: Any = found
    else:
        facts = inspection.inspect(path, verify=arguments.verify, check=check)
        text = inspection.text_of(facts)
    print(json.dumps(facts, indent=2) if arguments.json else text)
    return 1 if inspection.damage_of(facts) else 0


def _export(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    if arguments.states and arguments.format != "dcp":
        arguments.parser.error("--states needs --format dcp: safetensors hold the weights alone")
    from offload.checkpoint.export import export_safetensors
    from offload.checkpoint.inspection import short_bytes
    from offload.checkpoint.opened import open_checkpoint
    from offload.checkpoint.saved_weights import SavedWeights

    with (
        open_checkpoint(arguments.checkpoint, to_read=True) as opened,
        SavedWeights(opened.generation, opened.description, check) as weights,
    ):
        if arguments.format == "dcp":
            from offload.checkpoint.distributed import export_distributed

            entries: Sequence[Entry] = export_distributed(
                weights, arguments.directory, arguments.dtype, states=arguments.states
            )
        else:
            entries = export_safetensors(weights, arguments.directory, arguments.dtype, arguments.max_shard_bytes)
        step = opened.description.run["step"]
        nbytes = short_bytes(sum(entry.nbytes for entry in entries))
        print(f"{arguments.directory}: step {step} of {opened.folder}, {len(entries)} tensors, {nbytes}")
    return 0
