"""Weights in the formats of files: tensors that hold a file's bytes, and are dequantised where they are used."""

from offload.quantised.formats import Awq, Fp8Blocks, Gptq, Stack
from offload.quantised.four_bits import Blocks4, Blocks4Nested, Int4Groups, Mxfp4, Nvfp4
from offload.quantised.ggml import GGML_TYPES, GgmlBlocks
from offload.quantised.weight import QuantisedWeight

__all__ = [
    "GGML_TYPES",
    "Awq",
    "Blocks4",
    "Blocks4Nested",
    "Fp8Blocks",
    "GgmlBlocks",
    "Gptq",
    "Int4Groups",
    "Mxfp4",
    "Nvfp4",
    "QuantisedWeight",
    "Stack",
]
