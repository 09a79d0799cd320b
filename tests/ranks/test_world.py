"""The table of ranks: whom an environment or a mesh makes peers, who shares a machine, which groups they talk in."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import FakeHeartbeat, Meeting

from offload.errors import ConfigError, RankError
from offload.ranks import groups, launch
from offload.ranks import world as module
from offload.ranks.groups import NO_GROUP, take_group
from offload.ranks.heartbeat import NoHeartbeat
from offload.ranks.signs import NO_SIGNS
from offload.ranks.world import Peers, World, find_peers, find_world, local_index
from offload.waiting import Failure

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


class Made:
    def __init__(self, members: list[int]) -> None:
        self.members = members


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """``torch.distributed`` of four processes, of which this is number 2; ``made`` are the groups."""
    given = SimpleNamespace(rank=2, size=4, made=[], hosts=["a", "a", "b", "b"], stores=[], kept=[])

    def make(members: Sequence[int], backend: str) -> Any:
        given.made.append((backend, list(members)))
        given.kept.append(Made(list(members)))
        return given.kept[-1]

    monkeypatch.setattr(module.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(module.distributed, "get_world_size", lambda: given.size)
    monkeypatch.setattr(module.distributed, "get_rank", lambda group=None: given.rank)
    monkeypatch.setattr(module, "OwnStores", lambda *given: NO_SIGNS)
    monkeypatch.setattr(groups, "_make_group", make)
    monkeypatch.setattr(groups, "own_store", given.stores.append)
    monkeypatch.setattr(groups.distributed, "group", SimpleNamespace(WORLD=Made([])))
    monkeypatch.setattr(module, "Heartbeat", lambda *given: NoHeartbeat(given[4]))
    monkeypatch.setattr(module, "_all_gather_object", lambda own, *rest: given.hosts)
    yield given
    groups._groups.clear()
    groups._num_worlds.clear()


class Mesh:
    """A mesh of devices; ``here``: this rank is a part of it."""

    def __init__(self, rows: Any, here: bool = True) -> None:
        self.mesh = torch.tensor(rows)
        self.ndim = self.mesh.ndim
        self.mesh_dim_names = tuple("abc"[: self.ndim])
        self._here = here

    def get_coordinate(self) -> list[int] | None:
        return [0] if self._here else None


# Which ranks there are.


def test_without_a_launcher_one_rank_is_a_world():
    found = find_world(None, 10.0)
    assert (found.rank, found.size, found.local_ranks, found.local_size) == (0, 1, (0,), 1)
    assert found.members == () and found.all_gather_object("own") == ["own"] and found.local_rank == 0
    assert found.shards == found.replicas == Peers((0,), 0, NO_GROUP)
    found.leave(None)


@pytest.mark.parametrize("missing", LAUNCHED)
def test_an_environment_that_names_no_other_process_starts_nothing(missing: str, monkeypatch: pytest.MonkeyPatch):
    """Batch systems set some of the variables for programs of one process."""
    for name, value in LAUNCHED.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.distributed, "rendezvous", lambda url: pytest.fail("started"))
    assert find_world(None, 10.0).size == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: expected a whole number"),
        ({"RANK": "-1"}, "RANK=-1: expected a whole number"),
        ({"RANK": ""}, "RANK=: expected a whole number"),
    ],
)
def test_numbers_that_are_none_are_one_line(given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in {**LAUNCHED, **given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        find_world(None, 10.0)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 1, 2), None),
        ((0, 1, 1), "RANK=1 is the number of two processes"),
        ((0, 1, 3), "RANK=3: with WORLD_SIZE=3, ranks are 0 to 2"),
    ],
)
def test_ranks_with_numbers_that_cannot_be_hear_of_it_at_once(numbers: Sequence[int], said: str | None):
    store = launch.distributed.HashStore()

    def come(rank: int) -> str | None:
        try:
            launch._call_the_roll(store, rank, len(numbers))
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(numbers)) as pool:
        heard = list(pool.map(come, numbers))
    assert heard == [said and f"{said}. Give each process a number of its own, as torchrun does"] * 3


def test_a_launch_that_cannot_start_is_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value if name != "MASTER_PORT" else "no number")
    with pytest.raises(ConfigError, match=r"4 processes \(WORLD_SIZE\), and torch\.distributed cannot start.*torchrun"):
        find_world(None, 10.0)


def test_all_processes_are_one_row(torchs: SimpleNamespace):
    found = find_world(None, 10.0)
    assert (found.rank, found.size, found.members) == (2, 4, [0, 1, 2, 3])
    assert (found.local_ranks, found.local_rank, found.local_size) == ((2, 3), 0, 2)
    assert (found.shards.ranks, found.shards.own, found.shards.group) == ((0, 1, 2, 3), 2, found.group)
    assert (found.replicas.ranks, found.replicas.own, found.replicas.group) == ((2,), 0, None)
    assert torchs.made == [("gloo", [0, 1, 2, 3])]


def test_a_mesh_of_two_dimensions_is_a_table_of_copies(torchs: SimpleNamespace):
    found = find_world(Mesh([[0, 1], [2, 3]]), 10.0)
    assert (found.shards.ranks, found.shards.own) == ((2, 3), 0)
    assert (found.replicas.ranks, found.replicas.own) == ((0, 2), 1)
    assert torchs.made == [("gloo", [0, 1, 2, 3]), ("gloo", [2, 3]), ("gloo", [0, 2])]


def test_ranks_of_a_part_of_the_program_count_from_nought(torchs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """Others on the machine share what it has."""
    torchs.size, torchs.rank, torchs.hosts = 8, 6, ["a", "a"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = find_world(Mesh([6, 2]), 10.0)  # in whichever order
    assert (found.rank, found.size, found.members) == (1, 2, [2, 6])
    assert (found.local_ranks, found.local_rank, found.local_size) == ((0, 1), 1, 8)
    assert (found.shards.ranks, found.shards.own, found.shards.members) == ((0, 1), 1, [2, 6])
    assert find_world(Mesh([6]), 10.0).local_size == 8


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh([[[0], [1]]]), r"this mesh has 3 \(\('a', 'b', 'c'\)\)"),
        (Mesh([0, 1], here=False), "this rank is no part of it"),
    ],
)
def test_meshes_that_are_no_table_of_ranks_are_refused(torchs: SimpleNamespace, mesh: Mesh, said: str):
    with pytest.raises(ConfigError, match=said):
        find_world(mesh, 10.0)


def test_a_world_that_does_not_come_about_ends_with_its_error(torchs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    left: list[BaseException | None] = []
    monkeypatch.setattr(NoHeartbeat, "leave", lambda heartbeat, error: left.append(error))
    planted = RuntimeError("no route to host")

    def fail(*given: Any) -> Any:
        raise planted

    monkeypatch.setattr(module, "_all_gather_object", fail)
    with pytest.raises(RuntimeError, match="no route"):
        find_world(None, 10.0)
    assert left == [planted]


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "start 0."),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "start 0."),  # of a store that is no longer than the processes
        ({"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "start 3."),
    ],
)
def test_every_world_has_a_store_of_its_own(
    environment: dict[str, str], start: str, torchs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for mesh in (None, None, Mesh([1, 2])):
        torchs.hosts = ["a"] * (4 if mesh is None else 2)
        find_world(mesh, 10.0)
    first, second, other = torchs.stores
    assert first.startswith(f"offload/{start}") and first.endswith("/1") and second == f"{first[:-1]}2"
    assert other.endswith("/1") and other != first


def test_the_launcher_says_which_process_of_the_machine_this_is(monkeypatch: pytest.MonkeyPatch):
    world = World(2, 4, (2, 3), 2, NO_GROUP, Peers.single(), Peers.single(), NoHeartbeat(Failure()))
    assert local_index(World.single()) is None and local_index(world) == 0
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert local_index(World.single()) == local_index(world) == 5
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert local_index(World.single()) is None and local_index(world) == 0


# Groups.


def test_a_group_is_had_by_one_world_at_a_time_and_kept(torchs: SimpleNamespace):
    alone = NoHeartbeat(Failure())
    first, second = take_group([0, 1], alone), take_group([0, 1], alone)
    assert first is not second and take_group([0, 1], alone, "nccl") not in (first, second)
    first.release()
    assert take_group([0, 1], alone) is first and take_group([0, 2], alone) is not first
    assert torchs.made == [("gloo", [0, 1]), ("gloo", [0, 1]), ("nccl", [0, 1]), ("gloo", [0, 2])]


def test_a_broken_group_is_not_used_again(torchs: SimpleNamespace):
    found = find_world(Mesh([[0, 1], [2, 3]]), 10.0)
    found.leave(None)
    again = find_world(Mesh([[0, 1], [2, 3]]), 10.0)
    assert again.group is found.group and again.shards.group is found.shards.group and len(torchs.made) == 3
    again.heartbeat.failure.record(ValueError("planted"))
    again.leave(None)
    last = find_world(Mesh([[0, 1], [2, 3]]), 10.0)
    assert last.group is not found.group and len(torchs.made) == 6


def test_groups_of_a_former_start_are_forgotten(torchs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    alone = NoHeartbeat(Failure())
    first = take_group([0, 1], alone)
    first.release()
    monkeypatch.setattr(groups.distributed, "group", SimpleNamespace(WORLD=Made([])))
    assert take_group([0, 1], alone) is not first


def test_what_the_program_destroys_is_kept_alive_by_nobody(torchs: SimpleNamespace):
    found, peers = find_world(None, 10.0), find_peers([1, 2])
    destroyed = weakref.ref(groups.distributed.group.WORLD)
    torchs.kept.clear()
    groups.distributed.group.WORLD = Made([])
    assert destroyed() is None and found.held.is_destroyed
    for group_of in (found, found.shards, peers):
        with pytest.raises(RankError, match="destroy_process_group"):
            group_of.group  # noqa: B018
    found.leave(None), peers.release()  # which are safe all the same
    again = find_world(None, 10.0)
    first, second = torchs.stores
    assert again.group is torchs.kept[0] and first != second  # also where both are parts of one store


def test_peers_that_are_found_talk_in_a_group_of_their_own(torchs: SimpleNamespace):
    assert find_peers([3]) == Peers.single() and torchs.made == []
    torchs.rank = 1
    found = find_peers([1, 3])
    assert (found.ranks, found.own, found.members, found.size) == ((0, 1), 1, [1, 3], 2)
    found.release()
    assert find_peers([1, 3]).group is found.group


def test_objects_of_any_size_are_gathered(monkeypatch: pytest.MonkeyPatch):
    """Over a collective of tensors of one size, between threads."""
    heartbeats = [FakeHeartbeat(), FakeHeartbeat()]
    meeting, rank = Meeting([heartbeat.failure for heartbeat in heartbeats]), threading.local()

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any, async_op: bool) -> Any:
        for part, brought in zip(parts, meeting.meet(Peers((0, 1), rank.own, NO_GROUP), own), strict=True):
            part.copy_(brought)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(module.distributed, "all_gather", all_gather)
    objects = [{"a": 1}, ["b" * 1000]]

    def give(own: int) -> list[Any]:
        rank.own = own
        world = World(own, 2, (own,), 1, NO_GROUP, Peers.single(), Peers.single(), heartbeats[own])  # type: ignore[arg-type]
        return world.all_gather_object(objects[own])

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(give, range(2))] == [objects, objects]


def test_processes_of_one_machine_have_one_name(monkeypatch: pytest.MonkeyPatch):
    assert module._host() == module._host() and module.socket.gethostname() in module._host()

    def missing(path: Any) -> str:
        raise OSError("no /proc")

    monkeypatch.setattr(module.Path, "read_text", missing)
    assert module._host() == module.socket.gethostname()
