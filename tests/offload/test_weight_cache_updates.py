"""Updates and the uses of the weight cache that wait for them."""

from __future__ import annotations

import pytest
from cache_rig import FOREVER_S, Call, Rig, look
from cache_rig import a_deadline as a_deadline

from offload import waiting
from offload.tiers.weights import cache


def test_a_use_waits_for_the_update_of_its_unit_and_no_other() -> None:
    rig = Rig("ab", num_slots=2)
    rig.use("ab")
    rig.end_step("ab")
    uses = [Call(lambda: look(rig.acquire("a"))), Call(lambda: rig.weights.fence.wait(rig.units["a"]))]
    everything = Call(rig.weights.fence.wait_all)
    for use in (*uses, everything):
        rig.looks.wait(use)
    rig.update("a", "x")
    assert [use.result() for use in uses] == ["x", None]
    rig.looks.wait(everything)
    rig.update("b", "y")
    everything.result()
    assert rig.told() == ["read a", "use a", "read b", "use b", *sorted(("write a", "use a"), reverse=True), "write b"]


def a_forward_under_way() -> Rig:
    """Three slots hold a, which compute has, then b and c, which it needs next; d waits for its update."""
    rig = Rig("abcd", num_slots=3)
    rig.use("abcddcba")
    rig.end_step("d")
    rig.acquire("a")
    rig.told()
    return rig


def test_an_update_leaves_a_forward_the_slots_that_it_needs_sooner() -> None:
    rig = a_forward_under_way()
    update = Call(lambda: rig.update("d", "x"))
    rig.looks.wait(update)
    rig.looks.wait(update)
    assert rig.told() == []  # b and c are there, and not in use
    rig.release("a")  # which is needed last, now
    update.result()
    rig.use("bc")
    assert rig.told() == ["evict a", "read d", "write d", "use b", "use c"]


def test_a_forward_fetches_ahead_while_an_update_leaves_it_its_slots() -> None:
    rig = Rig("abcde", num_slots=3, prefetch=True)
    rig.end_step("e")
    rig.acquire("a")
    update = Call(lambda: rig.update("e", "x"))
    rig.looks.wait(update)
    assert rig.told() == ["read a", "read b", "read c", "use a"]
    rig.release("a")
    assert rig.told() == ["evict a", "read d"]  # which is needed before e
    rig.looks.wait(update)
    rig.use("b")
    update.result()
    assert rig.told() == ["use b", "evict b", "read e", "write e"]


@pytest.mark.parametrize("waits", ["a use", "a borrower", "all updates"])
def test_an_update_evicts_what_it_must_as_soon_as_a_use_waits_for_one(waits: str) -> None:
    rig = a_forward_under_way()
    update = Call(lambda: rig.update("d", "x"))
    rig.looks.wait(update)
    assert rig.told() == []

    def wait() -> str:
        if waits == "a borrower":
            with rig.borrow("d") as address:
                return look(address)
        if waits == "all updates":
            rig.weights.fence.wait_all()
            return rig.stored("d")
        pin = rig.weights.pin(rig.units["d"])
        pin.take()
        return look(pin.place.address)

    use = Call(wait)
    update.result()
    assert use.result() == "x"
    assert rig.told() == ["evict c" if waits != "a use" else "evict b", "read d", "write d"]


def test_an_update_is_woken_by_the_use_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (waiting, cache):
        monkeypatch.setattr(module, "_SLICE_S", 2 * FOREVER_S)  # it does not look by itself
    rig = a_forward_under_way()
    update = Call(lambda: rig.update("d", "x"))
    rig.looks.wait_once(update)
    Call(lambda: rig.weights.fence.wait(rig.units["d"])).result()
    update.result()
    assert rig.told() == ["evict c", "read d", "write d"]


def test_an_update_evicts_what_it_must_before_the_forward_begins() -> None:
    rig = Rig("abcd", num_slots=3)
    rig.use("abcddcba")
    rig.end_step("d")
    rig.told()
    with rig.borrow("a"):  # looks in from outside of the model's order: that is no forward
        rig.update("d", "x")  # in this thread: it need not wait
    assert rig.told() == ["evict c", "read d", "write d"]


def test_a_fetch_for_an_update_ahead_of_its_turn_evicts_nothing_that_is_needed_sooner() -> None:
    rig = a_forward_under_way()
    rig.weights.try_fetch(rig.units["d"])
    assert rig.told() == []
    rig.release("a")
    rig.weights.try_fetch(rig.units["d"])
    rig.weights.try_fetch(rig.units["d"])  # it is on its way
    rig.update("d", "x")
    assert rig.told() == ["evict a", "read d", "write d"]


def test_a_use_that_waits_for_a_place_gets_it_before_those_that_come_later() -> None:
    rig = Rig("abcd", num_slots=2, prefetch=True, may_add_places=False)  # as where copies to a device are made
    rig.acquire("a")
    rig.acquire("b")
    use = Call(lambda: rig.acquire("c"))
    rig.looks.wait(use)
    rig.release("a")
    use.result()
    rig.release("b")
    assert rig.told() == ["read a", "read b", "use a", "use b", "evict a", "read c", "use c", "evict b", "read d"]


def test_prefetch_stops_at_a_unit_whose_update_is_not_done() -> None:
    rig = Rig("abc", num_slots=3, prefetch=True)
    rig.end_step("b")
    rig.use("a")
    assert rig.told() == ["read a", "use a"]
    rig.update("b", "b")
    rig.use("b")
    assert rig.told() == ["read b", "write b", "read c", "use b"]
