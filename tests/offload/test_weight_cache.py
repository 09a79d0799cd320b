"""The weight cache without a model: what is fetched, evicted and written, in which order, and who waits for whom."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import aio_ext
from offload import waiting
from offload.errors import WaitTimeout
from offload.report.meter import Meter
from offload.report.trace import Trace
from offload.testing.simulated import SimulatedDevice
from offload.tiers import cache, device_weights
from offload.tiers.cache import Entry, Residency, WeightCache
from offload.tiers.device_weights import DeviceCarrier, DeviceWeights
from offload.tiers.home import HostHome, StoredHome, UnitHomes
from offload.tiers.host_weights import HostWeights, Slot
from offload.tiers.order import UseOrder
from offload.tiers.window import DeviceWindow
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import Extent, StorageIOError

FOREVER_S = 20.0
"""No test takes this long, unless it fails."""

PART_BYTES = 4096
"""Of each unit: that many trained, and, where the test says so, that many frozen."""


@pytest.fixture(autouse=True)
def _a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", FOREVER_S)


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def over(self) -> bool:
        return not self.thread.is_alive()

    def result(self) -> Any:
        """Wait for its end; what it returned or raised."""
        self.thread.join(FOREVER_S)
        assert self.over, "a call did not end"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error


class FakeTicket:
    """A transfer that moves its bytes as late as it may: when it ends. Swapped or reused memory shows."""

    def __init__(self, move: Callable[[], None]) -> None:
        self.waited_for = threading.Event()
        """Somebody waits, or has waited."""
        self._move = move
        self._over = threading.Event()
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    def end(self, error: Exception | None = None) -> None:
        if error is None:
            self._move()
        self._error = error
        self._over.set()
        for call in self._callbacks:
            call()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self.waited_for.set()
        assert self._over.wait(FOREVER_S), "a transfer did not end"
        if self._error is not None:
            raise self._error

    def add_done_callback(self, call: Callable[[], None]) -> None:
        self._callbacks.append(call)
        if self.done():
            call()


class FakeStore:
    """Extents with two places each, in memory. Transfers end at once, but for those that are ``kept`` in flight."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._names: dict[int, str] = {}
        self._places: dict[int, list[bytes]] = {}
        self._kept: dict[str, list[FakeTicket]] = {}

    def add(self, name: str, content: str) -> Extent:
        index = len(self._names)
        self._names[index] = name
        self._places[index] = [content.encode() * PART_BYTES, b"?" * PART_BYTES]
        return Extent(index, index * PART_BYTES, PART_BYTES)

    def content(self, extent: Extent) -> str:
        return _seen(self._places[extent.index][0])

    def keep(self, event: str) -> None:
        """Transfers like this stay in flight until ``end``."""
        self._kept[event] = []

    def begun(self, event: str) -> FakeTicket:
        """The one transfer like this that is in flight."""
        (ticket,) = self._kept[event]
        return ticket

    def end(self, event: str, error: Exception | None = None) -> None:
        """It is over, and later ones end at once again."""
        (ticket,) = self._kept.pop(event)
        ticket.end(error)

    # What a home asks for.

    def read(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> FakeTicket:
        content = self._places[extent.index][0]
        return self._begin(f"read {self._names[extent.index]}", lambda: _put(address, content))

    def write(self, extent: Extent, address: int, nbytes: int) -> FakeTicket:
        return self._write("write", extent, address, 0)

    def write_beside(self, extent: Extent, address: int, nbytes: int) -> FakeTicket:
        return self._write("write beside", extent, address, 1)

    def flip(self, extent: Extent) -> None:
        self._events.append(f"flip {self._names[extent.index]}")
        self._places[extent.index].reverse()

    def _write(self, verb: str, extent: Extent, address: int, place: int) -> FakeTicket:
        def move() -> None:
            self._places[extent.index][place] = ctypes.string_at(address, PART_BYTES)

        return self._begin(f"{verb} {self._names[extent.index]}", move)

    def _begin(self, event: str, move: Callable[[], None]) -> FakeTicket:
        self._events.append(event)
        ticket = FakeTicket(move)
        if event in self._kept:
            self._kept[event].append(ticket)
        else:
            ticket.end()
        return ticket


def _put(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def _seen(content: bytes) -> str:
    """The one letter that all of it is made of; all of them if it is torn."""
    return "".join(sorted({chr(byte) for byte in content}))


def fill(address: int, letter: str) -> None:
    """Change a unit's trained bytes."""
    _put(address, letter.encode() * PART_BYTES)


def look(address: int) -> str:
    """The letter that a unit's trained bytes are made of."""
    return _seen(ctypes.string_at(address, PART_BYTES))


class Looks:
    """Counts, for each thread, how often it has looked at what it waits for and found that it must wait."""

    def __init__(self, monitor: waiting.Monitor) -> None:
        self._changed = threading.Condition()
        self._counts: dict[threading.Thread, int] = {}
        wait = monitor.wait

        def counting(timeout: float | None = None) -> bool:
            with self._changed:
                me = threading.current_thread()
                self._counts[me] = self._counts.get(me, 0) + 1
                self._changed.notify_all()
            return wait(timeout)

        monitor.wait = counting  # type: ignore[method-assign]

    def wait(self, call: Call) -> None:
        """Until the call has looked once more. It saw all that had happened before this, and waits on."""
        with self._changed:
            before = self._counts.get(call.thread, 0)
            assert self._changed.wait_for(lambda: call.over or self._counts.get(call.thread, 0) > before, FOREVER_S), (
                "the call does not wait"
            )
        assert not call.over, "the call did not have to wait"

    def wait_once(self, call: Call) -> None:
        """Until the call has looked at all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._counts.get(call.thread, 0) > 0, FOREVER_S)


class Rig:
    """Weights in host memory over a fake store. Every event has a place in one list: uses, transfers and evictions."""

    def __init__(
        self,
        names: str = "abc",
        num_slots: int = 2,
        *,
        prefetch: bool = False,
        frozen: bool = False,
        resident: str = "",
        may_add_places: bool = True,
    ) -> None:
        self.events: list[str] = []
        self.store = FakeStore(self.events)
        self.failure = Failure()
        self.units = {name: _unit(index, name) for index, name in enumerate(names)}
        self.extents: dict[str, Extent] = {}
        self.homes: list[UnitHomes] = []
        self.resident_memory: list[aio_ext.Memory] = []
        """Homes do not own what they look out on."""
        for name in names:
            if name in resident:
                memory: Any = aio_ext.Memory(PART_BYTES)
                self.resident_memory.append(memory)
                fill(memory.address, name)
                self.homes.append(UnitHomes(HostHome(memory), None, []))
                continue
            trained = self.extents[name] = self.store.add(name, name)
            still = self.store.add(f"{name}.frozen", name.upper()) if frozen else None
            home = StoredHome(name, self.store, trained, still, Trace())  # type: ignore[arg-type]
            self.homes.append(UnitHomes(home, None, []))
        slot_bytes = 2 * PART_BYTES
        slots = [Slot(aio_ext.Memory(slot_bytes)) for _ in range(num_slots)]
        self.weights = HostWeights(
            list(self.units.values()),
            self.homes,
            slots,
            slot_bytes,
            self.failure,
            Meter(),
            prefetch=prefetch,
            may_add_places=may_add_places,
        )
        self.looks = Looks(self.weights._changed)
        evict = self.weights._evict

        def tell(entry: Entry[Slot]) -> None:
            self.events.append(f"evict {entry.unit.name}")
            evict(entry)

        self.weights._evict = tell  # type: ignore[method-assign]

    def acquire(self, name: str) -> int:
        address = self.weights.acquire(self.units[name])
        self.events.append(f"use {name}")
        return address

    def release(self, name: str) -> None:
        self.weights.release(self.units[name])

    def use(self, names: str) -> None:
        """One use after the other, by compute."""
        for name in names:
            assert look(self.acquire(name)) == name
            self.release(name)

    def borrow(self, name: str, *, change: bool = False) -> contextlib.AbstractContextManager[int]:
        return self.weights.borrow(self.units[name], change=change)

    def nobody_has_the_lock(self) -> bool:
        """Who waits for a transfer lets others go on."""
        free = self.weights._changed.acquire(timeout=FOREVER_S / 4)
        if free:
            self.weights._changed.release()
        return free

    def end_step(self, updated: str = "") -> None:
        self.weights.begin_updates([self.units[name] for name in updated])

    def update(self, name: str, letter: str) -> None:
        """What the update thread does for a unit."""
        fill(self.weights.acquire_for_update(self.units[name]), letter)
        self.weights.end_update(self.units[name])

    def hold(self, name: str) -> None:
        """The early update of a unit that was used is to come: compute is done with it."""
        self.acquire(name)
        assert self.weights.hold(self.units[name])
        self.release(name)

    def lend(self, name: str) -> Slot:
        slot = self.weights.lend(self.units[name], lambda: True)
        assert slot is not None
        return slot

    def flip(self, name: str) -> None:
        self.weights.flip(self.units[name])

    def leave(self, name: str) -> None:
        self.weights.leave(self.units[name])

    def stored(self, name: str) -> str:
        return self.store.content(self.extents[name])

    def told(self) -> list[str]:
        """What has happened since this was asked for last."""
        told = self.events[:]
        self.events.clear()
        return told


def _unit(index: int, name: str, numel: int = PART_BYTES // 4) -> UnitSpec:
    return UnitSpec(index, name, (), (), numel, numel, 0)


# The order of fetches and evictions.


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
    rig.weights._order = taught("dbac")  # nothing like forward and backward
    rig.use("dbac")
    assert rig.told() == [
        *("read d", "read b", "use d"),
        *("evict d", "read a", "use b"),
        *("evict b", "read c", "use a"),
        *("evict a", "read d", "use c"),
        *("evict c", "read b"),  # for the next step
    ]


def taught(order: str) -> UseOrder:
    """What a step like this teaches."""
    use_order = UseOrder(len(set(order)))
    for name in order:
        use_order.use("abcd".index(name))
    use_order.end_step()
    return use_order


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
    rig.weights._order = taught(order)
    rig.use("abc")
    assert rig.told() == ["read a", "use a", "read b", "use b", f"evict {evicted}", "read c", "use c"]


@pytest.mark.parametrize("computing", [True, False], ids=["compute", "a borrower"])
def test_a_pinned_unit_is_never_evicted(computing: bool) -> None:
    rig = Rig("abc", num_slots=2)
    address = rig.weights.acquire(rig.units["a"], computing=computing)
    rig.use("bcb")  # of a and b, c would evict a, which is needed last
    assert look(address) == "a"
    assert rig.told() == ["read a", "read b", "use b", "evict b", "read c", "use c", "evict c", "read b", "use b"]
    rig.weights.release(rig.units["a"], computing=computing)
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


# Transfers in flight.


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


def rig_waits(call: Call) -> None:
    """Let another thread go on."""
    assert not call.over
    call.thread.join(0.001)


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
    address = rig.weights.acquire_for_update(rig.units["a"])
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


# Updates and the uses that wait for them.


def test_a_use_waits_for_the_update_of_its_unit_and_no_other() -> None:
    rig = Rig("ab", num_slots=2)
    rig.use("ab")
    rig.end_step("ab")
    uses = [Call(lambda: look(rig.acquire("a"))), Call(lambda: rig.weights.wait_for_update(rig.units["a"]))]
    everything = Call(rig.weights.wait_for_updates)
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
            rig.weights.wait_for_updates()
            return rig.stored("d")
        return look(rig.weights.acquire(rig.units["d"]))

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
    Call(lambda: rig.weights.wait_for_update(rig.units["d"])).result()
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


# Compute that holds every place.


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
    with pytest.raises(RuntimeError, match="unit a is not in host memory"):
        rig.acquire("a")


def test_a_unit_that_leaves_without_having_a_place_is_just_not_fetched() -> None:
    rig = Rig("ab", num_slots=2, prefetch=True)
    rig.leave("a")
    rig.use("bb")
    assert rig.told() == ["read b", "use b", "use b"]


# Early updates.


def test_a_unit_that_is_not_in_use_is_not_held() -> None:
    rig = Rig("ab", num_slots=2, resident="b")
    assert not rig.weights.hold(rig.units["a"])  # absent
    rig.use("a")
    assert not rig.weights.hold(rig.units["a"])  # released
    rig.acquire("b")
    assert not rig.weights.hold(rig.units["b"])  # resident
    rig.acquire("a")
    assert rig.weights.hold(rig.units["a"])


def test_a_unit_that_is_held_stays_until_the_hold_ends() -> None:
    rig = Rig("ab", num_slots=1)
    rig.hold("a")
    use = Call(lambda: look(rig.acquire("b")))
    rig.looks.wait(use)
    assert rig.told() == ["read a", "use a"]
    rig.weights.end_hold(rig.units["a"])
    assert use.result() == "b"
    assert rig.told() == ["evict a", "read b", "use b"]


def test_weights_are_brought_in_for_an_early_update_in_place_of_the_unit_that_is_needed_last() -> None:
    rig = Rig("abc", num_slots=2, may_add_places=False)
    rig.use("abccba")
    rig.end_step()
    rig.use("abcc")  # in backward: b and a come next, and c after them
    rig.told()
    rig.weights.bring(rig.units["a"])
    assert rig.told() == ["evict c", "read a"]
    slot = rig.lend("a")
    assert look(slot.address) == "a"
    use = Call(lambda: look(rig.acquire("a")))  # the current weights, in the other slot
    assert use.result() == "a" and rig.told() == ["evict b", "read a", "use a"]


def test_weights_that_are_here_are_not_read_again_for_an_early_update() -> None:
    rig = Rig("ab", num_slots=1, may_add_places=False)
    rig.use("a")
    rig.weights.bring(rig.units["a"])
    use = Call(lambda: rig.acquire("b"))
    rig.looks.wait(use)  # the place is held
    rig.weights.end_hold(rig.units["a"])
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
    assert rig.weights.hold(rig.units["a"])
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
    rig.weights.give_back(rig.units["a"], slot)
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
    assert rig.weights.hold(rig.units["a"])
    wanted = [True]
    if in_the_way == "a write":
        rig.release("a")
    lend = Call(lambda: rig.weights.lend(rig.units["a"], lambda: wanted[0]))
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
    rig.weights.give_back(rig.units["a"], slot)
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
    rig.weights.give_back(rig.units["a"], slot)
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
    rig.weights.give_back(rig.units["a"], slot)
    use = Call(lambda: look(rig.acquire("a")))
    assert rig.store.begun("write beside a").waited_for.wait(FOREVER_S)
    assert rig.nobody_has_the_lock()
    rig.weights.try_fetch(rig.units["a"])  # does not wait, and begins nothing
    assert rig.told() == ["read a", "use a", "write beside a"]
    rig.store.end("write beside a")
    assert use.result() == "a"
    assert rig.told() == ["read a", "use a"]


def beside(rig: Rig, name: str, letter: str) -> None:
    """New weights are beside the current ones."""
    rig.hold(name)
    slot = rig.lend(name)
    fill(slot.address, letter)
    rig.weights.give_back(rig.units[name], slot)


def test_a_change_from_outside_waits_for_a_write_beside_that_is_in_flight() -> None:
    """Both go to the place that is not current: in flight together their bytes would mix."""
    rig = Rig("a", num_slots=2)
    rig.store.keep("write beside a")
    rig.hold("a")
    slot = rig.lend("a")
    with rig.borrow("a"):  # the old weights are resident again, in the other slot, when the write beside begins
        fill(slot.address, "x")
        rig.weights.give_back(rig.units["a"], slot)

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
    rig.weights.forget_beside(rig.units["b"])
    rig.end_step()
    rig.told()
    rig.use("ab")
    assert rig.told() == ["read b", "use a", "use b"]  # the old one


@pytest.mark.parametrize("wanted", ["a place", "an update", "a place for an update", "a hand-over", "a lent place"])
def test_who_waits_is_woken_by_what_he_waits_for(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (waiting, cache):
        monkeypatch.setattr(module, "_SLICE_S", 2 * FOREVER_S)  # he does not look by himself
    rig = Rig("ab", num_slots=1, may_add_places=False)
    a, b = rig.units.values()
    rig.hold("a")
    if wanted == "an update":
        rig.weights.end_hold(a)
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
        rig.weights.give_back(a, slot)
    else:
        call = Call(lambda: rig.acquire("b") if wanted == "a place" else rig.update("b", "x"))
        rig.looks.wait_once(call)
        rig.weights.end_hold(a)
    call.result()
    assert rig.weights._entries[b.index].pins == (wanted not in ("a hand-over", "a place for an update"))


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
        rig.weights.wait_for_updates()
    assert rig.told() == []


@pytest.mark.parametrize("ask", [Rig.lend, Rig.flip, Rig.leave])
def test_a_wait_for_the_use_of_a_unit_that_takes_too_long_names_the_unit(
    ask: Callable[[Rig, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig("a", num_slots=1)
    rig.acquire("a")
    assert rig.weights.hold(rig.units["a"])
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
    rig.weights._order = taught("acb")
    rig.end_step("b")
    rig.store.keep("write b")
    rig.update("b", "x")
    rig.store.end("write b", StorageIOError("write of b: EIO"))
    with pytest.raises(StorageIOError, match="write of b"):
        rig.acquire("a")  # c is fetched ahead, in the place of b, which is needed last
    assert "a with 0 uses" in rig.weights._held()


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


# The cache itself, over a carrier of places that differ in size.


class FakeCarrier:
    """Room for some bytes; fetches end at once."""

    num_places = None

    def __init__(self, events: list[str], room: int) -> None:
        self.room = room
        self.error: Exception | None = None
        self._events = events

    def take_place(self, unit: UnitSpec) -> int | None:
        return self.add_place(unit) if unit.numel <= self.room else None

    def add_place(self, unit: UnitSpec) -> int:
        self.room -= unit.numel
        return unit.numel

    def free_place(self, unit: UnitSpec, place: int) -> None:
        self._events.append(f"free {unit.name}")
        self.room += place

    def obstacle(self, unit: UnitSpec) -> None:
        return None

    def fetch(self, unit: UnitSpec, place: int) -> FakeTicket:
        if self.error is not None:
            raise self.error
        self._events.append(f"fetch {unit.name}")
        ticket = FakeTicket(lambda: None)
        ticket.end()
        return ticket

    def pending(self) -> None:
        return None


class PlainCache(WeightCache[int]):
    """Nothing but the cache."""

    def use(self, unit: UnitSpec) -> None:
        with self._changed:
            self._learn(self._entries[unit.index])
            self._pin(self._entries[unit.index], computing=True)
            self._fetch_ahead()
        self._wait_for_fetch(self._entries[unit.index], "read", computing=True)
        with self._changed:
            self._unpin(self._entries[unit.index], computing=True)
            self._fetch_ahead()

    def residencies(self) -> list[Residency]:
        return [entry.residency for entry in self._entries]


def plain_cache(
    sizes: Sequence[int], room: int, *, prefetch: bool = False, look_ahead: int = 16
) -> tuple[list[str], FakeCarrier, PlainCache, list[UnitSpec]]:
    events: list[str] = []
    units = [_unit(index, "abcdefgh"[index], numel) for index, numel in enumerate(sizes)]
    carrier = FakeCarrier(events, room)
    plain = PlainCache(
        units,
        lambda unit: False,
        carrier,  # type: ignore[arg-type]
        Failure(),
        Meter(),
        prefetch=prefetch,
        look_ahead=look_ahead,
        may_add_places=True,
    )
    return events, carrier, plain, units


def test_as_many_units_are_evicted_as_a_large_one_needs() -> None:
    events, carrier, plain, units = plain_cache([1, 1, 1, 2], room=3)
    for unit in units:
        plain.use(unit)
    assert events == ["fetch a", "fetch b", "fetch c", "free a", "free b", "fetch d"]
    assert carrier.room == 0
    assert plain.residencies() == [Residency.ABSENT, Residency.ABSENT, Residency.RESIDENT, Residency.RESIDENT]


def test_prefetch_looks_no_farther_ahead_than_it_is_told() -> None:
    for look_ahead, ahead in ((0, []), (1, ["fetch b"]), (3, ["fetch b", "fetch c", "fetch d"])):
        events, _, plain, units = plain_cache([1] * 8, room=8, prefetch=True, look_ahead=look_ahead)
        plain.use(units[0])
        assert events == ["fetch a", *ahead]


def test_a_small_unit_does_not_overtake_a_large_one_that_finds_no_room() -> None:
    events, _, plain, units = plain_cache([2, 2, 1], room=3, prefetch=True)
    plain.use(units[0])  # c would fit beside a, but b comes first: it gets the place of a, which is needed after it
    assert events == ["fetch a", "free a", "fetch b", "fetch c"]


def test_a_fetch_that_cannot_begin_leaves_the_unit_absent_and_its_place_free() -> None:
    events, carrier, plain, units = plain_cache([1, 1], room=1)
    carrier.error = StorageIOError("the store is closed")
    with pytest.raises(StorageIOError, match="is closed"):
        plain.use(units[0])
    assert plain.residencies() == [Residency.ABSENT, Residency.ABSENT] and carrier.room == 1
    carrier.error = None
    plain.use(units[0])  # else it computes with whatever lies in its place
    assert events == ["free a", "fetch a"]


# A device's memory, filled from host memory.


class DeviceRig:
    """Units that rest in host memory (or on NVMe, ``stored``), copied to a simulated device with room for some."""

    def __init__(
        self, names: str = "abc", room: int = 2, *, prefetch: bool = False, stored: bool = False, order: str = ""
    ) -> None:
        self.device = SimulatedDevice(eagerness=0.0)  # does nothing that nobody waits for
        self.host = Rig(names, 2 * stored, prefetch=bool(order), resident="" if stored else names, may_add_places=False)
        if order:  # the host's memory fetches ahead, in this one
            self.host.weights._order = taught(order)
        self.units = self.host.units
        self.failure = self.host.failure
        self.windows = []
        for unit in self.units.values():
            self.windows.append(DeviceWindow(unit.numel, torch.float32, self.device))
            self.windows[-1].close()
        units = list(self.units.values())
        self.carrier = DeviceCarrier(
            self.windows, self.host.weights, self.device, room * PART_BYTES, 0, self.failure, Meter()
        )
        self.weights = DeviceWeights(
            units, lambda unit: False, self.carrier, self.device, self.failure, Meter(), prefetch=prefetch
        )

    def acquire(self, name: str, *, training: bool = True) -> None:
        self.weights.acquire(self.units[name], training=training)

    def release(self, name: str) -> None:
        self.weights.release(self.units[name])

    def use(self, names: str) -> str:
        """What compute sees there, one use after the other."""
        seen = ""
        for name in names:
            self.acquire(name)
            seen += self.look(name)
            self.release(name)
        return seen

    def look(self, name: str) -> str:
        flat = self.windows[self.units[name].index].flat
        self.device.compute_access(flat, writes=False)
        return look(flat.data_ptr())

    def change(self, name: str, letter: str) -> None:
        """What an update does, once the copies of the old weights are void."""
        self.weights.outdate([self.units[name]])
        home = self.host.homes[self.units[name].index].weights
        assert home.address is not None
        fill(home.address, letter)

    @property
    def num_copied(self) -> float:
        return self.carrier.copied_bytes / PART_BYTES

    def close(self) -> None:
        self.weights.close()
        assert self.device.violations == [] and self.device.allocated_bytes == 0


def test_units_are_copied_to_the_device_within_its_room_and_evicted_when_needed_last() -> None:
    rig = DeviceRig("abc", room=2)
    assert rig.use("abccba") == "abccba"
    assert rig.num_copied == 4  # a is there no more when backward comes to it
    assert rig.device.most_allocated_bytes == 2 * PART_BYTES
    rig.close()
    rig = DeviceRig("abc", room=3)
    assert rig.use("abccba") == "abccba"
    assert rig.num_copied == 3
    rig.close()


def test_a_copy_is_void_after_its_unit_was_updated() -> None:
    rig = DeviceRig("ab", room=2)
    rig.use("ab")
    rig.change("a", "x")
    assert rig.use("abab") == "xbxb"
    assert rig.num_copied == 3
    rig.close()


def test_a_use_under_way_keeps_the_old_weights_and_the_next_one_has_the_new_ones() -> None:
    rig = DeviceRig("a", room=1)
    rig.acquire("a")
    rig.change("a", "x")
    assert rig.look("a") == "a"
    rig.release("a")
    assert rig.use("a") == "x"
    rig.close()


def test_a_unit_that_moves_to_the_device_has_no_copy_and_gets_none() -> None:
    rig = DeviceRig("ab", room=2)
    rig.use("ab")
    rig.weights.arrive(rig.units["a"])
    assert rig.device.allocated_bytes == PART_BYTES
    rig.acquire("a")  # its home is there: nothing is copied
    assert rig.device.allocated_bytes == PART_BYTES and rig.num_copied == 2
    rig.release("a")
    rig.close()


def test_copies_let_the_host_have_its_slots_back() -> None:
    rig = DeviceRig("abcd", room=4, stored=True, prefetch=True)  # two slots, that four units pass through
    assert rig.use("abcddcba") == "abcddcba"
    rig.close()
    assert sorted(event for event in rig.host.events if event.startswith("read")) == [f"read {n}" for n in "abcd"]
    assert all(entry.pins == 0 for entry in rig.host.weights._entries)


def test_a_read_that_fails_on_the_way_to_the_device_reaches_whoever_waits_for_the_copy() -> None:
    rig = DeviceRig("a", room=1, stored=True)
    rig.host.store.keep("read a")
    use = Call(lambda: rig.acquire("a"))
    while not rig.host.store._kept["read a"]:
        rig_waits(use)
    rig.host.store.end("read a", StorageIOError("read of a: EIO"))
    with pytest.raises(StorageIOError, match="read of a"):
        use.result()
    with pytest.raises(StorageIOError, match="read of a"):
        rig.failure.check()
    rig.close()


def test_a_copy_that_does_not_begin_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DeviceRig("a", room=1, stored=True)
    rig.host.store.keep("read a")
    monkeypatch.setattr(device_weights, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeout, match="the start of a copy to the device"):
        rig.acquire("a")
    while not rig.host.store._kept["read a"]:
        threading.Event().wait(0.001)  # for the thread that starts copies
    rig.host.store.end("read a")
    rig.close()


def test_an_error_that_the_host_meets_where_a_copy_ends_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DeviceRig("ab", room=2)

    def fail(unit: UnitSpec, **options: object) -> None:
        raise StorageIOError("write of b: EIO")

    monkeypatch.setattr(rig.host.weights, "release", fail)
    with contextlib.suppress(StorageIOError):
        rig.acquire("a")
    with contextlib.suppress(StorageIOError):
        rig.weights.close()
    with pytest.raises(StorageIOError, match="write of b"):
        rig.failure.check()
