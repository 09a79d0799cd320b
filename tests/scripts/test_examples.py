"""The examples run as they stand, with a tiny model in the place of a large one."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
_SIZES = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a dense model, with a tokenizer of bytes."""
    forked.import_ahead("transformers", "peft", "torchao.quantization")
    torch.manual_seed(0)
    made = {"dense": transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))}
    folder = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(folder / name)
        transformers.ByT5Tokenizer().save_pretrained(folder / name)
    return {name: folder / name for name in made}


def run(example: str, model: Path, *options: object) -> str:
    sizes = ("--length", 16, "--steps", 3, "--host-memory", "8MiB")
    done = forked.run_script(_EXAMPLES / example, "--model", model, *sizes, *options, PYTHONPATH=str(_EXAMPLES))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("example", "model", "written"),
    [
        ("lora.py", "dense", "out/adapter_model.safetensors"),
        ("full.py", "dense", "out/weights/model.safetensors"),
        ("from_deepspeed.py", "dense", "out/latest"),
    ],
)
def test_an_example_trains_and_writes_what_it_says(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, model: str, written: str
):
    monkeypatch.chdir(tmp_path)
    run(example, models[model])
    assert (tmp_path / written).is_file(), sorted(tmp_path.rglob("*"))


def test_a_run_goes_on_where_it_was(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "whole").mkdir(), (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run("go_on.py", models["dense"])
    monkeypatch.chdir(tmp_path / "parts")
    first = run("go_on.py", models["dense"], "--steps", 1)
    assert re.findall("step.*", first + run("go_on.py", models["dense"])) == re.findall("step.*", whole)


def test_generation_reports_its_tokens(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert "tokens/s, of 1 sequences" in run("generate.py", models["dense"])
