"""Cores that this process may use, and what of them the update has."""

import os
from pathlib import Path

import pytest

from offload import cores
from offload.cores import IdleCores, available_cores

MANY = 1 << 24


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32),
        ({"cpu.max": "max 100000"}, 32),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 32),
        ({"cpu.cfs_quota_us": "800000", "cpu.cfs_period_us": "100000"}, 8),
        ({"cpu.max": "nonsense"}, 32),
    ],
)
def test_a_process_has_the_cores_of_its_affinity_within_its_cgroups_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cores, "cgroup_folders", lambda controller: [tmp_path] if controller == "cpu" else [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    assert available_cores() == expected


@pytest.mark.parametrize(
    ("total", "of_compute", "goes_on", "waits"),
    [(2, 2, 1, 2), (16, 16, 1, 16), (16, 1, 15, 16), (64, 32, 32, 64), (1, 8, 1, 1), (0, 1, 1, 1)],
)
def test_an_update_has_what_compute_leaves_and_all_while_compute_waits_for_it(
    total: int, of_compute: int, goes_on: int, waits: int
) -> None:
    assert IdleCores(total, of_compute, lambda: False)(MANY) == goes_on
    assert IdleCores(total, of_compute, lambda: True)(MANY) == waits


def test_no_core_is_woken_for_a_few_elements() -> None:
    idle = IdleCores(64, 1, lambda: False)
    assert [idle(numel) for numel in (0, 1, 65_535, 131_072, 1 << 20, 1 << 24)] == [1, 1, 1, 2, 16, 63]
