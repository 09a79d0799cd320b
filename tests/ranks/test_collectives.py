"""Rounds of ranks that are threads: what is carried out, among whom, in which order; what is said when they differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import FOREVER_S, FakeHeartbeat, FakeLinks, Meeting

from offload.errors import RankError
from offload.ranks import collectives
from offload.ranks.collectives import Kind, LocalCollectives, Operation, Rounds
from offload.ranks.groups import NO_GROUP
from offload.ranks.world import Peers, World

Done = tuple[Kind, int, list[int], bool]


class CountingLinks(FakeLinks):
    num_messages = 0

    def all_gather_message(self, into: torch.Tensor, own: torch.Tensor, peers: Peers) -> None:
        self.num_messages += 1
        self.all_gather(into, own, peers)


class Rank:
    """``done``: the gathers and exchanges that this rank took part in, among whom, and whether it wanted them."""

    def __init__(self, rank: int, size: int, per_copy: int, meeting: Meeting, heartbeat: FakeHeartbeat) -> None:
        row = tuple(range(rank - rank % per_copy, rank - rank % per_copy + per_copy))
        shards = Peers(row, row.index(rank), NO_GROUP)
        world = World(rank, size, (rank,), 1, NO_GROUP, shards, Peers.single(), heartbeat, range(size))  # type: ignore[arg-type]
        self.rounds = Rounds(world)
        self.links = self.rounds.links = CountingLinks(meeting)  # type: ignore[assignment]
        object.__setattr__(world, "all_gather_object", lambda own: meeting.meet(self.rounds._all, own))
        self.done: list[Done] = []
        for kind in (Kind.WEIGHTS, Kind.GRADIENTS):
            self.rounds.register(kind, self._carry_out(kind))

    def _carry_out(self, kind: Kind) -> collectives.CarryOut:
        def carry_out(number: int, wanting: Sequence[int], own: Operation | None) -> None:
            self.done.append((kind, number, list(wanting), own is not None))

        return carry_out

    def ask(self, *operations: tuple[Kind, int]) -> None:
        """Have all of them in the queue before a round begins, and wait until they are over."""
        begin = threading.Event()
        self.rounds._worker.submit(lambda: begin.wait(FOREVER_S))
        asked = [self.rounds.submit(kind, number, f"{kind.name} {number}", None) for kind, number in operations]
        begin.set()
        for operation in asked:
            operation.wait()


class Program:
    """Ranks, of which each makes its own calls at the same time."""

    def __init__(self, size: int, per_copy: int) -> None:
        heartbeats = [FakeHeartbeat() for _ in range(size)]
        meeting = Meeting([heartbeat.failure for heartbeat in heartbeats])
        for heartbeat in heartbeats:
            heartbeat.failure.when_known(meeting.wake)
        self.ranks = [Rank(rank, size, per_copy, meeting, heartbeat) for rank, heartbeat in enumerate(heartbeats)]

    def run(self, *calls: Callable[[Rank], Any]) -> list[Any]:
        """One call for each rank, or one for all; what each returns or raises."""
        calls = calls if len(calls) > 1 else calls * len(self.ranks)
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            futures = [pool.submit(call, rank) for call, rank in zip(calls, self.ranks, strict=True)]
        return [future.exception() or future.result() for future in futures]

    @property
    def done(self) -> list[list[Done]]:
        return [rank.done for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.rounds.stop()


@pytest.fixture
def make() -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def make_program(size: int = 2, per_copy: int = 1) -> Program:
        programs.append(Program(size, per_copy))
        return programs[-1]

    yield make_program
    for program in programs:
        program.close()


def gather(name: str) -> Callable[[Rank], list[list[float]]]:
    def call(rank: Rank) -> list[list[float]]:
        own = torch.full((2,), float(rank.rounds.world.rank))
        return [tensor.tolist() for tensor in rank.rounds.all_gather(name, own)]

    return call


# What comes of it.


def test_every_rank_gets_what_each_gives_in_order(make: Callable[..., Program]):
    assert make(3).run(gather("a place")) == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]] * 3


def test_a_barrier_moves_nothing(make: Callable[..., Program]):
    program = make()
    assert program.run(lambda rank: len(rank.rounds.all_gather("a place", torch.empty(0)))) == [2, 2]
    assert program.ranks[0].links.num_messages == 1  # of the round alone


def test_parts_may_have_other_lengths_and_an_empty_one_another_dtype(make: Callable[..., Program]):
    parts = [torch.empty(0), torch.ones(3, dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)]
    found = make(3).run(lambda rank: rank.rounds.all_gather_parts("parts", parts[rank.rounds.world.rank]))
    for of_rank in found:
        assert [part.tolist() for part in of_rank] == [[], [1.0, 1.0, 1.0], [2.0]]
        assert {part.dtype for part in of_rank} == {torch.bfloat16}


def test_shards_are_joined_within_one_copy(make: Callable[..., Program]):
    program = make(4, per_copy=2)
    found = program.run(lambda rank: rank.rounds.join("shards", torch.full((1,), rank.rounds.world.rank)).tolist())
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_first_ranks_bytes_are_broadcast(make: Callable[..., Program], monkeypatch: pytest.MonkeyPatch):
    program = make()
    meeting = program.ranks[0].links._meeting

    def broadcast(tensor: torch.Tensor, first: int, group: Any, async_op: bool) -> Any:
        rank = next(rank for rank in program.ranks if rank.rounds._queue[0].own is tensor)
        brought = meeting.meet(rank.rounds._all, tensor.clone())
        return SimpleNamespace(wait=lambda: tensor.copy_(brought[first]))

    monkeypatch.setattr(collectives.distributed, "broadcast", broadcast)

    def call(rank: Rank) -> list[float]:
        value = torch.full((2, 2), 1.0 + rank.rounds.world.rank)
        rank.rounds.broadcast("a value", value)
        return [*value.view(-1).tolist(), rank.rounds.received_bytes]

    assert program.run(call) == [[1.0] * 4 + [0], [1.0] * 4 + [16]]


def test_one_rank_does_everything_by_itself():
    alone, own = LocalCollectives(), torch.ones(3)
    assert alone.all_gather("a", own) == [own] and alone.all_gather_parts("a", own) == [own]
    assert alone.join("a", own) is own and alone.received_bytes == 0 and alone.stop()
    alone.broadcast("a", own), alone.leave()


# Rounds.


def test_operations_that_are_the_same_on_all_ranks_need_one_round(make: Callable[..., Program]):
    program = make()
    units = [(Kind.WEIGHTS, 1), (Kind.GRADIENTS, 1), (Kind.WEIGHTS, 2), (Kind.LEAVE, 0)]
    assert program.run(lambda rank: rank.ask(*units)) == [None, None]
    assert program.done == [[(kind, number, [0, 1], True) for kind, number in units[:3]]] * 2
    assert [rank.links.num_messages for rank in program.ranks] == [1, 1]


def test_what_comes_first_and_is_the_same_is_carried_out_before_what_differs(make: Callable[..., Program]):
    program = make()
    program.run(
        lambda rank: rank.ask((Kind.WEIGHTS, 1), (Kind.WEIGHTS, 2), (Kind.LEAVE, 0)),
        lambda rank: rank.ask((Kind.WEIGHTS, 1), (Kind.LEAVE, 0)),
    )
    assert program.done == [
        [(Kind.WEIGHTS, 1, [0, 1], True), (Kind.WEIGHTS, 2, [0], True)],
        [(Kind.WEIGHTS, 1, [0, 1], True), (Kind.WEIGHTS, 2, [0], False)],
    ]


def test_a_gather_goes_before_an_exchange_whichever_rank_wants_it(make: Callable[..., Program]):
    program = make(3)
    program.run(
        lambda rank: rank.ask((Kind.GRADIENTS, 5), (Kind.LEAVE, 0)),
        lambda rank: rank.ask((Kind.WEIGHTS, 7), (Kind.GRADIENTS, 5), (Kind.LEAVE, 0)),
        lambda rank: rank.ask((Kind.LEAVE, 0)),
    )
    assert [[done[:3] for done in of_rank] for of_rank in program.done] == [
        [(Kind.WEIGHTS, 7, [1]), (Kind.GRADIENTS, 5, [0, 1])]
    ] * 3
    assert [[wanted for *_, wanted in of_rank] for of_rank in program.done] == [
        [False, True], [True, True], [False, False]
    ]  # fmt: skip


def test_ranks_that_want_other_units_get_them_one_after_the_other(make: Callable[..., Program]):
    program = make()
    program.run(
        lambda rank: rank.ask((Kind.WEIGHTS, 1), (Kind.WEIGHTS, 2), (Kind.LEAVE, 0)),
        lambda rank: rank.ask((Kind.WEIGHTS, 2), (Kind.WEIGHTS, 1), (Kind.LEAVE, 0)),
    )
    expected = [(Kind.WEIGHTS, 1, [0]), (Kind.WEIGHTS, 2, [0, 1]), (Kind.WEIGHTS, 1, [1])]
    assert [[done[:3] for done in of_rank] for of_rank in program.done] == [expected] * 2


def code(kind: Kind, number: int = 0) -> int:
    return (kind << 32) | number


@pytest.mark.parametrize(
    ("codes", "chosen"),
    [
        ([code(Kind.LEAVE), code(Kind.GRADIENTS, 4), code(Kind.WEIGHTS, 9)], code(Kind.WEIGHTS, 9)),
        ([code(Kind.WEIGHTS, 3), code(Kind.WEIGHTS, 9)], code(Kind.WEIGHTS, 3)),
        ([code(Kind.GRADIENTS, 7), code(Kind.GRADIENTS, 4), code(Kind.LEAVE)], code(Kind.GRADIENTS, 7)),
        ([0, code(Kind.GRADIENTS, 4), code(Kind.GRADIENTS, 1)], 0),
        ([0, code(Kind.GRADIENTS, 4), code(Kind.WEIGHTS, 1)], code(Kind.WEIGHTS, 1)),
        ([0, code(Kind.MESSAGE, 4), code(Kind.MESSAGE, 1)], 0),
        ([code(Kind.MESSAGE, 8), code(Kind.GRADIENTS, 1)], code(Kind.GRADIENTS, 1)),
    ],
)
def test_the_rule_looks_at_nothing_but_the_heads_of_the_queues(make: Callable[..., Program], codes: Any, chosen: int):
    assert make().ranks[0].rounds._choose(codes) == chosen


# Ranks without an operation, which are called.


def begin(rank: Rank, kind: Kind, number: int) -> Operation:
    """Ask for it, and return when the others are waited for."""
    operation = rank.rounds.submit(kind, number, f"{kind.name} {number}", None)
    wait_for(lambda: rank.rounds.waited_s() > 0)
    return operation


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_that_is_called_gives_until_it_wants_something_itself(make: Callable[..., Program]):
    program = make()
    first, second = program.ranks
    for rank in program.ranks:
        rank.rounds.resume()  # the engines are made
    one = begin(first, Kind.WEIGHTS, 1)
    assert first.rounds.can_be_given() and not second.rounds.can_be_given()
    second.rounds.give()
    one.wait()
    first.ask((Kind.WEIGHTS, 2), (Kind.WEIGHTS, 3))  # nobody needs to call again
    for number in (4, 5):
        program.run(lambda rank, number=number: rank.ask((Kind.WEIGHTS, number), (Kind.LEAVE, 0)))
    assert [done[1:3] for done in first.done[:3]] == [(number, [0]) for number in (1, 2, 3)]
    assert first.done[-1][1:3] == (5, [0, 1]), "together, as before"
    assert [done[:3] for done in first.done] == [done[:3] for done in second.done]


def test_a_rank_whose_weights_change_gives_nothing(make: Callable[..., Program]):
    program = make()
    first, second = program.ranks
    one = begin(first, Kind.WEIGHTS, 1)
    second.rounds.give()  # its engine is not made
    second.rounds.resume()
    second.rounds.suspend()
    second.rounds.give()
    assert not second.rounds._is_giving and not one.done()
    second.rounds.resume()
    second.rounds.give()
    one.wait()
    assert program.run(gather("the end")) == [[[0.0, 0.0], [1.0, 1.0]]] * 2  # who gave goes on to what comes next


def test_what_cannot_be_given_waits_for_all_and_nobody_asks_again_and_again(make: Callable[..., Program]):
    program = make()
    first, second = program.ranks
    second.rounds.resume()
    one = begin(first, Kind.GRADIENTS, 1)
    assert not first.rounds.can_be_given()
    second.rounds.give()
    wait_for(lambda: not second.rounds._is_giving)
    wait_for(lambda: first.links.num_messages == 2)  # it waits again
    assert not one.done() and second.links.num_messages == 1
    second.ask((Kind.GRADIENTS, 1)), one.wait()
    assert [rank.done for rank in program.ranks] == [[(Kind.GRADIENTS, 1, [0, 1], True)]] * 2


# Errors.


def test_ranks_at_different_places_end_with_an_error_that_says_where_each_is(make: Callable[..., Program]):
    program = make(3)
    found = program.run(gather("step()"), gather("save_checkpoint()"), lambda rank: rank.rounds.leave())
    where = "rank 0 at step(), rank 1 at save_checkpoint(), rank 2 at the end (close())"
    assert [type(error) for error in found] == [RankError] * 3
    assert {error.args[0] for error in found} == {f"the ranks are at different places of the program: {where}"}
    assert [str(error) for error in program.run(gather("step()"))] == [str(error) for error in found], "the first stays"


def test_ranks_that_say_other_things_at_one_place_end_with_an_error_that_names_them(make: Callable[..., Program]):
    program = make(3)

    def call(rank: Rank) -> list[torch.Tensor]:
        lr = [0.1, 0.2, 0.1][rank.rounds.world.rank]
        return rank.rounds.all_gather("step 1", torch.empty(0), {"lr": {"group 0": lr, "group 1": 1.0}})

    said = (
        "step 1: the ranks differ in what must be the same on all of them: lr of group 0 is 0.1 on ranks 0 and 2, 0.2"
    )
    assert [error.args[0] for error in program.run(call)] == [f"{said} on rank 1"] * 3


def test_a_message_of_another_size_is_another_place(make: Callable[..., Program]):
    def call(rank: Rank) -> list[torch.Tensor]:
        return rank.rounds.all_gather("values", torch.zeros(1 + rank.rounds.world.rank))

    assert ["rank 0 at values, rank 1 at values" in str(error) for error in make().run(call)] == [True, True]


def test_an_operation_that_fails_ends_the_ranks_that_carry_it_out(make: Callable[..., Program]):
    program, planted = make(), ValueError("planted")

    def fail(*arguments: Any) -> None:
        raise planted

    for rank in program.ranks:
        rank.rounds.register(Kind.WEIGHTS, fail)
    assert program.run(lambda rank: rank.ask((Kind.WEIGHTS, 1))) == [planted, planted]
    assert program.run(gather("step()")) == [planted, planted]


def test_a_rank_that_nobody_joins_gives_up(make: Callable[..., Program], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "PATIENCE_S", 0.05)
    monkeypatch.setattr(collectives, "_SLICE_S", 0.01)
    program = make()
    found = program.run(gather("step()"), lambda rank: None)
    assert found[0].args[0] == "a rank is at step(), and others have not come there for 0.05 s"


def test_a_transfer_that_is_left_keeps_the_collectives(make: Callable[..., Program], monkeypatch: pytest.MonkeyPatch):
    rounds = make().ranks[0].rounds
    assert rounds.stop()
    monkeypatch.setattr(rounds.links, "end", lambda: False)
    assert not rounds.stop()
