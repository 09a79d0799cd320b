"""The scripts that a person runs first."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SETUP = _ROOT / "scripts" / "setup.sh"


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/demo.sh", "scripts/test.sh", ".ci/run", ".ci/wheel"])
def test_every_script_is_executable_and_parses(script):
    assert os.access(_ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", _ROOT / script], check=True)


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python3"])
def test_a_python_that_does_not_do_is_one_line(python):
    done = subprocess.run(
        ["bash", _SETUP], env={**os.environ, "PYTHON": python}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Python 3.10 or later is needed" in done.stderr


def test_the_second_time_is_quick():
    if not (_ROOT / ".venv" / "stamp").exists():
        pytest.skip("not set up by setup.sh")
    subprocess.run(["bash", _SETUP], check=True)  # sources may have changed since
    before = _core_seconds_of_children()
    done = subprocess.run(["bash", _SETUP], capture_output=True, text=True, check=True)
    assert _core_seconds_of_children() - before < 3  # whoever else works
    assert done.stdout + done.stderr == ""


def _core_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
