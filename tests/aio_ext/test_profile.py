"""The I/O profile, the measurement behind it, and the tool that writes it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aio_ext import Memory, Queue
from aio_ext.measure import Range, mixed_q
from aio_ext.profile import (
    IoProfile,
    file_system,
    file_system_key,
    load_profile,
    missing_profile,
    profiles_path,
    save_profile,
)

MIB = 1 << 20
SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "aio_bench.py"

PROFILE = IoProfile(
    backend="portable",
    block_bytes=MIB,
    queue_depth=16,
    num_threads=4,
    read_bytes_per_s=4e9,
    write_bytes_per_s=2e9,
    mixed_bytes_per_s=3e9,
    mixed_q=1.0,
)


@pytest.fixture(autouse=True)
def _own_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_profile_is_found_again_for_every_path_of_its_device(tmp_path: Path) -> None:
    assert load_profile(tmp_path) is None
    assert save_profile(tmp_path, PROFILE) == profiles_path()
    (tmp_path / "deeper").mkdir()
    assert load_profile(tmp_path / "deeper") == PROFILE
    assert load_profile("/proc") is None and "no I/O profile" in missing_profile("/proc")
    save_profile("/proc", PROFILE)
    assert load_profile(tmp_path) == PROFILE, "other drives keep theirs"
    assert missing_profile(tmp_path) == ""


def test_several_directories_have_the_sum_of_their_drives(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_profile(tmp_path, PROFILE)
    assert load_profile(tmp_path, tmp_path / "other") == PROFILE, "one drive counts once"
    assert load_profile(tmp_path, "/proc") is None
    slower = replace(PROFILE, read_bytes_per_s=1e9, write_bytes_per_s=1e9, block_bytes=2 * MIB, mixed_q=3.0)
    save_profile("/proc", slower)
    both = load_profile(tmp_path, "/proc")
    assert both == replace(PROFILE, read_bytes_per_s=5e9, write_bytes_per_s=3e9, mixed_bytes_per_s=6e9)


def test_a_profile_of_another_linux_another_drive_or_a_backend_that_is_gone_does_not_hold(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE)
    written = json.loads(profiles_path().read_text())
    key = file_system_key(tmp_path)

    def stored_as(**change: object) -> str:
        entry = {**written["profiles"][key], **change}
        profiles_path().write_text(json.dumps({**written, "profiles": {key: entry}}))
        assert load_profile(tmp_path) is None
        return missing_profile(tmp_path)

    assert "measured under Linux 5.10" in stored_as(linux="5.10")
    assert "which does not work here" in stored_as(backend="windows")
    profiles_path().write_text(json.dumps({**written, "profiles": {key + "0": written["profiles"][key]}}))
    assert load_profile(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"profiles": {}}', '{"profiles": 3}'])
def test_a_damaged_file_counts_as_no_profile_and_can_be_replaced(tmp_path: Path, content: str) -> None:
    profiles_path().parent.mkdir(parents=True)
    profiles_path().write_text(content)
    assert load_profile(tmp_path) is None
    save_profile(tmp_path, PROFILE)
    assert load_profile(tmp_path) == PROFILE


def test_a_profile_with_a_field_missing_counts_as_none(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE)
    stored = json.loads(profiles_path().read_text())
    del stored["profiles"][file_system_key(tmp_path)]["mixed_q"]
    profiles_path().write_text(json.dumps(stored))
    assert load_profile(tmp_path) is None and "damaged" in missing_profile(tmp_path)


def test_file_systems_are_told_apart() -> None:
    assert file_system("/proc") == "proc"
    if Path("/dev/shm").is_dir():
        assert file_system("/dev/shm") == "tmpfs"


@pytest.mark.parametrize("q", [1.0, 1.5, 3.0])
def test_q_is_found_again_from_the_times_that_it_predicts(q: float) -> None:
    profile = replace(PROFILE, mixed_q=q)
    both = profile.seconds(4e9, 1e9)
    assert mixed_q(profile.seconds(4e9, 0), profile.seconds(0, 1e9), both) == pytest.approx(q, abs=0.01)
    assert profile.seconds(0, 0) == 0


def test_q_is_kept_in_bounds_when_the_measurement_is_not() -> None:
    assert mixed_q(1.0, 1.0, 2.5) == pytest.approx(1.0, abs=0.01)
    assert mixed_q(1.0, 1.0, 0.9) == pytest.approx(16.0, abs=0.01)
    assert mixed_q(0.0, 1.0, 1.0) == 1.0


@pytest.mark.parametrize("mode", ["read", "write", "mixed"])
def test_a_measurement_counts_what_the_queue_moved(fd: int, mode: str) -> None:
    with Memory(32 * MIB) as memory, Queue(depth=4, block_bytes=MIB) as queue:
        range_ = Range(queue, queue.register_file(fd), 8 * MIB, memory, 4, MIB)
        sample = range_.measure(mode, 104 * MIB)  # type: ignore[arg-type]
        statistics = queue.statistics()
        assert (sample.read_bytes, sample.write_bytes) == (statistics.read.bytes, statistics.write.bytes)
        assert sample.read_bytes + sample.write_bytes == 104 * MIB
        assert sample.read_bytes == {"read": 104 * MIB, "write": 0, "mixed": 56 * MIB}[mode]
        assert 0 < sample.depth_mean <= 4 and sample.bytes_per_s > 0


def test_requests_of_given_sizes_go_around_the_ends_of_file_and_memory(fd: int) -> None:
    with Memory(24 * MIB) as memory, Queue(depth=4, block_bytes=MIB) as queue:
        range_ = Range(queue, queue.register_file(fd), 8 * MIB, memory, 1, MIB)
        sample = range_.move("write", [7 * MIB, 512, 5 * MIB] * 3)
        assert (sample.read_bytes, sample.write_bytes) == (0, 36 * MIB + 3 * 512)
        assert queue.statistics().write.requests == 9


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def test_the_tool_prints_one_object_writes_the_profile_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    picture = tmp_path / "out.png"
    result = bench(
        str(tmp_path / "drive"), "--size", "64", "--pairs", "1", "--no-fio", "--json", "--plot", str(picture)
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    rates = [found[f"{mode}_gib_per_s"] for mode in ("read", "write", "mixed")]
    assert all(rate > 0 for rate in rates) and found["fio"] is None
    assert found["backend"] in ("io_uring", "threads") and found["block_bytes"] >= 4096 and found["queue_depth"] >= 1
    assert picture.stat().st_size > 1000
    assert list((tmp_path / "drive").iterdir()) == []
    profile = load_profile(tmp_path)
    assert profile is not None and profile.block_bytes == found["block_bytes"]


def test_the_tool_refuses_what_is_not_a_local_directory(tmp_path: Path) -> None:
    for path, reason in (("/dev/shm", "tmpfs"), (str(tmp_path / "missing"), "not a directory")):
        if path == "/dev/shm" and not os.access(path, os.W_OK):
            continue
        result = bench(path)
        assert (result.returncode, result.stdout) == (1, "")
        assert reason in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_tool_knows_the_file_systems_that_the_store_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("aio_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "aio_bench", tool)
    spec.loader.exec_module(tool)
    for kind in ("orangefs", "fuse.sshfs", "devtmpfs"):
        monkeypatch.setattr(tool, "file_system", lambda _, kind=kind: kind)
        with pytest.raises(tool.BenchError, match=kind), tool.subject(tmp_path, None, any_file_system=False):
            pass


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_the_comparison_says_null(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT.with_name("aio_peers.py")), str(tmp_path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == {"deepspeed": None}
