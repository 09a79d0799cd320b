"""Models of ``transformers`` that are never whole in memory: initialised by their own initialisers, or streamed."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from births import EVERYWHERE, assert_same, held
from transformers_models import MODELS, OF_TEXT, SMALL, VOCAB, class_and_config, transformers

from offload import ConfigError, OffloadEngine, OffloadError, WeightsError, deferred_init


def losses_of(engine: OffloadEngine, steps: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    engine.module.train()
    losses = []
    for _ in range(steps):
        tokens = torch.randint(1, VOCAB, (2, 12), generator=generator)
        torch.manual_seed(7)  # of dropout
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def in_pairs(*formats: str) -> list[Any]:
    """Each model of text in each of two formats and at each of two places, in two cases."""
    return [
        pytest.param(name, form, place.values[0], id=f"{name}-{form}-{place.id}")
        for at, name in enumerate(OF_TEXT)
        for form, place in zip(formats, EVERYWHERE if at % 2 else EVERYWHERE[::-1], strict=True)
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", ["meta", "deferred"])
@pytest.mark.parametrize("name", MODELS)
def test_its_own_initialisers_give_the_weights_of_a_model_in_memory(name: str, way: str) -> None:
    model_class, config = class_and_config(name)
    torch.manual_seed(4)
    model = model_class.from_config(config)
    after = torch.rand(1)
    with OffloadEngine(model, precision="fp32", optimizer=None) as engine:
        expected = held(engine)
    torch.manual_seed(4)
    if way == "deferred":
        model = deferred_init(model_class.from_config, config)
    else:
        with torch.device("meta"):
            model = model_class.from_config(config)
    with OffloadEngine(model, precision="fp32", optimizer=None) as engine:
        assert torch.equal(torch.rand(1), after)
        assert_same(held(engine), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "precision", "place"), in_pairs("fp32", "bf16"))
def test_the_first_losses_are_those_of_the_model_in_memory(
    name: str, precision: str, place: dict[str, str], tmp_path: Path
) -> None:
    model_class, config = class_and_config(name)
    torch.manual_seed(4)
    with OffloadEngine(model_class.from_config(config), precision=precision, lr=1e-3) as engine:
        expected, weights = losses_of(engine), held(engine)
    torch.manual_seed(4)
    with torch.device("meta"):
        model = model_class.from_config(config)
    with OffloadEngine(model, precision=precision, lr=1e-3, nvme_path=tmp_path, **place) as engine:
        assert losses_of(engine) == expected
        assert_same(held(engine), weights)
    if name in ("llama", "gpt2"):
        assert expected[0] == pytest.approx(math.log(VOCAB), rel=0.05)  # as no idea of the answer gives


def test_a_model_within_another_and_one_in_16_bits_come_out_as_in_memory() -> None:
    class Reward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.Linear(3, 3)
            self.backbone = transformers.AutoModel.from_config(class_and_config("llama")[1], dtype=torch.bfloat16)
            self.score = torch.nn.Linear(64, 1)

    torch.manual_seed(4)
    with OffloadEngine(Reward(), precision="fp32") as engine:
        expected = held(engine)
    torch.manual_seed(4)
    with torch.device("meta"):
        model = Reward()
    with OffloadEngine(model, precision="fp32") as engine:
        assert_same(held(engine), expected)


def test_a_model_that_was_changed_after_it_was_built_is_refused_with_the_way() -> None:
    model_class, config = class_and_config("llama")

    def build() -> Any:
        model = model_class.from_config(config)
        model.score = torch.nn.Linear(64, 2)
        return model

    with torch.device("meta"):
        model = build()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has score\.weight, score\.bias .*deferred_init"):
        OffloadEngine(model)
    torch.manual_seed(4)
    expected = build().state_dict()
    torch.manual_seed(4)
    with OffloadEngine(deferred_init(build), precision="fp32") as engine:
        assert_same(engine.state_dict(), dict(expected))


def test_a_model_of_accelerate_keeps_the_buffers_that_it_has() -> None:
    accelerate = pytest.importorskip("accelerate")
    model_class, config = class_and_config("llama")
    torch.manual_seed(4)
    with OffloadEngine(model_class.from_config(config), precision="fp32") as engine:
        expected = held(engine)
    with accelerate.init_empty_weights():
        model = model_class.from_config(config)
    assert next(model.parameters()).is_meta and not next(model.buffers()).is_meta
    torch.manual_seed(4)
    with OffloadEngine(model, precision="fp32") as engine:
        assert_same(held(engine), expected)


def saved(name: str, directory: Path, **options: Any) -> Any:
    """A model, saved by ``transformers``; its class."""
    model_class, config = class_and_config(name)
    torch.manual_seed(8)
    model_class.from_config(config, **options).save_pretrained(directory, max_shard_size="150KB")
    return model_class


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_gives_the_model_that_transformers_would_load(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model_class = saved(name, tmp_path, dtype=dtype)
    assert (tmp_path / "model.safetensors.index.json").exists()
    reference = model_class.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = OffloadEngine.from_pretrained(
            model_class, tmp_path, optimizer=None, nvme_path=tmp_path, host_memory="4MiB"
        )
    with engine:
        assert type(engine.module) is type(reference) and engine.config.dtype == dtype
        assert not engine.module.training
        assert engine.module.config.to_dict() == reference.config.to_dict()
        if reference.can_generate():
            assert engine.module.generation_config == reference.generation_config
        assert_same(held(engine), {**reference.state_dict(), **dict(reference.named_buffers())})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "dtype", "place"), in_pairs("float32", "bfloat16"))
def test_a_streamed_model_trains_like_one_that_was_loaded(
    name: str, dtype: str, place: dict[str, str], tmp_path: Path
) -> None:
    model_class = saved(name, tmp_path)
    with OffloadEngine(model_class.from_pretrained(tmp_path, dtype=dtype), precision="bf16", lr=1e-3) as engine:
        expected, weights = losses_of(engine), held(engine)
    engine = OffloadEngine.from_pretrained(
        *(model_class, tmp_path), model_kwargs={"dtype": dtype}, precision="bf16", lr=1e-3, nvme_path=tmp_path, **place
    )
    with engine:
        assert losses_of(engine) == expected
        assert_same(held(engine), weights)


@pytest.mark.parametrize(
    ("stored", "loaded", "missing", "unused"),
    [
        ("AutoModelForMaskedLM", "AutoModelForSequenceClassification", "classifier.bias", "cls.predictions"),
        ("AutoModel", "AutoModelForCausalLM", "cls.predictions", "pooler.dense"),
        ("AutoModelForMaskedLM", "AutoModel", "pooler.dense.weight", "cls.predictions"),
    ],
)
def test_another_head_is_initialised_as_transformers_does_and_said_once(
    stored: str, loaded: str, missing: str, unused: str, tmp_path: Path
) -> None:
    torch.manual_seed(8)
    config = transformers.BertConfig(**SMALL, is_decoder=True)
    getattr(transformers, stored).from_config(config).save_pretrained(tmp_path)
    torch.manual_seed(9)
    reference = getattr(transformers, loaded).from_pretrained(tmp_path)
    after = torch.rand(1)
    torch.manual_seed(9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = OffloadEngine.from_pretrained(getattr(transformers, loaded), tmp_path, optimizer=None)
    with engine:
        assert torch.equal(torch.rand(1), after)
        assert_same(held(engine), {**reference.state_dict(), **dict(reference.named_buffers())})
    (message,) = [str(warning.message) for warning in said if str(tmp_path) in str(warning.message)]
    there, _, unused_there = message.partition("there, and not used")
    assert missing in there and unused in unused_there


def test_shapes_that_do_not_fit_and_damage_are_errors(tmp_path: Path) -> None:
    model_class = saved("llama", tmp_path)
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": VOCAB + 1}, num_key_value_heads=2)
    with pytest.raises(WeightsError, match=r"size mismatch for lm_head\.weight: .*\[200, 64\].*\[201, 64\]"):
        OffloadEngine.from_pretrained(model_class, tmp_path, model_kwargs={"config": config})
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"{shard} is damaged: it is cut off"):
        OffloadEngine.from_pretrained(model_class, tmp_path)


def test_what_can_only_be_loaded_in_memory_is_refused_with_the_way(tmp_path: Path, monkeypatch: Any) -> None:
    model_class = saved("llama", tmp_path)
    with pytest.raises(ConfigError, match="device_map is not taken here: the engine's budgets"):
        OffloadEngine.from_pretrained(model_class, tmp_path, model_kwargs={"device_map": "auto"})

    def refuse(name: str, **options: Any) -> str:
        assert name == "nobody/nothing" and options["revision"] == "v2"
        raise OSError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(OffloadError, match="nobody/nothing is not a directory, and was not found on the hub: no conn"):
        OffloadEngine.from_pretrained(model_class, "nobody/nothing", model_kwargs={"revision": "v2"})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path))
    with OffloadEngine.from_pretrained(model_class, "somebody/something", precision="fp32") as engine:
        assert_same(engine.state_dict(), dict(model_class.from_pretrained(tmp_path).state_dict()))


def test_options_of_the_model_and_a_class_of_its_own_are_taken(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    kwargs = {"attn_implementation": "eager", "dtype": torch.float16, "use_cache": False}
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **kwargs)
    with OffloadEngine.from_pretrained(transformers.LlamaForCausalLM, tmp_path, model_kwargs=kwargs) as engine:
        assert engine.config.precision == "fp16"
        assert engine.module.config.to_dict() == reference.config.to_dict()
        assert engine.module.config._attn_implementation == "eager"
        assert_same(engine.state_dict(), dict(reference.state_dict()))


def test_a_streamed_model_generates(tmp_path: Path) -> None:
    model_class = saved("llama", tmp_path)
    prompt = torch.tensor([[5, 6, 7]])
    expected = model_class.from_pretrained(tmp_path).generate(prompt, max_new_tokens=6, do_sample=False)
    with OffloadEngine.from_pretrained(model_class, tmp_path, optimizer=None) as engine:
        assert torch.equal(engine.module.generate(prompt, max_new_tokens=6, do_sample=False), expected)
