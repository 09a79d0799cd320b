"""``offload plan`` as it is called: for people, for programs, and with options that do not go together."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import nn

from offload.cli import main
from offload.errors import ConfigError
from offload.predict import plot as plot_module
from offload.predict.machine import Cores, Machine
from offload.predict.network import Network
from offload.predict.tuning import Trial, best_of, tune
from offload.predict.workload import Workload
from offload.report.report import Bandwidths

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan.md"
GIVEN = ["--gpu", "h100", "--device-memory", "4GiB", "--nvme", "7GB/s,5GB/s,3.8TB"]
ONE = ["plan", "--parameters", "1e9", *GIVEN, "--host-memory", "4GiB"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_one_object_for_programs_and_tables_for_people(capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, *ONE)
    assert found["fits"] and found["limit"] == "NVMe" and found["advice"] and found["endurance"]
    assert main(ONE) == 0
    text = capsys.readouterr().out
    for line in (
        "It fits. A step takes",
        "limited by NVMe",
        "compute-bound",
        "What would help most",
        "rated for 600 TB",
    ):
        assert line in text
    assert "45% of the dense peak" in text


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]):
    small = [*ONE[:-1], "600MiB"]
    assert main(small) == 0
    text = capsys.readouterr().out
    assert "It does not fit: host memory of " in text and "With one of these it fits" in text
    assert main([*ONE[:-1], "least"]) == 0
    assert "It fits." in capsys.readouterr().out
    assert main([*ONE, "--batch", "256"]) == 0
    assert "Try --activation-checkpointing" in capsys.readouterr().out


def test_what_several_gpus_hold_parts_of_is_chosen_or_given(capsys: pytest.CaptureFixture[str]):
    several = [*ONE, "--gpus", "8", "--device-memory", "auto"]
    assert main(several) == 0
    assert (
        "Each GPU holds a part of the states, all gradients, and weights as far as it has room."
        in capsys.readouterr().out
    )
    found = answer(capsys, *several, "--shard", "weights")
    assert found["shard"] == "weights" and found["link_seconds"]["network"] > 0  # type: ignore[index]
    assert answer(capsys, *ONE)["shard"] is None


def test_clipping_is_told_apart_where_it_is_set(capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, *ONE, "--gradient-clipping", "1")
    assert found["seconds_if_clipped"] >= found["seconds"]  # type: ignore[operator]
    assert "seconds_if_clipped" not in answer(capsys, *ONE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a MODEL or --parameters"),
        (["model", "--parameters", "7e9"], "one of the two"),
        (["--parameters", "7e9", "--gpu", "h100"], "--host-memory"),
        (["--parameters", "many", "--gpu", "h100", "--host-memory", "1GiB"], "--parameters: expected a number"),
        (["--parameters", "7e9", "--gpu", "h900", "--host-memory", "1GiB"], "--gpu: expected"),
        (["--parameters", "7e9", "--gpus", "8"], "--gpus and --nodes"),
        (["--parameters", "7e9", "--device-memory", "8GiB"], "--device-memory"),
        (["--parameters", "7e9", "--shard", "states"], "--shard is of several GPUs"),
        (["--parameters", "7e9", "--tune"], "--tune takes real steps"),
        (["model", "--write", "x.json"], "--write"),
        (["no_such_module:build"], "No module named 'no_such_module'"),
        (["/nowhere"], "there is no such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1


def test_this_machine_is_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = ["--parameters", "20M", "--precision", "fp32", "--sequence", "32", "--host-memory", "150MiB"]
    found = answer(capsys, "plan", *arguments, "--nvme-path", str(tmp_path))
    assert found["fits"] and found["machine"]["nvme"]["read"] > 0 and found["link_seconds"]["compute"] > 0  # type: ignore[index]


@pytest.mark.parametrize("over", ["host-memory", "batch"])
def test_a_picture_is_drawn(over: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "step.svg"
    assert main([*ONE, "--activation-checkpointing", "--plot", str(picture), "--over", over]) == 0
    text = picture.read_text()
    assert text.startswith("<?xml") and len(text) > 5000
    assert str(picture) in capsys.readouterr().out


def test_without_matplotlib_a_picture_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*ONE, "--plot", str(tmp_path / "step.png")]) == 2
    assert "pip install 'offload-engine[plot]'" in capsys.readouterr().err
    assert plot_module.ConfigError is ConfigError


def test_the_defaults_stand_unless_something_beats_them_in_every_round():
    defaults = Trial({}, (1.0, 1.1, 1.0))
    lucky = Trial({"tile_bytes": 1}, (0.5, 1.2, 0.5))
    slightly = Trial({"tile_bytes": 2}, (0.98, 1.07, 0.98))
    better = Trial({"tile_bytes": 4}, (0.8, 0.9, 0.85))
    assert best_of([defaults, lucky, slightly]) is defaults
    assert best_of([defaults, lucky, better]) is better


def test_tuning_takes_real_steps_and_writes_what_makes_the_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tuned_models.py").write_text(
        "from torch import nn\n"
        "class Classifier(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Embedding(300, 64), *(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    written = tmp_path / "config.json"
    arguments = ["tuned_models:Classifier", "--nvme-path", str(tmp_path), "--host-memory", "1MiB", "--sequence", "8"]
    assert main(["plan", *arguments, "--precision", "fp32", "--tune", "--write", str(written), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    options = json.loads(written.read_text())
    assert found["options"] == options and options["host_memory"] == "1MiB"
    settings = [trial["settings"] for trial in found["trials"]]
    assert settings[0] == {} and {"tile_bytes": 4 << 20} in settings and {"io_backend": "threads"} in settings
    assert all(seconds > 0 for trial in found["trials"] for seconds in trial["seconds"])
    from offload import OffloadEngine

    OffloadEngine(nn.Linear(64, 64), **options).close()
    sys.modules.pop("tuned_models")


def test_nothing_is_tried_again_that_was_given():
    settings = [trial.settings for trial in _tried({"io_backend": "threads", "tile_bytes": 1 << 20})]
    assert settings == [{}]


def _tried(options: dict[str, object]) -> tuple[Trial, ...]:
    from offload.predict.model import Model

    def build() -> Model:
        return Model("one", nn.Sequential(nn.Embedding(50, 8)), 1, 8, 0, 50)

    return tune(build, Workload(sequence=4, precision="fp32"), {"host_memory": "1MiB", **options}).trials


def test_the_page_shows_what_the_code_gives():
    spec = importlib.util.spec_from_file_location("plan_page", ROOT / "scripts" / "plan_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = PAGE.read_text()
    assert text.count("$ offload plan ") == 3 and "| 70B |" in text
    assert module.page(text) == text, "run scripts/plan_page.py"


def test_the_page_of_ranks_shows_what_the_code_gives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import scaling_page

    text = scaling_page.PAGE.read_text()
    assert "| 512 | inside of nodes first |" in text and "| ZeRO-3 Offload |" in text
    assert scaling_page.page(text) == text, "run scripts/scaling_page.py"


def test_the_check_predicts_anew_for_what_was_seen(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import plan_check

    machine = Machine(
        host_bytes=1 << 30, nvme_bytes=1 << 40, nvme=Bandwidths(2e9, 4e9, 1.0), cores=Cores(5e10, 5e10), update=4e10,
        checksum=2e10, unit_seconds=1e-4, record_seconds=1e-3,
    )  # fmt: skip
    case = plan_check.Case.parse("2x128:all:never:1:io_uring")
    run = plan_check.Run(case, machine, {"seconds": [1.0, 2.0, 1.5], "parameters": 4_500_000})
    saved = tmp_path / "runs.json"
    saved.write_text(json.dumps([asdict(run)]))
    monkeypatch.setattr(sys, "argv", ["plan_check.py", "--again", str(saved)])
    plan_check.main()
    text = capsys.readouterr().out
    predicted = run.prediction().seconds
    assert f"| {predicted:.3f} (compute) | 1.500 (1.000 to 2.000) | {predicted / 1.5 - 1:+.0%} |" in text
    assert "0 of 1 runs are within 10 %" in text


def test_the_check_of_ranks_predicts_anew_for_what_was_seen(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import scale_check

    machine = Machine(
        host_bytes=1 << 30, nvme_bytes=1 << 40, nvme=Bandwidths(2e9, 4e9, 1.0), cores=Cores(5e10, 5e10), update=4e10,
        checksum=2e10, unit_seconds=1e-4, record_seconds=1e-3, network=Network(2, 2, 1e9, 1e9, math.inf, 1e-4, 1e-9),
    )  # fmt: skip
    seen = scale_check.Run(scale_check.Case(2, "2x128", 1, "all", "weights"), machine, [1.0, 2.0, 1.5], {})
    alike = replace(seen, memory=seen.prediction().plan.memory)
    saved = tmp_path / "runs.json"
    saved.write_text(json.dumps([asdict(seen), asdict(alike)]))
    monkeypatch.setattr(sys, "argv", ["scale_check.py", "--again", str(saved)])
    scale_check.main()
    text = capsys.readouterr().out
    predicted = seen.prediction().seconds
    row = f"| 2 | 2x128 | 1 | all | weights | 1.500 (1.000 to 2.000) | {predicted:.3f} (compute)"
    assert f"{row} (another plan) | {predicted / 1.5:.2f} |" in text and f"{row} | {predicted / 1.5:.2f} |" in text
    assert "0 of 2 runs are within 10 %" in text
