"""Speculative updates over the weight cache: units held, slots lent, weights beside the current ones."""

from __future__ import annotations

import threading

import pytest
from cache_rig import FOREVER_S, Call, Rig, beside, fill, look
from cache_rig import a_deadline as a_deadline


def test_a_unit_that_is_not_in_use_is_not_held() -> None:
    rig = Rig("ab", num_slots=2, resident="b")
    assert not rig.weights.shadows.hold(rig.units["a"])  # absent
    rig.use("a")
    assert not rig.weights.shadows.hold(rig.units["a"])  # released
    rig.acquire("b")
    assert not rig.weights.shadows.hold(rig.units["b"])  # resident
    rig.acquire("a")
    assert rig.weights.shadows.hold(rig.units["a"])


def test_a_unit_that_is_held_stays_until_the_hold_ends() -> None:
    rig = Rig("ab", num_slots=1)
    rig.hold("a")
    use = Call(lambda: look(rig.acquire("b")))
    rig.looks.wait(use)
    assert rig.told() == ["read a", "use a"]
    rig.weights.shadows.end_hold(rig.units["a"])
    assert use.result() == "b"
    assert rig.told() == ["evict a", "read b", "use b"]


def test_weights_are_brought_in_for_an_speculative_update_in_place_of_the_unit_that_is_needed_last() -> None:
    rig = Rig("abc", num_slots=2, may_add_places=False)
    rig.use("abccba")
    rig.end_step()
    rig.use("abcc")  # in backward: b and a come next, and c after them
    rig.told()
    rig.weights.shadows.bring(rig.units["a"])
    assert rig.told() == ["evict c", "read a"]
    slot = rig.lend("a")
    assert look(slot.address) == "a"
    use = Call(lambda: look(rig.acquire("a")))  # the current weights, in the other slot
    assert use.result() == "a" and rig.told() == ["evict b", "read a", "use a"]


def test_weights_that_are_here_are_not_read_again_for_an_speculative_update() -> None:
    rig = Rig("ab", num_slots=1, may_add_places=False)
    rig.use("a")
    rig.weights.shadows.bring(rig.units["a"])
    use = Call(lambda: rig.acquire("b"))
    rig.looks.wait(use)  # the place is held
    rig.weights.shadows.end_hold(rig.units["a"])
    use.result()
    assert rig.told() == ["read a", "use a", "evict a", "read b", "use b"]


def test_a_slot_is_lent_when_the_last_use_is_over_and_the_unit_is_absent_from_then_on() -> None:
    rig = Rig("a", num_slots=2)
    rig.hold("a")
    address = rig.acquire("a")
    lend = Call(lambda: rig.lend("a"))
    rig.looks.wait(lend)
    assert look(address) == "a"
    rig.release("a")
    slot = lend.result()
    assert slot.address == address and look(address) == "a"
    fill(slot.address, "x")
    assert look(rig.acquire("a")) == "a"  # the current weights, from the store, in another slot
    assert rig.told() == ["read a", "use a", "use a", "read a", "use a"]


def test_a_unit_that_is_used_again_while_its_hand_over_waits_for_a_write_is_handed_over_after_that_use() -> None:
    rig = Rig("ab", num_slots=1)
    rig.acquire("a")
    rig.store.keep("write a")
    with rig.borrow("a", change=True) as address:
        fill(address, "x")
    assert rig.weights.shadows.hold(rig.units["a"])
    rig.release("a")
    lend = Call(lambda: rig.lend("a"))  # nothing else uses it, but for the write in flight
    assert rig.store.begun("write a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()

    with rig.borrow("a") as address:  # while the lock is let go
        rig.store.end("write a")
        rig.looks.wait(lend)
        assert look(address) == "x"
        use = Call(lambda: look(rig.acquire("b")))  # wants the slot, too
        rig.looks.wait(use)
        assert look(address) == "x" and not lend.over
        assert rig.told() == ["read a", "use a", "write a"]
    slot = lend.result()
    assert slot.address == address and look(slot.address) == "x"
    rig.looks.wait(use)  # lent places come back: none is added for it
    rig.weights.shadows.give_back(rig.units["a"], slot)
    assert use.result() == "b"
    assert rig.told() == ["write beside a", "read b", "use b"]
    assert rig.stored("a") == "x" and rig.weights.added_bytes == 0


@pytest.mark.parametrize("in_the_way", ["a use", "a write"])
def test_a_hand_over_that_is_wanted_no_more_ends_and_lets_the_unit_go(in_the_way: str) -> None:
    rig = Rig("ab", num_slots=1)
    rig.acquire("a")
    rig.store.keep("write a")
    with rig.borrow("a", change=True) as address:
        fill(address, "x")
    assert rig.weights.shadows.hold(rig.units["a"])
    wanted = [True]
    if in_the_way == "a write":
        rig.release("a")
    lend = Call(lambda: rig.weights.shadows.lend(rig.units["a"], [], lambda: wanted[0]))
    if in_the_way == "a use":  # whose thread may be the one that does not want it any more
        rig.looks.wait(lend)
    else:
        assert rig.store.begun("write a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    wanted[0] = False
    rig.store.end("write a")
    assert lend.result() is None
    if in_the_way == "a use":
        rig.release("a")
    rig.use("b")
    assert rig.told() == ["read a", "use a", "write a", "evict a", "read b", "use b"]


def test_a_slot_given_back_is_not_reused_before_its_write_is_over() -> None:
    rig = Rig("ab", num_slots=1)
    rig.hold("a")
    slot = rig.lend("a")
    use = Call(lambda: look(rig.acquire("b")))
    rig.looks.wait(use)
    fill(slot.address, "x")
    rig.store.keep("write beside a")
    rig.weights.shadows.give_back(rig.units["a"], slot)
    assert rig.store.begun("write beside a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    assert rig.told() == ["read a", "use a", "write beside a"]
    rig.store.end("write beside a")
    assert use.result() == "b"
    assert rig.told() == ["read b", "use b"]
    rig.flip("a")
    assert rig.stored("a") == "x"


def test_the_weights_beside_count_after_the_flip_and_not_before() -> None:
    rig = Rig("a", num_slots=2)
    rig.hold("a")
    slot = rig.lend("a")
    fill(slot.address, "x")
    rig.weights.shadows.give_back(rig.units["a"], slot)
    rig.end_step("a")
    waits = Call(lambda: look(rig.acquire("a")))
    rig.looks.wait(waits)  # for the update, which the flip ends
    assert rig.stored("a") == "a"
    rig.flip("a")
    assert waits.result() == "x"
    assert rig.told() == ["read a", "use a", "write beside a", "flip a", "read a", "use a"]


def test_a_read_begins_after_the_write_beside() -> None:
    rig = Rig("a", num_slots=2)
    rig.hold("a")
    slot = rig.lend("a")
    rig.store.keep("write beside a")
    rig.weights.shadows.give_back(rig.units["a"], slot)
    use = Call(lambda: look(rig.acquire("a")))
    assert rig.store.begun("write beside a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    rig.weights.try_fetch(rig.units["a"])  # does not wait, and begins nothing
    assert rig.told() == ["read a", "use a", "write beside a"]
    rig.store.end("write beside a")
    assert use.result() == "a"
    assert rig.told() == ["read a", "use a"]


def test_a_change_from_outside_waits_for_a_write_beside_that_is_in_flight() -> None:
    """Both go to the place that is not current: in flight together their bytes would mix."""
    rig = Rig("a", num_slots=2)
    rig.store.keep("write beside a")
    rig.hold("a")
    slot = rig.lend("a")
    with rig.borrow("a"):  # the old weights are resident again, in the other slot, when the write beside begins
        fill(slot.address, "x")
        rig.weights.shadows.give_back(rig.units["a"], slot)

    def change() -> None:
        with rig.borrow("a", change=True) as address:
            fill(address, "z")

    changed = Call(change)
    write = rig.store.begun("write beside a")
    assert write.waited_for.wait(FOREVER_S) and not changed.over
    rig.store.end("write beside a")
    changed.result()
    assert rig.stored("a") == "z"


def test_a_flip_waits_for_a_fetch_of_the_old_weights_and_for_those_who_use_them() -> None:
    rig = Rig("a", num_slots=2)
    beside(rig, "a", "x")
    rig.store.keep("read a")
    rig.weights.try_fetch(rig.units["a"])
    flip = Call(lambda: rig.flip("a"))
    read = rig.store.begun("read a")
    assert read.waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    in_use, over = threading.Event(), threading.Event()

    def borrow() -> str:
        with rig.borrow("a") as address:
            in_use.set()
            assert over.wait(FOREVER_S)
            return look(address)

    read.waited_for.clear()
    old = Call(borrow)  # while the flip has let the lock go
    assert read.waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    rig.store.end("read a")
    assert in_use.wait(FOREVER_S)
    rig.looks.wait(flip)
    assert rig.told() == ["read a", "use a", "write beside a", "read a"]
    over.set()
    assert old.result() == "a"
    flip.result()
    assert look(rig.acquire("a")) == "x"
    assert rig.told() == ["evict a", "flip a", "read a", "use a"]


def test_a_flip_forgets_the_old_weights_in_their_slot() -> None:
    rig = Rig("a", num_slots=2)
    beside(rig, "a", "x")
    assert look(rig.acquire("a")) == "a"
    rig.release("a")
    rig.flip("a")
    assert look(rig.acquire("a")) == "x"
    assert rig.told() == [
        "read a",
        "use a",
        "write beside a",
        "read a",
        "use a",
        "evict a",
        "flip a",
        "read a",
        "use a",
    ]


def test_prefetch_leaves_a_unit_with_weights_beside_alone() -> None:
    rig = Rig("ab", num_slots=2, prefetch=True)
    rig.use("ab")
    beside(rig, "b", "x")
    rig.told()
    rig.use("a")  # of a, b, b, a comes a, and then b: the store's current b is the old one
    assert rig.told() == ["use a"]
    rig.flip("b")
    rig.end_step()
    assert look(rig.acquire("a")) == "a"
    assert rig.told() == ["flip b", "read b", "use a"]


def test_prefetch_takes_a_unit_again_whose_weights_beside_are_forgotten() -> None:
    rig = Rig("ab", num_slots=2, prefetch=True)
    rig.use("ab")
    beside(rig, "b", "x")
    rig.weights.shadows.forget(rig.units["b"])
    rig.end_step()
    rig.told()
    rig.use("ab")
    assert rig.told() == ["read b", "use a", "use b"]  # the old one
