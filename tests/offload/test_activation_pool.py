"""The pool of activations: last in, first out; what it writes, reads and gives back, event by event."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest
import torch

from offload import ActivationError, StorageIOError
from offload.memory import tensor_at
from offload.report.meter import Meter
from offload.tiers.activations.copies import HostCopies
from offload.tiers.activations.pool import ActivationPool
from swapper import PAGE_BYTES, Arena

PAGE = PAGE_BYTES


@dataclass(eq=False)
class Place:
    name: str
    nbytes: int
    content: torch.Tensor | None = None


class Ticket:
    def __init__(self, scratch: Scratch, event: str) -> None:
        self._scratch, self._event = scratch, event

    def done(self) -> bool:
        return self._event not in self._scratch.in_flight

    def add_done_callback(self, call) -> None:
        call()

    def wait(self) -> None:
        if not self.done():
            self._scratch.events.append(f"wait for {self._event}")
            self._scratch.in_flight.discard(self._event)
        if self._event in self._scratch.fails:
            raise StorageIOError(f"{self._event} failed")


@dataclass
class Scratch:
    """Space in memory. Transfers are in flight until they are waited for, or ``all_is_over``."""

    events: list[str] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    fails: set[str] = field(default_factory=set)
    taken_bytes: int = 0
    count: int = 0

    def take(self, nbytes: int) -> Place:
        self.count += 1
        self.taken_bytes += nbytes
        return Place(f"place {self.count}", nbytes)

    def give_back(self, place: Place) -> None:
        self.taken_bytes -= place.nbytes

    def write(self, place: Place, address: int) -> Ticket:
        place.content = tensor_at(address, place.nbytes, torch.uint8).clone()
        return self._begin(f"write {letter(place.content)}")

    def read(self, place: Place, address: int, *, urgent: bool = False) -> Ticket:
        tensor_at(address, place.nbytes, torch.uint8).copy_(place.content)
        return self._begin(f"read {letter(place.content)}{' now' if urgent else ''}")

    def all_is_over(self) -> None:
        self.in_flight.clear()

    def _begin(self, event: str) -> Ticket:
        self.events.append(event)
        self.in_flight.add(event)
        return Ticket(self, event)


def letter(content: torch.Tensor) -> str:
    return chr(int(content[0]))


class Rig:
    def __init__(self, num_pages: int) -> None:
        self.scratch = Scratch()
        self.arena = Arena(num_pages * PAGE)
        self.pool = ActivationPool(self.arena, self.scratch, HostCopies(), Meter())  # type: ignore[arg-type]
        self.kept = {}

    def keep(self, letters: str, *, order: tuple[int, int] = (0, 0), spills: bool = True) -> None:
        for name in letters:
            storage = torch.full((PAGE,), ord(name), dtype=torch.uint8).untyped_storage()
            self.kept[name] = self.pool.keep(storage, 0, PAGE, order, spills=spills)

    def backward(self, letters: str) -> None:
        """Each is brought, seen to be itself, and dropped."""
        for name in letters:
            assert set(self.kept[name].bring().tolist()) == {ord(name)}
            del self.kept[name]

    @property
    def left(self) -> tuple[int, int]:
        return self.pool.taken_bytes, self.pool.nvme_bytes


def test_what_fits_into_half_of_the_memory_is_never_written():
    rig = Rig(8)
    rig.keep("abcd")
    rig.backward("dcba")
    assert rig.scratch.events == []
    assert rig.left == (0, 0)


def test_the_oldest_are_written_and_leave_and_backward_reads_them_ahead_from_the_newest_on():
    rig = Rig(4)
    rig.keep("abc")
    assert rig.scratch.events == ["write a"]  # more than half is taken
    rig.keep("defg")
    assert rig.scratch.events == [
        *("write a", "write b"),
        *("wait for write a", "write c"),  # e comes to a's memory
        *("wait for write b", "write d"),
        *("wait for write c", "write e"),
    ]
    del rig.scratch.events[:]
    rig.backward("gfedcba")
    assert rig.scratch.events == ["read c", "read b", "wait for read c", "read a", "wait for read b", "wait for read a"]
    rig.scratch.all_is_over()
    assert rig.left == (0, 0)
    use = rig.pool.take_use()
    assert (use.kept_bytes, use.write_bytes, use.read_bytes) == (7 * PAGE, 5 * PAGE, 3 * PAGE)
    assert (use.host_bytes_max, use.nvme_bytes_max) == (4 * PAGE, 5 * PAGE)


def test_of_micro_batches_on_their_way_together_the_last_ones_leave_first_and_each_is_read_once():
    """Two units, four micro-batches: a backward comes to the first micro-batch's part of the last unit first."""
    rig = Rig(4)
    for unit, letters in enumerate(("abcd", "efgh")):
        for index, name in enumerate(letters):
            rig.keep(name, order=(unit, -index))
    assert rig.scratch.events == [
        *("write c", "write d"),  # of a, b, c in memory the last one's goes
        *("wait for write d", "write b", "wait for write c", "write a"),
        *("wait for write b", "write g", "wait for write a", "write h"),
    ]
    del rig.scratch.events[:]
    rig.scratch.all_is_over()
    rig.backward("efgh")
    rig.backward("abcd")
    assert [event for event in rig.scratch.events if "wait" not in event] == ["read a", "read b", "read c", "read d"]
    rig.scratch.all_is_over()
    assert rig.left == (0, 0)


def test_what_is_saved_again_later_stays_in_memory_and_backward_has_it_with_the_newest():
    rig = Rig(4)
    rig.keep("a", order=(0, 0))  # as rotary embeddings, which each block saves
    for number, name in enumerate("bcdefg", 1):
        rig.keep(name, order=(number, 0))
        rig.kept["a"].renew((number, 0))
    assert rig.kept["a"].pieces[0].offset is not None
    rig.scratch.all_is_over()
    del rig.scratch.events[:]
    rig.backward("agfedcb")
    assert [event for event in rig.scratch.events if "read" in event and "wait" not in event] == [
        *("read d", "read c", "read b"),
    ]


def test_what_is_still_being_written_is_taken_from_memory_and_the_memory_waits_for_the_write():
    rig = Rig(4)
    rig.keep("abc")
    rig.backward("cba")
    assert rig.scratch.events == ["write a"]  # it is not read, and not waited for
    assert rig.left == (0, 0) and rig.scratch.taken_bytes == PAGE
    rig.scratch.all_is_over()
    assert rig.left == (0, 0) and rig.scratch.taken_bytes == 0


def test_a_graph_that_is_dropped_without_a_backward_gives_all_back():
    rig = Rig(4)
    rig.keep("abcdefg")
    rig.kept.clear()
    gc.collect()
    assert rig.scratch.in_flight and rig.left == (0, 0)  # nobody wants what is still being written
    assert rig.scratch.taken_bytes > 0
    rig.scratch.all_is_over()
    assert rig.left == (0, 0) and rig.scratch.taken_bytes == 0
    rig.keep("hij")
    rig.backward("jih")


def test_what_is_brought_twice_is_read_again():
    rig = Rig(4)
    rig.keep("abcdefg")
    first = rig.kept["a"]
    assert set(first.bring().tolist()) == set(first.bring().tolist()) == {ord("a")}
    assert rig.scratch.events.count("read a now") == 2
    rig.backward("gfedcba")


def test_a_write_that_failed_is_one_error_and_the_pool_goes_on():
    rig = Rig(4)
    rig.scratch.fails.add("write a")
    rig.keep("abcd")
    with pytest.raises(ActivationError, match=r"could not be written to NVMe.*write a failed"):
        rig.keep("e")
    rig.kept.clear()
    rig.scratch.fails.clear()
    rig.scratch.all_is_over()
    rig.keep("hijklm")
    rig.backward("mlkjih")
    rig.scratch.all_is_over()
    assert rig.left == (0, 0)


def test_a_write_that_failed_behind_a_backward_is_nobodys_error():
    rig = Rig(4)
    rig.scratch.fails.add("write a")
    rig.keep("abc")
    rig.backward("cba")
    rig.scratch.all_is_over()
    assert rig.left == (0, 0)


@pytest.mark.parametrize("read", ["read a now", "read c"])
def test_a_read_that_failed_is_one_error_and_the_pool_goes_on(read: str):
    rig = Rig(4)
    rig.keep("abcdefg")
    rig.scratch.fails.add(read)
    with pytest.raises(ActivationError, match="could not be read from NVMe"):
        rig.backward("a" if "now" in read else "gfedcba")
    rig.scratch.fails.clear()
    rig.kept.clear()
    rig.scratch.all_is_over()
    assert rig.left == (0, 0)
    rig.keep("hijk")
    rig.backward("kjih")


def test_what_must_not_spill_and_has_no_room_is_refused_when_all_of_it_was_counted():
    rig = Rig(4)
    rig.keep("abcdef", spills=False)
    assert [name for name, kept in rig.kept.items() if kept is None] == ["e", "f"]
    with pytest.raises(ActivationError, match="activation_memory is too small") as caught:
        rig.kept["d"].bring()
    assert caught.value.needed_bytes == 6 * PAGE
    del caught  # its frames have one of them
    rig.kept.clear()
    rig.keep("abcd", spills=False)
    rig.backward("dcba")
    enough = Rig(6)
    enough.keep("abcdef", spills=False)
    enough.backward("fedcba")
    assert enough.scratch.events == []


def test_an_activation_that_is_larger_than_the_memory_passes_in_pieces_of_which_none_is_read_twice():
    rig = Rig(8)
    values = torch.arange(20 * PAGE, dtype=torch.int32).to(torch.uint8)
    kept = rig.pool.keep(values.untyped_storage(), PAGE, 19 * PAGE - 7, spills=True)
    assert kept is not None
    assert kept.bring().tolist() == values[PAGE : 20 * PAGE - 7].tolist()
    assert rig.pool.take_use().read_bytes == (19 - 8) * PAGE
