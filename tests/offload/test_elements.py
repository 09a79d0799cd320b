"""The walk over the elements of parameters: each record is borrowed once, and every boundary is met."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from offload.elements import Elements, Layout, NewElements, Span, first_states, source_of
from offload.kernels import CODE_BLOCK
from offload.memory import tensor_at
from offload.native_optimizers import NATIVE_OPTIMIZERS
from offload.optim.formats import Formats
from offload.optim.kernel_rule import KernelRule
from offload.optim.moments import read_moments
from offload.optim.torch_rule import TorchRule
from offload.tiers.home import Home, TileHomes
from offload.units import GRAIN, ParameterSpec, Site, Tile, UnitSpec, shard_unit

PRECISIONS = {
    torch.bfloat16: Formats(weights=2, master=2, grads=2),
    torch.float16: Formats(weights=2, master=4, grads=2),
    torch.float32: Formats(weights=4, master=0, grads=4),
}


def unit_of(*numels: int, frozen: Sequence[int] = (), num_grains: int = 0) -> UnitSpec:
    """Parameters of these sizes one after the other, each at the start of a block of codes."""
    specs, end, trained = [], 0, 0
    for index, numel in enumerate((*numels, *frozen)):
        if index == len(numels):
            trained = end = max(-(-end // GRAIN), num_grains) * GRAIN
        site = Site(nn.Module(), "value")
        site.module.value = nn.Parameter(torch.zeros(numel, device="meta"))
        specs.append(ParameterSpec(f"p{index}", torch.Size([numel]), numel, end, index < len(numels), (site,)))
        end += -(-numel // CODE_BLOCK) * CODE_BLOCK
    end = max(-(-end // GRAIN), num_grains) * GRAIN
    return UnitSpec(0, "unit", (), tuple(specs), trained if frozen else end, end, 0)


class Memory:
    """Records in memory that are lent, and the story of that."""

    def __init__(self, unit: UnitSpec, tiles: Sequence[Tile], formats: Formats) -> None:
        self.story: list[str] = []
        self._tiles = [TileHomes(tile, Home(tile.nbytes)) for tile in tiles]
        self._weights = torch.full([unit.numel * formats.weights], 7, dtype=torch.uint8)
        self._states = {id(tile): torch.full([tile.tile.nbytes], 7, dtype=torch.uint8) for tile in self._tiles}

    def tiles(self, unit: UnitSpec) -> Sequence[TileHomes]:
        return self._tiles

    def lend_weights(self, unit: UnitSpec) -> contextlib.AbstractContextManager[int]:
        return self._lend(unit.name, self._weights)

    def lend_tile(self, tile: TileHomes) -> contextlib.AbstractContextManager[int]:
        return self._lend(f"tile {tile.tile.start // GRAIN}", self._states[id(tile)])

    @contextlib.contextmanager
    def _lend(self, name: str, memory: torch.Tensor) -> Iterator[int]:
        self.story.append(name)
        try:
            yield memory.data_ptr()
        except ValueError:
            self.story.append(f"{name} lost")
            raise
        self.story.append(f"{name} back")


def kernel_layout(dtype: torch.dtype, moments: str = "fp32") -> Layout[KernelRule]:
    formats = PRECISIONS[dtype]
    group = {**NATIVE_OPTIMIZERS["adamw"].defaults}
    return Layout(formats, dtype, KernelRule(NATIVE_OPTIMIZERS["adamw"], [group], formats, (dtype, dtype), moments))


def tiles_of(layout: Layout[KernelRule], unit: UnitSpec) -> list[Tile]:
    """One of each grain."""
    assert layout.rule is not None
    starts = range(0, unit.trainable_numel, GRAIN)
    return [layout.rule.tile_between(unit, start, start + GRAIN) for start in starts]


def values_of(unit: UnitSpec) -> dict[ParameterSpec, torch.Tensor]:
    torch.manual_seed(1)
    return {spec: torch.randn(spec.numel) for spec in unit.parameters}


def all_of(elements: Elements, unit: UnitSpec, spec: ParameterSpec, dtype: torch.dtype) -> torch.Tensor:
    value = torch.empty(spec.numel, dtype=dtype)
    for span in elements.spans(unit, [spec], tiled=elements.layout.has_master(spec, dtype)):
        elements.read(span, span.first, value[span.first : span.first + span.numel])
    return value


NUMELS = {
    "all in one tile": (300, 5),
    "up to the end of a tile": (GRAIN, 10),
    "across tiles": (100, 3 * GRAIN, 700),
    "with an empty one": (GRAIN - CODE_BLOCK, 0, CODE_BLOCK + 1, 0),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS)
def test_what_was_written_is_read_in_every_dtype(numels, dtype, monkeypatch):
    monkeypatch.setattr("offload.elements.PART_NUMEL", 999)
    unit, layout = unit_of(*numels, frozen=(50, 0)), kernel_layout(dtype)
    memory, values = Memory(unit, tiles_of(layout, unit), layout.formats), values_of(unit)
    with Elements(memory, layout) as elements:
        for span in elements.spans(unit):
            elements.write(span, source_of(values[span.spec]))
        for spec, value in values.items():
            weights = all_of(elements, unit, spec, dtype)
            assert torch.allclose(weights.float(), value, rtol=2**-8)
            if not spec.trainable:
                assert torch.equal(weights, value.to(dtype))
            exact = value if spec.trainable else weights.float()
            for other in (torch.float32, torch.bfloat16, torch.float16):
                found = all_of(elements, unit, spec, other)
                assert torch.equal(found, weights if other == dtype else exact.to(other))


def test_any_part_of_a_span_can_be_read():
    unit, layout = unit_of(100, 3 * GRAIN), kernel_layout(torch.bfloat16)
    memory, values = Memory(unit, tiles_of(layout, unit), layout.formats), values_of(unit)
    with Elements(memory, layout) as elements:
        for span in elements.spans(unit):
            elements.write(span, source_of(values[span.spec]))
        for span in elements.spans(unit):
            for first, numel in ((span.first, 0), (span.first + 3, 5), (span.first + span.numel - 1, 1)):
                target = torch.empty(numel)
                elements.read(span, first, target)
                assert torch.equal(target, values[span.spec][first : first + numel])


def test_each_record_is_borrowed_once_in_the_order_of_the_walk():
    unit, layout = unit_of(100, GRAIN, 200, frozen=(10,)), kernel_layout(torch.bfloat16)
    memory, values = Memory(unit, tiles_of(layout, unit), layout.formats), values_of(unit)
    with Elements(memory, layout) as elements:
        spans = list(elements.spans(unit))
        assert [(span.spec.name, span.first, span.numel) for span in spans] == [
            ("p3", 0, 10),
            ("p0", 0, 100),
            ("p1", 0, GRAIN - CODE_BLOCK),
            ("p1", GRAIN - CODE_BLOCK, CODE_BLOCK),
            ("p2", 0, 200),
        ]
        for span in spans:
            elements.write(span, source_of(values[span.spec]))
            elements.states(span)
    assert memory.story == ["unit", "tile 0", "tile 0 back", "tile 1", "tile 1 back", "unit back"]


def test_values_in_the_dtype_of_weights_need_no_tile():
    unit, layout = unit_of(100, GRAIN), kernel_layout(torch.bfloat16)
    memory = Memory(unit, tiles_of(layout, unit), layout.formats)
    with Elements(memory, layout) as elements:
        for span in elements.spans(unit, tiled=False):
            elements.read(span, 0, torch.empty(span.numel, dtype=torch.bfloat16))
    assert memory.story == ["unit", "unit back"]


def test_new_tiles_are_begun_also_those_of_padding_alone():
    unit, layout = unit_of(100, num_grains=3), kernel_layout(torch.float32)
    memory = Memory(unit, tiles_of(layout, unit), layout.formats)
    with NewElements(memory, layout, first_states(layout)) as elements:
        for span in elements.spans(unit):
            elements.write(span, source_of(torch.ones(100)))
    tiles = [story for index in range(3) for story in (f"tile {index}", f"tile {index} back")]
    assert memory.story == ["unit", *tiles, "unit back"]
    assert not any(states.any() for states in memory._states.values())


def test_after_an_error_records_are_given_back_as_they_are_lost():
    unit, layout = unit_of(100), kernel_layout(torch.bfloat16)
    memory = Memory(unit, tiles_of(layout, unit), layout.formats)

    def fail(first: int, target: torch.Tensor) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"), Elements(memory, layout) as elements:
        for span in elements.spans(unit):
            elements.write(span, fail)
    assert memory.story == ["unit", "tile 0", "tile 0 lost", "unit lost"]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_states_are_read_from_any_element_on(moments: str):
    unit, layout = unit_of(100, GRAIN + 300), kernel_layout(torch.bfloat16, moments)
    memory, values = Memory(unit, tiles_of(layout, unit), layout.formats), values_of(unit)
    with NewElements(memory, layout, first_states(layout)) as elements:
        for span in elements.spans(unit):
            states = {"exp_avg": values[span.spec], "exp_avg_sq": values[span.spec] ** 2}
            layout.rule.put_states(span.tile.tile, elements.states_at(span.tile), span.spec, states, span.spec.offset)
            views = {name: view.clone() for name, view in elements.states(span).items()}
            for name in states:
                expected = read_moments(name, views, 0, span.numel)
                tolerance = {"fp32": 0.0, "bf16": 2**-8, "int8": 2**-3}[moments]
                part = states[name][span.first : span.first + span.numel]
                assert torch.allclose(expected.float(), part, rtol=tolerance, atol=1e-2 if moments == "int8" else 0)
                for start in (0, 1, span.numel // 2):
                    target = torch.empty(span.numel - start)
                    elements.read_state(span, name, start, target)
                    assert torch.equal(target, expected[start:].float())


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_states_that_are_written_in_parts_are_those_that_a_rule_puts_at_once(moments: str, monkeypatch):
    monkeypatch.setattr("offload.elements.PART_NUMEL", 2 * CODE_BLOCK)
    unit, layout = unit_of(100, GRAIN + 300), kernel_layout(torch.bfloat16, moments)
    memory, expected = (Memory(unit, tiles_of(layout, unit), layout.formats) for _ in range(2))
    values = values_of(unit)
    with (
        NewElements(memory, layout, first_states(layout)) as elements,
        NewElements(expected, layout, first_states(layout)) as others,
    ):
        for span, other in zip(elements.spans(unit), others.spans(unit), strict=True):
            states = {"exp_avg": values[span.spec], "exp_avg_sq": values[span.spec] ** 2}
            for name, value in states.items():
                elements.write_state(span, name, source_of(value[span.first :]))
            layout.rule.put_states(other.tile.tile, others.states_at(other.tile), span.spec, states, span.spec.offset)
    for one, another in zip(memory._states.values(), expected._states.values(), strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_shards_of_all_ranks_have_each_element_once(dtype):
    unit, layout, num_ranks = unit_of(100, 2 * GRAIN, 5, frozen=(300,), num_grains=8), kernel_layout(dtype), 4
    values, found = values_of(unit), {spec: torch.full([spec.numel], torch.nan) for spec in unit.parameters}
    for rank in range(num_ranks):
        shard = shard_unit(unit, rank, num_ranks)
        memory = Memory(shard, tiles_of(layout, shard), layout.formats)
        with NewElements(memory, layout, first_states(layout)) as elements:
            for span in elements.spans(shard):
                elements.write(span, source_of(span.spec.shard_of(values[span.spec.whole])))
        with Elements(memory, layout) as elements:
            for spec in shard.parameters:
                part = all_of(elements, shard, spec, torch.float32)
                target = spec.shard_of(found[spec.whole])
                assert target.isnan().all()
                target.copy_(part)
    for spec, value in values.items():
        exact = value if spec.trainable else value.to(dtype).float()
        assert torch.equal(found[spec], exact)


def test_an_optimizer_without_a_kernel_has_whole_parameters_in_tiles():
    unit, formats = unit_of(100, 30), PRECISIONS[torch.bfloat16]
    parameters = [nn.Parameter(torch.zeros(spec.numel)) for spec in unit.parameters]
    optimizer = torch.optim.Rprop(parameters)
    rule = TorchRule(optimizer, [(optimizer.param_groups[0], unit.parameters)], formats, torch.float32)
    layout = Layout(formats, torch.bfloat16, rule)
    memory, values = Memory(unit, rule.tiles_of(unit, 1), formats), values_of(unit)
    with NewElements(memory, layout, first_states(layout)) as elements:
        for span in elements.spans(unit):
            elements.write(span, source_of(values[span.spec]))
            elements.states(span)["prev"].fill_(span.spec.numel)
    with Elements(memory, layout) as elements:
        for span in elements.spans(unit):
            target = torch.empty(20)
            elements.read_state(span, "prev", 10, target)
            assert torch.equal(target, torch.full([20], float(span.spec.numel)))
        for spec, value in values.items():
            assert torch.equal(all_of(elements, unit, spec, torch.float32), value)


def test_a_model_that_is_not_trained_has_weights_alone():
    unit, layout = unit_of(100, 0, frozen=(10,)), replace(kernel_layout(torch.bfloat16), rule=None)
    memory, values = Memory(unit, (), layout.formats), values_of(unit)
    with NewElements(memory, layout, first_states(layout)) as elements:
        for span in elements.spans(unit):
            elements.write(span, source_of(values[span.spec]))
            assert not elements.states(span)
        for spec, value in values.items():
            assert torch.equal(all_of(elements, unit, spec, torch.float32), value.bfloat16().float())
    assert memory.story == ["unit", "unit back"]


def test_a_span_beside_its_tile_has_no_element():
    unit = unit_of(100, GRAIN)
    tile = TileHomes(Tile(2 * GRAIN, 3 * GRAIN, 0), Home(0))
    assert all(Span.of(unit, spec, tile).numel <= 0 for spec in unit.parameters)


def test_a_source_fills_what_it_is_asked_for():
    value, target = torch.arange(10.0, dtype=torch.float64), torch.zeros(4, dtype=torch.bfloat16)
    source_of(value)(3, target)
    assert target.tolist() == [3, 4, 5, 6] and tensor_at(target.data_ptr(), 0, torch.uint8).numel() == 0
