"""A slice of each campaign against whole runs; the campaigns themselves are scripts with a seed and a number."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

from _full_disk import CannotMount, in_own_mounts  # noqa: E402


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("run_kill.py", ["--seed", "11", "--kills", "2"], "kills: the same bits {"),
        ("run_administrator.py", ["--seed", "11", "--acts", "4", "--mounts", "none"], "acts: nothing was lost"),
        ("run_power_cut.py", ["--seed", "11", "--cuts", "120"], "cuts: nothing was lost"),
    ],
)
def test_a_slice(script: str, options: list[str], words: str):
    found = forked.run_script(SCRIPTS / script, *options)
    assert found.returncode == 0, found.stdout + found.stderr
    assert words in found.stdout


def test_a_slice_with_directories_that_are_mounted_elsewhere(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forked.fork_children(monkeypatch)
    options = ["--seed", "12", "--acts", "5", "--mounts", "here"]
    try:
        found = in_own_mounts([sys.executable, "-W", "ignore", str(SCRIPTS / "run_administrator.py"), *options])
    except CannotMount as error:
        pytest.skip(str(error))
    told = capfd.readouterr()
    assert found.returncode == 0, told
    assert "'mount elsewhere'" in told.out and "acts: nothing was lost" in told.out


def test_a_slice_of_full_disks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    forked.fork_children(monkeypatch)
    options = ["--seed", "4", "--trials", "1", "--program", "1", "--on", "tmpfs", "--mounted"]
    try:
        found = in_own_mounts([sys.executable, "-W", "ignore", str(SCRIPTS / "run_full_disk.py"), *options])
    except CannotMount as error:
        pytest.skip(str(error))
    told = capfd.readouterr()
    assert found.returncode == 0, told
    assert "'trials': 1" in told.out


def test_a_slice_of_calls_that_fail():
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-qq", "-e", "trace=none", "true"], check=False).returncode:
        pytest.skip("strace is not here, or may not trace")
    found = forked.run_script(SCRIPTS / "run_syscalls.py", "--seed", "3", "--trials", "2", "--kind", "fsync")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(" s): ") == 2 and " s): not reached" not in found.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86-64")
def test_a_slice_of_limits_that_come_down():
    kinds = ("--kind", "io_uring, EPERM", "--kind", "sizes of files")
    found = forked.run_script(SCRIPTS / "run_limits.py", "--seed", "1", "--trials", "2", *kinds)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("): ") == 2
