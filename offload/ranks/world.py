"""The ranks that train one model together: which they are, and the group over which they talk."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from offload.encoding import decode, encode
from offload.errors import ConfigError, RankError
from offload.ranks.heartbeat import Heartbeat, NoHeartbeat
from offload.torch_internals import groups_by_members, own_store
from offload.waiting import Failure

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher such as torchrun puts into the environment."""

_PATIENCE = timedelta(days=7)
"""A collective may wait this long: a rank that is gone is noticed by its silence (``offload.ranks.heartbeat``), and one
that computes is waited for."""


@dataclass(frozen=True)
class Peers:
    """Some ranks of a world, in order, this one among them. ``group`` moves bytes of host memory between them."""

    ranks: tuple[int, ...]
    own: int
    """Index of this one among them."""
    group: Any

    @classmethod
    def single(cls) -> Peers:
        """This rank alone."""
        return cls((0,), 0, None)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def members(self) -> list[int]:
        """The ranks as the whole program counts them; none that others could be taken for, where there is one."""
        return [] if self.size == 1 else distributed.get_process_group_ranks(self.group)

    def release(self) -> None:
        """Other worlds may have the group now."""
        release_groups([self.group])


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
    shards: Peers
    replicas: Peers
    heartbeat: Heartbeat

    @classmethod
    def single(cls, local_size: int = 1) -> World:
        """A world of one rank."""
        return cls(0, 1, (0,), local_size, None, Peers.single(), Peers.single(), NoHeartbeat(Failure()))

    @property
    def local_rank(self) -> int:
        """Index of this one among ``local_ranks``."""
        return self.local_ranks.index(self.rank)

    @property
    def members(self) -> list[int]:
        """The ranks as the whole program counts them, as in ``Peers``."""
        return [] if self.size == 1 else distributed.get_process_group_ranks(self.group)

    def all_gather_object(self, own: Any) -> list[Any]:
        """Gather what every rank gives, in order: see ``packed``. All ranks call this together; nobody uses the group
        else."""
        if self.size == 1:
            return [own]
        return _all_gather_object(own, self.size, self.group, self.heartbeat)

    def leave(self, error: BaseException | None) -> None:
        """This rank's part of it ends, by this ``error`` if by one. Safe to call twice."""
        self.heartbeat.leave(error)
        release_groups((self.group, self.shards.group, self.replicas.group), broken=self.heartbeat.failure.is_known)


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
    if not distributed.is_initialized():
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ or all(name in os.environ for name in _LAUNCHED)
        if num_processes < 2 or not is_launched:
            return single
        try:
            _initialise("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except ValueError as error:
            raise ConfigError(
                f"this is one of {num_processes} processes (WORLD_SIZE), and torch.distributed cannot start: {error}. "
                "Start them by torchrun, or call torch.distributed.init_process_group before the engine is made."
            ) from None
    rows = [list(range(distributed.get_world_size()))] if mesh is None else _rows(mesh)
    members = sorted(member for row in rows for member in row)
    if len(members) < 2:
        return single
    rank = members.index(distributed.get_rank())
    heartbeat = Heartbeat(rank, len(members), _next_store(members), timeout_s, Failure())
    try:
        return _meet(rows, members, rank, heartbeat)
    except BaseException as error:
        heartbeat.leave(error)
        raise


def _meet(rows: Sequence[Sequence[int]], members: Sequence[int], rank: int, heartbeat: Heartbeat) -> World:
    group = take_group(members, heartbeat)
    hosts = _all_gather_object(_host(), len(members), group, heartbeat)
    local = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    local_size = max(len(local), processes_here())
    row = next(row for row in rows if members[rank] in row)
    column = sorted(other[row.index(members[rank])] for other in rows)

    def peers(some: Sequence[int]) -> Peers:
        is_all, is_one = len(some) == len(members), len(some) == 1
        of_some = group if is_all else None if is_one else take_group(some, heartbeat)
        return Peers(tuple(map(members.index, some)), some.index(members[rank]), of_some)

    return World(rank, len(members), local, local_size, group, peers(row), peers(column), heartbeat)


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


def _initialise(backend: str) -> None:
    """As ``distributed.init_process_group(backend)``; but a start does not find what former starts said."""
    store, rank, size = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    own = distributed.PrefixStore(_start(), store)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=own, rank=rank, world_size=size)


def _start() -> str:
    """A name for this start of all processes. The store of torchrun's own process outlives those that it starts anew,
    with all keys (torch 2.13): addresses of processes that are gone, and the error that ended them."""
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if is_torchruns else '0'}"


def processes_here() -> int:
    """Processes that a launcher has started on this machine, as far as it says so."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_index(world: World) -> int | None:
    """Index of this process among those on this machine, as a launcher says, else as its world knows; None for one."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return None if world.size == 1 else world.local_rank


@dataclass
class _Group:
    """A group that is ours alone, for one world at a time."""

    group: Any
    is_taken: bool = False


_groups: dict[tuple[str, tuple[int, ...]], list[_Group]] = {}
"""The groups of each backend and set of ranks, for the present ``torch.distributed``."""
_num_worlds: Counter[tuple[int, ...]] = Counter()
"""Number of worlds that each set of ranks has had there."""
_everyone: Any = None
"""The group of all processes that they were made in."""


def _forget_former() -> None:
    """Forget what was made in a ``torch.distributed`` that is destroyed."""
    global _everyone
    if _everyone is not distributed.group.WORLD:
        _everyone = distributed.group.WORLD
        _groups.clear()
        _num_worlds.clear()


def _next_store(members: Sequence[int]) -> Any:
    """A ``torch.distributed.Store`` that the next world of these ranks shares, and no other one."""
    _forget_former()
    _num_worlds[tuple(members)] += 1
    name = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    return own_store(f"offload/{_start()}/{name}/{_num_worlds[tuple(members)]}")


def take_group(members: Sequence[int], heartbeat: Heartbeat, backend: str = "gloo") -> Any:
    """A group for these ranks, as the whole program counts them, that no other world has. All of them call this.

    Its name, and so what it leaves in the store that all processes share, follows from the ranks and the groups that
    they have: it is kept, since one of the same name would find that. One that is gone would be waited for without end:
    ``heartbeat`` says so.
    """
    _forget_former()
    of_members = _groups.setdefault((backend, tuple(members)), [])
    found = next((group for group in of_members if not group.is_taken), None)
    if found is None:
        make = partial(_make_group, members, backend)
        found = _Group(heartbeat.wait_for_call(make, "make their engines"))
        of_members.append(found)
    found.is_taken = True
    return found.group


def _make_group(members: Sequence[int], backend: str) -> Any:
    with _own_handling_of_errors(), groups_by_members():
        return distributed.new_group(list(members), _PATIENCE, backend, use_local_synchronization=True)


@contextlib.contextmanager
def _own_handling_of_errors() -> Iterator[None]:
    """A group that is made within leaves it to us to end transfers of a peer that is gone: by itself nccl's would end
    the process. Source: torch's "ProcessGroupNCCL Environment Variables"."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def find_peers(members: Sequence[int]) -> Peers:
    """These ranks, as the whole program counts them and in order, which call this together. This one alone if there is
    no other."""
    if len(members) < 2:
        return Peers.single()
    group = take_group(members, NoHeartbeat(Failure()))
    return Peers(tuple(range(len(members))), distributed.get_rank(group), group)


def release_groups(groups: Iterable[Any], *, broken: bool = False) -> None:
    """Other worlds may have these groups now. ``broken``: a collective may be under way that nobody ends, so that they
    are not used again."""
    given = {id(group) for group in groups}
    for of_members in _groups.values():
        for group in [group for group in of_members if id(group.group) in given]:
            group.is_taken = False
            if broken:
                of_members.remove(group)
                ctypes.pythonapi.Py_IncRef(
                    ctypes.py_object(group.group)
                )  # its destructor would wait for what is under way


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
