"""Transfers of the weight cache in flight, and what goes back to the store."""

from __future__ import annotations

import warnings

import pytest
from cache_rig import FOREVER_S, PART_BYTES, Call, Rig, fill, look, rig_waits
from cache_rig import a_deadline as a_deadline

from swapper import StorageIOError


def test_a_place_whose_write_back_is_in_flight_is_not_reused_before_it_is_over() -> None:
    rig = Rig("ab", num_slots=1)
    rig.end_step("a")
    rig.store.keep("write a")
    rig.update("a", "x")
    use = Call(lambda: look(rig.acquire("b")))
    write = rig.store.begun("write a")
    assert write.waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    assert rig.told() == ["read a", "write a"]
    rig.store.end("write a")
    assert use.result() == "b"
    assert rig.told() == ["evict a", "read b", "use b"]
    assert rig.stored("a") == "x"  # and not what came to the place after it


def test_another_place_is_taken_while_a_write_back_is_in_flight() -> None:
    rig = Rig("abc", num_slots=2)
    rig.use("ba")
    rig.end_step("a")
    rig.store.keep("write a")
    rig.update("a", "x")
    rig.told()
    with rig.borrow("c"):
        assert rig.told() == ["evict b", "read c"]  # a is needed later
    rig.store.end("write a")


def test_a_place_whose_fetch_is_in_flight_is_not_reused_before_it_is_over() -> None:
    rig = Rig("ab", num_slots=1)
    rig.store.keep("read a")
    rig.weights.try_fetch(rig.units["a"])
    use = Call(lambda: look(rig.acquire("b")))
    assert rig.store.begun("read a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    assert rig.told() == ["read a"]
    rig.store.end("read a")
    assert use.result() == "b"
    assert rig.told() == ["evict a", "read b", "use b"]


def test_a_use_waits_for_a_fetch_that_was_begun_ahead_and_begins_no_other() -> None:
    rig = Rig("ab", num_slots=2, prefetch=True)
    rig.store.keep("read b")
    rig.use("a")
    use = Call(lambda: look(rig.acquire("b")))
    assert rig.store.begun("read b").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    assert rig.told() == ["read a", "read b", "use a"]
    rig.store.end("read b")
    assert use.result() == "b"
    assert rig.told() == ["use b"]


def test_a_unit_may_be_read_but_not_changed_while_its_write_back_is_in_flight() -> None:
    rig = Rig("a", num_slots=1)
    rig.end_step("a")
    rig.store.keep("write a")
    rig.update("a", "x")
    assert look(rig.acquire("a")) == "x"  # at once
    rig.release("a")
    rig.end_step("a")
    again = Call(lambda: rig.update("a", "y"))
    write = rig.store.begun("write a")
    assert write.waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()

    def change() -> None:
        with rig.borrow("a", change=True) as address:
            fill(address, "z")

    write.end()
    assert rig.stored("a") == "x"
    again.result()
    rig.store._kept["write a"].remove(write)
    write = rig.store.begun("write a")
    changed = Call(change)
    assert write.waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    rig.store.end("write a")
    assert rig.stored("a") == "y"
    changed.result()
    assert rig.stored("a") == "z"
    assert rig.told() == ["read a", "write a", "use a", "write a", "write a"]


def test_a_fetch_that_fails_raises_and_leaves_the_unit_unpinned() -> None:
    rig = Rig("ab", num_slots=1)
    rig.store.keep("read a")
    use = Call(lambda: rig.acquire("a"))
    while not rig.store._kept["read a"]:
        rig_waits(use)
    assert rig.store.begun("read a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    rig.store.end("read a", StorageIOError("read of a: EIO"))
    with pytest.raises(StorageIOError, match="EIO"):
        use.result()
    assert rig.told() == ["read a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the only slot is to be had
        rig.use("ba")
    assert rig.told() == ["evict a", "read b", "use b", "evict b", "read a", "use a"]


# What goes back to the store.


def test_a_borrower_changes_all_of_a_unit_and_an_update_what_is_trained() -> None:
    rig = Rig("a", num_slots=1, frozen=True)
    with rig.borrow("a", change=True) as address:
        assert (look(address), look(address + PART_BYTES)) == ("a", "A")
        fill(address, "x")
        fill(address + PART_BYTES, "X")
    assert rig.told() == ["read a", "read a.frozen", "write a", "write a.frozen"]
    frozen = rig.homes[0].weights.stored
    assert frozen is not None
    still = list(frozen.extents)[1]
    assert (rig.stored("a"), rig.store.content(still)) == ("x", "X")
    rig.end_step("a")
    address = rig.weights.begin_update(rig.units["a"])
    fill(address, "y")
    fill(address + PART_BYTES, "Y")  # which no update does
    rig.weights.end_update(rig.units["a"])
    assert rig.told() == ["write a"]
    assert (rig.stored("a"), rig.store.content(still)) == ("y", "X")


def test_a_borrower_who_only_reads_writes_nothing_back() -> None:
    rig = Rig("a", num_slots=1, frozen=True)
    with rig.borrow("a") as address:
        fill(address, "x")
    assert rig.told() == ["read a", "read a.frozen"]


def test_a_borrower_whose_block_raises_writes_nothing_back_and_lets_go() -> None:
    rig = Rig("ab", num_slots=1)
    with pytest.raises(KeyError), rig.borrow("a", change=True):
        raise KeyError
    rig.use("b")
    assert rig.told() == ["read a", "evict a", "read b", "use b"]
