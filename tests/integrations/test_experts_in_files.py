"""Mixtures of experts over files of a frozen base: experts are read there, one by one or fused, quantised or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import CONFIGS, text, transformers
from frozen_bases import in_shards
from quantised_files import BF16, in_awq, in_fp8, in_int4, in_nvfp4, mxfp4

from offload import BudgetError, OffloadEngine, deferred_init
from offload.plan.plan import Tier
from offload.quantised import Mxfp4

peft = pytest.importorskip("peft")

_OF_EXPERTS = (".gate_proj.", ".up_proj.", ".down_proj.")


def built(config: Any, tmp_path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    model.set_experts_implementation("eager")
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "q_a_proj"])
    return peft.get_peft_model(model, lora).to(BF16)


def wide(kind: str) -> Any:
    """The config with widths of which formats need multiples."""
    config = CONFIGS[kind]()
    config.hidden_size = config.moe_intermediate_size = 128
    if kind == "gpt_oss":
        config.intermediate_size = 128
    return config


def saved(config: Any, directory: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes of the model with random weights."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def in_format(number_format: Any, values: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The values of files whose experts are in this format; of the same model without it."""
    quantised, dequantised = dict(values), dict(values)
    for name, value in values.items():
        if ".experts." in name and any(part in name for part in _OF_EXPERTS):
            files, weight = number_format(value)
            dequantised[name] = weight.dequantize()
            del quantised[name]
            quantised |= {name.removesuffix("weight") + own: tensor for own, tensor in files.items()}
    yield quantised
    yield dequantised


def losses(engine: OffloadEngine, numbers: Any = range(3)) -> list[float]:
    found = []
    for number in numbers:
        tokens = text(seed=number)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def least(config: Any, base: Path, tmp_path: Path, **options: Any) -> int:
    with pytest.raises(BudgetError) as error:
        OffloadEngine(deferred_init(built, config, tmp_path), weights=base, host_memory=1, **options)
    return error.value.needed_bytes


def trained(config: Any, base: Path, tmp_path: Path, **options: Any) -> tuple[OffloadEngine, list[float]]:
    with OffloadEngine(deferred_init(built, config, tmp_path), weights=base, **options) as engine:
        return engine, losses(engine)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "number_format"),
    [("qwen3_moe", None), ("deepseek_v3", in_fp8), ("qwen3_moe", in_awq), ("qwen3_moe", in_nvfp4)],
)
def test_experts_that_are_stored_one_by_one_are_read_in_place(number_format: Any, kind: str, tmp_path: Path) -> None:
    config = wide(kind)
    values = saved(config, tmp_path / "saved")
    assert any(".experts.7.gate_proj.weight" in name for name in values)
    torch.manual_seed(2)
    quantised, dequantised = in_format(number_format, values) if number_format is not None else (values, values)
    base = in_shards(quantised, tmp_path / "base")
    ordinary = in_shards(dequantised, tmp_path / "ordinary")
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    _, expected = trained(config, ordinary, tmp_path, **options)
    assert trained(config, base, tmp_path, **options)[1] == expected
    needed = least(config, base, tmp_path, **options)
    with OffloadEngine(deferred_init(built, config, tmp_path), weights=base, host_memory=needed, **options) as engine:
        items = [item for item in engine.plan.units if item.unit.experts is not None]
        experts = [item.unit for item in items]
        assert len(experts) == 8 * len({unit.experts for unit in experts}) and all(unit.in_files for unit in experts)
        assert losses(engine) == expected
        use = engine.expert_use()
        assert use.read_bytes <= use.routed_bytes
        assert (use.read_bytes > 0) is any(item.weights is Tier.NVME for item in items)
    if number_format is not None:
        assert needed < least(config, ordinary, tmp_path, **options)
        of_layers = {unit.experts for unit in experts}
        assert len({id(spec.packing) for unit in experts for spec in unit.parameters}) == 2 * len(of_layers)


def test_fused_mxfp4_experts_are_units_and_are_read_in_place(tmp_path: Path) -> None:
    config = wide("gpt_oss")
    values = saved(config, tmp_path / "saved")
    quantised, dequantised = dict(values), dict(values)
    for seed, (name, value) in enumerate(values.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, columns, rows = value.shape
            codes, scales = mxfp4(count, rows, columns, seed=seed)
            dequantised[name] = Mxfp4([codes, scales], value.shape, BF16, (True,)).dequantize()
            del quantised[name]
            quantised |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    base, ordinary = in_shards(quantised, tmp_path / "base"), in_shards(dequantised, tmp_path / "ordinary")
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    _, expected = trained(config, ordinary, tmp_path, **options)
    needed = least(config, base, tmp_path, **options)
    engine, found = trained(config, base, tmp_path, host_memory=needed, **options)
    assert found == expected
    assert sum(item.unit.experts is not None for item in engine.plan.units) == 16
    assert engine.plan.in_place_bytes > 0


def test_adapters_of_fused_weights_write_nothing_to_their_base(tmp_path: Path) -> None:
    """``target_parameters``: torch's parametrizations set the weight to itself in each forward."""

    def adapted(config: Any) -> Any:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
        model.set_experts_implementation("eager")
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
        return peft.get_peft_model(model, lora).to(BF16)

    def step(model: Any, call: Any, seed: int) -> float:
        loss = call(input_ids=text(seed=seed), labels=text(seed=seed)).loss
        loss.backward()
        return loss.item()  # type: ignore[no-any-return]

    config = wide("qwen3_moe")
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    plain = adapted(config)
    expected = step(plain, plain, 1)
    values = saved(config, tmp_path / "saved")
    quantised, dequantised = in_format(in_int4, values)
    found = []
    for files in (in_shards(quantised, tmp_path / "base"), in_shards(dequantised, tmp_path / "ordinary"), None):
        given = options if files is None else {**options, "weights": files}
        made = adapted(config) if files is None else deferred_init(adapted, config)
        with pytest.raises(BudgetError) as error:
            OffloadEngine(made, host_memory=1, **given)
        needed = error.value.needed_bytes
        made = adapted(config) if files is None else deferred_init(adapted, config)
        with OffloadEngine(made, host_memory=needed, **given) as engine:
            store = engine._session.parts.tiers.store
            assert any(item.weights is Tier.NVME for item in engine.plan.units if item.unit.experts is not None)
            before = store.statistics().write.bytes
            found.append([step(engine.module, engine, 1)])
            assert store.statistics().write.bytes - before <= engine.plan.step_write_bytes
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            found[-1].append(step(engine.module, engine, 2))
    assert found[0] == found[1]
    assert found[2][0] == expected
