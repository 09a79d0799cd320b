"""``offload train``: its options, and which of them do not go together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from offload.cli.console import Json, show_json, teller
from offload.cli.refused import above_zero

_OF_SETTINGS = ("layers", "width", "heads", "batch", "steps", "lr", "seed")
_OF_ENGINE = ("nvme_path", "host_memory", "nvme_capacity", "tile_bytes", "io_backend", "device", "device_memory")
"""Options of the command that are those of ``Settings`` and of the engine."""


# fmt: off
def train(
    context: typer.Context,
    paths: Annotated[list[Path] | None, Argument(metavar="PATH", show_default=False,
        help="Files and folders to learn from; hidden and binary files in folders are left out. Without any: the "
             "source of the Python standard library.")] = None,
    text: Annotated[list[Path] | None, Option(metavar="PATH", show_default=False,
        help="The same as PATH.")] = None,
    layers: Annotated[int, Option(min=1, metavar="N", help="Transformer blocks.")] = 10,
    width: Annotated[int, Option(min=1, metavar="N", help="Numbers a token carries.")] = 512,
    heads: Annotated[int, Option(min=1, metavar="N",
        help="Attention heads; the width is a multiple of twice as many.")] = 8,
    length: Annotated[int, Option("--context", min=1, metavar="N", help="Bytes the model looks at.")] = 128,
    batch: Annotated[int, Option(min=1, metavar="N", help="Windows of text a step.")] = 4,
    steps: Annotated[int, Option(min=1, metavar="N", help="Training steps.")] = 200,
    lr: Annotated[float, Option(callback=above_zero, metavar="X", help="Highest learning rate.")] = 1e-3,
    precision: Annotated[Literal["auto", "fp32", "bf16"], Option(
        help="Of weights and gradients; auto: what this CPU multiplies faster.")] = "auto",
    seed: Annotated[int, Option(metavar="N", help="Of the weights and of the batches.")] = 0,
    nvme_path: Annotated[Path, Option(metavar="DIR",
        help="Folder on an SSD that takes what does not fit.")] = Path(),
    host_memory: Annotated[str, Option(metavar="BYTES",
        help="Host memory for weights, gradients and states, such as 120MiB; auto: most of what is free.")] = "auto",
    nvme_capacity: Annotated[str, Option(metavar="BYTES",
        help="Room to take in --nvme-path at most; auto: what is free.")] = "auto",
    tile_bytes: Annotated[str, Option(metavar="BYTES",
        help="Optimizer state moved in one go; auto: 8MiB or less.")] = "auto",
    io_backend: Annotated[Literal["auto", "io_uring", "threads"], Option(
        help="What moves bytes to and from the SSD.")] = "auto",
    device: Annotated[Literal["cpu", "cuda"], Option(help="Where the model computes.")] = "cpu",
    device_memory: Annotated[str, Option(metavar="BYTES",
        help="What the engine may hold of a GPU's memory; auto: see OffloadConfig.")] = "auto",
    out: Annotated[Path | None, Option(metavar="DIR",
        help="Folder for the results.  [default: runs/DATE_TIME]")] = None,
    verify: Annotated[int | None, Option(min=1, metavar="N",
        help="Repeat the first N steps with everything in memory, and compare all bits.")] = None,
    json: Json = False,
) -> int:
    # fmt: on
    """Train a byte-level GPT on text.

    Its model state may be far larger than the host memory given to it. Writes loss.png, memory.png and run.json to the
    folder --out, and prints a table and a sample of what the model writes.
    """
    given = locals()
    if width % (2 * heads):
        raise typer.BadParameter(f"{width} is not divisible by twice the --heads, {2 * heads}", param_hint="--width")
    if verify is not None and verify > steps:
        raise typer.BadParameter(f"{verify} is more than --steps {steps}", param_hint="--verify")
    if verify is not None and device != "cpu":
        message = "repeats the steps on the CPU, whose products have other bits than a GPU's"
        raise typer.BadParameter(message, param_hint="--verify")
    if device == "cpu" and device_memory != "auto":
        message = "the model computes on the CPU: give --host-memory, or --device cuda"
        raise typer.BadParameter(message, param_hint="--device-memory")
    from offload.train import command
    from offload.train.settings import Settings, choose_precision

    say = teller(to_programs=json)
    chosen, why = choose_precision(precision)
    say(f"precision: {chosen} ({why})")
    figures = command.run(
        Settings(
            text=tuple(str(path.absolute()) for path in [*(text or ()), *(paths or ())]),
            context=length,
            precision=chosen,
            **{name: given[name] for name in _OF_SETTINGS},
        ),
        {name: given[name] for name in _OF_ENGINE},
        out or Path(time.strftime("runs/%Y-%m-%d_%H-%M-%S")),
        num_verified=verify or 0,
        check=context.obj.check,
        say=say,
    )
    if json:
        show_json(figures)
    return 1 if figures["verified"] is False else 0
