"""Measurements of this machine: kept for the plans to come, and taken anew where they no longer hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.cli import main
from offload.predict import measurements, probe
from offload.predict.machine import Cores
from offload.predict.measurements import Measurements

PLAN = ["plan", "--parameters", "20M", "--gpu", "cpu", "--host-memory", "1GiB", "--sequence", "32"]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this test, on a machine that nobody else is busy with."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(measurements, "_MOST_OTHERS", float("inf"))
    return tmp_path / "config" / "offload" / "machine.json"


def ask(value: Any, said: list[str] | None = None, what: str = "speed") -> tuple[Any, bool]:
    """What a plan gets that would measure ``value``, and whether it did."""
    asked = []

    def measure() -> Any:
        asked.append(value)
        return value

    with Measurements(([] if said is None else said).append) as found:
        return found.of(what, measure), bool(asked)


def test_what_was_measured_once_is_kept_for_the_next_plan_which_says_since_when(kept: Path):
    said: list[str] = []
    assert ask([1.5], said) == ([1.5], True)
    assert "measuring this machine, once" in said[0] and str(kept) in said[0]
    assert said[1:] == ["measuring speed"]
    assert ask([2.5], said) == ([1.5], False) and len(said) == 2
    assert ask(7, what="another") == (7, True) and ask(8) == ([1.5], False), "others stay"
    with Measurements(said.append) as found:
        assert found.origin is None
        found.of("speed", list)
        assert found.origin is not None and f"{datetime.now():%Y-%m-%d}" in found.origin and str(kept) in found.origin


@pytest.mark.parametrize("change", ["torch", "threads", "processor", "cores"])
def test_of_another_machine_it_is_measured_anew(change: str, monkeypatch: pytest.MonkeyPatch):
    ask(1)
    match change:
        case "torch":
            monkeypatch.setattr(torch, "__version__", "9.9")
        case "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        case "processor":
            monkeypatch.setattr(measurements, "cpuinfo", lambda: {"model name": "another"})
        case "cores":
            monkeypatch.setattr(measurements.os, "sched_getaffinity", lambda pid: set(range(99)))
    assert ask(2) == (2, True)


@pytest.mark.parametrize("taken", [timedelta(days=31), timedelta(days=-1), "yesterday", None])
def test_what_is_old_or_damaged_is_measured_anew(taken: Any, kept: Path):
    ask(1)
    content = json.loads(kept.read_text())
    (entry,) = content["measurements"].values()
    entry["taken"] = (datetime.now() - taken).isoformat() if isinstance(taken, timedelta) else taken
    kept.write_text(json.dumps(content))
    assert ask(2) == (2, True)


def test_what_was_measured_beside_other_programs_serves_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measurements, "_MOST_OTHERS", 0.1)
    busy = iter([0.0, 1e6])  # seconds of all programs, before and after
    monkeypatch.setattr(measurements, "_busy_seconds", lambda cpus: next(busy))
    said: list[str] = []
    assert ask(1, said) == (1, True)
    assert "other programs took" in said[-1] and "the next plan measures again" in said[-1]
    monkeypatch.setattr(measurements, "_busy_seconds", lambda cpus: 0.0)
    assert ask(2) == (2, True) and ask(3) == (2, False)


def test_the_kernel_tells_how_busy_these_cores_are():
    cpus = measurements.os.sched_getaffinity(0)
    before = measurements._busy_seconds(cpus)
    assert before > 0 and measurements._busy_seconds(cpus) >= before and measurements._busy_seconds([]) == 0


def test_what_cannot_be_kept_is_said(kept: Path):
    kept.parent.parent.write_text("a file where the folder would be")
    said: list[str] = []
    assert ask(1, said) == (1, True) and "cannot be kept" in said[-1]


def test_an_interrupted_trial_is_not_kept():
    with pytest.raises(KeyboardInterrupt), Measurements(print) as found:
        found.of("speed", lambda: 1)
        raise KeyboardInterrupt
    assert ask(2) == (2, True)


def test_models_of_some_size_have_the_same_trial():
    def trial(name: str, batch: int = 1, sequence: int = 2048) -> probe.Trial:
        from offload.predict import known
        from offload.predict.architecture import Architecture
        from offload.predict.model import from_architecture
        from offload.predict.workload import Workload

        config = known.config_of(name)
        assert config is not None
        shapes = Architecture.of_config(config)
        assert shapes is not None
        return probe.Trial.of(from_architecture(name, shapes), Workload(batch=batch, sequence=sequence))

    assert trial("llama-3.1-8b") == trial("qwen3-32b") == trial("llama-3.1-8b", batch=8, sequence=4096)
    assert trial("llama-3.1-8b") != trial("llama-3.1-8b", sequence=16)


def test_the_second_plan_of_this_machine_tries_nothing_and_makes_no_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []

    def counted(name: str, value: Any) -> Callable[..., Any]:
        def measure(*given: object) -> Any:
            tried.append(name)
            return value

        return measure

    monkeypatch.setattr(probe, "core_rates", counted("blocks", Cores(1e11, 1e11, 1.0, 2.0, 1e10, 0.25)))
    monkeypatch.setattr(probe, "head_rate", counted("head", 2e11))
    monkeypatch.setattr("offload.predict.overhead.unit_seconds", counted("unit", 1e-4))
    assert main([*PLAN, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert tried == ["blocks", "head", "unit"]
    code = (
        f"import sys; from offload.cli import main; main({[*PLAN, '--json']}); "
        "sys.exit(not {'torch._dynamo', 'offload.engine', 'transformers'}.isdisjoint(sys.modules))"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert not again.stderr
    second = json.loads(again.stdout)
    assert second["fits"] and second["link_seconds"] == first["link_seconds"]
    assert any("this machine was measured on" in line for line in second["assumptions"])
