"""``offload plan`` as it is called: for people, for programs, and with options that do not go together."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from offload.cli import main
from offload.cli.plan_shown import shown
from offload.errors import BudgetError, ConfigError
from offload.predict import known
from offload.predict import plot as plot_module
from offload.predict.machine import Cores, Machine
from offload.predict.network import Network
from offload.predict.tuning import Trial, Tuned, ahead_of_first, tune
from offload.predict.workload import Workload
from offload.report.report import Bandwidths

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan.md"
GIVEN = ["--gpu", "h100", "--device-memory", "4GiB", "--nvme", "7GB/s,5GB/s,3.8TB"]
ONE = ["plan", "--parameters", "1e9", *GIVEN, "--host-memory", "4GiB"]


@pytest.fixture(autouse=True)
def own_measurements(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is not kept for the machine's user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the best batch of each way takes half of a plan's time, and has tests of its own."""
    monkeypatch.setattr("offload.predict.best_batches._sizes", lambda batches: [])


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def said(facts: dict[str, object]) -> str:
    """The same answer for people."""
    console = Console(width=1000)
    with console.capture() as captured:
        console.print(shown(facts))
    return captured.get()


def test_one_object_for_programs_and_tables_for_people(capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, *ONE)
    assert found["fits"] and found["limit"] == "NVMe" and found["advice"] and found["endurance"]
    text = said(found)
    first = text.splitlines()[0]
    assert first.startswith("It fits: ") and " tokens a second, a step of " in first and "limited by NVMe" in first
    for line in ("largest batch that fits", "What would help most", "Ways to train it", "rated for 600 TB"):
        assert line in text
    assert "45% of the dense peak" in text and "4.0 GiB of host memory (given)" in text


def test_where_memory_is_too_small_and_no_drive_is_named_one_is_asked_for(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--parameters", "1e9", "--gpu", "4090", "--host-memory", "1GiB"]) == 0
    verdict = capsys.readouterr().out.partition("model:")[0]
    assert verdict.startswith("It does not fit: host memory of ") and "give --nvme-path DIR" in verdict


@pytest.mark.usefixtures("few_batches")
def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]):
    small = [*ONE[:-1], "600MiB"]
    assert main(small) == 0
    text = capsys.readouterr().out
    assert text.startswith("It does not fit: host memory of ") and "With one of these it fits" in text
    assert "\nWith --lora r=16 --base nf4 it fits: " in text.partition("model:")[0]
    assert main([*ONE[:-1], "least"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("It fits: ") and "(the least that works)" in text
    found = answer(capsys, *ONE, "--batch", "256")
    largest = found["largest_batch"]
    assert main([*ONE, "--batch", "256"]) == 0
    assert f"Try --activations recompute, --batch {largest}, the largest that fits" in capsys.readouterr().out
    assert answer(capsys, *ONE, "--batch", str(largest))["fits"]
    assert not answer(capsys, *ONE, "--batch", str(largest + 1))["fits"]  # type: ignore[operator]


@pytest.mark.usefixtures("few_batches")
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


@pytest.mark.usefixtures("few_batches")
def test_clipping_is_told_apart_where_it_is_set(capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, *ONE, "--gradient-clipping", "1")
    assert found["seconds_if_clipped"] >= found["seconds"]  # type: ignore[operator]
    assert "seconds_if_clipped" not in answer(capsys, *ONE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a MODEL or --parameters"),
        (["model", "--parameters", "7e9"], "one of the two"),
        (["--parameters", "7e9", "--gpu", "h100", "--host-memory", "64"], 'with its unit, such as "64GiB"'),
        (["--parameters", "7e9", "--gpu", "h100", "--nvme", "6"], "--nvme: expected"),
        (["--parameters", "7e9", "--lora", "r=many"], "--lora: expected a rank"),
        (["--parameters", "7e9", "--base", "nf4"], "give --lora, too"),
        (["--parameters", "7e9", "--sustained-write", "1GB/s"], "--sustained-write is of drives"),
        (["meta-llama/Lama-3-8B"], "Did you mean llama-3-8b"),
        (["someone/strange"], "download its config.json"),
        (["--parameters", "many", "--gpu", "h100", "--host-memory", "1GiB"], "--parameters: expected a number"),
        (["--parameters", "7e9", "--gpu", "h900", "--host-memory", "1GiB"], "--gpu: expected"),
        (["--parameters", "7e9", "--gpus", "8"], "--gpus and --nodes"),
        (["--parameters", "7e9", "--device-memory", "8GiB"], "--device-memory"),
        (["--parameters", "7e9", "--shard", "states"], "--shard is of several GPUs"),
        (["--parameters", "7e9", "--exchange-dtype", "int8"], "--exchange-dtype is of several GPUs"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-3-8b", "--gpu", "h900"],
        ["llama-3-8b", "--gpu", "4090", "--host-memory", "64"],
        ["lama-3-8b"],
        ["llama-3-8b", "--lora", "r=0"],
        ["/nowhere"],
        ["-h"],
    ],
)
def test_a_mistake_and_help_do_not_wait_for_torch(arguments: list[str]):
    code = f"import sys; from offload.cli import main; main({['plan', *arguments]}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_plan_of_a_known_model_brings_in_neither_its_library_nor_torchs_compiler():
    given = ["plan", "llama-3-8b", "--gpu", "4090", "--host-memory", "64GiB", "--activations", "recompute"]
    code = (
        f"import sys; from offload.cli import main; main({given}); "
        "sys.exit(not {'transformers', 'peft', 'torch._dynamo'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_model_of_the_hub_is_planned_by_its_name_in_three_ways(capsys: pytest.CaptureFixture[str]):
    arguments = ["plan", "meta-llama/Llama-3.2-1B", "--gpu", "RTX 4090", "--host-memory", "16GiB", "--nvme", "6GB/s"]
    found = answer(capsys, *arguments)
    ways = {row["way"]: row for row in found["ways"]}  # type: ignore[attr-defined]
    assert list(ways) == ["full", "LoRA r=16", "LoRA r=16 over nf4"]
    assert ways["full"]["tokens_per_second"] == found["tokens_per_second"]
    narrow, wide = ways["LoRA r=16 over nf4"], ways["LoRA r=16"]
    assert sum(narrow["memory"].values()) < sum(wide["memory"].values()) < sum(ways["full"]["memory"].values())
    lora = answer(capsys, *arguments, "--lora", "16", "--base", "nf4")
    assert lora["tokens_per_second"] == narrow["tokens_per_second"] and lora["ways"] == []
    text = said(lora)
    assert "LoRA r=16 on all linear layers: 11,272,192 of them are trained over a base in nf4" in text
    assert "to_nf4(part.weight.detach())" in text
    assert 'peft.LoraConfig(r=16, target_modules="all-linear")' in text


@pytest.mark.usefixtures("few_batches")
def test_the_code_to_paste_makes_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    (tmp_path / "pasted_models.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(150, 128), *(nn.Sequential(nn.Linear(128, 128)) for _ in range(8)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    described = ["--gpu", "4090", "--host-memory", "1GiB", "--precision", "fp32", "--moments-dtype", "bf16"]
    code = answer(capsys, "plan", "pasted_models:build", *described)["code"]
    assert isinstance(code, str) and "device='cuda', host_memory='1GiB', " in code
    names: dict[str, Any] = {}
    exec(code.replace("device='cuda', ", ""), names)
    with names["engine"] as engine:
        assert (engine.config.precision, engine.config.moments_dtype) == ("fp32", "bf16")
        assert engine.config.host_memory == 1 << 30
    sys.modules.pop("pasted_models")


@pytest.mark.usefixtures("few_batches")
def test_a_training_takes_hours_and_a_drive_lasts_for_tokens(capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, *ONE, "--tokens", "1B")
    assert found["hours"] == pytest.approx(1e9 / found["tokens_per_second"] / 3600)  # type: ignore[operator]
    wear: Any = found["endurance"]
    assert wear["tokens"] == wear["steps"] * 2048
    assert wear["hours"] == pytest.approx(wear["steps"] * wear["seconds"] / 3600)
    text = said(found)
    assert "1,000,000,000 tokens take " in text and f"{wear['steps']:,} steps: " in text


@pytest.mark.usefixtures("few_batches")
def test_spare_copies_without_room_are_told(capsys: pytest.CaptureFixture[str]):
    arguments = ["--parameters", "1e9", "--gpu", "h100", "--device-memory", "4GiB", "--host-memory", "4GiB"]
    found = answer(capsys, "plan", *arguments, "--nvme", "7GB/s,5GB/s,10GB")
    assert found["fits"] and found["no_spare_copies"]
    text = said(found)
    assert "spare copies: no room" in text and "NVMe has no room for spare copies" in text
    assert "no room" not in said(found | {"no_spare_copies": False, "nvme_write_bytes": 0})


@pytest.mark.usefixtures("few_batches")
def test_without_host_memory_it_is_this_machines(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("offload.cli.plan_made.available_bytes", lambda: 100 << 30)
    assert main(["plan", "--parameters", "1e9", "--gpu", "4090"]) == 0
    assert "80.0 GiB of host memory (most of what is free on this machine)" in capsys.readouterr().out


@pytest.mark.usefixtures("few_batches")
def test_a_machine_with_a_gpu_is_planned_with_it(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA GeForce RTX 4090")
    arguments = ["plan", "--parameters", "1e9", "--host-memory", "4GiB", "--nvme-path", str(tmp_path)]
    found: Any = answer(capsys, *arguments)
    assert found["machine"]["device"] == "rtx4090" and found["machine"]["nvme"]["read"] > 0
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "Quadro 600")
    assert main(arguments) == 2
    assert "the data sheet of this machine's Quadro 600 is not known" in capsys.readouterr().err


@pytest.mark.usefixtures("few_batches")
def test_this_machine_is_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = ["--parameters", "20M", "--precision", "fp32", "--sequence", "32", "--host-memory", "150MiB"]
    found = answer(capsys, "plan", *arguments, "--nvme-path", str(tmp_path))
    assert found["fits"] and found["machine"]["nvme"]["read"] > 0 and found["link_seconds"]["compute"] > 0  # type: ignore[index]


@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("over", ["host-memory", "batch"])
def test_a_picture_is_drawn(over: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "step.svg"
    assert main([*ONE, "--activations", "recompute", "--plot", str(picture), "--over", over]) == 0
    text = picture.read_text()
    assert text.startswith("<?xml") and len(text) > 5000
    assert str(picture) in capsys.readouterr().out


@pytest.mark.usefixtures("few_batches")
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
    best = Trial({"tile_bytes": 8}, (0.7, 0.8, 0.7))
    assert ahead_of_first([defaults, lucky, slightly]) == []
    assert ahead_of_first([defaults, better, lucky, best]) == [best, better]


def test_what_is_ahead_by_luck_is_not_ahead_twice(monkeypatch: pytest.MonkeyPatch):
    turns: list[dict[str, object]] = []

    def turn(model: object, sequence: int, settings: dict[str, object]) -> tuple[float, object]:
        own = {name: settings[name] for name in ("together", "batch") if settings[name] not in (False, 2)}
        turns.append(own)
        lucky = own == {"together": True} and turns.count(own) <= 3
        seconds = 0.5 if lucky else 0.8 if own == {"batch": 4} and "activations" not in settings else 1.0
        return seconds, SimpleNamespace(step_read_bytes=0, step_write_bytes=0, host_bytes=0)

    monkeypatch.setattr("offload.predict.tuning._turn", turn)
    found = _tuned({}, batch=2, micro_batches=2)
    assert found.best == {"batch": 4, "gradient_accumulation_steps": 1} and not found.defaults_stand
    assert found.faster == pytest.approx(1.25) and found.loop["batch"] == 4
    lucky: dict[str, object] = {"together": True}
    better: dict[str, object] = {"batch": 4}
    once_more = turns[3 * 4 :]  # after three rounds of four settings
    assert once_more == [lucky, {}, better, {}, {}, better, better, {}]


@pytest.mark.usefixtures("few_batches")
def test_tuning_takes_real_steps_and_writes_what_makes_the_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tuned_models.py").write_text(
        "from torch import nn\n"
        "class Classifier(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Embedding(150, 128), *(nn.Sequential(nn.Linear(128, 128)) for _ in range(8)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    written = tmp_path / "config.json"
    arguments = ["tuned_models:Classifier", "--nvme-path", str(tmp_path), "--host-memory", "1.5MiB", "--sequence", "8"]
    assert main(["plan", *arguments, "--precision", "fp32", "--tune", "--write", str(written), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    options = json.loads(written.read_text())
    assert found["options"] == options and options["host_memory"] == "1.5MiB"
    assert found["loop"] == {"batch": 1, "together": False}
    settings = [trial["settings"] for trial in found["trials"]]
    assert settings[0] == {} and {"io_backend": "threads"} in settings
    assert all(seconds > 0 for trial in found["trials"] for seconds in trial["seconds"])
    from offload import OffloadEngine

    OffloadEngine(nn.Linear(64, 64), **options).close()
    sys.modules.pop("tuned_models")


@pytest.mark.usefixtures("few_batches")
def test_tuning_in_the_least_memory_is_within_what_the_plan_calls_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "least_models.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given: list[object] = []

    def tuned(build: object, workload: object, options: dict[str, object], say: object) -> Tuned:
        given.append(options["host_memory"])
        return Tuned((Trial({}, (1.0, 1.0, 1.0)),), {}, 1.0, {}, {"together": False, "batch": 1})

    monkeypatch.setattr("offload.predict.tuning.tune", tuned)
    arguments = ["least_models:build", "--nvme-path", str(tmp_path), "--precision", "fp32", "--host-memory", "least"]
    assert main(["plan", *arguments, "--sequence", "8", "--tune"]) == 0
    assert "no setting that was not given bears on this step" in capsys.readouterr().out
    assert main(["plan", *arguments, "--sequence", "8", "--json"]) == 0
    assert given == [json.loads(capsys.readouterr().out)["machine"]["host_memory_bytes"]]
    sys.modules.pop("least_models")


def test_nothing_is_tried_again_that_was_given():
    settings = [trial.settings for trial in _tried({"io_backend": "threads", "tile_bytes": 1 << 20})]
    assert settings == [{}]


def test_micro_batches_run_together_and_as_one_batch_if_their_activations_fit(monkeypatch: pytest.MonkeyPatch):
    as_one = {"batch": 6, "gradient_accumulation_steps": 1}
    settings = [trial.settings for trial in _tried({}, batch=2, micro_batches=3)]
    assert settings == [{}, {"together": True}, as_one, {**as_one, "activations": "recompute"}]
    monkeypatch.setattr("offload.predict.tuning.memory.available_bytes", lambda: 0)
    assert [trial.settings for trial in _tried({}, batch=2, micro_batches=3)] == [{}]


def test_what_is_given_of_activations_and_of_the_loop_is_in_every_trial(monkeypatch: pytest.MonkeyPatch):
    trained: list[dict[str, object]] = []

    def turn(model: object, sequence: int, settings: dict[str, object]) -> tuple[float, object]:
        trained.append(dict(settings))
        return 1.0, SimpleNamespace(step_read_bytes=0, step_write_bytes=0, host_bytes=0)

    monkeypatch.setattr("offload.predict.tuning._turn", turn)
    given = {"activations": "nvme", "activation_memory": 32 << 20, "together": True, "micro_batches": 2}
    settings = [trial.settings for trial in _tried({}, **given)]
    as_one = {"batch": 2, "gradient_accumulation_steps": 1, "together": False}
    assert settings == [{}, {"activations": "auto"}, as_one]
    assert all(each["activation_memory"] == 32 << 20 for each in trained)
    assert trained[0]["together"] is True and trained[0]["activations"] == "nvme"
    halves = [trial.settings.get("activation_memory") for trial in _tried({}, activations="nvme")]
    assert halves == [None, None, 32 << 20, 128 << 20]


def test_activations_on_nvme_are_tuned_by_real_steps(tmp_path: Path):
    settings = [
        trial.settings for trial in _tried({"nvme_path": tmp_path, "host_memory": "256MiB"}, activations="nvme")
    ]
    assert settings[1:] == [{"activations": "auto"}, {"activation_memory": 32 << 20}, {"activation_memory": 128 << 20}]


def test_a_setting_for_which_memory_is_too_small_is_left_out(monkeypatch: pytest.MonkeyPatch):
    def turn(model: object, sequence: int, settings: dict[str, object]) -> tuple[float, object]:
        if settings.get("tile_bytes") == 16 << 20:
            raise BudgetError("too small: {needed}", 1 << 30)
        staging = SimpleNamespace(tile_bytes=8 << 20)
        return 1.0, SimpleNamespace(step_read_bytes=1, step_write_bytes=0, host_bytes=0, staging=staging)

    monkeypatch.setattr("offload.predict.tuning._turn", turn)
    said: list[str] = []
    settings = [trial.settings for trial in _tried({"io_backend": "threads"}, said.append)]
    assert settings == [{}, {"tile_bytes": 2 << 20}, {"tile_bytes": 4 << 20}]
    assert said.count(f"tile_bytes={16 << 20} is left out: it needs {1 << 30} bytes") == 1


def test_a_setting_of_transfers_is_tried_where_a_step_moves_something_alone(tmp_path: Path):
    assert [trial.settings for trial in _tried({"nvme_path": tmp_path})] == [{}]


def _tried(
    options: dict[str, object], say: Callable[[str], None] = lambda line: None, **workload: Any
) -> tuple[Trial, ...]:
    return _tuned(options, say, **workload).trials


def _tuned(options: dict[str, object], say: Callable[[str], None] = lambda line: None, **workload: Any) -> Tuned:
    from offload.predict.model import Model

    def build() -> Model:
        return Model("one", nn.Sequential(nn.Embedding(50, 8)), 1, 8, 0, 50)

    given = Workload(sequence=4, precision="fp32", **workload)
    return tune(build, given, {"host_memory": "1MiB", **options}, say)


@pytest.mark.one_in(2)  # what is out of date is so in most of them
@pytest.mark.parametrize("number", range(4))
def test_the_examples_of_the_page_show_what_the_code_gives(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import plan_page

    found = [*plan_page.EXAMPLE.finditer(PAGE.read_text())]
    assert len(found) == 4
    assert plan_page.example(found[number]) == found[number][0], "run scripts/plan_page.py"


def test_the_page_has_the_sizes_as_the_code_gives_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import plan_page

    text = PAGE.read_text()
    assert "| 70B |" in text and plan_page.with_sizes(text) == text, "run scripts/plan_page.py"


def test_the_page_has_twelve_published_set_ups_and_a_reason_where_the_forecast_is_far_off(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from _published_setups import SETUPS

    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if "(compute) |" in line or "(NVMe) |" in line or "(link to" in line]
    for setup in SETUPS:
        assert any(f"| {setup.published:,.0f} |" in row and setup.system in row for row in rows), setup
    assert len(SETUPS) == 12 and f"the shapes of {len(known.configs())} models are shipped" in text
    for row in rows:
        *_, deviation, reason = (cell.strip() for cell in row.strip("|").split("|"))
        assert reason or abs(int(deviation.rstrip("%"))) <= 20
    for setup in (SETUPS[0], SETUPS[7], SETUPS[8]):  # all of them take seconds
        assert setup.row() in text, "run scripts/plan_page.py"


def test_the_page_has_the_schedules_as_they_are_played(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import _played_schedules

    for row in itertools.islice(_played_schedules.lines(), 5):  # all of them take seconds
        assert row in PAGE.read_text(), "run scripts/plan_page.py"


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
