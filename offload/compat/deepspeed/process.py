"""Calls that scripts make round ``initialize``: arguments of the command line, and the ranks that train."""

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
    """Start ``torch.distributed``: among the processes that a launcher has started, else of this one alone, for scripts
    that ask for its rank and size. Raises as ``join_ranks``."""
    join_ranks()
    distributed = torch.distributed
    if distributed.is_available() and not distributed.is_initialized():
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def join_ranks() -> None:
    """Start ``torch.distributed`` among the processes that a launcher has started. Raises ``ConfigError`` if it has not
    told this one how to find the others."""
    if num_ranks() == 1 or torch.distributed.is_initialized():
        return
    try:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except ValueError as error:
        raise ConfigError(
            f"this is one of {num_ranks()} processes (WORLD_SIZE), and torch.distributed cannot start: {error}. Start "
            "the script by torchrun, or one process by python"
        ) from None


def num_ranks() -> int:
    """Processes that train one model."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Number of this one among them."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0


def local_rank() -> int:
    """Number of this one among those on this machine, as its launcher counts them."""
    return int(os.environ.get("LOCAL_RANK") or rank()) if num_ranks() > 1 else 0
