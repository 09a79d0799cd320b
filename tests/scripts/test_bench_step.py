"""``bench_step.py`` on a model that takes no time: what it prints for programs, and that its turns take place."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import forked
import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "bench_step.py"
sys.path.append(str(_SCRIPT.parent))

import _step_curve as curve  # noqa: E402
import _step_output as output  # noqa: E402
from _step_model import Shape  # noqa: E402
from _step_process import Turns, WorkerFailed  # noqa: E402

_TINY = ["--sizes", "chain:8x256", "--rounds", "1", "--warm-up", "1", "--steps", "2"]


def test_every_run_has_what_the_plots_and_other_programs_read(tmp_path: Path):
    """A budget that is too small is reported, and the others go on."""
    plot = tmp_path / "step.png"
    systems = ["--systems", "in_memory", "engine", "--budgets", "all", "least", "1B", "--against", f"old={_ROOT}"]
    arguments = [*_TINY, "--nvme-path", tmp_path, *systems, "--json", "--plot", plot]
    done = forked.run_script(_SCRIPT, *arguments, **forked.children())
    assert done.returncode == 0, done.stderr
    for name in ("engine 1B", "engine old 1B"):
        assert f"{name}: offload.errors.BudgetError" in done.stderr
    runs = json.loads(done.stdout)["runs"]
    engines = [(system, budget) for budget in ("all", "least") for system in ("engine", "engine old")]
    assert [(run["system"], run["budget"]) for run in runs] == [("in_memory", ""), *engines]
    for run in runs:
        assert run["parameters"] == 256 * 256 + 8 * (256 * 256 + 256)
        assert len(run["step_seconds"]) == 2
        assert run["step_seconds_median"] > 0
        assert run["bound_seconds"] > 0
        assert run["bound_by"] in ("compute", "nvme")
        assert run["peak_rss_bytes"] > run["imports_bytes"] > 0
    in_memory, ample, _, least, _ = runs
    assert in_memory["host_memory_bytes"] is None
    assert least["host_memory_bytes"] < ample["host_memory_bytes"]
    assert ample["nvme_read_bytes_per_step"] == ample["nvme_write_bytes_per_step"] == 0
    assert least["nvme_write_bytes_per_step"] > 0
    assert in_memory["losses"] == pytest.approx(ample["losses"], rel=1e-3)
    assert ample["losses"] == least["losses"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_the_engine_and_plain_pytorch_train_with_the_optimizer(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forked.fork_children(monkeypatch)
    request = {
        "shape": asdict(Shape.parse("2x64", 2, 16)), "optimizer": optimizer, "clipping": 1.0, "precision": "fp32",
        "device": "cpu", "device_memory": "auto", "io_backend": "auto", "host_memory": "1GiB",
        "nvme_path": str(tmp_path),
    }  # fmt: skip
    plain, engine = (Turns(None).take({**request, "system": name}, 0, 8)["losses"] for name in ("in_memory", "engine"))
    assert plain == pytest.approx(engine, rel=1e-6)


def test_another_installation_is_imported_in_place_of_this_one(tmp_path: Path):
    other = tmp_path / "other" / "offload"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('this is the other one')")
    with pytest.raises(WorkerFailed, match="this is the other one"):
        Turns(None).take({"installation": str(other.parent)}, 1, 1)


_SILENT = """
import torch

class BudgetError(Exception):
    needed_bytes = 4096

class OffloadEngine:
    plan = None

    def __init__(self, model, *, precision, nvme_path, io_backend, host_memory, gradient_clipping, lr, weight_decay):
        if host_memory == 1:
            raise BudgetError

    def __call__(self, tokens, targets):
        return torch.zeros(())

    def backward(self, loss): pass
    def step(self): pass
    def synchronize(self): pass
    def close(self): pass
    def report(self): pass
"""


def test_an_installation_that_says_nothing_of_itself_is_timed_and_counted(tmp_path: Path):
    """What a turn needs of it is what a training loop needs."""
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "__init__.py").write_text(_SILENT)
    request = {
        "installation": str(tmp_path), "system": "engine", "precision": "fp32", "nvme_path": str(tmp_path),
        "io_backend": "auto", "host_memory": 0, "clipping": 0.0, "device": "cpu", "device_memory": "auto",
        "shape": asdict(Shape.parse("chain:2x16", 1, 8)),
    }  # fmt: skip
    assert Turns(None).least_host_memory(request) == 4096
    turn = Turns(None).take(request, 1, 2)
    assert len(turn["seconds"]) == 2
    assert turn["parameters"] == 256 * 16 + 2 * (16 * 16 + 16)
    assert turn["cpu_seconds"] > 0
    assert turn["host_memory_bytes"] is turn["bandwidths"] is turn["stalls"] is None


def test_budgets_of_a_curve_go_from_the_least_to_all_by_one_factor():
    assert curve.budgets(100, 1600, 5) == ["least", "200B", "400B", "800B", "all"]


def test_a_curve_names_every_budget_that_is_slower_than_a_smaller_one(capsys: pytest.CaptureFixture[str]):
    def run(system: str, budget: str, mib: int, *seconds: float) -> dict[str, object]:
        return {"size": "4x64", "clipping": "never", "system": system, "budget": budget, "step_seconds": seconds,
                "step_seconds_median": statistics.median(seconds), "bound_seconds": 0.5, "cpu_seconds_per_step": 1.0,
                "host_memory_bytes": mib << 20}  # fmt: skip

    runs = [
        run("in_memory", "", 0, 0.5),
        run("engine", "least", 10, 1.0, 1.1), run("engine old", "least", 10, 2.0, 2.2),
        run("engine", "all", 99, 1.05, 1.2), run("engine old", "all", 99, 2.3, 2.4),
    ]  # fmt: skip
    machine = {"cores": 2, "cpu": "a CPU", "torch": "2.13"}
    curve.print_curve(
        {"date": "2026-01-01", "machine": machine, "config": {"precision": "fp32", "batch": 1}, "runs": runs}
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "4x64, clipped never: in memory 0.500 (0.500 0.500)"
    assert " ".join(lines[3].split()) == "10 1.050 (1.000 1.100) 0.48 1.00 2.100 (2.000 2.200) 0.24 1.00 0.50"
    assert lines[-2] == "engine: more memory is never slower, beyond the spread of steps"
    assert lines[-1] == "engine old: 99 MiB is 1.12 times as slow as 10 MiB"


def test_rows_by_version_are_added_to_the_end_of_the_table(tmp_path: Path):
    def run(system: str, seconds: float) -> dict[str, object]:
        return {"size": "4x64", "clipping": "1", "system": system, "budget": "least", "step_seconds_median": seconds,
                "bound_seconds": 1.0, "bound_by": "nvme"}  # fmt: skip

    page = tmp_path / "page.md"
    page.write_text(f"| old |\n\n{output.END_OF_RECORD}\n\nafter\n")
    result = {
        "date": "2026-01-01", "machine": {"cores": 2, "cpu": "a CPU", "torch": "2.13"}, "config": {"precision": "fp32"},
        "runs": [run("in_memory", 1.0), run("deepspeed_nvme", 4.0), run("engine", 2.0)],
    }  # fmt: skip
    output.record(result, "abc1234", page)
    row = (
        "| 2026-01-01 | abc1234 | 2 cores a CPU, torch 2.13 | 4x64 fp32, least | 2.000 s | 50% (nvme) "
        "| 2.00 x plain PyTorch, 0.50 x DeepSpeed |"
    )
    assert page.read_text() == f"| old |\n{row}\n\n{output.END_OF_RECORD}\n\nafter\n"
