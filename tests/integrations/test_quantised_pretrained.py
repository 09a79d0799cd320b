"""``from_pretrained`` of quantised files: one call, an adapter over them, training and generating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_bases import in_shards
from quantised_files import BF16, in_fp8, in_gptq, in_nested_nf4

from offload import BudgetError, ConfigError, OffloadEngine, WeightsError
from offload.birth.from_pretrained import build

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_PROMPT = torch.tensor([[5, 6, 7]])


def small() -> Any:
    return transformers.LlamaConfig(
        **{"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2},
        **{"vocab_size": 100, "dtype": "bfloat16", "pad_token_id": 0},
    )


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def say(directory: Path, **quantization: Any) -> Path:
    """The directory, with a config that says how its files are quantised."""
    (directory / "config.json").write_text(json.dumps(small().to_dict() | {"quantization_config": quantization}))
    return directory


def saved(number_format: Any, method: str, tmp_path: Path) -> tuple[Path, Path]:
    """The files of a model whose layers are in this format, and those of the dequantised model."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(small()).to(BF16)
    values = dict(model.state_dict())
    for name, value in model.state_dict().items():
        if name.endswith("_proj.weight"):
            files, weight = number_format(value)
            del values[name]
            values |= {name.removesuffix("weight") + own: tensor for own, tensor in files.items()}
            value.copy_(weight.dequantize())
    model.save_pretrained(tmp_path / "ordinary")
    return say(in_shards(values, tmp_path / "base"), quant_method=method), tmp_path / "ordinary"


def losses(engine: OffloadEngine) -> list[float]:
    found = []
    for step in range(3):
        tokens = torch.randint(1, 100, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def over(base: Path, **options: Any) -> OffloadEngine:
    """An engine over these files with the least memory."""
    auto = transformers.AutoModelForCausalLM
    with pytest.raises(BudgetError) as error:
        OffloadEngine.from_pretrained(auto, base, host_memory=1, **options)
    torch.manual_seed(1)
    return OffloadEngine.from_pretrained(auto, base, host_memory=error.value.needed_bytes, **options)


def generated(model: Any) -> torch.Tensor:
    return model.generate(input_ids=_PROMPT, max_new_tokens=6, do_sample=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize(
    ("number_format", "method"), [(in_nested_nf4, "bitsandbytes"), (in_gptq, "gptq"), (in_fp8, "fp8")]
)
def test_one_call_gives_an_adapter_over_quantised_files_that_trains_and_generates(
    number_format: Any, method: str, dora: bool, tmp_path: Path
) -> None:
    base, ordinary = saved(number_format, method, tmp_path)
    auto = transformers.AutoModelForCausalLM
    torch.manual_seed(1)
    model = peft.get_peft_model(auto.from_pretrained(ordinary), lora(use_dora=dora), autocast_adapter_dtype=False)
    with OffloadEngine(model, lr=1e-2) as engine:
        expected, tokens = losses(engine), generated(engine.module)
    with over(base, peft_config=lora(use_dora=dora), nvme_path=tmp_path, lr=1e-2) as engine:
        assert engine.plan.in_place_bytes > 0
        assert losses(engine) == expected
        assert torch.equal(generated(engine.module), tokens)
        engine.save_model(tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(base)


def test_a_merge_into_quantised_files_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    base, _ = saved(in_fp8, "fp8", tmp_path)
    found = []
    for merges in (False, True):
        with over(base, peft_config=lora(init_lora_weights=False), nvme_path=tmp_path, lr=1e-2) as engine:
            found.append(losses(engine))
            for merge in (engine.module.merge_adapter, engine.module.merge_and_unload) if merges else ():
                with pytest.raises(ConfigError, match="writes to a weight in the format of its file"):
                    merge()
            engine.load_state_dict(engine.state_dict())
            found[-1] += losses(engine)
    assert found[0] == found[1]


def test_without_an_optimizer_quantised_weights_stay_as_they_are_and_no_store_is_needed(tmp_path: Path) -> None:
    base, ordinary = saved(in_fp8, "fp8", tmp_path)
    tokens = generated(transformers.AutoModelForCausalLM.from_pretrained(ordinary))
    with over(base, optimizer=None) as engine:
        assert engine.plan.in_place_bytes > 0
        assert torch.equal(generated(engine.module), tokens)


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4"])
def test_the_model_is_ordinary_whatever_its_files_are_quantised_by(method: str, tmp_path: Path) -> None:
    model, _ = build(transformers.AutoModelForCausalLM, say(tmp_path, quant_method=method), {}, lora(), trains=True)
    assert not hasattr(model.config, "quantization_config")
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 16 and all("lora_" in name and dtype is BF16 for name, dtype in trained.items())


def test_methods_and_codes_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    with pytest.raises(ConfigError, match="quantised by hqq, which is not read; awq, bitsandbytes"):
        build(auto, say(tmp_path, quant_method="hqq"), {}, None, trains=True)
    base, _ = saved(lambda value: ({"weight": value.to(torch.int8), "weight_scale": value[:, :1]}, _Same(value)),
                    "compressed-tensors", tmp_path)  # fmt: skip
    with pytest.raises(WeightsError, match=r"quantised in a way that is not read \(.*weight_scale"):
        OffloadEngine.from_pretrained(auto, base, optimizer=None)


class _Same:
    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def dequantize(self) -> torch.Tensor:
        return self._value
