"""Meshes of several dimensions: replicas of shards, parts of parameters (tensor parallelism), stages of a pipeline."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from ranks import composition

from offload import OffloadConfig, OffloadEngine
from offload.optim.formats import Formats
from offload.plan.ranks import plan_ranks
from offload.units.find import find_units

_REFUSALS = {
    "parts, and no mesh": r'ranks \[0, 1\] have different parts of the model\'s DTensors.*mesh=world_mesh\["dp"\]',
    "stages, and no mesh": r"ranks 0 and 1 have different models \(0.norm.weight \(30,\), 1.norm.weight \(30,\)\)",
    "three dimensions": "replicates over one before it, and this mesh has 3",
    "two meshes": "0.up.weight and 2.up.weight are DTensors over different ranks",
    "an optimizer without a kernel": "has DTensors, and an optimizer other than these may look at whole parameters",
}


@cache
def plain():
    return composition.plain()


def check_same_training(found):
    """The ranks have trained as one process does, to rounding, and agree to the bit."""
    expected, weights = plain(), {}
    for of_rank in found:
        weights.update(of_rank["weights"])
        assert of_rank["norms"] == found[0]["norms"]
        assert of_rank["losses"] in ([], found[-1]["losses"])
    assert found[-1]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert weights.keys() == expected["weights"].keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected["weights"][name], rtol=0, atol=2e-4)
        assert all(torch.equal(of["weights"].get(name, value), value) for of in found)


def test_replicas_of_shards_train_as_one_process(four):
    resting = []
    for replicas, shard in ((2, "weights"), (4, "states")):
        found = four(composition.hybrid, replicas, shard=shard)
        check_same_training(found)
        resting.append({of["resting"] for of in found})
    assert [len(of_run) for of_run in resting] == [1, 1]
    assert 2 * min(resting[0]) == min(resting[1])


def test_sums_of_replicas_have_room_where_all_ranks_hold_everything():
    units = find_units(composition.make_model())
    plan = plan_ranks(units, Formats.of(OffloadConfig(precision="bf16")), "weights", 1)
    assert plan.landing_bytes >= 4 * max(unit.trainable_numel for unit in units)


def test_ranks_without_replicas_go_on_from_what_replicas_have_saved(four, tmp_path):
    assert four(composition.saved_over_replicas, str(tmp_path)) == [True] * 4


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_a_pipeline_trains_as_one_process(two, schedule):
    check_same_training(two(composition.composed, 2, 1, schedule=schedule))


def test_tensor_parallelism_trains_as_one_process(two):
    check_same_training(two(composition.composed, 1, 2))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_stages_parts_and_shards_go_together(four, pp, tp):
    check_same_training(four(composition.composed, pp, tp, sequence=True, shard="weights"))


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_parts_of_sequences_train_as_whole_ones(two, shard):
    (first, alone), (second, _) = two(composition.context, shard=shard)
    means = [sum(losses) / 2 for losses in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5) and len(set(means)) == len(means)
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name])
        torch.testing.assert_close(value, alone["weights"][name], rtol=0, atol=2e-4)


def test_replicas_stages_and_parts_compute_on_devices(four):
    check_same_training(four(composition.hybrid, 2, on_device=True))
    check_same_training(four(composition.composed, 2, 2, sequence=True, on_device=True))


def test_the_page_s_program_runs_on_four_ranks(four):
    page = (Path(__file__).parents[2] / "docs" / "meshes.md").read_text()
    (program,) = re.findall(r'^```python title="parallel.py"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
    first, also_first, last, also_last = four(composition.run_program, program)
    assert first == also_first == (3, [])
    assert last == also_last
    assert last[0] == 3
    assert 0 < sum(last[1]) < 4


def test_scaling_a_gradient_of_a_stage_moves_no_bytes():
    with OffloadEngine(composition.make_model(), **composition.OPTIONS) as engine:
        inputs, targets = composition.batch(0)
        engine.backward(composition.loss_of(engine(inputs), targets))
        gradient = engine.module[0].up.weight.grad
        before, value = gradient.norm(), gradient.clone()
        gradient.div_(3)
        assert gradient.norm().item() == pytest.approx(before.item() / 3)
        torch.testing.assert_close(gradient.clone(), value / 3)
        gradient.div_(0)
        assert gradient.norm().isinf()


def test_a_written_gradient_counts_on_all_ranks(two):
    for by_handle, by_elements in two(composition.written_gradient):
        assert by_handle == pytest.approx(by_elements, rel=1e-5)


def test_parts_are_read_and_written_as_distributed_tensors(two):
    for found in two(composition.values_of_distributed):
        assert found["shapes"] == ((60, 30), (30, 30), (60, 30), (30, 30))
        for norms in (found["norms"], found["written norms"]):
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        gradient, value = found["of a sum of squares"]
        assert torch.equal(gradient, 2 * value)
        assert torch.equal(found["written"], 2 * value + 1)
        assert found["classes"] == {"DTensor"}
        assert found["resumed"][0] == found["resumed"][1]
        assert all(torch.equal(value, found["last"][name]) for name, value in found["unwrapped"].items())


def test_parts_need_not_be_equal(four):
    found = four(composition.uneven)
    assert [rows for _, _, rows in found] == [[8, 1, 8], [8, 1, 8], [8, 1, 8], [7, 0, 6]]
    for (expected, losses), (plain_weights, weights), _ in found:
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(weights, plain_weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("what", _REFUSALS)
def test_a_mesh_that_cannot_be_meant_is_refused(two, what):
    for message in two(composition.refused, what):
        assert re.search(_REFUSALS[what], message), message


def test_a_model_in_parts_is_not_written_as_a_whole(two, tmp_path):
    for message in two(composition.save_model_of_parts, str(tmp_path)):
        assert "torch.distributed.checkpoint" in message


def test_two_engines_of_the_same_ranks_do_not_disturb_each_other(two):
    for together_first, together_second, first, second in two(composition.two_engines):
        assert together_first == first
        assert together_second == second
