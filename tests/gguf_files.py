"""GGUF files, written by the library ``gguf``, with any numbers in any type, and the numbers that it has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

_SCALES: dict[str, tuple[float, tuple[int, ...]]] = {
    **{
        "Q4_0": (1e-2, (0,)),
        "Q4_1": (1e-2, (0, 2)),
        "Q5_0": (5e-3, (0,)),
        "Q5_1": (5e-3, (0, 2)),
        "Q8_0": (8e-4, (0,)),
    },
    **{"Q2_K": (2e-3, (80, 82)), "Q3_K": (8e-4, (108,)), "Q4_K": (1e-4, (0, 2)), "Q5_K": (5e-5, (0, 2))},
    **{"Q6_K": (2e-5, (208,)), "IQ4_NL": (8e-4, (0,)), "IQ4_XS": (2e-5, (0,))},
}
"""Size of the fp16 numbers of a block, with which values are about 0.1, and their first bytes."""

QUANTISED = tuple(_SCALES)


def coded(kind: str, shape: Iterable[int], seed: int = 0) -> np.ndarray[Any, Any]:
    """The bytes of any tensor of this type and shape, a row for each of its rows."""
    random = np.random.default_rng(seed)
    *rows, columns = shape
    if kind not in _SCALES:
        plain = torch.from_numpy(random.normal(0, 0.05, (*rows, columns)))
        of = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return plain.to(of).view(torch.uint8).numpy()
    numel, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (*rows, columns // numel, nbytes), dtype=np.uint8)
    scale, places = _SCALES[kind]
    for at in places:
        halves = random.uniform(0.5 * scale, scale, (*rows, columns // numel, 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(*rows, -1)


def dequantised(kind: str, raw: np.ndarray[Any, Any]) -> torch.Tensor:
    """The numbers in fp32, as the library has them."""
    plain = {"F32": np.float32, "F16": np.float16}
    return torch.from_numpy(
        np.array(gguf.dequantize(raw.view(plain.get(kind, np.uint8)), gguf.GGMLQuantizationType[kind]), np.float32)
    )


Tensors = Mapping[str, tuple[str, np.ndarray[Any, Any]]]
"""Types and bytes by names."""


def written(path: Path, tensors: Tensors, architecture: str = "any", fields: Mapping[str, Any] | None = None) -> Path:
    """A file of these tensors. Fields are numbers, texts, and lists of texts."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (fields or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, (kind, raw) in tensors.items():
        plain = {"F32": np.float32, "F16": np.float16}
        if kind in plain:
            writer.add_tensor(name, raw.view(plain[kind]))
        else:
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_model(
    path: Path, config: Any, architecture: str, kind: str | Callable[[str], str], own_fields: Mapping[str, Any] = {}
) -> Path:
    """A file of a model of ``transformers`` with any weights, named as in GGUF. ``kind``: the type of its matrices, or
    of the one of a name."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_TO_TRANSFORMERS_MAPPING,
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    values = model.state_dict()
    fields: dict[str, Any] = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(config.vocab_size)]}
    for key, own in GGUF_TO_TRANSFORMERS_MAPPING["config"][config.model_type.removesuffix("_text")].items():
        value = getattr(config, own, None) if isinstance(own, str) else None
        if type(value) in (int, float):
            fields[f"{architecture}.{key}"] = value
    tensors: dict[str, Any] = {}
    for seed, (name, own) in enumerate(get_gguf_hf_weights_map(model, processor).items()):
        shape = list(values[own].shape)
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("_exps"):
            name += ".weight"
            shape[1] //= 2 if "gate" in name or "up" in name else 1
        if architecture == "gpt2" and (".attn_" in name or ".ffn_" in name):
            shape.reverse()
        if "ffn_gate_inp_shexp" in name:
            del shape[0]
        if "shortconv.conv" in name:
            del shape[1]
        of = kind if isinstance(kind, str) else kind(name)
        of = "F32" if len(shape) == 1 or "ffn_gate_inp" in name or "shortconv.conv" in name else of
        tensors[name] = of, coded(of, shape, seed)
    return written(path, tensors, architecture, {**fields, **own_fields})
