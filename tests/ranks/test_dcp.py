"""``torch.distributed.checkpoint``: what some ranks save, other numbers of ranks, DDP and FSDP2 go on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ranks import dcp_jobs
from ranks.pool import Pool
from ranks.programs import GRADIENTS, ON_NVME, ROWS, STATES, WEIGHTS, Model, Placement, Program
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    pool = Pool(3)
    yield pool
    pool.stop()


def same(answers: list[Any]) -> Any:
    """What all ranks answered alike."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def goes_on(found: list[dict[str, Any]], expected: dict[str, Any], later: float) -> None:
    """All ranks have what was saved, bit for bit, and go on with the same loss to rounding."""
    loss = first_loss(found)
    assert same([{**answer, "later": None} for answer in found]) == {**expected, "later": None}
    assert loss == pytest.approx(later, rel=1e-5)


def first_loss(found: list[dict[str, Any]]) -> float:
    """Of the global batch, of which the ranks have had numbers of rows that may differ."""
    bounds = [rank * ROWS // len(found) for rank in range(len(found) + 1)]
    rows = [stop - start for start, stop in pairwise(bounds)]
    return sum(answer["later"][0] * count for answer, count in zip(found, rows, strict=True)) / ROWS


MIXED = Program(
    model={"tied": True, "frozen": (1,), "large": True, "hidden": (59, 61)}, options={"precision": "bf16"}, steps=2
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("program", "placement"), [(MIXED, ON_NVME), (Program(), STATES)], ids=["bf16", "fp32"])
def test_what_two_ranks_save_one_and_three_go_on_from(
    two: Pool, three: Pool, tmp_path: Path, program: Program, placement: Placement
):
    expected = same(two(dcp_jobs.saves, program, placement, tmp_path))
    assert expected["step"] == 2 and expected["groups"][0]["lr"] == pytest.approx(0.007)
    again = two(dcp_jobs.loads, program, GRADIENTS, tmp_path)
    later = first_loss(again)
    goes_on(again, expected, later)
    goes_on([dcp_jobs.loads(0, 1, program, WEIGHTS, tmp_path)], expected, later)
    goes_on(three(dcp_jobs.loads, program, WEIGHTS, tmp_path), expected, later)


def test_what_one_process_saves_two_ranks_go_on_from(two: Pool, tmp_path: Path):
    program = Program(model={"tied": True}, options={"precision": "fp16", "moments_dtype": "bf16"})
    expected = dcp_jobs.saves(0, 1, program, WEIGHTS, tmp_path)
    later = first_loss([dcp_jobs.loads(0, 1, program, WEIGHTS, tmp_path)])
    goes_on(two(dcp_jobs.loads, program, ON_NVME, tmp_path), expected, later)


def test_ranks_that_hold_the_same_shards_write_them_once(four: Pool, tmp_path: Path):
    program = Program(steps=1)
    expected = same(four(dcp_jobs.saves_as_a_table, program, tmp_path))
    goes_on([found := dcp_jobs.loads(0, 1, program, WEIGHTS, tmp_path)], expected, first_loss([found]))
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    numels: Counter[str] = Counter()
    for key, entry in metadata.state_dict_metadata.items():
        for chunk in getattr(entry, "chunks", ()) if not key.endswith(".step") else ():
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            numels[place.relative_path] += chunk.sizes.numel()
    whole = 3 * sum(parameter.numel() for parameter in Model().parameters())
    assert numels.total() == whole and len(numels) == 4
    assert min(numels.values()) > 0.05 * whole


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_torch_and_the_engine_go_on_from_each_other(two: Pool, tmp_path: Path, kind: str):
    for found in two(dcp_jobs.there_and_back, kind, tmp_path):
        assert found["in turns"] == pytest.approx(found["alone"], rel=1e-5)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_leaves_the_checkpoint_before(two: Pool, tmp_path: Path, failing: int):
    answers = two(dcp_jobs.one_fails, failing, tmp_path)
    said = [answer.pop("said") for answer in answers]
    assert same(answers) == {"kept": True, "whole": True, "goes on": True}
    own = said.pop(failing)
    assert own.startswith(f"StorageIOError: writing to {tmp_path / 'dcp'} failed: [Errno 27]")
    assert said[0] == own.replace("StorageIOError: ", f"StorageIOError: rank {failing}: ")


def test_a_checkpoint_that_is_not_whole_changes_nothing_on_any_rank(two: Pool, tmp_path: Path):
    said = same(two(dcp_jobs.reads_what_is_damaged, tmp_path))
    assert said.startswith(f"WeightsError: {tmp_path / 'dcp'} is not whole: __0_0.distcp has")


def test_a_model_in_parts_is_refused(two: Pool, tmp_path: Path):
    for said in same(two(dcp_jobs.refusals, tmp_path)):
        assert said.startswith("ConfigError: blocks.0.up.weight is a DTensor, of which each rank has a part")


def test_each_rank_reads_its_part_a_few_mib_at_a_time(two: Pool, tmp_path: Path):
    for found in two(dcp_jobs.counted, tmp_path):
        whole = found["weights"] + found["states"]
        assert 0.4 * whole < found["read"] < 0.6 * whole
        assert max(found["most"], found["most written"]) <= 4 << 20
