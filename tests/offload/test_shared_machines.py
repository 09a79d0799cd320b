"""Machines that others use, too: their links, folders, limits and pickles do no harm."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import tiny
import torch
from runs import make_model, train

import aio_ext
import offload.checkpoint.native.generations as generations
import offload.tiers.store as tiers_store
from offload import OffloadEngine, OffloadError, WeightsError
from offload.checkpoint.dcp.reader import DistributedReader
from offload.checkpoint.publish import write_synced
from offload.errors import RankError, named
from offload.ranks.world import packed, unpacked
from swapper import StorageFull, create_store

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import fuzz_files


def test_a_link_in_the_place_of_a_new_file_is_not_written_through(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".latest").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / ".latest", b"t")
    with fuzz_files.make_engine(0) as engine:
        engine.save_checkpoint(tmp_path, "t")
    assert victim.read_text() == "mine" and (tmp_path / "latest").read_text() == "t"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_runs_of_other_users_under_a_path_are_none_of_ours(tmp_path: Path):
    for number in (2, 999):
        (tmp_path / f"run-{number}.store").mkdir()
        os.chown(tmp_path / f"run-{number}.store", 12345, 12345)
    create_store([tmp_path], "run-1", [4096]).close()
    assert tiers_store.run_names(tmp_path) == ["run-1"]
    with OffloadEngine(fuzz_files.make_model(0), nvme_path=tmp_path, durable=1) as engine:
        fuzz_files.backward(engine)
        engine.step()
    assert tiers_store.run_names(tmp_path) == ["run-3"]


def test_a_store_whose_removal_was_interrupted_takes_no_room_for_ever(tmp_path: Path):
    create_store([tmp_path], "run-1", [4096]).close()
    (tmp_path / "run-1.store" / "generation.0000000000000000").unlink()
    with OffloadEngine(fuzz_files.make_model(0), nvme_path=tmp_path, durable=1):
        assert [entry.name for entry in tmp_path.iterdir()] == ["run-1.store"]


def test_a_store_whose_path_was_renamed_shares_no_file_system(tmp_path: Path):
    assert generations._share_file_system(tmp_path, tmp_path)
    assert not generations._share_file_system(tmp_path, tmp_path / "gone")


def test_a_limit_of_the_size_of_files_is_named():
    with pytest.raises(OffloadError, match=r"A file of this process can have .*ulimit -f"), named("making the engine"):
        raise OSError(27, "File too large")


def test_space_that_the_size_of_files_forbids_is_not_called_a_full_disk(tmp_path: Path, monkeypatch):
    def too_large(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    with pytest.raises(StorageFull, match=r"File too large(.|\n)*ulimit -f") as raised:
        create_store([tmp_path], "s", [4096])
    assert "too little room" not in str(raised.value) and "Free some" not in str(raised.value)


def test_memory_that_the_system_does_not_give_is_a_limit_of_the_process(tmp_path: Path, monkeypatch):
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    options = {"lr": 1e-2, "nvme_path": tmp_path, "host_memory": tiny.least_budget(tiny.Tiny(), tmp_path, lr=1e-2)}
    with OffloadEngine(tiny.Tiny(), **options) as engine:
        tiny.train(engine, 1)
        with monkeypatch.context() as patch:
            patch.setattr(aio_ext, "Memory", no_memory)
            patch.setattr("mmap.mmap", no_memory)
            with pytest.raises(OffloadError, match="ulimit -v"):
                engine.optimizer.state_dict()
        tiny.train(engine, 1)


def test_threads_that_the_system_does_not_give_are_a_limit_of_the_process(monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(OffloadError, match="ulimit -u"):
        OffloadEngine(tiny.Tiny())


def test_a_thread_for_notes_that_the_system_does_not_give_is_one_too(tmp_path: Path, monkeypatch):
    """Who is told of the first transfer needs a thread; so does a pool of the standard library."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("aio_ext.notify.start_new_thread", refuse)
        patch.setattr("aio_ext.notify._of_thread", {})
        with pytest.raises(OffloadError, match="ulimit -u"):
            create_store([tmp_path], None, [4096])
    with pytest.raises(OffloadError, match="ulimit -u"), named("making the engine"):
        refuse()
    with pytest.raises(RuntimeError, match=r"^another$"), named("making the engine"):
        raise RuntimeError("another")


def test_an_instruction_set_that_is_none_is_one_error():
    program = "import importlib; from offload.kernels import _native; importlib.reload(_native)"
    found = forked.run(program, OFFLOAD_ISA="bogus")
    assert found.returncode == 1
    assert "OffloadError: OFFLOAD_ISA='bogus' is none of the instruction sets" in found.stderr


# Pickles.


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_ranks_run_nothing_that_others_tell(tmp_path: Path):
    assert unpacked([packed({"a": (1, None)}), packed(["b" * 1000])]) == [{"a": (1, None)}, ["b" * 1000]]
    told = torch.frombuffer(bytearray(pickle.dumps(Evil(tmp_path / "evil"))), dtype=torch.uint8)
    with pytest.raises(RankError, match="what rank 1 tells is damaged"):
        unpacked([packed(1), told])
    assert not (tmp_path / "evil").exists()


def test_metadata_of_torch_that_names_other_classes_is_refused_and_not_run(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    with pytest.raises(WeightsError, match=r"\.metadata is damaged: it names .*, which is none of the classes"):
        DistributedReader(tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENAMETOOLONG, errno.ENOMEM])
def test_what_the_system_refuses_is_an_error_of_ours_and_training_goes_on(tmp_path: Path, monkeypatch, number: int):
    with OffloadEngine(make_model()) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_dcp(tmp_path / "dcp")
        stat = os.stat

        def refusing(path: Any, **options: Any) -> os.stat_result:
            if str(tmp_path) in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return stat(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", refusing)
            for call in (
                lambda: engine.load_checkpoint(tmp_path / "saved"),
                lambda: engine.load_dcp(tmp_path / "dcp"),
                lambda: engine.save_checkpoint(tmp_path / "saved"),
                lambda: engine.save_model(tmp_path / "model"),
                lambda: engine.save_dcp(tmp_path / "dcp"),
            ):
                with pytest.raises(OffloadError):
                    call()
        with pytest.raises(OffloadError, match="timeline"):
            engine.timeline(tmp_path / "gone" / "timeline")
        train(engine, 2)
