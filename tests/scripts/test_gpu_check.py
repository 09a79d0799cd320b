"""``gpu_check.sh`` without a GPU: its report on made-up logs, its limits, its build, and what it times."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_driver import Stand

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import _gpu_report
import bench_gpu_kernels

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


def write_logs(folder: Path, **logs: tuple[int, int, str]) -> None:
    """A log for each part, with its exit status and its seconds."""
    rows = []
    for name, (code, seconds, text) in logs.items():
        (folder / f"{name}.log").write_text(text)
        rows.append(f"{name}\t{code}\t{seconds}\n")
    (folder / "parts.tsv").write_text("".join(rows))


def summary(folder: Path) -> list[str]:
    return _gpu_report.summary({"date": "2030-01-01", "machine": MACHINE, **_gpu_report.read(folder)})


def test_it_begins_with_what_a_reader_wants(tmp_path: Path) -> None:
    write_logs(
        tmp_path,
        build=(0, 60, "built"),
        test=(0, 90, "....\n57 passed, 2 skipped in 88.10s (0:01:28)\n"),
        kernels=(0, 20, f"a table\n{json.dumps(RATES)}\n"),
    )
    (tmp_path / "bench-llama.log").write_text(f"lines\n{json.dumps({'runs': [RUN]})}\n")
    assert summary(tmp_path) == [
        "2030-01-01  A GPU, 16 cores, Linux 6.1, torch 2.13, I/O by io_uring",
        "runs:    build, test, kernels",
        "bits:    those of the CPU, in all 2 kernels",
        "memory:  of a copy's 3,000 GB/s: AdamW bf16 90%, squares bf16 80%",
        "link:    52.0 GB/s to the device, 50.0 to the host; not pinned 9.0, 8.0",
        "step:    llama:16x2048 engine least: 2.000 s, 90% of its bound by compute",
    ]
    read = _gpu_report.read(tmp_path)
    assert [part["last"] for part in read["parts"]] == ["built", "57 passed, 2 skipped", "a table"]
    assert len(_gpu_report.runs_table(read["runs"])) == 2


def test_the_names_of_failures_are_kept(tmp_path: Path) -> None:
    text = (
        "FAILED tests/offload/test_cuda.py::test_one[bf16] - assert 1 == 2\n"
        "ERROR tests/offload/test_cuda.py::test_two - RuntimeError: CUDA error\n"
        "1 failed, 3 passed, 1 error in 12.00s\n"
    )
    other = {**RATES, "kernels": [{**RATES["kernels"][0], "same_bits": False}]}
    write_logs(tmp_path, build=(0, 1, ""), test=(1, 12, text), kernels=(1, 3, json.dumps(other)), soak=(124, 60, "{"))
    lines = summary(tmp_path)
    names = "tests/offload/test_cuda.py::test_one[bf16], tests/offload/test_cuda.py::test_two"
    assert lines[1:5] == [
        "runs:    build",
        f"NOT:     test: failed: 1: {names}",
        "NOT:     kernels: failed: 1",
        "NOT:     soak: too slow",
    ]
    assert "bits:    OTHER THAN THE CPU'S: AdamW bf16" in lines
    assert _gpu_report.parts_table(_gpu_report.read(tmp_path)["parts"])[1].split() == [
        *("test", "failed:", "1", "12", "s"),
        *("1", "failed,", "3", "passed,", "1", "error"),
    ]


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    write_logs(tmp_path, build=(127, 0, ""), kernels=(124, 9, "half a {"))
    assert summary(tmp_path)[1:] == [
        "runs:    nothing",
        "NOT:     build: not found",
        "NOT:     kernels: too slow",
        "bits:    not compared",
        "memory:  not measured",
    ]


def test_a_part_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    """In a copy, since the script builds in place."""
    (tmp_path / "scripts").mkdir()
    for name in ("gpu_check.sh", "_gpu_report.py"):
        shutil.copy(_ROOT / "scripts" / name, tmp_path / "scripts")
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHON": sys.executable, "LIMIT": "0", "NVME": str(tmp_path), "PYTHONPATH": path}
    command = ["bash", str(tmp_path / "scripts" / "gpu_check.sh"), "test", "soak"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "NOT:     test: too slow" in done.stdout and "NOT:     soak: too slow" in done.stdout
    assert [part["last"] for part in json.loads(done.stdout.splitlines()[-1])["parts"]] == ["no time was left"] * 2


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
