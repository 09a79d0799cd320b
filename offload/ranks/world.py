"""The ranks that train one model together: which they are, and what they tell each other before they train."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from offload.encoding import decode, encode
from offload.errors import ConfigError, RankError
from offload.ranks.groups import NO_GROUP, Group, next_store, take_group
from offload.ranks.heartbeat import Heartbeat, NoHeartbeat
from offload.ranks.launch import initialise, is_launched, local_number, processes_here
from offload.ranks.signs import OwnStores
from offload.waiting import Failure

_TELL_S = 10.0
"""Time in which ranks come to what others tell of themselves."""


@dataclass(frozen=True)
class Peers:
    """Some ranks of a world, in order, this one among them."""

    ranks: tuple[int, ...]
    own: int
    """Index of this one among them."""
    held: Group
    """Moves bytes of host memory between them."""
    members: Sequence[int] = ()
    """The ranks as the whole program counts them; none that others could be taken for, where there is one."""

    @classmethod
    def single(cls) -> Peers:
        """This rank alone."""
        return cls((0,), 0, NO_GROUP)

    @property
    def group(self) -> Any:
        """``held``, as ``torch.distributed`` takes it."""
        return self.held.group

    @property
    def size(self) -> int:
        return len(self.ranks)

    def release(self) -> None:
        """Other worlds may have the group now."""
        self.held.release()


@dataclass(frozen=True)
class World:
    """``rank`` of ``size``; ``local_ranks`` are those on this machine.

    The ranks are a table: those of one row hold the ``shards`` of one copy of the model, those of one column are
    ``replicas``, which hold the same shard. Most often there is one row.
    """

    rank: int
    size: int
    local_ranks: tuple[int, ...]
    local_size: int
    """Ranks on this machine, also those that train something else: they share what it has."""
    held: Group
    """Moves bytes of host memory between all of them."""
    shards: Peers
    replicas: Peers
    heartbeat: Heartbeat
    members: Sequence[int] = ()
    """The ranks as the whole program counts them, as in ``Peers``."""

    @classmethod
    def single(cls, local_size: int = 1) -> World:
        """A world of one rank."""
        return cls(0, 1, (0,), local_size, NO_GROUP, Peers.single(), Peers.single(), NoHeartbeat(Failure()))

    @property
    def group(self) -> Any:
        """``held``, as ``torch.distributed`` takes it."""
        return self.held.group

    @property
    def local_rank(self) -> int:
        """Index of this one among ``local_ranks``."""
        return self.local_ranks.index(self.rank)

    @property
    def part_name(self) -> str:
        """Name of this rank's folder where each rank has one; empty in a world of one."""
        return "" if self.size == 1 else f"rank-{self.rank}-of-{self.size}"

    def folder_of_all(self, own: Path) -> Path:
        """The folder in which every rank has its ``own``."""
        return own.parent if self.part_name else own

    def all_gather_object(self, own: Any) -> list[Any]:
        """Gather what every rank gives, in order: see ``packed``. All ranks call this together; nobody uses the group
        else."""
        if self.size == 1:
            return [own]
        return _all_gather_object(own, self.size, self.group, self.heartbeat)

    def leave(self, error: BaseException | None) -> None:
        """This rank's part of it ends, by this ``error`` if by one. Safe to call twice."""
        self.heartbeat.leave(error)
        for held in (self.held, self.shards.held, self.replicas.held):
            held.release(broken=self.heartbeat.failure.is_known)

    def refuse(self, error: BaseException) -> None:
        """The same, of a world that no engine has come of: its groups are gone, if nothing is under way there."""
        self.heartbeat.leave(error)
        if self.heartbeat.is_quiet():
            for held in {self.held, self.shards.held, self.replicas.held}:
                held.destroy()
        self.leave(error)


def find_world(mesh: Any | None, timeout_s: float) -> World:
    """The ranks of ``mesh``, else of the whole program: where ``torch.distributed`` is initialised, or a launcher has
    started several processes, which initialises it; else, or if the mesh has one rank, a world of one.

    A mesh of two dimensions is the table of ranks; see ``World``. All ranks of it call this together. Raises
    ``ConfigError`` for a mesh that this rank is no part of, or that has more dimensions; ``RankError`` for a rank that
    is silent for ``timeout_s``. From now on this rank has a heartbeat: whatever happens, ``leave`` the world.
    """
    # In a mesh of one rank others train other parts of a model: they share the machine.
    single = World.single(1 if mesh is None else processes_here())
    if not distributed.is_available():
        return single
    if not distributed.is_initialized() and not initialise():
        return single
    rows = [list(range(distributed.get_world_size()))] if mesh is None else _rows(mesh)
    members = sorted(member for row in rows for member in row)
    if len(members) < 2:
        return single
    rank = members.index(distributed.get_rank())
    store = next_store(members)
    signs = OwnStores(rank, store, timeout_s)
    heartbeat = Heartbeat(rank, len(members), store, timeout_s, Failure(), signs)
    try:
        return _meet(rows, members, rank, heartbeat)
    except BaseException as error:
        heartbeat.leave(error)
        raise


def tell_ranks(mesh: Any | None, error: BaseException) -> None:
    """Have the ranks of ``mesh``, which make an engine, end with this error: this rank has it before it comes to them.
    Returns when they know, or have not come in some seconds."""
    if not distributed.is_available() or not (distributed.is_initialized() or is_launched()):
        return

    def tell() -> None:
        with contextlib.suppress(Exception):  # it is not what the program is told
            find_world(mesh, _TELL_S).leave(error)

    teller = threading.Thread(target=tell, name="offload-meet", daemon=True)
    teller.start()
    teller.join(_TELL_S)


def _meet(rows: Sequence[Sequence[int]], members: Sequence[int], rank: int, heartbeat: Heartbeat) -> World:
    held = take_group(members, heartbeat)
    hosts = _all_gather_object(_host(), len(members), held.group, heartbeat)
    local = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    local_size = max(len(local), processes_here())
    row = next(row for row in rows if members[rank] in row)
    column = sorted(other[row.index(members[rank])] for other in rows)

    def peers(some: Sequence[int]) -> Peers:
        is_all, is_one = len(some) == len(members), len(some) == 1
        of_some = held if is_all else NO_GROUP if is_one else take_group(some, heartbeat)
        return Peers(tuple(map(members.index, some)), some.index(members[rank]), of_some, () if is_one else some)

    return World(rank, len(members), local, local_size, held, peers(row), peers(column), heartbeat, members)


def _all_gather_object(own: Any, size: int, group: Any, heartbeat: Heartbeat) -> list[Any]:
    content = packed(own)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    heartbeat.wait_for(distributed.all_gather(sizes, torch.tensor([len(content)]), group, async_op=True))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(content)] = content
    parts = [torch.empty_like(padded) for _ in range(size)]
    heartbeat.wait_for(distributed.all_gather(parts, padded, group, async_op=True))
    return unpacked([part[: int(nbytes)] for part, nbytes in zip(parts, sizes, strict=True)])


def packed(own: Any) -> torch.Tensor:
    """A value on its way to other ranks, as bytes: numbers, strings, tensors, and lists, tuples and dicts of them."""
    return torch.frombuffer(bytearray(encode(own, "what this rank tells")), dtype=torch.uint8)


def unpacked(parts: Sequence[torch.Tensor]) -> list[Any]:
    """The values of all ranks. Raises ``RankError`` for bytes that are none: nothing that comes from outside is run."""
    return [decode(part.numpy().tobytes(), f"what rank {rank} tells", RankError) for rank, part in enumerate(parts)]


def local_index(world: World) -> int | None:
    """Index of this process among those on this machine, as a launcher says, else as its world knows; None for one."""
    launched = local_number()
    return launched if launched is not None or world.size == 1 else world.local_rank


def find_peers(members: Sequence[int]) -> Peers:
    """These ranks, as the whole program counts them and in order, which call this together. This one alone if there is
    no other."""
    if len(members) < 2:
        return Peers.single()
    held = take_group(members, NoHeartbeat(Failure()))
    return Peers(tuple(range(len(members))), distributed.get_rank(held.group), held, members)


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
