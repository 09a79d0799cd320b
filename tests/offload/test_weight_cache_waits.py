"""Waits for the weight cache: who is woken, and those that do not end by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_rig import FOREVER_S, Call, Rig, beside, taught
from cache_rig import a_deadline as a_deadline

from offload import waiting
from offload.errors import WaitTimeout
from offload.tiers.weights import cache
from swapper import StorageIOError


@pytest.mark.parametrize("wanted", ["a place", "an update", "a place for an update", "a hand-over", "a lent place"])
def test_who_waits_is_woken_by_what_he_waits_for(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (waiting, cache):
        monkeypatch.setattr(module, "_SLICE_S", 2 * FOREVER_S)  # he does not look by himself
    rig = Rig("ab", num_slots=1, may_add_places=False)
    a, b = rig.units.values()
    rig.hold("a")
    if wanted == "an update":
        rig.weights.shadows.end_hold(a)
        rig.end_step("b")
        call = Call(lambda: rig.acquire("b"))
        rig.looks.wait_once(call)
        rig.update("b", "x")
    elif wanted == "a hand-over":
        rig.acquire("a")
        call = Call(lambda: rig.lend("a"))
        rig.looks.wait_once(call)
        rig.release("a")
    elif wanted == "a lent place":
        slot = rig.lend("a")
        call = Call(lambda: rig.acquire("b"))
        rig.looks.wait_once(call)
        rig.weights.shadows.give_back(a, slot)
    else:
        call = Call(lambda: rig.acquire("b") if wanted == "a place" else rig.update("b", "x"))
        rig.looks.wait_once(call)
        rig.weights.shadows.end_hold(a)
    call.result()
    assert bool(rig.weights.cache.entries[b.index].pins) == (wanted not in ("a hand-over", "a place for an update"))


# Waits that do not end.


def test_a_wait_for_a_place_that_takes_too_long_names_the_unit_and_who_has_the_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig("ab", num_slots=1, may_add_places=False)
    rig.acquire("a")
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeout, match=r"a place for unit b \(places hold a with 1 uses\)"):
        rig.acquire("b")
    rig.release("a")
    rig.use("b")  # it is not pinned
    assert rig.told() == ["read a", "use a", "evict a", "read b", "use b"]


def test_a_wait_for_an_update_that_takes_too_long_names_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("ab", num_slots=1)
    rig.end_step("b")
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeout, match=r"the update of unit b \(places hold nothing\)"):
        rig.acquire("b")
    with pytest.raises(WaitTimeout, match="the update of unit b"):
        rig.weights.fence.wait_all()
    assert rig.told() == []


@pytest.mark.parametrize("ask", [Rig.lend, Rig.flip, Rig.leave])
def test_a_wait_for_the_use_of_a_unit_that_takes_too_long_names_the_unit(
    ask: Callable[[Rig, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig("a", num_slots=1)
    rig.acquire("a")
    assert rig.weights.shadows.hold(rig.units["a"])
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeout, match="the use of unit a"):
        ask(rig, "a")


@pytest.mark.parametrize("wanted", ["a place", "an update", "a place for an update", "a hand-over"])
def test_a_failure_of_another_thread_ends_a_wait(wanted: str) -> None:
    rig = Rig("ab", num_slots=1, may_add_places=False)
    rig.hold("a")
    rig.acquire("a")
    wait = {
        "a place": lambda: rig.acquire("b"),
        "an update": lambda: rig.acquire("b"),
        "a place for an update": lambda: rig.update("b", "x"),
        "a hand-over": lambda: rig.lend("a"),
    }[wanted]
    if wanted == "an update":
        rig.end_step("b")
    call = Call(wait)
    rig.looks.wait(call)
    rig.failure.record(StorageIOError("write of another unit: EIO"))
    with pytest.raises(StorageIOError, match="another unit"):
        call.result()
    assert rig.told() == ["read a", "use a", "use a"]


def test_a_write_back_that_failed_is_raised_where_its_place_is_wanted_again() -> None:
    rig = Rig("ab", num_slots=1)
    rig.end_step("a")
    rig.store.keep("write a")
    rig.update("a", "x")
    rig.store.end("write a", StorageIOError("write of a: EIO"))
    with pytest.raises(StorageIOError, match="write of a"):
        rig.acquire("b")


def test_a_use_that_raises_what_fetching_ahead_has_met_leaves_its_unit_unpinned() -> None:
    rig = Rig("abc", num_slots=2, prefetch=True, may_add_places=False)
    rig.weights.cache._order = taught("acb")
    rig.end_step("b")
    rig.store.keep("write b")
    rig.update("b", "x")
    rig.store.end("write b", StorageIOError("write of b: EIO"))
    with pytest.raises(StorageIOError, match="write of b"):
        rig.acquire("a")  # c is fetched ahead, in the place of b, which is needed last
    assert "a with 0 uses" in rig.weights.cache.held()


def test_drain_waits_for_every_transfer_whatever_becomes_of_it() -> None:
    rig = Rig("abc", num_slots=3)
    beside_write, read, write = "write beside a", "read b", "write c"
    for event in (beside_write, read, write):
        rig.store.keep(event)
    beside(rig, "a", "x")
    rig.weights.try_fetch(rig.units["b"])
    rig.end_step("c")
    rig.update("c", "y")
    drain = Call(rig.weights.drain)
    for event in (read, write, beside_write):
        assert rig.store.begun(event).waited_for.wait(FOREVER_S)
        assert not drain.over
        rig.store.end(event, StorageIOError(event))
    drain.result()
