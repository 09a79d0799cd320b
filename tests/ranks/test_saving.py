"""What ranks save and load is one checkpoint: of one moment, under one tag, or none at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import saving_jobs
from ranks.pool import Pool
from ranks.programs import Program

from offload.cli import main
from swapper import StorageCorrupt


def test_parts_of_several_checkpoints_are_none(two: Pool, tmp_path: Path):
    """Also of the same step: the ranks load one each, or a part of one was put beside that of another."""
    two(saving_jobs.two_of_one_step, tmp_path)
    for said in two(saving_jobs.load, tmp_path, ("first", "second")):
        assert "load_checkpoint: the ranks differ in what must be the same on all of them: the checkpoint is" in said
    mixed, part = tmp_path / "saved" / "mixed", "rank-1-of-2"
    shutil.copytree(tmp_path / "saved" / "first", mixed)
    shutil.rmtree(mixed / part)
    shutil.copytree(tmp_path / "saved" / "second" / part, mixed / part)
    for said in two(saving_jobs.load, tmp_path, ("mixed", "mixed")):
        assert "has parts that were not saved together" in said
    with Program().make(tmp_path) as engine, pytest.raises(StorageCorrupt, match="not saved together"):
        engine.load_checkpoint(tmp_path / "saved", "mixed")


def test_the_durable_run_of_ranks_is_inspected_and_exported_as_one(two: Pool, tmp_path: Path, capsys: Any):
    two(saving_jobs.two_of_one_step, tmp_path)
    run = tmp_path / "store of first"
    assert main(["inspect", "--verify", str(run)]) == 0
    told = capsys.readouterr().out
    assert all(words in told for words in ("durable run", "in parts of 2 ranks", "all of it is whole"))
    exported = []
    for number, source in enumerate((run, tmp_path / "saved" / "first")):
        assert main(["export", str(source), str(tmp_path / f"exported-{number}")]) == 0
        exported.append((tmp_path / f"exported-{number}" / "model.safetensors").read_bytes())
    assert exported[0] == exported[1]
    assert main(["inspect", str(run / "rank-1-of-2" / "run-1.store")]) == 2
    assert "is the part of one rank" in capsys.readouterr().err


def test_ranks_do_not_go_on_with_a_run_each(two: Pool, tmp_path: Path):
    two(saving_jobs.two_of_one_step, tmp_path)
    for said in two(saving_jobs.go_on, (tmp_path / "store of first", tmp_path / "store of second")):
        assert "the ranks differ in what must be the same on all of them: the checkpoint is" in said


def test_ranks_do_not_save_under_a_tag_each(two: Pool, tmp_path: Path):
    for said in two(saving_jobs.save, tmp_path):
        assert "the tag is 'of-0' on rank 0, 'of-1' on rank 1" in said


def test_a_state_that_one_rank_cannot_save_is_an_error_on_all_and_training_goes_on(two: Pool, tmp_path: Path):
    for rank, (said, loaded) in enumerate(two(saving_jobs.state_of_one, tmp_path)):
        assert "client_state" in said and said.startswith("ConfigError")
        assert loaded == rank
