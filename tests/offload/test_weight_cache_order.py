"""The order of fetches and evictions of the weight cache."""

from __future__ import annotations

import warnings

import pytest
from cache_rig import Call, Rig, look, taught
from cache_rig import a_deadline as a_deadline

from offload.tiers.weights.pin import Purpose


def test_prefetch_runs_ahead_as_far_as_the_slots_and_a_second_step_fetches_what_the_first_has_left() -> None:
    rig = Rig("abc", num_slots=2, prefetch=True)
    rig.use("abccba")
    assert rig.told() == [
        *("read a", "read b", "use a"),  # two slots: b comes while a is in use
        *("evict a", "read c", "use b"),  # a is needed last, and released
        *("use c", "use c"),
        *("evict c", "read a", "use b"),
        *("use a",),
    ]
    rig.end_step()
    rig.use("abccba")
    assert rig.told() == [
        *("use a", "evict a", "read c", "use b"),
        *("use c", "use c"),
        *("evict c", "read a", "use b", "use a"),
    ]


def test_the_order_of_the_last_step_is_what_prefetch_expects_of_the_next_one() -> None:
    rig = Rig("abcd", num_slots=2, prefetch=True)
    rig.weights.cache._order = taught("dbac")  # nothing like forward and backward
    rig.use("dbac")
    assert rig.told() == [
        *("read d", "read b", "use d"),
        *("evict d", "read a", "use b"),
        *("evict b", "read c", "use a"),
        *("evict a", "read d", "use c"),
        *("evict c", "read b"),  # for the next step
    ]


def test_without_prefetch_each_unit_is_read_when_it_is_used() -> None:
    rig = Rig("abc", num_slots=2)
    rig.use("abccba")
    assert rig.told() == [
        *("read a", "use a", "read b", "use b"),
        *("evict a", "read c", "use c", "use c"),
        *("use b", "evict c", "read a", "use a"),  # c and b are as good as each other: c will be needed last
    ]


@pytest.mark.parametrize(
    ("order", "evicted"),
    [
        ("abcab", "b"),  # after c comes a, so b is needed last, though a was used before it
        ("abcba", "a"),
        ("abcbbbb", "a"),
        ("abcaaaa", "b"),
    ],
)
def test_the_unit_that_is_needed_last_is_evicted(order: str, evicted: str) -> None:
    rig = Rig("abc", num_slots=2)
    rig.weights.cache._order = taught(order)
    rig.use("abc")
    assert rig.told() == ["read a", "use a", "read b", "use b", f"evict {evicted}", "read c", "use c"]


@pytest.mark.parametrize("purpose", [Purpose.COMPUTE, Purpose.LOOK], ids=["compute", "a borrower"])
def test_a_pinned_unit_is_never_evicted(purpose: Purpose) -> None:
    rig = Rig("abc", num_slots=2)
    pin = rig.weights.pin(rig.units["a"], purpose)
    pin.take()
    address = pin.place.address
    rig.use("bcb")  # of a and b, c would evict a, which is needed last
    assert look(address) == "a"
    assert rig.told() == ["read a", "read b", "use b", "evict b", "read c", "use c", "evict c", "read b", "use b"]
    pin.release()
    rig.use("c")
    assert rig.told() == ["evict a", "read c", "use c"]


def test_a_wrong_prediction_costs_one_fetch_on_demand() -> None:
    rig = Rig("abcd", num_slots=2, prefetch=True)
    rig.use("a")
    assert rig.told() == ["read a", "read b", "use a", "evict a", "read c"]
    rig.use("d")  # b and c are skipped
    assert rig.told() == ["evict b", "read d", "use d"]
    rig.use("dc")  # and from here on it goes as expected
    assert rig.told() == ["use d", "evict d", "read b", "use c", "evict c", "read a"]


def test_a_unit_that_is_used_again_before_it_is_evicted_is_not_read_again() -> None:
    rig = Rig("ab", num_slots=2, prefetch=True)
    rig.use("abba")
    rig.end_step()
    rig.use("abba")
    assert rig.told() == ["read a", "read b", *("use a", "use b", "use b", "use a") * 2]


def test_permanent_units_take_no_place() -> None:
    rig = Rig("abc", num_slots=1, resident="ac", prefetch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second, third = rig.acquire("a"), rig.acquire("b"), rig.acquire("c")
    assert (look(first), look(second), look(third)) == ("a", "b", "c")
    assert first == rig.homes[0].weights.address
    for name in "cba":
        rig.release(name)
    assert rig.told() == ["read b", "use a", "use b", "use c"]  # b comes while a is in use


def test_where_all_weights_are_resident_nothing_moves_and_a_use_still_waits_for_its_update() -> None:
    rig = Rig("ab", num_slots=0, resident="ab", prefetch=True)
    rig.use("abba")
    rig.end_step("ab")
    use = Call(lambda: look(rig.acquire("b")))
    rig.looks.wait(use)
    rig.update("a", "x")
    rig.looks.wait(use)
    rig.update("b", "y")
    assert use.result() == "y"
    assert rig.told() == ["use a", "use b", "use b", "use a", "use b"]
