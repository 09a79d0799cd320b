"""Gradients between backward and step: added up the same wherever they rest, and spilled only where they must be."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from interrupted import at_every_line

import aio_ext
from offload import waiting
from offload.errors import RankError, WaitTimeout
from offload.memory import tensor_at
from offload.ranks.agreement import Place
from offload.ranks.groups import NO_GROUP
from offload.ranks.world import Peers
from offload.report.meter import Meter
from offload.testing.simulated import SimulatedDevice
from offload.tiers.bounce import Bounce
from offload.tiers.fence import UpdateFence
from offload.tiers.gradients.device import DeviceGradients
from offload.tiers.gradients.host import HostGradients
from offload.tiers.gradients.last_step import LastGradients
from offload.tiers.gradients.make import make_unit_gradients
from offload.tiers.gradients.norms import DeviceSquares, DistributedParts, RankSquares, Squares
from offload.tiers.gradients.spill import BufferPool, SpilledGradients
from offload.tiers.gradients.store import Gradient, GradientStore
from offload.tiers.home import DeviceHome, Home, HostHome, TileHomes, UnitHomes
from offload.units import GRAIN, Distribution, ParameterSpec, Tile, UnitSpec
from offload.waiting import Failure, Monitor
from swapper import OffloadError, StorageIOError

FOREVER_S = 20.0
"""No test takes this long, unless it fails."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["host", "spilled", "device"]


@pytest.fixture(autouse=True)
def _a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", FOREVER_S)


def make_unit(index: int = 0, name: str = "a") -> UnitSpec:
    """Two trained parameters, of which the second lies in both tiles, padding between and behind, and a frozen one."""
    specs = (
        ParameterSpec(f"{name}.small", torch.Size((3, 5)), 15, 0, True, ()),
        ParameterSpec(f"{name}.large", torch.Size((1000,)), 1000, 256, True, ()),
        ParameterSpec(f"{name}.frozen", torch.Size((7,)), 7, GRAIN, False, ()),
    )
    return UnitSpec(index, name, (), specs, GRAIN, 2 * GRAIN, 0)


TILES = (Tile(0, GRAIN // 2, 0), Tile(GRAIN // 2, GRAIN, 0))


class LateTicket:
    """A transfer that moves its bytes when it is waited for, and not before: who forgets to wait sees the old ones."""

    def __init__(self, name: str, events: list[str], move: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._name = name
        self._events = events
        self._move: Callable[[], None] | None = move

    def done(self) -> bool:
        return self._move is None

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        if self._move is not None:
            self._events.append(f"wait for {self._name}")
            self._move()
            self._move = None


class FakeHome:
    """What the store holds of one tile's gradients."""

    def __init__(self, name: str, nbytes: int, events: list[str]) -> None:
        self.bytes = b"\xff" * nbytes  # NaN: never written
        self.last: LateTicket | None = None
        self._name = name
        self._events = events

    def read(self, address: int, *, urgent: bool = False) -> LateTicket:
        return self._begin("read", lambda: ctypes.memmove(address, self.bytes, len(self.bytes)))

    def write(self, address: int) -> LateTicket:
        def move() -> None:
            self.bytes = ctypes.string_at(address, len(self.bytes))

        return self._begin("write", move)

    def _begin(self, verb: str, move: Callable[[], object]) -> LateTicket:
        assert self.last is None or self.last.done() or verb == "read", "two transfers of one record overlap"
        self._events.append(f"{verb} {self._name}")
        self.last = LateTicket(f"{verb} {self._name}", self._events, move)  # type: ignore[arg-type]
        return self.last


class Spilled:
    """Units whose gradients pass through the same buffers on their way to a store."""

    def __init__(self, names: str = "ab", num_buffers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.events: list[str] = []
        self.failure = Failure()
        self.memories = [aio_ext.Memory(GRAIN * dtype.itemsize) for _ in range(num_buffers)]
        for memory in self.memories:
            ctypes.memset(memory.address, 0xFF, memory.nbytes)
        self.fence = UpdateFence((), Monitor(self.failure), Meter(), str)
        self.pool = BufferPool(self.memories, self.fence, self.failure, Meter())  # type: ignore[arg-type]
        self.units = [make_unit(index, name) for index, name in enumerate(names)]
        self.homes = [
            [FakeHome(f"{name}{index}", tile.numel * dtype.itemsize, self.events) for index, tile in enumerate(TILES)]
            for name in names
        ]
        self.places = [
            SpilledGradients(unit, self._tiles(homes), self.pool, dtype, Meter())
            for unit, homes in zip(self.units, self.homes, strict=True)
        ]
        self.store = GradientStore(self.places)
        self._dtype = dtype

    def _tiles(self, homes: list[FakeHome]) -> list[TileHomes]:
        return [TileHomes(tile, Home(0), home) for tile, home in zip(TILES, homes, strict=True)]  # type: ignore[arg-type]

    def take(self, name: str, value: float) -> None:
        """A gradient of each parameter of the unit."""
        unit = self.unit(name)
        for spec in unit.trainable:
            self.store.take(unit, spec, torch.full(spec.shape, value))

    def backward(self, name: str, value: float) -> None:
        """All of a unit's part of a backward."""
        self.take(name, value)
        self.store.close(self.unit(name))

    def unit(self, name: str) -> UnitSpec:
        return next(unit for unit in self.units if unit.name == name)

    def place(self, name: str) -> SpilledGradients:
        return self.places[self.unit(name).index]

    def stored(self, name: str) -> list[float]:
        """What the store holds of the unit: the different values, padding included, in order."""
        flat = b"".join(home.bytes for home in self.homes[self.unit(name).index])
        return torch.frombuffer(bytearray(flat), dtype=self._dtype).unique().tolist()  # type: ignore[no-any-return]

    def told(self) -> list[str]:
        """What has happened since this was asked for last."""
        told = self.events[:]
        self.events.clear()
        return told


class Rig:
    """One unit, its gradients in one kind of place, and all of their squares."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.unit = make_unit()
        self.small, self.large = self.unit.trainable
        self._squares: DeviceSquares | None = None
        if kind == "spilled":
            self.spilled = Spilled("a", dtype=dtype)
            self.unit = self.spilled.units[0]
            self.small, self.large = self.unit.trainable
            self.store = self.spilled.store
        elif kind == "host":
            self.memory = aio_ext.Memory(GRAIN * dtype.itemsize)
            ctypes.memset(self.memory.address, 0xFF, self.memory.nbytes)
            self.store = GradientStore([HostGradients(self.memory.address, dtype)])
        else:
            self._squares = DeviceSquares(SimulatedDevice(), [self.unit], {0}, Meter())
            self.store = GradientStore(
                [DeviceGradients(self.unit, torch.full((GRAIN,), math.nan, dtype=dtype), self._squares)]
            )

    def take(self, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        self.store.take(self.unit, spec, gradient, scale)

    def raw(self, spec: ParameterSpec) -> torch.Tensor:
        """As it rests, its scale not applied."""
        return self.store.gradients_of(self.unit).read(spec)

    def sum_squares(self, spec: ParameterSpec) -> float:
        """As the step sees it, once all is settled."""
        place = self.store.gradients_of(self.unit)
        if isinstance(place, DeviceGradients) and self._squares is not None:
            place.begin_squares()
            for settled, value in self._squares.collect().items():
                if settled in self.store.of(self.unit):
                    self.store.of(self.unit)[settled].sum_squares = value
                self._squares.forget([settled])
        return self.store.of(self.unit)[spec].sum_squares

    def scale(self, spec: ParameterSpec) -> float:
        return self.store.of(self.unit)[spec].scale


def random(spec: ParameterSpec, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def squares_of(gradient: torch.Tensor) -> float:
    """What numpy says."""
    return float(numpy.square(gradient.double().numpy()).sum())


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


# Whatever the place.


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_gradient_is_put_the_next_ones_are_added_and_squares_are_what_numpy_says(
    kind: str, dtype: torch.dtype
) -> None:
    rig = Rig(kind, dtype)
    for spec in (rig.small, rig.large):
        first, second, third = (random(spec, seed, dtype) for seed in (1, 2, 3))
        rig.take(spec, first)
        assert torch.equal(rig.raw(spec), first)  # whatever lay there before
        assert rig.sum_squares(spec) == pytest.approx(squares_of(first), rel=1e-12)
        total = first
        for gradient in (second, third):
            rig.take(spec, gradient)
            total = (total.float() + gradient.float()).to(dtype)
        assert torch.equal(rig.raw(spec), total)
        assert rig.sum_squares(spec) == pytest.approx(squares_of(total), rel=1e-12)
        assert rig.scale(spec) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_the_same_scale_are_added_as_they_are_and_with_different_ones_rescaled(
    kind: str, dtype: torch.dtype
) -> None:
    rig = Rig(kind, dtype)
    spec = rig.large
    first, second, third = (random(spec, seed, dtype) for seed in (1, 2, 3))
    rig.take(spec, first, 0.5)
    rig.take(spec, second, 0.5)
    total = (first.float() + second.float()).to(dtype)
    assert torch.equal(rig.raw(spec), total) and rig.scale(spec) == 0.5
    assert rig.sum_squares(spec) == pytest.approx(squares_of(total), rel=1e-12)
    rig.take(spec, third, 0.25)
    total = ((0.5 * total.float()).to(dtype).float() + 0.25 * third.float()).to(dtype)
    assert torch.equal(rig.raw(spec), total) and rig.scale(spec) == 1.0
    assert rig.sum_squares(spec) == pytest.approx(squares_of(total), rel=1e-12)
    assert rig.store.of(rig.unit)[spec].norm_squared == rig.sum_squares(spec)


def test_what_is_read_is_scaled_and_a_copy(kind: str) -> None:
    rig = Rig(kind, torch.float32)
    gradient = random(rig.small, 1)
    rig.take(rig.small, gradient, 0.5)
    rig.store.multiply([rig.unit], 0.25)
    read = rig.store.read(rig.unit, rig.small)
    assert torch.equal(read, 0.125 * gradient) and read.shape == rig.small.shape
    read.zero_()
    assert torch.equal(rig.store.read(rig.unit, rig.small), 0.125 * gradient)
    assert rig.store.of(rig.unit)[rig.small].norm_squared == pytest.approx(squares_of(0.125 * gradient), rel=1e-12) or (
        kind == "device"  # which knows squares when they are settled
    )


def test_what_is_written_takes_the_place_of_what_was_there(kind: str) -> None:
    rig = Rig(kind, torch.bfloat16)
    rig.take(rig.small, random(rig.small, 1), 0.5)
    rig.take(rig.large, random(rig.large, 2))
    rig.store.write(rig.unit, rig.small, torch.full((3, 5), 2.0, dtype=torch.float64))
    assert torch.equal(rig.raw(rig.small), torch.full((3, 5), 2.0, dtype=torch.bfloat16))
    assert (rig.scale(rig.small), rig.sum_squares(rig.small)) == (1.0, 60.0)
    assert torch.equal(rig.raw(rig.large), random(rig.large, 2).to(torch.bfloat16))


def test_what_is_discarded_or_forgotten_begins_a_new_sum(kind: str) -> None:
    rig = Rig(kind, torch.float32)
    for spec in (rig.small, rig.large):
        rig.take(spec, random(spec, 1))
    rig.store.discard(rig.unit, rig.small)
    rig.store.discard(rig.unit, rig.small)
    assert list(rig.store.of(rig.unit)) == [rig.large]
    rig.take(rig.small, random(rig.small, 2))
    assert torch.equal(rig.raw(rig.small), random(rig.small, 2))
    rig.store.close(rig.unit)
    rig.store.forget(rig.unit)
    assert rig.store.of(rig.unit) == {}
    rig.take(rig.large, random(rig.large, 3))
    assert torch.equal(rig.raw(rig.large), random(rig.large, 3)) and list(rig.store.of(rig.unit)) == [rig.large]


def test_gradients_may_come_in_any_form(kind: str) -> None:
    rig = Rig(kind, torch.float32)
    expected = random(rig.small, 1, torch.bfloat16).float()
    forms = [
        expected.to(torch.bfloat16),
        expected.to_sparse(),
        expected.t().contiguous().t(),
        expected.clone().requires_grad_(),
    ]
    for form in forms:
        rig.store.discard(rig.unit, rig.small)
        rig.take(rig.small, form)
        assert torch.equal(rig.raw(rig.small), expected) and not rig.raw(rig.small).requires_grad
    for count, form in enumerate(forms, 2):
        rig.take(rig.small, form)
        assert torch.allclose(rig.raw(rig.small), count * expected) and not rig.raw(rig.small).requires_grad


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_squares_tell_of_one_element_that_is_not_finite(kind: str, value: float) -> None:
    rig = Rig(kind, torch.float16)
    gradient = random(rig.large, 1)
    gradient[777] = value
    rig.take(rig.large, gradient)
    rig.take(rig.small, random(rig.small, 2))
    assert not math.isfinite(rig.sum_squares(rig.large)) and math.isfinite(rig.sum_squares(rig.small))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("incoming", DTYPES)
def test_all_kinds_of_place_give_the_same_numbers_for_the_same_calls(incoming: torch.dtype, dtype: torch.dtype) -> None:
    def numbers(kind: str) -> list[Any]:
        rig = Rig(kind, dtype)
        seen: list[Any] = []

        def note() -> None:
            for spec in (rig.small, rig.large):
                if spec in rig.store.of(rig.unit):
                    seen.append((spec.name, rig.raw(spec).tolist(), rig.scale(spec), rig.sum_squares(spec)))

        for seed, scale in enumerate((1.0, 1.0, 0.3, 0.3, 1.0)):
            for spec in (rig.small, rig.large):
                rig.take(spec, random(spec, seed, incoming), scale)
            note()
            rig.store.close(rig.unit)
            note()
        rig.store.multiply([rig.unit], 0.7)
        rig.take(rig.large, random(rig.large, 9, incoming), 0.7)
        seen.append(rig.store.read(rig.unit, rig.large).tolist())
        note()
        rig.store.write(rig.unit, rig.small, random(rig.small, 10))
        rig.store.discard(rig.unit, rig.large)
        note()
        rig.store.forget(rig.unit)
        rig.take(rig.large, random(rig.large, 11, incoming), 0.1)
        note()
        return seen

    host, spilled, device = (numbers(kind) for kind in KINDS)
    assert spilled == host
    assert device == host


# What only some places have.


def test_a_first_gradient_may_be_landed_where_it_will_rest() -> None:
    rig = Rig("host", torch.float32)
    gradient = random(rig.small, 1)
    landing = rig.store.gradients_of(rig.unit).landing(rig.small)
    assert landing is not None
    landing.copy_(gradient.view(-1))
    rig.store.landed(rig.unit, rig.small, 0.5, squares_of(gradient))
    assert torch.equal(rig.store.read(rig.unit, rig.small), 0.5 * gradient)
    rig.take(rig.small, gradient, 0.5)
    assert torch.equal(rig.store.read(rig.unit, rig.small), gradient)
    assert Rig("spilled", torch.float32).store.gradients_of(rig.unit).landing(rig.small) is None
    assert Rig("device", torch.float32).store.gradients_of(rig.unit).landing(rig.small) is None


def test_an_empty_parameter_has_no_squares() -> None:
    place = HostGradients(0, torch.float32)
    assert place.sum_squares(ParameterSpec("empty", torch.Size((0,)), 0, 0, True, ())) == 0.0


def test_squares_on_a_device_are_begun_when_gradients_have_come_and_not_again() -> None:
    events: list[str] = []

    class FakeSquares:
        def begin(self, specs: tuple[ParameterSpec, ...], gradients: torch.Tensor) -> None:
            events.append(f"squares of {', '.join(spec.name for spec in specs)}")

    unit = make_unit()
    place = DeviceGradients(unit, torch.zeros(GRAIN), FakeSquares())  # type: ignore[arg-type]
    store = GradientStore([place])
    place.begin_squares()
    assert events == []
    for spec in unit.trainable:
        store.take(unit, spec, torch.ones(spec.shape))
    place.begin_squares()
    place.begin_squares()
    assert events == ["squares of a.small, a.large"]
    for scale in (1.0, 0.5):  # added, rescaled
        store.take(unit, unit.trainable[0], torch.ones(3, 5), scale)
        place.begin_squares()
    assert events == ["squares of a.small, a.large"] * 3
    store.take(unit, unit.trainable[0], torch.ones(3, 5))
    store.forget(unit)
    place.begin_squares()
    assert events == ["squares of a.small, a.large"] * 3


def test_a_unit_whose_gradients_rest_elsewhere_begins_anew_there() -> None:
    rig = Rig("host", torch.float32)
    rig.take(rig.small, random(rig.small, 1))
    there = torch.zeros(GRAIN)
    rig.store.move(rig.unit, DeviceGradients(rig.unit, there, Squares()))
    assert rig.store.of(rig.unit) == {}
    rig.take(rig.small, random(rig.small, 2))
    assert torch.equal(there[:15].view(3, 5), random(rig.small, 2))


def test_the_home_of_gradients_decides_their_place() -> None:
    unit, memory = make_unit(), aio_ext.Memory(GRAIN * 4)
    device, last = SimulatedDevice(), LastGradients(Failure())
    on_device = DeviceHome(device, torch.zeros(GRAIN), Bounce(device))

    def place(grads: Home | None) -> Any:
        pool = BufferPool([], UpdateFence.open(), Failure(), Meter())
        return make_unit_gradients(unit, UnitHomes(Home(0), grads, []), pool, torch.float32, Squares(), Meter(), last)

    assert type(place(HostHome(memory))) is HostGradients  # type: ignore[arg-type]
    assert type(place(on_device)) is DeviceGradients
    assert type(place(Home(0))) is type(place(None)) is SpilledGradients


# Spilled gradients.


def test_units_that_share_a_buffer_spill_and_come_back_for_the_next_backward() -> None:
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    rig.backward("a", 2.0)
    assert rig.told() == [
        *("write b0", "write b1"),
        *("wait for write b0", "wait for write b1"),  # the buffer is a's now
        *("write a0", "write a1"),
    ]
    assert rig.stored("b") == [0.0, 1.0]
    rig.backward("b", 10.0)
    rig.backward("a", 20.0)
    assert rig.told() == [
        *("wait for write a0", "wait for write a1"),
        *("read b0", "read b1", "wait for read b0", "wait for read b1"),
        *("write b0", "write b1"),
        *("wait for write b0", "wait for write b1"),
        *("read a0", "read a1", "wait for read a0", "wait for read a1"),
        *("write a0", "write a1"),
    ]
    rig.place("a").wait_until_spilled()
    assert rig.told() == ["wait for write a0", "wait for write a1"]
    assert (rig.stored("b"), rig.stored("a")) == ([0.0, 11.0], [0.0, 22.0])


def test_a_unit_that_still_has_its_buffer_waits_for_its_spill_and_reads_nothing() -> None:
    rig = Spilled("a")
    rig.backward("a", 1.0)
    rig.backward("a", 2.0)
    assert rig.told() == ["write a0", "write a1", "wait for write a0", "wait for write a1", "write a0", "write a1"]
    rig.place("a").wait_until_spilled()
    assert rig.stored("a") == [0.0, 3.0]


def test_the_next_step_reads_nothing_of_this_one() -> None:
    rig = Spilled("ab")
    for value in (1.0, 5.0):
        rig.backward("b", value)
        rig.backward("a", value)
        for unit in rig.units:
            rig.store.forget(unit)
    rig.place("a").wait_until_spilled()
    assert [event for event in rig.told() if "read" in event] == []
    assert (rig.stored("b"), rig.stored("a")) == ([0.0, 5.0], [0.0, 5.0])


def test_padding_holds_zeros_and_no_gradient_of_another_unit() -> None:
    rig = Spilled("ab")
    flat = tensor_at(rig.memories[0].address, GRAIN, torch.float32)
    rig.take("a", 1.0)
    assert flat.unique().tolist() == [0.0, 1.0]  # it was full of NaN
    flat[20], flat[GRAIN - 1] = 7.0, 8.0  # what a may leave there
    rig.store.close(rig.unit("a"))
    rig.backward("b", 2.0)
    rig.place("b").wait_until_spilled()
    assert rig.stored("b") == [0.0, 2.0]
    assert torch.frombuffer(bytearray(rig.homes[1][0].bytes), dtype=torch.float32)[15:256].tolist() == [0.0] * 241


def test_buffers_are_taken_in_the_order_in_which_their_spills_began() -> None:
    rig = Spilled("abc", num_buffers=2)
    for name in "abcab":
        rig.backward(name, 1.0)
    assert rig.told() == [
        *("write a0", "write a1", "write b0", "write b1"),
        *("wait for write a0", "wait for write a1", "write c0", "write c1"),
        *("wait for write b0", "wait for write b1", "read a0", "read a1", "wait for read a0", "wait for read a1"),
        *("write a0", "write a1"),
        *("wait for write c0", "wait for write c1", "read b0", "read b1", "wait for read b0", "wait for read b1"),
        *("write b0", "write b1"),
    ]


def test_a_unit_that_another_one_interrupts_is_spilled_early_and_read_back() -> None:
    rig = Spilled("ab")
    small, large = rig.unit("a").trainable
    rig.store.take(rig.unit("a"), small, torch.full((3, 5), 1.0))
    rig.backward("b", 2.0)
    rig.store.take(rig.unit("a"), large, torch.full((1000,), 3.0))
    rig.store.close(rig.unit("a"))
    rig.place("a").wait_until_spilled()
    assert rig.told() == [
        *("write a0", "write a1", "wait for write a0", "wait for write a1"),
        *("write b0", "write b1", "wait for write b0", "wait for write b1"),
        *("read a0", "read a1", "wait for read a0", "wait for read a1"),
        *("write a0", "write a1", "wait for write a0", "wait for write a1"),
    ]
    first = torch.frombuffer(bytearray(rig.homes[0][0].bytes), dtype=torch.float32)
    assert first[:15].tolist() == [1.0] * 15 and first[256:].tolist() == [3.0] * (GRAIN // 2 - 256)


def test_a_look_from_outside_of_a_backward_closes_the_unit_again() -> None:
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    rig.backward("a", 2.0)
    rig.told()
    spec = rig.unit("b").trainable[1]
    assert rig.store.read(rig.unit("b"), spec).unique().tolist() == [1.0]
    come_back = ["read b0", "read b1", "wait for read b0", "wait for read b1"]
    assert rig.told() == ["wait for write a0", "wait for write a1", *come_back]  # nothing to spill: it was only read
    rig.store.write(rig.unit("b"), spec, torch.full((1000,), 4.0))
    assert rig.told() == [*come_back, "write b0", "write b1"]
    rig.backward("a", 3.0)  # the buffer is to be had
    assert rig.stored("b") == [0.0, 1.0, 4.0]


def test_spilled_gradients_that_a_step_has_used_are_read_until_others_come() -> None:
    rig = Spilled("ab")
    for name, value in (("a", 1.0), ("b", 2.0)):
        rig.backward(name, value)
    unit = rig.unit("a")
    small, large = unit.trainable
    rig.store.multiply([unit], 0.5)
    rig.store.use_up(unit, {small, large})
    assert rig.store.read(unit, large).unique().tolist() == [0.5]
    rig.backward("b", 2.0)
    rig.told()
    rig.store.take(unit, small, torch.full((3, 5), 3.0))
    assert not any("read" in event for event in rig.told())
    rig.store.close(unit)
    assert rig.store.read(unit, small).unique().tolist() == [3.0]
    with pytest.raises(OffloadError, match="was used by the last step"):
        rig.store.read(unit, large)


def test_one_that_is_set_after_the_step_leaves_the_others_of_a_spilled_unit() -> None:
    rig = Spilled("ab")
    rig.backward("a", 1.0)
    unit = rig.unit("a")
    small, large = unit.trainable
    rig.store.use_up(unit, {small, large})
    rig.store.write(unit, small, torch.full((3, 5), 4.0))
    rig.backward("b", 2.0)
    assert rig.store.read(unit, large).unique().tolist() == [1.0]
    assert rig.store.read(unit, small).unique().tolist() == [4.0]


def test_what_a_step_has_used_of_a_spilled_unit_is_read_beside_what_rests() -> None:
    rig = Spilled("a")
    rig.backward("a", 1.0)
    unit = rig.unit("a")
    small, large = unit.trainable
    rig.store.use_up(unit, {large})
    rig.store.take(unit, small, torch.full((3, 5), 2.0))
    rig.store.close(unit)
    assert rig.store.read(unit, large).unique().tolist() == [1.0]
    assert rig.store.read(unit, small).unique().tolist() == [3.0]


def test_a_look_in_the_middle_of_a_backward_does_not_close_the_unit() -> None:
    rig = Spilled("a")
    rig.take("a", 1.0)
    spec = rig.unit("a").trainable[0]
    assert rig.store.read(rig.unit("a"), spec).unique().tolist() == [1.0]
    rig.store.write(rig.unit("a"), spec, torch.zeros(3, 5))
    assert rig.told() == []
    rig.store.close(rig.unit("a"))
    assert rig.told() == ["write a0", "write a1"]
    rig.store.close(rig.unit("a"))  # it is on its way
    assert rig.told() == []


# Buffers that a speculative update has.


class Taking(threading.Thread):
    """A backward in a thread of its own; tells when it waits for the pool."""

    def __init__(self, rig: Spilled, name: str, value: float) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._call = lambda: rig.backward(name, value)
        self._looked = threading.Semaphore(0)
        wait = rig.pool._returned.wait

        def tell(timeout: float | None = None) -> bool:
            self._looked.release()
            return wait(timeout)

        rig.pool._returned.wait = tell  # type: ignore[method-assign]
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def wait_until_it_waits(self, looks: int = 2) -> None:
        for _ in range(looks):  # it has looked again, and waits on
            assert self._looked.acquire(timeout=FOREVER_S)

    def result(self) -> None:
        self.join(FOREVER_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def test_a_buffer_that_is_lent_is_not_taken_until_the_loan_ends() -> None:
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    loan = rig.place("b").lend()
    assert loan is not None
    taking = Taking(rig, "a", 2.0)
    taking.wait_until_it_waits()
    assert tensor_at(loan.address, GRAIN, torch.float32).unique().tolist() == [0.0, 1.0]  # what the update reads
    assert rig.told() == ["write b0", "write b1"]
    rig.pool.end_loan(loan)
    taking.result()
    assert rig.told() == ["wait for write b0", "wait for write b1", "write a0", "write a1"]


def test_who_waits_for_a_loan_is_woken_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_SLICE_S", 2 * FOREVER_S)  # it does not look by itself
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    loan = rig.place("b").lend()
    assert loan is not None
    taking = Taking(rig, "a", 2.0)
    taking.wait_until_it_waits(looks=1)
    rig.pool.end_loan(loan)
    taking.result()


def test_who_waits_for_a_buffer_that_a_certain_update_has_waits_for_the_update():
    """Which may have to put out units that compute would need sooner, as it does only for somebody who waits."""
    rig = Spilled("ab", num_buffers=1)
    rig.backward("a", 1.0)
    loan = rig.place("a").lend()
    rig.fence.begin([rig.unit("a")])

    def update() -> None:
        while not rig.fence.is_waited_for:
            rig.failure.check()
        rig.fence.done(rig.unit("a"))
        rig.pool.end_loan(loan)

    updating = threading.Thread(target=update)
    updating.start()
    rig.backward("b", 2.0)
    updating.join()


def test_another_buffer_is_taken_before_one_that_is_lent() -> None:
    rig = Spilled("abc", num_buffers=2)
    rig.backward("a", 1.0)
    rig.backward("b", 2.0)
    loan = rig.place("a").lend()  # whose spill began first
    rig.backward("c", 3.0)  # in this thread: it need not wait
    assert loan is not None
    assert tensor_at(loan.address, GRAIN, torch.float32).unique().tolist() == [0.0, 1.0]
    assert rig.told() == [
        *("write a0", "write a1", "write b0", "write b1"),
        *("wait for write b0", "wait for write b1", "write c0", "write c1"),
    ]


def test_nothing_is_lent_where_the_gradients_do_not_lie_in_a_buffer_any_more() -> None:
    rig = Spilled("ab")
    assert rig.place("a").lend() is None
    rig.backward("a", 1.0)
    rig.backward("b", 2.0)
    assert rig.place("a").lend() is None


def test_nothing_is_lent_while_another_unit_takes_the_buffer() -> None:
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    place = rig.place("b")
    loans: list[object] = []
    give_up = place.give_up_buffer

    def ask_and_give_up() -> None:
        loans.append(place.lend())
        give_up()

    place.give_up_buffer = ask_and_give_up  # type: ignore[method-assign]
    rig.take("a", 2.0)
    assert loans == [None]


def test_a_wait_for_a_loan_that_takes_too_long_names_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    rig.place("b").lend()
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeout, match="the speculative update of unit b"):
        rig.take("a", 2.0)


def test_a_failure_of_the_update_ends_a_wait_for_a_loan() -> None:
    rig = Spilled("ab")
    rig.backward("b", 1.0)
    rig.place("b").lend()
    taking = Taking(rig, "a", 2.0)
    taking.wait_until_it_waits()
    rig.failure.record(StorageIOError("read of states: EIO"))
    with pytest.raises(StorageIOError, match="read of states"):
        taking.result()


# Ends.


def test_a_unit_that_leaves_gives_its_buffer_back() -> None:
    rig = Spilled("ab")
    rig.backward("a", 1.0)
    rig.store.forget(rig.unit("a"))
    rig.place("a").leave()
    assert rig.told() == ["write a0", "write a1", "wait for write a0", "wait for write a1"]
    rig.backward("b", 2.0)
    assert rig.told() == ["write b0", "write b1"]
    rig.place("a").leave()  # it has none


def test_a_spill_that_failed_is_raised_where_its_buffer_is_wanted_again() -> None:
    rig = Spilled("ab")
    rig.backward("a", 1.0)
    ticket = rig.homes[0][1].last
    assert ticket is not None
    ticket.error = StorageIOError("write of a1: EIO")
    for wanted in (lambda: rig.take("b", 2.0), lambda: rig.take("a", 2.0), rig.place("a").wait_until_spilled):
        with pytest.raises(StorageIOError, match="a1"):
            wanted()
    rig.pool.drain()  # whatever becomes of it
    assert rig.stored("a")[:2] == [0.0, 1.0]


def test_drain_waits_for_every_spill() -> None:
    rig = Spilled("abc", num_buffers=2)
    rig.backward("a", 1.0)
    rig.backward("b", 2.0)
    rig.told()
    rig.pool.drain()
    assert rig.told() == [f"wait for write {tile}" for tile in ("a0", "a1", "b0", "b1")]


# Interrupts.


def test_an_interrupt_at_any_line_loses_no_buffer_and_no_transfer() -> None:
    def train(rig: Spilled, value: float) -> None:
        for number in range(2):
            for name in "ab":
                rig.backward(name, value + number)
        rig.store.read(rig.unit("a"), rig.unit("a").trainable[1])

    def finish(rig: Spilled) -> list[Any]:
        for unit in rig.units:
            rig.store.forget(unit)
        train(rig, 1.0)
        seen = [{spec.name: known for spec, known in rig.store.of(unit).items()} for unit in rig.units]
        rig.pool.drain()
        return [*seen, rig.stored("a"), rig.stored("b")]

    expected = finish(Spilled("ab"))

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        rig = Spilled("ab")

        def train_and_forget() -> None:
            train(rig, 7.0)
            for unit in rig.units:
                rig.store.forget(unit)

        interrupted(train_and_forget)
        assert finish(rig) == expected

    assert at_every_line("/offload/tiers/gradients/", run, once=False) > 200


def test_who_is_interrupted_and_goes_on_has_whole_sums_or_is_told(kind: str) -> None:
    num_told = 0

    def run(interrupted: Callable[[Callable[[], object]], bool]) -> None:
        nonlocal num_told
        rig = Rig(kind, torch.float32)

        def train() -> None:
            for scale in (1.0, 1.0, 0.5):
                for spec in (rig.small, rig.large):
                    rig.take(spec, random(spec, 1), scale)
            rig.store.close(rig.unit)

        came = interrupted(train)
        for spec in list(rig.store.of(rig.unit)):
            try:
                gradient = rig.store.read(rig.unit, spec)
            except OffloadError as error:
                assert came and "call zero_grad()" in str(error)
                num_told += 1
                with pytest.raises(OffloadError, match=f"gradients of {spec.name} were added up"):
                    rig.take(spec, random(spec, 1))
                with pytest.raises(OffloadError, match="zero_grad"):
                    rig.store.multiply([rig.unit], 0.5)
            else:
                assert rig.sum_squares(spec) * rig.scale(spec) ** 2 == pytest.approx(squares_of(gradient), rel=1e-6)
        rig.store.forget(rig.unit)
        train()
        assert torch.allclose(rig.store.read(rig.unit, rig.large), 2.5 * random(rig.large, 1))

    assert at_every_line("/offload/tiers/gradients/", run, once=False) > 30
    assert num_told


def test_sums_of_all_ranks_are_asked_for_after_each_change_and_again_after_an_interrupt() -> None:
    asked: list[list[str]] = []

    def make_whole(known: Iterable[Mapping[ParameterSpec, Gradient]], at: Place | None) -> None:
        asked.append([spec.name for of_unit in known for spec in of_unit])
        if len(asked) == 2:
            raise KeyboardInterrupt

    unit, memory = make_unit(), aio_ext.Memory(GRAIN * 4)
    store = GradientStore([HostGradients(memory.address, torch.float32)], make_whole)
    store.settle()
    assert asked == []
    small, large = unit.trainable
    store.take(unit, small, random(small, 1))
    store.settle()
    store.settle()
    store.write(unit, large, random(large, 1))
    with pytest.raises(KeyboardInterrupt):
        store.settle()
    store.settle()
    store.settle()
    store.restored()
    store.settle("step 1")
    assert asked == [["a.small"], *[["a.small", "a.large"]] * 3]


def test_what_a_step_has_used_can_be_read_only_if_no_rank_has_spilled_its_part() -> None:
    unit, memory = make_unit(), aio_ext.Memory(GRAIN * 4)
    small = unit.trainable[0]
    for spilled_by_ranks in ((), {unit.index}):
        store = GradientStore([HostGradients(memory.address, torch.float32)], spilled_by_ranks=spilled_by_ranks)
        store.take(unit, small, random(small, 1))
        assert store.is_kept(unit, small)
        store.use_up(unit, {small})
        assert store.is_kept(unit, small) is not bool(spilled_by_ranks)
        if spilled_by_ranks:
            with pytest.raises(OffloadError, match="was used by the last step"):
                store.read(unit, small)
        else:
            assert torch.equal(store.read(unit, small), random(small, 1))


def test_sums_are_added_up_over_shards_and_then_over_parts() -> None:
    unit, memory = make_unit(), aio_ext.Memory(GRAIN * 4)
    over: list[str] = []

    def add_up(name: str, factor: float, own: torch.Tensor, at: Place | None) -> torch.Tensor:
        over.append(name)
        return own * factor

    squares = RankSquares([unit], [partial(add_up, "shards", 2.0), partial(add_up, "parts", 5.0)])
    store = GradientStore([HostGradients(memory.address, torch.float32)], squares.make_whole)
    small, _ = unit.trainable
    store.take(unit, small, torch.ones(3, 5))
    for _ in range(2):
        store.settle()
        store.restored()
        known = store.of(unit)[small]
        assert (known.sum_squares, known.own_squares) == (150.0, 15.0)  # of its own sum, whenever it is asked for
    assert over == ["shards", "parts"] * 2


class FakeWork:
    """An all-gather that is over at once, or ends with an error."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None:
        if self._error is not None:
            raise self._error


def parts_of(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> DistributedParts:
    """Of two ranks: both have a part of ``a.small``, and all of ``a.large``."""

    def all_gather(into: list[torch.Tensor], own: torch.Tensor, *, group: object, async_op: bool) -> FakeWork:
        for rank, of_rank in enumerate(into):
            of_rank.copy_(own + 10 * rank)
        return FakeWork(error)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    unit = make_unit()
    small = replace(unit.parameters[0], outer=Mock(Distribution, is_sharded=True))
    unit = replace(unit, parameters=(small, *unit.parameters[1:]))
    return DistributedParts([unit], Peers((0, 1), 0, NO_GROUP), Failure())


def test_a_parameter_that_ranks_have_parts_of_counts_for_each_part_and_a_whole_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parts_of(monkeypatch).add_up(torch.tensor([1.0, 2.0]), None).tolist() == [12.0, 2.0]


def test_ranks_that_are_gone_or_interrupted_while_sums_are_added_up_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RankError, match="is gone: connection closed"):
        parts_of(monkeypatch, RuntimeError("connection closed")).add_up(torch.zeros(2), None)
    parts = parts_of(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        parts.add_up(torch.zeros(2), None)
    with pytest.raises(OffloadError, match="interrupted while ranks added up norms"):
        parts._failure.check()
