"""Checkpoints: what is saved comes back to the last bit at any budgets, and what cannot be is refused in words."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from runs import VOCAB, backward, bits, least, make_model, train
from torch import nn

from offload import ConfigError, OffloadEngine, OffloadError, access
from offload.checkpoint.native.base_files import BaseFiles
from offload.checkpoint.native.saved_records import SavedHome
from swapper import StorageCorrupt, StorageFull, StoreLocked, StoreMissing

PROGRAMS = {
    "fp32": {},
    "clipped": {"gradient_clipping": 0.5},
    "bf16": {"precision": "bf16"},
    "int8 moments": {"moments_dtype": "int8"},
    "an optimizer without a kernel": {"optimizer": torch.optim.Adamax},
    "factored states": {"optimizer": torch.optim.Adafactor},
    "sgd with momentum": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_goes_on_with_the_same_bits_at_other_budgets(tmp_path: Path, name: str):
    """Each program at a pair of budgets; each pair with several programs."""
    options = {"lr": 1e-3, **PROGRAMS[name]}
    with OffloadEngine(make_model(), **options) as engine:
        expected, final = train(engine, 5), bits(engine.module)
    small = least(tmp_path, **options)
    pairs = [(small, small), (small, "1GiB"), ("1GiB", small), (small * 5 // 4, small)]
    saving, loading = pairs[[*PROGRAMS].index(name) % len(pairs)]
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=saving, **options) as engine:
        losses = train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3, "seen": torch.arange(4)})
        losses += train(engine, 5)
        assert (losses, bits(engine.module).equal(final)) == (expected, True)
    with OffloadEngine(make_model(1), nvme_path=tmp_path, host_memory=loading, **options) as engine:
        train(engine, 1)  # what it did before does not matter
        state = engine.load_checkpoint(tmp_path / "saved")
        assert state["epoch"] == 3 and state["seen"].tolist() == [0, 1, 2, 3]
        assert engine.global_step == 2
        assert (train(engine, 5), bits(engine.module).equal(final)) == (expected[2:], True)


def test_weights_that_came_later_are_named_when_they_are_not_saved_and_saved_when_they_are_registered(tmp_path: Path):
    def begin(seed: int) -> tuple[OffloadEngine, nn.Module]:
        engine = OffloadEngine(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), lr=1e-3)
        torch.manual_seed(seed)
        head = engine.module[2] = nn.Linear(8, 8)
        return engine, head

    engine, head = begin(1)
    with engine:
        for save in (engine.save_checkpoint, engine.save_dcp):
            with pytest.warns(
                UserWarning, match=r"2 parameters that came into the model .*\(2.weight, \.\.\.\) are not"
            ):
                save(tmp_path / save.__name__)
        engine.register_for_checkpointing(head)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.save_checkpoint(tmp_path / "whole")
        values = bits(engine.module)
    engine, head = begin(2)
    with engine:
        engine.register_for_checkpointing(head)
        engine.load_checkpoint(tmp_path / "whole")
        assert bits(engine.module).equal(values)


def test_a_durable_run_names_weights_that_it_does_not_commit(tmp_path: Path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with OffloadEngine(model, lr=1e-3, nvme_path=tmp_path, durable=1) as engine:
        model[2] = nn.Linear(8, 8)
        engine.backward(model(torch.ones(2, 8)).sum())
        engine.step()
        with pytest.warns(UserWarning, match=r"came into the model .* are not saved"):
            model(torch.ones(2, 8))


def test_without_nvme_all_is_copied_and_another_file_system_gets_a_copy(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        expected = train(engine, 4)
        engine.save_checkpoint(tmp_path / "in memory")
        final = bits(engine.module)
    elsewhere = Path("/dev/shm") / f"offload-test-{os.getpid()}"
    try:
        with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path)) as engine:
            losses = train(engine, 2)
            engine.save_checkpoint(elsewhere, "a-tag")
            assert losses + train(engine, 4) == expected
        assert (elsewhere / "a-tag" / "data.0").stat().st_nlink == 1
        with OffloadEngine(make_model(1), lr=1e-3) as engine:
            engine.load_checkpoint(elsewhere, "a-tag")
            assert (train(engine, 4), bits(engine.module).equal(final)) == (expected[2:], True)
            engine.load_checkpoint(tmp_path / "in memory")
            assert engine.global_step == 4 and bits(engine.module).equal(final)
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


def test_accumulated_gradients_go_on(tmp_path: Path):
    options = {"lr": 1e-3, "gradient_accumulation_steps": 3, "gradient_clipping": 0.3}

    def go_on(engine: OffloadEngine, first: int, last: int) -> list[float]:
        losses = []
        for index in range(first, last):
            losses.append(backward(engine, index))
            engine.step()
        return losses

    with OffloadEngine(make_model(), **options) as engine:
        expected, final = go_on(engine, 0, 9), bits(engine.module)
    small = least(tmp_path, **options)
    for saving, loading in ((small, "1GiB"), ("1GiB", small)):
        saved = tmp_path / str(saving)
        with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=saving, **options) as engine:
            losses = go_on(engine, 0, 5)
            engine.save_checkpoint(saved)
            assert losses + go_on(engine, 5, 9) == expected
        with OffloadEngine(make_model(1), nvme_path=tmp_path, host_memory=loading, **options) as engine:
            engine.load_checkpoint(saved)
            assert (go_on(engine, 5, 9), bits(engine.module).equal(final)) == (expected[5:], True)


def test_random_states_schedulers_and_loaders_go_on(tmp_path: Path):
    class Loader:
        """Gives numbers from the global generators, and counts them."""

        def __init__(self) -> None:
            self.given = 0

        def __iter__(self):
            while True:
                self.given += 1
                yield random.random() + np.random.rand() + torch.rand(1).item()

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state):
            self.given = state["given"]

    def life(last: int, save_at: int | None, load: bool):
        with OffloadEngine(make_model(), lr=1e-3) as engine:
            schedule, loader = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 10), Loader()
            engine.register_for_checkpointing(schedule, loader)
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(5)
            if load:
                engine.load_checkpoint(tmp_path)
            seen = []
            for number in loader:
                seen.append((number, schedule.get_last_lr()[0], backward(engine, int(number * 100))))
                engine.step()
                schedule.step()
                if engine.global_step == save_at:
                    engine.save_checkpoint(tmp_path)
                if engine.global_step == last:
                    return seen, loader.given

    expected, given = life(6, None, load=False)
    assert life(3, 3, load=False)[0] == expected[:3]
    assert life(6, None, load=True) == (expected[3:], given)


@pytest.mark.parametrize("every", [1, 2])
def test_a_durable_run_goes_on_by_itself(tmp_path: Path, every: int):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        expected, final = train(engine, 6), bits(engine.module)
    small = least(tmp_path)
    options = {"lr": 1e-3, "nvme_path": tmp_path, "durable": every}
    with OffloadEngine(make_model(), host_memory=small, **options) as engine:
        assert engine.load_checkpoint() is None
        assert train(engine, 2) == expected[:2]
    for budget, steps in ((small, 3), ("1GiB", 4), (small * 5 // 4, 5), (small, 6)):
        engine = OffloadEngine(make_model(2), host_memory=budget, **options)
        with engine:
            engine.load_checkpoint()
            assert engine.global_step == steps - 1
            assert train(engine, steps) == expected[steps - 1 : steps]
            result = bits(engine.module)
        assert len(list(tmp_path.iterdir())) == 1
    assert result.equal(final)


def test_what_a_killed_process_has_committed_is_there(tmp_path: Path):
    program = f"""
import os, signal
from runs import *
engine = OffloadEngine(make_model(), lr=1e-3, nvme_path={str(tmp_path)!r}, durable=1, host_memory={least(tmp_path)})
train(engine, 3)
backward(engine, 3)
engine._session.checkpoints.generations.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert forked.run(program).returncode == -9
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        expected = train(engine, 5)
    engine = OffloadEngine(make_model(1), lr=1e-3, nvme_path=tmp_path, durable=1)
    with engine:
        engine.load_checkpoint()
        assert train(engine, 5) == expected[3:]


def test_a_program_that_ends_without_close_has_committed_its_last_step(tmp_path: Path):
    program = f"""
from runs import *
engine = OffloadEngine(make_model(), lr=1e-3, nvme_path={str(tmp_path)!r}, durable=10)
train(engine, 3)
"""
    forked.run_well(program)
    with OffloadEngine(make_model(1), lr=1e-3, nvme_path=tmp_path, durable=10) as engine:
        engine.load_checkpoint()
        assert engine.global_step == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_its_last_step_committed(tmp_path: Path, number):
    program = f"""
from runs import *
with OffloadEngine(make_model(), lr=1e-3, nvme_path={str(tmp_path)!r}, durable=1000) as engine:
    train(engine, 1000, lambda: print(engine.global_step, flush=True))
"""
    with forked.Program(program) as process:
        for line in process.stdout:
            if int(line) == 3:
                process.send_signal(number)
                break
        start = time.monotonic()
        output, error = process.communicate()
        assert time.monotonic() - start < 30
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), error
    last = int((output.split() or ["3"])[-1])
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        expected = train(engine, last + 2)
    engine = OffloadEngine(make_model(1), lr=1e-3, nvme_path=tmp_path, durable=1000)
    with engine:
        engine.load_checkpoint()
        first = engine.global_step
        assert train(engine, last + 2) == expected[first:]


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path):
    program = f"""
import time
from runs import *
with OffloadEngine(make_model(), lr=1e-3, nvme_path={str(tmp_path)!r}, durable=1) as engine:
    try:
        train(engine, 1000, lambda: print(engine.global_step, flush=True))
    except SystemExit:
        print("first", flush=True)
        time.sleep(60)
"""
    with forked.Program(program) as process:
        for line in process.stdout:
            if line == "3\n":
                process.send_signal(signal.SIGTERM)
            if line == "first\n":
                process.send_signal(signal.SIGTERM)
                break
        process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_handlers_of_ones_own_stay_and_all_are_given_back(tmp_path: Path):
    own = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        with OffloadEngine(make_model(), nvme_path=tmp_path, durable=1) as engine:
            train(engine, 1)
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_two_durable_runs_cannot_share_a_path(tmp_path: Path):
    with (
        OffloadEngine(make_model(), nvme_path=tmp_path, durable=1),
        pytest.raises(StoreLocked, match="in use by process"),
    ):
        OffloadEngine(make_model(), nvme_path=tmp_path, durable=1)


def test_checkpoints_that_are_not_to_stay_go_and_their_space_is_used_again(tmp_path: Path):
    saved = tmp_path / "saved"
    options = {"nvme_path": tmp_path, "host_memory": least(tmp_path), "keep_last": 2, "keep_every": 4}
    with OffloadEngine(make_model(), lr=1e-3, **options) as engine:
        train(engine, 14, lambda: engine.save_checkpoint(saved))
        assert sorted(entry.name for entry in saved.glob("[!.]*")) == [
            "latest", "step12", "step13", "step14", "step4", "step8",
        ]  # fmt: skip
        shutil.rmtree(saved / "step4")  # by the user's own hand
        train(engine, 15, lambda: engine.save_checkpoint(saved))
        assert len(engine._session.parts.tiers.store.retained) == 4
    with OffloadEngine(make_model(1), lr=1e-3) as engine:
        for step in (8, 12, 14, 15):
            engine.load_checkpoint(saved, f"step{step}")
            assert engine.global_step == step


def test_a_durable_run_knows_the_checkpoints_of_the_process_before(tmp_path: Path):
    saved = tmp_path / "saved"
    options = {"lr": 1e-3, "nvme_path": tmp_path, "host_memory": least(tmp_path), "durable": 1, "keep_last": 3}
    for last in (4, 8, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = OffloadEngine(make_model(), **options)
        with engine:
            engine.load_checkpoint()
            while engine.global_step < last:
                train(engine, engine.global_step + 1)
                engine.save_checkpoint(saved)
            assert len(engine._session.parts.tiers.store.retained) == 3
    shutil.rmtree(saved / "step11")
    engine = OffloadEngine(make_model(), **options)
    with engine:
        assert len(engine._session.parts.tiers.store.retained) == 2
        engine.load_checkpoint(saved, "step10")
        assert engine.global_step == 10


def test_a_run_resumes_on_a_disk_that_it_has_filled_itself(tmp_path: Path, monkeypatch):
    options = {"lr": 1e-3, "nvme_path": tmp_path, "host_memory": least(tmp_path), "durable": 1}
    with OffloadEngine(make_model(), **options) as engine:
        train(engine, 2)
    monkeypatch.setattr("offload.planning.free_bytes_of", lambda paths: 0.0)
    engine = OffloadEngine(make_model(1), **options)
    with engine:
        engine.load_checkpoint()
        assert engine.global_step == 2
    shutil.rmtree(tmp_path / "run-1.store")
    with pytest.raises(StorageFull, match=r"durable=1 needs .* two places for each record: 0 bytes may be used"):
        OffloadEngine(make_model(), **options)


def test_other_parameter_groups_are_refused_before_anything_changes(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    model = make_model(1)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 1e-2}])
    with OffloadEngine(model, optimizer=optimizer) as engine:
        before = bits(model)
        with pytest.raises(ConfigError, match="1 parameter groups are there and 2 here"):
            engine.load_checkpoint(tmp_path)
        assert bits(model).equal(before)
        train(engine, 1)


def test_more_checkpoints_than_the_store_holds_are_copied(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path)) as engine:
        train(engine, 10, lambda: engine.save_checkpoint(tmp_path / "saved"))
        final = bits(engine.module)
    links = {entry.name: (entry / "data.0").stat().st_nlink for entry in (tmp_path / "saved").glob("step*")}
    assert sorted(links.values()) == [1, 1, 8, 8, 8, 8, 8, 8, 8, 8]
    with OffloadEngine(make_model(1), lr=1e-3) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert bits(engine.module).equal(final)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_tag_that_is_saved_again_is_replaced(tmp_path: Path, monkeypatch, can_exchange: bool):
    if can_exchange:  # in one moment: the tag that is there is never given another name
        own_rename = Path.rename

        def rename(path: Path, target: Path) -> Path:
            assert path.name != "best"
            return own_rename(path, target)

        monkeypatch.setattr(Path, "rename", rename)
    else:
        monkeypatch.setattr("offload.checkpoint.native.folder.exchange", lambda folder, target: False)
    for nvme in ((), tmp_path):
        with OffloadEngine(make_model(), lr=1e-3, nvme_path=nvme) as engine:
            train(engine, 1)
            engine.save_checkpoint(tmp_path / "saved", "best")
            train(engine, 2)
            engine.save_checkpoint(tmp_path / "saved", "best", client_state=2)
        with OffloadEngine(make_model(), lr=1e-3) as engine:
            assert engine.load_checkpoint(tmp_path / "saved") == 2
            assert engine.global_step == 2
        assert sorted(entry.name for entry in (tmp_path / "saved").iterdir()) == ["best", "latest"]


def test_what_is_not_this_models_or_not_whole_is_refused(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        for last in (1, 2):
            train(engine, last)
            engine.save_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match=r"tag '\.\./x'"):
            engine.save_checkpoint(tmp_path, "../x")
        with pytest.raises(ConfigError, match=r"client_state.*\['f'\] is a function"):
            engine.save_checkpoint(tmp_path, client_state={"f": lambda: 1})
        with pytest.raises(ConfigError, match="without a directory"):
            engine.load_checkpoint()
        with pytest.raises(StoreMissing, match="there is no checkpoint"):
            engine.load_checkpoint(tmp_path / "nothing")
        with pytest.raises(StoreMissing, match=r"step9(.|\n)*step1 \(step 1\), step2 \(step 2\)"):
            engine.load_checkpoint(tmp_path, "step9")
        with pytest.raises(ConfigError, match="int has no state_dict"):
            engine.register_for_checkpointing(3)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB))
    for model, options, words in (
        (other, {}, "parameter .* is there and not in this model"),
        (make_model(), {"optimizer": "lion"}, "optimizer is 'adamw' there and 'lion' here"),
        (make_model(), {"precision": "bf16"}, "precision is 'fp32' there and 'bf16' here"),
    ):
        with OffloadEngine(model, **options) as engine:
            before = bits(model)
            with pytest.raises(ConfigError, match=words):
                engine.load_checkpoint(tmp_path)
            assert bits(model).equal(before)
    model = make_model()
    backwards = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3)
    order = r"parameter 0 of parameter group 0 is \S+ there and \S+ here: give them in one order"
    with OffloadEngine(model, optimizer=backwards) as engine, pytest.raises(ConfigError, match=order):
        engine.load_checkpoint(tmp_path)
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        engine.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(engine.optimizer, 1))
        with pytest.raises(ConfigError, match="the states of 0 registered objects, and 1 are registered"):
            engine.load_checkpoint(tmp_path)
    with (tmp_path / "step2" / "data.0").open("r+b") as file:
        file.write(b"?")
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        with pytest.raises(StorageCorrupt, match=r"gave wrong bytes(.|\n)*step1 \(step 1\)"):
            engine.load_checkpoint(tmp_path)
        with pytest.raises(StorageCorrupt):
            backward(engine, 0)
    (manifest,) = (tmp_path / "step1").glob("generation.*")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with OffloadEngine(make_model(), lr=1e-3) as engine, pytest.raises(StorageCorrupt, match="checkpoint step1"):
        engine.load_checkpoint(tmp_path, "step1")


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch):
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path)) as engine:
        expected = train(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
        real = os.fstatvfs

        def full(descriptor):
            found = list(real(descriptor))
            found[4] = 0  # blocks for us
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "fstatvfs", full)
        with pytest.raises(StorageFull, match="more are needed"):
            engine.save_checkpoint(tmp_path / "saved", "second")
        with pytest.raises(StorageFull, match="are needed"):
            engine.save_checkpoint("/dev/shm/offload-test-full", "second")
        monkeypatch.setattr(os, "fstatvfs", real)
        assert not list(Path("/dev/shm/offload-test-full").glob("[!.]*"))
        expected += train(engine, 3)
    shutil.rmtree("/dev/shm/offload-test-full", ignore_errors=True)
    assert sorted(entry.name for entry in (tmp_path / "saved").iterdir()) == ["latest", "step1"]
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine, 3) == expected[1:]


def test_moments_in_another_format_are_converted(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        exact = {k: v["exp_avg"].clone() for k, v in engine.optimizer.state_dict()["state"].items()}
        final = bits(engine.module)
    with OffloadEngine(make_model(1), lr=1e-3, moments_dtype="bf16") as engine:
        engine.load_checkpoint(tmp_path)
        assert bits(engine.module).equal(final)
        for key, states in engine.optimizer.state_dict()["state"].items():
            assert states["exp_avg"].float().equal(exact[key].bfloat16().float())


def test_tied_weights_and_evaluation_only(tmp_path: Path):
    with OffloadEngine(make_model(tied=True), lr=1e-3, nvme_path=tmp_path) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        final = bits(engine.module)
    with OffloadEngine(make_model(1, tied=True), optimizer=None) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert bits(engine.module).equal(final)
    with OffloadEngine(make_model(1, tied=True), optimizer=None) as engine:
        engine.save_checkpoint(tmp_path / "weights")
        weights = bits(engine.module)
    with OffloadEngine(make_model(2, tied=True), lr=1e-3, precision="fp32") as engine:
        engine.load_checkpoint(tmp_path / "weights")
        assert bits(engine.module).equal(weights)


def test_a_change_from_outside_waits_for_the_commit_under_way(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, durable=1) as engine:
        train(engine, 1)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        backward(engine, 0)  # commits step 1, with zeros: they were written before its boundary
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.fill_(1.0)  # after it
        gc.collect()
        engine._session.failure.record(KeyboardInterrupt())  # no commit at the end
    engine = OffloadEngine(make_model(1), lr=1e-3, nvme_path=tmp_path, durable=1)
    with engine:
        engine.load_checkpoint()
        assert bits(engine.module).eq(0).all()


def test_running_statistics_go_on(tmp_path: Path):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def go_on(engine: OffloadEngine, last: int) -> list[float]:
        losses = []
        while engine.global_step < last:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(engine.global_step))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with OffloadEngine(make(), nvme_path=tmp_path, durable=1) as engine:
        expected = go_on(engine, 4)
        engine.module.eval()
        final = engine(torch.ones(2, 8))
    shutil.rmtree(tmp_path / "run-1.store")
    with OffloadEngine(make(), nvme_path=tmp_path, durable=1) as engine:
        go_on(engine, 2)
    engine = OffloadEngine(make(), nvme_path=tmp_path, durable=1)
    with engine:
        engine.load_checkpoint()
        assert go_on(engine, 4) == expected[2:]
        engine.module.eval()
        assert engine(torch.ones(2, 8)).equal(final)


@pytest.mark.each_value
@pytest.mark.parametrize("order", ["weights first", "states first"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_state_dicts_continue_with_the_same_bits(tmp_path: Path, precision, order):
    """What trainers save: the model's state dict and the optimizer's."""
    options = {"lr": 1e-2, "precision": precision}
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=least(tmp_path, **options), **options) as engine:
        train(engine, 3)
        states = {"weights": engine.module.state_dict(), "states": engine.optimizer.state_dict()}
        torch.save({**states, "random": torch.get_rng_state()}, tmp_path / "saved")
        expected, final = train(engine, 8), bits(engine.module)
    saved = torch.load(tmp_path / "saved", weights_only=True)
    with OffloadEngine(make_model(1), **options) as engine:
        loads = [("weights", engine.module), ("states", engine.optimizer)]
        for name, target in loads if order == "weights first" else reversed(loads):
            target.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
        assert engine.global_step == 3
        assert (train(engine, 8), bits(engine.module).equal(final)) == (expected, True)


def test_state_dicts_of_a_model_on_nvme_take_no_memory(tmp_path: Path):
    program = f"""
from pathlib import Path
import torch
from torch import nn
from offload import OffloadEngine

def anonymous():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) + int(lines["RssFile"].split()[0]) + int(lines["RssShmem"].split()[0])

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])  # 96 MiB, and 192 of moments
with OffloadEngine(model, nvme_path={str(tmp_path)!r}, host_memory="64MiB", lr=1e-3) as engine:
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 1024)).square().mean())
        engine.step()
    engine.synchronize()
    before = anonymous()
    states = engine.module.state_dict(), engine.optimizer.state_dict()
    print((anonymous() - before) >> 10, sum(v.nbytes for v in states[0].values()) >> 20)
    torch.save(states, {str(tmp_path / "saved")!r})
assert list(Path({str(tmp_path)!r}).iterdir()) == [Path({str(tmp_path / "saved")!r})]
"""
    taken_mib, weights_mib = map(int, forked.run_well(program).split())
    assert weights_mib == 96
    assert taken_mib < 60, f"{taken_mib} MiB for state dicts of 288 MiB"


def test_what_a_killed_process_left_unfinished_goes_and_is_no_checkpoint(tmp_path: Path):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        left = tmp_path / ".unfinished-0123456789abcdef"
        shutil.copytree(tmp_path / "step1", left / "new")
        (left / "lock").touch()
        (tmp_path / "latest").unlink()
        train(engine, 2)
        engine.load_checkpoint(tmp_path)
        assert engine.global_step == 1
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step1", "step2"]


def durable(path: Path, **options) -> OffloadEngine:
    return OffloadEngine(make_model(), lr=1e-3, nvme_path=path, host_memory=least(path), durable=1, **options)


def test_who_trains_over_an_earlier_run_is_warned_before_the_first_step_and_who_goes_on_is_not(tmp_path: Path):
    with durable(tmp_path) as engine:
        train(engine, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        durable(tmp_path).close()  # nothing was trained: nothing is replaced
        with durable(tmp_path) as engine:
            engine.load_checkpoint()
            train(engine, 4)
            assert engine.global_step == 4
    with durable(tmp_path) as engine:
        with pytest.warns(UserWarning, match="nvme_path holds step 4 of an earlier run"):
            backward(engine, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(engine, 2)
    with durable(tmp_path) as engine:
        engine.load_checkpoint()
        assert engine.global_step == 2


def test_checkpoints_beside_the_store_that_they_come_from_leave_it_alone(tmp_path: Path):
    with durable(tmp_path, keep_last=1) as engine:
        expected = train(engine, 4, lambda: engine.save_checkpoint(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "run-1.store", "step4"]
    with durable(tmp_path) as engine:
        engine.load_checkpoint()
        assert engine.global_step == 4
        engine.load_checkpoint(tmp_path)
        assert engine.global_step == len(expected)


def test_nothing_is_begun_anew_in_silence_where_checkpoints_are(tmp_path: Path):
    with durable(tmp_path) as engine:
        train(engine, 2, lambda: engine.save_checkpoint(tmp_path / "saved"))
    shutil.rmtree(tmp_path / "run-1.store")
    with (
        durable(tmp_path) as engine,
        pytest.warns(UserWarning, match=r"training begins at step 0. But there are checkpoints: .*'.*saved'\)"),
    ):
        assert engine.load_checkpoint() is None


@pytest.mark.parametrize("act", ["a moved checkpoint", "a damaged manifest"])
def test_a_run_goes_on_in_a_new_store_where_the_old_one_must_not_be_written(tmp_path: Path, act: str):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        expected = train(engine, 6)
    saved, kept = tmp_path / "saved", tmp_path / "kept"
    with durable(tmp_path) as engine:
        train(engine, 2, lambda: engine.save_checkpoint(saved))
    if act == "a moved checkpoint":
        saved.rename(kept)
    else:
        kept = saved
        manifest = min((tmp_path / "run-1.store").glob("retained.*"))
        manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"run-1.store: .*(1|2) more names|run-1.store: manifest retained"):
        engine = durable(tmp_path)
    with engine:
        engine.load_checkpoint()
        assert train(engine, 6) == expected[2:]
    assert [entry.name for entry in tmp_path.glob("*.store")] == ["run-2.store"]
    with OffloadEngine(make_model(1), lr=1e-3) as engine:
        for step in (1, 2):
            engine.load_checkpoint(kept, f"step{step}")
            assert train(engine, 4) == expected[step:4]


def test_another_runs_store_on_the_path_stays(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with durable(tmp_path / name) as engine:
            train(engine, 1 + (name == "b"))
    (tmp_path / "b" / "run-1.store").rename(tmp_path / "a" / "run-2.store")
    with pytest.warns(UserWarning, match="run-1.store holds another run, beside run-2.store: it stays"):
        engine = durable(tmp_path / "a")
    with engine:
        engine.load_checkpoint()
        assert engine.global_step == 2
    assert len(list((tmp_path / "a").glob("*.store"))) == 2


@pytest.mark.parametrize("path", ["", "a\0b", 5, b"x"])
@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint", "save_model", "save_dcp", "load_dcp"])
def test_what_is_no_directory_is_named(name: str, path: object, make_model, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with OffloadEngine(make_model()) as engine, pytest.raises(ConfigError, match="dir: expected a path, got"):
        getattr(engine, name)(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", [KeyboardInterrupt(), MemoryError(), OSError(errno.ENOMEM, "no memory")], ids=repr)
@pytest.mark.parametrize("kind", ["checkpoint", "dcp"])
def test_an_engine_that_was_half_loaded_is_of_no_use(tmp_path: Path, monkeypatch, kind: str, what: BaseException):
    (tmp_path / "nvme").mkdir()
    options = {"nvme_path": tmp_path / "nvme", "host_memory": least(tmp_path)}
    with OffloadEngine(make_model(), **options) as engine:
        train(engine, 1)
        getattr(engine, f"save_{kind}")(tmp_path / "saved")
        train(engine, 2)
        lent, num_lent = access._HomeRecords._lent, 0

        def lend(records: access._HomeRecords, loan: access.Loan) -> access.Loan:
            nonlocal num_lent
            num_lent += 1
            if num_lent == 4:
                raise what
            return lent(records, loan)

        monkeypatch.setattr(access._HomeRecords, "_lent", lend)
        with pytest.raises((type(what), OffloadError)):
            getattr(engine, f"load_{kind}")(tmp_path / "saved")
        with pytest.raises(OffloadError, match=r"half loaded|no more memory"):
            train(engine, 3)


@pytest.mark.parametrize("ends_in", ["loader", "forward"])
def test_a_run_that_ends_before_its_next_step_leaves_what_it_has_gone_on_from(tmp_path, ends_in):
    """The next batch was drawn, and dropout's numbers: who resumes draws them again."""

    def run(num_steps: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        with contextlib.suppress(KeyboardInterrupt), OffloadEngine(model, lr=1e-2, nvme_path=tmp_path, durable=1) as it:
            it.load_checkpoint()
            left = torch.get_rng_state()
            for _ in range(num_steps):
                it.backward(it(torch.randn(2, 8)).sum())
                it.step()
                left = torch.get_rng_state()
            inputs = torch.randn(2, 8)
            if ends_in == "forward":
                it(inputs)
            raise KeyboardInterrupt
        return left

    left = run(2)
    assert torch.equal(run(0), left) and torch.equal(run(0), left)


def test_ctrl_c_comes_when_the_transfers_of_a_saved_record_are_over():
    """Their memory may go with it, and a checksum would be worked out over what is no more there: SIGSEGV."""
    waited = []

    class Source:
        extents = [SimpleNamespace(nbytes=4096)] * 3

        def read(self, *_: object) -> SimpleNamespace:
            number = len(waited)
            signal.raise_signal(signal.SIGINT)  # the transfer has begun, and nobody has its ticket yet
            return SimpleNamespace(wait=lambda: waited.append(number))

    with pytest.raises(KeyboardInterrupt):
        SavedHome(Source(), range(3), BaseFiles((), ())).read(0)
    assert len(waited) == 3


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_scheduler_that_ctrl_c_came_before_is_told_of(tmp_path: Path, is_stepped: bool):
    """Its rates would be a step late."""

    def run(num_steps: int) -> None:
        engine = OffloadEngine(make_model(), nvme_path=tmp_path, durable=1, lr=1e-3)
        with contextlib.suppress(KeyboardInterrupt), engine:
            scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
            engine.register_for_checkpointing(scheduler)
            engine.load_checkpoint()
            for number in range(1, num_steps + 1):
                train(engine, number)
                if number < num_steps or is_stepped:
                    scheduler.step()
            raise KeyboardInterrupt

    run(3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(0)
    told = [each for each in said if "the run ended between step 3 and the StepLR.step()" in str(each.message)]
    assert len(told) == (not is_stepped)
