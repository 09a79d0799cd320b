"""Ranks read their own parts of a frozen base from its files."""

from __future__ import annotations

from pathlib import Path

from frozen_bases import FROZEN_BYTES, build, in_shards
from ranks.frozen_jobs import refused, trains
from ranks.pool import Pool


def test_each_rank_reads_its_part_of_the_files_and_the_bits_are_those_of_copied_weights(
    two: Pool, tmp_path: Path
) -> None:
    base = in_shards(build().state_dict(), tmp_path / "base")
    (tmp_path / "nvme").mkdir()
    in_place = two(trains, base, tmp_path / "nvme", True)
    copied = two(trains, base, tmp_path / "nvme", False)
    assert [found[:2] for found in in_place] == [found[:2] for found in copied]
    assert [nbytes for _, _, nbytes in copied] == [0, 0]
    for _, _, nbytes in in_place:
        assert FROZEN_BYTES / 4 < nbytes < FROZEN_BYTES * 0.6


def test_ranks_that_were_given_other_files_are_refused(two: Pool, tmp_path: Path) -> None:
    values = build().state_dict()
    bases = [in_shards(values, tmp_path / f"in-{count}", count) for count in (2, 3)]
    for said in two(refused, bases, tmp_path):
        assert "the sizes and headers of weights files" in said
