"""LoRA over a base in 4 bits of bitsandbytes, as ``transformers`` loads it, beside the same without an engine."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import least_budget
from torch import nn

from offload import BudgetError, ConfigError, OffloadEngine
from offload.testing.simulated import SimulatedDevice

bitsandbytes = pytest.importorskip("bitsandbytes")
TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A frozen layer and a trained product of rank four."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(torch.randn(4, inputs) / 8), nn.Parameter(torch.randn(outputs, 4) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def make_model(quantised: bool = True, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", **options}

    def adapted(inputs: int, outputs: int) -> Adapted:
        return Adapted(bitsandbytes.nn.Linear4bit(inputs, outputs, **options), inputs, outputs)

    blocks = [nn.Sequential(nn.LayerNorm(64), adapted(64, 256), nn.GELU(), adapted(256, 64)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64)).train()
    for name, each in model.named_parameters():
        each.requires_grad_(name.endswith(("down", "up")))
    return model.to("cpu") if quantised else model  # which quantises


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tight(model: nn.Module, path: Path) -> OffloadEngine:
    least = least_budget(model, path, optimizer=nadam(model))
    return OffloadEngine(model, optimizer=nadam(model), nvme_path=path, host_memory=least)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compress_statistics": False},
        {"quant_type": "fp4"},
        {"compute_dtype": torch.bfloat16, "bias": False},
        {"quant_storage": torch.bfloat16},
    ],
    ids=["nested", "plain", "fp4", "bf16", "stored-as-bf16"],
)
def test_layers_over_the_tiers_have_the_bits_of_those_in_memory(tmp_path: Path, options) -> None:
    plain, model = make_model(**options), make_model(**options)
    losses = train(plain, nadam(plain))
    with tight(model, tmp_path) as engine:
        assert engine.plan.nvme_bytes["weights"] > 0
        assert train(model, engine.optimizer) == losses
        state, expected = model.state_dict(), plain.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            mine = [each.contiguous().view(torch.uint8) if each.dim() else each for each in (state[name], value)]
            assert torch.equal(*mine), name
        copied = copy.deepcopy(model)
        assert type(copied[1][1].base) is bitsandbytes.nn.Linear4bit
        assert torch.equal(copied(TOKENS), plain(TOKENS))
        engine.unwrap()
    layer = model[1][1].base
    assert type(layer) is bitsandbytes.nn.Linear4bit and type(layer.weight) is type(plain[1][1].base.weight)
    assert layer.quant_state is layer.weight.quant_state
    assert train(model, nadam(model)) == train(plain, nadam(plain))


def test_a_device_has_the_bits_of_the_cpu_in_the_least_memory_and_in_all(tmp_path: Path) -> None:
    plain, model = make_model(), make_model()
    losses = train(plain, nadam(plain))
    with pytest.raises(BudgetError) as least:
        OffloadEngine(model, optimizer=nadam(model), device=SimulatedDevice(), device_memory=1, nvme_path=tmp_path)
    for device_memory in (least.value.needed_bytes, 1 << 26):
        model = make_model()
        options = {"device": SimulatedDevice(), "device_memory": device_memory, "nvme_path": tmp_path}
        with OffloadEngine(model, optimizer=nadam(model), **options) as engine:
            assert train(model, engine.optimizer) == losses


def test_a_checkpoint_holds_the_codes_and_the_base_is_not_written_by_a_step(tmp_path: Path) -> None:
    model = make_model()
    with tight(model, tmp_path) as engine:
        train(model, engine.optimizer)
        engine.save_checkpoint(tmp_path / "saved")
    other = make_model(compress_statistics=False)
    with tight(other, tmp_path) as engine, pytest.raises(ConfigError, match="quantised as Linear4bitWeight"):
        engine.load_checkpoint(tmp_path / "saved")
    torch.manual_seed(7)
    other = make_model()
    with tight(other, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        engine.unwrap()
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


def test_what_is_not_quantised_yet_and_what_is_in_no_layer_is_refused() -> None:
    model = make_model(quantised=False)
    weight = model[1][1].base.weight
    with pytest.raises(ConfigError, match=r"1\.1\.base\.weight is quantised by bitsandbytes .* by model\.to\(device\)"):
        OffloadEngine(model, optimizer=nadam(model))
    assert model[1][1].base.weight is weight
    model = make_model()
    table = bitsandbytes.nn.Embedding4bit(64, 64)
    model[0] = table.to("cpu")
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r"0\.weight is quantised by bitsandbytes \(Params4bit\)"):
        OffloadEngine(model, optimizer=nadam(model))
    assert all(before[name] is each for name, each in model.named_parameters())
    assert type(model[1][1].base) is bitsandbytes.nn.Linear4bit


def test_qlora_of_transformers_and_peft_has_its_losses(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")

    def adapted() -> Any:
        torch.manual_seed(1)
        how = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(tmp_path / "base", quantization_config=how, dtype=torch.bfloat16)
        model = peft.prepare_model_for_kbit_training(model)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()

    def losses(model: Any, optimizer: Any) -> list[float]:
        found = []
        for _ in range(3):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain, model = adapted(), adapted()
    with tight(model, tmp_path) as engine:
        assert losses(model, engine.optimizer) == losses(plain, nadam(plain))
        model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0


def test_a_merge_of_peft_is_refused_and_can_be_taken_back() -> None:
    peft = pytest.importorskip("peft")

    def made() -> nn.Module:
        torch.manual_seed(0)
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
        base = nn.Sequential(nn.Linear(64, 64), layer).to("cpu")
        base.is_loaded_in_4bit = True
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=False))

    model, x = made(), torch.randn(4, 64)
    with OffloadEngine(model, precision="fp32") as engine:
        before = model(x)
        with pytest.raises(ConfigError, match=r"Linear4bit.* engine\.unwrap\(\)"):
            model.merge_adapter()
        assert not model.base_model.model[1].merged
        model.unmerge_adapter()
        torch.testing.assert_close(model(x), before)
        engine.unwrap()
    model.merge_adapter()
    torch.testing.assert_close(model(x), before, rtol=0.1, atol=0.3)  # quantised again


def test_layers_that_the_library_dequantises_otherwise_are_named() -> None:
    def made(inputs: int) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(bitsandbytes.nn.Linear4bit(inputs, 64, quant_type="nf4"), nn.Linear(64, 8)).to("cpu")

    def by_hand(weight: Any) -> torch.Tensor:
        state, codes = weight.quant_state, weight.data.flatten().long()
        scales = bitsandbytes.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        values = state.code[torch.stack([codes >> 4, codes & 15], 1).flatten()]
        return (values * scales.repeat_interleave(state.blocksize)[: values.numel()]).view(state.shape)

    for inputs in (96, 128):
        model = made(inputs)
        expected = by_hand(model[0].weight)
        library = bitsandbytes.functional.dequantize_4bit(model[0].weight.data, model[0].weight.quant_state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = OffloadEngine(model, precision="fp32")
        with engine:
            assert torch.equal(model[0].weight.dequantize(), expected)
        said = [str(each.message) for each in caught if "dequantises such weights wrongly" in str(each.message)]
        assert bool(said) == (not torch.equal(library, expected)) and all("(0, ...)" in each for each in said)
