"""Weights in host memory over a fake store, for the tests of the weight cache: who was served, in which order."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aio_ext
from offload import waiting
from offload.report.meter import Meter
from offload.report.trace import Trace
from offload.tiers.home import ExtentPart, HostHome, StoredHome, UnitHomes
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.pin import Entry, Pin, Purpose
from offload.tiers.weights.shadow import Slot
from offload.tiers.weights.use_order import UseOrder
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import Extent

FOREVER_S = 20.0
"""No test takes this long, unless it fails."""

PART_BYTES = 4096
"""Of each unit: that many trained, and, where the test says so, that many frozen."""


@pytest.fixture(autouse=True)
def a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the files that import it: a wait that does not end fails its test."""
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

    def write_shadow(self, extent: Extent, address: int, nbytes: int) -> FakeTicket:
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
        self.units = {name: unit_of(index, name) for index, name in enumerate(names)}
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
            parts = [None if extent is None else ExtentPart(self.store, extent) for extent in (trained, still)]  # type: ignore[arg-type]
            home = StoredHome(name, *parts, Trace())
            self.homes.append(UnitHomes(home, None, []))
        slot_bytes = 2 * PART_BYTES
        slots = [Slot(aio_ext.Memory(slot_bytes)) for _ in range(num_slots)]
        self.weights = HostLevel(
            list(self.units.values()),
            self.homes,
            slots,
            slot_bytes,
            self.failure,
            Meter(),
            prefetch=prefetch,
            may_add_places=may_add_places,
        )
        self.pins: dict[str, list[Pin[Any]]] = {name: [] for name in names}
        """Uses that are not over."""
        self.looks = Looks(self.weights.cache.monitor)
        evict = self.weights.cache.evict

        def tell(entry: Entry[Slot]) -> None:
            self.events.append(f"evict {entry.unit.name}")
            evict(entry)

        self.weights.cache.evict = tell  # type: ignore[method-assign]

    def acquire(self, name: str, purpose: Purpose = Purpose.COMPUTE) -> int:
        pin = self.weights.pin(self.units[name], purpose)
        pin.take()
        self.pins[name].append(pin)
        self.events.append(f"use {name}")
        return int(pin.place.address)

    def release(self, name: str) -> None:
        self.pins[name].pop().release()

    def use(self, names: str) -> None:
        """One use after the other, by compute."""
        for name in names:
            assert look(self.acquire(name)) == name
            self.release(name)

    def borrow(self, name: str, *, change: bool = False) -> contextlib.AbstractContextManager[int]:
        return self.weights.borrow(self.units[name], change=change)

    def nobody_has_the_lock(self) -> bool:
        """Who waits for a transfer lets others go on."""
        free = self.weights.cache.monitor.acquire(timeout=FOREVER_S / 4)
        if free:
            self.weights.cache.monitor.release()
        return free

    def end_step(self, updated: str = "") -> None:
        self.weights.begin_updates([self.units[name] for name in updated])

    def update(self, name: str, letter: str) -> None:
        """What the update thread does for a unit."""
        fill(self.weights.begin_update(self.units[name]), letter)
        self.weights.end_update(self.units[name])

    def hold(self, name: str) -> None:
        """The speculative update of a unit that was used is to come: compute is done with it."""
        self.acquire(name)
        assert self.weights.shadows.hold(self.units[name])
        self.release(name)

    def lend(self, name: str) -> Slot:
        slot = self.weights.shadows.lend(self.units[name], [], lambda: True)
        assert slot is not None
        return slot

    def flip(self, name: str) -> None:
        self.weights.shadows.flip(self.units[name])

    def leave(self, name: str) -> None:
        self.weights.leave(self.units[name])

    def stored(self, name: str) -> str:
        return self.store.content(self.extents[name])

    def told(self) -> list[str]:
        """What has happened since this was asked for last."""
        told = self.events[:]
        self.events.clear()
        return told


def unit_of(index: int, name: str, numel: int = PART_BYTES // 4) -> UnitSpec:
    return UnitSpec(index, name, (), (), numel, numel, 0)


def taught(order: str) -> UseOrder:
    """What a step like this teaches."""
    use_order = UseOrder(len(set(order)))
    for name in order:
        use_order.use("abcd".index(name))
    use_order.end_step()
    return use_order


def rig_waits(call: Call) -> None:
    """Let another thread go on."""
    assert not call.over
    call.thread.join(0.001)


def beside(rig: Rig, name: str, letter: str) -> None:
    """New weights are beside the current ones."""
    rig.hold(name)
    slot = rig.lend(name)
    fill(slot.address, letter)
    rig.weights.shadows.give_back(rig.units[name], slot)
