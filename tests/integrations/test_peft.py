"""Adapters of ``peft`` over a frozen model: what is frozen is read and never written."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import ADAPTERS, OPTIONS, TARGETS, WITH_COPIES, adapted, llama, logits, on_nvme, same_values, train

from offload import BudgetError, ConfigError, OffloadEngine, deferred_init

peft = pytest.importorskip("peft")

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations" / "peft.md"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_trained_as_in_memory_and_its_base_is_only_read(adapter: str, tmp_path: Path) -> None:
    with OffloadEngine(adapted(adapter), **OPTIONS) as in_memory:
        losses = train(in_memory.module, in_memory.optimizer)
        values = in_memory.state_dict()
    written = []
    with on_nvme(lambda: adapted(adapter), tmp_path) as engine:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters() if not p.requires_grad}
        for step, loss in enumerate(losses):
            assert train(engine.module, engine.optimizer, range(step, step + 1)) == [loss]
            engine.synchronize()
            written.append(engine.report().nvme_write_bytes)
        plan, report = engine.plan, engine.report()
        assert same_values(engine.state_dict(), values)
        assert same_values(
            {name: dict(engine.module.named_parameters())[name].detach().clone() for name in before}, before
        )
    trainable = sum(item.unit.trainable_numel for item in plan.units)
    frozen_bytes = 2 * sum(item.unit.numel - item.unit.trainable_numel for item in plan.units)
    assert report.memory["weights"]["nvme"] == plan.nvme_bytes["weights"] == frozen_bytes + 2 * trainable
    assert sum(plan.memory["grads"].values()) == 2 * trainable  # of the base there are no gradients
    assert sum(plan.memory["states"].values()) <= 10 * trainable + 4096 * len(plan.units)  # and no states
    assert sum(written) <= len(written) * plan.step_write_bytes < frozen_bytes
    assert report.nvme_read_bytes > frozen_bytes


@pytest.mark.parametrize("adapter", [*ADAPTERS, *WITH_COPIES])
def test_an_adapter_over_weights_in_files_is_trained_as_in_memory_and_the_files_are_read_in_place(
    adapter: str,
    tmp_path: Path,
) -> None:
    base = llama()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(0.5)  # so that it is seen where the values come from
    base.save_pretrained(tmp_path / "base")
    with OffloadEngine(adapted(adapter, scale=0.5), **OPTIONS) as engine:
        torch.manual_seed(2)
        losses = train(engine.module, engine.optimizer)
        values = engine.state_dict()

    def unborn() -> Any:
        return deferred_init(adapted, adapter)

    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "base").iterdir()}

    options = {**OPTIONS, "weights": tmp_path / "base", "nvme_path": tmp_path}
    with pytest.raises(BudgetError) as error:  # what is beside a tensor in its pages takes room as well
        OffloadEngine(unborn(), host_memory=1, **options)
    needed = error.value.needed_bytes
    with OffloadEngine(unborn(), host_memory=needed, **options) as engine:
        assert engine.plan.in_place_bytes > 0
        assert engine.plan.nvme_bytes["weights"] <= 2 * sum(i.unit.trainable_numel for i in engine.plan.units)
        torch.manual_seed(2)
        assert train(engine.module, engine.optimizer) == losses
        assert same_values(engine.state_dict(), values)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "base").iterdir()} == before


def test_dora_over_files_needs_the_memory_and_reads_the_bytes_of_lora(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    options = {**OPTIONS, "weights": tmp_path / "base", "nvme_path": tmp_path}
    needed, read = {}, {}
    for adapter in ("LoRA", "DoRA"):
        with pytest.raises(BudgetError) as error:
            OffloadEngine(deferred_init(adapted, adapter), host_memory=1, **options)
        needed[adapter] = error.value.needed_bytes
        with OffloadEngine(deferred_init(adapted, adapter), host_memory=needed[adapter], **options) as engine:
            train(engine.module, engine.optimizer)
            engine.synchronize()
            read[adapter] = engine.report().nvme_read_bytes
            plan = engine.plan
    magnitudes = 14 * sum(item.unit.trainable_numel for item in plan.units)  # all that is read of what is trained
    # An update may take a slot before a step has turned: the unit that lay there is read again.
    again = max(item.unit.read_bytes(plan.formats.weights) for item in plan.units)
    assert needed["DoRA"] <= needed["LoRA"] + magnitudes
    assert read["DoRA"] <= read["LoRA"] + magnitudes + again


def test_adapters_that_begin_with_values_of_the_weights_are_refused_where_it_is_not_known_how(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    computed = "begins with values that are computed from the model's weights, .*offload.deferred_init"
    for adapter, part in (("DoRA", "lora_magnitude_vector"), ("a head of its own", "modules_to_save")):
        with pytest.raises(ConfigError, match=f"{part} of .* {computed}"):
            OffloadEngine(adapted(adapter), weights=tmp_path, **OPTIONS)

    def cast_at_the_end() -> Any:
        model = adapted("DoRA", dtype=torch.float32)
        return model.to(torch.bfloat16)

    with pytest.raises(ConfigError, match=f"lora_magnitude_vector of .* {computed}"):  # of fp32, which no file has
        OffloadEngine(deferred_init(cast_at_the_end), weights=tmp_path, **OPTIONS)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="pissa")
    with pytest.raises(ConfigError, match=r"init_lora_weights='pissa' of adapter default takes a part out of"):
        OffloadEngine(peft.get_peft_model(llama(), config), weights=tmp_path, **OPTIONS)


def test_merging_between_steps_is_as_in_memory(tmp_path: Path) -> None:
    found = []
    for engine in (OffloadEngine(adapted(), **OPTIONS), on_nvme(adapted, tmp_path)):
        with engine:
            model: Any = engine.module
            losses = train(model, engine.optimizer, range(2))
            model.merge_adapter()
            merged = logits(model)
            model.unmerge_adapter()
            losses += train(model, engine.optimizer, range(2, 4))
            found.append((losses, merged, engine.state_dict()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert same_values(found[0][2], found[1][2])


def test_what_save_pretrained_writes_is_the_adapter_alone(tmp_path: Path) -> None:
    with on_nvme(adapted, tmp_path) as engine:
        model: Any = engine.module
        train(model, engine.optimizer)
        model.save_pretrained(tmp_path / "saved")
        engine.save_model(tmp_path / "ours")
        expected = logits(model.eval())
    for folder in ("saved", "ours"):
        weights = tmp_path / folder / "adapter_model.safetensors"
        assert weights.stat().st_size < 100_000
        loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / folder, autocast_adapter_dtype=False)
        assert torch.equal(logits(loaded.eval()), expected)


def two_adapters(*, trained: bool = True) -> Any:
    model = adapted()
    torch.manual_seed(2)
    model.add_adapter("second", ADAPTERS["LoRA"]())
    for name, parameter in model.named_parameters():
        if trained and "lora_" in name:
            parameter.requires_grad_(True)  # peft has frozen the adapter that is not active
    return model.to(torch.bfloat16)


def test_adapters_are_trained_in_turns(tmp_path: Path) -> None:
    found = []
    for engine in (OffloadEngine(two_adapters(), **OPTIONS), on_nvme(two_adapters, tmp_path)):
        with engine:
            model: Any = engine.module
            losses = train(model, engine.optimizer, range(2))
            first = adapter_of(model, "default")
            model.set_adapter("second")
            losses += train(model, engine.optimizer, range(2, 4))
            assert same_values(adapter_of(model, "default"), first)
            model.set_adapter("default")
            losses += train(model, engine.optimizer, range(4, 5))
            assert not same_values(adapter_of(model, "default"), first)
            found.append((losses, engine.state_dict()))
    assert found[0][0] == found[1][0]
    assert same_values(found[0][1], found[1][1])


def adapter_of(model: Any, name: str) -> dict[str, Any]:
    return {key: value.clone() for key, value in peft.get_peft_model_state_dict(model, adapter_name=name).items()}


def test_an_adapter_that_was_frozen_at_the_start_is_not_trained_in_silence() -> None:
    said = r"lora_A.second.weight was not to be trained when the engine was made"
    with OffloadEngine(two_adapters(trained=False), **OPTIONS) as engine, pytest.raises(ConfigError, match=said):
        engine.module.set_adapter("second")  # type: ignore[operator]


def test_an_adapter_that_comes_after_the_engine_is_named() -> None:
    with OffloadEngine(adapted(), **OPTIONS) as engine:
        model: Any = engine.module
        model.add_adapter("late", peft.LoraConfig(r=4, init_lora_weights=False, target_modules=TARGETS))
        model.set_adapter("late")
        said = (
            r"24 parameters that came into the model later have one \(.*lora_A.late.weight, ...\): add adapters before"
        )
        with pytest.warns(UserWarning, match=said):
            train(model, engine.optimizer, range(1))
        model = engine.unwrap()
    with OffloadEngine(model, **OPTIONS) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, engine.optimizer, range(1))


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
    exec(compile(example, str(DOCUMENT), "exec"), {})
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert "frozen bytes on NVMe" in capsys.readouterr().out
