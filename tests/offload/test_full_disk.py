"""What a full disk leaves behind at moments that a campaign (scripts/run_full_disk.py) has found to matter."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadEngine
from offload.checkpoint import publish
from swapper import StorageFull, create_store, open_store

safetensors = pytest.importorskip("safetensors.torch")


def no_room(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    model[1].requires_grad_(False)
    return model


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("call", ["mkdir", "open", "posix_fallocate", "write", "fsync"])
def test_a_store_that_has_no_room_leaves_nothing(call: str, tmp_path: Path, monkeypatch):
    real: Callable[..., int] = os.open

    def open_old(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return no_room() if flags & os.O_CREAT else real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, call, open_old if call == "open" else no_room)
    with pytest.raises(StorageFull, match="No space"):
        create_store([tmp_path], "s", [4096])
    monkeypatch.undo()
    assert names(tmp_path) == []
    create_store([tmp_path], "s", [4096]).close()


def test_a_scratch_store_without_a_name_left_is_full(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("swapper.files.open_direct", no_room)
    with pytest.raises(StorageFull, match="cannot create a file"):
        create_store([tmp_path], None, [4096])


def test_a_run_that_cannot_go_on_for_want_of_room_is_not_locked(tmp_path: Path, monkeypatch):
    options = {"lr": 1e-2, "nvme_path": tmp_path, "durable": 1}
    with OffloadEngine(make_model(), **options) as engine:
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(StorageFull) as raised:
        OffloadEngine(make_model(), **options)
    monkeypatch.undo()
    open_store([tmp_path], "run-1", reserved=()).close()  # while the error, and what it refers to, is alive
    assert raised.value.survives


def test_a_model_that_has_no_room_to_be_born_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise StorageFull("The first record has no room.")

    monkeypatch.setattr("offload.birth.loading.Loader.load", full)
    with pytest.raises(StorageFull):
        OffloadEngine(make_model(), nvme_path=tmp_path, durable=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "link", "rename"])
def test_shards_that_cannot_take_the_place_of_others_leave_those(call: str, tmp_path: Path, monkeypatch):
    with OffloadEngine(make_model(), lr=1e-2) as engine:
        engine.save_model(tmp_path, max_shard_bytes=8192)
        before = names(tmp_path)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        with monkeypatch.context() as patch:
            write, link, replace = publish.write_synced, os.link, Path.replace
            linked: list[object] = []

            def write_most(path: Path, content: bytes) -> None:
                return no_room() if path.name == "provisional" else write(path, content)

            def link_one(*paths: object) -> None:
                linked.append(paths)
                return no_room() if len(linked) == 2 else link(*paths)

            def replace_most(path: Path, target: Path) -> Path:
                return no_room() if path.name == "provisional" else replace(path, target)

            if call == "write":
                patch.setattr(publish, "write_synced", write_most)
            elif call == "link":
                patch.setattr(os, "link", link_one)
            else:
                patch.setattr(Path, "replace", replace_most)
            with pytest.raises(StorageFull, match="What was there is whole"):
                engine.save_model(tmp_path, max_shard_bytes=8192)
        assert names(tmp_path) == before
        found: dict[str, torch.Tensor] = {}
        for path in tmp_path.glob("*.safetensors"):
            found.update(safetensors.load_file(path))
        assert all(found[name].equal(value) for name, value in weights.items())
        engine.save_model(tmp_path, max_shard_bytes=8192)
        assert names(tmp_path) == before


@pytest.mark.parametrize("durable", [1, 2])
@pytest.mark.parametrize("where", ["create", "sync_file"])
def test_a_commit_without_room_is_one_error_and_the_next_step_commits_all(where, durable, tmp_path, monkeypatch):
    def taken(engine: OffloadEngine) -> None:
        engine.backward(engine(torch.ones(1, 64) * (engine.global_step + 1)).square().sum())
        engine.step()

    options = {"lr": 1e-2, "nvme_path": tmp_path, "durable": durable}
    with OffloadEngine(make_model(), lr=1e-2) as engine:
        for _ in range(8):
            taken(engine)
        expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with OffloadEngine(make_model(), **options) as engine:
        for _ in range(4):
            taken(engine)
        committer = engine._session.checkpoints.generations.committer
        engine(torch.ones(1, 64))
        committer.wait()
        before = committer.store.generation
        with monkeypatch.context() as patch:
            patch.setattr("swapper.directory.RealDirectory." + where, no_room)
            with pytest.raises(
                StorageFull, match=rf"(?s)not be committed: manifest .*Generation {before}, .*step\(\) again"
            ):
                for _ in range(3):
                    taken(engine)
            assert committer.store.generation == before
        assert 4 < engine.global_step < 7
        engine.step()
        while engine.global_step < 7:
            taken(engine)
    with OffloadEngine(make_model(), **options) as engine:
        engine.load_checkpoint()
        assert engine.global_step == 7
        taken(engine)
        assert all(engine.module.state_dict()[name].equal(value) for name, value in expected.items())


def test_a_run_that_ends_after_a_commit_without_room_says_so(tmp_path: Path, monkeypatch):
    engine = OffloadEngine(make_model(), lr=1e-2, nvme_path=tmp_path, durable=1)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
    committer = engine._session.checkpoints.generations.committer
    with monkeypatch.context() as patch:
        patch.setattr("swapper.directory.RealDirectory.create", no_room)
        engine(torch.ones(1, 64))
        committer.wait()
    with pytest.raises(StorageFull, match=r"Generation 1, the last .*resume from it"):
        engine.close()


def test_frozen_weights_that_had_no_room_are_in_the_next_checkpoint(tmp_path: Path, monkeypatch):
    with OffloadEngine(make_model(), lr=1e-2, nvme_path=tmp_path, durable=1) as engine:
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        committer = engine._session.checkpoints.generations.committer
        with monkeypatch.context() as patch:
            patch.setattr(committer.store, "write", no_room)
            with pytest.raises(OSError, match="No space"):
                committer.commit(b"")
        engine.save_checkpoint(tmp_path / "saved")
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with OffloadEngine(make_model(), lr=1e-2) as engine:
        with torch.no_grad():
            engine.module[1].weight.zero_()
        engine.load_checkpoint(tmp_path / "saved")
        assert all(engine.module.state_dict()[name].equal(value) for name, value in weights.items())
