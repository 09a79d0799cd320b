"""The guide for people who come from DeepSpeed: its tables are those of the program, and its examples run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import cli

_DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (_DOCS / "deepspeed.md").read_text()
KEYS = (_DOCS / "deepspeed-keys.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with the guide's configuration in it."""
    monkeypatch.chdir(tmp_path)
    (config,) = blocks("json")
    (tmp_path / "ds_config.json").write_text(config)
    return tmp_path


def test_the_tables_are_those_of_the_program(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "deepspeed-keys"]) == 0
    assert KEYS.partition("<!-- generated -->\n")[2] == capsys.readouterr().out


def test_the_examples_run_as_they_stand(folder: Path):
    script, trainer = blocks("python")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(script, "deepspeed.md", "exec"), names)
    assert names["model_engine"].global_steps == 2 and (folder / "checkpoints" / "global_step2").is_dir()
    names["model_engine"].destroy()
    exec(compile(trainer, "deepspeed.md", "exec"), names)
    assert names["scheduler"].optimizer is names["engine"].optimizer
    names["engine"].close()


def test_the_command_prints_options_and_keys(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "from-deepspeed", "ds_config.json"]) == 0
    printed = capsys.readouterr().out
    assert "    nvme_path=['.'],\n    gradient_clipping=1.0,\n" in printed
    assert "scheduler = schedules.WarmupLR(engine.optimizer, warmup_min_lr=0.0, warmup_max_lr=0.001" in printed
    assert "# A step takes 8 samples, in 2 forwards of 4." in printed and "accepted, no effect:" in printed
    code = "\n\n".join(printed.split("\n\n")[:2])  # imports and calls, before the table
    names = {"model": torch.nn.Linear(4, 4)}
    exec(code, names)
    assert names["engine"].config.lr == 1e-3
    names["engine"].close()


def test_the_command_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "from-deepspeed", "ds_config.json", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["options"]["host_memory"] == "8GiB" and facts["batch"]["train"] == 8
    effects = {row["key"]: row["effect"] for row in facts["keys"]}
    assert effects["zero_optimization.aio.queue_depth"] == "accepted, no effect"
    assert effects["zero_optimization.stage"] == effects["optimizer.type"] == "honoured"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], more):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}')
    assert cli.main(["config", "from-deepspeed", str(path), *more]) == 2
    printed = capsys.readouterr()
    message = json.loads(printed.out)["message"] if more else printed.err
    assert "unknown key 'zero_optimisation', did you mean 'zero_optimization'?" in message
    assert message.strip().count("\n") == 0
