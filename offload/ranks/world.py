"""The ranks that train one model together: which they are, and the group over which they talk."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
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
class Peers:
    """Some ranks of a world, in order, this one among them. ``group`` moves bytes of host memory between them."""

    ranks: tuple[int, ...]
    own: int
    """Which of them this one is."""
    group: Any

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def members(self) -> list[int]:
        """The ranks as the whole program counts them."""
        return distributed.get_process_group_ranks(self.group)


@dataclass(frozen=True)
class World:
    """``rank`` of ``size``; ``local_ranks`` are those on this machine. ``group`` moves bytes of host memory.

    The ranks are a table: those of one row hold the ``shards`` of one copy of the model, those of one column are
    ``replicas``, which hold the same shard. Most often there is one row.
    """

    rank: int
    size: int
    local_ranks: tuple[int, ...]
    local_size: int
    """Ranks on this machine, also those that train something else: they share what it has."""
    group: Any
    store: Any
    """What the ranks of this world share: a ``torch.distributed.Store``."""
    shards: Peers
    replicas: Peers

    @property
    def local_rank(self) -> int:
        """Which of ``local_ranks`` this is."""
        return self.local_ranks.index(self.rank)

    def exchange(self, own: Any) -> list[Any]:
        """What every rank gives, any object, in order. All ranks call this together."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, own, group=self.group)
        return found


def find_world(mesh: Any | None) -> World | None:
    """The ranks of ``mesh``, else of the whole program: where ``torch.distributed`` is initialised, or a launcher has
    started several processes, which initialises it. None if there is one process.

    A mesh of two dimensions is the table of ranks; see ``World``. All ranks of it call this together. Raises
    ``ConfigError`` for a mesh that this rank is no part of, or that has more dimensions.
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
    rows = [list(range(distributed.get_world_size()))] if mesh is None else _rows(mesh)
    members = sorted(member for row in rows for member in row)
    if len(members) < 2:
        return None
    own = _take_group(members)
    rank = distributed.get_rank(own.group)
    row = next(row for row in rows if members[rank] in row)
    column = sorted(other[row.index(members[rank])] for other in rows)
    hosts: list[Any] = [None] * len(members)
    distributed.all_gather_object(hosts, _host(), group=own.group)
    local = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    local_size = max(len(local), processes_here())
    store = own_store(f"offload/{own.group.group_name}/{own.num_worlds}")

    def peers(some: Sequence[int]) -> Peers:
        group = own.group if len(some) == len(members) else _take_group(some).group if len(some) > 1 else None
        return Peers(tuple(map(members.index, some)), some.index(members[rank]), group)

    return World(rank, len(members), local, local_size, own.group, store, peers(row), peers(column))


def processes_here() -> int:
    """Processes that a launcher has started on this machine, as far as it says so."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@dataclass
class _Group:
    """A group that is ours alone, and how many worlds it has had: for one at a time."""

    group: Any
    num_worlds: int = 0
    is_taken: bool = False


_groups: dict[tuple[int, ...], list[_Group]] = {}
"""The groups of each set of ranks, for the present ``torch.distributed``."""
_everyone: Any = None
"""The group of all processes that they were made in."""


def _take_group(members: Sequence[int]) -> _Group:
    """A group for these ranks that no other world has. Its name, and so what it leaves in the store that all processes
    share, follows from the ranks and the groups that they have: it is kept, since one of the same name would find
    that."""
    global _everyone
    if _everyone is not distributed.group.WORLD:
        _everyone = distributed.group.WORLD
        _groups.clear()
    of_members = _groups.setdefault(tuple(members), [])
    found = next((group for group in of_members if not group.is_taken), None)
    if found is None:
        made = distributed.new_group(list(members), _PATIENCE, "gloo", use_local_synchronization=True)
        found = _Group(made)
        of_members.append(found)
    found.is_taken = True
    found.num_worlds += 1
    return found


def give_back(world: World, *, broken: bool) -> None:
    """The world is over. ``broken``: a collective may be under way that nobody ends, so that its groups are not used
    again."""
    given = {id(group) for group in (world.group, world.shards.group, world.replicas.group)}
    for of_members in _groups.values():
        for group in [group for group in of_members if id(group.group) in given]:
            group.is_taken = False
            if broken:
                of_members.remove(group)


def _rows(mesh: Any) -> list[list[int]]:
    """The ranks of a mesh as a table, as the whole program counts them; each row in order."""
    if mesh.ndim > 2:
        raise ConfigError(
            f"mesh: the engine shards over the last dimension and replicates over one before it, and this mesh has "
            f"{mesh.ndim} ({mesh.mesh_dim_names}): give the part whose ranks hold equal parameters and feed different "
            'data, such as mesh["dp"], or mesh["replicate", "shard"]'
        )
    if mesh.get_coordinate() is None:
        raise ConfigError("mesh: this rank is no part of it")
    return [sorted(row) for row in mesh.mesh.view(-1, mesh.mesh.shape[-1]).tolist()]


def _host() -> str:
    """The same for all processes of a running machine, and no other's."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return socket.gethostname()
