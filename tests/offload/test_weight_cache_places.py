"""Compute that holds every place of the weight cache, and a unit that leaves for a higher tier."""

from __future__ import annotations

import warnings

import pytest
from cache_rig import FOREVER_S, PART_BYTES, Call, Rig, fill, look
from cache_rig import a_deadline as a_deadline


def test_compute_that_holds_every_place_gets_one_more_with_a_warning_that_names_the_units() -> None:
    rig = Rig("abc", num_slots=2)
    addresses = [rig.acquire("a"), rig.acquire("b")]
    with pytest.warns(UserWarning, match=r"unit c is called from inside of units .* \(a, b\)") as told:
        addresses.append(rig.acquire("c"))
    assert len(told) == 1
    assert [look(address) for address in addresses] == ["a", "b", "c"] and len(set(addresses)) == 3
    assert rig.weights.added_bytes == 2 * PART_BYTES
    for name in "cba":
        rig.release(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the place stays
        for name in "cba":
            rig.acquire(name)
    assert rig.told() == ["read a", "use a", "read b", "use b", "read c", "use c", "use c", "use b", "use a"]


def test_a_place_that_another_than_compute_holds_is_waited_for(recwarn: pytest.WarningsRecorder) -> None:
    rig = Rig("ab", num_slots=1)
    with rig.borrow("a") as address:
        use = Call(lambda: look(rig.acquire("b")))
        rig.looks.wait(use)
        rig.looks.wait(use)
        assert look(address) == "a"
    assert use.result() == "b"
    assert rig.told() == ["read a", "evict a", "read b", "use b"]
    assert not recwarn.list and rig.weights.added_bytes == 0


# A unit that leaves for a higher tier.


def test_a_unit_that_leaves_gives_its_place_back_when_nothing_uses_it_and_is_not_fetched_any_more() -> None:
    rig = Rig("ab", num_slots=1, prefetch=True)
    rig.store.keep("write a")
    with rig.borrow("a", change=True) as address:
        fill(address, "x")
        leave = Call(lambda: rig.leave("a"))
        rig.looks.wait(leave)
    assert rig.store.begun("write a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    assert rig.told() == ["read a", "write a"]
    rig.store.end("write a")
    leave.result()
    assert rig.told() == ["evict a"]
    rig.use("bb")  # of which the next uses would be: a, a
    assert rig.told() == ["read b", "use b", "use b"]
    with pytest.raises(RuntimeError, match="unit a has no place in this tier"):
        rig.acquire("a")


def test_a_unit_that_leaves_without_having_a_place_is_just_not_fetched() -> None:
    rig = Rig("ab", num_slots=2, prefetch=True)
    rig.leave("a")
    rig.use("bb")
    assert rig.told() == ["read b", "use b", "use b"]
