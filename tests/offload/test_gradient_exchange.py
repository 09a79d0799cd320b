"""Gradients of several ranks, all in this process: what is summed, in which order, and what becomes of it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from interrupted import at_every_line
from rank_threads import FOREVER_S, FakeHeartbeat, FakeLinks, Meeting

import aio_ext
from offload import waiting
from offload.errors import RankError
from offload.ranks.agreement import Place
from offload.ranks.collectives import Kind, Operation, Rounds
from offload.ranks.groups import NO_GROUP
from offload.ranks.world import Peers, World
from offload.report.meter import Meter
from offload.tiers.gradients.exchange import Bucket, ExchangeMemory, GradientExchange
from offload.tiers.gradients.host import HostGradients
from offload.tiers.gradients.norms import RankSquares, add_up_shards
from offload.tiers.gradients.sink import GradientDtypes
from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.wire import AsTheyAre, In8Bits, Rounded
from offload.units import ALIGNMENT, GRAIN, ParameterSpec, UnitSpec
from offload.units.shard import shard_unit
from swapper import OffloadError, StorageIOError

NUMEL = 2 * GRAIN
LARGE = GRAIN + 1000
"""Elements of a parameter of which two ranks have a part."""


@pytest.fixture(autouse=True)
def _a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", FOREVER_S)


def make_unit(index: int) -> UnitSpec:
    name = f"u{index}"
    specs = (
        ParameterSpec(f"{name}.small", torch.Size((3, 5)), 15, 0, True, ()),
        ParameterSpec(f"{name}.large", torch.Size((LARGE,)), LARGE, 256, True, ()),
        ParameterSpec(f"{name}.frozen", torch.Size((8,)), 8, NUMEL, False, ()),
    )
    return UnitSpec(index, name, (), specs, NUMEL, NUMEL + 2 * GRAIN, 0)


class Fence:
    """Says which shards were waited for before gradients were put into them."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait(self, shard: UnitSpec) -> None:
        self.waited.append(shard.name)


class Rank:
    """One rank's part: real collectives, exchange, sums and store; links, fence and heartbeat are of this page."""

    def __init__(
        self, rank: int, size: int, copies: int, meeting: Meeting, heartbeat: FakeHeartbeat, **memory: Any
    ) -> None:
        per_copy = size // copies
        row = tuple(range(rank - rank % per_copy, rank - rank % per_copy + per_copy))
        column = tuple(range(rank % per_copy, size, per_copy))
        shards, replicas = Peers(row, row.index(rank), NO_GROUP), Peers(column, column.index(rank), NO_GROUP)
        world = World(rank, size, tuple(range(size)), size, NO_GROUP, shards, replicas, heartbeat)  # type: ignore[arg-type]
        self.failure = heartbeat.failure
        self.collectives = Rounds(world)
        self.links = self.collectives.links = FakeLinks(meeting)  # type: ignore[assignment]
        object.__setattr__(world, "all_gather_object", lambda own: meeting.meet(self.collectives._all, own))
        self.units = [make_unit(index) for index in range(memory.pop("num_units", 2))]
        self.shards = [shard_unit(unit, shards.own, per_copy) for unit in self.units]
        numel = self.shards[0].trainable_numel
        kept = memory.get("kept", torch.float32)
        self._memories = [aio_ext.Memory(numel * kept.itemsize) for _ in self.units]
        places = [HostGradients(memory.address, kept) for memory in self._memories]
        squares = RankSquares(
            self.shards, [partial(add_up_shards, SimpleNamespace(collectives=self.collectives, world=world))]
        )
        self.store = GradientStore(places, squares.make_whole)
        self.fence = Fence()
        self.is_holding = False
        made = memory.get("made", torch.float32)

        def bucket(nbytes: int) -> Bucket:
            return Bucket(torch.full((nbytes,), 0xFF, dtype=torch.uint8), None)

        self.exchange = GradientExchange(
            units=self.units,
            shards=self.shards,
            sink=self.store,
            fence=self.fence,  # type: ignore[arg-type]
            memory=ExchangeMemory(
                buckets=[bucket(NUMEL * 4) for _ in range(memory.get("num_buckets", 2))],
                make_bucket=bucket,
                landing=torch.empty(NUMEL * 4 * size, dtype=torch.uint8),
                make_sum=torch.zeros,
            ),
            dtypes=GradientDtypes(made, kept),
            wire=memory.get("wire", AsTheyAre()),
            holds=lambda: self.is_holding,
            links=self.links,
            collectives=self.collectives,
            failure=self.failure,
            meter=Meter(),
        )

    def take(self, index: int, which: int, gradient: torch.Tensor, scale: float = 1.0) -> None:
        unit = self.units[index]
        spec = unit.parameters[which]
        self.exchange.take(unit, spec, gradient.view(spec.shape), scale)

    def backward(self, seed: int) -> None:
        """A gradient of each parameter of each unit, the last unit first."""
        for unit in reversed(self.units):
            for which in range(2):
                self.take(unit.index, which, random(unit.parameters[which], seed + 10 * unit.index + which))
            self.exchange.close(unit)

    def drop(self) -> None:
        """What zero_grad() does, on ranks that may have made nothing."""
        self.exchange.settle(Place("zero_grad()"))
        for unit in self.units:
            self.exchange.forget(unit)

    def outcome(self) -> list[tuple[str, list[float], float, float]]:
        """Of each parameter: its name, the elements that this rank has, the scale, the sum of squares."""
        return [
            (spec.name, self.store.gradients_of(shard).read(spec).view(-1).tolist(), known.scale, known.sum_squares)
            for shard in self.shards
            for spec, known in self.store.of(shard).items()
        ]


class Ranks:
    """All of them; each call runs in a thread for each rank."""

    def __init__(self, size: int = 2, copies: int = 1, **memory: Any) -> None:
        heartbeats = [FakeHeartbeat() for _ in range(size)]
        meeting = Meeting([heartbeat.failure for heartbeat in heartbeats])
        for heartbeat in heartbeats:
            heartbeat.failure.when_known(meeting.wake)
        self.ranks = [Rank(rank, size, copies, meeting, heartbeats[rank], **memory) for rank in range(size)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.ranks:
            rank.failure.record(OffloadError("the end"))
            rank.collectives.stop()

    def all(self, call: Callable[[Rank], object]) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(call, self.ranks))

    def settle(self, at: Place | None = None) -> None:
        self.all(lambda rank: rank.exchange.settle(at))

    def whole(self, index: int, which: int) -> torch.Tensor:
        """A parameter's gradient, put together from the shards of the first copy, flat."""
        found = []
        for rank in self.ranks[: self.ranks[0].collectives.world.shards.size]:
            shard = rank.shards[index]
            found.append(rank.store.read(shard, shard.parameters[which]).view(-1))
        return torch.cat(found)

    def scale(self, index: int, which: int) -> list[float]:
        return [rank.store.of(rank.shards[index])[rank.shards[index].parameters[which]].scale for rank in self.ranks]


def random(spec: ParameterSpec, seed: int) -> torch.Tensor:
    return torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed))


def per_rank(size: int, numel: int = LARGE) -> list[torch.Tensor]:
    """Gradients whose sum depends on the order, by many bits."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) * 10.0**rank for rank in range(size)]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


# Sums.


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_gets_the_mean_of_its_shard_added_up_in_the_order_of_the_ranks(size: int) -> None:
    with Ranks(size) as ranks:
        gradients = per_rank(size)
        for rank, gradient in reversed(list(zip(ranks.ranks, gradients, strict=True))):  # whoever comes first
            rank.take(1, 1, gradient)
            rank.exchange.close(rank.units[1])
        ranks.settle()
        total = torch.zeros(LARGE)
        for gradient in gradients:
            total += gradient
        expected = total / size
        assert torch.equal(ranks.whole(1, 1), expected)
        sums = [rank.store.of(rank.shards[1])[rank.shards[1].parameters[1]].sum_squares for rank in ranks.ranks]
        assert len(set(sums)) == 1 and sums[0] == pytest.approx(float(expected.double().square().sum()), rel=1e-6)
        assert all(rank.fence.waited == ["u1"] for rank in ranks.ranks)
        assert [[unit.name for unit in rank.exchange.complete()] for rank in ranks.ranks] == [["u1"]] * size


def test_a_unit_is_not_complete_while_more_of_it_is_gathered_here_or_on_its_way(ranks: Ranks) -> None:
    first, second = ranks.ranks
    for rank in ranks.ranks:
        rank.take(0, 1, torch.ones(LARGE))
        rank.exchange.close(rank.units[0])
    ranks.settle()
    first.take(0, 1, torch.ones(LARGE))  # of a later backward
    assert list(first.exchange.complete()) == [] and list(second.exchange.complete()) == [second.shards[0]]
    first.exchange.close(first.units[0])
    assert list(first.exchange.complete()) == []
    ranks.settle(Place("here"))  # the second rank has made nothing since
    assert set(first.exchange.complete()) == {first.shards[0]}


def test_replicas_add_up_the_sums_of_their_copies_and_get_the_same_bits() -> None:
    with Ranks(4, copies=2) as ranks:
        gradients = per_rank(4)
        for rank, gradient in zip(ranks.ranks, gradients, strict=True):
            rank.take(0, 1, gradient)
        ranks.settle()
        first, second = (torch.zeros(LARGE) + gradients[start] + gradients[start + 1] for start in (0, 2))
        assert torch.equal(ranks.whole(0, 1), (first + second) / 4)
        ours, replica = (ranks.ranks[index].outcome() for index in (1, 3))
        assert ours == replica


def test_scales_become_that_of_the_first_rank_that_has_a_gradient(ranks: Ranks) -> None:
    first, second = per_rank(2)
    for rank, gradient, scale in zip(ranks.ranks, (first, second), (0.5, 0.125), strict=True):
        rank.take(0, 1, gradient, scale)
    ranks.settle()
    total = torch.zeros(LARGE).add_(first).add_(second, alpha=0.25)
    assert torch.equal(ranks.whole(0, 1), total / 2 * 0.5)
    assert ranks.scale(0, 1) == [0.5, 0.5]


def test_gradients_of_one_backward_with_other_scales_are_brought_to_the_first_one(ranks: Ranks) -> None:
    for rank in ranks.ranks:
        rank.take(0, 0, torch.ones(15), 0.5)
        rank.take(0, 0, torch.ones(15), 0.25)
        rank.take(0, 1, torch.ones(LARGE), 1.0)
    ranks.settle()
    assert ranks.scale(0, 0) == ranks.scale(0, 1) == [0.5, 0.5]
    assert ranks.whole(0, 0).unique().tolist() == [0.75] and ranks.whole(0, 1).unique().tolist() == [1.0]


def test_what_a_rank_does_not_have_counts_as_zero_and_what_nobody_has_is_left_out(ranks: Ranks) -> None:
    one, other = ranks.ranks
    one.take(0, 0, torch.ones(15), 0.5)
    one.take(1, 0, torch.ones(15))  # the other has nothing of this unit
    other.take(0, 1, torch.full((LARGE,), 4.0), 0.25)
    ranks.settle(Place("step 1"))
    assert ranks.whole(0, 0).unique().tolist() == [0.25] and ranks.whole(0, 1).unique().tolist() == [0.5]
    assert ranks.whole(1, 0).unique().tolist() == [0.5]
    for rank in ranks.ranks:
        assert [spec.name for spec in rank.store.of(rank.shards[1])] == ["u1.small"]
        assert [spec.name for spec in rank.store.of(rank.shards[0])] == ["u0.small", "u0.large"]


def test_a_gradient_of_zeros_scaled_by_nothing_hinders_no_other() -> None:
    with Ranks() as ranks:
        for rank, scale in zip(ranks.ranks, (0.0, 0.0), strict=True):
            rank.take(0, 1, torch.ones(LARGE), scale)
        ranks.settle()
        assert ranks.whole(0, 1).unique().tolist() == [0.0] and ranks.scale(0, 1) == [0.0, 0.0]


# Holding.


def test_held_gradients_are_added_up_here_and_sent_once_as_they_are_kept() -> None:
    with Ranks(made=torch.bfloat16) as ranks:
        added = {}
        for rank, gradient in zip(ranks.ranks, per_rank(2), strict=True):
            rank.is_holding = True
            for factor in (1.0, 1.5):
                rank.take(0, 1, (factor * gradient).bfloat16())
                rank.exchange.close(rank.units[0])
            added[rank] = gradient.bfloat16().float() + (1.5 * gradient).bfloat16().float()
            assert rank.links.num_parts == 0 and list(rank.exchange.complete()) == []
        ranks.settle()
        total = torch.zeros(LARGE)
        for gradient in added.values():
            total += gradient
        assert torch.equal(ranks.whole(0, 1), total / 2)
        assert [rank.links.num_parts for rank in ranks.ranks] == [1, 1]


def test_a_rank_that_holds_and_one_that_does_not_understand_each_other() -> None:
    with Ranks(made=torch.bfloat16) as ranks:
        for rank, gradient in zip(ranks.ranks, per_rank(2), strict=True):
            rank.is_holding = rank is ranks.ranks[0]
            rank.take(0, 1, gradient.bfloat16())
        ranks.settle(Place("step 1"))
        first, second = (gradient.bfloat16().float() for gradient in per_rank(2))
        assert torch.equal(ranks.whole(0, 1), (first + second) / 2)


# The format in which they are sent.


def test_rounded_gradients_are_added_up_in_fp32_the_own_part_as_well() -> None:
    with Ranks(wire=Rounded()) as ranks:
        gradients = per_rank(2)
        for rank, gradient in zip(ranks.ranks, gradients, strict=True):
            rank.take(0, 1, gradient)
        ranks.settle()
        first, second = (gradient.bfloat16().float() for gradient in gradients)
        assert torch.equal(ranks.whole(0, 1), (first + second) / 2)


def test_held_gradients_are_added_up_in_fp32_and_sent_rounded() -> None:
    with Ranks(made=torch.bfloat16, wire=Rounded()) as ranks:
        sent = []
        for rank, gradient in zip(ranks.ranks, per_rank(2), strict=True):
            rank.is_holding = rank is ranks.ranks[0]
            for factor in (1.0, 1.5) if rank.is_holding else (1.0,):
                rank.take(0, 1, (factor * gradient).bfloat16())
            held = gradient.bfloat16().float() + (1.5 * gradient).bfloat16().float()
            sent.append((held if rank.is_holding else gradient).bfloat16().float())
        ranks.settle(Place("step 1"))
        assert torch.equal(ranks.whole(0, 1), (sent[0] + sent[1]) / 2)


@pytest.mark.parametrize("numel", [1, (1 << 18) - 1, (1 << 19) + 5])
def test_gradients_are_rounded_in_their_own_memory_piece_by_piece(numel: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    flat[0] = math.nan
    expected, address = flat.bfloat16(), flat.data_ptr()
    packed = Rounded().pack(flat, 1, ())
    assert packed.data_ptr() == address and torch.equal(packed.view(torch.int16), expected.view(torch.int16))


def test_what_is_in_sixteen_bits_goes_as_it_is() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        flat = torch.ones(8, dtype=dtype)
        assert Rounded().pack(flat, 1, ()) is flat and Rounded().nbytes(8, dtype) == 16


def through_8_bits(flat: torch.Tensor, num_parts: int = 1, present: Collection[slice] | None = None) -> torch.Tensor:
    """What the ranks that get the parts add up."""
    numel, dtype, address = flat.numel() // num_parts, flat.dtype, flat.data_ptr()
    packed = In8Bits().pack(flat, num_parts, [slice(0, flat.numel())] if present is None else present)
    assert packed.data_ptr() == address and packed.nbytes == num_parts * In8Bits().nbytes(numel, dtype)
    totals = [torch.zeros(numel) for _ in range(num_parts)]
    for total, part in zip(totals, packed.split(In8Bits().nbytes(numel, dtype)), strict=True):
        In8Bits().add(total, part, dtype, 0, 1.0)
    return torch.cat(totals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "num_parts"), [(8, 1), (24, 3), (2 * 1040, 2)])
def test_gradients_in_8_bits_are_off_by_less_than_a_step_of_their_block(
    dtype: torch.dtype, blocks: int, num_parts: int
) -> None:
    flat = torch.randn(blocks * ALIGNMENT, generator=torch.Generator().manual_seed(0)).to(dtype)
    flat[:ALIGNMENT] = 0
    exact = flat.clone().float()
    found = through_8_bits(flat, num_parts)
    steps = exact.view(-1, ALIGNMENT).abs().amax(1) / 127
    assert ((found - exact).view(-1, ALIGNMENT).abs().amax(1) <= steps * (1 + 1e-5)).all()
    assert not found[:ALIGNMENT].any()


def test_the_mean_of_gradients_in_8_bits_is_exact() -> None:
    numel, generator = 64 * ALIGNMENT, torch.Generator().manual_seed(0)
    direction, total = torch.randn(numel, generator=generator), torch.zeros(numel)
    exact, steps = torch.zeros(numel), torch.zeros(numel)
    for _ in range(400):
        gradient = direction + 0.01 * torch.randn(numel, generator=generator)
        exact += gradient
        steps += (gradient.view(-1, ALIGNMENT).abs().amax(1) / 127).repeat_interleave(ALIGNMENT).square() / 4
        total += through_8_bits(gradient.clone())
    scores = (total - exact) / steps.sqrt()  # at most standard normal
    assert abs(scores.mean()) * numel**0.5 < 4.5 and 0.4 < scores.var() < 1


def test_gradients_in_8_bits_do_not_depend_on_where_a_unit_is_cut_nor_on_what_nobody_has() -> None:
    gradients = torch.randn(6 * ALIGNMENT, generator=torch.Generator().manual_seed(0))
    whole = through_8_bits(gradients.clone())
    assert torch.equal(through_8_bits(gradients.clone(), 3), whole)
    inner, numel = gradients[ALIGNMENT : 3 * ALIGNMENT - 17], 2 * ALIGNMENT - 17
    flat = torch.full((4 * ALIGNMENT,), math.nan)  # whatever is there
    flat[ALIGNMENT : ALIGNMENT + numel] = inner
    found = through_8_bits(flat, 1, [slice(ALIGNMENT, ALIGNMENT + numel)])
    assert torch.equal(found[ALIGNMENT : 2 * ALIGNMENT], whole[ALIGNMENT : 2 * ALIGNMENT])
    assert not found[:ALIGNMENT].any() and not found[ALIGNMENT + numel :].any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_in_8_bits_that_is_not_finite_shows(bad: float) -> None:
    flat = torch.ones(2 * ALIGNMENT)
    flat[3] = bad
    found = through_8_bits(flat)
    assert not found[:ALIGNMENT].isfinite().any() and (found[ALIGNMENT:] == 1).all()


# Buckets.


def test_a_bucket_beyond_the_plan_is_made_only_where_none_can_come_back(recwarn: pytest.WarningsRecorder) -> None:
    with Ranks(num_buckets=1) as ranks:
        ranks.all(lambda rank: rank.backward(1))  # one after the other, through the same one
        ranks.settle()
        ranks.all(Rank.drop)
        assert not recwarn.list
        for rank in ranks.ranks:
            rank.take(0, 0, torch.ones(15))
            with pytest.warns(UserWarning, match="unit u1 has gradients while 1 others wait for theirs"):
                rank.take(1, 0, torch.ones(15))
            assert len(rank.exchange._buckets) == 2
        ranks.settle()
        assert ranks.whole(0, 0).unique().tolist() == ranks.whole(1, 0).unique().tolist() == [1.0]


def test_nobody_waits_for_a_bucket_that_would_be_too_small(ranks: Ranks) -> None:
    rank = ranks.ranks[0]
    tiny = Bucket(torch.empty(NUMEL, dtype=torch.uint8), None)
    rank.exchange._buckets = [rank.exchange._buckets[0], tiny]
    rank.exchange._sent.add(tiny)
    rank.take(0, 0, torch.ones(15))
    with pytest.warns(UserWarning, match="unit u1 has gradients while 1 others wait for theirs"):
        rank.take(1, 0, torch.ones(15))


def test_the_smallest_bucket_that_fits_is_taken(ranks: Ranks) -> None:
    rank = ranks.ranks[0]
    large, small = (Bucket(torch.empty(NUMEL * width, dtype=torch.uint8), None) for width in (8, 4))
    tiny = Bucket(torch.empty(NUMEL, dtype=torch.uint8), None)
    rank.exchange._buckets = [large, tiny, small]
    rank.take(0, 0, torch.ones(15))
    assert rank.exchange._open == {0: small}


def test_a_wait_for_a_bucket_ends_with_the_first_failure() -> None:
    with Ranks(num_buckets=1) as ranks:
        rank = ranks.ranks[0]
        rank.take(1, 0, torch.ones(15))
        rank.exchange.close(rank.units[1])  # the other rank never comes
        taking = threading.Thread(target=rank.failure.record, args=(StorageIOError("planted"),))
        taking.start()
        with pytest.raises(StorageIOError, match="planted"):
            rank.take(0, 0, torch.ones(15))
        taking.join()


def test_what_is_forgotten_before_it_is_sent_never_goes(ranks: Ranks) -> None:
    for rank in ranks.ranks:
        rank.take(0, 1, torch.ones(LARGE))
        rank.exchange.forget(rank.units[0])
        assert rank.exchange._open == {}
        rank.take(0, 0, torch.ones(15))
    ranks.settle()
    for rank in ranks.ranks:
        assert [spec.name for spec in rank.store.of(rank.shards[0])] == ["u0.small"]


# Where ranks meet.


def test_ranks_meet_once_for_what_they_have_made_and_at_each_named_place(ranks: Ranks) -> None:
    names: list[list[str]] = [[] for _ in ranks.ranks]

    def watch(rank: Rank) -> None:
        submit = rank.collectives.submit

        def tell(kind: Kind, number: int, name: str, own: Any, *facts: Any) -> Any:
            names[rank.collectives.world.rank].append(name)
            return submit(kind, number, name, own, *facts)

        rank.collectives.submit = tell  # type: ignore[method-assign]

    for rank in ranks.ranks:
        watch(rank)
    ranks.all(lambda rank: rank.take(0, 0, torch.ones(15)))
    ranks.settle()
    ranks.settle()  # nothing is new
    ranks.settle(Place("step 1"))
    ranks.all(lambda rank: rank.exchange.restored())
    ranks.settle()
    expected = ["the gradients of unit u0", "the end of backward", "sums of squares", "step 1", "step 1"]
    assert names == [[*expected, "the end of backward", "sums of squares"]] * 2


def test_what_a_checkpoint_brought_gets_the_norm_of_all_ranks(ranks: Ranks) -> None:
    ranks.all(lambda rank: rank.backward(1))
    ranks.settle()
    before = [rank.outcome() for rank in ranks.ranks]
    for rank in ranks.ranks:
        for shard in rank.shards:  # as it is loaded: this rank's own sums
            for known in rank.store.of(shard).values():
                known.sum_squares, known.own_squares = known.own_squares, math.nan
        rank.exchange.restored()
    ranks.settle()
    assert [rank.outcome() for rank in ranks.ranks] == before


def test_ranks_at_different_places_end_with_an_error_that_names_them(ranks: Ranks) -> None:
    def settle(rank: Rank) -> str:
        with pytest.raises(RankError) as caught:
            rank.exchange.settle(Place(f"step {rank.collectives.world.rank}"))
        return str(caught.value)

    for message in ranks.all(settle):
        assert "rank 0 at step 0, rank 1 at step 1" in message


def test_gathers_come_before_exchanges_and_these_before_an_error() -> None:
    choose = Rounds._choose
    gather, exchange, meet = (kind << 32 | 7 for kind in (Kind.WEIGHTS, Kind.GRADIENTS, Kind.MESSAGE))
    with Ranks(1) as ranks:
        collectives = ranks.ranks[0].collectives
        assert choose(collectives, [meet, exchange, gather]) == gather
        assert choose(collectives, [meet, exchange, exchange + 1]) == exchange


# Interrupts.


def _outcomes_after(
    interrupted: Callable[[Callable[[], object]], bool], call: Callable[[Rank], object]
) -> tuple[bool, list[Any]]:
    """One rank is interrupted in ``call``, and both begin anew then; what they have in the end."""
    with Ranks(num_buckets=2) as ranks:
        one, other = ranks.ranks
        came = interrupted(lambda: call(one))
        call(other)
        ranks.all(Rank.drop)
        ranks.all(lambda rank: rank.backward(1))
        ranks.settle(Place("step 1"))
        for rank in ranks.ranks:
            assert rank.exchange._open == {} and rank.exchange._sent == set() and len(rank.exchange._buckets) == 2
        return came, [rank.outcome() for rank in ranks.ranks]


def test_an_interrupt_at_any_line_of_a_backward_loses_no_bucket_and_counts_nothing_twice() -> None:
    def backward(rank: Rank) -> None:
        for index, which in ((1, 0), (1, 1), (0, 1)):
            rank.take(index, which, torch.ones(rank.units[index].parameters[which].numel), 0.5)
            rank.take(index, which, torch.ones(rank.units[index].parameters[which].numel), 0.25)
        rank.exchange.close(rank.units[1])
        rank.exchange.close(rank.units[0])

    _, expected = _outcomes_after(lambda call: bool(call()), lambda rank: None)

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        _, found = _outcomes_after(interrupted, backward)
        assert found == expected

    assert at_every_line("/offload/", run, once=True) > 50


def test_an_interrupt_at_any_line_while_gradients_are_dropped_keeps_none_of_them() -> None:
    _, expected = _outcomes_after(lambda call: bool(call()), lambda rank: None)

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        with Ranks() as ranks:
            ranks.all(lambda rank: rank.backward(7))
            ranks.settle()
            one = ranks.ranks[0]
            interrupted(lambda: [one.exchange.forget(unit) for unit in one.units])
            ranks.all(Rank.drop)
            ranks.all(lambda rank: rank.backward(1))
            ranks.settle(Place("step 1"))
            assert [rank.outcome() for rank in ranks.ranks] == expected

    assert at_every_line("/offload/", run, once=True) > 5


def test_ranks_that_were_all_interrupted_while_they_met_wait_for_each_other_when_they_settle_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def be_interrupted(rank: Rank) -> None:
        submit = rank.collectives.submit

        def submit_what_is_interrupted(kind: Kind, *what: Any) -> Operation:
            operation = submit(kind, *what)
            operation.wait = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
            return operation

        rank.backward(1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rank.collectives, "submit", submit_what_is_interrupted)
            rank.exchange.settle()

    with Ranks() as ranks:
        be_interrupted(ranks.ranks[0])
        with ThreadPoolExecutor(1) as pool:
            settled = pool.submit(ranks.ranks[0].exchange.settle)
            be_interrupted(ranks.ranks[1])
            ranks.ranks[1].exchange.settle()
            settled.result()
        for rank in ranks.ranks:
            assert [name for name, *_ in rank.outcome()] == ["u0.small", "u0.large", "u1.small", "u1.large"]


def test_an_interrupt_at_any_line_where_ranks_meet_gives_the_same_or_an_error_on_all() -> None:
    def go_on(rank: Rank) -> Any:
        try:
            rank.exchange.settle(Place("step 1"))
        except OffloadError as error:
            return error
        return rank.outcome()

    with Ranks() as ranks:
        ranks.all(lambda rank: rank.backward(1))
        expected = ranks.all(go_on)
    num_errors = 0

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        nonlocal num_errors
        with Ranks() as ranks, ThreadPoolExecutor(1) as pool:
            ranks.all(lambda rank: rank.backward(1))
            one, other = ranks.ranks
            first = pool.submit(go_on, other)
            if interrupted(lambda: one.exchange.settle(Place("step 1"))):
                later = pool.submit(lambda: (first.result(), other.exchange.settle(Place("step 2"))))
                found = go_on(one)
                if isinstance(found, RankError):
                    num_errors += 1
                    with contextlib.suppress(RankError):
                        later.result()
                else:
                    assert found == expected[0] and first.result() == expected[1]
                    one.exchange.settle(Place("step 2"))
                    later.result()
            else:
                assert [one.outcome(), first.result()] == expected

    assert at_every_line("tiers/gradients/exchange.py", run, once=True) > 8
    assert num_errors
