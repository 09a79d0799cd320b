"""Several processes, started by torchrun and by ``accelerate launch``, train one model in every library."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

for name in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(name)

import transformers  # noqa: E402

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "integrations" / "transformers.md"

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def launch(launcher: list[str], script: Path, *arguments: object) -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    forked.import_ahead("lightning.pytorch", "transformers.trainer")
    command = [*launcher, script]
    done = forked.run_module(*command, *arguments, OMP_NUM_THREADS="1", PYTHONPATH=path, **forked.children())
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks of ``ranks_child.py`` saw, by library."""
    folder = tmp_path_factory.mktemp("ranks")
    child = Path(__file__).with_name("ranks_child.py")
    launch(["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], child, folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("library", ["accelerate", "lightning", "deepspeed"])
def test_two_ranks_train_as_in_the_library_and_go_on_with_the_same_bits(found: list[dict[str, Any]], library: str):
    for rank, by_library in enumerate(found):
        seen = by_library[library]
        assert seen["losses"] == pytest.approx(seen["plain"], rel=1e-4, abs=1e-5)
        assert seen["resumed"]
        assert seen["processes"] == [rank, 2]


def test_each_rank_has_data_of_its_own_and_none_wraps_the_model(found: list[dict[str, Any]]):
    for library in ("accelerate", "lightning"):
        assert found[0][library]["losses"] != found[1][library]["losses"]
    assert not any(by_library["accelerate"]["wrapped"] for by_library in found)


def test_what_is_logged_is_the_mean_of_the_ranks(found: list[dict[str, Any]]):
    (own, plain), of_other = (by_library["lightning"]["errors"] for by_library in found)
    assert own == pytest.approx(plain, rel=1e-5) and of_other[0] == own


def test_a_stage_says_what_ranks_hold_parts_of(found: list[dict[str, Any]]):
    assert [by_library["deepspeed"]["shard"] for by_library in found] == ["weights", "weights"]


def test_the_trainers_page_gives_the_same_model_on_two_ranks_with_half_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    example = example.replace("max_steps=6,", 'max_steps=6, train_sampling_strategy="sequential",')  # by ranks: others
    folders = [tmp_path / str(num_ranks) for num_ranks in (1, 2)]
    for folder, size in zip(folders, (4, 2), strict=True):
        folder.mkdir()
        there = f"import os; os.chdir({str(folder)!r})\n"
        text = there + example.replace("train_batch_size=4", f"train_batch_size={size}")
        (folder / "script.py").write_text(text)
    exec(compile((folders[0] / "script.py").read_text(), PAGE.name, "exec"), {})
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch(launcher, folders[1] / "script.py")
    one, two = (json.loads((folder / "run/checkpoint-6/trainer_state.json").read_text()) for folder in folders)
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        own, other = ([entry[key] for entry in state["log_history"] if key in entry] for state in (two, one))
        assert own == pytest.approx(other, rel=1e-4), key
    assert (folders[1] / "run/checkpoint-6/rng_state_1.pth").exists()
    models = [transformers.LlamaForCausalLM.from_pretrained(folder / "model") for folder in folders]
    for own, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(own, other, atol=1e-4)
