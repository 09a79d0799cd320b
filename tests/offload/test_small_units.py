"""What a small unit takes of a step: calls that are counted, updates as one job, windows that stay open."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aio_ext
from offload import OffloadEngine, kernels
from offload.memory import tensor_at
from offload.optim.formats import Formats
from offload.optim.rule import TileBytes
from offload.report.meter import Meter
from offload.tiers.home import TileHomes, UnitHomes
from offload.tiers.weights.pin import UnitState
from offload.tiers.window import POISON, CopyWindow, SwapWindow
from offload.torch_internals import can_swap_memory, graph_task
from offload.units import Tile, UnitSpec
from offload.update.step import Segment, UnitUpdate
from offload.update.together import GRAIN, Together, can_take
from offload.uses import HostWindows
from swapper import OffloadError

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import bench_units

MOST_CALLS = 125
"""Of Python functions, for one unit and step beyond plain PyTorch; there were 323 before each was looked at."""

swaps = pytest.mark.skipif(not can_swap_memory(), reason="windows are copies there")


@swaps
def test_a_small_unit_takes_a_bounded_number_of_python_calls():
    by_function, calls = bench_units.calls_of_unit()
    assert 0 < calls < MOST_CALLS, by_function.most_common(40)


def homes_of(numel: int, first: int, num_tiles: int = 1) -> UnitHomes:
    """Homes whose addresses tell them apart."""
    each = numel // num_tiles
    tiles = [
        TileHomes(Tile(start, start + each, 8 * each), SimpleNamespace(address=first + 2 + start))  # type: ignore[arg-type]
        for start in range(0, numel, each)
    ]
    return UnitHomes(SimpleNamespace(address=first), SimpleNamespace(address=first + 1), tiles)  # type: ignore[arg-type]


class Told:
    """A rule that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, int, int, TileBytes]] = []

    def apply(self, frozen: Any, tile: Tile, start: int, stop: int, at: TileBytes, native: Any) -> None:
        self.given.append((frozen, start, stop, at))


def test_tiles_of_neighbours_are_one_job_that_tells_of_units_whose_last_tile_it_has():
    done: list[Any] = []
    units = [UnitSpec(index, f"u{index}", (), (), GRAIN, GRAIN, 0) for index in range(2)]
    together, rule, meter = Together(done.extend), Told(), Meter()
    first, second = homes_of(100, 1000), homes_of(2 * GRAIN, 5000, num_tiles=2)
    segments = (Segment(0, 40, "slow"), Segment(50, 100, "fast"))
    assert not together.add(UnitUpdate(units[0], segments), first, first.tiles[0])
    assert together.add(UnitUpdate(units[1], (Segment(0, 2 * GRAIN, "fast"),)), second, second.tiles[0])
    together.apply(rule, Formats(4, 0, 4), meter, kernels.on_host)  # type: ignore[arg-type]
    assert rule.given == [
        ("slow", 0, 40, TileBytes.in_place(1002, 1000, 1001)),
        ("fast", 50, 100, TileBytes.in_place(1002, 1000 + 50 * 4, 1001 + 50 * 4)),
        ("fast", 0, GRAIN, TileBytes.in_place(5002, 5000, 5001)),
    ]
    assert done == [units[0]]
    meter.restart()
    assert [span.name for span in meter.trace.last if span.track == "update"] == ["u0", "u1"]


def test_units_with_a_record_elsewhere_are_no_part_of_such_a_job():
    assert can_take(homes_of(100, 1000, num_tiles=2))
    for name in ("weights", "grads"):
        homes = homes_of(100, 1000)
        setattr(homes, name, SimpleNamespace(address=None))
        assert not can_take(homes)
    homes = homes_of(100, 1000, num_tiles=2)
    homes.tiles[1].states.address = None
    assert not can_take(homes)


@swaps
def test_the_window_of_a_resident_unit_stays_open_until_the_memory_goes():
    poison = aio_ext.Pattern(4096, POISON)
    window = SwapWindow(16, torch.float32, poison)
    memory = [aio_ext.Memory(4096), aio_ext.Memory(4096)]
    for number, each in enumerate(memory):
        tensor_at(each.address, 16, torch.float32).fill_(number + 1)
    windows = HostWindows([window], lambda pin: pytest.fail("nobody has kept anything"))

    def pin(address: int, state: UnitState) -> Any:
        place = SimpleNamespace(address=address)
        return SimpleNamespace(entry=SimpleNamespace(unit=SimpleNamespace(index=0), place=place, state=state))

    first, second = (pin(each.address, UnitState.PERMANENT) for each in memory)
    for one, value in ((first, 1), (first, 1), (second, 2), (first, 1)):  # an update may have flipped the two places
        assert not windows.open(one)
        assert (window.flat == value).all()
        windows.close(one)
        assert (window.flat == value).all()
    windows.shut()
    assert window.flat.isnan().all()
    passing = pin(memory[1].address, UnitState.RESIDENT)
    assert windows.open(passing)
    windows.close(passing)
    assert window.flat.isnan().all()


@swaps
def test_the_windows_of_an_engine_close_with_it(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    engine = OffloadEngine(model, nvme_path=tmp_path, host_memory="64MiB", lr=1e-3)
    flats = [unit.window.flat for unit in engine._session.parts.hooks.units]
    model(torch.ones(1, 4)).sum().backward()
    assert not any(flat.isnan().all() for flat in flats)
    engine.close()
    assert all(flat.isnan().all() for flat in flats)


@swaps
def test_what_was_left_of_a_resident_unit_is_given_back_once_nobody_looks_at_it():
    window = SwapWindow(16, torch.float32, aio_ext.Pattern(4096, POISON))
    memory, given_back = aio_ext.Memory(4096), []
    tensor_at(memory.address, 16, torch.float32).fill_(1)
    windows = HostWindows([window], lambda pin: lambda: given_back.append(pin))
    place = SimpleNamespace(address=memory.address)
    entry = SimpleNamespace(unit=SimpleNamespace(index=0), place=place, state=UnitState.PERMANENT)
    pin: Any = SimpleNamespace(entry=entry)
    windows.open(pin)
    window.keep(True)
    windows.close(pin)
    windows.open(pin)
    assert (window.flat == 1).all() and not given_back
    window.keep(False)
    windows.close(pin)
    assert given_back == [pin]
    windows.open(pin)
    assert (window.flat == 1).all()


def test_a_window_that_copies_does_not_stay_open():
    window = CopyWindow(16, torch.float32, aio_ext.Pattern(4096, POISON))
    memory = aio_ext.Memory(4096)
    windows = HostWindows([window], lambda pin: pytest.fail("nobody has kept anything"))
    place = SimpleNamespace(address=memory.address)
    entry = SimpleNamespace(unit=SimpleNamespace(index=0), place=place, state=UnitState.PERMANENT)
    pin: Any = SimpleNamespace(entry=entry)
    windows.open(pin)
    windows.close(pin)
    assert not window.has_copy()


class Scaled(torch.autograd.Function):
    """A product whose backward writes to the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        result = gradients[0] * weight, (gradients[0] * x).sum(0)
        weight.mul_(0.5)
        return result


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)  # type: ignore[no-any-return]


def uses_of(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The uses that begin from now on: the unit, and whether a backward runs."""
    uses: list[tuple[str, bool]] = []
    passes = engine._session.trained.step.passes
    begin = passes.begin_use

    def begin_use(unit: UnitSpec) -> bool:
        uses.append((unit.name, graph_task() != -1))
        return begin(unit)

    monkeypatch.setattr(passes, "begin_use", begin_use)
    return uses


@swaps
def test_a_backward_uses_no_resident_units_but_those_that_a_function_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scale(), torch.nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory="64MiB", optimizer="sgd", lr=0.1) as engine:
        uses = uses_of(engine, monkeypatch)
        for step in range(4):
            if step == 1:
                uses.clear()  # parameters that rest for the first time are new to whoever counts references to them
            x = torch.full((2, 4), 1.0 + step)
            model(x).sum().backward()
            plain(x).sum().backward()
            engine.optimizer.step()
            optimizer.step()
            for one in (engine.optimizer, optimizer):
                one.zero_grad()
        names = [unit.spec.name for unit in engine._session.parts.hooks.units]
        assert uses == [*((name, False) for name in names), (names[1], True)] * 3
        engine.synchronize()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.detach(), theirs)
        compute = [span.name for span in engine._session.parts.meter.trace.last if span.track == "compute"]
        assert sorted(compute) == sorted([*names, *names])


@swaps
def test_two_threads_cannot_go_backward_at_once_where_no_unit_is_used(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with OffloadEngine(model, nvme_path=tmp_path, host_memory="64MiB", lr=1e-3):
        losses = [model(torch.ones(1, 4)).sum() for _ in range(2)]
        errors: list[BaseException] = []

        def other() -> None:
            try:
                losses[1].backward()
            except OffloadError as error:
                errors.append(error)

        def in_another_thread(_: object) -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        handle = model[0].bias.register_post_accumulate_grad_hook(in_another_thread)
        losses[0].backward()
        handle.remove()
        assert [str(error)[:29] for error in errors] == ["two threads run the model at "]
