"""The I/O profile, the measurement behind it, and the tool that writes it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from aio_ext import Memory, Queue
from aio_ext.measure import NUM_BUFFERS, REQUEST_BYTES, Range, mixed_q
from aio_ext.profile import (
    IoProfile,
    file_system,
    file_system_key,
    load_profile,
    missing_profile,
    profiles_path,
    save_profile,
)
from offload.bench import contest, fio
from offload.bench import search as settings
from offload.bench import subject as of_path
from offload.bench.table import table
from offload.cli import main
from offload.optim.formats import DEFAULT_TILE_BYTES
from offload.plan import choice
from swapper import create_store

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
    read_seconds, write_seconds = 4.0, 1.5
    both = (read_seconds**q + write_seconds**q) ** (1 / q)
    assert mixed_q(read_seconds, write_seconds, both) == pytest.approx(q, abs=0.01)


def test_q_is_kept_in_bounds_when_the_measurement_is_not() -> None:
    assert mixed_q(1.0, 1.0, 2.5) == pytest.approx(1.0, abs=0.01)
    assert mixed_q(1.0, 1.0, 0.9) == pytest.approx(16.0, abs=0.01)
    assert mixed_q(0.0, 1.0, 1.0) == 1.0


@pytest.mark.parametrize("mode", ["read", "write", "mixed", "update"])
def test_a_measurement_counts_what_the_queue_moved(fd: int, mode: str) -> None:
    with Memory(32 * MIB) as memory, Queue(depth=4, block_bytes=MIB) as queue:
        range_ = Range(queue, queue.register_file(fd), 8 * MIB, memory, 4, MIB)
        sample = range_.measure(mode, 104 * MIB)  # type: ignore[arg-type]
        statistics = queue.statistics()
        assert (sample.read_bytes, sample.write_bytes) == (statistics.read.bytes, statistics.write.bytes)
        assert sample.read_bytes + sample.write_bytes == 104 * MIB
        assert sample.read_bytes == {"read": 104 * MIB, "write": 0, "mixed": 56 * MIB, "update": 56 * MIB}[mode]
        assert 0 < sample.depth_mean <= 4 and sample.bytes_per_s > 0


class Recorder:
    """A queue whose requests are over at once, and what was asked of it: kind, MiB of the file, MiB of the memory."""

    def __init__(self, memory: Memory) -> None:
        self._start = memory.address
        self.events: list[tuple[str, int, int]] = []

    def read(self, _: int, offset: int, address: int, nbytes: int) -> Recorder:
        return self._asked("read", offset, address, nbytes)

    def write(self, _: int, offset: int, address: int, nbytes: int) -> Recorder:
        return self._asked("write", offset, address, nbytes)

    def _asked(self, kind: str, offset: int, address: int, nbytes: int) -> Recorder:
        self.events.append((kind, offset // MIB, (address - self._start) // MIB))
        self.nbytes = nbytes
        return self

    def done(self) -> bool:
        return True

    def wait(self, _: float) -> None:
        pass

    def statistics(self) -> Any:
        return Queue("portable").statistics()


def test_an_update_writes_each_tile_from_the_buffer_that_it_was_read_into() -> None:
    with Memory(16 * MIB) as memory:
        queue = Recorder(memory)
        Range(queue, 0, 128 * MIB, memory, 32, MIB).measure("update", 13 * 8 * MIB)  # type: ignore[arg-type]
    assert queue.nbytes == REQUEST_BYTES
    assert queue.events == [
        ("read", 0, 0), ("read", 8, 8),  # both buffers
        ("write", 64, 0), ("read", 16, 0),  # to the second place, and the next tile into the same buffer
        ("write", 72, 8), ("read", 24, 8),
        ("write", 80, 0), ("read", 32, 0),
        ("write", 88, 8), ("read", 40, 8),
        ("write", 96, 0), ("read", 48, 0),
        ("write", 104, 8),  # the seventh tile is only read
    ]  # fmt: skip


@pytest.mark.parametrize("memory_mib", [4, 16, 48])
def test_a_measurement_goes_around_all_of_its_memory_and_no_more(memory_mib: int) -> None:
    with Memory(memory_mib * MIB) as memory:
        queue = Recorder(memory)
        Range(queue, 0, 256 * MIB, memory, 32, MIB).measure("read", 128 * MIB)  # type: ignore[arg-type]
    step = min(memory_mib, 8)
    assert queue.events == [("read", at, at % memory_mib) for at in range(0, 128, step)]


def test_a_measurement_without_memory_for_a_block_is_refused() -> None:
    with Memory(MIB) as memory, pytest.raises(ValueError, match="a block has 2097152 bytes, there are 1048576"):
        Range(Recorder(memory), 0, 64 * MIB, memory, 4, 2 * MIB)  # type: ignore[arg-type]


def test_what_is_measured_has_the_engines_buffers() -> None:
    assert (REQUEST_BYTES, NUM_BUFFERS) == (DEFAULT_TILE_BYTES, choice._NUM_TILE_BUFFERS)
    for backend in ("io_uring", "threads"):
        in_flight = [setting.block_bytes * setting.depth for setting in settings.grid(backend)]
        assert max(in_flight) <= REQUEST_BYTES * NUM_BUFFERS
        assert settings.default(backend) in settings.rivals(backend)


def test_the_setting_to_be_beaten_is_what_queues_and_stores_take_without_a_profile() -> None:
    default = settings.default("io_uring")
    for made, depth in ((Queue, "depth"), (create_store, "queue_depth")):
        parameters = inspect.signature(made).parameters
        assert (parameters[depth].default, parameters["block_bytes"].default) == (default.depth, default.block_bytes)


def test_requests_of_given_sizes_go_around_the_ends_of_file_and_memory(fd: int) -> None:
    with Memory(24 * MIB) as memory, Queue(depth=4, block_bytes=MIB) as queue:
        range_ = Range(queue, queue.register_file(fd), 8 * MIB, memory, 1, MIB)
        sample = range_.move("write", [7 * MIB, 512, 5 * MIB] * 3)
        assert (sample.read_bytes, sample.write_bytes) == (0, 36 * MIB + 3 * 512)
        assert queue.statistics().write.requests == 9


class NoisyDrive:
    """A drive as fast as ``rate`` says, on a machine whose mood swings from one second to the next by a tenth."""

    def __init__(self, rate: Callable[[Any], float], seed: int) -> None:
        self._rate, self._draw = rate, random.Random(seed)

    def probe(self, setting: Any) -> float:
        return self._rate(setting) * self._draw.gauss(1, 0.1)


def searched(rate: Callable[[Any], float]) -> list[Any]:
    """What fifty searches find."""
    bar, backends = tqdm(disable=True), ["io_uring", "threads"]
    return [settings.search(NoisyDrive(rate, seed), bar, backends, full=False) for seed in range(50)]


def test_searches_agree_on_the_default_where_all_settings_are_as_fast() -> None:
    assert set(searched(lambda _: 2.0)) == {settings.default("io_uring")}


def test_searches_agree_on_a_block_size_that_is_faster() -> None:
    found = searched(lambda setting: 3.0 if setting.block_bytes == 2 * MIB else 2.0)
    assert {setting.block_bytes for setting in found} == {2 * MIB}


def test_a_setting_that_is_faster_is_chosen_and_of_equals_the_one_with_least_in_flight() -> None:
    default, best = settings.default("io_uring"), of_path.Setting("io_uring", 2 * MIB, 16)
    smaller, slower = of_path.Setting("io_uring", 2 * MIB, 4), of_path.Setting("io_uring", MIB, 4)
    moods = [1.0, 1.3, 0.7, 1.1, 0.8, 0.9, 1.2]
    rates = {default: 2.0, slower: 1.5, best: 2.6}
    scores = {setting: [rate * mood for mood in moods] for setting, rate in rates.items()}
    assert settings.chosen(scores) == best
    assert settings.chosen({**scores, smaller: [rate * 0.99 for rate in scores[best]]}) == smaller
    assert settings.chosen({default: [2.0] * 7, best: [2.6, 1.9, 2.6, 1.9, 2.6, 2.6, 2.6]}) == default, (
        "not in every round"
    )


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What the tool finds in a hurry."""
    hurried = ((of_path, "PROBE_SECONDS", 0.001), (contest, "PAIR_SECONDS", 0.001), (settings, "ROUNDS", 2),
               (fio, "PROBE_SECONDS", 0.001), (fio, "ENGINE_ROUNDS", 1))  # fmt: skip
    for module, name, value in hurried:
        monkeypatch.setattr(module, name, value)
    assert main(["bench", *arguments, "--size", "64", "--pairs", "2", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tool_prints_one_object_writes_the_profile_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drive").mkdir()
    picture = tmp_path / "out.png"
    found = run(monkeypatch, capsys, str(tmp_path / "drive"), "--no-fio", "--plot", str(picture))
    rates = [found[f"{mode}_gib_per_s"] for mode in ("read", "write", "mixed")]
    assert all(rate > 0 for rate in rates) and found["fio"] is None and "fio" not in found["unavailable"]
    assert found["backend"] in ("io_uring", "threads") and found["block_bytes"] >= 4096 and found["queue_depth"] >= 1
    assert found["footprint_bytes"] == NUM_BUFFERS * REQUEST_BYTES
    assert all(len(tried[use]) >= 2 for tried in found["tried"] for use in ("read", "update"))
    assert picture.stat().st_size > 1000
    assert list((tmp_path / "drive").iterdir()) == []
    profile = load_profile(tmp_path)
    assert profile is not None and profile.block_bytes == found["block_bytes"]


FIO = """#!{python}
import json, sys
given = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
with open({log!r}, "a") as log:
    print(json.dumps(given), file=log)
moved = {{"io_bytes": int(given["io_size"]), "runtime": 10}}
nothing = {{"io_bytes": 0, "runtime": 0}}
read, write = (nothing, moved) if given["rw"] == "write" else (moved, nothing)
print(json.dumps({{"jobs": [{{"read": read, "write": write, "usr_cpu": 1, "sys_cpu": 1, "job_runtime": 10}}]}}))
"""


def test_fio_is_compared_at_the_memory_of_the_engine_and_at_that_of_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, log = tmp_path / "bin" / "fio", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(FIO.format(python=sys.executable, log=str(log)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    found = run(monkeypatch, capsys, str(tmp_path), "--backend", "threads")
    block, depth = found["block_bytes"], found["queue_depth"]
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    assert {int(given["bs"]) for given in runs} == {block}
    in_flight = sorted({int(given["iodepth"]) * block for given in runs})
    assert in_flight == [found["in_flight"]["footprint_bytes"], found["footprint_bytes"]]
    assert in_flight == [block * depth, NUM_BUFFERS * REQUEST_BYTES]
    for each in (found, found["in_flight"]):
        assert each["fio"]["queue_depth"] * block == each["footprint_bytes"]
        assert all(each["fio"]["ratio"][mode] > 0 for mode in ("read", "write", "mixed"))
    text = table(found)
    assert f"memory 48 MiB, as the engine's buffers; fio has {48 * MIB // block} blocks in flight:" in text
    assert f"memory {block * depth // MIB} MiB, what is in flight; fio has {depth} blocks in flight:" in text


def test_the_tool_says_that_fio_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run(monkeypatch, capsys, str(tmp_path), "--backend", "threads")
    assert found["fio"] is None and found["in_flight"]["fio"] is None
    assert "fio is not installed: nothing to compare with (`apt-get install fio`)" in table(found)


def test_the_tool_refuses_what_is_not_a_local_directory(tmp_path: Path) -> None:
    for path, reason in (("/dev/shm", "tmpfs"), (str(tmp_path / "missing"), "not a directory")):
        if path == "/dev/shm" and not os.access(path, os.W_OK):
            continue
        result = bench(path)
        assert (result.returncode, result.stdout) == (2, "")
        assert reason in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_tool_knows_the_file_systems_that_the_store_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("orangefs", "fuse.sshfs", "devtmpfs"):
        monkeypatch.setattr(of_path, "file_system", lambda _, kind=kind: kind)
        with pytest.raises(of_path.BenchError, match=kind), of_path.subject(tmp_path, None, any_file_system=False):
            pass


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_the_comparison_says_null(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT.with_name("aio_peers.py")), str(tmp_path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == {"deepspeed": None}
