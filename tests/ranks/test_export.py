"""Weights for others, of which each rank has a part: the first one writes them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import export_jobs
from ranks.pool import Pool
from ranks.programs import ON_NVME, WEIGHTS, Placement, Program, bits

safetensors = pytest.importorskip("safetensors.torch")

MIXED = Program(
    model={"tied": True, "frozen": (1,), "large": True, "hidden": (59, 61)}, options={"precision": "bf16"}, steps=1
)


@pytest.mark.parametrize(
    ("program", "placement"), [(MIXED, ON_NVME), (Program(steps=1), WEIGHTS)], ids=["bf16", "fp32"]
)
def test_the_first_rank_writes_whole_weights_and_masters(
    two: Pool, tmp_path: Path, program: Program, placement: Placement
):
    first, other = two(export_jobs.save_models, program, placement, tmp_path)
    assert (first["weights"], first["masters"]) == (other["weights"], other["masters"])
    own, masters = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("own", "fp32"))
    assert own.keys() == masters.keys() and len(own) > 4
    for name, value in own.items():
        assert bits(value) == first["weights"][name]
        exact = bits(value.float()) if value.is_floating_point() else bits(value)
        assert bits(masters[name]) == first["masters"].get(name, exact)
    for answer in (first, other):
        failed, after = answer["errors"]
        assert "file" in failed and not after
