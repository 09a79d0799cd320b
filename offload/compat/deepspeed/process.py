"""What scripts do round ``initialize``: arguments of the command line, and the processes that train."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from offload.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to the parser, which is returned."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine")
    group.add_argument("--deepspeed_config", metavar="FILE", help="JSON file with the configuration")
    return parser


def init_distributed(*_: Any, **__: Any) -> None:
    """Make a process group of one process, for scripts that ask for its rank and size. Raises ``ConfigError`` in one of
    several processes."""
    refuse_ranks()
    distributed = torch.distributed
    if distributed.is_available() and not distributed.is_initialized():
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def refuse_ranks() -> None:
    """Raise ``ConfigError`` in one of several processes that are to train one model."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world = str(distributed.get_world_size())
    else:
        world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise ConfigError(
            f"this is one of {world} processes (WORLD_SIZE), and the engine trains in one, not yet in several: start "
            "the script with `python`, or with --num_gpus 1"
        )
