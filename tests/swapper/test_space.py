"""Space of places is taken outside of the store's lock, and counted once, whatever else goes on or goes wrong."""

import errno
import os
import threading
from collections.abc import Callable

import pytest
from store_helpers import fill, memory
from store_ram_disk import FaultPlan, RamDevice, RamDirectory, RamDisk

from swapper import PAGE_BYTES, Arena, StorageFull, StoreMisuse
from swapper.durable import DurableStore
from swapper.manifest import Entry, Manifest
from swapper.opening import begin

NUM_EXTENTS = 3


class Ranges(RamDevice):
    """Tells which ranges were asked for, and calls ``then`` in the middle of it."""

    def __init__(self) -> None:
        super().__init__(RamDisk(bytearray(16 * PAGE_BYTES)), FaultPlan())
        self.asked: list[int] = []
        self.then: Callable[[], None] = lambda: None

    def reserve(self, ranges) -> None:
        pages = [offset // PAGE_BYTES for offset, _ in ranges]
        self.asked += pages
        if pages:
            self.then()


@pytest.fixture
def lease():
    arena = Arena(PAGE_BYTES)
    yield arena.lease(PAGE_BYTES)
    arena.close()


@pytest.fixture
def device():
    return Ranges()


@pytest.fixture
def store(device):
    entries = tuple(Entry(PAGE_BYTES, 0, 0, 0) for _ in range(NUM_EXTENTS))
    empty = Manifest(b"s" * 16, 0, 3, 1, entries)  # one generation can be retained
    disk = RamDisk(bytearray())
    store = begin(RamDirectory(disk), lambda _: device, empty, "ram", reserved=[1] * NUM_EXTENTS)
    assert device.asked == [0, 1, 2]
    device.asked.clear()
    return store


def put(store: DurableStore, index: int, value: int, lease) -> None:
    fill(lease, value)
    store.write(store.extents[index], lease.address, PAGE_BYTES).wait()


def get(store: DurableStore, index: int, lease) -> set[int]:
    store.read(store.extents[index], lease.address, PAGE_BYTES).wait()
    return set(memory(lease))


def test_others_begin_transfers_while_the_file_system_takes_space(store, device, lease):
    put(store, 0, 1, lease)
    seen = []

    def others() -> None:
        put(store, 1, 2, lease)
        seen.append(get(store, 0, lease))

    device.then = lambda: on_another_thread(others)
    put(store, 0, 3, lease)  # its second place has no space yet
    assert seen == [{1}] and get(store, 1, lease) == {2}
    assert device.asked == [NUM_EXTENTS]


def test_a_commit_that_comes_meanwhile_gets_its_way_and_the_write_another_place(store, device, lease):
    put(store, 0, 1, lease)

    def committed() -> None:
        device.then = lambda: None
        on_another_thread(lambda: (store.commit(), store.retain()))

    device.then = committed
    put(store, 0, 2, lease)
    store.commit()
    put(store, 0, 3, lease)
    assert store.generations == (1, 2) and get(store, 0, lease) == {3}
    assert device.asked == [NUM_EXTENTS, 2 * NUM_EXTENTS]  # the second place, then the third, each once


def test_threads_that_need_space_at_once_take_that_of_each_place_once(store, device):
    arena = Arena(NUM_EXTENTS * PAGE_BYTES)
    leases = [arena.lease(PAGE_BYTES) for _ in range(NUM_EXTENTS)]
    ready = threading.Barrier(NUM_EXTENTS)

    def write(index: int) -> None:
        ready.wait(30)
        for value in range(1, 4):
            put(store, index, value, leases[index])
            assert get(store, index, leases[index]) == {value}

    threads = [threading.Thread(target=write, args=(index,)) for index in range(NUM_EXTENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(device.asked) == [NUM_EXTENTS, NUM_EXTENTS + 1, NUM_EXTENTS + 2]
    arena.close()


def test_without_room_nothing_has_changed_and_the_next_write_asks_again(store, device, lease):
    put(store, 0, 1, lease)

    def full() -> None:
        device.then = lambda: None
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for write in (store.write, store.write_shadow):
        device.then = full
        with pytest.raises(StorageFull, match="reserving space"):
            write(store.extents[0], lease.address, PAGE_BYTES)
        assert get(store, 0, lease) == {1} and store.commit() == store.generation
    put(store, 0, 2, lease)
    assert get(store, 0, lease) == {2} and device.asked == [NUM_EXTENTS] * 3


def test_what_was_given_back_is_taken_again(store, device, lease):
    put(store, 0, 1, lease)
    store.commit()
    store.give_back()
    put(store, 0, 2, lease)
    store.commit()
    assert get(store, 0, lease) == {2} and device.asked == [0, NUM_EXTENTS]


def test_the_files_are_closed_when_nobody_takes_space_of_them(store, device, lease):
    put(store, 0, 1, lease)
    order: list[str] = []
    store.closing(lambda: order.append("closed"))
    closer = threading.Thread(target=store.close)

    def close() -> None:
        closer.start()
        closer.join(0.02)
        order.append("space is taken")

    device.then = close
    with pytest.raises(StoreMisuse, match="ram is closed"):
        put(store, 0, 2, lease)
    closer.join(30)
    assert order == ["space is taken", "closed"]


def on_another_thread(call: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and not errors
