"""Gradients on their way from a simulated device to the host: each comes once, with its sum, whatever interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from interrupted import at_every_line

import aio_ext
from offload import waiting
from offload.report.meter import Meter
from offload.testing.simulated import SimulatedDevice
from offload.tiers.gradients.device import DeviceGradients
from offload.tiers.gradients.host import HostGradients
from offload.tiers.gradients.norms import DeviceSquares, Squares
from offload.tiers.gradients.sink import GradientDtypes
from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.transport import GradientTransport
from offload.units import GRAIN, ParameterSpec, UnitSpec
from offload.waiting import Failure, Job
from swapper import StorageIOError

FOREVER_S = 20.0
"""No test takes this long, unless it fails."""


@pytest.fixture(autouse=True)
def _a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", FOREVER_S)


def make_unit(index: int) -> UnitSpec:
    specs = (
        ParameterSpec(f"u{index}.small", torch.Size((3, 5)), 15, 0, True, ()),
        ParameterSpec(f"u{index}.large", torch.Size((1000,)), 1000, 256, True, ()),
        ParameterSpec(f"u{index}.empty", torch.Size((0,)), 0, 1500, True, ()),
    )
    return UnitSpec(index, f"u{index}", (), specs, GRAIN, GRAIN, 0)


class Rig:
    """Units u0 and u1, whose gradients rest on the host, and u2, which is resident on the device."""

    def __init__(
        self,
        *,
        made: torch.dtype = torch.float32,
        kept: torch.dtype = torch.float32,
        max_bytes: int = 1 << 20,
        on_device: bool = True,
        seed: int = 0,
    ) -> None:
        self.device = SimulatedDevice(seed)
        self.units = [make_unit(index) for index in range(3)]
        self.failure = Failure()
        self._memories = [aio_ext.Memory(GRAIN * 4) for _ in range(5)]
        for memory in self._memories:
            self.device.pin(memory.address, memory.nbytes)
        squares: Squares = DeviceSquares(self.device, self.units, {2}, Meter()) if on_device else Squares()
        places = [HostGradients(memory.address, kept) for memory in self._memories[:2]]
        self.store = GradientStore([*places, DeviceGradients(self.units[2], torch.zeros(GRAIN, dtype=kept), squares)])
        self.transport = GradientTransport(
            units=self.units,
            device=self.device,
            store=self.store,
            landings=self._memories[3:],  # type: ignore[arg-type]
            dtypes=GradientDtypes(made, kept),
            max_bytes=max_bytes,
            squares=squares,
            failure=self.failure,
            meter=Meter(),
        )

    def take(self, index: int, which: int, gradient: torch.Tensor, scale: float = 1.0) -> None:
        unit = self.units[index]
        spec = unit.parameters[which]
        gradient = gradient.to(self.transport.dtypes.made).view(spec.shape)
        self.device.compute_access(gradient, writes=True)
        self.transport.take(unit, spec, gradient, scale)

    def backward(self, seed: int, scale: float = 1.0) -> None:
        for unit in reversed(self.units):
            for which, spec in enumerate(unit.parameters):
                self.take(unit.index, which, random(spec, seed + 10 * unit.index + which), scale)
            self.transport.close(unit)

    def outcome(self) -> list[tuple[str, list[float], float, float]]:
        """Of each parameter: its elements, the scale, the sum of squares."""
        return [
            (spec.name, self.store.gradients_of(unit).read(spec).view(-1).tolist(), known.scale, known.sum_squares)
            for unit in self.units
            for spec, known in sorted(self.store.of(unit).items(), key=lambda item: item[0].name)
            if spec.numel
        ]

    def drop(self) -> None:
        """What zero_grad() does."""
        self.transport.settle()
        for unit in self.units:
            self.transport.forget(unit)


def random(spec: ParameterSpec, seed: int) -> torch.Tensor:
    return torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed))


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("made", "kept"), [*DTYPES, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize("on_device", [True, False])
def test_what_comes_is_what_a_store_without_a_device_has(
    made: torch.dtype, kept: torch.dtype, max_bytes: int, on_device: bool
) -> None:
    rig = Rig(made=made, kept=kept, max_bytes=max_bytes, on_device=on_device, seed=max_bytes)
    memories = [aio_ext.Memory(GRAIN * 4) for _ in rig.units]
    store = GradientStore([HostGradients(memory.address, kept) for memory in memories])
    for seed, scale in ((1, 1.0), (2, 1.0), (3, 0.5)):
        rig.backward(seed, scale)
        for unit in rig.units:
            for which, spec in enumerate(unit.parameters):
                gradient = random(spec, seed + 10 * unit.index + which).to(made).view(spec.shape)
                store.take(unit, spec, gradient.to(kept) if seed == 1 else gradient, scale)
        rig.transport.settle()
        for unit in rig.units[: 3 if on_device else 2]:
            for spec in unit.parameters[:2]:
                own, found = (each.of(unit)[spec] for each in (store, rig.store))
                assert (found.scale, found.sum_squares) == (own.scale, own.sum_squares)
                assert torch.equal(rig.store.read(unit, spec), store.read(unit, spec))
    assert rig.device.violations == []
    assert rig.transport._bytes_under_way == 0 and len(rig.transport._landings) == 2


def test_units_are_complete_with_their_last_gradient_and_not_if_more_is_coming() -> None:
    rig = Rig()
    rig.backward(1)
    rig.transport.settle()
    assert [unit.name for unit in rig.transport.complete()] == ["u1", "u0"]  # u2 is the device's
    for index in (1, 0):
        rig.transport.close(rig.units[index])
    rig.take(1, 0, torch.ones(15))
    rig.transport.settle()
    assert [unit.name for unit in rig.transport.complete()] == ["u0"]


def test_a_gradient_waits_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_bytes=4000)
    held, looked = threading.Event(), threading.Event()
    rig.transport._finisher.submit(lambda: held.wait(FOREVER_S) and None)
    wait = rig.transport._changed.wait

    def tell(timeout: float | None = None) -> bool:
        looked.set()
        return wait(timeout)

    monkeypatch.setattr(rig.transport._changed, "wait", tell)
    rig.take(0, 1, torch.ones(1000))
    taking = threading.Thread(target=rig.take, args=(1, 1, torch.ones(1000)))
    taking.start()
    assert looked.wait(FOREVER_S) and taking.is_alive() and rig.transport._bytes_under_way == 4000
    held.set()
    taking.join(FOREVER_S)
    rig.transport.settle()
    assert [name for name, *_ in rig.outcome()] == ["u0.large", "u1.large"]


def test_a_failure_on_the_way_is_raised_where_gradients_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def fail(*_: Any) -> None:
        raise StorageIOError("planted")

    monkeypatch.setattr(rig.store, "landed", fail)
    rig.take(0, 1, torch.ones(1000))
    with pytest.raises(StorageIOError, match="planted"):
        rig.transport.settle()
    assert isinstance(rig.failure.first, StorageIOError)


# Interrupts.


def test_an_interrupt_at_any_line_of_a_backward_leaves_room_for_the_next_one() -> None:
    def finish(rig: Rig) -> list[Any]:
        rig.drop()
        rig.backward(1)
        rig.backward(2)
        rig.transport.settle()
        assert rig.transport._bytes_under_way == 0 and len(rig.transport._landings) == 2
        assert rig.device.violations == []
        return rig.outcome()

    expected = finish(Rig())

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        rig = Rig(max_bytes=4000)
        rig.take(0, 1, torch.ones(1000))  # so that the next one is added up

        def train() -> None:
            rig.backward(3)
            rig.transport.settle()
            list(rig.transport.complete())
            for unit in rig.units:
                rig.transport.forget(unit)

        interrupted(train)
        assert finish(rig) == expected

    assert at_every_line("/offload/tiers/gradients/", run, once=True) > 90


def test_who_is_interrupted_and_goes_on_has_each_gradient_once_or_not_at_all() -> None:
    whole = Rig()
    whole.backward(1)
    whole.transport.settle()
    expected = {name: rest for name, *rest in whole.outcome()}

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        rig = Rig()

        def train() -> None:
            rig.backward(1)
            rig.transport.settle()

        interrupted(train)
        rig.transport.settle()
        assert all(expected[name] == rest for name, *rest in rig.outcome())

    assert at_every_line("/offload/tiers/gradients/", run, once=True) > 80


def test_who_was_interrupted_while_it_waited_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    held = threading.Event()
    rig.transport._finisher.submit(lambda: held.wait(FOREVER_S) and None)
    rig.backward(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Job, "wait", Mock(side_effect=KeyboardInterrupt))
        rig.transport.settle()
    wait = Job.wait

    def let_go(job: Job, what: Callable[[], str]) -> None:
        held.set()
        wait(job, what)

    monkeypatch.setattr(Job, "wait", let_go)
    rig.transport.settle()
    assert held.is_set() and len(rig.outcome()) == 6


# Sums of squares.


def test_sums_of_two_streams_that_share_their_scratch_memory_are_ordered() -> None:
    device = SimulatedDevice()
    units = [make_unit(0), make_unit(1)]
    squares = DeviceSquares(device, units, {0, 1}, Meter())
    towers = [device.new_compute_stream() for _ in units]
    gradients = [torch.full((GRAIN,), float(value)) for value in (2, 3)]
    for unit, tower, gradient in zip(units, towers, gradients, strict=True):
        with device.current(tower):
            device.compute_access(gradient, writes=True)
            squares.begin(unit.trainable, gradient)
    sums = squares.collect()
    assert {spec.name: value for spec, value in sums.items() if spec.numel} == {
        **{"u0.small": 60.0, "u0.large": 4000.0},
        **{"u1.small": 135.0, "u1.large": 9000.0},
    }
    squares.close()
    assert device.violations == [] and device.allocated_bytes == 0 and not device.pinned


def test_sums_stay_to_be_collected_until_they_are_forgotten() -> None:
    device = SimulatedDevice()
    unit = make_unit(0)
    squares = DeviceSquares(device, [unit], {0}, Meter())
    squares.begin(unit.trainable, torch.ones(GRAIN))
    first = squares.collect()
    assert squares.collect() == first != {}
    squares.forget(first)
    assert squares.collect() == {} and squares.send(unit.trainable).read() == {}
    squares.close()


def test_a_device_without_kernels_leaves_sums_to_the_host() -> None:
    squares = Squares()
    unit = make_unit(0)
    assert squares.begin(unit.trainable, torch.ones(GRAIN)) is None
    assert squares.send(unit.trainable).arrived is None and squares.collect() == {}
