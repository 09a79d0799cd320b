"""docs/recipes/compress.md, beside the same in memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from offload import OffloadEngine

pytest.importorskip("transformers")
pytest.importorskip("torchao")


def _contents(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_a_model_is_quantised_block_by_block_to_the_files_that_it_gives_in_memory(recipe, tight, tmp_path):
    page = recipe("compress.md")
    model = page.build()
    page.quantise(model, page.calibration, tmp_path / "memory")
    quantised = model(page.calibration[0]).logits
    offloaded = page.build()
    with tight(offloaded, optimizer=None) as engine:
        page.quantise(offloaded, page.calibration, tmp_path / "offloaded", engine.resident)
        assert engine.plan.nvme_bytes["weights"] > 0
    expected, found = _contents(tmp_path / "memory"), _contents(tmp_path / "offloaded")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    loaded = page.AutoModelForCausalLM.from_pretrained(tmp_path / "offloaded", dtype=torch.float32)
    assert type(loaded.model.layers[3].mlp.down_proj.weight) is page.Int8Tensor
    torch.testing.assert_close(loaded(page.calibration[0]).logits, quantised, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_is_quantised_from_its_files_which_stay_as_they_are(recipe, tight, tmp_path):
    page = recipe("compress.md")
    page.build().save_pretrained(tmp_path / "base")
    page.quantise(page.build(), page.calibration, tmp_path / "memory")
    before = _contents(tmp_path / "base")
    with OffloadEngine.from_pretrained(
        page.AutoModelForCausalLM, tmp_path / "base", optimizer=None, nvme_path=tmp_path, host_memory="640KiB"
    ) as engine:
        assert engine.plan.in_place_bytes > 0
        out = tmp_path / "offloaded"
        page.quantise(engine.module, page.calibration, out, lambda block: page.put_back(block, engine.resident))
        engine.close(discard=True)
    expected, found = _contents(tmp_path / "memory"), _contents(out)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(_contents(tmp_path / "base")[name], value) for name, value in before.items())


def test_rounding_that_knows_the_inputs_leaves_less_error_than_rounding_to_nearest(recipe):
    page = recipe("compress.md")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 160, generator=generator)  # more columns than are rounded at once
    x = torch.randn(640, 8, generator=generator) @ torch.randn(8, 160, generator=generator)  # they depend on each other
    codes, scale = page.gptq(weight, x.T @ x)
    nearest = (weight / scale).round() * scale
    errors = [float((x @ (each - weight).T).square().sum()) for each in (codes * scale, nearest)]
    assert errors[0] < 0.5 * errors[1]


def test_a_model_is_pruned_block_by_block_to_the_weights_that_it_gets_in_memory(recipe, tight, same):
    page = recipe("compress.md")
    plain, offloaded = page.build(), page.build()
    assert list(page.by_blocks(plain, page.calibration, page.wanda, nullcontext)) == [0, 1, 2, 3]
    with tight(offloaded, optimizer=None) as engine:
        list(page.by_blocks(offloaded, page.calibration, page.wanda, engine.resident))
    same(offloaded, plain)
    assert (offloaded.model.layers[2].mlp.up_proj.weight == 0).float().mean() == 0.5


def test_a_student_learns_from_a_teacher_under_another_engine_with_the_bits_of_the_loop_in_memory(recipe, tight, same):
    page = recipe("compress.md")
    teacher = page.build()
    plain, offloaded = page.reduced(teacher), page.reduced(teacher)
    page.distil(plain, teacher, torch.optim.NAdam(plain.parameters(), lr=1e-3))
    optimizer = torch.optim.NAdam(offloaded.parameters(), lr=1e-3)
    with tight(teacher, optimizer=None) as of_teacher, tight(offloaded, optimizer=optimizer) as engine:
        page.distil(offloaded, teacher, engine.optimizer)
        assert of_teacher.plan.nvme_bytes["weights"] > 0
    same(offloaded, plain)
