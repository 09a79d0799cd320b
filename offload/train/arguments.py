"""The options of ``offload train``. Imports nothing heavy, so that help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

_DESCRIPTION = """Train a byte-level GPT on text, with a model state that may be far larger than the host memory given
to it. Writes loss.png, memory.png and run.json to the folder --out, and prints a table and a sample of what the model
writes."""


def add_train(subparsers: Any) -> None:
    """Add the subcommand ``train``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train", help="train a byte-level GPT", description=_DESCRIPTION, allow_abbrev=False
    )
    option = parser.add_argument
    # fmt: off
    option("--text", nargs="+", default=[], metavar="PATH",
           help="files and folders to learn from (hidden and binary files in folders are left out; "
                "default: the source of the Python standard library)")
    option("--layers", type=_count, default=10, metavar="N", help="transformer blocks (default: %(default)s)")
    option("--width", type=_count, default=512, metavar="N", help="numbers a token carries (default: %(default)s)")
    option("--heads", type=_count, default=8, metavar="N",
           help="attention heads; the width is a multiple of twice as many (default: %(default)s)")
    option("--context", type=_count, default=128, metavar="N", help="bytes the model looks at (default: %(default)s)")
    option("--batch", type=_count, default=4, metavar="N", help="windows of text a step (default: %(default)s)")
    option("--steps", type=_count, default=200, metavar="N", help="training steps (default: %(default)s)")
    option("--lr", type=_rate, default=1e-3, metavar="X", help="highest learning rate (default: %(default)s)")
    option("--precision", choices=("auto", "fp32", "bf16"), default="auto",
           help="of weights and gradients; auto: what this CPU multiplies faster (default: %(default)s)")
    option("--seed", type=int, default=0, metavar="N", help="of the weights and of the batches (default: %(default)s)")
    option("--nvme-path", default=".", metavar="DIR",
           help="folder on an SSD that takes what does not fit (default: the current folder)")
    option("--host-memory", default="auto", metavar="BYTES",
           help='host memory for weights, gradients and states, such as 120MiB (default: "auto", most of what is free)')
    option("--nvme-capacity", default="auto", metavar="BYTES",
           help='room to take in --nvme-path at most (default: "auto", what is free)')
    option("--tile-bytes", default="auto", metavar="BYTES",
           help='optimizer state moved in one go (default: "auto", 8MiB or less)')
    option("--io-backend", choices=("auto", "io_uring", "threads"), default="auto",
           help="what moves bytes to and from the SSD (default: %(default)s)")
    option("--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes (default: %(default)s)")
    option("--device-memory", default="auto", metavar="BYTES",
           help='what the engine may hold of a GPU\'s memory (default: "auto", see OffloadConfig)')
    option("--out", metavar="DIR", help="folder for the results (default: runs/DATE_TIME)")
    option("--verify", type=_count, metavar="N",
           help="repeat the first N steps with everything in memory, and compare all bits")
    option("--json", action="store_true", help="print one JSON object to stdout, and everything else to stderr")
    # fmt: on
    parser.set_defaults(run=_run, program=parser.prog, parser=parser)


def _run(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    """Check what argparse cannot, and train; returns the exit status. A missing native part is one line, status 1."""
    if arguments.width % (2 * arguments.heads):
        arguments.parser.error(
            f"--width {arguments.width} is not divisible by twice the --heads, {2 * arguments.heads}"
        )
    if arguments.verify is not None and arguments.verify > arguments.steps:
        arguments.parser.error(f"--verify {arguments.verify} is more than --steps {arguments.steps}")
    if arguments.verify is not None and arguments.device != "cpu":
        arguments.parser.error("--verify repeats the steps on the CPU, whose products have other bits than a GPU's")
    try:
        from offload.train.command import run
    except ImportError as error:
        message = " ".join(str(error).split())
        hint = "" if "pip install" in message else "; run `pip install -e .` in the project's folder"
        print(f"{arguments.program}: error: {message}{hint}", file=sys.stderr)
        return 1
    return run(arguments, check)


def _count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _rate(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value
