"""The simulated device itself: what it blocks on, counts, refuses and reports."""

from __future__ import annotations

import gc

import pytest
import torch

from offload.device.protocol import Shortages
from offload.errors import DeviceMemoryError
from offload.testing.simulated import SimulatedDevice


def memory(device: SimulatedDevice, nbytes: int) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(0)
    device.allocate(storage, nbytes)
    return storage


def over(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def test_a_full_queue_makes_the_thread_wait_until_one_piece_is_done() -> None:
    device = SimulatedDevice(eagerness=0.0, queue_depth=3)
    storage = memory(device, 64)
    target, source = over(storage), torch.ones(64, dtype=torch.uint8)
    device.pin(source.data_ptr(), 64)
    for count in range(1, 6):
        device.to_device.copy(target, source)
        assert device.to_device.num_done == max(count - 3, 0)
    assert device.to_device.num_full == 2 and device.num_blocking_copies == 0


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("way", ["to_device", "to_host"])
def test_a_copy_of_memory_that_is_not_pinned_is_over_when_the_call_returns(way: str, pinned: bool) -> None:
    device = SimulatedDevice(eagerness=0.0)
    storage, here = memory(device, 64), torch.zeros(64, dtype=torch.uint8)
    if pinned:
        device.pin(here.data_ptr(), 64)
    target, source = (over(storage), here) if way == "to_device" else (here, over(storage))
    device.to_device.wait(device.compute.record())
    device.to_host.wait(device.compute.record())
    getattr(device, way).copy(target, source)
    assert device.num_blocking_copies == (not pinned)
    assert torch.equal(target, source) == (not pinned)
    device.host_access(here.data_ptr(), 64, writes=True)
    assert bool(device.violations) == pinned


def test_freed_memory_goes_to_the_pool_of_its_stream() -> None:
    device = SimulatedDevice(memory_bytes=1000)
    side = device.new_compute_stream()
    storage = memory(device, 600)
    with device.current(side):
        device.free(storage)  # which still is the other stream's
        assert device.free_bytes() == 1000 and device.shortages() == Shortages(0, 0)
        memory(device, 400)
        memory(device, 100)
    assert device.shortages() == Shortages(1, 0)
    with pytest.raises(DeviceMemoryError, match="no room"):
        memory(device, 501)
    assert device.shortages() == Shortages(2, 1)
    assert device.violations == []


def test_work_on_another_stream_that_uses_freed_memory_shows() -> None:
    for forgets in (False, True):
        device = SimulatedDevice(eagerness=0.0)
        side, storage = device.new_compute_stream(), memory(device, 64)
        side.wait(device.compute.record())
        with device.current(side):
            device.compute_access(over(storage), writes=False)
            if not forgets:
                device.used(storage)
        device.free(storage)
        assert bool(device.violations) == forgets


def test_activations_take_memory_until_their_graph_is_gone() -> None:
    device = SimulatedDevice(memory_bytes=4000)
    x = torch.ones(100, requires_grad=True)
    with device.activations.counted():
        y = (x * x).exp()
        assert device.activations.used_bytes == 800  # x once, and what exp gave
        with pytest.raises(torch.OutOfMemoryError, match="no room for 4,000 bytes"):
            torch.ones(1000, requires_grad=True).exp()
    assert device.shortages() == Shortages(1, 1)
    y.sum().backward()
    del y
    gc.collect()
    assert device.free_bytes() == 4000 and x.grad is not None
