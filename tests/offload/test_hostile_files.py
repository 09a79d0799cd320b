"""Files that others have made: a typed error that names the field, before anything is allocated or replaced."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from torch import nn

import offload.encoding as encoding
from offload import ConfigError, OffloadEngine, OffloadError, WeightsError
from offload.birth.weights import Weights
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.saved_units import SavedParameter, SavedTile, SavedUnit, SavedUnits
from offload.cli import main
from offload.encoding import Decoder, Encoded, decode, encode
from offload.optim.rule import TilePart
from swapper import StorageCorrupt
from swapper.checked import Refused
from swapper.manifest import Entry, Manifest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import fuzz_files

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the middle of an accumulation."""
    folder = tmp_path_factory.mktemp("saved")
    with fuzz_files.make_engine(0) as engine:
        for _ in range(2):
            fuzz_files.backward(engine)
            if engine.global_step == 0:
                engine.step()
        engine.save_checkpoint(folder, "t", client_state={"a": torch.ones(3)})
    return folder / "t"


@pytest.fixture(scope="module")
def engine() -> Iterator[OffloadEngine]:
    with fuzz_files.make_engine(1) as engine:
        yield engine


def text_of(metadata: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", metadata)
    return json.loads(metadata[8 : 8 + length]), metadata[8 + length :]


def with_text(content: dict[str, Any], memory: bytes) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + memory


def crafted(
    saved: Path,
    target: Path,
    change: Change = lambda content: None,
    of_manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> Path:
    """A copy of the checkpoint with another description, or another manifest, and good checksums."""
    (file,) = saved.glob("generation.*")
    manifest = Manifest.decode(file.read_bytes())
    content, memory = text_of(manifest.metadata)
    change(content)
    tag = target / "t"
    tag.mkdir(parents=True)
    tag.joinpath("data.0").hardlink_to(saved / "data.0")
    changed = of_manifest(replace(manifest, metadata=with_text(content, memory)))
    tag.joinpath(file.name).write_bytes(changed.encode())
    return target


def holder_of(content: Any, path: str) -> tuple[Any, Any]:
    *names, last = (int(name) if name.isdigit() else name for name in path.split("."))
    for name in names:
        content = content[name]
        content = content.get("$tuple", content) if isinstance(content, dict) else content
    return content, last


def setter(path: str, value: Any) -> Change:
    """Puts a value into the description; ``path`` is that of ``units.0.numel``. Functions get the old one."""

    def change(content: Any) -> None:
        holder, key = holder_of(content, path)
        holder[key] = value(holder[key]) if callable(value) else value

    return change


def both(one: Change, other: Change) -> Change:
    def change(content: Any) -> None:
        one(content)
        other(content)

    return change


def without(path: str) -> Change:
    def change(content: Any) -> None:
        holder, key = holder_of(content, path)
        del holder[key]

    return change


def more(by: int) -> Callable[[int], int]:
    return lambda value: value + by


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # What is read over the end of something, or leaves something out.
        (setter("units.0.parameters.0.offset", 1 << 40), r"units\[0\].parameters\[0\].offset: 1099511627776 is not"),
        (setter("units.0.parameters.0.offset", -1), "offset: -1 is not between 0"),
        (setter("units.0.parameters.0.shape", [1 << 30, 32]), "parameters\\[0\\].offset"),
        (setter("units.0.parameters.0.shape", [16, 32]), "512 of 512|512 elements|is that of another|shape"),
        (setter("units.0.tiles.0.stop", more(-256)), "elements from .* are in none"),
        (setter("units.0.tiles.0.start", 256), r"tiles\[0\]: \[256, \d+\) is not what follows 0"),
        (setter("units.0.tiles.0.nbytes", more(1 << 20)), "extent .* has .* bytes, and the record"),
        (setter("units.0.tiles.0.extent", 10**6), "1000000 is none of the .* extents"),
        (setter("units.0.tiles.0.extent", 1 << 70), "extent: .* is not between"),
        (setter("units.0.weights.0", more(1)), "extent 1 (has|is)"),
        (setter("units.0.numel", more(1)), "elements cannot be trained"),
        (setter("units.1.name", "0"), "two units have this name|unit"),
        (setter("units.0.gradients", None), "gradients: they are in no extent"),
        (both(setter("run.gradients", {}), setter("units.0.gradients", 10**6)), "1000000 is none of the .* extents"),
        (setter("units.0.parameters.0.name", "__metadata__"), "it cannot be '__metadata__'"),
        # What is another kind of thing.
        (setter("precision", "fp8"), "precision: 'fp8' is none of bf16, fp16, fp32"),
        (setter("optimizer", "adamw"), "optimizer: expected an object"),
        (without("optimizer.moments"), "optimizer.moments: it is not there"),
        (without("run"), "bytes of memory belong to nothing"),
        (without("units.0.tiles"), r"units\[0\].tiles: it is not there"),
        (setter("units", {}), "2 of|parameter .* is in this model and not there|units"),
        (setter("units.0.color", "red"), "a field 'color' is none of"),
        (setter("run.step", "1"), "run.step: expected a whole number, not '1'"),
        (setter("run.step", None), "run.step: expected a whole number, not None"),
        (setter("run.loss_scale", {"$tuple": [float("nan"), 1]}), r"run.loss_scale\[0\]: nan is not a number"),
        (setter("run.gradient_dtype", {"$dtype": "quint8"}), "'quint8' is none of float64"),
        (
            setter("run.gradient_dtype", {"$dtype": "bool"}),
            "gradient_dtype: 'bool' is none of bfloat16, float16",
        ),
        (setter("run.states.x", {"steps": 1, "step": float("inf")}), "run.states.x.step: inf is not a number"),
        (setter("run.groups.0.options.lr", "fast"), "run.groups.*lr: expected a number, not 'fast'"),
        (setter("run.groups.0.options.betas", {"$tuple": [0.9]}), "option betas of parameter group 0 is"),
        (setter("run.groups.0.options.amsgrad", 1 << 40), "option amsgrad of parameter group 0 is 1099511627776 there"),
        (setter("run.states.0", {"steps": -1}), "run.states.*steps: -1 is not between"),
        (setter("run.random.python", {"$tuple": [3, {"$tuple": [1, 2]}, None]}), "python: no generator takes it"),
        (setter("run.random.numpy.bit_generator", "MT19938"), "numpy: no generator takes it"),
        (setter("run.random.device", 1), "run.random.device: expected a tensor, not a int"),
        (setter("run.gradients", {"0.weight": [1, "x", 1]}), r"run.gradients.0.weight\[1\]: expected a number"),
        (setter("run.buffers.x", 1), "run.buffers.x: expected a tensor, not a int"),
        (setter("run.configs", {"../../evil.json": {}}), "is none of config.json, generation_config.json"),
        (setter("run.configs", {"config.json": {"architectures": 3}}), "architectures: expected a list, not 3"),
        (setter("run.configs", {"config.json": {"a": {"$complex": [0, 1]}}}), "expected what JSON has words for"),
        (setter("run.objects", []), "the states of 0 registered objects, and 1 are registered"),
        (setter("run.client_state", {"$none": 1}), r"\$none: this program does not know it"),
        (setter("run.client_state", {"$tensor": ["quint8", [4], 0, 4]}), r"\$tensor\[0\]: 'quint8' is none of"),
        (setter("run.client_state", {"$tensor": ["uint8", [1 << 60], 0, 4]}), "it has 4 bytes, not"),
        (
            setter("run.client_state", {"$tensor": ["float32", [1 << 50, 0, 1 << 50], 0, 0]}),
            "more elements than can be",
        ),
        (setter("run.client_state", {"$array": ["|O", [1], 0, 8]}), "it is no dtype of numbers or letters"),
        (setter("run.client_state", {"$bytes": [0, 4]}), "is not what comes next of its"),
        (setter("run.client_state", 1), "bytes of memory belong to nothing"),
        (setter("run.client_state", [[]] * 1 + [{"$set": [[]]}]), "unhashable"),
    ],
)
def test_a_crafted_description_changes_nothing_and_is_named(
    saved: Path, tmp_path: Path, engine: OffloadEngine, change: Change, words: str
):
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with pytest.raises(OffloadError, match=words) as error:
        engine.load_checkpoint(crafted(saved, tmp_path / "c", change), "t")
    assert isinstance(error.value, (StorageCorrupt, ConfigError)), error.value
    after = engine.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_an_extent_larger_than_its_tile_is_not_read_over_its_end(saved: Path, tmp_path: Path, engine: OffloadEngine):
    def larger(manifest: Manifest) -> Manifest:
        content, memory = text_of(manifest.metadata)
        setter("units.0.tiles.0.extent", len(manifest.entries))(content)
        entry = Entry(16 << 20, 1, 0, 0)
        return replace(manifest, entries=(*manifest.entries, entry), metadata=with_text(content, memory))

    path = crafted(saved, tmp_path / "c", of_manifest=larger)
    (path / "t" / "data.0").unlink()
    with (path / "t" / "data.0").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(StorageCorrupt, match=r"tiles\[0\]: extent \d+ has 16777216 bytes, and the record"):
        engine.load_checkpoint(path, "t")


def test_an_extent_that_no_write_has_filled_is_refused_before_anything_is_replaced(
    saved: Path, tmp_path: Path, engine: OffloadEngine
):
    def never_written(manifest: Manifest) -> Manifest:
        first, *others = manifest.entries
        return replace(manifest, entries=(replace(first, generation=0), *others))

    with pytest.raises(StorageCorrupt, match="extent 0 is no part of the generation"):
        engine.load_checkpoint(crafted(saved, tmp_path / "c", of_manifest=never_written), "t")


def test_a_registered_object_that_refuses_its_state_is_named(saved: Path, tmp_path: Path):
    path = crafted(saved, tmp_path / "c", setter("run.objects.0", None))
    with (
        fuzz_files.make_engine(1) as engine,
        pytest.raises(OffloadError, match="a registered StepLR does not take the state"),
    ):
        engine.load_checkpoint(path, "t")


def test_a_whole_checkpoint_is_taken(saved: Path, tmp_path: Path):
    with fuzz_files.make_engine(1) as engine:
        found = engine.load_checkpoint(crafted(saved, tmp_path / "c"), "t")
        assert found["a"].equal(torch.ones(3)) and engine.global_step == 1


def test_an_export_writes_nothing_outside_of_its_target(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    evil = tmp_path / "evil.json"
    for name in (str(evil), "../evil.json", "x/../../evil.json"):
        path = crafted(saved, tmp_path / str(len(name)), setter("run.configs", {name: {"a": 1}}))
        assert main(["export", str(path / "t"), str(tmp_path / "out")]) == 1
        assert "is none of config.json" in capsys.readouterr().err
    assert not evil.exists() and not (tmp_path / "out").exists()


# Memory.


@pytest.mark.parametrize("item", ['{"$tensor":["uint8",[0],0,0]},', "[],", '{"a":[]},', '{"$set":[]},'])
def test_text_that_becomes_far_more_than_it_is_does_not(item: str):
    text = ("[" + item * ((4 << 20) // len(item)) + "0]").encode()
    data = struct.pack("<Q", len(text)) + text
    tracemalloc.start()
    try:
        with pytest.raises(StorageCorrupt, match="its values would take more than"):
            decode(data, "it")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    finally:
        tracemalloc.stop()


def test_many_units_take_a_few_times_their_text():
    tile = {"start": 0, "stop": 2048, "nbytes": 1 << 30, "extent": 1 << 30, "parts": []}
    parameter = {"name": "a", "shape": [1 << 30, 1 << 20], "offset": 1 << 40, "trainable": True}
    unit = {
        **{"name": "u", "numel": 2048, "trainable_numel": 2048, "parameters": [parameter] * 5000, "weights": [0]},
        **{"tiles": [tile] * 5000, "gradients": None},
    }
    text = json.dumps({"format": 1, "precision": "fp32", "optimizer": None, "units": [unit]}).encode()
    data = struct.pack("<Q", len(text)) + text
    tracemalloc.start()
    try:
        with pytest.raises(StorageCorrupt, match="run: it is not there"):
            Description.decode(data, "it")
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data)
    finally:
        tracemalloc.stop()


def test_memory_that_is_referred_to_twice_is_held_once():
    part = {"$bytes": [0, 1000]}
    text = json.dumps([part] * 1000).encode()
    with pytest.raises(StorageCorrupt, match="is not what comes next of its 1,000 bytes"):
        decode(struct.pack("<Q", len(text)) + text + bytes(1000), "it")


def test_what_would_be_refused_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "SLACK_BYTES", 1 << 12)
    with (
        fuzz_files.make_engine(0) as engine,
        pytest.raises(ConfigError, match="client_state takes so many small values"),
    ):
        engine.save_checkpoint(tmp_path, client_state=[[] for _ in range(10_000)])
    assert not any(tmp_path.iterdir())


def test_units_of_many_parameters_and_tiles_come_back(tmp_path: Path):
    """They are read piece by piece."""
    parameters = tuple(SavedParameter(f"layers.{i}.weight", (256,), 256 * i, True) for i in range(4000))
    parts = tuple(TilePart(f"layers.{i}.weight", "", 512 * i, (256,), torch.uint16) for i in range(4000))
    tile = SavedTile(0, 1_024_000, 2_048_000, 2, parts)
    unit = SavedUnit("u", 1_024_000, 1_024_000, parameters, (0,), (tile,), None)
    run = {
        **{"step": 1, "num_backwards": 0, "has_other_gradients": False, "loss_scale": None, "random": None},
        **{"gradient_dtype": torch.float32, "groups": [], "states": {}, "gradients": {}, "objects": []},
        "client_state": None,
    }
    description = Description("bf16", {"optimizer": "it", "moments": "fp32"}, SavedUnits([unit]), run)
    found = Description.decode(description.encode(), "it")
    assert found.units == description.units
    assert found.run == {**run, "groups": (), "objects": ()}


class _Phase(IntEnum):
    WARM = 1


_Point = namedtuple("_Point", "x y")

_KEPT: list[Any] = [
    *(Counter([3, 4, 4]), Counter({"$a": 1}), OrderedDict(b=1, a=2), OrderedDict([(2, 1)]), defaultdict(int, {1: 2})),
    *(bytearray(b"ab"), bytearray(), torch.Size([2, 3]), np.str_("a")),
]
_SIMPLER: list[tuple[Any, Any]] = [
    *((_Phase.WARM, 1), (_Point(1, 2), (1, 2)), (defaultdict(lambda: 5, a=1), {"a": 1}), (np.str_(""), "")),
    (type("Own", (dict,), {})(a=1), {"a": 1}),
]


def test_every_kind_of_value_comes_back():
    value = {
        **{"tensor": torch.arange(6.0).view(2, 3), "empty": torch.empty(0, 3), "truth": torch.tensor([True, False])},
        **{
            "array": np.arange(3.0),
            "words": np.array(["ab", "c"]),
            "number": np.float32(2.5),
            "keys": {1: 2, (3, 4): 5},
        },
        **{"tuple": (1, [None, 1.5]), "set": {1, 2}, "bytes": b"xx", "complex": 1j, "dtype": torch.bfloat16},
    }
    found = decode(encode(value, "it"), "it")
    assert found.keys() == value.keys()
    for name, item in value.items():
        assert type(found[name]) is type(item)
        assert (
            np.array_equal(found[name], item)
            if name in ("array", "words")
            else torch.equal(found[name], item)
            if (isinstance(item, torch.Tensor))
            else found[name] == item
        )
    window = decode(encode(deque([1, 2], maxlen=3), "it"), "it")
    assert (window, window.maxlen) == (deque([1, 2]), 3)
    for kept in _KEPT:
        found = decode(encode(kept, "it"), "it")
        assert (type(found), found) == (type(kept), kept)
    assert decode(encode(defaultdict(list, a=[1]), "it"), "it")["b"] == []
    for simpler, plain in _SIMPLER:
        with pytest.warns(UserWarning, match="^it is .*loading gives a plain"):
            found = decode(encode(simpler, "it"), "it")
        assert (type(found), found) == (type(plain), plain)
    with pytest.warns(UserWarning, match="it is a tensor of torch.sparse_coo"):
        assert decode(encode(torch.eye(2).to_sparse(), "it"), "it").equal(torch.eye(2))
    assert decode(encode(torch.tensor([1j]).conj(), "it"), "it").equal(torch.tensor([-1j]))
    with pytest.raises(ConfigError, match="ndarray, which a checkpoint cannot hold"):
        encode(np.zeros(2, dtype=[("field", "i4")]), "it")
    encoded = Encoded({"a": value, "b": 1}, "it")
    assert len(encoded.join()) == encoded.nbytes
    with pytest.raises(Refused, match="cut short"):
        Decoder(encoded.join()[:20])


# Weights files.


def header(content: Any, data: int = 8) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


F32 = {"dtype": "F32", "shape": [1]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header({"a": {**F32, "data_offsets": [0, 4]}, "b": {**F32, "data_offsets": [0, 4]}}), "overlap, or leave"),
        (
            header(
                {name: {**F32, "data_offsets": at} for name, at in zip("abc", ([0, 4], [2, 6], [8, 12]), strict=True)},
                12,
            ),
            "overlap, or leave bytes out",
        ),
        (header({"a": {**F32, "shape": [-1, -1], "data_offsets": [0, 8]}}), r"shape\[0\]: -1 is not between"),
        (header({"a": {**F32, "shape": [1 << 62, 4], "data_offsets": [0, 8]}}), r"shape\[0\]: .* is not between"),
        (header({"a": {**F32, "shape": [True, 2], "data_offsets": [0, 8]}}), "expected a whole number, not True"),
        (header({"a": {**F32, "shape": [2.0], "data_offsets": [0, 8]}}), "expected a whole number, not 2.0"),
        (header({"a": {**F32, "shape": "ab", "data_offsets": [0, 8]}}), "expected a list, not 'ab'"),
        (header({"a": {**F32, "dtype": ["F32"], "data_offsets": [0, 8]}}), "a list of 1 is none of F64"),
        (header({"a": {**F32, "data_offsets": [0, 4, 8]}}), "expected a list of 2"),
        (header({"__metadata__": {"a": 1}}), "__metadata__.a: expected a string"),
        (header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}'), "a name is there twice: 'a'"),
        (header(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "half of a letter"),
        (header(b"[" * 100_000), r"expected \{"),
        (header(b'{"a":' + b"[" * 100_000), "too deep"),
        (header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 5000 + b"]}}"), "digits|beyond"),
    ],
)
def test_a_crafted_weights_file_is_refused_by_its_field(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=words):
        Weights(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"weight_map": {"a": ".."}}, "'..' is not the name of a file"),
        ({"weight_map": {"a": "x\0"}}, "is not the name of a file"),
        ({"weight_map": {"a": ["w"]}}, "weight_map.a: expected a string"),
        ({"weight_map": []}, r"weight_map: expected \{"),
        ({}, "it has no weight_map"),
        ({"weight_map": {"a": "w" * 5000}}, "can have at most 255"),
    ],
)
def test_a_crafted_index_is_refused_by_its_field(tmp_path: Path, content: Any, words: str):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=words):
        Weights(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(WeightsError, match="it is not a regular file"):
        Weights(path)


# One room.

_PARSING = re.compile(
    r"json\.loads?\(|pickle\.(loads?\(|_?Unpickler)|torch\.load\(|frombuffer\(|unpack(_from)?\(|\.read_(text|bytes)\(|open\(\"rb?\""
)

_PARSERS = {
    "offload/encoding.py": "the memory behind checked text",
    "swapper/manifest.py": "a layout of numbers, each with its bound",
    "offload/checkpoint/dcp/pickled.py": "a few classes alone",
    "offload/checkpoint/dcp/reader.py": "weights_only, and a field of a zip archive",
    "offload/checkpoint/hugging_face.py": "what a model's config has just said",
    "offload/checkpoint/publish.py": "what was written by this process in a hidden folder",
    "offload/ranks/world.py": "what this rank tells, and what the kernel says",
    "offload/ranks/topology.py": "what the kernel says",
    "offload/ranks/host_cores.py": "what the kernel says",
    "swapper/owner.py": "what the kernel says",
}
"""Beside the room: who parses, and what."""


def test_nothing_but_one_room_parses_files_that_others_may_have_written():
    root = Path(__file__).parents[2]
    rooms = ("swapper", "offload/checkpoint", "offload/birth", "offload/tiers", "offload/ranks", "offload/encoding.py")
    found = {
        str(path.relative_to(root))
        for room in rooms
        for path in ((root / room).rglob("*.py") if (root / room).is_dir() else [root / room])
        if path.parent.name != "checked" and _PARSING.search(path.read_text())
    }
    assert found == _PARSERS.keys()


# All of it, at random.


def test_a_slice_of_the_campaign():
    script = Path(fuzz_files.__file__)
    ended = forked.run_script(script, "--seed", "11", "--count", "700", "--every", "15")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["wrong"] == []
    assert found["inputs"] == 700 and len(found["tries"]) == 17 and sum(found["taken"].values()) > 50


def test_the_model_of_the_campaign_has_what_it_is_there_for():
    """Parameters that are trained and frozen in one unit, and buffers."""
    model = fuzz_files.make_model(0)
    assert {parameter.requires_grad for parameter in model[0].parameters()} == {True, False}
    assert any(isinstance(module, nn.BatchNorm1d) for module in model)
