"""Frozen weights that ``torchao`` has quantised: stored as the bytes that they wrap, used as what they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import OPTIONS, QUANTISED, adapted, llama, logits, on_nvme, same_values, to_nf4, tokens, train
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from offload import BudgetError, ConfigError, OffloadEngine
from offload.checkpoint.native.opened import open_checkpoint
from offload.checkpoint.native.saved_weights import SavedWeights
from offload.testing.simulated import SimulatedDevice

KINDS = [kind for kind in QUANTISED if kind != "bf16"]
QUERY = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"


def bytes_of_blocks(engine: OffloadEngine) -> int:
    """The frozen bytes of the transformer blocks, padding included."""
    units = [item.unit for item in engine.plan.units if ".layers." in item.unit.name]
    assert len(units) == 4
    return 2 * sum(unit.numel - unit.trainable_numel for unit in units)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "times_fewer"), [("int8", 1.8), ("int4 in int8", 1.8), ("nf4", 3.4)])
def test_an_adapter_over_it_is_trained_as_in_memory_with_fewer_bytes(
    kind: str, times_fewer: float, tmp_path: Path
) -> None:
    plain = adapted(base=kind)
    first_loss = plain(input_ids=tokens(0), labels=tokens(0)).loss.item()
    with OffloadEngine(plain, **OPTIONS) as in_memory:
        losses = train(in_memory.module, in_memory.optimizer)
        values = in_memory.state_dict()
        bytes_in_memory = in_memory.plan.memory["weights"]["host"]
    assert losses[0] == first_loss
    with OffloadEngine(adapted(), **OPTIONS) as in_bf16:
        base_bytes, base_bytes_in_memory = bytes_of_blocks(in_bf16), in_bf16.plan.memory["weights"]["host"]
        num_parameters = in_bf16.plan.num_parameters
    with on_nvme(lambda: adapted(base=kind), tmp_path) as engine:
        assert train(engine.module, engine.optimizer) == losses
        assert same_values(engine.state_dict(), values)
        assert engine.plan.num_parameters == num_parameters
        assert base_bytes / bytes_of_blocks(engine) > times_fewer
        saved = base_bytes_in_memory - bytes_in_memory
        assert saved == base_bytes - bytes_of_blocks(engine)
        assert engine.plan.nvme_bytes["weights"] == bytes_in_memory
        assert engine.report().nvme_read_bytes < engine.plan.step_read_bytes * 1.2


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_device_computes_with_it(kind: str) -> None:
    with OffloadEngine(adapted(base=kind), **OPTIONS) as in_memory:
        losses = train(in_memory.module, in_memory.optimizer)
        values = in_memory.state_dict()
    with pytest.raises(BudgetError) as caught:
        OffloadEngine(adapted(base=kind), device=SimulatedDevice(), device_memory=1, **OPTIONS)
    for device_memory in (caught.value.needed_bytes, "auto"):
        device = SimulatedDevice()
        with OffloadEngine(adapted(base=kind), device=device, device_memory=device_memory, **OPTIONS) as engine:
            assert train(engine.module, engine.optimizer) == losses
            assert same_values(engine.state_dict(), values)
        assert device.violations == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_a_forward_it_is_what_it_was(kind: str, tmp_path: Path) -> None:
    plain = adapted(base=kind)
    with OffloadEngine(adapted(base=kind), **OPTIONS) as engine:
        before, handle = plain.get_parameter(QUERY), engine.module.get_parameter(QUERY)
        assert (handle.shape, handle.dtype, handle.requires_grad) == (before.shape, before.dtype, False)
        value = engine.state_dict()[QUERY]
        assert type(value) is type(before)
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        assert torch.equal(nn.functional.linear(x, handle), nn.functional.linear(x, before))
        wrapped = before.__tensor_flatten__()[0][0]  # type: ignore[attr-defined]
        assert torch.equal(getattr(handle, wrapped), getattr(before, wrapped))
        assert not hasattr(handle, "no_such_tensor")
        expected = logits(engine.module)
        assert torch.equal(logits(copy.deepcopy(engine.module)), expected)
        torch.save(engine.state_dict(), tmp_path / "state.pt")
        other = adapted(base=kind)
        nn.init.zeros_(other.get_parameter("base_model.model.lm_head.weight"))
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
        assert torch.equal(logits(other), expected)
        engine.load_state_dict(other.state_dict())
        assert torch.equal(logits(engine.module), expected)
        engine.module.to("cpu")
        assert torch.equal(logits(engine.module), expected)
        model = engine.unwrap()
    assert type(model.get_parameter(QUERY)) is type(before)
    assert torch.equal(logits(model), expected)


def test_a_checkpoint_holds_it_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with on_nvme(lambda: adapted(base="nf4"), tmp_path) as engine:
        train(engine.module, engine.optimizer, range(2))
        engine.save_checkpoint(tmp_path / "checkpoints")
        losses = train(engine.module, engine.optimizer, range(2, 4))
    other = adapted(base="nf4")
    with torch.no_grad():
        other.get_parameter(QUERY).quantized_data.zero_()
    with OffloadEngine(other, **OPTIONS) as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        assert train(engine.module, engine.optimizer, range(2, 4)) == losses
    with (
        OffloadEngine(adapted(base="int8"), **OPTIONS) as engine,
        pytest.raises(ConfigError, match=r"is quantised as NF4Tensor.* there and quantised as Int8Tensor"),
    ):
        engine.load_checkpoint(tmp_path / "checkpoints")


def test_what_writes_ordinary_numbers_refuses_it(tmp_path: Path) -> None:
    model = llama()
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    with OffloadEngine(model, **OPTIONS) as engine:
        with pytest.raises(ConfigError, match=r"q_proj.weight is quantised, and ordinary numbers are written here"):
            engine.save_model(tmp_path / "model")
        assert not (tmp_path / "model").exists()
        handle = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        for value in (torch.zeros(128, 128, dtype=torch.bfloat16), to_nf4(torch.randn(128, 128).bfloat16(), 64, 4)):
            with pytest.raises(ConfigError, match="is a quantised Int8Tensor and is held by the engine"):
                handle.data = value


def test_a_merge_that_replaces_it_is_said(tmp_path: Path) -> None:
    from peft.tuners.lora.torchao import TorchaoLoraLinear

    def make() -> Any:
        model = adapted(base="int8")
        for module in model.modules():
            if isinstance(module, TorchaoLoraLinear):
                module.get_apply_tensor_subclass = Int8WeightOnlyConfig  # as transformers tells peft
        return model

    with OffloadEngine(make(), **OPTIONS) as in_memory, on_nvme(make, tmp_path) as engine:
        plain: Any = in_memory.unwrap()
        model: Any = engine.module
        for each in (plain, model):
            each.merge_adapter()
        assert torch.equal(logits(model), logits(plain))
        for each in (plain, model):
            each.unmerge_adapter()
        assert torch.equal(logits(model), logits(plain))
        with pytest.warns(UserWarning, match=r"12 quantised parameters \(.*, ...\) were replaced, as by a merge"):
            train(model, engine.optimizer, range(1))


class Params4bit(nn.Parameter):
    """Of the name that ``bitsandbytes`` has, outside of its layers."""


def refused(change: Any, **options: Any) -> str:
    """The error, and nothing of the model has changed."""
    model = llama()
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    change(model)
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError) as caught:
        OffloadEngine(model, **options)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    return str(caught.value)


def as_it_is(model: nn.Module) -> None:
    pass


def test_what_cannot_be_held_is_refused(tmp_path: Path) -> None:
    def as_4bit(model: Any) -> None:
        model.lm_head.weight = Params4bit(torch.zeros(300, 64, dtype=torch.uint8), requires_grad=False)

    def trained(model: Any) -> None:
        quantised = to_nf4(model.lm_head.weight.detach()[:256], 64, 4)
        model.lm_head.weight = nn.Parameter(quantised, requires_grad=True)

    said = refused(as_4bit)
    assert "lm_head.weight is quantised by bitsandbytes (Params4bit)" in said and "to_nf4" in said
    said = refused(trained)
    assert "lm_head.weight is a NF4Tensor and requires grad" in said and "requires_grad_(False)" in said
    assert "stands for torch.bfloat16, and the engine's weights are torch.float32" in refused(
        as_it_is, precision="fp32"
    )
    llama().save_pretrained(tmp_path / "base")
    assert "quantised, and the files have ordinary values" in refused(as_it_is, weights=tmp_path / "base")


def test_a_checkpoint_of_it_is_not_exported(tmp_path: Path) -> None:
    with OffloadEngine(adapted(base="int8"), **OPTIONS) as engine:
        train(engine.module, engine.optimizer, range(1))
        engine.save_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, to_read=True) as opened, pytest.raises(ConfigError, match="numbers are exported"):
        SavedWeights(opened.generation, opened.description)


def saved_bytes(kind: str, num_layers: int) -> int:
    """Bytes of ordinary tensors that autograd keeps from forward to backward."""
    model, kept = adapted(base=kind, num_layers=num_layers), {}
    parameters = {p.data_ptr() for p in model.parameters() if type(p.detach()) is torch.Tensor}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor and tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens(0), labels=tokens(0)).loss
    assert loss.requires_grad
    return sum(kept.values())


def test_int8_keeps_what_it_has_dequantised_for_backward_and_nf4_does_not() -> None:
    """A fact of torchao that the page tells of."""
    per_layer = {kind: saved_bytes(kind, 3) - saved_bytes(kind, 2) for kind in ("bf16", "int8", "nf4")}
    weights = 2 * sum(p.numel() for name, p in llama(1).model.layers[0].named_parameters() if "proj" in name)
    assert per_layer["int8"] - per_layer["bf16"] > 0.9 * weights
    assert abs(per_layer["nf4"] - per_layer["bf16"]) < 0.1 * weights
