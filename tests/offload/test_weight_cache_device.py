"""A device's memory as a cache of weights, filled from host memory."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from cache_rig import PART_BYTES, Call, Rig, fill, look, rig_waits, taught
from cache_rig import a_deadline as a_deadline

from offload.errors import WaitTimeout
from offload.report.meter import Meter
from offload.testing.simulated import SimulatedDevice
from offload.tiers.bounce import Bounce
from offload.tiers.weights import host_source
from offload.tiers.weights.device import DeviceCarrier, DeviceLevel
from offload.tiers.weights.host_source import HostSource
from offload.tiers.window import DeviceWindow
from offload.units import UnitSpec
from swapper import StorageIOError


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
        self.source = HostSource(self.host.weights, self.device, self.failure, Meter())
        self.weights = DeviceLevel(
            units,
            lambda unit: False,
            DeviceCarrier(self.windows, self.source, self.device, room * PART_BYTES, 0),
            self.device,
            Bounce(self.device),
            self.failure,
            Meter(),
            prefetch=prefetch,
        )
        self.pins = {name: self.weights.pin(unit) for name, unit in self.units.items()}

    def acquire(self, name: str, *, training: bool = True) -> None:
        self.pins[name].take(training=training)

    def release(self, name: str) -> None:
        self.pins[name].release()

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
        return self.source.copied_bytes / PART_BYTES

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


def test_compute_that_waits_for_an_update_on_the_host_says_so() -> None:
    rig = DeviceRig("ab", room=2)
    a, fence = rig.units["a"], rig.host.weights.fence
    fence.begin([a])
    assert [rig.weights.cache.carrier.waits_for(rig.units[name]) for name in "ab"] == ["update", "read"]
    fence.done(a)
    assert rig.weights.cache.carrier.waits_for(a) == "read"
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
    rig.weights.cache.make_permanent(rig.units["a"])
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
    assert not any(entry.pins for entry in rig.host.weights.cache.entries)


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
    monkeypatch.setattr(host_source, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeout, match="the start of a copy to the device"):
        rig.acquire("a")
    while not rig.host.store._kept["read a"]:
        threading.Event().wait(0.001)  # for the thread that starts copies
    rig.host.store.end("read a")
    rig.close()


def test_an_error_that_the_host_meets_where_a_copy_ends_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DeviceRig("ab", room=2, stored=True)

    def fail(unit: UnitSpec, **options: object) -> None:
        raise StorageIOError("write of b: EIO")

    monkeypatch.setattr(rig.host.weights, "release", fail)
    with contextlib.suppress(StorageIOError):
        rig.acquire("a")
    with contextlib.suppress(StorageIOError):
        rig.weights.close()
    with pytest.raises(StorageIOError, match="write of b"):
        rig.failure.check()
