"""Weights for others: what the engine and the command write, others read to the last bit, whatever stops it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from births import assert_same
from tiny import Block, Tiny, as_weight, batches, least_budget, loss_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from transformers_models import OF_TEXT, VOCAB, class_and_config, transformers

from offload import ConfigError, OffloadEngine
from offload.checkpoint import workplace
from offload.checkpoint.safetensors import writer
from offload.cli import main
from offload.testing.simulated import SimulatedDevice
from swapper import StorageFull

safetensors = pytest.importorskip("safetensors.torch")


def from_transformers(name: str) -> tuple[Any, nn.Module]:
    """The auto class, and a model of it."""
    kind, config = class_and_config(name)
    torch.manual_seed(0)
    return kind, kind.from_config(config)


def losses(engine: OffloadEngine, first: int, last: int) -> list[float]:
    found = []
    for index in range(first, last):
        torch.manual_seed(index)
        tokens = torch.randint(1, VOCAB, (2, 8), generator=torch.Generator().manual_seed(index))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def train(engine: OffloadEngine, steps: int = 3) -> None:
    for tokens, targets in batches(steps):
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def states_of(engine: OffloadEngine) -> list[dict[str, torch.Tensor]]:
    """Of each parameter, without its master, which is exported as the weight."""
    found = engine.optimizer.state_dict()["state"].values()
    return [{name: torch.as_tensor(value) for name, value in states.items() if name != "master"} for states in found]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, as the safetensors library reads them."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(safetensors.load_file(path))
    return found


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def offload(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


# The engine's weights.


@pytest.mark.one_in(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OF_TEXT)
def test_transformers_loads_what_an_engine_saves_in_the_middle_of_training(tmp_path: Path, name: str, precision: str):
    kind, model = from_transformers(name)
    options = {"precision": precision, "lr": 1e-3}
    with OffloadEngine(copy.deepcopy(model), **options) as engine:
        expected = losses(engine, 0, 4)
    budget = least_budget(copy.deepcopy(model), tmp_path, **options)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=budget, **options) as engine:
        found = losses(engine, 0, 2)
        engine.save_model(tmp_path / "one")
        engine.save_model(tmp_path / "shards", max_shard_bytes="50KB")
        engine.save_checkpoint(tmp_path / "saved", "here")
        weights = values(model)
        found += losses(engine, 2, 4)
    assert found == expected
    assert "model.safetensors" in names(tmp_path / "one")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    assert offload("export", tmp_path / "saved", tmp_path / "exported", "--max-shard-bytes", "100KB") == 0
    for folder in ("one", "shards", "exported"):
        loaded, report = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["unexpected_keys"] and not report["missing_keys"] and not report["mismatched_keys"]
        assert_same(values(loaded), weights)


def test_the_config_says_what_was_saved_and_the_models_own_stays(tmp_path: Path):
    _, model = from_transformers("llama")
    before = model.config.to_dict()
    with OffloadEngine(model, precision="fp32") as engine:
        engine.save_model(tmp_path, dtype="bf16")
        assert model.config.to_dict() == before
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]
    index_free = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert index_free.dtype == torch.bfloat16


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fp32_is_the_exact_master(tmp_path: Path, make_model: Callable[..., Tiny], precision: str):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    options = {"precision": precision, "lr": 1e-3, "nvme_path": tmp_path}
    budget = least_budget(make_model(), tmp_path, precision=precision)
    with OffloadEngine(make_model(), host_memory=budget, **options) as engine:
        train(engine)
        engine.save_model(tmp_path / "fp32", dtype="fp32")
        engine.save_model(tmp_path / "other", dtype="fp16" if precision == "bf16" else "bf16")
        engine.save_checkpoint(tmp_path / "saved")
        weights = values(engine.module)
    masters = read(tmp_path / "fp32")
    assert all(value.dtype == torch.float32 for value in masters.values())
    rounded = {k: as_weight(v, dtype) if precision == "bf16" else v.half() for k, v in masters.items()}
    assert_same(rounded, weights)
    assert not any(masters[name].equal(weights[name].float()) for name in masters)
    others = read(tmp_path / "other")
    other = torch.float16 if precision == "bf16" else torch.bfloat16
    assert_same(others, {name: value.to(other) for name, value in masters.items()})
    assert offload("export", tmp_path / "saved", tmp_path / "again", "--dtype", "fp32") == 0
    assert_same(read(tmp_path / "again"), masters)


class Mixed(nn.Module):
    """Statistics, buffers that are saved and not, and parameters that are frozen, never used or not floating-point."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(7, dtype=torch.int16))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.first(x))) * self.scalar


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_of_a_state_dict_is_there(tmp_path: Path, precision: str):
    torch.manual_seed(0)
    with OffloadEngine(Mixed(), precision=precision, lr=0.1) as engine:
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 8)).float().square().mean())
            engine.step()
        engine.save_model(tmp_path)
        expected = values(engine.module)
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert_same(loaded, expected)
    model = Mixed().to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    assert not any(model.load_state_dict(loaded, strict=True))
    assert_same(values(model), expected)


class Tied(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 256, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_written_once_under_its_first_name(tmp_path: Path):
    torch.manual_seed(0)
    with OffloadEngine(Tied(), lr=1e-3) as engine:
        train(engine)
        engine.save_model(tmp_path)
        expected = values(engine.module)
    assert "head.weight" not in read(tmp_path)
    model = Tied()
    safetensors.load_model(model, tmp_path / "model.safetensors")
    assert model.head.weight is model.embed.weight
    assert_same(values(model), expected)


class Huge(nn.Module):
    """An embedding that is cut into pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20_011, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.head = nn.Linear(64, 20_011, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_huge() -> Huge:
    torch.manual_seed(0)
    return Huge()


def test_pieces_are_joined(tmp_path: Path):
    options = {"precision": "bf16", "lr": 1e-3, "nvme_path": tmp_path}
    with OffloadEngine(
        make_huge(), host_memory=least_budget(make_huge(), tmp_path, precision="bf16"), **options
    ) as engine:
        assert any("[" in item.unit.name for item in engine.plan.units)
        train(engine, 2)
        engine.save_model(tmp_path / "weights")
        engine.save_model(tmp_path / "masters", dtype="fp32")
        engine.save_checkpoint(tmp_path / "saved")
        expected = values(engine.module)
        states = states_of(engine)
    assert_same(read(tmp_path / "weights"), expected)
    assert offload("export", tmp_path / "saved", tmp_path / "exported") == 0
    assert_same(read(tmp_path / "exported"), expected)
    assert (
        offload("export", tmp_path / "saved", tmp_path / "dcp", "--format", "dcp", "--dtype", "fp32", "--states") == 0
    )
    model = make_huge()
    found = {"model": model.state_dict(), "optimizer": {"state": {}}}
    for name, parameter in model.named_parameters():
        found["optimizer"]["state"][name] = {
            "exp_avg": torch.empty_like(parameter),
            "exp_avg_sq": torch.empty_like(parameter),
            "step": torch.tensor(0.0),
        }
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(found["model"], read(tmp_path / "masters"))
    for index, name in enumerate(dict(model.named_parameters())):
        assert_same(found["optimizer"]["state"][name], states[index])


def test_a_model_that_is_not_trained_is_saved(tmp_path: Path, make_model: Callable[..., Tiny]):
    with OffloadEngine(make_model(), optimizer=None, precision="bf16") as engine:
        engine.save_model(tmp_path, dtype="fp32")
        expected = {name: value.float() for name, value in values(engine.module).items()}
    assert_same(read(tmp_path), expected)


@pytest.mark.parametrize("device_memory", ["1GiB", "3MiB"])
def test_weights_on_a_device_are_saved(tmp_path: Path, make_model: Callable[..., Tiny], device_memory: str):
    device = SimulatedDevice(1 << 30)
    with OffloadEngine(
        make_model(), device=device, device_memory=device_memory, precision="bf16", lr=1e-3, nvme_path=tmp_path
    ) as engine:
        train(engine)
        engine.save_model(tmp_path / "bf16")
        engine.save_model(tmp_path / "fp32", dtype="fp32")
        expected = {name: value.cpu() for name, value in values(engine.module).items()}
    assert_same(read(tmp_path / "bf16"), expected)
    masters = read(tmp_path / "fp32")
    assert_same({name: as_weight(value, torch.bfloat16) for name, value in masters.items()}, expected)


def test_of_a_model_of_peft_the_adapter_is_saved(tmp_path: Path):
    peft = pytest.importorskip("peft")
    kind, base = from_transformers("llama")
    base.save_pretrained(tmp_path / "base")

    def make() -> Any:
        torch.manual_seed(1)
        base = kind.from_pretrained(tmp_path / "base")
        return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))

    model = make()
    with OffloadEngine(model, lr=1e-2, precision="fp32") as engine:
        losses(engine, 0, 3)
        engine.save_model(tmp_path / "adapter")
        expected = values(model)
    assert names(tmp_path / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_same(values(loaded), expected)
    with OffloadEngine(make(), precision="fp32") as engine:
        engine.module.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(ConfigError, match="2 adapters"):
            engine.save_model(tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_options_that_cannot_be_are_refused(tmp_path: Path, make_model: Callable[..., Tiny]):
    with OffloadEngine(make_model()) as engine:
        with pytest.raises(ConfigError, match=r"dtype: expected one of .*did you mean 'bf16'"):
            engine.save_model(tmp_path / "out", dtype="bfloat16")
        with pytest.raises(ConfigError, match="max_shard_bytes"):
            engine.save_model(tmp_path / "out", max_shard_bytes="many")
        (tmp_path / "file").touch()
        with pytest.raises(Exception, match="cannot be written to"):
            engine.save_model(tmp_path / "file")
        train(engine, 1)
    assert not (tmp_path / "out").exists()


# What others see while it is written.


KEPT = ("f_bsize", "f_blocks", "f_bfree", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax", "f_fsid")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, make_model, monkeypatch):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        train(engine, 1)
        engine.save_model(tmp_path / "saved")
        engine.save_checkpoint(tmp_path / "checkpoints")
        before, real = read(tmp_path / "saved"), os.statvfs
        train(engine, 1)

        def full(path: Any) -> SimpleNamespace:
            return SimpleNamespace(f_bavail=3, f_frsize=4096, **{k: getattr(real(path), k) for k in KEPT})

        monkeypatch.setattr(os, "statvfs", full)
        for place in ("saved", "new"):
            with pytest.raises(StorageFull, match=r"are needed, 12,288 bytes \(12.0 KiB\) are free"):
                engine.save_model(tmp_path / place)
        for form in ("safetensors", "dcp"):
            assert offload("export", tmp_path / "checkpoints", tmp_path / "exported", "--format", form) == 2
        monkeypatch.setattr(os, "statvfs", real)

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StorageFull, match="cannot reserve"):
            engine.save_model(tmp_path / "new")
        monkeypatch.undo()
        monkeypatch.setattr(writer, "_write", refuse)
        with pytest.raises(StorageFull, match="No space left"):
            engine.save_model(tmp_path / "new")
        monkeypatch.undo()
        assert names(tmp_path) == ["checkpoints", "saved"]
        assert names(tmp_path / "saved") == ["model.safetensors"]
        assert_same(read(tmp_path / "saved"), before)
        train(engine, 1)
        engine.save_model(tmp_path / "saved")
        assert_same(read(tmp_path / "saved"), values(engine.module))


class Killed(BaseException):
    """Stands for a signal that cannot be caught: nothing is cleared away after it."""


def visible(folder: Path) -> dict[str, torch.Tensor]:
    """The weights, as transformers would find them."""
    if (folder / "model.safetensors").exists():
        return safetensors.load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: safetensors.load_file(folder / file)[name] for name, file in index["weight_map"].items()}


@pytest.mark.each_value
@pytest.mark.parametrize("new", ["5GB", "500KB", "1500KB"])
@pytest.mark.parametrize("old", ["5GB", "500KB"])
def test_killed_at_any_moment_the_old_or_the_new_weights_are_there(tmp_path: Path, make_model, monkeypatch, old, new):
    calls = {"replace": Path.replace, "unlink": Path.unlink}
    link, left = os.link, 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*arguments, **options)

        return call

    with OffloadEngine(make_model(), lr=1e-3) as engine:
        states = []
        for _ in range(2):
            train(engine, 1)
            states.append(values(engine.module))
        engine.load_state_dict(states[0])
        engine.save_model(tmp_path / "old", max_shard_bytes=old)
        engine.load_state_dict(states[1])
        for moment in range(100):
            folder = tmp_path / str(moment)
            shutil.copytree(tmp_path / "old", folder)
            left = moment
            with monkeypatch.context() as patched:
                for name, real in calls.items():
                    patched.setattr(Path, name, counted(real))
                patched.setattr(os, "link", counted(link))
                patched.setattr(workplace, "_remove", lambda _: None)
                try:
                    engine.save_model(folder, max_shard_bytes=new)
                    break
                except Killed:
                    pass
            found = visible(folder)
            assert found["embed.weight"].equal(states[0]["embed.weight"]) or found["embed.weight"].equal(
                states[1]["embed.weight"]
            )
            assert_same(found, states[found["embed.weight"].equal(states[1]["embed.weight"])])
            assert len(list(folder.glob(".unfinished-*"))) == 1
            engine.save_model(folder, max_shard_bytes=new)
            assert_same(visible(folder), states[1])
            shutil.rmtree(folder)
        else:
            pytest.fail("it never came to an end")
        engine.save_model(tmp_path / "fresh", max_shard_bytes=new)
        assert [name for name in names(folder) if not name.startswith(".unfinished")] == names(tmp_path / "fresh")


def test_other_files_in_the_directory_stay(tmp_path: Path, make_model: Callable[..., Tiny]):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "deeper").mkdir()
    with OffloadEngine(make_model()) as engine:
        engine.save_model(tmp_path, max_shard_bytes="1MB")
        engine.save_model(tmp_path)
    assert names(tmp_path) == ["deeper", "model.safetensors", "tokenizer.json"]


_PEAKS = """
import json, sys
from pathlib import Path
import torch
from tiny import Block, least_budget
from torch import nn
from offload import OffloadEngine
from offload.cli import main

def peak(call):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

def status(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10

def export(*arguments):
    assert main(["export", *map(str, arguments)]) == 0

def make_large():  # 30 million parameters, 60 MB in bf16
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(30_000, 512), *(Block(512) for _ in range(7)))

folder = Path(sys.argv[1])
"""


def test_peak_memory_is_that_of_a_unit_and_a_tile(tmp_path: Path):
    saving = """
budget = least_budget(make_large(), folder, precision="bf16")
with OffloadEngine(make_large(), nvme_path=folder, host_memory=budget, precision="bf16") as engine:
    engine.backward(engine(torch.randint(0, 30_000, (1, 4))).square().mean())
    engine.step()
    engine.synchronize()
    found = {"budget": budget}
    for dtype in ("fp32", "bf16"):
        found[dtype] = peak(lambda: engine.save_model(folder / dtype, dtype=dtype, max_shard_bytes="50MB"))
    engine.save_checkpoint(folder / "saved")
print(json.dumps(found))
"""
    exporting = """
export(folder / "saved", folder / "warm", "--format", "dcp")
found = {
    "safetensors": peak(lambda: export(folder / "saved", folder / "a", "--dtype", "fp32")),
    "dcp": peak(lambda: export(folder / "saved", folder / "b", "--format", "dcp", "--dtype", "fp32", "--states")),
}
print(json.dumps(found))
"""
    found, exported = (
        json.loads(forked.run_well(_PEAKS + program, tmp_path).splitlines()[-1]) for program in (saving, exporting)
    )
    sizes = {path.name: sum(f.stat().st_size for f in path.iterdir()) for path in tmp_path.iterdir() if path.is_dir()}
    print(found, exported, sizes)
    assert sizes["fp32"] > 110e6 and sizes["b"] > 340e6
    assert found["budget"] < 90e6
    assert max(found["bf16"], found["fp32"]) < 16 << 20
    assert max(exported["safetensors"], exported["dcp"]) < 40 << 20


# Checkpoints for others.


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", torch.optim.Adamax, torch.optim.Adafactor], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_states_and_weights_come_back_through_torch(tmp_path: Path, make_model, precision: str, optimizer: Any):
    options = {"optimizer_options": {"momentum": 0.9}} if optimizer == "sgd" else {}
    with OffloadEngine(make_model(), optimizer=optimizer, precision=precision, lr=1e-3, **options) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_model(tmp_path / "weights", dtype="fp32")
        states = states_of(engine)
    arguments = ("export", tmp_path / "saved", tmp_path / "dcp", "--format", "dcp", "--dtype", "fp32")
    assert offload(*arguments, "--states") == 0
    assert offload(*arguments, "--states") == 0  # in place of the first
    assert names(tmp_path / "dcp") == [".metadata", "__1_0.distcp"]  # beside the first, until it was complete
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    assert_same(found["model"], read(tmp_path / "weights"))
    model = make_model()
    for index, name in enumerate(dict(model.named_parameters())):
        assert_same(
            {k: torch.as_tensor(v) for k, v in found["optimizer"]["state"][name].items()},
            states[index],
        )
    if optimizer == "adamw":
        own = torch.optim.AdamW(model.parameters())
        set_optimizer_state_dict(model, own, found["optimizer"])
        assert own.param_groups[0]["lr"] == 1e-3
        for index, expected in enumerate(states):
            assert_same(own.state_dict()["state"][index], expected)
    assert offload("export", tmp_path / "saved", tmp_path / "safetensors", "--dtype", "fp32") == 0
    assert_same(read(tmp_path / "safetensors"), found["model"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_in_8_bits_become_the_numbers_that_they_stand_for(tmp_path: Path, optimizer: str):
    with OffloadEngine(make_huge(), optimizer=optimizer, moments_dtype="int8", lr=1e-3) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
    with OffloadEngine(make_huge(), optimizer=optimizer, moments_dtype="fp32", lr=1e-3) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        states = states_of(engine)
    assert offload("export", tmp_path / "saved", tmp_path / "dcp", "--format", "dcp", "--states") == 0
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")["optimizer"]["state"]
    for index, name in enumerate(dict(make_huge().named_parameters())):
        assert_same({key: torch.as_tensor(value) for key, value in found[name].items()}, states[index])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama tied", "t5", "mixtral"])
def test_a_checkpoint_alone_becomes_a_model_in_another_process(tmp_path: Path, name: str):
    kind, model = from_transformers(name)
    model.generation_config.max_new_tokens = 7
    with OffloadEngine(model, precision="bf16", lr=1e-3) as engine:
        losses(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_model(tmp_path / "weights")
        expected = values(model)
    done = forked.run_module("offload", "export", tmp_path / "saved", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for config in ("config.json", "generation_config.json"):
        ours, own = (json.loads((tmp_path / folder / config).read_text()) for folder in ("out", "weights"))
        assert ours == own
    loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is type(model) and loaded.generation_config.max_new_tokens == 7
    assert_same(values(loaded), expected)


def test_a_config_of_another_library_is_exported_as_it_says(tmp_path: Path, make_model: Callable[..., Tiny]):
    for config, expected in (
        (
            SimpleNamespace(to_dict=lambda: {"$width": 128, "rates": [1e-3, None]}),
            {"$width": 128, "rates": [1e-3, None]},
        ),
        (SimpleNamespace(to_dict=lambda: {"made": object()}), None),
        (SimpleNamespace(), None),
    ):
        model = make_model()
        model.config = config
        with OffloadEngine(model, lr=1e-3) as engine:
            engine.save_checkpoint(tmp_path / "saved", "here")
        assert offload("export", tmp_path / "saved", tmp_path / "out") == 0
        if expected is None:
            assert not (tmp_path / "out" / "config.json").exists()
        else:
            assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected
        shutil.rmtree(tmp_path / "out")


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, make_model, capsys: pytest.CaptureFixture[str]):
    with OffloadEngine(make_model(), moments_dtype="int8", nvme_path=tmp_path, durable=1) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
        run = tmp_path / "run-1.store"
        assert offload("inspect", run) == 0
        assert "in use by process" in capsys.readouterr().out
        assert offload("export", run, tmp_path / "out") == 1
        assert "is in use by process" in capsys.readouterr().err
        assert offload("export", tmp_path / "saved", tmp_path / "dcp", "--format", "dcp") == 0
        expected = values(engine.module)
    assert offload("export", run, tmp_path / "out") == 0
    assert_same(read(tmp_path / "out"), expected)
    capsys.readouterr()
    for arguments, words in (
        ((tmp_path / "saved", tmp_path / "out", "--format", "dcp"), r"other files in it (model.safetensors)"),
        ((tmp_path / "nothing", tmp_path / "x"), "there is no directory"),
        ((tmp_path / "out", tmp_path / "x"), "there is no checkpoint in"),
        ((Path(__file__), tmp_path / "x"), "test_export.py is a file. "),
    ):
        assert offload("export", *arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert offload("export", tmp_path / "saved", tmp_path / "x", "--states") == 2
    assert "needs --format dcp" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# What is inside.


def test_inspect_tells_what_a_checkpoint_holds(tmp_path: Path, make_model, capsys: pytest.CaptureFixture[str]):
    options = {"precision": "bf16", "nvme_path": tmp_path, "gradient_accumulation_steps": 2}
    with OffloadEngine(make_model(), lr=3e-4, **options) as engine:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 10)
        engine.register_for_checkpointing(schedule)
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved", "early")
        train(engine, 3)
        engine.save_checkpoint(tmp_path / "saved", "late", client_state={"epoch": 3, "seen": torch.zeros(4)})
        parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    late = tmp_path / "saved" / "late"
    assert offload("inspect", late, "--verify") == 0
    text = capsys.readouterr().out
    for words in (
        "step            2", "precision       bf16", "adamw (exp_avg, exp_avg_sq)", "learning rate   0.0003",
        f"{parameters:,} in 29 tensors", "from 1 backward since the step", "python, numpy, torch", "T_max: int",
        "{epoch: int, seen: tensor float32 (4,)}", "all of it is whole",
    ):  # fmt: skip
        assert words in text, text
    assert all(len(line) <= 120 for line in text.splitlines()[1:])
    assert offload("inspect", late, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["parameters"], facts["tensors"]) == (2, parameters, 29)
    assert facts["bytes"]["weights"] >= 2 * parameters and facts["bytes"]["moments"] >= 8 * parameters
    assert facts["bytes"]["masters"] == facts["bytes"]["weights"] and facts["bytes"]["gradients"] > 0
    assert facts["disk_bytes"] == sum(entry.stat().st_blocks * 512 for entry in late.iterdir())
    assert facts["client_state"] == {"epoch": "int", "seen": "tensor float32 (4,)"}
    assert offload("inspect", tmp_path / "saved") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [["early", "1", "bf16"], ["late", "2", "bf16"]]
    assert "latest" in lines[3]


def test_damage_is_told_and_is_status_1(tmp_path: Path, make_model, capsys: pytest.CaptureFixture[str]):
    with OffloadEngine(make_model()) as engine:
        for tag in ("one", "two", "three"):
            train(engine, 1)
            engine.save_checkpoint(tmp_path, tag)
    with (tmp_path / "two" / "data.0").open("r+b") as file:
        file.write(b"?")
    (manifest,) = (tmp_path / "three").glob("generation.*")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert offload("inspect", tmp_path / "two") == 0  # nothing of it was read
    assert offload("inspect", tmp_path / "two", "--verify") == 1
    assert "weights of unit embed: read of extent 0" in capsys.readouterr().out
    assert offload("inspect", tmp_path / "three") == 1
    assert "damaged" in capsys.readouterr().err
    assert offload("inspect", tmp_path / "three", "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"] == "StorageCorrupt"
    assert offload("inspect", tmp_path, "--verify") == 1
    text = capsys.readouterr().out
    assert "two: weights of unit embed" in text and "three: manifest" in text and "whole" in text
    for form in ("safetensors", "dcp"):
        assert offload("export", tmp_path / "two", tmp_path / "out", "--format", form) == 1
        assert "gave wrong bytes" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert offload("inspect", tmp_path / "nothing") == 2


def test_buffers_are_in_a_checkpoint(tmp_path: Path):
    torch.manual_seed(0)
    with OffloadEngine(Mixed(), precision="bf16", lr=0.1) as engine:
        engine.backward(engine(torch.randn(4, 8)).float().square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        expected = values(engine.module)
    assert offload("export", tmp_path / "saved", tmp_path / "out") == 0
    found = read(tmp_path / "out")
    missing = expected.keys() - found.keys()
    assert missing <= {"codes"}  # no parameter that the engine holds
    assert_same(found, {name: value for name, value in expected.items() if name not in missing})
