"""What begins a run by several threads: random numbers that are drawn in pieces, memory that is faulted in."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadEngine, deferred_init
from offload.assembly import compute
from offload.birth import draws, generator_state
from offload.birth.draws import Draw
from offload.birth.generator_state import advance, numbers_of
from offload.birth.recording import Recording
from offload.closing import Closers
from offload.memory import passing_tensor
from offload.report.meter import Meter
from offload.testing.simulated import SimulatedDevice

FOREVER_S = 20.0
CALLS = {
    "uniform": (torch.ops.aten.uniform_.default, [-1.0, 2.0]),
    "normal": (torch.ops.aten.normal_.default, [0.5, 0.02]),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_PIECE", 64)


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("call", CALLS)
def test_pieces_have_the_numbers_of_one_call_and_the_generator_goes_on_after_them(
    call: str, dtype: torch.dtype, before: int
):
    function, settings = CALLS[call]
    for numel in (0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129, 1000, 1024):
        generators = [torch.Generator().manual_seed(numel) for _ in range(2)]
        for generator in generators:
            torch.empty(before).normal_(generator=generator)  # which may leave one number for later
        expected = torch.empty(numel, dtype=dtype)
        function(expected, *settings, generator=generators[0])
        draw = Draw(function, settings, torch.empty(numel, dtype=dtype, device="meta"), generators[1])
        assert torch.equal(generators[0].get_state(), generators[1].get_state()), numel
        found = torch.full((numel,), torch.nan, dtype=dtype)
        draw.fill(found)
        assert torch.equal(found, expected), numel


@pytest.mark.parametrize("call", ["uniform_", "normal_"])
def test_rows_of_a_drawn_weight_take_memory_for_themselves_and_a_piece(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, which are asked for one after the other, and a piece of each of two weights is drawn once."""
    torch.manual_seed(3)
    expected = [getattr(torch.empty(12, 5, 7), call)() for _ in range(2)]
    torch.manual_seed(3)
    with Recording() as recording:
        weights = [getattr(torch.empty(12, 5, 7), call)() for _ in range(2)]
    sizes, drawn = [], []
    monkeypatch.setattr(draws, "passing_tensor", lambda nbytes: sizes.append(nbytes) or passing_tensor(nbytes))
    monkeypatch.setattr(recording, "value", None)  # the whole is not asked for
    draw = Draw._draw
    monkeypatch.setattr(Draw, "_draw", lambda of, number, into: drawn.append((of, number)) or draw(of, number, into))
    for row in range(12):
        for weight, value in zip(weights, expected, strict=True):
            assert torch.equal(recording.rows(weight, row, row + 1), value[row : row + 1])
    assert max(sizes) <= 4 * (64 + 16)
    assert len(drawn) == len(set(drawn)) == 2 * len(list(draws._pieces(12 * 35)))
    assert torch.equal(recording.rows(weights[0], 2, 11), expected[0][2:11])


def test_the_rows_of_a_weight_that_was_changed_after_its_draw_are_those_of_the_whole() -> None:
    torch.manual_seed(3)
    expected = torch.empty(12, 35).normal_().mul_(2)
    torch.manual_seed(3)
    with Recording() as recording:
        weight = torch.empty(12, 35).normal_().mul_(2)
    assert torch.equal(recording.rows(weight, 3, 5), expected[3:5])


def test_pieces_are_drawn_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draws, "host_cores", lambda: SimpleNamespace(available=2.5))
    met = threading.Barrier(2, timeout=FOREVER_S)
    waits = False

    def meet(piece: torch.Tensor, *settings: Any, generator: torch.Generator) -> None:
        if waits:
            met.wait()
        piece.uniform_(generator=generator)

    draw = Draw(meet, [], torch.empty(128), torch.Generator())
    waits = True
    draw.fill(torch.empty(128))


def test_a_deferred_model_of_many_pieces_comes_out_as_in_memory(monkeypatch: pytest.MonkeyPatch):
    sizes, fill = [], Draw.fill
    monkeypatch.setattr(Draw, "fill", lambda draw, tensor: (sizes.append(tensor.numel()), fill(draw, tensor)))

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(37, 24), nn.Linear(24, 53), nn.LayerNorm(53), nn.Linear(53, 7, bias=False))
        nn.init.normal_(model[1].weight, std=0.02)
        nn.init.normal_(model[3].weight.t(), std=0.1)  # not in the order of its memory
        nn.init.trunc_normal_(model[0].weight, std=0.3)
        return model

    torch.manual_seed(7)
    expected, after = dict(build().named_parameters()), torch.rand(3)
    torch.manual_seed(7)
    model, after_it = deferred_init(build), torch.rand(3)
    with OffloadEngine(model, precision="fp32", lr=1e-3) as engine:
        found = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    assert torch.equal(after, after_it) and sorted(sizes) == [53, 37 * 24, 24 * 53], "those in order"
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_arena_is_faulted_in_by_the_cores_of_the_rank(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(compute, "fault_in", lambda *of: asked.append(of))
    run: Any = SimpleNamespace(cores=3.5, plan=SimpleNamespace(compute_bytes=0, activation_bytes=0))
    arena: Any = SimpleNamespace(address=1 << 20, nbytes=8192)
    compute.OnDevice(run, SimulatedDevice(), Meter(), Closers()).pin(arena)
    assert asked == [(1 << 20, 8192, 3)]


@pytest.mark.parametrize("function", [torch.Tensor.uniform_, torch.Tensor.normal_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_state_is_moved_on_as_far_as_numbers_would_move_it(function: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    state, of_block = generator.get_state(), numbers_of(function, dtype, 16)
    assert of_block in (16, 32)
    for num_blocks in (1, 38, 39, 40, 1, 100, 5000, 2):
        function(torch.empty(16 * num_blocks, dtype=dtype), generator=generator)
        advance(state, of_block * num_blocks)
        assert torch.equal(state, generator.get_state()), num_blocks


def test_what_takes_another_count_of_numbers_or_another_layout_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_three(tensor: torch.Tensor, generator: torch.Generator) -> None:
        torch.empty(3 * tensor.numel()).uniform_(generator=generator)

    assert numbers_of(takes_three, torch.float32, 16) is None
    monkeypatch.setattr(generator_state, "_NUM_BYTES", 5000)
    numbers_of.cache_clear()
    assert numbers_of(torch.Tensor.uniform_, torch.float32, 16) is None
    try:
        test_pieces_have_the_numbers_of_one_call_and_the_generator_goes_on_after_them("normal", torch.float32, 1)
    finally:
        numbers_of.cache_clear()
