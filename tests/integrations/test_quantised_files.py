"""Bases whose files are quantised: they stay as they are in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import frozen_bases
import pytest
import torch
import torch.nn.functional as F
from frozen_bases import WIDTH, Adapted, held, in_shards, steps
from quantised_files import (
    BF16,
    fp8,
    in_awq,
    in_fp8,
    in_gptq,
    in_int4,
    in_nested_nf4,
    in_nf4,
    in_nvfp4,
    mxfp4,
    of_bitsandbytes,
)
from torch import nn

from offload import BudgetError, ConfigError, OffloadEngine, WeightsError
from offload.quantised import Blocks4, Blocks4Nested, Fp8Blocks, Mxfp4, QuantisedWeight


def test_fp8_in_blocks_has_the_bits_that_transformers_makes_of_it() -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, scales = fp8(torch.randn(256, 384))
    ours = Fp8Blocks([codes, scales], codes.shape, BF16).dequantize()
    assert torch.equal(ours, module.Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=BF16))


@pytest.mark.parametrize("rows", [96, 64])  # those of GPT-OSS are square, and transposed
def test_mxfp4_has_the_bits_that_transformers_makes_of_it(rows: int) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    codes, scales = mxfp4(4, rows, 64)
    scales[0, 0, 0], scales[0, 0, 1] = 0, 254
    theirs = module.convert_moe_packed_tensors(codes, scales, dtype=BF16)
    assert theirs.shape == (4, 64, rows)
    ours = Mxfp4([codes, scales], theirs.shape, BF16, (True,))
    assert torch.equal(ours.dequantize(), theirs)
    assert torch.equal(ours[2].dequantize(), theirs[2])
    flat = Mxfp4([codes[1], scales[1]], torch.Size((rows, 64)), BF16, (False,))
    assert torch.equal(flat.dequantize(), theirs[1].T)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256)])
def test_a_linear_layer_has_the_bits_of_the_dequantised_weight_and_keeps_no_dequantised_one(shape: Any) -> None:
    codes, scales = fp8(torch.randn(128, 256))
    weight = Fp8Blocks([codes, scales], codes.shape, BF16)
    found = []
    for used in (weight, weight.dequantize()):
        torch.manual_seed(0)
        x, bias = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(128).to(BF16).requires_grad_()
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = F.linear(x, used, bias)
        y.float().square().sum().backward()
        found.append((y, x.grad, bias.grad))
        assert isinstance(used, QuantisedWeight) is any(isinstance(tensor, QuantisedWeight) for tensor in saved)
        if isinstance(used, QuantisedWeight):
            assert all(type(tensor) is not torch.Tensor or tensor.numel() < 128 * 256 for tensor in saved)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_worked_out_as_its_format_says(nested: bool) -> None:
    files, weight = of_bitsandbytes(torch.empty(8, 40), nested=nested)
    codes, scales, table = files["weight"].flatten(), files["weight.absmax"], files["weight.quant_map"]
    expected = torch.empty(320)
    for index in range(320):
        scale = scales[index // 64]
        if nested:
            outer = files["weight.nested_absmax"][index // 64 // 256]
            scale = files["weight.nested_quant_map"][int(scale)] * outer + 0.04
        expected[index] = table[int(codes[index // 2]) >> (0 if index % 2 else 4) & 0xF] * scale
    assert torch.equal(weight.dequantize(), expected.view(8, 40).to(BF16))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_nf4_has_the_bits_that_bitsandbytes_makes_of_it(nested: bool, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        torch.randn(96, 320).to(dtype), quant_type="nf4", compress_statistics=nested
    )
    of = state.as_dict(packed=True)
    parts, settings = [codes, of["absmax"], of["quant_map"]], (state.blocksize, dtype)
    weight = Blocks4(parts, state.shape, dtype, settings)
    if nested:
        parts += [of["nested_absmax"], of["nested_quant_map"]]
        weight = Blocks4Nested(parts, state.shape, dtype, (*settings, 256, state.offset.item()))
    assert torch.equal(weight.dequantize(), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("added", [0, 1])
def test_gptq_is_worked_out_as_its_format_says(bits: int, added: int) -> None:
    files, weight = in_gptq(torch.empty(16, 64), bits)
    weight.settings = bits, added
    expected, per_word, most = torch.empty(16, 64), 32 // bits, (1 << bits) - 1
    for row in range(16):
        for column in range(64):
            word = int(files["qweight"][column // per_word, row]) & 0xFFFFFFFF
            code, group = word >> bits * (column % per_word) & most, int(files["g_idx"][column])
            ones = sum(added << shift for shift in range(0, 32, bits))
            zeros = (int(files["qzeros"][group, row // per_word]) + ones) & 0xFFFFFFFF
            zero = zeros >> bits * (row % per_word) & most
            expected[row, column] = ((code - zero) * files["scales"][group, row].float()).half()
    assert torch.equal(weight.dequantize(), expected.to(BF16))


def test_awq_is_worked_out_as_its_format_says() -> None:
    files, weight = in_awq(torch.empty(16, 64))
    expected = torch.empty(16, 64)
    for row in range(16):
        shift = 4 * [0, 4, 1, 5, 2, 6, 3, 7][row % 8]
        for column in range(64):
            code = int(files["qweight"][column, row // 8]) >> shift & 0xF
            zero = int(files["qzeros"][column // 32, row // 8]) >> shift & 0xF
            expected[row, column] = ((code - zero) * files["scales"][column // 32, row].float()).half()
    assert torch.equal(weight.dequantize(), expected.to(BF16))


@pytest.mark.parametrize("number_format", [in_fp8, in_int4, in_nvfp4, in_nf4, in_nested_nf4, in_gptq, in_awq])
def test_a_weight_is_dequantised_in_parts_with_the_same_bits(number_format: Any, monkeypatch: Any) -> None:
    _, weight = number_format(torch.randn(384, 256))
    expected = torch.empty(384, 256, dtype=BF16)
    weight.put_rows(0, 384, expected)
    assert torch.equal(weight.dequantize(), expected)
    monkeypatch.setattr("offload.quantised.weight._AT_ONCE_NUMEL", 40 * 256)
    assert torch.equal(weight.dequantize(), expected)


def test_a_weight_becomes_another_one_of_its_format_and_takes_no_other_write() -> None:
    (_, weight), (_, other) = (
        in_fp8(torch.randn(128, 128, generator=torch.Generator().manual_seed(i))) for i in (0, 1)
    )
    before = weight.dequantize()
    for write in (
        lambda: weight.add_(1),
        lambda: torch.add(before, 1, out=weight),
        lambda: weight.copy_(before),
        lambda: weight.copy_(in_fp8(before.repeat(2, 1))[1]),
    ):
        with pytest.raises(ConfigError, match="Nothing has changed"):
            write()
    assert weight.dequantize().equal(before)
    assert torch.zeros_like(before).add_(weight).equal(before)
    weight.copy_(other)
    assert weight.dequantize().equal(other.dequantize())


def test_dequantised_weights_that_follow_one_another_leave_no_memory_behind() -> None:
    codes, scales = mxfp4(2048, 7168)
    weight = Mxfp4([codes, scales], torch.Size((2048, 7168)), BF16, (False,))
    weight.dequantize()
    kept, before = [], resident_bytes()
    for _ in range(8):
        kept.append(weight.dequantize()[0].clone())  # such as an activation
    assert resident_bytes() - before < weight.numel()


def test_int4_in_groups_is_worked_out_as_its_format_says() -> None:
    files, weight = in_int4(torch.empty(6, 128))
    expected = torch.empty(6, 128)
    for row in range(6):
        for column in range(128):
            word = int(files["weight_packed"][row, column // 8]) & 0xFFFFFFFF
            code = (word >> (4 * (column % 8)) & 0xF) - 8
            expected[row, column] = code * files["weight_scale"][row, column // 32].float()
    assert torch.equal(weight.dequantize(), expected.to(BF16))


def test_nvfp4_is_worked_out_as_its_format_says() -> None:
    files, weight = in_nvfp4(torch.empty(6, 64))
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.empty(6, 64)
    for row in range(6):
        for column in range(64):
            code = int(files["weight_packed"][row, column // 2]) >> (4 * (column % 2)) & 0xF
            scale = files["weight_scale"][row, column // 16].float() / files["weight_global_scale"][0]
            expected[row, column] = values[code & 7] * (-1 if code & 8 else 1) * scale
    assert torch.equal(weight.dequantize(), expected.to(BF16))


@pytest.mark.parametrize("number_format", [in_int4, in_nvfp4])
def test_4_bits_have_the_bits_that_compressed_tensors_makes_of_them(number_format: Any) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    files, weight = number_format(torch.empty(64, 256))
    args: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    kind = compressors.PackedQuantizationCompressor
    if number_format is in_nvfp4:
        args |= {"type": "float", "strategy": "tensor_group", "group_size": 16}
        kind = compressors.NVFP4PackedCompressor
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**args))
    theirs = kind.decompress(dict(files), scheme)
    assert torch.equal(weight.dequantize(), theirs["weight"])


def quantised_values(number_format: Any) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """What the files have of the small model with adapters, its frozen layers quantised; and the dequantised model."""
    model = frozen_bases.build()
    values = dict(model.state_dict())
    for index, block in enumerate(model):
        if isinstance(block, Adapted):
            name = f"{index}.base.weight"
            files, weight = number_format(values.pop(name))
            values |= {name.removesuffix("weight") + own: tensor for own, tensor in files.items()}
            with torch.no_grad():
                block.base.weight.copy_(weight.dequantize())
    return values, model


def least(base: Path, **options: Any) -> int:
    with pytest.raises(BudgetError) as error:
        OffloadEngine(frozen_bases.unborn(), weights=base, host_memory=1, **options)
    return error.value.needed_bytes


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number_format", [in_fp8, in_int4, in_nvfp4, in_nf4, in_nested_nf4, in_gptq, in_awq])
def test_a_base_is_read_in_place_and_trains_as_the_dequantised_one(number_format: Any, tmp_path: Path) -> None:
    values, model = quantised_values(number_format)
    model_values = {name: value.clone() for name, value in model.state_dict().items()}
    base = in_shards(values, tmp_path / "base")
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    with OffloadEngine(model, **options) as engine:
        losses = steps(engine, range(4))
        adapters = {name: value for name, value in held(engine).items() if "base" not in name}
    needed = least(base, **options)
    with OffloadEngine(frozen_bases.unborn(), weights=base, host_memory=needed, **options) as engine:
        plan = engine.plan
        assert 0 < plan.in_place_bytes < 8 * (WIDTH * WIDTH + 4 * WIDTH + 8192)  # a byte an element
        assert torch.equal(engine.module[0].base.weight.dequantize(), model_values["0.base.weight"])
        assert steps(engine, range(2)) == losses[:2]
        engine.save_checkpoint(tmp_path / "run")
        assert steps(engine, range(2, 4)) == losses[2:]
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in adapters.items())
    for budget in ({}, {"host_memory": needed}):
        with OffloadEngine(frozen_bases.unborn(), weights=base, **budget, **options) as engine:
            engine.load_checkpoint(tmp_path / "run")
            assert steps(engine, range(2, 4)) == losses[2:]


def test_the_second_version_of_gptq_is_known_by_its_config(tmp_path: Path) -> None:
    files, weight = in_gptq(torch.empty(256, 256))
    values, _ = quantised_values(lambda _: (files, weight))
    for version, added in (("gptq", 1), ("gptq_v2", 0)):
        base = in_shards(values, tmp_path / version)
        said = {"model_type": "any", "quantization_config": {"checkpoint_format": version, "bits": 4}}
        (base / "config.json").write_text(json.dumps(said))
        with OffloadEngine(frozen_bases.unborn(), weights=base, optimizer=None, precision="bf16") as engine:
            weight.settings = 4, added
            assert torch.equal(engine.module[0].base.weight.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    "content", ["no JSON", '{"blocksize": 0, "quant_type": "nf4", "dtype": "bfloat16", "shape": []}']
)
def test_what_a_file_says_of_a_quantised_weight_is_checked(content: str, tmp_path: Path) -> None:
    values, _ = quantised_values(in_nf4)
    state = "3.base.weight.quant_state.bitsandbytes__nf4"
    values[state] = torch.tensor(list(content.encode()), dtype=torch.uint8)
    with pytest.raises(WeightsError, match=state):
        OffloadEngine(frozen_bases.unborn(), weights=in_shards(values, tmp_path / "base"), optimizer=None)


class Experts(nn.Module):
    """Experts as GPT-OSS has them: one parameter for all, of which each is taken by its index."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.empty(4, 256, 256), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(4):
            x = x + torch.tanh(x @ self.proj[index] + self.bias)
        return x


def test_mxfp4_experts_are_read_in_place_and_train_as_the_dequantised_ones(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Experts() for _ in range(6)), nn.Linear(256, 8)).to(BF16)

    torch.manual_seed(3)
    model = build()
    values = dict(model.state_dict())
    for index in range(6):
        codes, scales = mxfp4(4, 256, 256, seed=index)
        del values[f"{index}.proj"]
        values[f"{index}.proj_blocks"], values[f"{index}.proj_scales"] = codes, scales
        with torch.no_grad():
            model[index].proj.copy_(Mxfp4([codes, scales], torch.Size((4, 256, 256)), BF16, (True,)).dequantize())
    base = in_shards(values, tmp_path / "base")

    def losses(engine: OffloadEngine) -> list[float]:
        found = []
        for step in range(3):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step)).to(BF16)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    with OffloadEngine(model, **options) as engine:
        expected = losses(engine)
    with torch.device("meta"):
        model = build()
    with pytest.raises(BudgetError) as error:
        OffloadEngine(model, weights=base, host_memory=1, **options)
    assert type(model[0].proj) is nn.Parameter  # the model is as it was
    with OffloadEngine(model, weights=base, host_memory=error.value.needed_bytes, **options) as engine:
        assert engine.plan.in_place_bytes > 0
        assert losses(engine) == expected
