"""Bases in GGUF files: they stay as they are in the file."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import frozen_bases
import pytest
import torch
from frozen_bases import WIDTH, held, steps
from gguf_files import QUANTISED, Tensors, coded, dequantised, gguf, written
from torch import nn

from offload import BudgetError, OffloadEngine, WeightsChanged, WeightsError
from offload.birth.weights import Weights
from offload.predict.variants import BASES
from offload.quantised import GGML_TYPES, GgmlBlocks

BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", [*QUANTISED, "F32", "F16", "BF16"])
def test_each_type_has_the_bits_that_the_library_makes_of_it(kind: str) -> None:
    raw, of = coded(kind, (24, 512)), GGML_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (of.numel, of.nbytes)
    theirs = dequantised(kind, raw)
    assert 0.01 < theirs.abs().mean() < 0.2
    for dtype in (torch.float32, BF16, torch.float16):
        ours = GgmlBlocks([torch.from_numpy(raw)], torch.Size((24, 512)), dtype, (kind, 0, 0.0))
        assert torch.equal(ours.dequantize(), theirs.to(dtype))


def test_all_types_that_are_read_are_tried() -> None:
    assert {*QUANTISED, "F32", "F16", "BF16"} == GGML_TYPES.keys()


def test_a_plan_counts_the_bits_of_a_block() -> None:
    planned = {name: base.bits for name, base in BASES.items() if name.upper() in GGML_TYPES and name != "bf16"}
    assert planned == {name: 8 * GGML_TYPES[name.upper()].nbytes / GGML_TYPES[name.upper()].numel for name in planned}
    assert planned.keys() == {"q8_0", "q6_k", "q5_k", "q4_k"}


def test_an_embedding_works_out_the_rows_that_it_looks_up(monkeypatch: Any) -> None:
    weight = GgmlBlocks([torch.from_numpy(coded("Q4_K", (64, 256)))], torch.Size((64, 256)), BF16, ("Q4_K", 0, 0.0))
    expected, indices = weight.dequantize(), torch.tensor([[3, 60, 3], [0, 1, 2]])
    rows = []
    put_rows = GgmlBlocks.put_rows
    monkeypatch.setattr(GgmlBlocks, "put_rows", lambda *args: rows.append(args[2] - args[1]) or put_rows(*args))
    assert torch.equal(nn.functional.embedding(indices, weight, padding_idx=0), expected[indices])
    assert sum(rows) == 6


def base_of(path: Path, kind: str) -> tuple[Path, nn.Module]:
    """A file with the small model, its frozen layers of this type; and the dequantised model."""
    model = frozen_bases.build()
    tensors: dict[str, Any] = {}
    for index, (name, value) in enumerate(model.state_dict().items()):
        of = kind if "base.weight" in name else "F32" if "base.bias" in name else "BF16"
        raw = coded(of, value.shape, index)
        tensors[name] = of, raw
        value.copy_(dequantised(of, raw).view(value.shape))
    return written(path, tensors, fields={"words": ["a", "bc"] * 50, "general.name": "small"}), model


def least(base: Path, **options: Any) -> int:
    with pytest.raises(BudgetError) as error:
        OffloadEngine(frozen_bases.unborn(), weights=base, host_memory=1, **options)
    return error.value.needed_bytes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"])
def test_a_base_is_read_in_place_and_trains_as_the_dequantised_one(kind: str, tmp_path: Path) -> None:
    base, model = base_of(tmp_path / "base.gguf", kind)
    model_values = {name: value.clone() for name, value in model.state_dict().items()}
    content, before = base.read_bytes(), base.stat()
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    with OffloadEngine(model, **options) as engine:
        losses = steps(engine, range(4))
        adapters = {name: value for name, value in held(engine).items() if "base" not in name}
    needed = least(base, **options)
    with OffloadEngine(frozen_bases.unborn(), weights=base, host_memory=needed, **options) as engine:
        of_a_row = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        weights = WIDTH * WIDTH // of_a_row[0] * of_a_row[1]
        assert 8 * weights < engine.plan.in_place_bytes < 8 * (weights + 4 * WIDTH + 8192)
        assert torch.equal(engine.state_dict()["0.base.weight"].detach()[:], model_values["0.base.weight"])
        assert steps(engine, range(2)) == losses[:2]
        engine.save_checkpoint(tmp_path / "run")
        assert steps(engine, range(2, 4)) == losses[2:]
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in adapters.items())
    for budget in ({}, {"host_memory": needed}):
        with OffloadEngine(frozen_bases.unborn(), weights=base, **budget, **options) as engine:
            engine.load_checkpoint(tmp_path / "run")
            assert steps(engine, range(2, 4)) == losses[2:]
    assert base.read_bytes() == content and base.stat().st_mtime_ns == before.st_mtime_ns


def test_a_file_that_changes_while_it_is_trained_over_is_refused(tmp_path: Path) -> None:
    base, _ = base_of(tmp_path / "base.gguf", "Q4_K")
    options: dict[str, Any] = {"precision": "bf16", "lr": 1e-2, "nvme_path": tmp_path}
    with OffloadEngine(frozen_bases.unborn(), weights=base, host_memory=least(base, **options), **options) as engine:
        steps(engine, range(1))
        with closing(Weights(base)) as weights:
            start = weights.tensors["3.base.weight"].start
        with base.open("r+b") as file:
            file.seek(start + 50)
            byte = file.read(1)
            file.seek(start + 50)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(WeightsChanged):
            steps(engine, range(1, 3))


def test_all_of_it_can_be_trained(tmp_path: Path) -> None:
    base, model = base_of(tmp_path / "base.gguf", "Q5_K")
    with OffloadEngine(model.requires_grad_(True), precision="bf16", lr=1e-2) as engine:
        expected = steps(engine, range(2))
    unborn = frozen_bases.unborn().requires_grad_(True)
    with OffloadEngine(unborn, weights=base, precision="bf16", lr=1e-2) as engine:
        assert steps(engine, range(2)) == expected


def test_types_that_are_not_read_are_named_before_anything_is_allocated(tmp_path: Path) -> None:
    tensors: Tensors = {"a.weight": ("Q8_0", coded("Q8_0", (2, 32)))}
    base = written(tmp_path / "base.gguf", tensors)
    content = bytearray(base.read_bytes())
    at = content.index(b"a.weight") + len(b"a.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", content, at) == (gguf.GGMLQuantizationType.Q8_0,)
    for number, name in ((gguf.GGMLQuantizationType.IQ2_XXS, "IQ2_XXS"), (99, "type 99")):
        struct.pack_into("<I", content, at, number)
        base.write_bytes(content)
        with pytest.raises(WeightsError, match=rf"base.gguf has 1 tensors of .* not read: a.weight \({name}\)\. F32"):
            OffloadEngine(frozen_bases.unborn(), weights=base, optimizer=None)


def changed(content: bytes, what: str) -> bytes:
    at = content.index(b"0.base.weight") + len(b"0.base.weight")
    if what == "cut":
        return content[:-50]
    if what == "header cut":
        return content[:at]
    if what == "no magic":
        return b"GGML" + content[4:]
    if what == "big-endian":
        return content[:4] + struct.pack(">I", 3) + content[8:]
    if what == "offset":
        return content[: at + 24] + struct.pack("<Q", 32) + content[at + 32 :]
    if what == "dimensions":
        return content[:at] + struct.pack("<I", 9) + content[at + 4 :]
    return content[: at + 4] + struct.pack("<Q", 33) + content[at + 12 :]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("cut", "it is cut off: it should have"),
        ("header cut", "it is cut off: at byte"),
        ("no magic", "that is no GGUF file"),
        ("big-endian", "is not read .2 and 3 are, little-endian"),
        ("offset", "within others, or not aligned"),
        ("dimensions", "0.base.weight: it has 9 dimensions"),
        ("width", "0.base.weight: its rows have 33 numbers, which is no multiple of the 32 of a block of Q8_0"),
    ],
)
def test_damaged_files_are_refused(what: str, said: str, tmp_path: Path) -> None:
    base, _ = base_of(tmp_path / "base.gguf", "Q8_0")
    base.write_bytes(changed(base.read_bytes(), what))
    with pytest.raises(WeightsError, match=said):
        OffloadEngine(frozen_bases.unborn(), weights=base, optimizer=None)


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    base = written(tmp_path / "base.gguf", {"a": ("F32", coded("F32", (4,)))}, fields={"split.count": 2})
    with pytest.raises(WeightsError, match="one of 2 parts: join them"):
        OffloadEngine(frozen_bases.unborn(), weights=base, optimizer=None)
