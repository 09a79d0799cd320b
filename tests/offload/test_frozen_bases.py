"""Frozen weights that were given as files: the files are the store, and are never written."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import forked
import pytest
import torch
from frozen_bases import FROZEN_BYTES, LEAST, WIDTH, Adapted, build, held, in_place, in_shards, steps, unborn
from torch import nn

from offload import ConfigError, OffloadEngine, StorageError
from offload.plan.plan import Tier
from swapper import WeightsChanged


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return in_shards(build().state_dict(), tmp_path / "base")


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


def test_a_base_in_place_gives_the_bits_of_one_in_memory_and_of_a_copied_one(base: Path, nvme: Path) -> None:
    with OffloadEngine(build(), precision="bf16", lr=1e-2) as engine:
        losses = steps(engine, range(3))
        expected = held(engine)
    with OffloadEngine(build(), precision="bf16", lr=1e-2, nvme_path=nvme, host_memory=LEAST) as engine:
        assert engine.plan.nvme_bytes["weights"] > FROZEN_BYTES
        assert steps(engine, range(3)) == losses
    with in_place(base, nvme) as engine:
        assert steps(engine, range(3)) == losses
        found = held(engine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_of_the_base_is_written_and_the_plan_says_where_it_is(base: Path, nvme: Path) -> None:
    before = {file: file.stat() for file in base.iterdir()}
    with in_place(base, nvme) as engine:
        plan = engine.plan
        trained = 2 * sum(item.unit.trainable_numel for item in plan.units)
        assert plan.nvme_bytes["weights"] == trained < FROZEN_BYTES / 4
        assert plan.in_place_bytes >= FROZEN_BYTES
        assert {file.path for file in plan.files} == {file for file in base.iterdir() if file.suffix != ".json"}
        assert "of frozen weights are read where they are, in" in str(plan)
        assert str(base / "part-0.safetensors") in str(plan)
        steps(engine, range(2))
        report = engine.report()
        assert report.nvme_read_bytes > FROZEN_BYTES
        assert report.nvme_write_bytes < FROZEN_BYTES / 2
    after = {file: file.stat() for file in base.iterdir()}
    assert all(after[file].st_mtime_ns == before[file].st_mtime_ns for file in before)


class _Model(nn.Module):
    """Frozen layers at both ends, and of its blocks the first ones frozen as well."""

    def __init__(self, num_frozen: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, WIDTH).requires_grad_(False)
        self.blocks = nn.Sequential(*(Adapted() for _ in range(8)))
        self.blocks[:num_frozen].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 300, bias=False).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_frozen", [0, 6])
def test_a_step_reads_what_the_plan_says(num_frozen: int, tmp_path: Path, nvme: Path) -> None:
    torch.manual_seed(0)
    base = in_shards(_Model(num_frozen).to(torch.bfloat16).state_dict(), tmp_path / "base")
    with torch.device("meta"):
        model = _Model(num_frozen).to(torch.bfloat16)
    options = {"weights": base, "nvme_path": nvme, "host_memory": LEAST, "precision": "bf16"}
    read, planned, count = [], 0, 12
    with OffloadEngine(model, **options) as engine:
        for step in range(count + 2):
            tokens = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(tokens).float().square().mean())
            engine.step()
            read.append(engine.report().nvme_read_bytes)
            planned = engine.plan.step_read_bytes
            whole = 2 * engine.plan.in_place_bytes
    assert planned < whole  # the embedding and the first blocks are not read in backward, what lies there neither
    assert 0.9 * planned < sum(read[2:]) / count < (planned + whole) / 2  # updates of tiny models race with forward


def test_weights_that_would_have_to_be_cast_are_copied_and_that_is_said(tmp_path: Path, nvme: Path) -> None:
    base = in_shards(build(torch.float32).state_dict(), tmp_path / "fp32")
    said = (
        r"frozen weights of 8 units, 1,081,344 bytes .* copied to nvme_path \(0, 135,168 bytes .*: 0.base.weight is "
        r"torch.float32 in the files, which the model's torch.bfloat16 rounds; .*; and 5 units more\)"
    )
    with pytest.warns(UserWarning, match=said):
        engine = in_place(base, nvme)
    with engine:
        assert not engine.plan.files
        assert engine.plan.nvme_bytes["weights"] > FROZEN_BYTES


def test_a_unit_that_rests_in_memory_is_read_once_and_the_files_are_needed_no_more(base: Path, nvme: Path) -> None:
    with in_place(base, nvme, host_memory="64MiB") as engine:
        assert not engine.plan.files and not engine.plan.in_place_bytes
        for file in base.iterdir():
            file.unlink()
        steps(engine, range(1))


@pytest.mark.parametrize("how", ["cut off", "written"])
def test_a_shard_that_changes_ends_the_engine_with_an_error_that_names_it(how: str, base: Path, nvme: Path) -> None:
    shard = base / "part-1.safetensors"
    with in_place(base, nvme) as engine:
        steps(engine, range(1))
        if how == "cut off":
            os.truncate(shard, 5000)
        else:
            with shard.open("r+b") as stream:
                stream.seek(-9, os.SEEK_END)
                stream.write(b"another")
        with pytest.raises(WeightsChanged, match=r"part-1\.safetensors has (changed|been cut off) while it is read"):
            steps(engine, range(1, 3))
        engine.close(discard=True)


def test_frozen_weights_in_files_cannot_be_changed_and_the_way_is_named(base: Path, nvme: Path) -> None:
    with in_place(base, nvme) as engine:
        weight = engine.module[0].base.weight
        same = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(same)  # no change
        with pytest.raises(StorageError, match=r"(?s)read in place from .*make the engine without weights="):
            with torch.no_grad():
                weight.mul_(2)
            engine.synchronize()
        engine.close(discard=True)


def test_a_tied_frozen_weight_and_one_in_pieces_are_read_in_place(tmp_path: Path, nvme: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10_000, 64)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(4))
            self.head = nn.Linear(64, 10_000, bias=False)
            self.head.weight = self.embed.weight
            self.embed.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return self.head(x)

    def losses(engine: OffloadEngine) -> list[float]:
        found = []
        for step in range(2):
            tokens = torch.arange(step, 10_000, 700).reshape(1, -1)
            loss = engine(tokens).float().logsumexp(-1).mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    torch.manual_seed(1)
    model = Tied().to(torch.bfloat16)
    values = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    base = in_shards(values, tmp_path / "base", count=1)
    with OffloadEngine(model, precision="bf16", lr=1e-2) as engine:
        expected = losses(engine)
    with torch.device("meta"):
        model = Tied().to(torch.bfloat16)
    options = {"precision": "bf16", "lr": 1e-2, "host_memory": "2MiB", "nvme_path": nvme}
    with OffloadEngine(model, weights=base, **options) as engine:
        pieces = [item for item in engine.plan.units if item.unit.whole is not None]
        assert len(pieces) > 1 and all(item.unit.in_files for item in pieces)
        assert all(item.weights is Tier.HOST for item in pieces)  # it is tied: each use would bring it in anew
        assert losses(engine) == expected


def test_a_model_that_is_not_trained_is_read_from_its_files_without_any_other_place(base: Path) -> None:
    with OffloadEngine(build(), optimizer=None, precision="bf16") as engine:
        x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
        expected = engine(x)
    model = unborn().requires_grad_(False)
    with OffloadEngine(model, weights=base, optimizer=None, precision="bf16", host_memory="700KiB") as engine:
        assert engine.plan.in_place_bytes > FROZEN_BYTES // 2 and not any(engine.plan.nvme_bytes.values())
        for _ in range(2):
            assert torch.equal(engine(x), expected)


def test_a_checkpoint_holds_what_is_trained_and_is_taken_by_engines_with_and_without_the_base_in_place(
    base: Path, nvme: Path, tmp_path: Path
) -> None:
    with in_place(base, nvme) as engine:
        steps(engine, range(2))
        engine.save_checkpoint(tmp_path / "run")
        expected = steps(engine, range(2, 4))
        taken = sum(file.stat().st_blocks * 512 for file in (tmp_path / "run").rglob("data.*"))
        assert taken < FROZEN_BYTES
        engine.load_checkpoint(tmp_path / "run")
        assert steps(engine, range(2, 4)) == expected
    for options in ({}, {"host_memory": "64MiB"}):
        with in_place(base, nvme, **options) as engine:
            engine.load_checkpoint(tmp_path / "run")
            assert steps(engine, range(2, 4)) == expected
    torch.manual_seed(5)
    other = build()
    with torch.no_grad():
        other[3].base.weight.zero_()
    with OffloadEngine(other, precision="bf16", lr=1e-2, nvme_path=nvme, host_memory=LEAST) as engine:
        engine.load_checkpoint(tmp_path / "run")  # its frozen weights come from the files, too
        assert steps(engine, range(2, 4)) == expected


def test_a_checkpoint_over_another_base_is_refused_whether_its_header_or_its_values_differ(
    base: Path, nvme: Path, tmp_path: Path
) -> None:
    with in_place(base, nvme) as engine:
        steps(engine, range(1))
        engine.save_checkpoint(tmp_path / "run")
    values = build().state_dict()
    resharded = in_shards(values, tmp_path / "resharded", count=2)
    with in_place(resharded, nvme) as engine:
        with pytest.raises(ConfigError, match=r"names, sizes and headers must be the same\. Nothing has changed"):
            engine.load_checkpoint(tmp_path / "run")
        steps(engine, range(1))  # nothing has
    values["2.base.weight"] = values["2.base.weight"] + 1
    for file in in_shards(values, tmp_path / "values").iterdir():
        file.rename(base / file.name)
    with in_place(base, nvme) as engine:
        with pytest.raises(WeightsChanged, match=r"part-\d\.safetensors"):
            engine.load_checkpoint(tmp_path / "run")
        engine.close(discard=True)


def test_a_checkpoint_whose_base_is_gone_says_which_file_it_needs(base: Path, nvme: Path, tmp_path: Path) -> None:
    with in_place(base, nvme) as engine:
        steps(engine, range(1))
        engine.save_checkpoint(tmp_path / "run")
    (base / "part-2.safetensors").unlink()
    with (
        OffloadEngine(build(), precision="bf16", lr=1e-2, nvme_path=nvme) as engine,
        pytest.raises(ConfigError, match=r"read in place from .*part-2\.safetensors, and are in no checkpoint"),
    ):
        engine.load_checkpoint(tmp_path / "run")


def test_a_durable_run_that_was_killed_goes_on_over_its_base(base: Path, nvme: Path) -> None:
    with in_place(base, nvme) as engine:
        expected = steps(engine, range(4))

    program = f"""
import os, signal, torch
from frozen_bases import in_place, steps
engine = in_place({str(base)!r}, {str(nvme)!r}, durable=1)
steps(engine, range(3))
engine(torch.ones(1, 256, dtype=torch.bfloat16))  # begins the commit of the third step
engine._session.checkpoints.generations.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert forked.run(program).returncode == -signal.SIGKILL
    with in_place(base, nvme, durable=1) as engine:
        engine.load_checkpoint()
        assert engine.global_step == 3
        assert steps(engine, range(3, 4)) == expected[3:]
        taken = sum(file.stat().st_blocks * 512 for file in nvme.rglob("data.*"))
        assert taken < 2 * sum(engine.plan.nvme_bytes.values()) + 2 * engine.plan.spare_copy_bytes
