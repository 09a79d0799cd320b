"""Bases whose files are quantised, FP8 with scales for blocks and MXFP4: they stay as they are in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import frozen_bases
import pytest
import torch
import torch.nn.functional as F
from frozen_bases import WIDTH, Adapted, held, in_shards, steps
from torch import nn

from offload import BudgetError, OffloadEngine
from offload.quantised import Fp8Blocks, Int4Groups, Mxfp4, Nvfp4, QuantisedWeight

BF16 = torch.bfloat16


def fp8(value: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of blocks."""
    rows, columns = value.shape
    blocks = value.float().view(rows // block, block, columns // block, block)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return codes, scales


def mxfp4(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes, and scales around one, of a weight of this shape as it lies in a file."""
    generator = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    codes = torch.randint(0, 256, (*rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (*rows, columns // 32), dtype=torch.uint8, generator=generator)
    return codes, scales


def test_fp8_in_blocks_has_the_bits_that_transformers_makes_of_it() -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, scales = fp8(torch.randn(256, 384))
    ours = Fp8Blocks([codes, scales], codes.shape, BF16).dequantize()
    assert torch.equal(ours, module.Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=BF16))


def test_mxfp4_has_the_bits_that_transformers_makes_of_it() -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    codes, scales = mxfp4(4, 96, 64)
    scales[0, 0, 0], scales[0, 0, 1] = 0, 254
    theirs = module.convert_moe_packed_tensors(codes, scales, dtype=BF16)
    assert theirs.shape == (4, 64, 96)
    ours = Mxfp4([codes, scales], theirs.shape, BF16)
    assert torch.equal(ours.dequantize(), theirs)
    assert torch.equal(ours[2].dequantize(), theirs[2])
    flat = Mxfp4([codes[1], scales[1]], torch.Size((96, 64)), BF16)
    assert torch.equal(flat.dequantize(), theirs[1].T)


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


Files = dict[str, torch.Tensor]
"""Tensors by what their names have behind the weight's."""


def in_fp8(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    codes, scales = fp8(value)
    return {"": codes, "_scale_inv": scales}, Fp8Blocks([codes, scales], codes.shape, BF16)


def in_int4(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape, as compressed-tensors has them."""
    rows, columns = value.shape
    codes = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8)).to(torch.int32)
    scales = (torch.rand(rows, columns // 32) / 100).to(BF16)
    shape = torch.tensor(value.shape)
    return {"_packed": codes, "_scale": scales, "_shape": shape}, Int4Groups([codes, scales], value.shape, BF16)


def in_nvfp4(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape, as compressed-tensors has them."""
    rows, columns = value.shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16) * 100).to(torch.float8_e4m3fn)
    divisor = torch.tensor([7000.0])
    files = {"_packed": codes, "_scale": scales, "_global_scale": divisor}
    return files, Nvfp4([codes, scales, divisor], value.shape, BF16)


def test_int4_in_groups_is_worked_out_as_its_format_says() -> None:
    files, weight = in_int4(torch.empty(6, 128))
    expected = torch.empty(6, 128)
    for row in range(6):
        for column in range(128):
            word = int(files["_packed"][row, column // 8]) & 0xFFFFFFFF
            code = (word >> (4 * (column % 8)) & 0xF) - 8
            expected[row, column] = code * files["_scale"][row, column // 32].float()
    assert torch.equal(weight.dequantize(), expected.to(BF16))


def test_nvfp4_is_worked_out_as_its_format_says() -> None:
    files, weight = in_nvfp4(torch.empty(6, 64))
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.empty(6, 64)
    for row in range(6):
        for column in range(64):
            code = int(files["_packed"][row, column // 2]) >> (4 * (column % 2)) & 0xF
            scale = files["_scale"][row, column // 16].float() / files["_global_scale"][0]
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
    theirs = kind.decompress({f"weight{name}": tensor for name, tensor in files.items()}, scheme)
    assert torch.equal(weight.dequantize(), theirs["weight"])


def quantised_values(number_format: Any) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """What the files have of the small model with adapters, its frozen layers quantised; and the dequantised model."""
    model = frozen_bases.build()
    values = dict(model.state_dict())
    for index, block in enumerate(model):
        if isinstance(block, Adapted):
            name = f"{index}.base.weight"
            files, weight = number_format(values.pop(name))
            values |= {name + ending: tensor for ending, tensor in files.items()}
            with torch.no_grad():
                block.base.weight.copy_(weight.dequantize())
    return values, model


def least(base: Path, **options: Any) -> int:
    with pytest.raises(BudgetError) as error:
        OffloadEngine(frozen_bases.unborn(), weights=base, host_memory=1, **options)
    return error.value.needed_bytes


@pytest.mark.parametrize("number_format", [in_fp8, in_int4, in_nvfp4])
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
            model[index].proj.copy_(Mxfp4([codes, scales], torch.Size((4, 256, 256)), BF16).dequantize())
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
