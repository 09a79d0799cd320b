"""The examples run as they stand, with a tiny model in the place of a large one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import forked
import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
_SIZES = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a dense model and of one with experts, with a tokenizer of bytes."""
    forked.import_ahead("transformers", "peft", "torchao.quantization")
    torch.manual_seed(0)
    with_experts = transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
    made = {
        "dense": transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
        "experts": transformers.MixtralForCausalLM(with_experts),
    }
    folder = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(folder / name)
        _of_bytes().save_pretrained(folder / name)
    return {name: folder / name for name in made}


def _of_bytes() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = {"<pad>": 0, "</s>": 1, "<s>": 2, **{letter: 3 + index for index, letter in enumerate(letters)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(named, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


def run(example: str, model: Path, *options: object) -> str:
    sizes = ("--length", 16, "--steps", 3, "--host-memory", "8MiB")
    done = forked.run_script(_EXAMPLES / example, "--model", model, *sizes, *options, PYTHONPATH=str(_EXAMPLES))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("example", "model", "written"),
    [
        ("lora.py", "dense", "out/adapter_model.safetensors"),
        ("moe_lora.py", "experts", "out/adapter_model.safetensors"),
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
