"""``gpu_check.py`` without a GPU: its report on made-up logs, its limits, its build, and what it times."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from fake_driver import Stand

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import _gpu_build
import _gpu_report
import bench_gpu_kernels
import gpu_check
import gpu_probe
import gpu_same_bits
from _step_model import Shape

_ROOT = Path(__file__).parents[2]

MACHINE = {"gpu": "A GPU", "cores": 16, "kernel": "6.1", "torch": "2.13", "io_backend": "io_uring"}
RATES = {
    "copy_gb_per_s": 3000.0,
    "kernels": [
        {"name": "AdamW bf16", "same_bits": True, "gb_per_s": 2700.0, "share": 0.9},
        {"name": "squares bf16", "same_bits": True, "gb_per_s": 2400.0, "share": 0.8},
    ],
    "link": {
        "pinned_to_device_gb_per_s": 52.0,
        "pinned_to_host_gb_per_s": 50.0,
        "not_pinned_to_device_gb_per_s": 9.0,
        "not_pinned_to_host_gb_per_s": 8.0,
    },
}
RUN = {
    "size": "llama:16x2048",
    "system": "engine",
    "budget": "least",
    "parameters": 1_000_000,
    "host_memory_bytes": 1 << 30,
    "peak_device_bytes": 2 << 30,
    "step_seconds_median": 2.0,
    "bound_seconds": 1.8,
    "bound_by": "compute",
}


def result_of(folder: Path, **logs: tuple[int, int, str]) -> dict[str, Any]:
    """What is made of a log of each part, with its exit status and its seconds."""
    result: dict[str, Any] = {"parts": {}, "rates": {}, "runs": []}
    for name, (code, seconds, text) in logs.items():
        part = name.replace("_", "-")
        (folder / f"{part}.log").write_text(text)
        _gpu_report.add(result, folder, part, code, seconds)
    return result | {"date": "2030-01-01", "machine": MACHINE}


def test_it_begins_with_what_a_reader_wants(tmp_path: Path) -> None:
    result = result_of(
        tmp_path,
        build=(0, 60, "built"),
        tests=(0, 90, "....\n57 passed, 2 skipped in 88.10s (0:01:28)\n"),
        kernels=(0, 20, f"a table\n{json.dumps(RATES)}\n"),
        bench_7b=(0, 30, f"lines\n{json.dumps({'runs': [RUN]})}\n"),
    )
    assert _gpu_report.summary(result) == [
        "2030-01-01  A GPU, 16 cores, Linux 6.1, torch 2.13, I/O by io_uring",
        "runs:    build, tests, kernels, bench-7b",
        "bits:    those of the CPU, in all 2 kernels",
        "memory:  of a copy's 3,000 GB/s: AdamW bf16 90%, squares bf16 80%",
        "link:    52.0 GB/s to the device, 50.0 to the host; not pinned 9.0, 8.0",
        "step:    llama:16x2048 engine least: 2.000 s, 90% of its bound by compute",
    ]
    said = ["built", "57 passed, 2 skipped", "a table", "lines"]
    assert [part["last"] for part in result["parts"].values()] == said
    assert len(_gpu_report.runs_table(result["runs"])) == 2
    (tmp_path / "bench-7b.log").write_text(json.dumps({"runs": [{**RUN, "step_seconds_median": 1.9}]}))
    _gpu_report.add(result, tmp_path, "bench-7b", 0, 30)
    assert [run["step_seconds_median"] for run in result["runs"]] == [1.9]  # in the place of the earlier one


def test_what_a_probe_has_seen_before_it_was_interrupted_is_shown(tmp_path: Path) -> None:
    first, more = {"adam_gb_per_s": {"1": 20.0, "16": 210.0}}, {"register_s_per_gib": 0.07}
    text = f"a line\n{json.dumps(first)}\n{json.dumps({**first, **more})}\nKeyboardInterrupt\n"
    lines = _gpu_report.summary(result_of(tmp_path, probe=(124, 120, text)))
    assert "host:    Adam 210 GB/s on 16 threads, registered in 0.07 s a GiB" in lines


def test_the_names_of_failures_are_kept(tmp_path: Path) -> None:
    text = (
        "FAILED tests/offload/test_cuda.py::test_one[bf16] - assert 1 == 2\n"
        "ERROR tests/offload/test_cuda.py::test_two - RuntimeError: CUDA error\n"
        "1 failed, 3 passed, 1 error in 12.00s\n"
    )
    other = {**RATES, "kernels": [{**RATES["kernels"][0], "same_bits": False}]}
    result = result_of(
        tmp_path, build=(0, 1, ""), tests=(1, 12, text), kernels=(1, 3, json.dumps(other)), soak=(124, 60, "{")
    )
    names = "tests/offload/test_cuda.py::test_one[bf16], tests/offload/test_cuda.py::test_two"
    lines = _gpu_report.summary(result)
    assert lines[1:5] == [
        "runs:    build",
        f"NOT:     tests: failed: 1: {names}",
        "NOT:     kernels: failed: 1",
        "NOT:     soak: too slow",
    ]
    assert "bits:    OTHER THAN THE CPU'S: AdamW bf16" in lines
    assert _gpu_report.line_of(result["parts"]["tests"]).split() == [
        *("tests", "failed:", "1", "12", "s"),
        *("1", "failed,", "3", "passed,", "1", "error"),
    ]


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    result = result_of(tmp_path, build=(127, 0, ""), kernels=(124, 9, "half a {"))
    assert _gpu_report.summary(result)[1:] == [
        "runs:    nothing",
        "NOT:     build: not found",
        "NOT:     kernels: too slow",
        "bits:    not compared",
        "memory:  not measured",
    ]


def test_each_result_is_saved_at_once_and_what_is_left_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (
        gpu_check.Part("build", 60, ["true"]),
        gpu_check.Part("kernels", 60, ["true"]),
        gpu_check.Part("probe", 60, ["false"]),
        gpu_check.Part("soak", 60, ["no-such-program"]),
    )
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    check = gpu_check.Check(tmp_path, tmp_path, time.monotonic() + 60)
    for part in parts:
        check.run(part)
        saved = json.loads((tmp_path / "gpu_check.json").read_text())
        assert [*saved["parts"]][-1] == part.name
        with tarfile.open(tmp_path / "logs.tgz") as logs:
            assert sorted(logs.getnames()) == sorted(f"{name}.log" for name in saved["parts"])
    assert [part["verdict"] for part in saved["parts"].values()] == ["ok", "ok", "failed: 1", "not found"]
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_check.json", "logs.tgz"}  # all that has to come back

    def names(*wanted: str) -> list[str]:
        later = gpu_check.Check(tmp_path, tmp_path, 0.0)
        return [part.name for part in gpu_check.in_order(later.result, wanted)]

    assert names() == ["build", "probe", "soak"]  # what is done is not done again
    assert names("kernels", "soak") == ["kernels", "soak"]  # unless it is asked for


def test_a_part_that_another_call_has_begun_comes_before_those_that_none_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tuple(
        gpu_check.Part(name, 60, [program]) for name, program in (("build", "true"), ("a", "true"), ("b", "false"))
    )
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    first = gpu_check.Check(tmp_path, tmp_path, time.monotonic() + 60)
    first.run(parts[0])
    first.run(parts[2])
    late = gpu_check.Check(tmp_path, tmp_path, time.monotonic() + 19)  # less than a third of what a part may take
    for part in parts:
        late.run(part)
    verdicts = {name: part["verdict"] for name, part in late.result["parts"].items()}
    assert verdicts == {"build": "ok", "a": "not begun", "b": "failed: 1"}  # what was seen is not lost
    assert [part.name for part in gpu_check.in_order(late.result, [])] == ["build", "b", "a"]


def test_a_part_for_other_machines_is_no_failure(tmp_path: Path) -> None:
    check = gpu_check.Check(tmp_path, tmp_path, time.monotonic() + 60)
    check.run(gpu_check.Part("ranks-tests", 60, ["false"], gpus=1000))
    assert [part["verdict"] for part in check.result["parts"].values()] == ["not here"]
    assert not any(line.startswith("NOT") for line in _gpu_report.summary(check.result))
    assert "ranks-tests" not in [part.name for part in gpu_check.in_order(check.result, [])]


def test_parts_find_what_the_caller_has_carried_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = tmp_path / "site"
    carried.mkdir()
    (carried / "carried_module.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(carried))
    program = tmp_path / "program.py"
    program.write_text("import carried_module, offload\n")
    assert gpu_check._run(gpu_check.Part("it", 60, [str(program)]), tmp_path, tmp_path, 60.0) == 0


def test_a_part_that_takes_too_long_is_interrupted_and_says_where_it_was(tmp_path: Path) -> None:
    program = tmp_path / "slow.py"
    program.write_text("import time\ntime.sleep(100)\n")
    assert gpu_check._run(gpu_check.Part("slow", 1, [str(program)]), tmp_path, tmp_path, 1.0) == 124
    assert "KeyboardInterrupt" in (tmp_path / "slow.log").read_text()


def test_what_an_interrupted_part_has_measured_counts(tmp_path: Path) -> None:
    text = f"{json.dumps({'runs': [RUN]})}\nTraceback (most recent call last):\nKeyboardInterrupt\n"
    result = result_of(tmp_path, bench_7b=(124, 300, text))
    assert [run["size"] for run in result["runs"]] == [RUN["size"]]


def test_compute_of_many_layers_is_known_by_that_of_few() -> None:
    def run(system: str, layers: int, seconds: float, batch: int) -> dict[str, Any]:
        size = f"llama:{layers}x4096"
        return {**RUN, "system": system, "size": size, "batch": batch, "step_seconds_median": seconds}

    seven = run("engine", 32, 3.0, 4)
    few = [run("in_memory", 4, 0.5, 4), run("in_memory", 8, 0.75, 4), run("in_memory", 8, 9.0, 1)]
    assert _gpu_report.compute_seconds(seven, [seven, few[0]]) is None
    assert _gpu_report.compute_seconds(seven, [seven, *few]) == 0.75 + 24 * 0.0625
    assert _gpu_report._step(seven, [seven, *few]).endswith("its compute alone 2.250 s, 75% of both")


def test_each_test_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import os, pytest, time\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_dies(): os._exit(3)\n"
        "def test_hangs(): time.sleep(100)\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    command = [sys.executable, str(_ROOT / "scripts" / "_each_test.py"), "--seconds", "10", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("3 failed, 1 passed, 1 skipped in "), done.stdout + done.stderr
    assert "FAILED test_it.py::test_bad - assert 1 == 2" in done.stdout
    assert "FAILED test_it.py::test_hangs - it took more than 10 s" in done.stdout


def test_no_test_goes_on_when_all_of_them_are_interrupted(tmp_path: Path) -> None:
    file, begun = tmp_path / "test_it.py", tmp_path / "begun"
    file.write_text(
        "import os, pathlib, time\n"
        "def test_good(): pass\n"
        "def test_slow():\n"
        f"    pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
    )
    command = [sys.executable, str(_ROOT / "scripts" / "_each_test.py"), "--jobs", "2", "--seconds", "60", str(file)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        while not begun.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert "interrupted" in said.splitlines()[-1], said
    assert not Path(f"/proc/{begun.read_text()}").exists()


def test_a_part_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    script = _ROOT / "scripts" / "gpu_check.py"
    done = forked.run_script(script, "kernels", "soak", "--limit", "0", "--out", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "NOT:     kernels: not begun" in done.stdout and "NOT:     soak: not begun" in done.stdout
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"].values()
    assert [part["last"] for part in parts] == ["no time was left"] * 2


def test_the_probe_counts_what_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "_ADAM_NUMEL", 1 << 16)
    found = gpu_probe.adam_by_threads(3)
    assert [*found] == ["1", "2", "3"] and all(rate > 0 for rate in found.values())


def test_bits_are_compared_at_budgets_that_offload(tmp_path: Path) -> None:
    shape = Shape.parse("llama:2x64", 1, 16, checkpointing=True)
    least = gpu_same_bits.least(shape, "host_memory", nvme_path=str(tmp_path))
    resident = gpu_same_bits.train(shape, 2, nvme_path=str(tmp_path))
    assert gpu_same_bits.train(shape, 2, nvme_path=str(tmp_path), host_memory=least) == resident
    assert len(resident) == 3 and resident[0] != resident[1]


def test_what_was_built_of_the_same_sources_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aio_ext import _aio
    from offload.kernels import _kernels

    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        for name, module in zip(_gpu_build._NAMES, (_aio, _kernels), strict=True):
            shutil.copy(module.__file__, tmp_path / f"{name}{_gpu_build._SUFFIX}")

    source, extension = tmp_path / "offload/kernels/isa.cpp", tmp_path / f"aio_ext/_aio{_gpu_build._SUFFIX}"
    for path in (source, tmp_path / "CMakeLists.txt", extension, tmp_path / "build/other"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    monkeypatch.setattr(_gpu_build, "_ROOT", tmp_path)
    monkeypatch.setattr(_gpu_build, "_build", build)
    for name, value in forked.children().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", forked.INTERPRETER)
    for call, wanted in ((lambda: None, 1), (lambda: None, 1), (lambda: source.write_text("2"), 2),
                         (lambda: extension.write_text("of another machine"), 3), (extension.unlink, 4)):  # fmt: skip
        call()
        _gpu_build.main()
        assert len(built) == wanted


def test_torch_has_what_the_build_needs_of_pybind11(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    include = Path(torch.__file__).parent / "include"
    options = {
        "pybind11_DIR": _ROOT / "scripts" / "pybind11",
        "TORCH_INCLUDE": include,
        "Python_EXECUTABLE": sys.executable,
    }
    configure = [
        "cmake",
        "-S",
        str(_ROOT),
        "-B",
        str(tmp_path),
        *(f"-D{name}={value}" for name, value in options.items()),
    ]
    subprocess.run(configure, check=True, capture_output=True)
    assert (
        "_kernels"
        in subprocess.run(
            ["cmake", "--build", str(tmp_path), "--target", "help"], check=True, capture_output=True, text=True
        ).stdout
    )


def test_kernels_and_link_are_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu_kernels, "_CHECKED", 1003)
    monkeypatch.setattr(bench_gpu_kernels, "CASES", bench_gpu_kernels.CASES[:2])
    monkeypatch.setattr(bench_gpu_kernels.bandwidth, "_SECONDS", 0.001)
    stand = Stand(monkeypatch)
    result = bench_gpu_kernels.measure(stand.device(), 4096, 1)
    rows = {row["name"]: row for row in result["kernels"]}
    assert all(row["same_bits"] for row in rows.values()) and len(rows) == 4
    # An event of the stand says that a millisecond has passed.
    assert rows["AdamW bf16"]["gb_per_s"] == pytest.approx(26 * 4096 / 1e-3 / 1e9)
    assert rows["squares bfloat16"]["share"] == pytest.approx(2 / 8)
    assert result["copy_gb_per_s"] == pytest.approx(8 * 4096 / 1e-3 / 1e9)
    assert set(result["link"]) == set(RATES["link"]) and stand.driver.num_registered == 0
    assert len(bench_gpu_kernels.table(result)) == 1 + len(rows) + 4


def test_a_model_is_built_once_for_several_batches(tmp_path: Path) -> None:
    model = ["--sizes", "chain:2x64", "--device", "cpu"]
    counts = ["--warm-up", "0", "--steps", "1", "--context", "8", "--batches", "1", "3", "--timeline", str(tmp_path)]
    done = forked.run_script(_ROOT / "scripts" / "gpu_batches.py", *model, *counts)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line)["runs"] for line in done.stdout.splitlines()]
    assert [[run["batch"] for run in runs] for runs in lines] == [[1], [1, 3]]
    assert len(list(tmp_path.glob("*.timeline.json"))) == 2
    assert len(_gpu_report.runs_table(lines[-1])) == 3
