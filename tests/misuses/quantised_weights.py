"""Loops with habits over weights in the formats of `torchao` and `bitsandbytes`: those that train in float8, MXFP8,
int8 and BitNet, and frozen ones in 4 and 8 bits under a low rank that is trained."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from misuses.between import BETWEEN
from misuses.case import Family
from misuses.composed import HABITS, Habit, play
from misuses.joints import program
from misuses.strangers import WIDTH

family = Family(
    "quantised weights",
    needs=("torchao", "bitsandbytes"),
    preload=(
        "torchao.quantization.qat",
        "torchao.float8",
        "torchao.prototype.moe_training.config",
        "torchao.prototype.quantized_training",
        "bitsandbytes",
    ),
)

JOINTS = ("plain", "recomputed", "over the tiers", "together", "mixed")


def of(module: str, *names: str) -> Any:
    found = import_module(module)
    return [getattr(found, name) for name in names]


def is_layer(module, name):
    return isinstance(module, nn.Linear)


class Weights(Habit):
    """Linear layers of the blocks are of another kind."""

    def build(self, model):
        torch.manual_seed(2)
        self.change(model.blocks)

    def change(self, blocks):
        raise NotImplementedError


class Mxfp8(Weights):
    def change(self, blocks):
        config, recipe = of("torchao.prototype.moe_training.config", "MXFP8TrainingOpConfig", "MXFP8TrainingRecipe")
        (quantize,) = of("torchao.quantization", "quantize_")
        quantize(blocks, config.from_recipe(recipe.MXFP8_EMULATED_RCEIL), is_layer)


class Float8(Weights):
    def change(self, blocks):
        config, convert = of("torchao.float8", "Float8LinearConfig", "convert_to_float8_training")
        convert(blocks, config=config(emulate=True))


class Int8(Weights):
    def change(self, blocks):
        (mixed,) = of("torchao.prototype.quantized_training", "int8_mixed_precision_training")
        (quantize,) = of("torchao.quantization", "quantize_")
        quantize(blocks, mixed(module_swap=True), is_layer)


class BitNet(Weights):
    def change(self, blocks):
        (bitnet,) = of("torchao.prototype.quantized_training", "bitnet_training")
        (quantize,) = of("torchao.quantization", "quantize_")
        quantize(blocks, bitnet(), is_layer)


class Aware(Weights):
    def change(self, blocks):
        fake, config = of("torchao.quantization.qat", "IntxFakeQuantizeConfig", "QATConfig")
        (quantize,) = of("torchao.quantization", "quantize_")
        weights = fake(torch.int4, group_size=WIDTH)
        rows = fake(torch.int8, "per_token", is_symmetric=False)
        quantize(blocks, config(activation_config=rows, weight_config=weights, step="prepare"), is_layer)


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 8), nn.Parameter(torch.randn(WIDTH, 4) / 8)

    def forward(self, x):
        return self.base(torch.cat([x, x], 1)) + F.linear(F.linear(x, self.a), self.b)


class UnderLowRank(Weights):
    def change(self, blocks):
        for block in blocks:
            for name in ("up", "down"):
                layer = nn.Linear(2 * WIDTH, WIDTH).requires_grad_(False)  # rows of a block of codes
                setattr(block, name, LowRank(self.frozen(layer)))

    def frozen(self, layer):
        (nf4,) = of("bitsandbytes", "nn")
        quantised = nf4.Linear4bit(2 * WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        quantised.load_state_dict(layer.state_dict())
        return quantised.requires_grad_(False).to("cpu")


class Nf4(UnderLowRank):
    def frozen(self, layer):
        (to_nf4,) = of("torchao.quantization", "to_nf4")
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 16), requires_grad=False)
        return layer


class WeightOnly(UnderLowRank):
    def frozen(self, layer):
        quantize, config = of("torchao.quantization", "quantize_", "Int8WeightOnlyConfig")
        within = nn.Sequential(layer)
        quantize(within, config())
        return within[0]


WAYS = {
    "MXFP8 of torchao": Mxfp8,
    "float8 of torchao": Float8,
    "int8 products of torchao": Int8,
    "BitNet of torchao": BitNet,
    "torchao's quantisation-aware training": Aware,
    "bitsandbytes' NF4 under a low rank": UnderLowRank,
    "torchao's NF4 under a low rank": Nf4,
    "torchao's int8 under a low rank": WeightOnly,
}


def add(number, way, habit, made):
    def body(run):
        return play(run, ["", "", ""], [WAYS[way](), made()])

    body.__name__ = f"quantised_{number}"
    joint = JOINTS[number % len(JOINTS)]
    program(family, f"weights: {way}; the loop: {habit}", (joint,), seconds=120.0)(body)


every = [(habit, made) for habit, made in {**HABITS, **BETWEEN}.items() if "functional_call" not in habit]
for index, (habit, made) in enumerate(every):
    add(index, [*WAYS][index % len(WAYS)], habit, made)
