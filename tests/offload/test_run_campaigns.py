"""A slice of each campaign against whole runs; the campaigns themselves are scripts with a seed and a number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("run_kill.py", ["--seed", "11", "--kills", "3"], "kills: the same bits"),
        ("run_power_cut.py", ["--seed", "11", "--states", "24"], "'at the acknowledged step': "),
        ("run_full_disk.py", ["--seed", "4", "--trials", "1", "--program", "1", "--on", "tmpfs"], "'trials': 1"),
    ],
)
def test_a_slice(script: str, options: list[str], words: str):
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / script), *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if found.returncode == 77:
        pytest.skip(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr
    assert words in found.stdout
