"""Weights as files have them that are quantised: any codes, and the tensor that stands for them."""

from __future__ import annotations

import json
from typing import Any

import torch

from offload.quantised import Awq, Blocks4, Blocks4Nested, Fp8Blocks, Gptq, Int4Groups, Nvfp4, QuantisedWeight

BF16 = torch.bfloat16

Files = dict[str, torch.Tensor]
"""Tensors by their names, of which those of ordinary files have ``weight``."""


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


def in_fp8(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    codes, scales = fp8(value)
    return {"weight": codes, "weight_scale_inv": scales}, Fp8Blocks([codes, scales], codes.shape, BF16)


def in_int4(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape, as compressed-tensors has them."""
    rows, columns = value.shape
    codes = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8)).to(torch.int32)
    scales = (torch.rand(rows, columns // 32) / 100).to(BF16)
    shape = torch.tensor(value.shape)
    return {"weight_packed": codes, "weight_scale": scales, "weight_shape": shape}, Int4Groups(
        [codes, scales], value.shape, BF16
    )


def in_nvfp4(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape, as compressed-tensors has them."""
    rows, columns = value.shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16) * 100).to(torch.float8_e4m3fn)
    divisor = torch.tensor([7000.0])
    files = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    return files, Nvfp4([codes, scales, divisor], value.shape, BF16)


def of_bitsandbytes(value: torch.Tensor, *, nested: bool) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape, as bitsandbytes saves them."""
    numel = value.numel()
    codes = torch.randint(0, 256, (numel // 2, 1), dtype=torch.uint8)
    table = torch.linspace(-1, 1, 16).square() * torch.tensor([-1.0] * 8 + [1.0] * 8)
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(value.shape)}
    files, parts, settings = {"weight": codes, "weight.quant_map": table}, [codes], (64, BF16)
    if nested:
        scales = torch.randint(0, 256, (numel // 64,), dtype=torch.uint8)
        outer = torch.rand(-(-numel // 64 // 256)) / 100, torch.linspace(-1, 1, 256)
        files |= {"weight.nested_absmax": outer[0], "weight.nested_quant_map": outer[1]}
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.04}
        weight = Blocks4Nested([codes, scales, table, *outer], value.shape, BF16, (*settings, 256, 0.04))
    else:
        scales = torch.rand(numel // 64) / 10
        weight = Blocks4([*parts, scales, table], value.shape, BF16, settings)
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return files | {"weight.absmax": scales, "weight.quant_state.bitsandbytes__nf4": state}, weight


def in_nf4(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    return of_bitsandbytes(value, nested=False)


def in_nested_nf4(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    return of_bitsandbytes(value, nested=True)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def in_gptq(value: torch.Tensor, bits: int = 4) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape, in the first version of the format, with groups in the order of activations."""
    rows, columns = value.shape
    groups = (torch.arange(columns, dtype=torch.int32) // 32)[torch.randperm(columns)]
    codes, zeros = words(columns * bits // 32, rows), words(columns // 32, rows * bits // 32) & 0x77777777
    scales = torch.rand(columns // 32, rows).half() / 100
    files = {"qweight": codes, "qzeros": zeros, "scales": scales, "g_idx": groups}
    return files, Gptq([codes, scales, zeros, groups], value.shape, BF16, (bits, 1))


def in_awq(value: torch.Tensor) -> tuple[Files, QuantisedWeight]:
    """Any codes of its shape."""
    rows, columns = value.shape
    codes, zeros = words(columns, rows // 8), words(columns // 32, rows // 8)
    scales = torch.rand(columns // 32, rows).half() / 100
    return {"qweight": codes, "qzeros": zeros, "scales": scales}, Awq([codes, scales, zeros], value.shape, BF16)
