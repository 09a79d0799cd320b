"""A slice of the zoo; ``PYTHONPATH=tests python -m zoo --ways all`` is the whole of it."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from pathlib import Path

import pytest
from zoo import SPECIMENS, plain
from zoo.judging import Reference, differences
from zoo.training import ADAMW, Outcome, in_engine
from zoo.ways import WAYS

_OF_TRANSFORMERS = [
    *("gpt2", "perceiver", "t5", "mixtral", "mamba"),
    *("vit", "wav2vec2", "clip", "llama with LoRA"),
]
_SLICE = [*(specimen.name for specimen in plain.SPECIMENS), *_OF_TRANSFORMERS]


@cache
def _in_ram(name: str) -> Outcome:
    return in_engine(SPECIMENS[name])


def _skip_without_libraries(name: str) -> None:
    needed = {"plain": [], "adapters": ["transformers", "peft"]}.get(SPECIMENS[name].family, ["transformers"])
    for library in needed:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    warnings.simplefilter("ignore")  # what these libraries deprecate among themselves is not ours


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", _SLICE)
def test_on_nvme_as_in_ram_and_near_torch(name: str, tmp_path: Path):
    _skip_without_libraries(name)
    in_ram = _in_ram(name)
    assert differences(in_ram, in_engine(SPECIMENS[name], nvme_path=tmp_path)) == []
    share, where = Reference.of(SPECIMENS[name]).excess(in_ram)
    assert share <= 1, where


@pytest.mark.one_in(6)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "default"])
@pytest.mark.parametrize("name", ["u-net", "nn.Transformer"])
def test_every_way_to_use_nvme_gives_the_same_bits(name: str, way: str, tmp_path: Path):
    assert differences(_in_ram(name), in_engine(SPECIMENS[name], nvme_path=tmp_path, **WAYS[way])) == []


def test_the_judge_sees_a_training_with_other_settings(monkeypatch):
    reference = Reference.of(SPECIMENS["mixer"])
    monkeypatch.setitem(ADAMW, "lr", 1.1e-2)
    assert reference.excess(in_engine(SPECIMENS["mixer"]))[0] > 1
