import random
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny import Tiny
from torch import nn

from offload import BudgetError, OffloadConfig
from offload.optim.choose import choose
from offload.optim.formats import Formats
from offload.plan.filling import Placement
from offload.plan.placement import make_plan
from offload.plan.plan import Drives, Plan, Tier
from offload.plan.ranks import plan_ranks
from offload.plan.records import TRANSFER_BYTES, WAIT_SHARE, Records
from offload.planning import Room, plan_within
from offload.report.report import Bandwidths
from offload.tiers.weights.use_order import NEVER, UseOrder
from offload.units import GRAIN, UnitSpec, shard_unit
from offload.units.find import find_units

FP32 = Formats.of(OffloadConfig(precision="fp32"))
BF16 = Formats.of(OffloadConfig(precision="bf16"))


def plan_for(units: list[UnitSpec], formats: Formats, host_bytes: int, nvme_bytes: int, **options: int) -> Plan:
    config = OffloadConfig(precision="fp32" if formats is FP32 else "bf16")
    choice = choose(config, units)
    assert choice is not None
    return make_plan(units, formats, choice.rule.tiles_of, host_bytes, nvme_bytes, **options)


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model)]


def test_formats_say_what_each_parameter_costs():
    assert (BF16.weights, BF16.master, BF16.grads) == (2, 2, 2)
    assert (FP32.weights, FP32.master, FP32.grads) == (4, 0, 4)
    fp16 = Formats.of(OffloadConfig(precision="fp16"))
    assert (fp16.weights, fp16.master, fp16.grads) == (2, 4, 2)
    assert Formats.of(OffloadConfig(precision="bf16", gradient_accumulation_steps=2)).grads == 4
    assert Formats.of(OffloadConfig(precision="bf16", optimizer=None)).master == 0


def test_units_cover_every_parameter_once_and_do_not_overlap():
    model = Tiny()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    seen = {}
    for unit in find_units(model):
        assert unit.numel % GRAIN == 0 and unit.trainable_numel % GRAIN == 0
        end = 0
        for spec in unit.parameters:
            assert spec.offset >= end
            end = spec.offset + spec.numel
            assert (end <= unit.trainable_numel) == spec.trainable
            seen[spec.name] = spec.numel
        assert end <= unit.numel
    assert seen == {name: p.numel() for name, p in model.named_parameters()}


def test_a_ranks_plan_counts_the_parameters_of_the_whole_model():
    model, config = Tiny(), OffloadConfig(precision="fp32")
    whole = find_units(model, num_ranks=3)
    ranks = plan_ranks(whole, FP32, "weights", 3)
    shards = [shard_unit(unit, 1, 3) for unit in whole]
    plan = plan_within(config, shards, choose(config, shards), Room(1 << 24, 0, 0), ranks)
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert str(plan).splitlines()[0].endswith("MiB of model state on this rank")


def test_a_large_block_is_cut_further_and_a_leaf_is_a_unit():
    assert names(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))) == ["0", "2"]
    assert names(nn.Linear(8, 8)) == ["(root)"]
    outer = nn.ModuleList([nn.Sequential(*(nn.Linear(32, 32) for _ in range(9))) for _ in range(1)])
    assert names(outer) == [f"0.{index}" for index in range(9)]


def test_nested_units_know_how_many_are_resident_around_them():
    class Scaled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    depths = {unit.name: unit.depth for unit in find_units(Scaled())}
    assert depths["(root)"] == 0 and depths["blocks.0"] == 1 and depths["embed"] == 1


def test_modules_that_stand_in_others_and_around_themselves_are_cut_once():
    model = Tiny()
    for block, before in pairwise(model.blocks):
        before.next = block
        block.parent, block.norm = model, before.norm
    of_parameter = [spec.name for unit in find_units(model) for spec in unit.parameters]
    assert sorted(of_parameter) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("formats", [FP32, BF16])
def test_every_budget_from_the_least_up_is_obeyed_and_moves_no_more_than_a_smaller_one(formats):
    units = find_units(Tiny(num_blocks=6))
    with pytest.raises(BudgetError) as caught:
        plan_for(units, formats, 1, 1 << 40)
    least = caught.value.needed_bytes
    everything = plan_for(units, formats, 1 << 40, 0).host_bytes
    moved = []
    for budget in range(least, everything + 40_000, 40_000):
        plan = plan_for(units, formats, budget, 1 << 40, tile_bytes=65536)
        assert plan.host_bytes <= budget
        total = sum(unit.numel * formats.weights for unit in units)
        assert plan.resident_bytes["weights"] + plan.nvme_bytes["weights"] == total
        moved.append(plan.step_read_bytes + plan.step_write_bytes)
    slack = 2 * max(unit.numel for unit in units) * 16
    assert moved[-1] == 0 and max(moved) <= moved[0] + slack  # buffers take room, and fewer transfers more bytes
    assert all(later <= earlier + slack for earlier, later in pairwise(moved))


def test_units_whose_transfers_cost_more_than_their_bytes_become_resident_first():
    """Blocks of 4 MiB around norms of a few bytes: beyond the least budget the norms are the first to stay in RAM."""
    blocks = (nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)) for _ in range(6))
    units = find_units(nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), *blocks, nn.LayerNorm(1024)))
    small = [unit for unit in units if unit.numel < 1 << 18]
    assert small
    with pytest.raises(BudgetError) as caught:
        plan_for(units, FP32, 1, 1 << 40)
    room = sum(unit.numel * 16 + 4 * 4096 for unit in small)
    for speculative in (False, True):
        plan = plan_for(units, FP32, caught.value.needed_bytes + room, 1 << 40, speculative=speculative)
        kept = {item.unit.name for item in plan.units if item.weights is item.grads is Tier.HOST}
        assert {unit.name for unit in small} <= kept


def test_a_budget_with_room_has_a_gradient_buffer_more_for_updates_during_backward():
    units = find_units(nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024)) for _ in range(12))))
    with pytest.raises(BudgetError) as caught:
        plan_for(units, FP32, 1, 1 << 40)
    room = 2 * max(unit.numel for unit in units) * 16
    plan = plan_for(units, FP32, caught.value.needed_bytes + room, 1 << 40, speculative=True)
    assert plan.staging.num_grad_buffers == 3
    plan = plan_for(units, FP32, caught.value.needed_bytes, 1 << 40, speculative=True)
    assert plan.staging.num_grad_buffers == 2


def random_model(seed: int) -> nn.Module:
    """Blocks of several widths between a large embedding and a head, some of them frozen."""
    draw = random.Random(seed)
    width, blocks = draw.choice([64, 128, 256]), draw.randint(2, 12)
    kinds = [nn.Linear(width, draw.choice([1, 2, 4]) * width) for _ in range(draw.randint(1, 3))]
    layers = [nn.Sequential(*deepcopy(kinds)).requires_grad_(draw.random() < 0.8) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(draw.choice([64, 4096]), width), *layers, nn.Linear(width, 64))


def test_tiles_of_sizes_that_cut_all_units_alike_are_weighed_once(monkeypatch):
    def plans() -> list[str]:
        found = []
        for units in units_of:
            with pytest.raises(BudgetError) as caught:
                plan_for(units, FP32, 1, 1 << 40)
            found += [
                str(plan_for(units, FP32, int(caught.value.needed_bytes * more), 1 << 40)) for more in (1, 1.2, 2)
            ]
        return found

    def keep_large_units(placement: Placement) -> None:
        weighed.append(placement)
        keep(placement)

    weighed: list[Placement] = []
    keep = Placement.keep_large_units
    monkeypatch.setattr(Placement, "keep_large_units", keep_large_units)
    units_of = [find_units(Tiny(width=16)), find_units(Tiny(width=256))]
    with pytest.raises(BudgetError):
        plan_for(units_of[0], FP32, 1, 1 << 40)
    assert len(weighed) == 4  # two numbers of slots, two of gradient buffers
    expected = plans()
    of_distinct = len(weighed)
    monkeypatch.setattr(Records, "cut", property(lambda records: id(records), lambda *_: None), raising=False)
    assert plans() == expected and len(weighed) > 2.5 * of_distinct


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(12))
def test_more_budget_never_makes_a_step_cost_more(seed):
    units = find_units(random_model(seed))
    formats, speculative = [FP32, BF16][seed % 2], seed % 3 != 0
    with pytest.raises(BudgetError) as caught:
        plan_for(units, formats, 1, 1 << 40)
    least, everything = caught.value.needed_bytes, plan_for(units, formats, 1 << 40, 0).host_bytes
    costs = []
    for share in range(17):
        plan = plan_for(units, formats, least + (everything - least) * share // 16, 1 << 40, speculative=speculative)
        plan = replace(plan, speculative=speculative)
        cost = plan.step_read_bytes + plan.step_write_bytes + plan.step_transfers * TRANSFER_BYTES
        streamed = [item.unit for item in plan.units if item.weights is Tier.NVME]
        if plan.staging.num_slots < min(4, len(streamed)):
            moved = sum(2 * unit.numel + unit.trainable_numel for unit in streamed) * formats.weights
            transfers = sum(2 + (unit.trainable_numel > 0) for unit in streamed)
            cost += (moved + transfers * TRANSFER_BYTES) // WAIT_SHARE
        spilled = [item for item in plan.units if speculative and item.streamed and item.grads is Tier.NVME]
        if plan.staging.num_grad_buffers < min(3, len(spilled)):
            moved = 2 * sum(item.unit.trainable_numel for item in spilled) * formats.grads
            cost += (moved + 2 * sum(len(item.tiles) for item in spilled) * TRANSFER_BYTES) // WAIT_SHARE
        costs.append(cost)
    assert costs == sorted(costs, reverse=True) and costs[-1] == 0


def test_the_least_budget_has_tiles_that_a_disk_likes():
    """The memory of a third gradient buffer is in the tiles: they were an eighth of a block."""
    units = find_units(nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(8))))
    with pytest.raises(BudgetError) as caught:
        plan_for(units, FP32, 1, 1 << 40)
    staging = plan_for(units, FP32, caught.value.needed_bytes, 1 << 40).staging
    assert staging.tile_bytes >= staging.slot_bytes // 5 and staging.num_grad_buffers == 2


def test_without_a_disk_the_plan_asks_for_what_everything_takes():
    units = find_units(Tiny())
    with pytest.raises(BudgetError) as caught:
        plan_for(units, FP32, 1000, 0)
    plan = plan_for(units, FP32, caught.value.needed_bytes, 0)
    assert plan.host_bytes == caught.value.needed_bytes == sum(unit.numel * 16 for unit in units)
    assert all(item.weights is Tier.HOST for item in plan.units)


def test_a_unit_that_would_make_every_buffer_as_large_as_itself_stays_resident():
    model = nn.Sequential(nn.Embedding(512, 64), *(nn.Sequential(nn.Linear(64, 64)) for _ in range(20)))
    units = find_units(model)
    with pytest.raises(BudgetError) as caught:
        plan_for(units, FP32, 1, 1 << 40)
    plan = plan_for(units, FP32, caught.value.needed_bytes, 1 << 40)
    homes = {item.unit.name: item.weights for item in plan.units}
    assert homes == {"0": Tier.HOST, **{f"{index}": Tier.NVME for index in range(1, 21)}}
    assert plan.staging.slot_bytes < units[0].numel * FP32.weights


def test_the_least_budget_of_a_small_model_is_what_it_takes_itself():
    units = find_units(nn.Sequential(nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 10)))
    with pytest.raises(BudgetError) as caught:
        plan_for(units, FP32, 1, 1 << 40)
    plan = plan_for(units, FP32, caught.value.needed_bytes, 1 << 40)
    assert plan.host_bytes <= caught.value.needed_bytes
    with pytest.raises(BudgetError):
        plan_for(units, FP32, caught.value.needed_bytes - 1, 1 << 40)


def test_the_printed_plan_says_where_things_rest_and_that_gradients_are_spilled():
    units = find_units(Tiny())
    text = str(plan_for(units, FP32, 4 << 20, 1 << 40))
    assert "weights" in text and "nvme MiB" in text and "gradients are spilled to NVMe" in text
    assert "weights come to RAM first" in text
    everything = str(plan_for(units, FP32, 1 << 40, 0))
    assert "spilled" not in everything and "all of it fits into host memory" in everything


def test_a_plan_counts_the_weights_and_gradients_of_each_micro_batch():
    units, formats = find_units(random_model(0)), FP32
    with pytest.raises(BudgetError) as caught:
        plan_for(units, formats, 1, 1 << 40)
    plan = plan_for(units, formats, caught.value.needed_bytes, 1 << 40)
    four = replace(plan, passes=4)
    weights, grads = plan.nvme_bytes["weights"], plan.nvme_bytes["grads"]
    sizes = [item.unit.numel * formats.weights for item in plan.units if item.weights is Tier.NVME]
    slots = plan.staging.num_slots  # what lies in them is read no more, as forward turns to backward and back
    assert plan.step_read_bytes == 2 * weights + grads + plan.nvme_bytes["states"] - sum(sizes[-slots:])
    each = 2 * weights + grads - sum(sizes[-slots:]) - sum(sizes[:slots])
    assert four.step_read_bytes - plan.step_read_bytes == 3 * each
    assert four.step_write_bytes - plan.step_write_bytes == 3 * grads


def test_the_first_use_of_a_unit_in_the_last_step_says_when_it_is_updated():
    order = UseOrder(4)
    assert [order.first_use(index) for index in range(4)] == [0, 1, 2, 3]
    for index in (2, 0, 1, 1, 0, 2):
        order.use(index)
    assert [order.first_use(index) for index in range(4)] == [0, 1, 2, 3]  # the step is not over
    order.end_step()
    assert [order.first_use(index) for index in range(4)] == [1, 2, 0, NEVER]


def test_the_order_of_the_last_step_predicts_the_next():
    order = UseOrder(3)
    assert list(order.upcoming()) == [0, 1, 2, 2, 1, 0]
    for index in (0, 2, 2, 0):
        order.use(index)
    order.end_step()
    assert list(order.upcoming()) == [0, 2, 2, 0]
    assert order.distance(1) == NEVER
    order.use(0)
    assert order.distance(0) == 2 and order.distance(2) == 0
    order.use(1)
    assert order.distance(2) == 0
    order.use(0)
    assert list(order.upcoming()) == [0, 1, 0]  # the last step is over: what this one began with comes next


def test_the_mixed_envelope_adds_up_for_a_half_duplex_disk_and_overlaps_for_a_full_one():
    assert Bandwidths(1e9, 2e9, 1.0).seconds(10**9, 10**9) == pytest.approx(1.5)
    assert Bandwidths(1e9, 1e9, 8.0).seconds(10**9, 10**9) == pytest.approx(2 ** (1 / 8))
    assert Bandwidths(1e9, 2e9, 4.0).seconds(0, 10**9) == pytest.approx(0.5)


def test_the_printed_plan_counts_second_places_and_all_of_each_tier():
    units = find_units(Tiny())
    plan = replace(plan_for(units, FP32, 4 << 20, 1 << 40, speculative=True), record_copies=2, speculative=True)
    rows = {line.split("  ")[0]: line.split() for line in str(plan).splitlines()}
    second = plan.spare_copy_bytes / (1 << 20)
    assert rows["spare copies"][-1] == f"{second:,.1f}"
    assert rows["in all"][-1] == f"{sum(plan.nvme_bytes.values()) / (1 << 20) + second:,.1f}"
    assert rows["in all"][-2] == f"{plan.host_bytes / (1 << 20):,.1f}"


def test_the_printed_plan_names_what_moves_the_bytes_and_how_fast():
    units = find_units(Tiny())
    plan = plan_for(units, FP32, 4 << 20, 1 << 40)
    drives = Drives("threads", Bandwidths(2e9, 1.5e9, 1.0, stored=True))
    text = str(replace(plan, drives=drives, seconds={"nvme": 0.5, "compute": 0.25}))
    assert "by threads: 2.00 GB/s read and 1.50 GB/s written (by the stored profile), one after the other" in text
    assert "that takes 0.5 s or more, limited by nvme (beside it compute 0.25 s)" in text


@pytest.mark.parametrize("host_bytes", [1_200_000, 1 << 30])
def test_a_plan_without_training_speaks_of_no_gradients_states_or_empty_buffers(host_bytes):
    units = find_units(Tiny().requires_grad_(False))
    formats = Formats.of(OffloadConfig(precision="fp32", optimizer=None))
    text = str(make_plan(units, formats, None, host_bytes, 1 << 40))
    assert not any(word in text for word in ("gradient", "states", "grads", "tile", " 0 weight", "updated", "step"))
    assert "a forward " in text
