"""A short slice of each campaign of ``scripts/``, and that the campaigns find what they are there to find."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import store_crash
import store_ranks_crash
from store_model import Difference
from store_ram_disk import RamDevice, RamDirectory

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("script", "options", "count", "at_least"),
    [
        ("store_crash", ["--states", "1000"], "states", 1000),
        ("store_faults", ["--every", "19"], "in_memory", 40),
        ("store_random", ["--operations", "5000"], "reads_checked", 1500),
        ("store_flips", ["--changes", "600"], "found", 400),
        ("store_kill", ["--kills", "4"], "kills", 4),
        ("store_ranks_crash", ["--states", "400", "--per-point", "8", "--per-meeting", "40"], "states", 400),
        ("store_ranks_kill", ["--kills", "4"], "kills", 4),
    ],
)
def test_a_slice_of_the_campaign(script: str, options: list[str], count: str, at_least: int):
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--seed", "11", "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)[count] >= at_least


@pytest.mark.parametrize(("owner", "step"), [(RamDevice, "sync"), (RamDirectory, "sync_file"), (RamDirectory, "sync")])
def test_a_commit_that_forgets_to_sync_is_found(monkeypatch, owner, step):
    """The check of the checker: each sync of the protocol is needed in some crash state."""
    original = RamDevice.sync
    if owner is RamDevice:
        monkeypatch.setattr(RamDevice, "sync", lambda self: _unlogged(self, original))
    else:
        monkeypatch.setattr(owner, step, lambda self, *name: None)
    arguments = type("Arguments", (), {"seed": 5, "states": 4000, "commits": 6, "per_point": 64})
    with pytest.raises(Difference):
        store_crash.campaign(arguments)


@pytest.mark.parametrize(
    "unsynced",
    [("rename", "new", "prepared."), ("rename", "prepared.", "generation."), ("remove", "prepared.")],
    ids=["prepare", "finish", "abandon"],
)
def test_a_phase_that_forgets_to_sync_the_directory_is_found(monkeypatch, unsynced):
    """Of the syncs that the two phases have of their own, each one is needed in some crash state."""
    original = RamDirectory.sync

    def sync(directory: RamDirectory) -> None:
        events = getattr(directory._disk.log, "__self__", [("not recorded",)])
        if not all(map(str.startswith, events[-1], unsynced)):
            original(directory)

    monkeypatch.setattr(RamDirectory, "sync", sync)
    arguments = type("Arguments", (), {"seed": 5, "states": 4000, "commits": 6, "per_point": 8, "per_meeting": 60})
    with pytest.raises(Difference):
        store_ranks_crash.campaign(arguments)


def _unlogged(device: RamDevice, sync):
    """Say that it was synced, and do nothing."""
    log, device._disk.log = device._disk.log, lambda event: None
    try:
        return sync(device)
    finally:
        device._disk.log = log
