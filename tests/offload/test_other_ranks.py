"""A durable run whose number of ranks changes and changes back is taken up where it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadEngine
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.other_ranks import last_run, went_on
from swapper import generation_metadata

ONE, PARTS = "run-1.store", ("rank-0-of-2", "rank-1-of-2")


def train(path: Path, until: int, *, goes_on: bool = True) -> None:
    """One process goes on with the run under ``path``, or begins one."""
    torch.manual_seed(0)
    with OffloadEngine(nn.Linear(64, 64), lr=1e-3, nvme_path=path, durable=1) as engine:
        if goes_on:
            engine.load_checkpoint()
        while engine.global_step < until:
            engine.backward(engine(torch.ones(1, 64)).sum())
            engine.step()


def state(store: Path) -> dict[str, Any]:
    return Description.decode(generation_metadata(store), str(store)).run


@pytest.fixture
def base(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> Path:
    """Two ranks have committed step 1, and one process has gone on to step 3. What ranks have is copied from it."""
    train(tmp_path, 1)
    for part in PARTS:
        shutil.copytree(tmp_path / ONE, tmp_path / part / ONE)
    train(tmp_path, 3)
    return tmp_path


def test_ranks_go_on_from_what_one_process_has_made_of_their_run(base: Path):
    own = base / PARTS[0] / ONE
    assert went_on(base, 2, state(own), own)
    found = last_run(base, 2, state(own)["identity"])
    assert found is not None and found.description(1).run["step"] == 3
    found.close()


def test_a_run_that_has_come_farthest_itself_is_taken_up_where_it_is(base: Path):
    assert not went_on(base, 1, state(base / ONE), base / ONE)


def test_a_run_that_went_back_later_is_taken_up_where_it_is(base: Path):
    own = base / PARTS[0] / ONE
    (manifest,) = own.glob("generation.*")
    later = (base / ONE).stat().st_mtime_ns + 10**12
    os.utime(manifest, ns=(later, later))
    assert not went_on(base, 2, state(own), own)


def test_another_run_on_the_path_is_no_continuation(base: Path, recwarn: pytest.WarningsRecorder):
    shutil.rmtree(base / ONE)
    train(base, 5, goes_on=False)
    own = base / PARTS[0] / ONE
    assert not went_on(base, 2, state(own), own)
    assert last_run(base, 2, state(own)["identity"]) is None
