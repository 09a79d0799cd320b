"""``torch.distributed.checkpoint`` of one process: what torch writes an engine takes up, and the other way round."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from births import assert_same
from tiny import Tiny, batches, loss_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from offload import ConfigError, OffloadEngine, WeightsError
from offload.checkpoint.dcp import writer as dcp_writer
from offload.checkpoint.dcp.reader import DistributedReader
from offload.checkpoint.dcp.writer import boxes
from offload.cli import main
from offload.optim.moments import read_moments, scale_name

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Odd(nn.Module):
    """A tied weight, a frozen layer, buffers, an extra state, a convolution, a scalar and a parameter of nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(17, 6)
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.norm
        self.seen = seed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.norm(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        return self.head(self.frozen(x) * self.gain)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    found = []
    for tokens, targets in batches(last, vocab=17)[first:]:
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train(engine: OffloadEngine, first: int, last: int) -> list[float]:
    found = []
    for tokens, targets in batches(last, vocab=17)[first:]:
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": of_model, "optimizer": of_optimizer}


def save(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def tree(folder: Path) -> dict[str, Any]:
    """All of a DCP, as torch reads it."""
    dcp_to_torch_save(folder, folder.parent / "all.pt")
    return torch.load(folder.parent / "all.pt")


def everything(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    """Weights, buffers and states; of 16-bit weights also the masters."""
    found = {name: value.clone() for name, value in engine.state_dict().items() if torch.is_tensor(value)}
    for index, states in engine.optimizer.state_dict()["state"].items():
        for name, value in states.items():
            in_codes = scale_name(name) in states  # of which several may be one number
            number = read_moments(name, states, 0, value.numel()) if in_codes else torch.as_tensor(value).clone()
            found.update({} if name.endswith("_scale") else {f"{index}.{name}": number})
    return found


# With plain torch.


def _as_tutorial(state: dict[str, Any]) -> dict[str, Any]:
    return {"app": state, "epoch": 3}


def _as_torchtitan(state: dict[str, Any]) -> dict[str, Any]:
    return {**state["model"], "optimizer": state["optimizer"]}


@pytest.mark.parametrize(
    ("arrange", "options"),
    [
        (dict, {}),
        (_as_tutorial, {}),
        (_as_torchtitan, {"flatten_optimizer_state_dict": True}),
        (dict, {"flatten_optimizer_state_dict": True}),
    ],
)
def test_a_run_of_torch_goes_on_in_an_engine(
    tmp_path: Path, arrange: Callable[[dict[str, Any]], dict[str, Any]], options: dict[str, bool]
):
    model = Odd()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, weight_decay=0.1)
    train_plain(model, optimizer, 0, 2)
    save(arrange(state_of(model, optimizer, **options)), tmp_path / "dcp")
    with OffloadEngine(Odd(seed=1), precision="fp32", lr=7.0) as engine:
        train(engine, 0, 1)
        engine.load_dcp(tmp_path / "dcp")
        assert_same(dict(model.state_dict()) | {"_extra_state": torch.ones(0)}, _with_extra(engine.module))
        assert engine.module.seen == 0 and engine.global_step == 2
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.1
        assert train(engine, 2, 5) == pytest.approx(train_plain(model, optimizer, 2, 5), rel=1e-6)


def _with_extra(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value if torch.is_tensor(value) else torch.ones(0) for name, value in model.state_dict().items()}


def test_a_run_of_an_engine_goes_on_in_torch(tmp_path: Path):
    with OffloadEngine(Odd(), precision="fp32", lr=1e-2) as engine:
        before = train(engine, 0, 2)
        engine.save_dcp(tmp_path / "dcp")
        after = train(engine, 2, 5)
    model = Odd()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    assert train_plain(model, optimizer, 0, 2) == pytest.approx(before, rel=1e-6)
    model = Odd(seed=1)
    optimizer = torch.optim.AdamW(trained(model), lr=7.0)
    state = state_of(model, optimizer)
    del state["optimizer"]["state"]["nothing"]  # which has no elements to be updated
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state["optimizer"]["state"]["nothing"] = {}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train_plain(model, optimizer, 2, 5) == pytest.approx(after, rel=1e-6)


def test_a_tied_weight_has_all_its_names_and_its_bytes_once(tmp_path: Path):
    with OffloadEngine(Odd(), optimizer=None, precision="fp32") as engine:
        engine.save_dcp(tmp_path / "dcp")
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    places = {index.fqn: (place.relative_path, place.offset) for index, place in metadata.storage_data.items()}
    assert places["model.embed.weight"] == places["model.head.weight"]
    found = tree(tmp_path / "dcp")
    assert torch.equal(found["model"]["embed.weight"], found["model"]["head.weight"])
    assert torch.equal(found["model"]["norm.running_mean"], found["model"]["again.running_mean"])
    assert "optimizer" not in found and found["model"]["_extra_state"] == {"seen": 0}


def test_weights_without_states_are_taken_where_that_is_said(tmp_path: Path):
    model = Odd()
    save({"model": model.state_dict()}, tmp_path / "dcp")
    with OffloadEngine(Odd(seed=1), precision="bf16", lr=1e-2) as engine:
        train(engine, 0, 2)
        before = everything(engine)
        with pytest.raises(WeightsError, match=r"no optimizer states: load_dcp\(dir, states=False\)"):
            engine.load_dcp(tmp_path / "dcp")
        assert_same(everything(engine), before)
        engine.load_dcp(tmp_path / "dcp", states=False)
        states = engine.optimizer.state_dict()["state"]
        masters = [states[index]["master"] for index in sorted(states)]
        stepped = [parameter for parameter in trained(model) if parameter.numel()]
        assert all(map(torch.equal, masters, stepped))
        moments = {name: value for name, value in before.items() if "exp_avg" in name or name.endswith("step")}
        assert_same({name: everything(engine)[name] for name in moments}, moments)
        assert engine.global_step == 2
    with OffloadEngine(Odd(seed=1), optimizer=None, precision="fp32") as engine:
        engine.load_dcp(tmp_path / "dcp")
        assert_same(_with_extra(engine.module), _with_extra(model))


# Formats.


@pytest.mark.one_in(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        {"moments_dtype": "bf16"},
        {"moments_dtype": "int8"},
        {"optimizer_options": {"amsgrad": True}},
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
        {"optimizer": "sgd"},
        {"optimizer": torch.optim.Adafactor},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()),
)
def test_all_of_an_engine_comes_back(tmp_path: Path, precision: str, options: dict[str, Any]):
    make = lambda: OffloadEngine(Odd(), precision=precision, lr=1e-2, nvme_path=tmp_path, **options)  # noqa: E731
    with make() as engine:
        train(engine, 0, 3)
        engine.save_dcp(tmp_path / "dcp")
        expected = everything(engine)
        later = train(engine, 3, 5)
    with make() as engine:
        train(engine, 0, 1)
        engine.load_dcp(tmp_path / "dcp")
        assert_same(everything(engine), expected)
        if precision != "fp16":  # whose loss scale is the engine's
            assert train(engine, 3, 5) == later


def test_the_export_of_a_checkpoint_has_the_same_tree(tmp_path: Path):
    with OffloadEngine(Tiny(), precision="bf16", lr=1e-3, nvme_path=tmp_path) as engine:
        for tokens, targets in batches(2):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.save_dcp(tmp_path / "own")
        engine.save_checkpoint(tmp_path / "saved")
    arguments = (tmp_path / "saved", tmp_path / "exported", "--format", "dcp", "--dtype", "fp32", "--states")
    assert main(["export", *map(str, arguments)]) == 0
    own, exported = tree(tmp_path / "own"), tree(tmp_path / "exported")
    assert own["optimizer"]["param_groups"] == exported["optimizer"]["param_groups"]
    assert_same(own["model"], exported["model"])
    assert own["optimizer"]["state"].keys() == exported["optimizer"]["state"].keys()
    for name, states in own["optimizer"]["state"].items():
        assert_same(states, exported["optimizer"]["state"][name])


def test_a_range_of_a_tensor_is_a_few_boxes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dcp_writer, "PART_NUMEL", 7)
    for shape in ((), (1,), (9,), (0, 4), (3, 4), (5, 1), (2, 3, 4), (2, 1, 11), (3, 2, 2, 2)):
        values = torch.arange(math.prod(shape)).view(shape)
        for start, stop in itertools.combinations(range(values.numel() + 1), 2):
            found = []
            for offsets, sizes in boxes(shape, start, stop):
                box = values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
                assert box.shape == sizes and 0 < box.numel() <= 7
                found += box.flatten().tolist()
            assert found == list(range(start, stop))
    assert list(boxes((0, 4), 0, 0)) == [((0, 0), (0, 4))] and not list(boxes((3, 4), 5, 5))


class Chunks(dcp.DefaultSavePlanner):
    """Saves tensors in chunks, as a mesh of ranks does. ``cuts``: offsets and sizes, by key."""

    def __init__(self, cuts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]) -> None:
        super().__init__()
        self.cuts = cuts

    def create_local_plan(self) -> SavePlan:
        plan, items = super().create_local_plan(), []
        for item in plan.items:
            data = item.tensor_data
            for offsets, sizes in self.cuts[item.index.fqn]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                index, part = MetadataIndex(item.index.fqn, offsets), replace(data, chunk=chunk)
                items.append(replace(item, index=index, type=WriteItemType.SHARD, tensor_data=part))
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        chunk = write_item.tensor_data.chunk
        spans = zip(chunk.offsets, chunk.sizes, strict=True)
        return self.state_dict[write_item.index.fqn][tuple(slice(at, at + size) for at, size in spans)]


def test_any_range_is_read_from_chunks_of_any_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dcp_writer, "PART_NUMEL", 16)
    tensors = {
        "rows": torch.randn(11, 3),
        "columns": torch.randn(6, 10),
        "blocks": torch.randn(4, 6, 5, dtype=torch.float64),
        "turned": torch.randn(7, 5).t(),
        "strided": torch.randn(8, 6)[:, ::2].bfloat16(),
        "one": torch.tensor(3.0),
    }
    cuts = {
        "rows": [((5, 0), (6, 3)), ((0, 0), (5, 3))],
        "columns": [((0, start), (6, size)) for start, size in ((0, 4), (4, 4), (8, 2))],
        "blocks": [((a, b, c), (2, 3, 3 - c // 2)) for a in (0, 2) for b in (0, 3) for c in (0, 3)],
        "turned": [((0, 0), (5, 7))],
        "strided": [((0, 0), (8, 3))],
        "one": [((), ())],
    }
    dcp.save(dict(tensors), checkpoint_id=tmp_path, planner=Chunks(cuts), no_dist=True)
    reader = DistributedReader(tmp_path)
    for name, tensor in tensors.items():
        flat = tensor.flatten()
        for start, stop in itertools.combinations(range(0, flat.numel() + 1, 1 if flat.numel() < 30 else 7), 2):
            target = torch.zeros(stop - start)
            reader.read(name, start, target)
            assert torch.equal(target, flat[start:stop].float()), (name, start, stop)
    reader.close()


# What does not fit, and what is not whole.


def _of(model: nn.Module, **options: Any) -> Callable[[Path], None]:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, **options)
    return lambda folder: save(state_of(model, optimizer), folder)


def _changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        model = Odd()
        state = state_of(model, torch.optim.AdamW(trained(model)))
        change(state)
        save(state, folder)

    return write


def _by_number(folder: Path) -> None:
    model = Odd()
    optimizer = torch.optim.AdamW(trained(model))
    train_plain(model, optimizer, 0, 1)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder)


def _cut_off(folder: Path) -> None:
    _of(Odd())(folder)
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])


def _torn(folder: Path) -> None:
    _of(Odd())(folder)
    (folder / ".metadata").write_bytes(b"?")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_of(nn.Linear(3, 3)), "12 (gain, nothing, embed.weight, ...) are not there"),
        (_of(nn.Sequential(Odd())), "are not there"),
        (_changed(lambda state: state["model"].pop("conv.bias")), "conv.bias is not there"),
        (_changed(lambda state: state["model"].pop("norm.running_var")), "norm.running_var is not there"),
        (_changed(lambda state: state["model"].update(more=torch.ones(1))), "model.more is there and not in the model"),
        (
            _changed(lambda state: state["model"].update({"conv.bias": torch.ones(7)})),
            "model.conv.bias is of shape (7,) there, and (6,) here",
        ),
        (
            _changed(lambda state: state["model"].update({"conv.bias": torch.ones(6, dtype=torch.int64)})),
            "model.conv.bias is torch.int64 there, and a weight here",
        ),
        (
            _changed(lambda state: state["optimizer"]["state"]["gain"].pop("exp_avg_sq")),
            "the optimizer here has a state exp_avg_sq, and gain has none there",
        ),
        (_of(Odd(), amsgrad=True), "is there, and the optimizer here has no state max_exp_avg_sq"),
        (
            _changed(lambda state: state["optimizer"]["param_groups"][0]["params"].remove("gain")),
            "no parameter group there has the 7 parameters",
        ),
        (_by_number, "as get_state_dict of torch.distributed.checkpoint.state_dict does"),
        (lambda folder: None, "there is no file .metadata"),
        (_cut_off, "is not whole: __0_0.distcp has"),
        (_torn, ".metadata is damaged"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, write: Callable[[Path], None], words: str):
    write(tmp_path / "dcp")
    with OffloadEngine(Odd(seed=1), precision="bf16", lr=1e-2) as engine:
        train(engine, 0, 1)
        before = everything(engine)
        with pytest.raises(WeightsError) as caught:
            engine.load_dcp(tmp_path / "dcp")
        assert words in str(caught.value) and "dcp" in str(caught.value)
        assert_same(everything(engine), before)
        train(engine, 1, 2)


def test_damage_that_shows_while_it_is_read_ends_the_engine(tmp_path: Path):
    save({"model": Tiny(8).state_dict()}, tmp_path / "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    with OffloadEngine(Tiny(8), precision="fp32") as engine:
        for _ in range(2):
            with pytest.raises(WeightsError, match=r"embed.weight at .* is damaged"):
                engine.load_dcp(tmp_path / "dcp", states=False)


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path):
    (tmp_path / "notes").write_text("mine")
    with OffloadEngine(Odd(), precision="fp32") as engine, pytest.raises(ConfigError, match="has other files in it"):
        engine.save_dcp(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]


# Whenever the machine stops.


class Stopped(BaseException):
    pass


def test_one_of_two_checkpoints_is_whole_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every change of a name is the last one, in turns."""
    num_calls, stop_at = 0, math.inf

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > stop_at:
                raise Stopped
            return call(*arguments, **options)

        return counting

    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr("shutil.rmtree", counted(shutil.rmtree))
    with OffloadEngine(Odd(), precision="fp32", lr=1e-2) as engine:
        engine.save_dcp(tmp_path / "dcp")
        before = tree(tmp_path / "dcp")["model"]["conv.bias"]
        train(engine, 0, 1)
        seen = []
        while True:
            num_calls, stop_at = 0, len(seen)
            try:
                engine.save_dcp(tmp_path / "dcp")
            except Stopped:
                pass
            else:
                break
            found = tree(tmp_path / "dcp")["model"]["conv.bias"]
            seen.append(torch.equal(found, before))
            shutil.copytree(tmp_path / "dcp", tmp_path / f"stopped {len(seen)}")
        assert seen == sorted(seen, reverse=True) and not seen[-1] and seen[0]
        stop_at = math.inf
        engine.save_dcp(tmp_path / "dcp")
        left = [entry for entry in (tmp_path / "dcp").iterdir() if not entry.name.startswith(".unfinished")]
        assert len(left) == 2  # this process lives: its folders are not those of a dead one


# Memory.


def test_peak_memory_is_a_few_mib(tmp_path: Path):
    found = json.loads(forked.run_well(_PEAKS, tmp_path))
    assert found["whole"] > 45e6
    assert max(found["save"], found["load"], found["load of torch's"]) < 12 << 20, found


_PEAKS = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from offload import OffloadEngine

def status(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10

def peak(call):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

folder = Path(sys.argv[1])
model = nn.Sequential(nn.Embedding(30_000, 128), nn.Linear(128, 128))  # the embedding is one chunk of 15 MB
optimizer = torch.optim.AdamW(model.parameters())
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state, checkpoint_id=folder / "theirs", no_dist=True)
del optimizer, state
with OffloadEngine(model, precision="fp32", lr=1e-3) as engine:
    engine.load_dcp(folder / "theirs")
    found = {
        "save": peak(lambda: engine.save_dcp(folder / "ours")),
        "load": peak(lambda: engine.load_dcp(folder / "ours")),
        "load of torch's": peak(lambda: engine.load_dcp(folder / "theirs")),
        "whole": sum(path.stat().st_size for path in (folder / "ours").iterdir()),
    }
print(json.dumps(found))
"""
