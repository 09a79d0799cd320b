"""Links between memories, over collectives that are of this page: what is asked for, how much comes, what is left."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from rank_threads import FakeHeartbeat

from offload.errors import RankError
from offload.ranks import links
from offload.ranks.groups import Group
from offload.ranks.heartbeat import NoHeartbeat
from offload.ranks.links import DeviceLinks, HostLinks
from offload.ranks.world import Peers, World


class Made:
    """What torch has of a group."""


GROUP = Made()
HELD = Group(GROUP)


class Work:
    """A collective that is under way until ``is_over``."""

    def __init__(self, is_over: bool = True) -> None:
        self.is_over = is_over

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        pass


class Collectives:
    """Those of ``torch.distributed`` that links ask for. ``asked``: what, with sizes, and of whom."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.work = Work()
        patch.setattr(links.distributed, "broadcast", self._broadcast)
        patch.setattr(links.distributed, "all_gather_single", self._all_gather, raising=False)
        patch.setattr(links.distributed, "gather", self._gather)
        patch.setattr(links.distributed, "all_to_all_single", self._all_to_all)

    def _broadcast(self, part: torch.Tensor, rank: int, group: Any, async_op: bool) -> Work:
        assert group == GROUP and async_op
        self.asked.append(("broadcast", part.tolist(), rank))
        return self.work

    def _all_gather(self, into: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool) -> Work:
        assert group == GROUP and async_op
        self.asked.append(("all_gather", into.nbytes, own.tolist()))
        return self.work

    def _gather(self, own: torch.Tensor, parts: Any, place: int, group: Any, async_op: bool) -> Work:
        self.asked.append(("gather", own.tolist(), parts and [part.nbytes for part in parts], place))
        return self.work

    def _all_to_all(
        self, into: torch.Tensor, own: torch.Tensor, received: list[int], sent: list[int], group: Any, async_op: bool
    ) -> Work:
        self.asked.append(("all_to_all", into.nbytes, own.nbytes, received, sent))
        return self.work


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    return Collectives(monkeypatch)


@pytest.fixture
def heartbeat() -> FakeHeartbeat:
    return FakeHeartbeat()


PEERS = Peers((0, 1, 2), 1, HELD, [4, 6, 7])
OWN = torch.tensor([1, 2], dtype=torch.uint8)


def test_large_tensors_are_given_by_each_to_all_others(distributed: Collectives, heartbeat: FakeHeartbeat):
    host, into = HostLinks(heartbeat), torch.zeros(6, dtype=torch.uint8)  # type: ignore[arg-type]
    host.all_gather(into, OWN, PEERS)
    assert distributed.asked == [("broadcast", [0, 0], 4), ("broadcast", [1, 2], 6), ("broadcast", [0, 0], 7)]
    assert into.tolist() == [0, 0, 1, 2, 0, 0] and host.received_bytes == 4


def test_a_message_is_one_operation(distributed: Collectives, heartbeat: FakeHeartbeat):
    host = HostLinks(heartbeat)  # type: ignore[arg-type]
    host.all_gather_message(torch.zeros(6, dtype=torch.uint8), OWN, PEERS)
    assert distributed.asked == [("all_gather", 6, [1, 2])] and host.received_bytes == 4


@pytest.mark.parametrize("place", [0, 1])
def test_a_gather_brings_bytes_to_one_rank(place: int, distributed: Collectives, heartbeat: FakeHeartbeat):
    host = HostLinks(heartbeat)  # type: ignore[arg-type]
    host.gather(torch.zeros(6, dtype=torch.uint8) if place == PEERS.own else None, OWN, PEERS, place)
    is_here = place == PEERS.own
    assert distributed.asked == [("gather", [1, 2], [2, 2, 2] if is_here else None, [4, 6][place])]
    assert host.received_bytes == (4 if is_here else 0)


def test_parts_come_from_those_that_have_some(distributed: Collectives, heartbeat: FakeHeartbeat):
    host, own = HostLinks(heartbeat), torch.zeros(6, dtype=torch.float32)  # type: ignore[arg-type]
    host.scatter_parts(torch.zeros(2), own, PEERS, [0, 8, 0])
    host.scatter_parts(torch.zeros(4), own, PEERS, [8, 8, 0])
    assert distributed.asked == [
        ("all_to_all", 8, 24, [0, 8, 0], [8, 8, 8]), ("all_to_all", 16, 24, [8, 8, 0], [8, 8, 8])
    ]  # fmt: skip
    assert host.received_bytes == 8


def test_alone_nothing_is_asked_for(distributed: Collectives, heartbeat: FakeHeartbeat):
    host = HostLinks(heartbeat)  # type: ignore[arg-type]
    for bring in (host.all_gather, host.all_gather_message):
        into = torch.zeros(2, dtype=torch.uint8)
        bring(into, OWN, Peers.single())
        assert into.equal(OWN)
    into = torch.zeros(2, dtype=torch.uint8)
    host.scatter_parts(into, OWN, Peers.single(), [2])
    assert into.equal(OWN) and distributed.asked == [] and host.received_bytes == 0


def test_between_hosts_there_is_no_order_but_that_of_the_program(heartbeat: FakeHeartbeat):
    host = HostLinks(heartbeat)  # type: ignore[arg-type]
    with host.turn(None):
        assert host.point() is None and host.mark() is None
        host.after(None)


def test_what_a_failed_rank_has_left_under_way_is_known(
    distributed: Collectives, heartbeat: FakeHeartbeat, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(links, "_END_S", 0.02)
    host = HostLinks(heartbeat)  # type: ignore[arg-type]
    assert host.end()

    def fails(work: Work) -> None:
        raise RankError("rank 2 is gone")

    monkeypatch.setattr(heartbeat, "wait_for", fails)
    distributed.work.is_over = False
    with pytest.raises(RankError, match="rank 2 is gone"):
        host.all_gather_message(torch.zeros(6, dtype=torch.uint8), OWN, PEERS)
    assert not host.end()
    distributed.work.is_over = True
    assert host.end()


# Between devices.


class FakeDevice:
    """Does at once what it is asked for."""

    torch_device = torch.device("cpu")

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.stream = SimpleNamespace(waited=[])
        self.stream.wait = self.stream.waited.append
        self.stream.record = lambda: "the end of the links"
        self.compute = SimpleNamespace(record=lambda: "built", waited=[])
        self.compute.wait = self.compute.waited.append

    def new_compute_stream(self) -> Any:
        return self.stream

    @contextlib.contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        assert stream is self.stream
        yield

    def collective(self, start: Any, wait_for: Any, *, reads: Any, writes: Any) -> None:
        wait_for(start())


class Taken(Group):
    def __init__(self, told: list[Any]) -> None:
        super().__init__(GROUP)
        self._told = told

    def release(self, *, broken: bool = False) -> None:
        self._told.append(("release", broken))


def connect(device: FakeDevice, patch: pytest.MonkeyPatch) -> tuple[DeviceLinks, World, list[Any]]:
    """A rank of a table of three columns and two rows; the groups that were taken and released."""
    told: list[Any] = []

    def take(members: list[int], heartbeat: Any, backend: str) -> Taken:
        told.append(("take", members, backend))
        return Taken(told)

    patch.setattr(links, "take_group", take)
    patch.setattr(links, "abort_group", lambda group: told.append(("abort", group)))
    heartbeat = NoHeartbeat(FakeHeartbeat().failure)
    world = World(1, 6, (1,), 1, HELD, PEERS, Peers((1, 4), 0, HELD, [4, 7]), heartbeat)
    return DeviceLinks(world, device), world, told  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_devices_are_connected_by_a_group_for_each_row_and_column(
    backend: str, distributed: Collectives, monkeypatch: pytest.MonkeyPatch
):
    device = FakeDevice(backend)
    of_devices, _, told = connect(device, monkeypatch)
    assert told == [("take", [4, 6, 7], backend), ("take", [4, 7], backend)]
    assert [asked[:2] for asked in distributed.asked] == [("all_gather", 12), ("all_gather", 8)]
    assert device.stream.waited == ["built"] * 2 and of_devices.received_bytes == 0
    assert device.compute.waited == ["the end of the links"] * 2  # the memory that they connect by is free after it
    with of_devices.turn("a copy", None):
        of_devices.all_gather(torch.zeros(6, dtype=torch.uint8), OWN, PEERS)
    assert device.stream.waited[2:] == ["a copy"] and of_devices.received_bytes == 4
    assert of_devices.point() == "the end of the links"
    of_devices.close()
    assert told[2:] == [("release", False)] * 2


@pytest.mark.parametrize(("backend", "aborted"), [("gloo", 0), ("nccl", 2)])
def test_the_first_error_aborts_transfers_that_would_wait_without_end(
    backend: str, aborted: int, distributed: Collectives, monkeypatch: pytest.MonkeyPatch
):
    of_devices, world, told = connect(FakeDevice(backend), monkeypatch)
    world.heartbeat.failure.record(RankError("rank 2 is gone"))
    of_devices.close()
    for thread in (thread for thread in threading.enumerate() if thread.name == "offload-abort"):
        thread.join()
    assert sorted(told[2:], key=str) == [*[("abort", GROUP)] * aborted, *[("release", True)] * 2]


@pytest.mark.parametrize(("hangs", "status"), [(True, -signal.SIGALRM), (False, 0)])
def test_a_program_ends_although_an_abort_hangs(hangs: bool, status: int):
    program = f"""
import atexit, threading
from offload.ranks import links
never = threading.Event()
atexit.register(lambda: never.wait(60 if {hangs} else 0))  # as a destructor that waits for the peer
links._LAST_S = 1
abort = threading.Thread(target=never.wait if {hangs} else str, daemon=True)
atexit.register(links.end_all_the_same, [abort])
abort.start()
abort.join(0 if {hangs} else None)
"""
    assert forked.run(program).returncode == status
