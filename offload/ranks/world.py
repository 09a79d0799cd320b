"""The ranks that train one model together: which they are, and the group over which they talk."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from offload.errors import ConfigError
from offload.torch_internals import own_store

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher such as torchrun puts into the environment."""

_PATIENCE = timedelta(days=7)
"""A collective may wait this long: a rank that is gone is noticed by its silence (``offload.ranks.pulse``), and one
that computes is waited for."""


@dataclass(frozen=True)
class World:
    """``rank`` of ``size``; ``local_ranks`` are those on this machine. ``group`` moves bytes of host memory."""

    rank: int
    size: int
    local_ranks: tuple[int, ...]
    local_size: int
    """Ranks on this machine, also those that train something else: they share what it has."""
    group: Any
    store: Any
    """What the ranks of this world share: a ``torch.distributed.Store``."""

    @property
    def local_rank(self) -> int:
        """Which of ``local_ranks`` this is."""
        return self.local_ranks.index(self.rank)

    @property
    def members(self) -> list[int]:
        """The ranks as the whole program counts them."""
        return distributed.get_process_group_ranks(self.group)

    def exchange(self, own: Any) -> list[Any]:
        """What every rank gives, any object, in order. All ranks call this together."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, own, group=self.group)
        return found


def find_world(mesh: Any | None) -> World | None:
    """The ranks of ``mesh``, else of the whole program: where ``torch.distributed`` is initialised, or a launcher has
    started several processes, which initialises it. None if there is one process.

    All ranks of it call this together. Raises ``ConfigError`` for a mesh that this rank is no part of, or that has
    several dimensions.
    """
    if not distributed.is_available():
        return None
    if not distributed.is_initialized():
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ or all(name in os.environ for name in _LAUNCHED)
        if num_processes < 2 or not is_launched:
            return None
        try:
            distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except ValueError as error:
            raise ConfigError(
                f"this is one of {num_processes} processes (WORLD_SIZE), and torch.distributed cannot start: {error}. "
                "Start them by torchrun, or call torch.distributed.init_process_group before the engine is made."
            ) from None
    members = list(range(distributed.get_world_size())) if mesh is None else _members(mesh)
    if len(members) < 2:
        return None
    group, number = _group_of(tuple(members))
    hosts: list[Any] = [None] * len(members)
    distributed.all_gather_object(hosts, _host(), group=group)
    rank = distributed.get_rank(group)
    local = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    local_size = max(len(local), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    store = own_store(f"offload/{group.group_name}/{number}")
    return World(rank, len(members), local, local_size, group, store)


_groups: dict[tuple[int, ...], tuple[Any, Any, int]] = {}
"""The group of each set of ranks, made once; what it is a group of, and how many worlds it has had."""


def _group_of(members: tuple[int, ...]) -> tuple[Any, int]:
    """A group of its own for these ranks, and which of its worlds this will be. Its name, and so what it leaves in the
    store that all processes share, follows from the ranks alone: it is not given back, since one of the same name would
    find that."""
    everyone = distributed.group.WORLD
    group, of, number = _groups.get(members, (None, None, 0))
    if of is not everyone:
        group, number = distributed.new_group(members, _PATIENCE, "gloo", use_local_synchronization=True), 0
    _groups[members] = group, everyone, number + 1
    return group, number


def forget_group(world: World) -> None:
    """A collective may be under way that nobody ends: the next world of these ranks has another group."""
    _groups.pop(tuple(world.members), None)


def _members(mesh: Any) -> list[int]:
    if mesh.ndim != 1:
        raise ConfigError(
            f"mesh: the engine shards over one dimension, and this one has {mesh.ndim} ({mesh.mesh_dim_names}): give "
            'the one whose ranks hold equal parameters and feed different data, such as mesh["dp"]'
        )
    if mesh.get_coordinate() is None:
        raise ConfigError("mesh: this rank is no part of it")
    return [int(rank) for rank in mesh.mesh.flatten()]


def _host() -> str:
    """The same for all processes of a running machine, and no other's."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return socket.gethostname()
