"""Weights that are streamed from safetensors: the same bits as loaded in memory, and what happens to files that do not
fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import torch
from births import EVERYWHERE, assert_same, held
from safetensors.torch import load_file, save_file
from tiny import Tiny, train
from torch import nn

from offload import ConfigError, OffloadEngine, WeightsError, deferred_init
from offload.birth.loading import Loader


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def saved(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> Path:
    """The model's state dict in one file."""
    values = {name: value.to(dtype or value.dtype).contiguous() for name, value in model.state_dict().items()}
    save_file({name: value.clone() for name, value in values.items()}, path)
    return path


def in_shards(model: nn.Module, directory: Path, count: int = 3) -> Path:
    """The state dict in several files with an index, as Hugging Face has it."""
    values = model.state_dict()
    weight_map = {name: f"part-{index % count}.safetensors" for index, name in enumerate(values)}
    for file in set(weight_map.values()):
        save_file({name: values[name].clone() for name in values if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.each_value
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("built_in", "stored_in", "precision"),
    [
        (torch.float32, torch.float32, "fp32"),
        (torch.float32, torch.float32, "bf16"),  # the master gets all of the file's bits
        (torch.float32, torch.float32, "fp16"),
        (torch.bfloat16, torch.float32, "bf16"),  # as load_state_dict, which rounds to the model's dtype
        (torch.float32, torch.bfloat16, "fp32"),
        (torch.float32, torch.float64, "bf16"),
        (torch.bfloat16, torch.float16, "fp32"),
    ],
)
def test_weights_from_a_file_train_as_if_loaded_in_memory(
    built_in: torch.dtype, stored_in: torch.dtype, precision: str, place: dict[str, str], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    path = saved(Tiny(), tmp_path / "weights.safetensors", stored_in)
    model = Tiny().to(built_in)
    model.load_state_dict(load_file(path))
    with OffloadEngine(model, precision=precision) as engine:
        expected = train(engine)
    unborn = on_meta(Tiny).to(built_in)
    with OffloadEngine(unborn, weights=path, precision=precision, nvme_path=tmp_path, **place) as engine:
        losses, weights = train(engine)
    assert losses == expected[0]
    assert_same(weights, expected[1])


def test_an_index_a_directory_and_one_file_are_read_alike(tmp_path: Path) -> None:
    model = Tiny()
    directory = in_shards(model, tmp_path)
    for path in (
        directory,
        directory / "model.safetensors.index.json",
        str(saved(model, tmp_path / "one.safetensors")),
    ):
        with OffloadEngine(on_meta(Tiny), weights=path, precision="fp32") as engine:
            assert_same(held(engine), dict(model.state_dict()))


def test_a_model_in_memory_takes_its_weights_from_the_file_too(tmp_path: Path) -> None:
    model = Tiny()
    with OffloadEngine(Tiny(), weights=saved(model, tmp_path / "w.safetensors"), precision="fp32") as engine:
        assert_same(held(engine), dict(model.state_dict()))


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("step", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.tril(torch.ones(3, 3)), persistent=False)


def test_buffers_come_from_the_file_and_others_from_the_constructor(tmp_path: Path) -> None:
    model = WithBuffers()
    model.norm.running_mean.normal_()
    model.step += 7
    path = saved(model, tmp_path / "w.safetensors")
    with OffloadEngine(deferred_init(WithBuffers), weights=path, precision="fp32") as engine:
        assert_same(held(engine), {**model.state_dict(), "table": model.table})
    with pytest.raises(ConfigError, match="WithBuffers has table on the meta device"):
        OffloadEngine(on_meta(WithBuffers), weights=path, precision="fp32")


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 16), nn.Linear(16, 20_000, bias=False))
    model[2].weight = model[0].weight
    return model


def test_a_tied_weight_is_read_by_any_of_its_names(tmp_path: Path) -> None:
    values = tied().state_dict()
    for name, absent in (("0.weight", "2.weight"), ("2.weight", "0.weight"), ("0.weight", None)):
        path = tmp_path / f"{name}{absent}.safetensors"
        save_file({key: value.clone() for key, value in values.items() if key != absent}, path)
        with OffloadEngine(on_meta(tied), weights=path, precision="fp32", nvme_path=tmp_path) as engine:
            assert engine.module[0].weight is engine.module[2].weight
            assert_same(held(engine), dict(values))


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in tied().state_dict().items()}
    values["2.weight"][-1, -1] += 1
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"ties 0\.weight and 2\.weight to one weight, and they differ"):
        OffloadEngine(on_meta(tied), weights=tmp_path / "w.safetensors")


def test_all_that_does_not_fit_is_in_one_error_in_the_words_of_load_state_dict(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in Tiny().state_dict().items()}
    values["norms.weight"], values["more"] = values.pop("norm.weight"), torch.zeros(1)
    values["head.bias"] = torch.zeros(7)
    path = tmp_path / "w.safetensors"
    save_file(values, path)
    with pytest.raises(RuntimeError) as of_torch:
        Tiny().load_state_dict(values)
    model = on_meta(Tiny)
    with pytest.raises(WeightsError) as ours:
        OffloadEngine(model, weights=path)
    assert str(path) in str(ours.value)
    lines = [line.strip().rstrip(" .") for line in str(of_torch.value).splitlines()]
    assert len(lines) == 4
    said = [line.strip().rstrip(" .") for line in ours.value.args[0].splitlines()]
    assert said[0].endswith(lines[0])
    for line in lines[1:]:
        kind, _, names = line.partition(": ")
        theirs = next(other for other in said if other.startswith(kind))
        assert sorted(theirs.partition(": ")[2].split(", ")) == sorted(names.split(", "))
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())


def cut_off(directory: Path) -> Path:
    path = saved(Tiny(), directory / "w.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    return path


def too_long(directory: Path) -> Path:
    path = saved(Tiny(), directory / "w.safetensors")
    path.write_bytes(path.read_bytes() + b"0")
    return path


def cut_in_its_header(directory: Path) -> Path:
    path = saved(Tiny(), directory / "w.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    return path


def of_another_kind(directory: Path) -> Path:
    path = directory / "w.safetensors"
    torch.save(Tiny().state_dict(), path)
    return path


def with_header(header: bytes) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        path = directory / "w.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        return path

    return make


def without_a_shard(directory: Path) -> Path:
    in_shards(Tiny(), directory)
    (directory / "part-1.safetensors").unlink()
    return directory


def with_a_shard_that_lacks_a_name(directory: Path) -> Path:
    in_shards(Tiny(), directory)
    values = load_file(directory / "part-1.safetensors")
    values.popitem()
    save_file(values, directory / "part-1.safetensors")
    return directory


def with_a_damaged_index(directory: Path) -> Path:
    in_shards(Tiny(), directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map"')
    return directory


def with_a_path_to_elsewhere(directory: Path) -> Path:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    return directory


def with_other_files(directory: Path) -> Path:
    (directory / "pytorch_model.bin").touch()
    return directory


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"w\.safetensors is damaged: it is cut off, or too long: it should have"),
        (too_long, r"w\.safetensors is damaged: it is cut off, or too long"),
        (cut_in_its_header, r"w\.safetensors is damaged: it is cut off"),
        (of_another_kind, r"w\.safetensors is damaged: it is cut off, or no safetensors file"),
        (with_header(b"[1]"), r"damaged: header: expected \{ at letter 0"),
        (with_header(b"\xff\xfe"), r"damaged: it is no text"),
        (
            with_header(b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}'),
            "header.a.dtype: 'F4' is none of F64",
        ),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'),
            "8 bytes, which is not its shape",
        ),
        (with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}'), "overlap, or leave bytes out"),
        (with_header(b'{"a": {"dtype": "F32"}}'), "header.a.shape: it is not there"),
        (without_a_shard, r"names weights files that are not there: part-1\.safetensors"),
        (with_a_shard_that_lacks_a_name, r"in part-1\.safetensors, and the file does not have it"),
        (with_a_damaged_index, r"index\.json is damaged"),
        (with_a_path_to_elsewhere, "is not the name of a file in this directory"),
        (with_other_files, r"neither model\.safetensors nor .*save_pretrained"),
        (lambda directory: directory / "nothing.safetensors", r"cannot open the weights file .*nothing"),
        (lambda directory: Path("/dev/null"), r"/dev/null is damaged: it is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_before_anything_is_taken(
    damage: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    model = on_meta(Tiny)
    with pytest.raises(WeightsError, match=message) as error:
        OffloadEngine(model, weights=damage(tmp_path), nvme_path=tmp_path)
    assert str(tmp_path) in str(error.value) or "/dev/null" in str(error.value)
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())


def test_a_file_that_shrinks_while_it_is_read_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(Tiny(), tmp_path / "w.safetensors")
    store_unit = Loader._store_unit

    def shrink(loader: Loader, unit: object) -> None:
        path.write_bytes(path.read_bytes()[:1000]) if path.stat().st_size > 1000 else None
        store_unit(loader, unit)

    monkeypatch.setattr(Loader, "_store_unit", shrink)
    with pytest.raises(WeightsError, match=r"has no byte \d+ any more"):
        OffloadEngine(on_meta(Tiny), weights=path, nvme_path=tmp_path)


def test_no_bar_is_drawn_where_nobody_sees_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with OffloadEngine(on_meta(Tiny), weights=saved(Tiny(), tmp_path / "w.safetensors"), precision="fp32"):
        assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("way", ["file", "meta", "deferred"])
def test_the_peak_of_memory_is_the_budget_and_one_parameter(way: str, tmp_path: Path) -> None:
    """A file of 213 MiB, a budget of 48 MiB; the largest parameter has 40 MiB. By the kernel's count."""
    code = f"""
from pathlib import Path
import torch
from safetensors.torch import save_file
from torch import nn
from offload import OffloadEngine, deferred_init

WIDTH, VOCAB = 512, 20_480
path = Path({str(tmp_path)!r})

def make():
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(16)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB))

def peak_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

with torch.device("meta"):
    model = make()
options = dict(nvme_path=path, host_memory="48MiB", precision="bf16")
if {way!r} == "deferred":
    model = deferred_init(make)
if {way!r} == "file":
    weights = {{name: torch.zeros(1).expand(p.shape).contiguous() for name, p in model.named_parameters()}}
    save_file(weights, path / "w.safetensors")
    del weights
    options["weights"] = path / "w.safetensors"
OffloadEngine(nn.Linear(512, 512), nvme_path=path, precision="bf16").close()  # what is imported on the way
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
with OffloadEngine(model, **options):
    print((peak_bytes() - before) >> 20)
"""
    grown_mib = int(forked.run_well(code))
    allowed = {"file": 48 + 16 + 8, "meta": 48 + 40 + 12, "deferred": 48 + 40 + 12}[way]
    assert 0 < grown_mib <= allowed
