"""Checkpoints on another file system: training goes on while they are copied, and they are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import forked
import pytest
from runs import backward, bits, least, make_model, train

from offload import OffloadEngine
from offload.cli import main
from swapper import StorageFull, StorageIOError

SHM = Path("/dev/shm")

pytestmark = pytest.mark.skipif(
    not os.access(SHM, os.W_OK) or SHM.stat().st_dev == Path(__file__).stat().st_dev,
    reason="there is no second file system",
)


@pytest.fixture
def elsewhere():
    path = SHM / f"offload-test-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Target:
    """The disk that checkpoints are written to, in the place of ``os.pwrite``: it takes nothing while it is stopped,
    and fails with ``error``."""

    def __init__(self, monkeypatch) -> None:
        self.error: int | None = None
        self.num_writes = 0
        self._goes = threading.Event()
        self._write = os.pwrite
        self._goes.set()
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data, offset: int) -> int:
        if os.fstat(descriptor).st_dev == SHM.stat().st_dev:
            assert self._goes.wait(60)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            self.num_writes += 1
        return self._write(descriptor, data, offset)

    @contextlib.contextmanager
    def stopped(self):
        self._goes.clear()
        try:
            yield
        finally:
            self._goes.set()


@pytest.fixture
def target(monkeypatch):
    return Target(monkeypatch)


def visible(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def start(program: str, *, options: str, elsewhere: Path) -> forked.Program:
    """A process that runs ``program`` with an ``engine`` and the directory ``there``, and a target that is slow:
    ``slow(seconds)`` a part."""
    whole = (
        f"""
import time, os
from pathlib import Path
from offload import OffloadEngine
from runs import make_model, train
write = os.pwrite
def slow(seconds):
    def pwrite(*arguments):
        time.sleep(seconds)
        print("writing", flush=True)
        return write(*arguments)
    os.pwrite = pwrite
there = Path({str(elsewhere)!r})
engine = OffloadEngine(make_model(), lr=1e-3, {options})
"""
        + program
    )
    return forked.Program(whole)


PROGRAMS = {
    "all on nvme": (1.0, {}),
    "some on nvme": (1.25, {"precision": "bf16", "gradient_clipping": 0.5}),
    "durable": (1.0, {"durable": 1}),
    "durable, in memory": (100.0, {"durable": 1}),
}


@pytest.mark.parametrize(("budget", "options"), PROGRAMS.values(), ids=PROGRAMS)
def test_training_goes_on_with_the_same_bits_while_it_is_copied(tmp_path, elsewhere, target, budget, options):
    options = {"lr": 1e-3, **options}
    plain = {name: value for name, value in options.items() if name != "durable"}
    with OffloadEngine(make_model(), **plain) as engine:
        expected, final = train(engine, 6), bits(engine.module)
    memory = int(least(tmp_path, **options) * budget)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=memory, **options) as engine:
        losses = train(engine, 2)
        with target.stopped():
            engine.save_checkpoint(elsewhere, client_state={"seen": 16})
            losses += train(engine, 5)  # each record is written anew, several times
            assert visible(elsewhere) == [] and target.num_writes == 0
        losses += train(engine, 6)
        assert (losses, bits(engine.module).equal(final)) == (expected, True)
    assert visible(elsewhere) == ["latest", "step2"] and not list(elsewhere.glob(".unfinished-*"))
    with OffloadEngine(make_model(1), **plain) as engine:
        assert engine.load_checkpoint(elsewhere) == {"seen": 16}
        assert (train(engine, 6), bits(engine.module).equal(final)) == (expected[2:], True)


def test_accumulated_gradients_are_in_the_copy(tmp_path, elsewhere, target):
    options = {"lr": 1e-3, "gradient_accumulation_steps": 3}

    def go_on(engine: OffloadEngine, first: int, last: int) -> list[float]:
        losses = []
        for index in range(first, last):
            losses.append(backward(engine, index))
            engine.step()
        return losses

    with OffloadEngine(make_model(), **options) as engine:
        expected = go_on(engine, 0, 9)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=least(tmp_path, **options), **options) as engine:
        losses = go_on(engine, 0, 5)
        with target.stopped():
            engine.save_checkpoint(elsewhere)
            assert losses + go_on(engine, 5, 9) == expected
    with OffloadEngine(make_model(1), **options) as engine:
        engine.load_checkpoint(elsewhere)
        assert go_on(engine, 5, 9) == expected[5:]


def test_the_next_save_and_a_load_wait_and_what_is_not_to_stay_goes(tmp_path, elsewhere):
    options = {"lr": 1e-3, "nvme_path": tmp_path, "host_memory": least(tmp_path), "keep_last": 2, "keep_every": 4}
    with OffloadEngine(make_model(), **options) as engine:
        train(engine, 11, lambda: engine.save_checkpoint(elsewhere))
        assert len(engine._session.parts.tiers.store.retained) <= 1
        engine.load_checkpoint(elsewhere)
        assert engine.global_step == 11
        assert visible(elsewhere) == ["latest", "step10", "step11", "step4", "step8"]
        assert engine._session.parts.tiers.store.retained == ()
        train(engine, 12)
        engine.save_checkpoint(tmp_path / "here")
        engine.save_checkpoint(elsewhere, "step11")  # in the place of another
    assert (tmp_path / "here" / "step12" / "data.0").stat().st_nlink == 1  # of the checkpoint alone: the store is gone
    with OffloadEngine(make_model(1), lr=1e-3) as engine:
        for tag, step in (("step4", 4), ("step10", 10), ("step11", 12)):
            engine.load_checkpoint(elsewhere, tag)
            assert engine.global_step == step


@pytest.mark.parametrize("next_call", ["save", "load", "close"])
def test_a_copy_that_fails_is_warned_of_at_once_and_raised_once(tmp_path, elsewhere, target, next_call):
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        expected = train(engine, 5)
    engine = OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(engine, 2)
        engine.save_checkpoint(elsewhere)
        engine._session.checkpoints.generations.wait_for_background()
        target.error = errno.ENOSPC if next_call == "save" else errno.EIO
        train(engine, 3)
        engine.save_checkpoint(elsewhere)
        engine._session.checkpoints.generations.background._thread.join(60)
        assert [str(item.message) for item in told if "step3" in str(item.message)], [str(w.message) for w in told]
        losses += train(engine, 4)[1:]
    assert visible(elsewhere) == ["latest", "step2"] and not list(elsewhere.glob(".unfinished-*"))
    assert engine._session.parts.tiers.store.retained == ()
    kind = StorageFull if next_call == "save" else StorageIOError
    calls = {
        "save": lambda: engine.save_checkpoint(elsewhere),
        "load": lambda: engine.load_checkpoint(elsewhere),
        "close": engine.close,
    }
    with pytest.raises(kind, match=r"step3(.|\n)*training goes on"):
        calls[next_call]()
    if next_call != "close":
        assert train(engine, 5) == expected[4:]
        target.error = None
        engine.save_checkpoint(elsewhere)
        engine.close()
        assert visible(elsewhere) == ["latest", "step2", "step5"]
    engine.close()  # it was said


def test_older_checkpoints_that_cannot_be_looked_at_are_an_error_of_the_engine(tmp_path, elsewhere, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    engine = OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path), keep_last=1)
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(engine, 1)
        monkeypatch.setattr("offload.checkpoint.native.folder.SavingDirectory._retain", fail)
        engine.save_checkpoint(elsewhere)
        with pytest.raises(StorageIOError, match=r"step1(.|\n)*Input/output error(.|\n)*training goes on"):
            engine.wait_for_checkpoint()
        assert visible(elsewhere) == ["latest", "step1"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path, elsewhere, monkeypatch):
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path)) as engine:
        expected = train(engine, 1)
        elsewhere.mkdir()
        real = os.fstatvfs

        def full_there(descriptor):
            found = list(real(descriptor))
            if os.fstat(descriptor).st_dev == SHM.stat().st_dev:
                found[1], found[4] = 1, 4096
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "fstatvfs", full_there)
        generation = engine._session.parts.tiers.store.generation
        with pytest.raises(StorageFull, match=r"[0-9,]+ bytes .* are needed, 4,096 bytes .* are free"):
            engine.save_checkpoint(elsewhere)
        assert engine._session.parts.tiers.store.generation == generation
        assert [entry for entry in elsewhere.iterdir() if not entry.name.startswith(".run-")] == []
        monkeypatch.setattr(os, "fstatvfs", real)
        expected += train(engine, 3)
    with OffloadEngine(make_model(), lr=1e-3) as engine:
        assert train(engine, 3) == expected


def test_without_room_to_hold_the_state_still_training_waits_for_the_copy(tmp_path, elsewhere, monkeypatch):
    memory = least(tmp_path) * 11 // 10  # what rests in it has no room under nvme_path yet
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=memory) as engine:
        train(engine, 2)
        real = os.fstatvfs

        def full_here(descriptor):
            found = list(real(descriptor))
            if os.fstat(descriptor).st_dev == tmp_path.stat().st_dev:
                found[4] = 0
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "fstatvfs", full_here)
        engine.save_checkpoint(elsewhere)
        assert visible(elsewhere) == ["latest", "step2"]
        assert engine._session.checkpoints.generations.background._thread is None  # it was not begun


def test_a_process_that_is_killed_meanwhile_leaves_nothing_that_is_seen(tmp_path, elsewhere):
    program = """
train(engine, 1)
engine.save_checkpoint(there)
train(engine, 2)
engine._session.checkpoints.generations.wait_for_background()
slow(0.01)
engine.save_checkpoint(there)
train(engine, 1000)
"""
    options = f"nvme_path={str(tmp_path)!r}, host_memory={least(tmp_path, durable=1)}, durable=1"
    with start(program, options=options, elsewhere=elsewhere) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert visible(elsewhere) == ["latest", "step1"]
    assert len(list(elsewhere.glob(".unfinished-*"))) == 1
    with OffloadEngine(
        make_model(1), lr=1e-3, nvme_path=tmp_path, durable=1, host_memory=least_durable(tmp_path)
    ) as engine:
        assert engine._session.parts.tiers.store.retained == ()  # what was on its way is given up
        engine.load_checkpoint()
        assert engine.global_step >= 2
        engine.save_checkpoint(elsewhere, "next")
    assert sorted(entry.name for entry in elsewhere.iterdir()) == ["latest", "next", "step1"]


def least_durable(path: Path) -> int:
    other = path / "other"
    other.mkdir()
    try:
        return least(other, durable=1)
    finally:
        shutil.rmtree(other)


def test_the_end_of_a_program_waits_for_the_copy(tmp_path, elsewhere):
    program = """
train(engine, 2)
slow(0.1)
engine.save_checkpoint(there)
print("saved", flush=True)
"""
    options = f"nvme_path={str(tmp_path)!r}, host_memory={least(tmp_path)}"
    with start(program, options=options, elsewhere=elsewhere) as process:
        output, error = process.communicate()
    lines = output.splitlines()
    assert process.returncode == 0, error
    assert lines.count("writing") > 10 and lines.index("saved") < 3
    with OffloadEngine(make_model(1), lr=1e-3) as engine:
        engine.load_checkpoint(elsewhere)
        assert engine.global_step == 2


def test_an_engine_that_is_dropped_finishes_its_copy(tmp_path, elsewhere, target):
    engine = OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path))
    train(engine, 1)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        with target.stopped():
            engine.save_checkpoint(elsewhere)
            thread = engine._session.checkpoints.generations.background._thread
            del engine
            gc.collect()
        thread.join(60)
        gc.collect()
    assert visible(elsewhere) == ["latest", "step1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_a_durable_run_gives_the_copy_up(tmp_path, elsewhere, number):
    program = """
with engine:
    train(engine, 2)
    slow(1)
    engine.save_checkpoint(there)
    train(engine, 1000)
"""
    options = f"nvme_path={str(tmp_path)!r}, host_memory={least(tmp_path, durable=1)}, durable=1"
    with start(program, options=options, elsewhere=elsewhere) as process:
        assert process.stdout.readline() == "writing\n"
        begin = time.monotonic()
        process.send_signal(number)
        _, error = process.communicate()
        assert time.monotonic() - begin < 10, "the whole copy takes longer than 15 s"
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), error
    assert list(elsewhere.iterdir()) == []
    with OffloadEngine(make_model(1), lr=1e-3, nvme_path=tmp_path, durable=1) as engine:
        engine.load_checkpoint()
        assert engine.global_step >= 2


def test_an_interrupt_of_the_wait_at_the_end_gives_the_copy_up(tmp_path, elsewhere):
    program = """
with engine:
    train(engine, 2)
    slow(1)
    engine.save_checkpoint(there)
"""
    options = f"nvme_path={str(tmp_path)!r}, host_memory={least(tmp_path)}"
    with start(program, options=options, elsewhere=elsewhere) as process:
        assert process.stdout.readline() == "writing\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert time.monotonic() - begin < 10
    assert process.returncode == -signal.SIGINT
    assert list(elsewhere.iterdir()) == []


def test_the_command_line_reads_it_as_any_other(tmp_path, elsewhere, capsys):
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, host_memory=least(tmp_path)) as engine:
        train(engine, 2)
        engine.save_checkpoint(elsewhere)
        engine.save_checkpoint(tmp_path / "here")
    found = {}
    for name, path in (("there", elsewhere), ("here", tmp_path / "here")):
        status = main(["inspect", str(path / "step2"), "--verify", "--json"])
        output, error = capsys.readouterr()
        assert status == 0, error
        found[name] = json.loads(output)
        assert main(["export", str(path / "step2"), str(tmp_path / f"{name}.safetensors")]) == 0
        capsys.readouterr()
    assert found["there"]["damage"] == []
    same = ("step", "precision", "parameters", "units", "verified")
    assert [found["there"][key] for key in same] == [found["here"][key] for key in same]
    files = [sorted((tmp_path / f"{name}.safetensors").glob("*.safetensors")) for name in ("there", "here")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]] != []
