"""``bench_step.py`` on a model that takes no time: what it prints for programs, and that its turns take place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "bench_step.py"
_TINY = ["--sizes", "chain:8x256", "--rounds", "1", "--warm-up", "1", "--steps", "2"]


def test_every_run_has_what_the_plots_and_other_programs_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A budget that is too small and another installation that cannot run are reported, and the others go on."""
    plot = tmp_path / "step.png"
    other = tmp_path / "other" / "offload"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('this is the other one')")
    systems = [
        "--systems",
        "in_memory",
        "engine",
        "--budgets",
        "all",
        "least",
        "1B",
        "--against",
        f"old={other.parent}",
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])))
    done = forked.run_script(_SCRIPT, *_TINY, "--nvme-path", tmp_path, *systems, "--json", "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert "engine 1B" in done.stderr and "BudgetError" in done.stderr
    assert "engine old all: this is the other one" in done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["system"], run["budget"]) for run in runs] == [
        ("in_memory", ""),
        ("engine", "all"),
        ("engine", "least"),
    ]
    for run in runs:
        assert run["parameters"] == 256 * 256 + 8 * (256 * 256 + 256)
        assert len(run["step_seconds"]) == 2
        assert run["step_seconds_median"] > 0
        assert run["bound_seconds"] > 0
        assert run["bound_by"] in ("compute", "nvme")
        assert run["peak_rss_bytes"] > run["imports_bytes"] > 0
    in_memory, ample, least = runs
    assert in_memory["host_memory_bytes"] is None
    assert least["host_memory_bytes"] < ample["host_memory_bytes"]
    assert ample["nvme_read_bytes_per_step"] == ample["nvme_write_bytes_per_step"] == 0
    assert least["nvme_write_bytes_per_step"] > 0
    assert in_memory["losses"] == pytest.approx(ample["losses"], rel=1e-3)
    assert ample["losses"] == least["losses"]
    assert plot.read_bytes().startswith(b"\x89PNG")
